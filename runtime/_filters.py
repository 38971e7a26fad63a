"""When an attached function is called: at which of its event's occurrences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

Rule = Literal["always", "every", "after", "before", "once"]


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which occurrences of an event count, by their number; made by `every`, `after`, `before`, `once`.

    Attributes:
        rule: how the number is compared with `n`.
        n: the number, at least 1.
        per_epoch: whether occurrences are numbered anew in each epoch.
    """

    rule: Rule
    n: int = 1
    per_epoch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"{self.rule}: expected an integer of at least 1, got {self.n!r}")

    def test(self) -> Callable[[int], bool]:
        """The filter as a function of the occurrence's number, from 1."""
        n = self.n
        tests: dict[Rule, Callable[[int], bool]] = {
            "always": lambda number: True,
            "every": lambda number: number % n == 0,
            "after": lambda number: number > n,
            "before": lambda number: number < n,
            "once": lambda number: number == n,
        }
        return tests[self.rule]


always = Filter("always")
"""Every occurrence."""

first = Filter("once")
"""The first occurrence of the whole run; the first of each epoch is `once(1, per_epoch=True)`."""


def every(n: int, *, per_epoch: bool = False) -> Filter:
    """The occurrences number n, 2n, 3n, …, counted from the start of the run, or of each epoch.

    Raises:
        ValueError: if `n` is not an integer of at least 1; so do the others.
    """
    return Filter("every", n, per_epoch)


def after(n: int, *, per_epoch: bool = False) -> Filter:
    """The occurrences after number n."""
    return Filter("after", n, per_epoch)


def before(n: int, *, per_epoch: bool = False) -> Filter:
    """The occurrences before number n."""
    return Filter("before", n, per_epoch)


def once(n: int, *, per_epoch: bool = False) -> Filter:
    """The occurrence number n alone."""
    return Filter("once", n, per_epoch)
