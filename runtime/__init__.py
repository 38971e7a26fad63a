"""Trains compiled steps: artifacts, sessions, the loop and its checkpoints. Needs no JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._load import load
from fixstep.runtime._metrics import Metric, Metrics
from fixstep.runtime._session import Session
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
    from fixstep.runtime._checkpoints import Checkpoints
    from fixstep.runtime._data import ArrayData, DatasetData, load_npz, load_source
    from fixstep.runtime._events import CONTINUE, HALT_EPOCH, HALT_LOOP, Handler, LoopState, On
    from fixstep.runtime._filters import Filter, after, always, before, every, first, once
    from fixstep.runtime._loop import Loop, RunResult
    from fixstep.runtime._metrics_log import MetricsLog
    from fixstep.runtime._monitors import EarlyStop, HaltOnNonFinite, ReduceOnPlateau
    from fixstep.runtime._partial import Loaded, load_leaves
    from fixstep.runtime._progress import LogLines, Progress
    from fixstep.runtime._readings import StateNumber, Throughput
    from fixstep.runtime._tensorboard import TensorBoardLog
    from fixstep.runtime._weights import load_weights, save_weights

# What only checkpoints and training in a loop need is imported when it is first asked for: a process that loads an
# artifact and steps starts a tenth sooner.
_LATER = {
    **dict.fromkeys(("Checkpoint", "CheckpointDirectory", "read_checkpoint", "write_checkpoint"), "_checkpoint"),
    **dict.fromkeys(("ArrayData", "DatasetData", "load_npz", "load_source"), "_data"),
    **dict.fromkeys(("CONTINUE", "HALT_EPOCH", "HALT_LOOP", "Handler", "LoopState", "On"), "_events"),
    **dict.fromkeys(("Filter", "after", "always", "before", "every", "first", "once"), "_filters"),
    **dict.fromkeys(("EarlyStop", "HaltOnNonFinite", "ReduceOnPlateau"), "_monitors"),
    **dict.fromkeys(("Loaded", "load_leaves"), "_partial"),
    **dict.fromkeys(("LogLines", "Progress"), "_progress"),
    **dict.fromkeys(("Loop", "RunResult"), "_loop"),
    **dict.fromkeys(("StateNumber", "Throughput"), "_readings"),
    **dict.fromkeys(("load_weights", "save_weights"), "_weights"),
    "Checkpoints": "_checkpoints",
    "MetricsLog": "_metrics_log",
    "TensorBoardLog": "_tensorboard",
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
    "HALT_EPOCH",
    "HALT_LOOP",
    "ArrayData",
    "Artifact",
    "ArtifactError",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointError",
    "Checkpoints",
    "CompileError",
    "DataError",
    "DatasetData",
    "DeviceError",
    "EarlyStop",
    "Filter",
    "FixpointError",
    "FixstepError",
    "HaltOnNonFinite",
    "Handler",
    "LeafSpec",
    "Loaded",
    "LogLines",
    "Loop",
    "LoopState",
    "Metric",
    "Metrics",
    "MetricsLog",
    "MismatchError",
    "NonFiniteError",
    "On",
    "ProgramError",
    "Progress",
    "ReduceOnPlateau",
    "RunResult",
    "Session",
    "StateNumber",
    "TargetError",
    "TemplateError",
    "TensorBoardLog",
    "Throughput",
    "after",
    "always",
    "before",
    "every",
    "first",
    "load",
    "load_leaves",
    "load_npz",
    "load_source",
    "load_weights",
    "once",
    "read_checkpoint",
    "save_weights",
    "write_checkpoint",
]
