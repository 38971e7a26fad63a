"""From a template to one StableHLO module that holds every function of the program.

The calling convention, all flat lists of leaves:

    init(seed_high, seed_low, out_state) -> state
    step(state, accumulators, batch, out_state, out_accumulators) -> state, accumulators, metrics
    evaluate(state, accumulators, batch, out_accumulators) -> accumulators, metrics
    predict(state, inputs) -> outputs

A program whose batch may have any size has the last three once for each compiled size, `step_16` for batches that are
padded to 16 and `step` for the largest; their batch or inputs are followed by the real size.

The `out_` arguments are storage that the caller provides (`iree.abi.output`). Donation would save the second set of
buffers, but IREE writes donated arguments in place without checking that they are dead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend._locations import user_line
from fixstep.frontend._shared import share_constants
from fixstep.frontend._sums import COUNT, accumulators, add
from fixstep.frontend._template import Template
from fixstep.frontend.narrow import NARROW, without_narrow_types
from fixstep.frontend.rewrites import _walk as walk
from fixstep.frontend.rewrites import rewrite_function, rewrite_module, unlowerable_operations
from fixstep.runtime._manifest import Group, leaf_to_json
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import CompileError

_SEED = (LeafSpec("seed/high", "uint32", ()), LeafSpec("seed/low", "uint32", ()))
_SIZE = Group("size", (LeafSpec("size", "int32", ()),))


@dataclasses.dataclass(frozen=True)
class Function:
    """One function to lower.

    Attributes:
        name: its name in the module.
        body: a function of flat leaves that returns a flat list of leaves.
        arguments: what it takes.
        results: what it returns; the state and the accumulators come first, in storage that the caller gives.
        original: the same function for JAX alone, where it is another one: at any size, not at a padded one.
        structs: what `original` takes.
    """

    name: str
    body: Callable[..., Any]
    arguments: tuple[Group, ...]
    results: tuple[Group, ...]
    original: Callable[..., Any] | None = None
    structs: tuple[Any, ...] = ()

    @property
    def stored_results(self) -> tuple[LeafSpec, ...]:
        """The results, first in the list, that the caller provides storage for."""
        stored = ("state", "accumulators")
        return tuple(leaf for group in self.results if group.role in stored for leaf in group.leaves)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program as StableHLO.

    Attributes:
        text: the module, one function a name, without locations.
        lines: the user's `file:line` by line of `text`.
        functions: the functions in it; those for smaller sizes are left out.
        references: `jax.export` bytes of each function before the rewrites, by name.
        digest: identifies the program: template and functions.
    """

    text: str
    lines: dict[int, str]
    functions: tuple[Function, ...]
    references: dict[str, bytes]
    digest: str


def lower(template: Template) -> Lowered:
    """Lower every function of the program.

    Raises:
        CompileError: naming each operation, with the user's line, that no target can run.
    """
    _refuse(
        f"  {call}, in {name}: the device cannot call Python; return the value as a metric instead"
        for name, calls in template.host_calls.items()
        for call in calls
    )
    functions = tuple(_functions(template))
    smaller = tuple(_smaller(template))
    with jax.enable_x64(template.x64):
        references = {function.name: _reference(function) for function in functions}
        with mlir.make_ir_context() as context, ir.Location.unknown():
            context.allow_unregistered_dialects = True
            combined = ir.Module.create()
            problems: list[str] = []
            for function in (*functions, *smaller):
                module = _rewritten(context, function)
                problems += _problems(function.name, module)
                _append(combined, module, function)
            _refuse(problems)
            if smaller:
                share_constants(combined)
            text = combined.operation.get_asm()
            lines = _line_map(combined, text)
    return Lowered(text, lines, functions, references, _digest(functions, text))


def _functions(template: Template) -> Iterator[Function]:
    """The functions of a program, for the size of its batch or the largest of them."""
    if template.flat_init is not None:
        init = template.flat_init
        state = Group("state", template.state_leaves)
        yield Function("init", lambda high, low: init(high, low), (Group("seed", _SEED),), (state,))
    yield from _functions_of_a_batch(template, template.sizes.high if template.sizes else None)


def _smaller(template: Template) -> Iterator[Function]:
    """The same functions for the smaller sizes that are compiled."""
    for size in template.sizes.compiled[1:] if template.sizes else ():
        for function in _functions_of_a_batch(template, size):
            yield dataclasses.replace(function, name=f"{function.name}_{size}")


