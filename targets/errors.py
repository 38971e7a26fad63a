"""Every error that fixstep raises on purpose.

    FixstepError
    ├── TemplateError(ValueError)      a batch, a state or inputs that do not fit the template
    ├── FixpointError(TypeError)       a step whose state types never stop moving
    ├── ArtifactError(ValueError)      an artifact file that is damaged, foreign or of another version
    ├── CheckpointError(ValueError)    a checkpoint that is damaged or belongs to another program
    ├── TargetError(ValueError)        an unknown target, an absent device, a dtype that the target cannot hold
    ├── ProgramError(ValueError)       a Program that is not one: a bad function, a bad import path
    ├── CompileError(RuntimeError)     an operation that has no lowering, or a compiler that failed
    ├── MismatchError(ArithmeticError) a compiled step that does not compute what JAX computes
    ├── DeviceError(RuntimeError)      a device that failed a call
    ├── DataError(ValueError)          data that cannot be read or does not fill a batch
    └── NonFiniteError(ArithmeticError) a loss that became infinite or NaN

Each also derives from the built-in that a caller expects. They stand on the ground floor because every floor raises
them; `fixstep.runtime` exports them.
"""


class FixstepError(Exception):
    """Base of every error that fixstep raises on purpose; its text is meant for the user."""


class TemplateError(FixstepError, ValueError):
    """A batch, a state or inputs do not fit the template."""


class FixpointError(FixstepError, TypeError):
    """The state of a step has no fixed point in structure, shape and dtype."""


class ArtifactError(FixstepError, ValueError):
    """An artifact file is damaged, foreign, or of another version."""


class CheckpointError(FixstepError, ValueError):
    """A checkpoint is damaged, or belongs to another program."""


class TargetError(FixstepError, ValueError):
    """A target is unknown, its device is absent, or it cannot hold a dtype."""


class ProgramError(FixstepError, ValueError):
    """A Program is malformed, or cannot be imported."""


class CompileError(FixstepError, RuntimeError):
    """An operation has no lowering, or the compiler failed."""


class MismatchError(FixstepError, ArithmeticError):
    """A compiled step does not compute what JAX computes."""


class DeviceError(FixstepError, RuntimeError):
    """A device failed a call; the state is what it was before the call."""


class DataError(FixstepError, ValueError):
    """Data cannot be read, or does not fill a batch."""


class NonFiniteError(FixstepError, ArithmeticError):
    """A metric that the loop watches became infinite or NaN."""
