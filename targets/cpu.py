"""The CPU target.

Options: none (portable: any processor of this machine's architecture; on x86-64, any since 2009, or since 2012 if the
program uses float16), `host` (the processor of this machine), the LLVM name of a processor (`x86-64-v3`, `znver4`), or
a target triple (`aarch64-linux-gnu`), which cross-compiles.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import iree.runtime as ireert

from fixstep.targets._adapt import round_integers_first
from fixstep.targets._base import WITHOUT_ELEMENT_TYPE, CodeEdit, Memory
from fixstep.targets._branches import separated_references
from fixstep.targets.errors import TargetError

_ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64", "arm_64": "aarch64"}
_TRIPLE = re.compile(r"(x86_64|aarch64|arm64|riscv64|armv7a)-[a-z0-9_.-]+")

# LLVM's names of x86 features that compiled code may use, where /proc/cpuinfo spells them otherwise.
_X86_FLAG = {
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "avxvnni": "avx_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512bitalg": "avx512_bitalg",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}
_X86_CHECKED = re.compile(
    r"sse3|ssse3|sse4\.[12]|popcnt|avx|avx2|avx512\w+|avxvnni|fma|f16c|bmi2?|lzcnt|movbe|gfni|amx-\w+"
)
_ARM_FLAG = {"neon": "asimd", "fullfp16": "asimdhp", "dotprod": "asimddp", "sve": "sve", "i8mm": "i8mm", "bf16": "bf16"}
_ARM_CHECKED = re.compile("|".join(_ARM_FLAG))

# Below it (SSE 4.1) rounding is a call into a C library, which compiled code does not have.
_PORTABLE_X86 = "x86-64-v2"
_FLOAT16 = re.compile(r"[<x]f16>")

# Below this a step is too short to be worth handing to worker threads.
_THREADED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Cpu:
    """Code for a CPU, run by IREE's `local-sync` or `local-task` driver."""

    text: str
    cpu: str
    triple: str | None

    memory: ClassVar[Memory] = "host"

    def compile_flags(self, module: str = "") -> list[str]:
        """Flags of iree-compile; each stands against a fault or was never worse than the default."""
        flags = [
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            # Without it float64 silently becomes float32, in the public signature too.
            "--iree-input-demote-f64-to-f32=false",
            # Without it a float32 sum runs one element after the other: 2^25 ones sum to 2^24.
            "--iree-llvmcpu-reassociate-fp-reductions=true",
            # Command buffers that are kept between calls failed in some programs with conditionals beside other load;
            # recording them anew costs a few microseconds a call.
            "--iree-hal-memoization=false",
        ]
        if self.triple is not None:
            return [*flags, f"--iree-llvmcpu-target-triple={self.triple}"]
        if self.cpu == _PORTABLE_X86 and _FLOAT16.search(module):
            # Without the instruction of 2012, the conversion to float16 loses numbers below 6.1e-5.
            flags.append("--iree-llvmcpu-target-cpu-features=+f16c")
        return [*flags, f"--iree-llvmcpu-target-cpu={self.cpu}"]

    def adapt(self, module: str) -> str:
        """Conversions of integers to bfloat16 in two steps: those in one call a C library on older processors."""
        return round_integers_first(module)

    def code_edits(self, module: str) -> tuple[CodeEdit, ...]:
        """Branches that lose no buffer."""
        return separated_references(module)

    def unsupported(self, dtype: str) -> str | None:
        """What to use instead of a dtype that IREE's CPU code does not hold or computes wrongly."""
        return WITHOUT_ELEMENT_TYPE.get(dtype)

    def lacks(self, operation: str) -> str | None:
        """None: every operation that compiles is right, as far as is known."""
        del operation
        return None

    def requirements(self, configured: str, module: str) -> dict[str, Any]:
        """The architecture, and the processor features that the code may use."""
        del module
        triple = re.search(r'target_triple = "([^-"]+)', configured)
        features = re.search(r'cpu_features = "([^"]*)"', configured)
        architecture = triple.group(1) if triple else platform.machine().lower()
        wanted = {name[1:] for name in features.group(1).split(",") if name.startswith("+")} if features else set()
        checked = _ARM_CHECKED if architecture == "aarch64" else _X86_CHECKED
        return {
            "architecture": architecture,
            "features": sorted(name for name in wanted if checked.fullmatch(name)),
        }

    def unavailable(self, requirements: Mapping[str, Any]) -> str | None:
        """Why this machine's processor cannot run the code: an illegal instruction would end the process."""
        machine = platform.machine().lower()
        wanted = str(requirements.get("architecture", machine))
        if _ARCHITECTURES.get(machine, machine) != _ARCHITECTURES.get(wanted, wanted):
            return f"it is code for {wanted}, and this machine is {machine}"
        present = _processor_flags()
        names = _ARM_FLAG if wanted == "aarch64" else _X86_FLAG
        absent = [f for f in requirements.get("features", []) if present and names.get(f, f) not in present]
        if absent:
            return f"this processor lacks {', '.join(absent)}; compile for `cpu`, which runs on any {wanted}"
        return None

    def preference(self) -> int:
        """The CPU is what every machine has; 0."""
        return 0

    def open_device(self, device: str | None, requirements: Mapping[str, Any], *, bytes_per_step: int) -> Any:
        """Open `local-sync` (runs in the calling thread) or `local-task` (worker threads).

        By default large steps take the threads. Both give the same bits.
        """
        del requirements
        threaded = bytes_per_step >= _THREADED_BYTES and _cores() > 1
        driver = device or ("local-task" if threaded else "local-sync")
        if driver not in ("local-sync", "local-task"):
            raise TargetError(f"unknown device {driver!r} of target cpu: expected local-sync or local-task")
        if driver == "local-task":
            # Workers pinned to cores, IREE's default, wait for each other beside any other load. The flag is read
            # when the driver is made, so it is set before that.
            ireert.flags.parse_flags(f"--task_topology_group_count={_cores()}")
        return ireert.get_device(driver)


def parse(option: str | None) -> Cpu:
    """The CPU target with an option.

    Raises:
        TargetError: if the option is neither `host`, a processor name, nor a triple.
    """
    if option is None:
        architecture = _ARCHITECTURES.get(platform.machine().lower())
        return Cpu("cpu", _PORTABLE_X86 if architecture == "x86_64" else "generic", None)
    text = f"cpu:{option}"
    if _TRIPLE.fullmatch(option):
        return Cpu(text, "", option)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", option):
        raise TargetError(
            f"unknown target {text!r}: expected cpu, cpu:host, cpu:<processor> such as cpu:x86-64-v3, "
            "or cpu:<triple> such as cpu:aarch64-linux-gnu"
        )
    return Cpu(text, option, None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_flags() -> frozenset[str]:
    """The features that Linux reports for the first processor; empty where it cannot be known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(line.group(1).split()) if line else frozenset()
