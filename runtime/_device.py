"""A thin layer on IREE's Python bindings: buffers on one device, and the functions of a compiled module.

Everything that touches `iree.runtime` and is not about a target is in this file. `FunctionInvoker` and `DeviceArray`
are left out on purpose: they add tens of microseconds a call and hand out writable views of device memory.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import iree.runtime as ireert
import numpy as np
from iree.runtime.array_interop import map_dtype_to_element_type

from fixstep.runtime._signature import Array, LeafSpec
from fixstep.targets._base import Memory
from fixstep.targets._devices import forget, released
from fixstep.targets.errors import DeviceError

# Alias of iree.runtime.HalBufferView, for signatures.
View = Any

_MAPPED = (
    ireert.MemoryType.DEVICE_LOCAL | ireert.MemoryType.HOST_VISIBLE,
    ireert.BufferUsage.DEFAULT | ireert.BufferUsage.MAPPING,
)
_UNMAPPED = (ireert.MemoryType.DEVICE_LOCAL, ireert.BufferUsage.DEFAULT)
# Where results land that the host cannot map; any driver has such memory.
_STAGING = (
    ireert.MemoryType.HOST_LOCAL | ireert.MemoryType.DEVICE_VISIBLE,
    ireert.BufferUsage.TRANSFER_TARGET | ireert.BufferUsage.MAPPING_SCOPED,
)
_CACHED = int(ireert.MemoryType.HOST_VISIBLE | ireert.MemoryType.HOST_CACHED)
# Calls that may be under way on the device; more would only hold memory.
_IN_FLIGHT = 8
_BYTE = np.dtype(np.uint8)
_CARRIER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


# Who used each device last, by its identity.
_last_users: weakref.WeakValueDictionary[int, Device] = weakref.WeakValueDictionary()


class Device:
    """Buffers of one opened device, and the order of what it is asked to do.

    Work that does not finish at once is numbered: each call and each copy waits for the number before it.
    """

    # Held here since `close` may be called when the interpreter has already emptied this module.
    _is_finalizing = staticmethod(sys.is_finalizing)
    _getpid = staticmethod(os.getpid)

    def __init__(self, hal_device: Any, *, memory: Memory = "host") -> None:
        """Take over a device.

        Args:
            hal_device: an `iree.runtime.HalDevice`.
            memory: how the host gets at its memory.
        """
        self._hal = hal_device
        self._allocator = hal_device.allocator
        self._process = os.getpid()
        self._is_host = memory == "host"
        self._places = {"host": [_MAPPED], "shared": [_MAPPED, _UNMAPPED], "separate": [_UNMAPPED]}[memory]
        self._semaphore: Any = None
        self._last = 0
        self._held: collections.deque[tuple[int, Any]] = collections.deque()
        self._lent: list[None] = []  # one for each; a list, since threads add to it and take from it without a lock
        self._is_closing = False
        self._reads_mapped = memory == "shared" and self._is_quick_to_map()

    def lend(self) -> None:
        """Stay open for a buffer that may outlive the session; `take_back` follows when it is gone."""
        self._lent.append(None)

    def take_back(self) -> None:
        """One buffer that was lent is gone."""
        self._lent.pop()
        if self._is_closing:
            self.close()

    def close(self) -> None:
        """Give the device back, now or when the last lent buffer is gone; every other buffer and module is gone."""
        self._is_closing = True
        if self._lent or self._getpid() != self._process:  # in a forked child its threads would be waited for in vain
            return
        if self._is_finalizing():
            self._settle()
            return
        with contextlib.suppress(DeviceError):  # one that failed is never given back
            self._wait()
            self._held.clear()
            self._semaphore = self._allocator = None
            hal, self._hal = self._hal, None
            released(hal)

    def _settle(self) -> None:
        """Wait for what is under way, at the end of the interpreter, which then lets the device go after all else."""
        try:
            if self._semaphore is not None:
                self._semaphore.wait(self._last)
        except Exception:  # nobody is left to be told that the device failed
            pass

    @property
    def name(self) -> str:
        """What the driver calls the device."""
        return str(self._hal)

    def upload(self, array: Array, spec: LeafSpec) -> View:
        """A copy of a host array on the device; the array may be read-only, strided or memory-mapped."""
        # The bindings do not know bfloat16: they get an integer of the same width, and the type beside it.
        carrier: Array = np.require(array, requirements="C").view(_CARRIER[array.itemsize])
        failure: Exception | None = None
        for memory, usage in self._places:
            try:
                return self._allocator.allocate_buffer_copy(
                    memory_type=memory,
                    allowed_usage=usage,
                    device=self._hal,
                    buffer=carrier,
                    element_type=map_dtype_to_element_type(_passed_as(spec)),
                )
            except Exception as exc:  # the bindings raise bare RuntimeError, ValueError and MemoryError
                failure = failure or exc
        raise DeviceError(
            f"{spec.path}: the device has no room for {spec}: {_first_line(failure or ValueError())}"
        ) from failure

    @property
    def writes_in_place(self) -> bool:
        """Whether `write` keeps the buffer: then no call is under way once it has returned, and none takes fences."""
        return self._is_host

    def write(self, view: View, array: Array, spec: LeafSpec) -> View:
        """Put a host array in the place of a buffer's contents; returns that buffer, or another one that holds it."""
        if not self._is_host:
            return self.upload(array, spec)
        if array.size:
            data = np.require(array, requirements="C").reshape(-1).view(_BYTE)
            view.map().asarray([spec.byte_length], _BYTE)[:] = data
        return view

    def empty(self, spec: LeafSpec) -> View:
        """A buffer for a leaf that holds anything until it is written."""
        # HalBuffer.create_view cannot say the element type, so this copies memory that was never touched.
        return self.upload(np.empty(spec.shape, spec.numpy_dtype), spec)

    def download(self, view: View, spec: LeafSpec) -> Array:
        """A host copy of a buffer, waiting for the device if it is still being written."""
        out = np.empty(spec.shape, spec.numpy_dtype)
        if out.size:
            try:
                mapped = self._mapped(view, spec.byte_length).asarray([spec.byte_length], _BYTE)
            except Exception as exc:
                raise DeviceError(f"{spec.path}: {spec} could not be read back: {_first_line(exc)}") from exc
            out.reshape(-1).view(np.uint8)[:] = mapped
        return out

    def _mapped(self, view: View, byte_length: int) -> Any:
        """The bytes of a buffer where the host can read them: its own memory, or that of a copy."""
        if self._is_host:
            return view.map()
        if self._reads_mapped:
            self._wait()
            # What the compiled code allocates itself may be out of the host's reach all the same.
            with contextlib.suppress(RuntimeError):
                return view.map()
        staging = self._allocator.allocate_buffer(*_STAGING, byte_length)
        wait, signal = self.fences()
        self._hal.queue_copy(view.get_buffer(), staging, wait, signal)
        self._wait()
        return staging.map()

    def _is_quick_to_map(self) -> bool:
        """Whether the host reads the device's memory through its cache; otherwise a copy is faster."""
        probe = LeafSpec("probe", "uint32", ())
        buffer = self.upload(np.zeros((), np.uint32), probe).get_buffer()
        return (int(buffer.memory_type()) & _CACHED) == _CACHED

    def fences(self) -> tuple[Any, Any]:
        """The fence that the next piece of work has to wait for, and the one that it has to signal."""
        self._take_turn()
        if self._semaphore is None:
            self._semaphore = self._hal.create_semaphore(0)
        self._last += 1
        create = ireert.HalFence.create_at
        return create(self._semaphore, self._last - 1), create(self._semaphore, self._last)

    def _take_turn(self) -> None:
        """Wait for the session that used the device last: the order of the work is that of one session alone.

        Where a driver wakes work of two sessions at once, IREE may lose the device (targets/_queue.py).
        """
        other = _last_users.get(id(self._hal))
        if other is not self:
            if other is not None and other._hal is self._hal:
                with contextlib.suppress(DeviceError):  # told of to the other one, when it waits itself
                    other._wait()
            _last_users[id(self._hal)] = self

    def forget_last(self) -> None:
        """Begin the order anew after work that could not be handed over: nothing will ever signal its number."""
        self._last -= 1
        try:
            self._wait()
        finally:
            self._semaphore, self._last = None, 0

    def hold(self, arguments: Any) -> None:
        """Keep what the last call reads until it is done, and wait for the oldest if many are under way."""
        self._held.append((self._last, arguments))
        if len(self._held) > _IN_FLIGHT:
            number, _ = self._held.popleft()
            self._wait_for(number)

    def _wait(self) -> None:
        """Wait for everything that the device was asked to do."""
        if self._semaphore is not None:
            self._wait_for(self._last)
            self._held.clear()

    def _wait_for(self, number: int) -> None:
        try:
            self._semaphore.wait(number)
        except Exception as exc:  # the bindings raise a bare RuntimeError
            # A driver that lost a device never gives it back; the next session has to open another.
            forget(self._hal)
            raise DeviceError(
                f"the device failed in a call that it had taken: {_first_line(exc)}; this session's state is lost: "
                "load the artifact again and restore the last checkpoint"
            ) from exc

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
        self._functions: dict[str, tuple[Any, bool]] = {}

    @staticmethod
    def pack(*arguments: Sequence[View]) -> Any:
        """The arguments of a call, in order; the last ones may be storage for the first results.

        On a device that writes in place the same pack may be used for many calls.
        """
        packed = ireert.VmVariantList(sum(map(len, arguments)) + 2)
        push = packed.push_ref
        for views in arguments:
            for view in views:
                push(view)
        return packed

    def invoke(self, name: str, packed: Any, *, wanted: int) -> list[View]:
        """Call a function.

        Args:
            name: the function.
            packed: its arguments, from `pack`.
            wanted: how many of the last results are returned; the others lie in storage that the caller gave.

        Raises:
            DeviceError: if the call failed; buffers passed as outputs then hold anything.
        """
        self._device.check_process()
        function, fenced = self._functions.get(name) or self._lookup(name)
        results = ireert.VmVariantList(8)
        try:
            if fenced:
                for fence in self._device.fences():
                    packed.push_ref(fence)
            self._context.invoke(function, packed, results)
        except Exception as exc:
            if fenced:
                self._device.forget_last()
            raise DeviceError(f"the device failed in {name}: {_first_line(exc)}; the state is unchanged") from exc
        if fenced:
            self._device.hold((packed, results))
        view_class = ireert.HalBufferView
        size = results.size
        return [results.get_as_object(i, view_class) for i in range(size - wanted, size)]

    def _lookup(self, name: str) -> tuple[Any, bool]:
        """A function, and whether it takes fences: then it returns before the device is done."""
        function = self._module.lookup_function(name)
        found = function, function.reflection.get("iree.abi.model") == "coarse-fences"
        self._functions[name] = found
        return found


def _passed_as(spec: LeafSpec) -> np.dtype[Any]:
    """The dtype in which compiled functions take a leaf: the bits of types below eight bits and of eight-bit floats."""
    plain = spec.numpy_dtype.itemsize > 1 or spec.dtype in ("bool", "int8", "uint8")
    return spec.numpy_dtype if plain else _BYTE


def _first_line(exc: BaseException) -> str:
    text = str(exc).strip()
    return text.splitlines()[0] if text else type(exc).__name__
