"""The metrics of `fixstep.frontend.metrics`: over an epoch what numpy says of all its examples at once."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _training import compiled

from fixstep.frontend import metrics, trainer
from fixstep.targets.errors import ProgramError

B, C, BATCHES = 8, 4, 5
rng = np.random.default_rng(1)
SCORES = rng.normal(size=(BATCHES, B, C)).astype(np.float32)
LABELS = rng.integers(0, C, (BATCHES, B)).astype(np.int32)
FLAT, FLAT_LABELS = SCORES.reshape(-1, C), LABELS.reshape(-1)
FOUND, REAL = FLAT.argmax(-1) == 1, FLAT_LABELS == 1
IDENTITY = (lambda key: {"w": jnp.zeros(())}, lambda params, x: x + params["w"].astype(x.dtype))


def run(function_metrics, inputs, targets, tmp_path):
    program = trainer(
        IDENTITY, lambda p, t: jnp.mean(p) * 0, optax.sgd(0.1), batch=(inputs[0], targets[0]), metrics=function_metrics
    )
    session = compiled(program, tmp_path)
    for batch in zip(inputs, targets, strict=True):
        session.evaluate(batch)
    return session


def test_metrics_of_classes(tmp_path):
    session = run(
        {
            "accuracy": metrics.accuracy,
            "top_2": metrics.top_k(2),
            "precision": metrics.precision(label=1),
            "recall": metrics.recall(label=1),
            "f1": metrics.f1(label=1),
            "counts": metrics.confusion(label=1),
            "table": metrics.confusion_matrix,
            "perplexity": metrics.perplexity,
            "own": lambda p, t: p.max(-1),
        },
        SCORES,
        LABELS,
        tmp_path,
    )
    averages, totals = session.averages("evaluate"), session.totals("evaluate")
    tp, fp, fn = (FOUND & REAL).sum(), (FOUND & ~REAL).sum(), (~FOUND & REAL).sum()
    order = np.argsort(-FLAT, -1)
    cross_entropy = np.log(np.exp(FLAT.astype(float)).sum(-1)) - FLAT[np.arange(len(FLAT)), FLAT_LABELS]
    assert averages["accuracy"] == (FLAT.argmax(-1) == FLAT_LABELS).mean()
    assert averages["top_2"] == (order[:, :2] == FLAT_LABELS[:, None]).any(-1).mean()
    assert averages["precision"] == tp / (tp + fp)
    assert averages["recall"] == tp / (tp + fn)
    assert averages["f1"] == 2 * tp / (2 * tp + fp + fn)
    assert {name: int(totals[f"counts/{name}"]) for name in ("tp", "fp", "fn", "tn")} == {
        "tp": tp,
        "fp": fp,
        "fn": fn,
        "tn": len(FLAT) - tp - fp - fn,
    }
    table = np.zeros((C, C), int)
    np.add.at(table, (FLAT_LABELS, FLAT.argmax(-1)), 1)
    np.testing.assert_array_equal(totals["table"], table)
    assert averages["perplexity"] == pytest.approx(np.exp(cross_entropy.mean()), rel=1e-5)
    assert averages["own"] == pytest.approx(FLAT.max(-1).mean(), rel=1e-6)
    # A mean over the batches of their ratios is another number.
    batches = [(s.argmax(-1) == 1, lab == 1) for s, lab in zip(SCORES, LABELS, strict=True)]
    assert np.nanmean([(f & r).sum() / max(f.sum(), 1) for f, r in batches]) != averages["precision"]


def macro(found, real, weights):
    """The mean over the classes that occur; `weights` are of found and of real."""
    ratios = []
    for label in np.union1d(found, real):
        f, r = found == label, real == label
        weight = weights[0] * f.sum() + weights[1] * r.sum()
        ratios.append(sum(weights) * (f & r).sum() / weight if weight else 0)
    return np.mean(ratios)


def test_averages_over_classes(tmp_path):
    """Fails if the mean over the batches is taken, or if a class that is never found is left out or is no number."""
    scores, labels = SCORES.copy(), LABELS.copy()
    scores[..., 3] = -9  # never found, and an example has it
    scores = np.concatenate([scores, np.full((BATCHES, B, 1), -9, np.float32)], -1)  # neither found nor had
    made = {name: getattr(metrics, name)(average="macro") for name in ("precision", "recall", "f1")}
    session = run(made, scores, labels, tmp_path)
    found, real = scores.argmax(-1), labels
    averages, one = session.averages("evaluate"), session.evaluate((scores[0], labels[0]))
    for name, weights in {"precision": (1, 0), "recall": (0, 1), "f1": (1, 1)}.items():
        assert averages[name] == pytest.approx(macro(found, real, weights), rel=1e-12)
        assert float(one[name]) == pytest.approx(macro(found[0], real[0], weights), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"average": "micro"}, "recall: expected average='macro', or none, got 'micro'"),
        ({"average": "macro", "label": 1}, "recall: label=1 names one class, and average='macro' all of them"),
    ],
)
def test_an_average_is_refused(arguments, expected):
    with pytest.raises(ProgramError, match=expected):
        metrics.recall(**arguments)


def test_metrics_of_two_outcomes_and_of_numbers(tmp_path):
    scores, outcomes = SCORES[..., 0], (LABELS > 1).astype(np.float32)
    session = run(
        {
            "precision": metrics.precision(),
            "recall": metrics.recall(threshold=0.5),
            "mae": metrics.mae,
            "mse": metrics.mse,
        },
        scores,
        outcomes,
        tmp_path,
    )
    averages = session.averages("evaluate")
    real = outcomes > 0
    assert averages["precision"] == ((scores > 0) & real).sum() / (scores > 0).sum()
    assert averages["recall"] == ((scores > 0.5) & real).sum() / real.sum()
    assert averages["mae"] == pytest.approx(np.abs(scores - outcomes).mean(), rel=1e-6)
    assert averages["mse"] == pytest.approx(((scores - outcomes) ** 2).mean(), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_half_precision_values_are_summed_in_float32(dtype, tmp_path):
    """Fails if sums are of the values' type: in float16 there is no 72000, and 4096 + 1 is 4096."""
    inputs = np.full((600, B), 9000, dtype)
    session = run({"mean": lambda p, t: p, "one": lambda p, t: p / p}, inputs, inputs, tmp_path)
    assert session.averages("evaluate")["mean"] == 9000
    assert session.averages("evaluate")["one"] == 1


def test_the_loss_shown_is_that_of_all_batches_to_the_last(tmp_path):
    """Fails if the loss lags by a batch."""
    program = trainer(IDENTITY, lambda p, t: p, optax.sgd(0.0), batch=(SCORES[0], LABELS[0]))
    session = compiled(program, tmp_path)
    for number, batch in enumerate(zip(SCORES, LABELS, strict=True), start=1):
        metric = session.step(batch)["loss"]
        assert float(metric) == pytest.approx(batch[0].mean(), abs=1e-6)
        assert session.averages()["loss"] == pytest.approx(SCORES[:number].mean(), abs=1e-6)


def test_one_hot_labels_have_an_accuracy():
    ratio = metrics.accuracy(FLAT, np.eye(C, dtype=np.float32)[FLAT_LABELS])
    assert float(ratio) == pytest.approx((FLAT.argmax(-1) == FLAT_LABELS).mean())


def test_top_k_needs_a_k():
    with pytest.raises(ProgramError, match="top_k: expected k >= 1, got 0"):
        metrics.top_k(0)
