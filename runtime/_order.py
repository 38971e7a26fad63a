"""Which examples are in which batch: a pure function of a seed and the epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from fixstep.runtime._signature import Array
from fixstep.targets.errors import DataError


@dataclasses.dataclass(frozen=True)
class Order:
    """The batches of each epoch, as what to pick from the examples; the same on every machine.

    Attributes:
        examples: how many there are.
        batch_size: examples a batch.
        shuffle: whether each epoch has its own random order.
        seed: of the order; not negative.
        drop_last: whether a short last batch is left out.

    Raises:
        DataError: if a number is out of range, or the examples do not fill one batch.
    """

    examples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"expected a batch size of at least 1, got {self.batch_size}")
        if self.seed < 0:
            raise DataError(f"expected a seed of at least 0, got {self.seed}")
        if self.examples < (self.batch_size if self.drop_last else 1):
            raise DataError(f"{self.examples} examples do not fill one batch of {self.batch_size}: add data")

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch."""
        whole, rest = divmod(self.examples, self.batch_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    @property
    def left_out(self) -> int:
        """Examples that an epoch leaves out, because they do not fill a batch."""
        return self.examples % self.batch_size if self.drop_last else 0

    @property
    def identity(self) -> dict[str, Any]:
        """What the order depends on."""
        return dataclasses.asdict(self)

    def batches(self, epoch: int, start: int = 0) -> Iterator[slice | Array]:
        """What to pick for each batch of an epoch (from 1), without the first `start` ones.

        A slice without shuffling; with it, indices, int64 [batch size].
        """
        order = self._permutation(epoch) if self.shuffle else None
        for index in range(start, self.batches_per_epoch):
            chosen = slice(index * self.batch_size, min((index + 1) * self.batch_size, self.examples))
            yield chosen if order is None else order[chosen]

    def _permutation(self, epoch: int) -> Array:
        # numpy keeps the raw stream of a bit generator for ever, but not what Generator.permutation makes of it.
        # A stable sort of random 64-bit words is a permutation that depends on nothing else.
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.examples)
        return np.argsort(words, kind="stable")
