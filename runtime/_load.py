"""Opening an artifact: which of its targets runs here, and the session's first state."""

from __future__ import annotations

import os
from typing import Any

from fixstep import targets
from fixstep.runtime._artifact import Artifact
from fixstep.runtime._device import Device, Module
from fixstep.runtime._session import Choice, Session
from fixstep.targets.errors import DeviceError, TargetError, TemplateError

_NO_SEED = (
    "seed has no effect: the program was compiled with a fixed first state; compile it with init=<function of a key>"
)


def load(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    state: Any | None = None,
) -> Session:
    """Open an artifact on the best device present.

    Args:
        path: the `.fixstep` file.
        target: which of its targets, `cpu:host`, or a family, `cpu`; by default the best that this machine has.
        device: which device of the target, as the target's file says.
        seed: for the program's `init`, 0 to 2^64 − 1; 0 by default. Refused if the program brings its own state.
        state: the first state instead, nested containers of arrays or a mapping from leaf path to array.

    Raises:
        ArtifactError: if the file is damaged or of another version.
        TargetError: if no target of the artifact runs here, with the reason for each.
        TemplateError: if `state` does not fit the template.
    """
    artifact = Artifact.open(path)
    has_init = "init" in artifact.manifest["functions"]
    if seed is not None and (state is not None or not has_init):
        raise TemplateError("seed has no effect: the first state is given" if has_init else _NO_SEED)
    if seed is not None and not 0 <= seed < 2**64:
        raise TemplateError(f"seed: expected 0 to 2^64 - 1, got {seed}")
    choice, opened, module = _open(artifact, target, device)
    return Session(artifact, choice, opened, module, seed=seed or 0, state=state)


def _open(artifact: Artifact, wanted: str | None, device: str | None) -> tuple[Choice, Device, Module]:
    """The first target, best family first, whose device opens and whose code loads."""
    entries = artifact.manifest["targets"]
    matching = [e for e in entries if wanted is None or wanted in (e["text"], e["text"].partition(":")[0])]
    if not matching:
        compiled = ", ".join(entry["text"] for entry in entries)
        raise TargetError(f"the artifact has no code for target {wanted!r}; it was compiled for {compiled}")
    matching.sort(key=lambda entry: _rank(entry["text"]))
    bytes_per_step = sum(s.byte_length for role in ("state", "batch") for s in artifact.signature("step", role))
    reasons: list[str] = []
    for entry in matching:
        opened = None
        try:
            target = targets.parse(entry["text"])
            reason = target.unavailable(entry["requires"])
            if reason is None:
                hal_device = target.open_device(device, entry["requires"], bytes_per_step=bytes_per_step)
                opened = Device(hal_device, memory=target.memory)
                module = opened.load(artifact.member(entry["module"]))
                return Choice(entry["text"], opened.name, tuple(reasons)), opened, module
        except (TargetError, DeviceError) as exc:
            reason = str(exc)
        if opened is not None:
            opened.close()
        reasons.append(f"{entry['text']}: {reason}")
    raise TargetError("\n".join(["no target of the artifact runs on this machine:", *(f"  {r}" for r in reasons)]))


def _rank(text: str) -> tuple[int, bool]:
    """The best device first; for one device, code for its own kind before portable code."""
    try:
        preference = targets.parse(text).preference()
    except TargetError:  # said, with the reason, when its turn comes
        preference = 0
    return (-preference, ":" not in text)
