"""Batches that were checked, copied and, on a GPU, handed to the device before the step that takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fixstep.runtime._device import Device, View
from fixstep.runtime._signature import Array, as_array, flatten


class Fitted(NamedTuple):
    """The checked leaves of a batch; where it may have any size, that and the one that they are padded to."""

    arrays: list[Array]
    size: int | None
    padded: int | None


class Taken(NamedTuple):
    """A batch on the device: its buffers, and the sizes as in `Fitted`."""

    views: list[View]
    size: int | None
    padded: int | None


class PreparedBatch:
    """A batch for the session that prepared it; made by `Session.prepare`.

    Attributes:
        batch: the copy on the host, arrays by leaf path.
    """

    __slots__ = ("_device", "batch", "fitted", "taken")

    def __init__(self, device: Device, batch: dict[str, Array], fitted: Fitted, views: list[View] | None) -> None:
        """Hold the checked leaves and, if it was handed over, its buffers."""
        device.lend()
        self._device = device
        self.batch = batch
        self.fitted = fitted
        self.taken = None if views is None else Taken(views, fitted.size, fitted.padded)

    def is_for(self, device: Device) -> bool:
        """Whether the session with this device prepared it."""
        return self._device is device

    def __del__(self) -> None:
        self.taken = None  # before the device, which closes with the last buffer
        self._device.take_back()


def copied(batch: Any) -> dict[str, Any]:
    """A copy of the batch as contiguous arrays by leaf path; a leaf that is no array stays, for the check to refuse.

    A copy, because an iterator may fill the same memory again for its next batch.
    """
    leaves = {path: (value, as_array(value)) for path, value in flatten(batch).items()}
    return {
        path: value if isinstance(array, str) else np.array(array, order="C") for path, (value, array) in leaves.items()
    }
