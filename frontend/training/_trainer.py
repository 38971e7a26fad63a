"""A program from a model, a loss and an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fixstep.frontend._lines import describe_error
from fixstep.frontend._program import Program
from fixstep.frontend._x64 import WIDE_DTYPES, truncations, user_setting, x64_context
from fixstep.frontend.training._checks import output_kinds
from fixstep.frontend.training._losses import Loss, Measure, count, measure_loss, measure_metric, problems_of, weighted
from fixstep.frontend.training._models import Model, adapt, dropout_key
from fixstep.frontend.training._precision import Precision, cast, cast_like, parse_precision, widen
from fixstep.frontend.training._scale import DynamicScale, all_finite, parse_scale
from fixstep.frontend.training._trainable import Trainable, merge, parse_trainable, split
from fixstep.frontend.training._update import Optimizer, Update, choose
from fixstep.targets.errors import FixstepError, ProgramError


def trainer(
    model: Any,
    loss: Loss,
    optimizer: Optimizer,
    *,
    batch: tuple[Any, Any],
    metrics: Mapping[str, Measure] | None = None,
    precision: Precision | str | None = None,
    loss_scale: DynamicScale | float | str | None = None,
    accumulate: int = 1,
    trainable: Trainable | None = None,
    seed: int = 0,
    name: str | None = None,
) -> Program:
    """Build a program that trains a model by gradient descent.

    The state is `{"params": ..., "opt_state": ...}`, and where they are needed `model_state` (statistics of
    normalisation, counters), `key` (for dropout), `loss_scale`, `accumulated`. `step` and `evaluate` return the loss
    and the metrics, both of the parameters before the update; `step` with the model in training mode, `evaluate` and
    `predict` in inference mode.

    Args:
        model: a pair `(init, apply)` with `init(key) -> params`, or the first parameters in place of `init`, and
            `apply(params, inputs) -> prediction`, which may also take `key` and `training`; a Flax linen module, or
            `(variables, module)`; an nnx module; an Equinox module, or `(module, state)`, applied to each example; or
            a function of a key that makes one of the last two.
        loss: `(prediction, target) -> loss`, for each example (then its mean is taken) or a scalar; or a list of
            `(weight, function)`, one for each output of the model, each also a metric, `loss_0`, without its weight.
        optimizer: an `optax.GradientTransformation`.
        batch: an example `(inputs, targets)`, arrays or `jax.ShapeDtypeStruct`.
        metrics: functions like `loss` by name; see `fixstep.frontend.metrics`.
        precision: `f32`, `bf16`, `f16`, `f64`, `mixed_bf16`, `mixed_f16`, or a `Precision`. Statistics, gradients and
            the optimizer's moments are then at least float32. None leaves all types as they are.
        loss_scale: a number, `dynamic`, or a `DynamicScale`. Updates whose gradients are not finite are skipped.
        accumulate: every so many calls there is one update, by the gradient of all their examples together.
        trainable: which parameters are trained: a function of the leaf path (`params/dense/kernel`), or patterns with
            `*`. The others stay as they are, bit for bit, and the optimizer keeps nothing for them.
        seed: of the key for dropout, where the first parameters are given; otherwise the seed of `load` makes all.
        name: the name of the artifact.

    Raises:
        ProgramError: if an argument is not what it must be, or the model raises; and when the program is traced, if a
            loss or metric broadcasts predictions against targets, or takes logits and is given probabilities.
    """
    measures = dict(metrics or {})
    _check(loss, measures, optimizer, batch, accumulate)
    policy = parse_precision(precision)
    scale = parse_scale(loss_scale)
    try:
        builder = _prepare(model, batch[0], policy, trainable)
    except FixstepError:
        raise
    except Exception as exc:
        raise ProgramError(f"model raised {describe_error(exc)}") from exc
    update = Update(optimizer, scale, accumulate, wide=policy is not None or scale is not None)
    training = _Training(builder, loss, measures, update)
    return Program(
        init=training.init if not builder.model.given else _given(training, seed, batch),
        step=training.step,
        batch=batch,
        evaluate=training.evaluate,
        predict=training.predict,
        inputs=batch[0],
        name=name,
    )


def _check(loss: Any, metrics: Mapping[str, Any], optimizer: Any, batch: Any, accumulate: Any) -> None:
    problems = problems_of(loss, metrics)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        problems.append(f"optimizer: expected an optax.GradientTransformation, got {optimizer!r:.80}")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        problems.append(f"batch: expected a pair (inputs, targets), got a {type(batch).__name__}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        problems.append(f"accumulate: expected a number of calls, 1 or more, got {accumulate!r}")
    if problems:
        raise ProgramError("\n".join(problems))


@dataclasses.dataclass(frozen=True, eq=False)
class _Prepared:
    """A model with its policy, traced once.

    Attributes:
        model: the model.
        policy: the precision.
        chosen: which leaf paths are trained.
        draws: whether it uses a key in training.
        like_state: a tree like its state; without leaves where it has none.
        kinds: a tree like the prediction: of what each array is made, `softmax`, `sigmoid` or an empty text.
    """

    model: Model
    policy: Precision | None
    chosen: Callable[[str], bool]
    draws: bool
    like_state: Any
    kinds: Any

    @property
    def has_state(self) -> bool:
        """Whether the model has a state that the training state carries."""
        return bool(jax.tree.leaves(self.like_state))

    def state_in(self, state: Any) -> Any:
        """The model's part of a training state."""
        return state["model_state"] if self.has_state else self.like_state

    def first(self, key: Any) -> tuple[Any, Any]:
        """First parameters and model state, in the policy's types."""
        params, state = self.model.init(key)
        if self.policy is None:
            return params, state
        return cast(params, self.policy.params), widen(state)

    def apply(self, params: Any, state: Any, inputs: Any, key: Any, *, training: bool) -> tuple[Any, Any]:
        """Prediction and new model state."""
        if self.policy is not None:
            params, inputs = cast(params, self.policy.compute), cast(inputs, self.policy.compute)
        prediction, after = self.model.apply(params, state, inputs, key, training)
        if self.policy is not None:
            prediction, after = cast(prediction, self.policy.output), cast_like(after, state)
        return prediction, after


