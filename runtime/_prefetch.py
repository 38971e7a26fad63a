"""Batches that a thread makes ready while a step runs."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class Prefetch:
    """Goes through an iterator in a thread of its own, some batches ahead.

    The thread also prepares each batch, which hands it to the device. What the iterator raises is raised in its turn.
    The iterator is used by that thread alone, and closed there.

    Args:
        batches: the iterator.
        depth: how many batches are made ahead.
        prepare: makes of a batch what is given out; a copy, because an iterator may use its memory again.
        give_back: called on `close` with the batches that nobody took, in their order.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        depth: int,
        prepare: Callable[[Any], Any],
        give_back: Callable[[list[Any]], None],
    ) -> None:
        self._batches = batches
        self._prepare = prepare
        self._give_back = give_back
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fixstep-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch, failure = self._ready.get()
        if failure is not None or batch is _END:
            self._ready.put((batch, failure))  # the next call hears the same
            if failure is not None:
                raise failure
            raise StopIteration
        self._room.release()
        return batch

    def close(self) -> None:
        """End the thread and wait for it; a batch that it is making is finished first.

        Where the process is to end at once (KeyboardInterrupt, SystemExit), nothing is waited for.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._room.release()
        leaving = sys.exc_info()[1]
        if leaving is not None and not isinstance(leaving, Exception):
            return
        self._thread.join()
        unused = []
        while not self._ready.empty():
            batch, failure = self._ready.get()
            if failure is None and batch is not _END:
                unused.append(batch)
        self._give_back(unused)

    def _work(self) -> None:
        last: tuple[Any, BaseException | None] = (_END, None)
        try:
            try:
                self._fill()
            finally:
                close = getattr(self._batches, "close", None)
                if callable(close):
                    close()
        except BaseException as exc:
            last = (None, exc)
        self._ready.put(last)

    def _fill(self) -> None:
        while True:
            self._room.acquire()
            if self._closing.is_set():
                return
            try:
                batch = next(self._batches)
            except StopIteration:
                return
            self._ready.put((self._prepare(batch), None))
