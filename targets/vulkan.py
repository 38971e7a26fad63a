"""The Vulkan target.

Options: none (the types that desktop drivers and Mesa's lavapipe have; no subgroup operations, so any subgroup size),
or a name that IREE knows (`rdna3`, `ampere`, `adreno`, `valhall4`, `vp_android_baseline_2022`), for one kind of GPU.
Devices: an index as Vulkan counts them, or part of a device's name, in any case (`llvmpipe`).

What a type needs of the driver is checked when the artifact is loaded; nothing is demoted.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import iree.runtime as ireert

from fixstep.targets._adapt import (
    longest_reduction,
    round_integers_first,
    select_for_booleans,
    separate_movements,
    separate_narrow_products,
    split_complex_selects,
)
from fixstep.targets._base import WITHOUT_ELEMENT_TYPE, CodeEdit, Memory
from fixstep.targets._branches import separated_references
from fixstep.targets._devices import choose, none_runs, opened
from fixstep.targets._queue import one_after_another, one_queue
from fixstep.targets._spirv import exact_arithmetic
from fixstep.targets.errors import TargetError

_OPTION = re.compile(r"[a-z][a-z0-9_]*")

# IREE's own default is a minimal profile (32-bit types in 32-bit storage): it computes wrongly with booleans, which are
# bytes, and has no other type. SPIR-V asks a driver only for the types that the code uses, so naming them all costs
# nothing. Sizes and counts are those that every driver has.
_DEFAULT_DEVICE = (
    '#hal.device.target<"vulkan", [#hal.executable.target<"vulkan-spirv", "vulkan-spirv-fb", '
    '{iree_codegen.target_info = #iree_gpu.target<arch = "desktop", features = "spirv:v1.3,cap:Shader", '
    "wgp = <compute = fp64|fp32|fp16|int64|int32|int16|int8, storage = b64|b32|b16|b8, subgroup = none, "
    "subgroup_size_choices = [64], max_workgroup_sizes = [128, 128, 64], max_thread_count_per_workgroup = 128, "
    "max_workgroup_memory_bytes = 16384, max_workgroup_counts = [65535, 65535, 65535]>>}>]> : !hal.device"
)

_WRONG = {"fft": "IREE's SPIR-V code for Fourier transforms gives wrong numbers; write it as a product with a matrix"}

# Mesa's software driver ends every loop after this many rounds, without a word.
_SOFTWARE_ROUNDS = 65_535

# Features of the driver, as IREE prints them, by the element types that need them. 64-bit types are not in its list;
# a driver without them refuses the code when it is loaded.
_FEATURES = {
    "storageBuffer8BitAccess": ("i1", "i8", "ui8"),
    "shaderInt8": ("i1", "i8", "ui8"),
    "storageBuffer16BitAccess": ("i16", "ui16", "f16", "bf16"),
    "shaderFloat16": ("f16",),
}
_ELEMENT_TYPE = re.compile(r"tensor<(?:[0-9?]+x)*(?:complex<)?([a-z0-9A-Z]+)>")


@dataclasses.dataclass(frozen=True)
class Vulkan:
    """SPIR-V code, run by the driver that the machine's Vulkan loader finds."""

    text: str
    option: str | None

    memory: ClassVar[Memory] = "shared"

    def compile_flags(self, module: str = "") -> list[str]:
        """Flags of iree-compile; each stands against a fault or was never worse than the default."""
        del module
        return [
            *([f"--iree-vulkan-target={self.option}"] if self.option else []),
            # Without it float64 silently becomes float32, in the public signature too.
            "--iree-input-demote-f64-to-f32=false",
            # A call returns before the device is done.
            "--iree-execution-model=async-external",
            # As on the CPU (see cpu.py): such command buffers failed in some programs beside other load.
            "--iree-hal-memoization=false",
        ]

    def adapt(self, module: str) -> str:
        """Conversions, products of 16-bit floats, selections of complex numbers and broadcasts, as they come out right.

        And the device, with one queue for everything: left to itself IREE's driver allocates on one and computes on
        another. Each has a thread that wakes what waits on the other, and two of them that count at once lose the
        device (a timeline semaphore is signalled with a lower value than before).
        """
        adapted = round_integers_first(select_for_booleans(module))
        adapted = separate_movements(split_complex_selects(separate_narrow_products(adapted)))
        device = '#hal.device.alias<"vulkan"> : !hal.device' if self.option else _DEFAULT_DEVICE
        return one_queue(adapted, device)

    def code_edits(self, module: str) -> tuple[CodeEdit, ...]:
        """Arithmetic that the driver may not rearrange, work in one order, and branches that lose no buffer."""
        exact = CodeEdit("executable-targets", "exact arithmetic, 2", exact_arithmetic)
        ordered = CodeEdit("hal", "one after another", one_after_another)
        return (exact, ordered, *separated_references(module))

    def unsupported(self, dtype: str) -> str | None:
        """What to use instead of a dtype that SPIR-V code does not hold or computes wrongly."""
        return WITHOUT_ELEMENT_TYPE.get(dtype)

    def lacks(self, operation: str) -> str | None:
        """Why an operation is refused although it compiles."""
        return _WRONG.get(operation)

    def requirements(self, configured: str, module: str) -> dict[str, Any]:
        """The element types in the code, which the driver has to support, and the longest sum of one thread."""
        del configured
        types = sorted(set(_ELEMENT_TYPE.findall(module)))
        return {"types": types, "longest_loop": longest_reduction(module)}

    def unavailable(self, requirements: Mapping[str, Any]) -> str | None:
        """Why no device of this machine runs the code: no loader, no driver, no device, or no such type."""
        found = _devices()
        if isinstance(found, str):
            return found
        return none_runs(found, lambda device: _lacks(device, requirements))

    def preference(self) -> int:
        """Above the CPU, unless the only devices are programs that run on the CPU."""
        found = _devices()
        return 20 if not isinstance(found, str) and any(not device.software for device in found) else -10

    def open_device(self, device: str | None, requirements: Mapping[str, Any], *, bytes_per_step: int) -> Any:
        """Open a device by its index or a part of its name; by default a GPU before a program."""
        del bytes_per_step
        found = _devices()
        if isinstance(found, str):
            raise TargetError(found)
        found = tuple(sorted(found, key=lambda listed: listed.software))
        return opened("vulkan", choose(found, device, "vulkan", lambda d: _lacks(d, requirements)).device_id)


