"""A graceful stop: the first SIGTERM or SIGINT lets the loop finish its step and save, the second aborts."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulStop:
    """While entered, notes a stop request instead of dying of it. Main thread only.

    A second signal kills the process as that signal does by default; saves are made to stand that.

    Args:
        echo_seconds: how long after the first signal another is the same request: launchers pass on what their
            processes have been sent already.
    """

    def __init__(self, echo_seconds: float = 0.0) -> None:
        self._echo_seconds = echo_seconds
        self._since = 0.0
        self.requested: str | None = None
        """Name of the signal that asked, or None."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if time.monotonic() - self._since < self._echo_seconds:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._since = time.monotonic()
        self.requested = signal.Signals(number).name
        message = f"{self.requested}: finishing this step, then saving; send it again to abort\n"
        # os.write, because a handler may interrupt a print and must not enter it again; Ctrl-C may have ended the
        # reader of our output as well.
        with suppress(OSError):
            os.write(2, message.encode())
