"""Trains compiled steps: artifacts, sessions, the loop and its checkpoints. Needs no JAX."""

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._checkpoint import Checkpoint, CheckpointDirectory, read_checkpoint, write_checkpoint
from fixstep.runtime._data import ArrayData, load_npz, load_source
from fixstep.runtime._events import CONTINUE, STOP, Handler, LoopState
from fixstep.runtime._handlers import Checkpoints, Progress
from fixstep.runtime._loop import Loop, RunResult
from fixstep.runtime._metrics import Metric, Metrics
from fixstep.runtime._metrics_log import MetricsLog
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
