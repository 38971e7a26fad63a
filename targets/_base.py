"""What every target offers; one small file per target beside this one implements it.

A target file has `parse(option: str | None) -> Target`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

Memory = Literal["host", "shared", "separate"]

# What no target holds, and what to use instead: IREE has no such element type. Other types below eight bits and the
# eight-bit floats never get to a target, because the frontend carries them in wider ones.
WITHOUT_ELEMENT_TYPE = {
    "int1": "int2 or bool (IREE has no such element type)",
    "uint1": "uint2 or bool (IREE has no such element type)",
    **dict.fromkeys(
        ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), "float8_e4m3fn (IREE has no such element type)"
    ),
}


@dataclasses.dataclass(frozen=True)
class CodeEdit:
    """A change to what the compiler has made, between two of its phases.

    Attributes:
        phase: the last phase before it, a name that iree-compile knows (`vm`).
        name: what it does, in words that change with it.
        apply: from the code in the compiler's text form to the code as it should be.
    """

    phase: str
    name: str
    apply: Callable[[str], str]


class Target(Protocol):
    """One place to run: how to compile for it, how to open its device, which dtypes it can hold.

    Attributes:
        text: the target as written, `cpu:host`.
        memory: how the host gets at the device's memory: it is the host's own, the driver may let the host share it,
            or it is separate.
    """

    text: str
    memory: Memory

    def compile_flags(self, module: str = "") -> list[str]:
        """Flags of iree-compile for this target and a StableHLO module, complete but for input and output."""
        ...

    def adapt(self, module: str) -> str:
        """The StableHLO text as this target's code generator needs it: the same numbers, every line in its place."""
        ...

    def code_edits(self, module: str) -> tuple[CodeEdit, ...]:
        """What the compiled code of a module needs that the compiler leaves out, in the order of the phases."""
        ...

    def unsupported(self, dtype: str) -> str | None:
        """What to use instead of a dtype that the target cannot hold or compute with; None if it can."""
        ...

    def lacks(self, operation: str) -> str | None:
        """Why an operation of StableHLO, by its name without the dialect, is refused; None if it is not."""
        ...

    def requirements(self, configured: str, module: str) -> dict[str, Any]:
        """What the compiled code needs of a machine and its device, as JSON for the artifact.

        Args:
            configured: the `#hal.executable.target` attribute that the compiler made of the flags.
            module: the StableHLO text that is compiled.
        """
        ...

    def unavailable(self, requirements: Mapping[str, Any]) -> str | None:
        """Why this machine cannot run code with these requirements; None if it can."""
        ...

    def preference(self) -> int:
        """The higher, the sooner `load` tries the target on this machine; the CPU has 0."""
        ...

    def open_device(self, device: str | None, requirements: Mapping[str, Any], *, bytes_per_step: int) -> Any:
        """Open a device of this target.

        Args:
            device: which one, as the target's file says; None for the default.
            requirements: those of the code that will run on it.
            bytes_per_step: bytes of state and batch that a step touches, a hint of its size.

        Returns:
            An `iree.runtime.HalDevice`.

        Raises:
            TargetError: if there is no such device.
        """
        ...
