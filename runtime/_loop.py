"""The training loop: what it is given, and what a run of it gives back. The run itself is in `_run.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from fixstep.runtime._data import as_source
from fixstep.runtime._events import check_handlers
from fixstep.runtime._filters import Filter, always
from fixstep.runtime._run import Run, RunResult
from fixstep.runtime._signals import StopSignals
from fixstep.targets.errors import ProgramError

if TYPE_CHECKING:
    from fixstep.runtime._session import Session

__all__ = ["ON_NONFINITE", "Limits", "Loop", "RunResult"]

ON_NONFINITE = ("stop", "skip", "continue")


class Loop:
    """Trains a session.

    Args:
        session: what is trained.
        handlers: what is called at the loop's events (see `Handler` and `On`), in this order; `Checkpoints` always
            last, so that a checkpoint holds nothing that the others have not seen.
        watch: the metric that must stay finite.
        on_nonfinite: what happens when it does not. `stop` undoes the step and raises NonFiniteError. `skip` undoes the
            step, leaves the batch out, and goes on; 100 in a row raise NonFiniteError. Both read the metric after every
            step, which waits for the device each time. `continue` reads nothing.

    Raises:
        ValueError: if `on_nonfinite` is none of these, or the step has metrics but not the watched one.
        TypeError: if a handler is none.
    """

    def __init__(
        self,
        session: Session,
        handlers: Iterable[object] = (),
        *,
        watch: str = "loss",
        on_nonfinite: Literal["stop", "skip", "continue"] = "stop",
    ) -> None:
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite: expected one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}")
        self.session = session
        self.handlers = tuple(handlers)
        check_handlers(self.handlers)
        self.watch = None if on_nonfinite == "continue" else _watched(session, watch)
        self.on_nonfinite = on_nonfinite

    def run(
        self,
        data: Any,
        *,
        epochs: int = 3,
        iterations: int | None = None,
        max_steps: int | None = None,
        validate: Any = None,
        validate_when: Filter = always,
        prefetch: int = 0,
        resume: bool = False,
    ) -> RunResult:
        """Train until `epochs` epochs are done, counted from the start of the run that is resumed.

        An exception of the data, of a handler or of the session ends the run and is raised as it is; a `Checkpoints`
        handler has then saved the state as it was after the last good step. SIGINT and SIGTERM (in the main thread)
        end the run after the step at hand, with a checkpoint; then the signal is delivered as if it had just come, so
        SIGINT raises KeyboardInterrupt. A second signal acts at once.

        Args:
            data: a source (`ArrayData`, `load_source(...)`, anything with `batches(epoch, start)`), an iterable of
                batches that can be gone through once an epoch, or, with `iterations`, an endless one.
            epochs: how many epochs the whole run has; with 0 nothing is trained, and `started` and `completed` fire.
            iterations: the most batches of an epoch; all by default. With 0 epochs end at once, without a batch.
            max_steps: where given, the run stops when the state has taken so many steps.
            validate: data for `evaluate` at the end of epochs.
            validate_when: of which epochs: `every(5)`. Validation at other events: `LoopState.validate`.
            prefetch: how many batches a thread prepares while a step runs; 0 for none.
            resume: whether to continue from the latest checkpoint of the `Checkpoints` handler's folder. Then the run
                ends bit for bit as if it had not stopped. Without a checkpoint there it starts from the beginning.

        Raises:
            NonFiniteError: see `on_nonfinite`.
            DataError: if an epoch has no batch, or the data is not that of the checkpoint.
            CheckpointError: if the folder has checkpoints and `resume` is false.
            ProgramError: if `validate` is given and the artifact has no `evaluate`.
        """
        limits = Limits(epochs, iterations, max_steps, prefetch)
        if not isinstance(validate_when, Filter) or validate_when.per_epoch:
            raise TypeError(f"validate_when: expected a filter of epochs, such as every(5), got {validate_when!r:.60}")
        if validate is not None and "evaluate" not in self.session.functions:
            raise ProgramError(
                "validation data was given, but the artifact has no evaluate function: "
                "leave it out, or compile a program with evaluate=..."
            )
        validation = None if validate is None else as_source(validate)
        with StopSignals() as signals:
            return Run(self, as_source(data), validation, validate_when, limits, resume, signals).result()


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much a run does: see `Loop.run`."""

    epochs: int
    iterations: int | None
    max_steps: int | None
    prefetch: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{field.name}: expected an integer from 0, got {value!r}")


def _watched(session: Session, watch: str) -> str | None:
    results = session.artifact.manifest["functions"]["step"]["results"]
    names = [leaf["path"] for result in results if result["role"] == "metrics" for leaf in result["leaves"]]
    if names and watch not in names:
        raise ValueError(
            f"the step has no metric {watch!r} to watch; it has {', '.join(names)}: "
            "pass watch=... (--watch), or on_nonfinite='continue' (--on-nonfinite continue)"
        )
    return watch if names else None