def _prepare(model: Any, inputs: Any, policy: Precision | None, trainable: Trainable | None) -> _Prepared:
    wide = policy is not None and policy.wide
    wide |= any(str(leaf.dtype) in WIDE_DTYPES for leaf in jax.tree.leaves(inputs))
    # Only structures are looked at here: what JAX has to say of 64-bit types comes when the program is traced.
    with x64_context(user_setting() or wide), truncations():
        adapted = adapt(model, inputs)
        key = jax.random.key(0)
        params, state = jax.eval_shape(adapted.init, key)
        chosen = parse_trainable(trainable, params)
        prepared = _Prepared(adapted, policy, chosen, True, state, None)
        trees: list[Any] = []

        def apply(params: Any, state: Any, inputs: Any, key: Any) -> Any:
            prediction, after = prepared.apply(params, state, inputs, key, training=True)
            trees[:] = [jax.tree.structure(prediction)]
            return jax.tree.leaves((prediction, after))

        closed = jax.make_jaxpr(apply)(params, state, jax.tree.map(_struct, inputs), key)
    draws = closed.jaxpr.invars[-1] in _used(closed.jaxpr)
    kinds = jax.tree.unflatten(trees[0], output_kinds(closed)[: trees[0].num_leaves])
    return dataclasses.replace(prepared, draws=draws, kinds=kinds)


def _struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _used(jaxpr: Any) -> set[Any]:
    """The variables that the outputs of a jaxpr depend on."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed |= {v for v in equation.invars if not isinstance(v, jax.extend.core.Literal)}
    return needed


@dataclasses.dataclass(frozen=True, eq=False)
class _Training:
    """The functions of a program."""

    prepared: _Prepared
    loss: Loss
    metrics: Mapping[str, Measure]
    update: Update

    def init(self, key: Any) -> dict[str, Any]:
        """The first state."""
        params, model_state = self.prepared.first(key)
        trained, _ = split(params, self.prepared.chosen)
        state = {"params": params, **self.update.first(trained)}
        if self.prepared.has_state:
            state["model_state"] = model_state
        if self.prepared.draws:
            state["key"] = dropout_key(key)
        return state

    def step(self, state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step: the new state, and the metrics before it."""
        inputs, target = batch
        trained, frozen = split(state["params"], self.prepared.chosen)
        model_state = self.prepared.state_in(state)
        following, key = jax.random.split(state["key"]) if self.prepared.draws else (None, None)

        def measured(trained: Any) -> tuple[Any, Any]:
            params = merge(trained, frozen)
            prediction, after = self.prepared.apply(params, model_state, inputs, key, training=True)
            mean, examples, parts = measure_loss(self.loss, prediction, target, self.prepared.kinds)
            return mean, (mean, count(examples), after, {**parts, **self._measured(prediction, target)})

        def scaled(trained: Any) -> tuple[Any, Any]:
            mean, rest = measured(trained)
            factor = self.update.factor(state)
            return (mean if factor is None else mean * jnp.asarray(factor, mean.dtype)), rest

        gradients, (mean, examples, after, values) = jax.grad(scaled, has_aux=True)(trained)
        gradients = self.update.unscaled(gradients, state)
        params, parts = self.update(state, trained, gradients, mean, examples, lambda params: measured(params)[0])
        new = {**state, **parts, "params": merge(params, frozen)}
        if self.prepared.has_state:
            # What an overflow has made of the statistics is forgotten with its update.
            scales = self.update.scale is not None
            new["model_state"] = choose(all_finite(gradients), after, model_state) if scales else after
        if self.prepared.draws:
            new["key"] = following
        return new, {"loss": weighted(mean, examples), **values}

    def evaluate(self, state: Any, batch: Any) -> dict[str, Any]:
        """The loss and metrics of a batch."""
        inputs, target = batch
        prediction = self.predict(state, inputs)
        mean, examples, parts = measure_loss(self.loss, prediction, target, self.prepared.kinds)
        return {"loss": weighted(mean, examples), **parts, **self._measured(prediction, target)}

    def predict(self, state: Any, inputs: Any) -> Any:
        """The prediction, in inference mode."""
        key = state.get("key")
        model_state = self.prepared.state_in(state)
        return self.prepared.apply(state["params"], model_state, inputs, key, training=False)[0]

    def _measured(self, prediction: Any, target: Any) -> dict[str, Any]:
        kinds = self.prepared.kinds
        return {name: measure_metric(name, f, prediction, target, kinds) for name, f in self.metrics.items()}


def _given(training: _Training, seed: int, batch: Any) -> Any:
    """The first state of a model that brings its own parameters, made now."""
    policy = training.prepared.policy
    params = jax.tree.leaves(training.prepared.model.init(None)[0])
    wide = any(str(getattr(leaf, "dtype", "")) in WIDE_DTYPES for leaf in [*params, *jax.tree.leaves(batch)])
    with x64_context(user_setting() or wide or (policy is not None and policy.wide)):
        return training.init(jax.random.key(seed))
