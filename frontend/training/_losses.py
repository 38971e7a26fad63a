"""Losses and metrics as sums: a total, and the number of examples that it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.frontend._sums import Ratio, Sums
from fixstep.frontend.training._checks import refuse_mistakes
from fixstep.frontend.training._precision import widen
from fixstep.targets.errors import ProgramError

# A function of (prediction, target): an array with a value for each example, a scalar, or sums of its own.
Measure = Callable[[Any, Any], Any]
Loss = Measure | Sequence[tuple[float, Measure]]


def problems_of(loss: Any, metrics: Mapping[str, Any]) -> list[str]:
    """What is wrong with a loss and metrics before they are called."""
    problems = []
    if isinstance(loss, tuple | list):
        pairs = [item for item in loss if isinstance(item, tuple | list) and len(item) == 2]
        if not loss or len(pairs) != len(loss) or not all(_is_number(w) and callable(f) for w, f in pairs):
            problems.append(
                f"loss: expected a function, or a list of pairs (weight, function), one per output, got {loss!r:.80}"
            )
    elif not callable(loss):
        problems.append(f"loss: expected a function (prediction, target) -> scalar, got {loss!r:.80}")
    problems += [
        f"{name}: expected a function (prediction, target) -> scalar, got {function!r:.80}"
        for name, function in metrics.items()
        if not callable(function)
    ]
    taken = ["loss", *(part_names(loss) if isinstance(loss, tuple | list) else [])]
    problems += [
        f"metrics: {name!r} is the name of the loss itself; give this metric another name"
        for name in taken
        if name in metrics
    ]
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def measure_loss(loss: Loss, prediction: Any, target: Any, kinds: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The loss of a batch: its mean, at least in float32, of how many examples that is, and its parts as metrics.

    Args:
        loss: a function, or one for each output with its weight.
        prediction: what the model returned.
        target: what it should have.
        kinds: for each array of the prediction `softmax`, `sigmoid` or an empty text, by what it is made of.

    Raises:
        ProgramError: if prediction and target do not go together, with both shapes.
    """
    if callable(loss):
        return *_mean("loss", loss, prediction, target, kinds), {}
    for what, tree in (("predictions", prediction), ("targets", target)):
        if not isinstance(tree, tuple | list) or len(tree) != len(loss):
            got = f"{len(tree)} of them" if isinstance(tree, tuple | list) else f"a {type(tree).__name__}"
            raise ProgramError(f"loss: expected a sequence of {len(loss)} {what}, one for each weight, got {got}")
    parts = [_mean(f"loss[{i}]", function, prediction[i], target[i], kinds[i]) for i, (_, function) in enumerate(loss)]
    total = sum(weight * mean for (weight, _), (mean, _) in zip(loss, parts, strict=True))
    return total, _examples(target), {name: weighted(*part) for name, part in zip(part_names(loss), parts, strict=True)}


def part_names(loss: Loss) -> list[str]:
    """The metrics that the losses of several outputs are shown as."""
    return [] if callable(loss) else [f"loss_{i}" for i in range(len(loss))]


def _mean(name: str, function: Measure, prediction: Any, target: Any, kinds: Any) -> tuple[Any, Any]:
    values = _called(name, function, prediction, target, kinds)
    if isinstance(values, Sums) or not hasattr(values, "shape"):
        raise ProgramError(f"{name}: expected it to return an array or a scalar, got a {type(values).__name__}")
    values = widen(values)
    return jnp.mean(values), (values.size if values.shape else _examples(target))


def measure_metric(name: str, function: Measure, prediction: Any, target: Any, kinds: Any) -> Any:
    """A metric of a batch as sums, or a dict of such.

    Raises:
        ProgramError: as `measure_loss`.
    """
    return _as_sums(name, _called(name, function, prediction, target, kinds), target)


def _as_sums(name: str, values: Any, target: Any) -> Any:
    if isinstance(values, Sums):
        return values
    if isinstance(values, Mapping):
        return {key: _as_sums(f"{name}/{key}", value, target) for key, value in values.items()}
    values = widen(jnp.asarray(values))
    if values.dtype == jnp.bool_:
        values = values.astype(jnp.int32)
    if not values.shape:
        return weighted(values, _examples(target))
    return Ratio(jnp.sum(values), count(values.size))


def weighted(mean: Any, examples: Any) -> Ratio:
    """The sums of a mean over a number of examples."""
    return Ratio(mean * count(examples).astype(mean.dtype), count(examples))


def count(size: Any) -> Any:
    """A number of examples as a scalar; the size of a batch may not be known before it comes."""
    return jnp.asarray(size, jnp.int32)


def _examples(target: Any) -> Any:
    return next((leaf.shape[0] for leaf in jax.tree.leaves(target) if leaf.shape), 1)


def _called(name: str, function: Measure, prediction: Any, target: Any, kinds: Any) -> Any:
    refuse_mistakes(name, function, prediction, target, kinds)
    return function(prediction, target)
