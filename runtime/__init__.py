"""Trains compiled steps: artifacts, sessions, the loop and its checkpoints. Needs no JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._metrics import Metric, Metrics
from fixstep.runtime._session import Session, load
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import (
    ArtifactError,
    CheckpointError,
    CompileError,
    DataError,
    DeviceError,
    FixpointError,
    FixstepError,
    MismatchError,
    NonFiniteError,
    ProgramError,
    TargetError,
    TemplateError,
)

if TYPE_CHECKING:
    from fixstep.runtime._checkpoint import Checkpoint, CheckpointDirectory, read_checkpoint, write_checkpoint
    from fixstep.runtime._data import ArrayData, load_npz, load_source
    from fixstep.runtime._events import CONTINUE, STOP, Handler, LoopState
    from fixstep.runtime._handlers import Checkpoints, Progress
    from fixstep.runtime._loop import Loop, RunResult
    from fixstep.runtime._metrics_log import MetricsLog

# What only checkpoints and training in a loop need is imported when it is first asked for: a process that loads an
# artifact and steps starts a tenth sooner.
_LATER = {
    **dict.fromkeys(("Checkpoint", "CheckpointDirectory", "read_checkpoint", "write_checkpoint"), "_checkpoint"),
    **dict.fromkeys(("ArrayData", "load_npz", "load_source"), "_data"),
    **dict.fromkeys(("CONTINUE", "STOP", "Handler", "LoopState"), "_events"),
    **dict.fromkeys(("Checkpoints", "Progress"), "_handlers"),
    **dict.fromkeys(("Loop", "RunResult"), "_loop"),
    "MetricsLog": "_metrics_log",
}


def __getattr__(name: str) -> Any:
    """Import a name of `_LATER`."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


__all__ = [
    "CONTINUE",
    "STOP",
    "ArrayData",
    "Artifact",
    "ArtifactError",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointError",
    "Checkpoints",
    "CompileError",
    "DataError",
    "DeviceError",
    "FixpointError",
    "FixstepError",
    "Handler",
    "LeafSpec",
    "Loop",
    "LoopState",
    "Metric",
    "Metrics",
    "MetricsLog",
    "MismatchError",
    "NonFiniteError",
    "ProgramError",
    "Progress",
    "RunResult",
    "Session",
    "TargetError",
    "TemplateError",
    "load",
    "load_npz",
    "load_source",
    "read_checkpoint",
    "write_checkpoint",
]
