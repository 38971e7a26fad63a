"""What every target offers; one small file per target beside this one implements it."""

from __future__ import annotations

from typing import Any, Protocol


class Target(Protocol):
    """One place to run: how to compile for it, how to open its device, which dtypes it can hold.

    Attributes:
        name: the family, `cpu`; the part of the text before the colon.
        text: the target as written, `cpu:host`.
    """

    name: str
    text: str

    def compile_flags(self) -> list[str]:
        """Flags of iree-compile for this target, complete but for input and output."""
        ...

    def unsupported(self, dtypes: set[str]) -> dict[str, str]:
        """Dtypes among those given that the target cannot hold or compute with, and what to do instead."""
        ...

    def requirements(self) -> dict[str, Any]:
        """What a machine needs to run code for this target, as JSON; kept in the artifact."""
        ...
