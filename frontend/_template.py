"""The template: the types of a program at its fixed point, frozen, and its functions at them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fixstep.frontend._captures import HostCall, find_captures, find_effects
from fixstep.frontend._fixpoint import Change, Fixpoint, find_fixpoint
from fixstep.frontend._flat import Trace, flat_function, metrics_splitter, split_outputs, step_splitter, trace
from fixstep.frontend._initial import Initial, initial_state
from fixstep.frontend._moves import Types
from fixstep.frontend._program import Program
from fixstep.frontend._seed import Layout, flatten
from fixstep.frontend._x64 import truncations, user_setting, wide_leaves, x64_context
from fixstep.frontend.sizes import Padded, SizeRange, padded_function, symbolic_axes, symbolic_structs
from fixstep.runtime._signature import Array, shown_path
from fixstep.targets.errors import FixpointError


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """The frozen types of a program, and its functions over flat lists of leaves at those types.

    The flat functions take and return arrays in the order of the leaf tuples; typed PRNG keys travel as their uint32
    data. Trace or call them in `context()`.

    Attributes:
        program: the program.
        state_layout: structure and types of the state.
        batch_layout: of the batch.
        input_layout: of what `predict` takes; no leaves where there is no `predict`.
        metric_leaves: what `step` returns besides the state, strongly typed.
        metric_sums: what it adds up of them, by the path of the accumulator.
        evaluation_leaves: what `evaluate` returns.
        evaluation_sums: what it adds up of that.
        output_leaves: what `predict` returns.
        changes: each move of a leaf, in order.
        rounds: in how many rounds something moved; 0 for a step that changes nothing.
        x64: whether the program is traced with 64-bit types.
        seed_values: the first state in the template's types where it was given, else None.
        notes: captured arrays and keys, and other warnings.
        host_calls: by function, the calls back to Python in it, which cannot be compiled.
        padded: by function, what is compiled for batches of any size; empty where the batch has one.
        flat_init: `(seed_high, seed_low) -> [state]` of two uint32 words; (0, seed) is `jax.random.key(seed)`. None
            where the state was given.
        summed_step: `(state, batch) -> ([state], [metrics], [sums])`.
        summed_evaluate: `(state, batch) -> ([metrics], [sums])`, or None.
        flat_predict: `(state, inputs) -> [outputs]`, or None.
    """

    program: Program
    state_layout: Layout
    batch_layout: Layout
    input_layout: Layout
    metric_leaves: Types
    metric_sums: Types
    evaluation_leaves: Types
    evaluation_sums: Types
    output_leaves: Types
    changes: tuple[Change, ...]
    rounds: int
    x64: bool
    seed_values: tuple[Array, ...] | None
    notes: tuple[str, ...]
    host_calls: Mapping[str, tuple[HostCall, ...]]
    padded: Mapping[str, Padded]
    flat_init: Callable[[Any, Any], list[Any]] | None
    summed_step: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], ...]]
    summed_evaluate: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], ...]] | None
    flat_predict: Callable[[Sequence[Any], Sequence[Any]], list[Any]] | None

    @property
    def state(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype name and shape of each state leaf by leaf path."""
        return {spec.path: (spec.dtype, spec.shape) for spec in self.state_leaves}

    @property
    def state_leaves(self) -> Types:
        """The state's leaves in order."""
        return self.state_layout.leaves

    @property
    def batch_leaves(self) -> Types:
        """The batch's leaves in order."""
        return self.batch_layout.leaves

    @property
    def input_leaves(self) -> Types:
        """The leaves of what `predict` takes, in order."""
        return self.input_layout.leaves

    def flat_step(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The step without what is added up: new state and metrics."""
        new_state, metrics, _ = self.summed_step(state, batch)
        return new_state, metrics

    def flat_evaluate(self, state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        """The metrics of a batch; only of a program that has `evaluate`."""
        assert self.summed_evaluate is not None
        return self.summed_evaluate(state, batch)[0]

    @property
    def sizes(self) -> SizeRange | None:
        """The sizes that a batch may have, or None where it has one."""
        return self.padded["step"].range if self.padded else None

    def context(self) -> contextlib.AbstractContextManager[None]:
        """The context (64-bit types or not) in which the flat functions are traced, called and fed."""
        return x64_context(self.x64)


def infer_template(program: Program) -> Template:
    """Find the fixed point of a program and freeze it.

    The step is traced abstractly, with 64-bit types if any leaf of the state, the batch or the inputs is 64-bit, if
    `init` asks for 64-bit types, or if the user's `jax_enable_x64` is on; otherwise without.

    Returns:
        The template, which is also the report: what moved, in which round, and what to know about it.

    Raises:
        FixpointError: if the state has no fixed point, with each moving leaf's history, or its first values do not
            survive the cast to it.
        ProgramError: if one of the functions raises or does not return what it must.
    """
    initial = initial_state(program)
    largest = program.largest
    batch = flatten(largest.batch, "batch", numbers=False).layout
    inputs = flatten(largest.inputs if program.predict else (), "inputs", numbers=False).layout
    wide = [
        f"{what} leaf {spec.path!r} is {spec.dtype}"
        for what, layout in (("state", initial.layout), ("batch", batch), ("inputs", inputs))
        for spec in wide_leaves(layout.leaves)
    ]
    wide += [f"init asks for {request}" for request in initial.requests]
    x64 = user_setting() or initial.x64 or bool(wide)
    with truncations() as truncated:
        fixpoint = find_fixpoint(program, initial.layout, batch, x64=x64)
        state = dataclasses.replace(initial.layout, leaves=fixpoint.types)
        traces = {"step": fixpoint.step}
        if program.evaluate:
            traces["evaluate"] = trace("evaluate", program.evaluate, (state, batch), metrics_splitter(state), x64=x64)
        if program.predict:
            traces["predict"] = trace("predict", program.predict, (state, inputs), split_outputs, x64=x64)
    notes = [
        *_x64_notes(wide),
        *dict.fromkeys(f"JAX gives 32 bits where 64 are asked for: {text}" for text in truncated),
    ]
    notes += [
        str(c) for name, traced in traces.items() for c in find_captures(traced.closed, getattr(program, name), name)
    ]
    return _template(program, initial, state, batch, inputs, fixpoint, traces, x64, tuple(notes))


def _x64_notes(wide: Sequence[str]) -> list[str]:
    if not wide or user_setting():
        return []
    more = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
    reason = ", ".join(wide[:3]) + more
    return [f"traced with 64-bit types, because {reason}; numbers that the step makes without a dtype are 64-bit then"]


def _template(
    program: Program,
    initial: Initial,
    state: Layout,
    batch: Layout,
    inputs: Layout,
    fixpoint: Fixpoint,
    traces: Mapping[str, Trace],
    x64: bool,
    notes: tuple[str, ...],
) -> Template:
    metrics = fixpoint.step.outputs[1].strong_leaves
    sums = fixpoint.step.outputs[2].strong_leaves
    evaluation, evaluation_sums = (
        (output.strong_leaves for output in traces["evaluate"].outputs) if "evaluate" in traces else ((), ())
    )
    outputs = traces["predict"].outputs[0].strong_leaves if "predict" in traces else ()
    step = flat_function(program.step, (state, batch), step_splitter(state), (state.leaves, metrics, sums))
    evaluate = program.evaluate and flat_function(
        program.evaluate, (state, batch), metrics_splitter(state), (evaluation, evaluation_sums)
    )
    predict = program.predict and _only(program.predict, (state, inputs), outputs)
    with x64_context(x64):
        padded = _padded(program, state, batch, inputs, {"step": step, "evaluate": evaluate, "predict": predict})
    return Template(
        program=program,
        state_layout=state,
        batch_layout=batch,
        input_layout=inputs,
        metric_leaves=metrics,
        metric_sums=sums,
        evaluation_leaves=evaluation,
        evaluation_sums=evaluation_sums,
        output_leaves=outputs,
        changes=fixpoint.changes,
        rounds=fixpoint.rounds,
        x64=x64,
        seed_values=initial.cast(state.leaves),
        notes=notes,
        host_calls={name: find_effects(traced.closed) for name, traced in traces.items()},
        padded=padded,
        flat_init=initial.flat_init(state.leaves),
        summed_step=step,
        summed_evaluate=evaluate,
        flat_predict=predict,
    )


def _padded(
    program: Program, state: Layout, batch: Layout, inputs: Layout, functions: Mapping[str, Any]
) -> dict[str, Padded]:
    """The functions traced at the symbolic size, where the program has one."""
    sizes = program.sizes
    if sizes is None:
        return {}
    structs = {"batch": symbolic_structs(program.batch, batch), "inputs": symbolic_structs(program.inputs, inputs)}
    found = {
        name: padded_function(name, function, sizes, state, structs["inputs" if name == "predict" else "batch"])
        for name, function in functions.items()
        if function is not None
    }
    grown = [
        f"  {shown_path(spec.path, 'state')}: shape ({', '.join(map(str, struct.shape))})"
        for spec, struct in zip(state.leaves, found["step"].output[0], strict=True)
        if symbolic_axes(struct)
    ]
    if grown:
        title = f"the state has no fixed point: these leaves get the size of the batch, {sizes.symbol}:"
        advice = "Reduce them over the examples, or give the batch a size in numbers."
        raise FixpointError("\n".join([title, *grown, advice]))
    return found


def _only(
    predict: Callable[..., Any], arguments: tuple[Layout, Layout], leaves: Types
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The flat form of a function that returns one part."""
    call = flat_function(predict, arguments, split_outputs, (leaves,))
    return lambda first, second: call(first, second)[0]