def parse(option: str | None) -> Vulkan:
    """The Vulkan target with an option.

    Raises:
        TargetError: if the option cannot be the name of a GPU; the compiler says whether it knows the name.
    """
    if option is not None and not _OPTION.fullmatch(option):
        raise TargetError(
            f"unknown target {f'vulkan:{option}'!r}: expected vulkan, or vulkan:<GPU> such as vulkan:rdna3, "
            "vulkan:ampere, vulkan:adreno, vulkan:valhall4"
        )
    return Vulkan("vulkan" if option is None else f"vulkan:{option}", option)


@dataclasses.dataclass(frozen=True)
class _Device:
    """A device that the Vulkan loader found.

    Attributes:
        index: its place in the loader's list.
        device_id: IREE's handle.
        name: what the driver calls it.
        software: whether it is a program on the CPU.
        features: those of `_FEATURES` that it has.
    """

    index: int
    device_id: int
    name: str
    software: bool
    features: frozenset[str]


@functools.cache
def _devices() -> tuple[_Device, ...] | str:
    """The devices of this machine, or why there are none."""
    try:
        driver = ireert.get_driver("vulkan")
        listed = driver.query_available_devices()
        found = []
        for index, entry in enumerate(listed):
            described = driver.dump_device_info(entry["device_id"])
            features = frozenset(re.findall(r"(\w+)=yes", described))
            software = re.search(r"^type: cpu$", described, re.MULTILINE) is not None
            found.append(_Device(index, entry["device_id"], entry["name"], software, features))
    except Exception as exc:  # the bindings raise bare RuntimeError and ValueError
        return _why_none(str(exc))
    return tuple(found) or "the Vulkan driver of this machine lists no device"


def _why_none(text: str) -> str:
    if "INCOMPATIBLE_DRIVER" in text:
        return (
            "the Vulkan loader finds no driver; install that of the GPU, or Mesa's software driver "
            "(Debian: mesa-vulkan-drivers)"
        )
    if "librar" in text or "loader" in text.lower():
        return "there is no Vulkan loader (Debian: libvulkan1)"
    return f"Vulkan does not start: {text.splitlines()[0] if text else 'no reason given'}"


def _lacks(device: _Device, requirements: Mapping[str, Any]) -> str | None:
    """Why a device cannot run code with these requirements; None if it can."""
    rounds = int(requirements.get("longest_loop", 0))
    if device.software and rounds > _SOFTWARE_ROUNDS:
        return (
            f"{device.name} ends loops after {_SOFTWARE_ROUNDS} rounds, and the program reduces {rounds} elements "
            "to one; use another device, or reduce in two stages"
        )
    types = set(requirements.get("types", []))
    lacking = {name: types & set(needing) for name, needing in _FEATURES.items() if name not in device.features}
    needed = [f"{name} (for {', '.join(sorted(found))})" for name, found in lacking.items() if found]
    return f"{device.name} lacks {', '.join(needed)}" if needed else None
