"""The handler that saves checkpoints: by steps, by time, at each epoch's end, and the best."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Literal

from fixstep.runtime._checkpoint import CheckpointDirectory, Latest
from fixstep.runtime._events import LoopState
from fixstep.runtime._files import sync_folder
from fixstep.runtime._monitor import Monitor
from fixstep.targets.errors import CheckpointError


class Checkpoints:
    """Saves the session and the loop's position: at each epoch's end, when the run stops, and as the options say.

    A new checkpoint is on the disk before an old one is removed. The loop calls this handler last.

    Args:
        directory: the folder, which is made if need be.
        every: steps between checkpoints inside an epoch; none by default.
        every_s: seconds after which a checkpoint is due, at the next step; none by default.
        keep: how many of the newest stay.
        best: a metric, such as `validation/loss`. Whenever it is better than ever before, the checkpoint of that
            moment is also kept in the folder `best` within; the newest there is the best.
        mode: whether less of that metric is better (`min`) or more (`max`).
        keep_best: how many of the best stay: the best, and those that it outdid.

    Raises:
        ValueError: if a number is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1 step, got {every}")
        if every_s is not None and not every_s > 0:
            raise ValueError(f"every_s: expected more than 0 seconds, got {every_s}")
        for name, count in (("keep", keep), ("keep_best", keep_best)):
            if count < 1:
                raise ValueError(f"{name}: expected at least 1 checkpoint, got {count}")
        self.directory = Path(directory)
        self._files = CheckpointDirectory(directory)
        self._best_files = CheckpointDirectory(self.directory / "best")
        self._every = every
        self._every_s = every_s
        self._keep, self._keep_best = keep, keep_best
        self._best = None if best is None else Monitor(best, mode=mode)
        self._judged_at = -1
        self._saved: tuple[int, dict[str, Any]] | None = None
        self._saved_s = time.monotonic()

    def latest(self) -> Latest:
        """The newest whole checkpoint in the folder, and what was passed over because it is damaged."""
        return self._files.latest()

    def state(self) -> dict[str, Any]:
        """The best value so far, and at which step a value was last looked at."""
        return {} if self._best is None else {**self._best.state(), "judged_at": self._judged_at}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        if self._best is not None and state:
            self._best.load_state(state)
            self._judged_at = int(state["judged_at"])

    def on_started(self, state: LoopState) -> None:
        """Makes the folder; refuses one that holds another run's checkpoints.

        Raises:
            CheckpointError: if there are checkpoints and the run does not resume, or the folder cannot be made.
            ProgramError: if there is no such metric as `best`.
        """
        if self._best is not None:
            self._best.check(state)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise CheckpointError(f"{self.directory}: cannot be made a folder of checkpoints: {exc.strerror}") from exc
        files = [] if state.resume else [*self._files.files(), *self._best_files.files()]
        if files:
            raise CheckpointError(
                f"{self.directory} already holds checkpoints, the newest {files[0].name}: "
                "continue that run with resume=True (--resume), or choose another folder"
            )
        self._saved = (state.steps, state.position)
        self._saved_s = time.monotonic()

    def on_iteration_completed(self, state: LoopState) -> None:
        """Saves after every N steps, when the time has come, or when a validation was the best."""
        if self._best is not None and self._best.of_validation and state.validated_at > self._judged_at:
            self._judge(state)
        if self._every is not None and state.steps % self._every == 0:
            self._save(state)
        if self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s:
            self._save(state)

    def on_epoch_completed(self, state: LoopState) -> None:
        """Saves at an epoch's end."""
        if self._best is not None and (not self._best.of_validation or state.validated_at > self._judged_at):
            self._judge(state)
        self._save(state)

    def on_epoch_halted(self, state: LoopState) -> None:
        """Saves where an epoch was ended."""
        self._save(state)

    def on_stopped(self, state: LoopState) -> None:
        """Saves what is not saved yet."""
        self._save(state)

    def _judge(self, state: LoopState) -> None:
        """Save the best when it is the best.

        It is written before the ordinary checkpoint: if the process dies between the two, the resumed run comes to this
        step again and writes the same file.
        """
        assert self._best is not None
        self._judged_at = state.steps
        if self._best.improves(self._best.value(state)):
            path = self._best_files.save(state.steps, lambda path: state.session.save(path, position=state.position))
            self._best_files.prune(self._keep_best)
            self._save(state, like=path)

    def _save(self, state: LoopState, *, like: Path | None = None) -> None:
        now = (state.steps, state.position)
        if now == self._saved:
            return

        def write(path: Path) -> None:
            if like is None or not _link(like, path):
                state.session.save(path, position=now[1])

        state.checkpoint = self._files.save(state.steps, write)
        self._saved, self._saved_s = now, time.monotonic()
        self._files.prune(self._keep)


def _link(old: Path, new: Path) -> bool:
    """Give a whole file, which nobody ever changes, a second name; false where the system cannot."""
    partial = new.with_name(f".fixstep-{os.urandom(8).hex()}.partial")
    with contextlib.suppress(OSError):
        os.link(old, partial)
        os.replace(partial, new)
        partial.unlink(missing_ok=True)  # a rename onto a name of the same file does nothing
        sync_folder(new.parent)
        return True
    return False
