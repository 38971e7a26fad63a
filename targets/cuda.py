"""The CUDA target.

Options: none (PTX for `sm_80`, which runs on Ampere and everything newer), `sm_<N>`, or a name that IREE knows
(`ampere`, `rtx4090`). IREE 3.13 knows no GPU between `sm_89` and `sm_120`; for `sm_90` and newer the artifact holds PTX
for `sm_89`, which the driver of the newer GPU translates when it is loaded.
Devices: an index as CUDA counts them, or part of a device's name, in any case.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import iree.runtime as ireert

from fixstep.targets._adapt import separate_scatters
from fixstep.targets._base import WITHOUT_ELEMENT_TYPE, CodeEdit, Memory
from fixstep.targets._branches import separated_references
from fixstep.targets._devices import choose, none_runs, opened
from fixstep.targets.errors import TargetError

_OPTION = re.compile(r"[a-z][a-z0-9_]*")
_DEFAULT = "sm_80"
_NEWEST_KNOWN = 89


@dataclasses.dataclass(frozen=True)
class Cuda:
    """PTX, finished by the CUDA driver of the machine that runs it."""

    text: str
    architecture: str

    memory: ClassVar[Memory] = "separate"

    def compile_flags(self, module: str = "") -> list[str]:
        """Flags of iree-compile; each stands against a fault or was never worse than the default."""
        del module
        return [
            "--iree-hal-target-device=cuda",
            f"--iree-cuda-target={self.architecture}",
            # Both pipelines fail on shapes that are no multiples of the hardware's tiles.
            "--iree-codegen-llvmgpu-use-reduction-vector-distribution=false",
            "--iree-codegen-llvmgpu-use-vector-distribution=false",
            # Constants would be evaluated on the CPU, with faults of its own.
            "--iree-opt-const-eval=false",
            # Without it float64 silently becomes float32, in the public signature too.
            "--iree-input-demote-f64-to-f32=false",
            # A call returns before the device is done.
            "--iree-execution-model=async-external",
            # As on the CPU (see cpu.py): such command buffers failed in some programs beside other load.
            "--iree-hal-memoization=false",
        ]

    def adapt(self, module: str) -> str:
        """Scatters apart from what makes their operands, which is all that the code generator takes."""
        return separate_scatters(module)

    def code_edits(self, module: str) -> tuple[CodeEdit, ...]:
        """Branches that lose no buffer."""
        return separated_references(module)

    def unsupported(self, dtype: str) -> str | None:
        """What to use instead of a dtype that PTX code of IREE does not hold."""
        return WITHOUT_ELEMENT_TYPE.get(dtype)

    def lacks(self, operation: str) -> str | None:
        """None: every operation that compiles is right, as far as is known."""
        del operation
        return None

    def requirements(self, configured: str, module: str) -> dict[str, Any]:
        """The compute capability that the PTX is written for, 80 for `sm_80`; a device has it or a newer one."""
        del module
        found = re.search(r'arch = "sm_(\d+)', configured)
        return {"compute_capability": int(found.group(1)) if found else None}

    def unavailable(self, requirements: Mapping[str, Any]) -> str | None:
        """Why no GPU of this machine runs the code: no driver, no GPU, or only older ones."""
        found = _devices()
        if isinstance(found, str):
            return found
        return none_runs(found, lambda gpu: _too_old(gpu, requirements))

    def preference(self) -> int:
        """Before every other target."""
        return 30

    def open_device(self, device: str | None, requirements: Mapping[str, Any], *, bytes_per_step: int) -> Any:
        """Open a GPU by its index or a part of its name; by default the first that runs the code."""
        del bytes_per_step
        found = _devices()
        if isinstance(found, str):
            raise TargetError(found)
        chosen = choose(found, device, "cuda", lambda gpu: _too_old(gpu, requirements))
        return opened("cuda", chosen.device_id)


def parse(option: str | None) -> Cuda:
    """The CUDA target with an option.

    Raises:
        TargetError: if the option cannot name a GPU; the compiler says whether it knows the name.
    """
    if option is None:
        return Cuda("cuda", _DEFAULT)
    text = f"cuda:{option}"
    if not _OPTION.fullmatch(option):
        raise TargetError(
            f"unknown target {text!r}: expected cuda, cuda:sm_<N> such as cuda:sm_86, or cuda:<GPU> such as cuda:ampere"
        )
    number = re.fullmatch(r"sm_(\d+)a?", option)
    newer = number is not None and int(number.group(1)) > _NEWEST_KNOWN
    return Cuda(text, f"sm_{_NEWEST_KNOWN}" if newer else option)


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """A GPU that the CUDA driver lists; the capability is 80 for `sm_80`, None where it is not known."""

    index: int
    device_id: int
    name: str
    capability: int | None


@functools.cache
def _devices() -> tuple[_Gpu, ...] | str:
    """The GPUs of this machine, or why there are none."""
    try:
        driver = ireert.get_driver("cuda")
        found = []
        for index, entry in enumerate(driver.query_available_devices()):
            capability = _capability(driver.dump_device_info(entry["device_id"]))
            found.append(_Gpu(index, entry["device_id"], entry["name"], capability))
    except Exception as exc:  # the bindings raise bare RuntimeError and ValueError
        text = str(exc)
        if "libcuda" in text:
            return "there is no CUDA driver (libcuda) on this machine"
        return f"CUDA does not start: {text.splitlines()[0] if text else 'no reason given'}"
    return tuple(found) or "the CUDA driver of this machine lists no GPU"


def _capability(described: str) -> int | None:
    """80 for a device of capability 8.0, from what IREE prints of it."""
    found = re.search(r"gpu-compute-capability: (\d+)\.(\d)", described)
    return int(found.group(1)) * 10 + int(found.group(2)) if found else None


def _too_old(device: _Gpu, requirements: Mapping[str, Any]) -> str | None:
    wanted = requirements.get("compute_capability")
    if wanted is None or device.capability is None or device.capability >= wanted:
        return None
    own = f"sm_{device.capability}"
    return f"{device.name} is {own}, and the code is for sm_{wanted}; compile for cuda:{own}"
