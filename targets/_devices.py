"""What targets share whose devices a driver lists: choosing one by index or name, and keeping it open."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import iree.runtime as ireert

from fixstep.targets.errors import TargetError


class Listed(Protocol):
    """A device as its driver lists it: its place in the list, and what the driver calls it."""

    @property
    def index(self) -> int:
        """Its place in the driver's list."""
        ...

    @property
    def name(self) -> str:
        """What the driver calls it."""
        ...


D = TypeVar("D", bound=Listed)


def choose(found: Sequence[D], device: str | None, family: str, lacks: Callable[[D], str | None]) -> D:
    """The device that a text names.

    Args:
        found: the devices of this machine, the best first; at least one.
        device: an index, part of a name in any case, or None for the first that runs the code.
        family: the target family, for messages.
        lacks: why a device does not run the code; None if it does.

    Raises:
        TargetError: if no device has that name, or the one that has it does not run the code.
    """
    if device is None:
        fitting = list(found)
    elif device.isdecimal():
        fitting = [d for d in found if d.index == int(device)]
    else:
        fitting = [d for d in found if device.lower() in d.name.lower()]
    if not fitting:
        names = ", ".join(f"{d.index}: {d.name}" for d in sorted(found, key=lambda d: d.index))
        raise TargetError(f"no device {device!r} of target {family}; there are: {names}")
    chosen = next((d for d in fitting if lacks(d) is None), fitting[0])
    reason = lacks(chosen)
    if reason is not None:
        raise TargetError(reason)
    return chosen


@dataclasses.dataclass
class _Opened:
    device: Any
    uses: int


_opened: dict[tuple[str, int], _Opened] = {}


def opened(driver: str, device_id: int) -> Any:
    """A device that all who open it share; each has to give it back with `released` after all its buffers are gone.

    Buffers and semaphores that outlive their device would crash the process, so one that is not given back stays open.
    """
    entry = _opened.get((driver, device_id))
    if entry is None:
        device = ireert.get_driver(driver).create_device(device_id)
        entry = _opened[driver, device_id] = _Opened(device, 0)
        # When the interpreter ends it empties the modules in any order, but `sys` after all others.
        _until_the_end().append(device)
    entry.uses += 1
    return entry.device


def released(device: Any) -> None:
    """Give a device back; the last one to do so closes it.

    An open device costs memory and, with Mesa's software driver, two cores: IREE has a thread for each of its queues
    that waits on either of two semaphores, which Mesa does by asking for each in turn without a pause.
    """
    for entry in list(_opened.values()):
        if entry.device is device:
            entry.uses -= 1
            if entry.uses == 0 and not sys.is_finalizing():
                forget(device)
                _until_the_end().remove(device)


def forget(device: Any) -> None:
    """Open another one the next time in place of a device that failed."""
    for key in [key for key, entry in _opened.items() if entry.device is device]:
        del _opened[key]


def _until_the_end() -> list[Any]:
    found: list[Any] = vars(sys).setdefault("_fixstep_devices", [])
    return found


def none_runs(found: Sequence[D], lacks: Callable[[D], str | None]) -> str | None:
    """Why none of the devices runs the code; None if one does."""
    reasons = [lacks(device) for device in found]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)
