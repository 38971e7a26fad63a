"""SIGINT and SIGTERM while a loop runs: finish the step first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which the first SIGINT or SIGTERM is only noted; a second one acts at once.

    On leaving, the previous handlers are back and a noted signal is delivered to them, so that the process does what
    the sender expects of it: KeyboardInterrupt for SIGINT, the end for SIGTERM, or what the program itself had set.
    Outside the main thread Python delivers no signals, and the context does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # started by nohup, or in the background
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if self.received is not None and exc is None:
            sys.stdout.flush()
            sys.stderr.flush()
            signal.raise_signal(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self.received = signal.Signals(number)
        # Not print: the signal may have come in the middle of one, and a stream cannot be entered twice.
        os.write(2, f"\nfixstep: {self.received.name}: stopping after this step; once more ends at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
