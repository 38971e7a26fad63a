"""Taking over the state of a checkpoint of another program, leaf by leaf."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from fixstep.runtime._checkpoint import explain_mismatch, read_checkpoint
from fixstep.targets.errors import CheckpointError

if TYPE_CHECKING:
    from fixstep.runtime._session import Session


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came of a checkpoint's leaves.

    Attributes:
        kept: the leaf paths that were taken from the checkpoint.
        missing: the program's leaves that it does not have, or has with another dtype or shape; they stay as they were.
        unexpected: its leaves that the program does not have, or has with another dtype or shape.
    """

    kept: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.kept)} leaves kept, {len(self.missing)} missing, {len(self.unexpected)} unexpected"]
        for what in ("kept", "missing", "unexpected"):
            lines += [f"  {what}: {path or '<the state itself>'}" for path in getattr(self, what)]
        return "\n".join(lines)


def load_leaves(session: Session, path: str | os.PathLike[str], *, strict: bool = True) -> Loaded:
    """Take over the state of a checkpoint, of this program or another one; nothing else of it.

    Args:
        session: whose state is set. Its count of steps and its averages stay.
        path: the checkpoint.
        strict: whether every leaf must fit. If not, those that fit in path, dtype and shape are taken.

    Returns:
        Which leaves were kept, missing and unexpected.

    Raises:
        CheckpointError: if the file is damaged; if the leaves differ and `strict` is true, with each that does; or if
            no leaf fits.
    """
    saved = read_checkpoint(path)
    ours = {spec.path: spec for spec in session.artifact.signature("step", "state")}
    theirs = {spec.path: spec for spec in saved.template}
    kept = tuple(p for p in ours if p in theirs and ours[p] == theirs[p])
    if (ours and not kept) or (strict and len(kept) < max(len(ours), len(theirs))):
        how = "" if not kept else "\nTake over the leaves that fit with strict=False (--in-part)."
        raise CheckpointError(
            f"{os.fspath(path)}: the leaves are not those of {session.artifact.manifest['name']}:\n"
            f"{explain_mismatch(list(ours.values()), saved.template)}{how}"
        )
    session.load_state(session.state() | {p: saved.leaves[p] for p in kept})
    missing = tuple(p for p in ours if p not in kept)
    return Loaded(kept, missing, tuple(p for p in theirs if p not in kept))
