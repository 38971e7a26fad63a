"""Metrics for `trainer(metrics=...)`: functions of (prediction, target), and functions that make such ones.

Shapes: B examples, C classes. Scores are (B, ..., C); the larger, the likelier, logits or probabilities. Labels are
integers (B, ...) below C. What has two outcomes has scores and labels of one shape.

Each counts in integers or sums in at least float32, over all examples of an epoch; a ratio is taken of the sums. A
metric of your own may return an array with a value for each example, a scalar (which weighs as much as the batch has
examples), a dict of metrics, or `Ratio`, `ExpRatio`, `MeanRatio` and `Total`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fixstep.frontend._sums import ExpRatio, MeanRatio, Ratio, Total
from fixstep.targets.errors import ProgramError

__all__ = [
    "ExpRatio",
    "MeanRatio",
    "Ratio",
    "Total",
    "accuracy",
    "confusion",
    "confusion_matrix",
    "f1",
    "mae",
    "mse",
    "perplexity",
    "precision",
    "recall",
    "top_k",
]

Metric = Callable[[Any, Any], Any]


def accuracy(scores: Any, labels: Any) -> Ratio:
    """How many examples have the largest score at their label.

    Args:
        scores: (B, ..., C).
        labels: integers (B, ...), or one-hot (B, ..., C).
    """
    if scores.shape == labels.shape and jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.argmax(-1)
    _expect("accuracy", scores.shape[:-1], labels)
    return _share(scores.argmax(-1) == labels)


def top_k(k: int) -> Metric:
    """How many examples have fewer than k scores above that of their label.

    Args:
        k: from 1.
    """
    if k < 1:
        raise ProgramError(f"top_k: expected k >= 1, got {k}")

    def metric(scores: Any, labels: Any) -> Ratio:
        _expect(f"top_{k}", scores.shape[:-1], labels)
        own = jnp.take_along_axis(scores, labels[..., None].astype(jnp.int32), axis=-1)
        return _share(jnp.sum((scores > own).astype(jnp.int32), -1) < k)

    return metric


def precision(*, threshold: float = 0.0, label: int | None = None, average: str | None = None) -> Metric:
    """How many of the examples found positive are.

    Args:
        threshold: scores above it are positive: 0 for logits, 0.5 for probabilities.
        label: the class that is positive, where scores are (B, ..., C); else scores and labels have one shape.
        average: `macro`, where scores are (B, ..., C): the mean over the classes, of those that any example has or is
            found in; a class without one that is found counts as 0.
    """
    _check_average("precision", label, average)

    def metric(scores: Any, labels: Any) -> Ratio | MeanRatio:
        n = _counts("precision", scores, labels, threshold, label, average)
        return _ratio(n.hits, n.found, n.either)

    return metric


def recall(*, threshold: float = 0.0, label: int | None = None, average: str | None = None) -> Metric:
    """How many of the positive examples are found. Arguments as of `precision`."""
    _check_average("recall", label, average)

    def metric(scores: Any, labels: Any) -> Ratio | MeanRatio:
        n = _counts("recall", scores, labels, threshold, label, average)
        return _ratio(n.hits, n.real, n.either)

    return metric


def f1(*, threshold: float = 0.0, label: int | None = None, average: str | None = None) -> Metric:
    """The harmonic mean of precision and recall. Arguments as of `precision`."""
    _check_average("f1", label, average)

    def metric(scores: Any, labels: Any) -> Ratio | MeanRatio:
        n = _counts("f1", scores, labels, threshold, label, average)
        return _ratio(2 * n.hits, n.found + n.real, n.either)

    return metric


def confusion(*, threshold: float = 0.0, label: int | None = None) -> Metric:
    """The counts `tp`, `fp`, `fn`, `tn`. `threshold` and `label` as of `precision`."""

    def metric(scores: Any, labels: Any) -> dict[str, Total]:
        found, real = _positives("confusion", scores, labels, threshold, label, None)
        cells = {"tp": found & real, "fp": found & ~real, "fn": ~found & real, "tn": ~found & ~real}
        return {name: Total(_count(cell)) for name, cell in cells.items()}

    return metric


def confusion_matrix(scores: Any, labels: Any) -> Total:
    """The counts of each pair (label, class with the largest score): (C, C), in `session.totals()`."""
    _expect("confusion_matrix", scores.shape[:-1], labels)
    classes = jnp.arange(scores.shape[-1])
    rows = (labels.reshape(-1, 1) == classes).astype(jnp.int32)
    columns = (scores.argmax(-1).reshape(-1, 1) == classes).astype(jnp.int32)
    return Total(jnp.sum(rows[:, :, None] * columns[:, None, :], axis=0))


def mae(prediction: Any, target: Any) -> Ratio:
    """The mean of absolute differences; both have one shape."""
    return _mean("mae", prediction, target, jnp.abs)


def mse(prediction: Any, target: Any) -> Ratio:
    """The mean of squared differences; both have one shape."""
    return _mean("mse", prediction, target, jnp.square)


def perplexity(logits: Any, labels: Any) -> ExpRatio:
    """The exponential of the mean cross-entropy.

    Args:
        logits: (B, ..., C).
        labels: integers (B, ...).
    """
    _expect("perplexity", logits.shape[:-1], labels)
    scores = jax.nn.log_softmax(_wide(logits))
    own = jnp.take_along_axis(scores, labels[..., None].astype(jnp.int32), axis=-1)
    return ExpRatio(-jnp.sum(own), _size(labels))


def _mean(name: str, prediction: Any, target: Any, of: Callable[[Any], Any]) -> Ratio:
    _expect(name, prediction.shape, target)
    return Ratio(jnp.sum(of(_wide(prediction) - _wide(target))), _size(target))


def _check_average(name: str, label: int | None, average: str | None) -> None:
    if average not in (None, "macro"):
        raise ProgramError(f"{name}: expected average='macro', or none, got {average!r}")
    if average and label is not None:
        raise ProgramError(
            f"{name}: label={label} names one class, and average={average!r} all of them; give one of them"
        )


def _positives(
    name: str, scores: Any, labels: Any, threshold: float, label: int | None, average: str | None
) -> tuple[Any, Any]:
    """Which examples are found positive, and which are; for an average one for each class, in the last axis."""
    if label is None and average is None:
        _expect(name, scores.shape, labels)
        return scores > threshold, labels > 0.5 if jnp.issubdtype(labels.dtype, jnp.floating) else labels != 0
    _expect(name, scores.shape[:-1], labels)
    if average:
        classes = jnp.arange(scores.shape[-1])
        return scores.argmax(-1)[..., None] == classes, labels[..., None] == classes
    return scores.argmax(-1) == label, labels == label


class _Counts(NamedTuple):
    """Numbers of examples: found positive that are, found positive, positive, and either; or (C,), for each class."""

    hits: Any
    found: Any
    real: Any
    either: Any


def _counts(name: str, scores: Any, labels: Any, threshold: float, label: int | None, average: str | None) -> _Counts:
    found, real = _positives(name, scores, labels, threshold, label, average)
    count = _count_classes if average else _count
    return _Counts(*map(count, (found & real, found, real, found | real)))


def _ratio(total: Any, weight: Any, counted: Any) -> Ratio | MeanRatio:
    """A ratio of counts, or the mean over the classes of such."""
    return MeanRatio(total, weight, counted) if total.ndim else Ratio(total, weight)


def _expect(name: str, shape: Any, target: Any) -> None:
    if tuple(target.shape) != tuple(shape):
        raise ProgramError(f"{name}: expected targets of shape {tuple(shape)}, got {tuple(target.shape)}")


def _share(right: Any) -> Ratio:
    return Ratio(_count(right), _size(right))


def _count(chosen: Any) -> Any:
    return jnp.sum(chosen.astype(jnp.int32), dtype=jnp.int32)


def _count_classes(chosen: Any) -> Any:
    return jnp.sum(chosen.astype(jnp.int32), axis=tuple(range(chosen.ndim - 1)), dtype=jnp.int32)


def _size(array: Any) -> Any:
    return jnp.asarray(array.size, jnp.int32)


def _wide(array: Any) -> Any:
    wide = array.dtype if array.dtype.itemsize >= 4 and jnp.issubdtype(array.dtype, jnp.floating) else jnp.float32
    return array.astype(wide)
