"""Runs a function through the real compiler and runtime, with the rewrites or without, beside `jax.jit`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
from collections.abc import Callable
from typing import Any

import iree.compiler.tools.binaries
import iree.runtime as ireert
import jax
import ml_dtypes
import numpy as np
from jax import export
from jax._src.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend._iree import compile_module
from fixstep.frontend.rewrites import rewrite_function, rewrite_module
from fixstep.targets import parse

_ELEMENT_TYPES = {
    "bool": "BOOL_8",
    "bfloat16": "BFLOAT_16",
    "float8_e4m3fn": "FLOAT_8_E4M3_FN",
    "float8_e4m3fnuz": "FLOAT_8_E4M3_FNUZ",
    "float8_e5m2": "FLOAT_8_E5M2",
    "float8_e5m2fnuz": "FLOAT_8_E5M2_FNUZ",
    "float8_e8m0fnu": "FLOAT_8_E8M0_FNU",
    "complex64": "COMPLEX_64",
    "complex128": "COMPLEX_128",
    **{f"float{n}": f"FLOAT_{n}" for n in (16, 32, 64)},
    **{f"int{n}": f"SINT_{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"UINT_{n}" for n in (8, 16, 32, 64)},
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one call gave.

    Attributes:
        outputs: the leaves that the compiled function returned.
        expected: the leaves that `jax.jit` of the function as written returns.
        written: the numbers of the arguments whose bytes the call changed.
    """

    outputs: list[np.ndarray[Any, Any]]
    expected: list[np.ndarray[Any, Any]]
    written: list[int]

    def check(self, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Assert that no input was written, and that types and values agree (NaN with NaN, zeros by sign)."""
        assert self.written == [], f"inputs {self.written} were overwritten"
        assert len(self.outputs) == len(self.expected)
        for number, (got, want) in enumerate(zip(self.outputs, self.expected, strict=True)):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), f"output {number}"
            np.testing.assert_allclose(_wide(got), _wide(want), rtol=rtol, atol=atol, err_msg=f"output {number}")
            if rtol == 0.0 and got.dtype.kind in "fV":
                zero = _wide(want) == 0.0
                np.testing.assert_array_equal(
                    np.signbit(_wide(got)[zero]), np.signbit(_wide(want)[zero]), err_msg=f"output {number}"
                )

    def is_right(self, rtol: float = 0.0, atol: float = 0.0) -> bool:
        """Whether `check` passes."""
        try:
            self.check(rtol, atol)
        except AssertionError:
            return False
        return True


def run(
    function: Callable[..., Any],
    *args: Any,
    rewritten: bool = True,
    driver: str = "local-sync",
    without_flags: tuple[str, ...] = (),
) -> Run:
    """Compile a function for this machine, call it once, and compare.

    Args:
        function: takes and returns pytrees of arrays.
        *args: its arguments.
        rewritten: apply the rewrites of the function and of the module, and the target's own.
        driver: `local-sync` or `local-task`.
        without_flags: prefixes of the CPU target's flags to leave out.
    """
    text = lower(function, *args, rewritten=rewritten)
    compiled = Compiled(text, driver, plain=not rewritten, without_flags=without_flags)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
    outputs, after = compiled.call(leaves)
    written = [i for i, (old, new) in enumerate(zip(leaves, after, strict=True)) if old.tobytes() != new.tobytes()]
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*args))]
    outputs = [_typed(got, want) for got, want in zip(outputs, expected, strict=True)]
    return Run(outputs, expected, written)


def module(function: Callable[..., Any], *args: Any, rewritten: bool = True) -> Any:
    """The StableHLO module of a function, in a context of its own; with `rewritten`, both rewrites applied."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), args)
    traced = rewrite_function(function) if rewritten else function
    exported = export.export(jax.jit(traced, keep_unused=True), platforms=["cpu"])(*shapes)
    parsed = stablehlo.deserialize_portable_artifact(mlir.make_ir_context(), exported.mlir_module_serialized)
    if rewritten:
        rewrite_module(parsed)
    return parsed


def lower(function: Callable[..., Any], *args: Any, rewritten: bool = True) -> str:
    """The StableHLO text of a function."""
    return str(module(function, *args, rewritten=rewritten).operation.get_asm())


class Compiled:
    """A compiled module with its device."""

    def __init__(
        self, text: str, driver: str = "local-sync", *, plain: bool = False, without_flags: tuple[str, ...] = ()
    ) -> None:
        """Compile a module as `compile` does, or as IREE alone does (`plain`), and load it."""
        target = parse("cpu:host")
        if plain or without_flags:
            code = compile_text(text, [f for f in target.compile_flags() if not f.startswith(without_flags or ("?",))])
        else:
            code, _ = compile_module(text, target, {})
        self.device = _device(driver)
        self._module = ireert.VmModule.copy_buffer(_instance(), code)
        hal = ireert.create_hal_module(_instance(), self.device)
        self._context = ireert.VmContext(_instance(), [hal, self._module])
        self._main = self._module.lookup_function("main")

    def call(self, leaves: list[np.ndarray[Any, Any]]) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
        """The outputs, and the arguments as they are on the device after the call."""
        views = [self._upload(leaf) for leaf in leaves]
        arguments = ireert.VmVariantList(len(views))
        for view in views:
            arguments.push_ref(view)
        results = ireert.VmVariantList(8)
        self._context.invoke(self._main, arguments, results)
        outputs = [results.get_as_object(i, ireert.HalBufferView) for i in range(results.size)]
        return [self._download(view) for view in outputs], [self._download(view) for view in views]

    def _upload(self, leaf: np.ndarray[Any, Any]) -> Any:
        return self.device.allocator.allocate_buffer_copy(
            memory_type=ireert.MemoryType.DEVICE_LOCAL,
            allowed_usage=ireert.BufferUsage.DEFAULT | ireert.BufferUsage.MAPPING,
            device=self.device,
            buffer=np.require(leaf, requirements="C"),
            element_type=getattr(ireert.HalElementType, _ELEMENT_TYPES[leaf.dtype.name]),
        )

    def _download(self, view: Any) -> np.ndarray[Any, Any]:
        """The elements by the type that the runtime gives them: integers come back without a sign."""
        types = {int(getattr(ireert.HalElementType, constant)): name for name, constant in _ELEMENT_TYPES.items()}
        name = types.get(int(view.element_type), "")
        host = np.array(ireert.DeviceArray(self.device, view, implicit_host_transfer=True).to_host())
        return host.view(np.dtype(getattr(ml_dtypes, name))) if name.startswith(("bfloat", "float8")) else host


def compile_text(text: str, flags: list[str]) -> bytes:
    """What IREE alone makes of a module.

    Raises:
        RuntimeError: with the compiler's first words.
    """
    tool = iree.compiler.tools.binaries.find_tool("iree-compile")
    command = [tool, "-", "-o", "-", "--iree-input-type=stablehlo", *flags]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode(errors="replace")[:2000])
    return done.stdout


@contextlib.contextmanager
def x64(enabled: bool) -> Any:
    """JAX with or without 64-bit types."""
    with jax.enable_x64(enabled):
        yield


def _typed(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An output under the dtype that is expected, where that is the same but for the sign of an integer."""
    integers = got.dtype.kind in "iu" and want.dtype.kind in "iu" and got.itemsize == want.itemsize
    return got.view(want.dtype) if integers else got


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values of narrow and extension types as float64; wider ones as they are."""
    return array.astype(np.float64) if array.dtype.kind == "V" or array.dtype.itemsize < 4 else array


@functools.cache
def _instance() -> Any:
    return ireert.VmInstance()


@functools.cache
def _device(driver: str) -> Any:
    return ireert.get_driver(driver).create_default_device()
