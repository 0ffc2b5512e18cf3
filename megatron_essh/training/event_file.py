"""A TensorBoard event file of scalars, written in this thread: a full disk is an error where it happens.

(The writer that PyTorch and TensorBoard share works in a thread of its own, which dies of such an error with a
traceback and leaves the caller to find out later.)
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """A new event file in `folder`. TensorBoard hides what earlier files there hold from step `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self.path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self.path, "xb")  # noqa: SIM115  # closed by close()
        self._records = RecordWriter(self._file)
        self._write(Event(step=first_step, file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add one point."""
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))

    def flush(self) -> None:
        """Let readers see all points."""
        self._file.flush()

    def sync(self) -> None:
        """Bring all points to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
