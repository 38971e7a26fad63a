"""A program from a model, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fixstep.frontend._captures import equations
from fixstep.frontend._program import Program
from fixstep.targets.errors import ProgramError

Loss = Callable[[Any, Any], Any]


class Optimizer(Protocol):
    """What is needed of an optimizer; an `optax.GradientTransformation` is one."""

    def init(self, params: Any, /) -> Any:
        """The optimizer's first state."""

    def update(self, updates: Any, state: Any, params: Any = None, /) -> Any:
        """The pair (updates to add to the parameters, new state)."""


def trainer(
    model: Any,
    loss: Loss,
    optimizer: Optimizer,
    *,
    batch: tuple[Any, Any],
    metrics: Mapping[str, Loss] | None = None,
    name: str | None = None,
) -> Program:
    """Build a program that trains a model by gradient descent.

    The state is `{"params": ..., "opt_state": ...}`. `step` and `evaluate` return the loss and the metrics, both of
    the parameters before the update; `predict` applies the model to inputs.

    Args:
        model: a pair `(init, apply)` with `init(key) -> params` and `apply(params, inputs) -> prediction`, or a Flax
            linen module without mutable collections.
        loss: `(prediction, target) -> loss`, per example (then its mean is taken) or a scalar.
        optimizer: an `optax.GradientTransformation`.
        batch: an example `(inputs, targets)`, arrays or `jax.ShapeDtypeStruct`.
        metrics: further functions like `loss`, by the name of the metric.
        name: the name of the artifact.

    Raises:
        ProgramError: if an argument is not what it must be; and when the program is traced, if a loss or metric
            broadcasts predictions of shape (n, 1) against targets of shape (n,), or the reverse.
    """
    functions = {"loss": loss, **dict(metrics or {})}
    _check(functions, optimizer, batch, metrics)
    make_params, apply = _model_functions(model, batch[0])

    def init(key: Any) -> dict[str, Any]:
        params = make_params(key)
        return {"params": params, "opt_state": optimizer.init(params)}

    def measure(params: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        inputs, target = batch
        prediction = apply(params, inputs)
        values = {key: _mean_of(key, function, prediction, target) for key, function in functions.items()}
        return values["loss"], values

    def step(state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        gradient = jax.grad(measure, has_aux=True)
        gradients, values = gradient(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": _add(state["params"], updates), "opt_state": opt_state}, values

    def evaluate(state: Any, batch: Any) -> dict[str, Any]:
        return measure(state["params"], batch)[1]

    def predict(state: Any, inputs: Any) -> Any:
        return apply(state["params"], inputs)

    return Program(init=init, step=step, batch=batch, evaluate=evaluate, predict=predict, inputs=batch[0], name=name)


def _check(functions: Mapping[str, Any], optimizer: Any, batch: Any, metrics: Mapping[str, Any] | None) -> None:
    problems = [
        f"{name}: expected a function (prediction, target) -> scalar, got {function!r:.80}"
        for name, function in functions.items()
        if not callable(function)
    ]
    if metrics and "loss" in metrics:
        problems.append("metrics: 'loss' is the name of the loss itself; give this metric another name")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        problems.append(f"optimizer: expected an optax.GradientTransformation, got {optimizer!r:.80}")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        problems.append(f"batch: expected a pair (inputs, targets), got a {type(batch).__name__}")
    if problems:
        raise ProgramError("\n".join(problems))


def _model_functions(model: Any, inputs: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """`init(key) -> params` and `apply(params, inputs) -> prediction` of a model."""
    if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
        return model[0], model[1]
    if not (callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None))):
        raise ProgramError(f"model: expected a pair (init, apply) or a Flax linen module, got {model!r:.80}")

    def init(key: Any) -> Any:
        example = jax.tree.map(lambda leaf: jnp.zeros(np.shape(leaf), leaf.dtype), inputs)
        variables = dict(model.init(key, example))
        mutable = sorted(variables.keys() - {"params"})
        if mutable:
            raise ProgramError(
                f"model: expected a module whose only collection is 'params', got {', '.join(map(repr, mutable))} too; "
                "write a Program whose step carries them in its state"
            )
        return variables.get("params", {})

    return init, lambda params, inputs: model.apply({"params": params}, inputs)


def _mean_of(name: str, function: Loss, prediction: Any, target: Any) -> Any:
    _refuse_broadcast(name, function, prediction, target)
    return jnp.mean(function(prediction, target))


def _refuse_broadcast(name: str, function: Loss, prediction: Any, target: Any) -> None:
    """Refuse a difference of shapes (n, 1) and (n,): it is (n, n), every prediction meets every target."""
    shape, other = getattr(prediction, "shape", None), getattr(target, "shape", None)
    if shape is None or other is None or (shape != (*other, 1) and other != (*shape, 1)):
        return
    try:
        table = np.broadcast_shapes(shape, other)
    except ValueError:
        return
    if table in (shape, other):
        return
    made = {v.aval.shape for e in equations(jax.make_jaxpr(function)(prediction, target).jaxpr) for v in e.outvars}
    if table in made:
        raise ProgramError(
            f"{name}: predictions of shape {shape} against targets of shape {other} broadcast to {table}; "
            "give both one shape, for example with prediction.reshape(target.shape)"
        )


def _add(params: Any, updates: Any) -> Any:
    """The sum of parameters and updates, each in its parameter's dtype."""
    return jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), params, updates)