def _functions_of_a_batch(template: Template, size: int | None) -> Iterator[Function]:
    """Step, evaluate and predict for batches of one size, or padded to `size`."""
    state = Group("state", template.state_leaves)
    yield _with_accumulators(
        template, "step", template.metric_leaves, template.metric_sums, template.summed_step, [state], size
    )
    if template.summed_evaluate is not None:
        kinds = (template.evaluation_leaves, template.evaluation_sums)
        yield _with_accumulators(template, "evaluate", *kinds, template.summed_evaluate, [], size)
    if template.flat_predict is not None:
        inputs, outputs = Group("inputs", template.input_leaves), Group("outputs", template.output_leaves)
        finish: Finish = lambda before, returned, weight: returned  # noqa: E731
        yield _of_a_size(template, "predict", [state], inputs, (outputs,), template.flat_predict, finish, size)


# How the results of a function are put together: of the arguments before the batch, what it returned, and the size.
Finish = Callable[[Sequence[Any], Any, Any], list[Any]]


def _with_accumulators(
    template: Template,
    name: str,
    metrics: tuple[LeafSpec, ...],
    summed: tuple[LeafSpec, ...],
    call: Callable[..., tuple[list[Any], ...]],
    kept: list[Group],
    size: int | None,
) -> Function:
    """A function that also adds its metrics up: each call weighs as much, or as its examples where sizes differ."""
    state = Group("state", template.state_leaves)
    sums = Group("accumulators", accumulators(metrics, summed))

    def finish(before: Sequence[Any], returned: Any, weight: Any) -> list[Any]:
        *new_state, values, parts = returned
        own = {f"sum/{spec.path}": value for spec, value in zip(metrics, values, strict=True)} | {COUNT.path: 1}
        exact = {spec.path: part for spec, part in zip(summed, parts, strict=True)}
        totals = [
            add(total, exact[spec.path], spec)
            if spec.path in exact
            else add(total, own[spec.path], spec, weight=weight)
            for total, spec in zip(before[len(state.leaves) :], sums.leaves, strict=True)
        ]
        return [*(leaf for part in new_state for leaf in part), *totals, *values]

    results = (*kept, sums, Group("metrics", metrics))
    return _of_a_size(template, name, [state, sums], Group("batch", template.batch_leaves), results, call, finish, size)


def _of_a_size(
    template: Template,
    name: str,
    before: list[Group],
    batch: Group,
    results: tuple[Group, ...],
    call: Callable[..., Any],
    finish: Finish,
    size: int | None,
) -> Function:
    """A function of the state, more arguments, and a batch that has its own size, or is padded to `size`."""
    n, m = len(template.state_leaves), sum(len(group.leaves) for group in before)
    if size is None:

        def body(*leaves: Any) -> list[Any]:
            return finish(leaves[:m], call(list(leaves[:n]), list(leaves[m:])), None)

        return Function(name, body, (*before, batch), results)

    padded = template.padded[name]
    at_size = Group(batch.role, tuple(padded.spec(leaf, i, size) for i, leaf in enumerate(batch.leaves)))

    def masked(*leaves: Any) -> list[Any]:
        return finish(leaves[:m], padded.at(size, leaves[:n], leaves[m:-1], leaves[-1]), leaves[-1])

    def original(*leaves: Any) -> list[Any]:
        return finish(leaves[:m], call(list(leaves[:n]), list(leaves[m:-1])), leaves[-1])

    structs = (*_structs(before), *padded.structs, *_structs([_SIZE]))
    return Function(name, masked, (*before, at_size, _SIZE), results, original, structs)


def _structs(groups: Sequence[Group]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.numpy_dtype) for group in groups for leaf in group.leaves]


def _reference(function: Function) -> bytes:
    # Without locations: they hold paths of this machine, and the whole stack of whoever called `compile`.
    with config.traceback_in_locations_limit(0):
        body, structs = function.body, _structs(function.arguments)
        if function.original is not None:
            body, structs = function.original, list(function.structs)
        return bytes(_export(*_with_bytes(body, structs), function.name).serialize())


