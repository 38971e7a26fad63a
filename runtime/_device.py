"""A thin layer on IREE's Python bindings: buffers on one device, and the functions of a compiled module.

Everything that touches `iree.runtime` and is not about a target is in this file. `FunctionInvoker` and `DeviceArray`
are left out on purpose: they add tens of microseconds a call and hand out writable views of device memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import iree.runtime as ireert
import numpy as np
from iree.runtime.array_interop import map_dtype_to_element_type

from fixstep.runtime._signature import Array, LeafSpec
from fixstep.targets.errors import DeviceError

# Alias of iree.runtime.HalBufferView, for signatures.
View = Any

_MEMORY = ireert.MemoryType.DEVICE_LOCAL | ireert.MemoryType.HOST_VISIBLE
_BYTE = np.dtype(np.uint8)
_CARRIER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_USAGE = ireert.BufferUsage.DEFAULT | ireert.BufferUsage.MAPPING


class Device:
    """Buffers of one opened device."""

    def __init__(self, hal_device: Any) -> None:
        self._hal = hal_device
        self._allocator = hal_device.allocator
        self._process = os.getpid()

    @property
    def name(self) -> str:
        """What the driver calls the device."""
        return str(self._hal)

    def upload(self, array: Array, spec: LeafSpec) -> View:
        """A copy of a host array on the device; the array may be read-only, strided or memory-mapped."""
        # The bindings know neither bfloat16 nor float8: they get an integer of the same width, and the type beside it.
        carrier: Array = np.require(array, requirements="C").view(_CARRIER[array.itemsize])
        try:
            return self._allocator.allocate_buffer_copy(
                memory_type=_MEMORY,
                allowed_usage=_USAGE,
                device=self._hal,
                buffer=carrier,
                element_type=map_dtype_to_element_type(spec.numpy_dtype),
            )
        except Exception as exc:  # the bindings raise bare RuntimeError, ValueError and MemoryError
            raise DeviceError(f"{spec.path}: the device has no room for {spec}: {_first_line(exc)}") from exc

    def empty(self, spec: LeafSpec) -> View:
        """A buffer for a leaf that holds anything until it is written."""
        # HalBuffer.create_view cannot say the element type, so this copies memory that was never touched.
        return self.upload(np.empty(spec.shape, spec.numpy_dtype), spec)

    def download(self, view: View, spec: LeafSpec) -> Array:
        """A host copy of a buffer, waiting for the device if it is still being written."""
        out = np.empty(spec.shape, spec.numpy_dtype)
        if out.size:
            try:
                mapped = view.map().asarray([spec.byte_length], _BYTE)
            except Exception as exc:
                raise DeviceError(f"{spec.path}: {spec} could not be read back: {_first_line(exc)}") from exc
            out.reshape(-1).view(np.uint8)[:] = mapped
        return out

    def load(self, module: bytes | memoryview) -> Module:
        """Load a compiled module (the bytes of a VMFB, which are copied)."""
        return Module(self, module)

    def check_process(self) -> None:
        """Refuse a forked child, where the device's worker threads do not exist and a call would wait for ever."""
        if os.getpid() != self._process:
            raise DeviceError(
                "this session was opened before the process forked, and its device does not work in the child: "
                "open it in the child, or start workers with the multiprocessing method 'spawn'"
            )


class Module:
    """The functions of one compiled module on one device."""

    def __init__(self, device: Device, module: bytes | memoryview) -> None:
        self._device = device
        instance = ireert.VmInstance()
        try:
            self._module = ireert.VmModule.copy_buffer(instance, module)
            hal = ireert.create_hal_module(instance, device._hal)
            self._context = ireert.VmContext(instance, [hal, self._module])
        except Exception as exc:
            raise DeviceError(
                f"the device does not load the compiled code: {_first_line(exc)}; "
                "compile the artifact again with this version of fixstep"
            ) from exc
        self._functions: dict[str, Any] = {}

    def invoke(self, name: str, *arguments: Sequence[View], wanted: int) -> list[View]:
        """Call a function with the given buffers, in order.

        Args:
            name: the function.
            arguments: groups of buffers; the last ones may be storage for the first results.
            wanted: how many of the last results are returned; the others lie in storage that the caller gave.

        Raises:
            DeviceError: if the call failed; buffers passed as outputs then hold anything.
        """
        self._device.check_process()
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.lookup_function(name)
        packed = ireert.VmVariantList(sum(map(len, arguments)))
        push = packed.push_ref
        for views in arguments:
            for view in views:
                push(view)
        results = ireert.VmVariantList(8)
        try:
            self._context.invoke(function, packed, results)
        except Exception as exc:
            raise DeviceError(f"the device failed in {name}: {_first_line(exc)}; the state is unchanged") from exc
        view_class = ireert.HalBufferView
        size = results.size
        return [results.get_as_object(i, view_class) for i in range(size - wanted, size)]


def _first_line(exc: BaseException) -> str:
    text = str(exc).strip()
    return text.splitlines()[0] if text else type(exc).__name__
