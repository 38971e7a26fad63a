"""Mistakes that would train without a word are refused when the program is traced, with both shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fixstep.frontend import infer_template, metrics, trainer
from fixstep.targets.errors import ProgramError

B, C = 16, 3
X = np.ones((B, 4), np.float32)
WEIGHTS = (lambda key: {"w": jnp.ones((4, C))}, lambda params, x: x @ params["w"])


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def labels(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


def model(*shape, activation=lambda x: x):
    """A model whose prediction has a shape."""
    size = int(np.prod(shape[1:], dtype=int))
    return (
        lambda key: {"w": jnp.ones((4, size))},
        lambda params, x: activation((x @ params["w"]).reshape(x.shape[0], *shape[1:])),
    )


def template_of(prediction, loss, target, activation=lambda x: x, **options):
    program = trainer(
        model(*prediction, activation=activation), loss, optax.sgd(0.1), batch=(floats(B, 4), target), **options
    )
    return infer_template(program)


def by_index(p, t):
    """Cross-entropy as it is often written by hand."""
    return -jax.nn.log_softmax(p)[jnp.arange(p.shape[0]), t]


squared = lambda p, t: (p - t) ** 2  # noqa: E731
right = lambda p, t: jnp.mean(p)  # noqa: E731

REFUSED = {
    "column against row": (
        (B, 1),
        squared,
        floats(B),
        r"\(16, 1\) against targets of shape \(16,\) broadcast to \(16, 16\)",
    ),
    "row against column": (
        (B,),
        squared,
        floats(B, 1),
        r"\(16,\) against targets of shape \(16, 1\) broadcast to \(16, 16\)",
    ),
    "optax": ((B, 1), lambda p, t: optax.huber_loss(p, t.astype(p.dtype)), floats(B), r"broadcast to \(16, 16\)"),
    "sigmoid": ((B, 1), optax.sigmoid_binary_cross_entropy, floats(B), r"broadcast to \(16, 16\)"),
    "one output of three": ((B, 1), squared, floats(B, C), r"\(16, 1\) against targets of shape \(16, 3\) broadcast"),
    "one target for three": ((B, C), squared, floats(B, 1), r"\(16, 3\) against targets of shape \(16, 1\) broadcast"),
    "as many as outputs": ((B, B), squared, floats(B), r"\(16, 16\) against targets of shape \(16,\) broadcast"),
    "through time": ((B, 5, 1), squared, floats(B, 5), r"broadcast to \(16, 16, 5\)|raised"),
    "labels as a column": (
        (B, C),
        optax.softmax_cross_entropy_with_integer_labels,
        labels(B, 1),
        r"raised ValueError.*predictions float32\[16, 3\], targets int32\[16, 1\]",
    ),
    "labels as a column by index": ((B, C), by_index, labels(B, 1), r"\(16, 3\) against targets of shape \(16, 1\)"),
    "hand-written accuracy": (
        (B, C),
        lambda p, t: (p.argmax(-1) == t).astype("float32"),
        labels(B, 1),
        r"\(16, 3\) against targets of shape \(16, 1\) broadcast to \(16, 16\)",
    ),
    "shapes that do not go together": ((B, 2), squared, floats(B, C), r"float32\[16, 2\], targets float32\[16, 3\]"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("where", ["loss", "metric"])
def test_what_broadcasts_is_refused(case, where):
    prediction, function, target, expected = REFUSED[case]
    options = {"loss": function} if where == "loss" else {"loss": right, "metrics": {"metric": function}}
    with pytest.raises(ProgramError, match=rf"(?s){where}.*{expected}"):
        template_of(prediction, target=target, **options)


TAKEN = {
    "one shape": ((B, C), squared, floats(B, C)),
    "reshaped": ((B, 1), lambda p, t: (p[:, 0] - t) ** 2, floats(B)),
    "labels": ((B, C), optax.softmax_cross_entropy_with_integer_labels, labels(B)),
    "labels by index": ((B, C), by_index, labels(B)),
    "labels over time": ((B, 5, C), optax.softmax_cross_entropy_with_integer_labels, labels(B, 5)),
    "one-hot of labels": ((B, C), lambda p, t: optax.softmax_cross_entropy(p, jax.nn.one_hot(t, C)), labels(B)),
    "a column that is taken off": ((B, C), lambda p, t: by_index(p, t[:, 0]), labels(B, 1)),
    "weights for each example": ((B, C), lambda p, t: p * t, floats(B, 1)),
    "pairs of one shape": ((B, C), lambda p, t: ((p[:, None] - t[None]) ** 2).sum(-1), floats(B, C)),
    "margins": ((B, C), lambda p, t: jnp.where(t[:, None] == jnp.arange(C), p, -p).sum(-1), labels(B)),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_goes_together_is_taken(case):
    prediction, loss, target = TAKEN[case]
    assert template_of(prediction, loss, target).metric_leaves[0].path == "loss"


LOGITS = {
    "softmax": (jax.nn.softmax, optax.softmax_cross_entropy_with_integer_labels, "softmax"),
    "softmax over time": (
        lambda x: jax.nn.softmax(x, axis=1),
        optax.softmax_cross_entropy_with_integer_labels,
        "softmax",
    ),
    "softmax by hand": (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), by_index, "softmax"),
    "softmax in half": (
        lambda x: jax.nn.softmax(x.astype("float16")).astype("float32"),
        optax.softmax_cross_entropy_with_integer_labels,
        "softmax",
    ),
    "softmax under jit": (jax.jit(jax.nn.softmax), by_index, "softmax"),
    "sigmoid": (jax.nn.sigmoid, lambda p, t: optax.sigmoid_binary_cross_entropy(p, jax.nn.one_hot(t, C)), "sigmoid"),
    "sigmoid in softmax": (jax.nn.sigmoid, by_index, "sigmoid"),
}


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize("precision", [None, "mixed_bf16"])
def test_probabilities_are_no_logits(case, precision):
    activation, loss, made = LOGITS[case]
    expected = rf"loss: it takes logits .* of shape \(16, 3\) are the output of a {made} already"
    with pytest.raises(ProgramError, match=expected):
        template_of((B, C), loss, labels(B), activation, precision=precision)


@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        (jax.nn.softmax, lambda p, t: -jnp.log(p[jnp.arange(B), t] + 1e-6)),
        (jax.nn.softmax, lambda p, t: optax.kl_divergence(jnp.log(p), jax.nn.one_hot(t, C))),
        (jax.nn.softmax, lambda p, t: jnp.square(p - jax.nn.one_hot(t, C))),
        (jax.nn.sigmoid, lambda p, t: jnp.square(p - jax.nn.one_hot(t, C))),
        (jax.nn.log_softmax, optax.softmax_cross_entropy_with_integer_labels),
        (lambda x: x / x.sum(-1, keepdims=True), optax.softmax_cross_entropy_with_integer_labels),
        (lambda x: 8 * jax.nn.softmax(x), optax.softmax_cross_entropy_with_integer_labels),
    ],
)
def test_probabilities_may_go_into_losses_that_take_them(activation, loss):
    assert template_of((B, C), loss, labels(B), activation).metric_leaves[0].path == "loss"


def test_the_metrics_of_fixstep_check_their_shapes():
    with pytest.raises(ProgramError, match=r"accuracy: expected targets of shape \(16,\), got \(16, 1\)"):
        template_of((B, C), right, labels(B, 1), metrics={"accuracy": metrics.accuracy})