def _with_bytes(body: Callable[..., Any], structs: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A function of two-bit integers as one of bytes, because JAX does not write those types down."""
    bytes_of = {"int2": np.int8, "uint2": np.uint8}

    def of_bytes(*leaves: Any) -> list[Any]:
        given = [leaf.astype(struct.dtype) for leaf, struct in zip(leaves, structs, strict=True)]
        return [
            leaf.astype(bytes_of[leaf.dtype.name]) if leaf.dtype.name in bytes_of else leaf for leaf in body(*given)
        ]

    if not any(struct.dtype.name in bytes_of for struct in structs):
        return body, structs
    return of_bytes, [jax.ShapeDtypeStruct(s.shape, bytes_of.get(s.dtype.name, s.dtype)) for s in structs]


def _export(body: Callable[..., Any], structs: Sequence[Any], name: str) -> Any:
    # Unused arguments are kept: the calling convention has every leaf.
    try:
        return jax.export.export(jax.jit(body, keep_unused=True), platforms=["cpu"])(*structs)
    except (ValueError, NotImplementedError) as exc:  # an operation that JAX does not export; the step itself traces
        raise CompileError(f"JAX does not export {name}: {str(exc).splitlines()[0]}") from exc


def _rewritten(context: Any, function: Function) -> Any:
    structs = _structs(function.arguments)
    body = without_narrow_types(function.body, structs)
    if body is not function.body:
        structs = [jax.ShapeDtypeStruct(s.shape, np.uint8 if s.dtype.name in NARROW else s.dtype) for s in structs]
    exported = _export(rewrite_function(body), structs, function.name)
    module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
    rewrite_module(module)
    return module


def _problems(name: str, module: Any) -> list[str]:
    return [
        f"  {operation}: {why}, in {name}" + (f", at {line}" if line else "")
        for operation, line, why in unlowerable_operations(module)
    ]


def _refuse(problems: Iterable[str]) -> None:
    unique = list(dict.fromkeys(problems))
    if unique:
        raise CompileError("\n".join(["the program uses operations that cannot be compiled:", *unique]))


def _append(combined: Any, module: Any, function: Function) -> None:
    """Move the functions of `module` to `combined`, `main` under the function's name, the others prefixed with it."""

    def renamed(name: str) -> str:
        return function.name if name == "main" else f"{function.name}.{name}"

    for op in walk.operations(module):
        for attribute in walk.CALLS:
            if attribute in op.attributes:
                op.attributes[attribute] = ir.FlatSymbolRefAttr.get(renamed(walk.callee(op) or ""))
    for op in list(module.body.operations):
        name = walk.symbol(op)
        op.attributes["sym_name"] = ir.StringAttr.get(renamed(name))
        if name == "main":
            _add_storage_arguments(op, function.stored_results)
        combined.body.append(op.operation.clone())


def _add_storage_arguments(op: Any, stored: Sequence[LeafSpec]) -> None:
    """Give the function one more argument for each stored result, which IREE then writes the result into."""
    function_type = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
    inputs, results = list(function_type.inputs), list(function_type.results)
    extra = results[: len(stored)]
    block = op.regions[0].blocks[0]
    for type_ in extra:
        block.add_argument(type_, ir.Location.unknown())
    empty = ir.DictAttr.get({})
    index = ir.IndexType.get()
    attributes = [empty] * len(inputs)
    attributes += [ir.DictAttr.get({"iree.abi.output": ir.IntegerAttr.get(index, i)}) for i in range(len(extra))]
    op.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs + extra, results))
    op.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def _line_map(module: Any, text: str) -> dict[int, str]:
    """The user's line of each line of the text: the parsed text has the same operations in the same order."""
    parsed = ir.Module.parse(text)  # held here: its operations do not keep it alive
    lines: dict[int, str] = {}
    for place, origin in zip(walk.operations(parsed), walk.operations(module), strict=True):
        line = user_line(origin.location)
        if line is not None and isinstance(place.location, ir.FileLineColLoc):
            lines.setdefault(place.location.start_line, line)
    return lines


def _digest(functions: Sequence[Function], text: str) -> str:
    described = [
        {"name": f.name, "arguments": groups_to_json(f.arguments), "results": groups_to_json(f.results)}
        for f in functions
    ]
    content = json.dumps(described, sort_keys=True, separators=(",", ":")) + text
    return hashlib.sha256(content.encode()).hexdigest()


def groups_to_json(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The arguments or results of a function as the manifest holds them."""
    return [{"role": group.role, "leaves": [leaf_to_json(leaf) for leaf in group.leaves]} for group in groups]
