"""Standard output and error that outlive their reader: a `| head` that had enough, a `| tee` that Ctrl-C ended too."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

READER_GONE = frozenset({errno.EPIPE, errno.EIO})
"""Error numbers of a write that nobody can read any more: a closed pipe, a terminal that went away."""


def discard(stream: TextIO) -> None:
    """Send all that `stream` still holds, and all that is written to it from now on, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[None]:
    """While entered, standard output and error are discarded, and raise nothing, once their reader is gone."""
    with ExitStack() as stack:
        # A process may have been started without the one or the other.
        if sys.stdout is not None:
            stack.enter_context(redirect_stdout(cast(TextIO, _Lasting(sys.stdout))))
            stack.callback(sys.stdout.flush)
        if sys.stderr is not None:
            stack.enter_context(redirect_stderr(cast(TextIO, _Lasting(sys.stderr))))
        yield


class _Lasting:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard_after(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard_after(error)

    def _discard_after(self, error: OSError) -> None:
        if error.errno not in READER_GONE:
            raise error
        discard(self._stream)
