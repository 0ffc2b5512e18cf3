"""A lock by which one process of many makes a file and the others wait for it.

A file in a folder that may be shared between machines: made by exclusive creation, it says who holds it, and its time
stamp is renewed while its owner lives. A dead owner is told at once on its own machine, by its process, and elsewhere
by a time stamp that stands still. The lock saves work and decides nothing: should two processes ever hold it, as when
two take over from the same dead owner at one moment, both make the same file, each under a temporary name of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

STALE_SECONDS = 120.0
"""A lock of another machine whose time stamp stood still for this long has lost its owner."""
UNSIGNED_SECONDS = 10.0
"""The same for a lock that says nothing: its owner was killed before it could sign, or is about to."""
RENEW_SECONDS = 5.0
"""Between two renewals of the time stamp."""
LONGEST_PAUSE = 1.0
"""Seconds between two looks of a process that waits."""


class BuildLock:
    """The right to make `path`, which is whole once it stands.

    Args:
        path: what is made. The lock is `<path>.lock`; its holder may write to `temporary` alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path.with_name(path.name + ".lock")
        self._token = uuid.uuid4().hex
        self.temporary = _temporary(path, self._token)
        self._end = threading.Event()
        self._renewing: threading.Thread | None = None

    def made_or_held(self, find: Callable[[], T | None]) -> T | None:
        """What `find` finds at `path`, as soon as another process has made it; None: this process holds the lock now.

        Raises:
            OSError: the folder cannot be written.
        """
        seen: tuple[int, bytes] | None = None
        told, pause, since = False, 0.01, time.monotonic()
        begin = since
        while True:
            found = find()
            if found is not None:
                return found
            if self._create():
                # Between the look and the lock the former owner may have finished.
                found = find()
                if found is not None:
                    self.release()
                return found
            content = _read(self.lock)
            if content is None:
                continue  # just released
            if content != seen:
                seen, since = content, time.monotonic()
            patience = STALE_SECONDS if content[1] else UNSIGNED_SECONDS
            if _is_dead(content[1]) or time.monotonic() - since > patience:
                self._take_away(content[1])
                continue
            if not told and time.monotonic() - begin > RENEW_SECONDS:
                told = True
                print(f"waiting for {_name(content[1])} to make {self.path}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def release(self) -> None:
        """Give the lock up, and remove the temporary file where it still stands."""
        self._end.set()
        if self._renewing is not None:
            self._renewing.join()
        self.temporary.unlink(missing_ok=True)
        content = _read(self.lock)
        if content is not None and _owner(content[1]).get("token") == self._token:
            self.lock.unlink(missing_ok=True)

    def __enter__(self) -> BuildLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _create(self) -> bool:
        owner = {"machine": socket.gethostname(), "system": _system(), "pid": os.getpid()}
        content = json.dumps({**owner, "started": _started(os.getpid()), "token": self._token}).encode()
        try:
            descriptor = os.open(self.lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._renewing = threading.Thread(target=self._renew, daemon=True)
        self._renewing.start()
        return True

    def _renew(self) -> None:
        while not self._end.wait(RENEW_SECONDS):
            try:
                os.utime(self.lock)
            except OSError:
                return  # taken away

    def _take_away(self, content: bytes) -> None:
        """Remove a dead owner's lock, its temporary file first, so that none is ever left without a lock."""
        token = _owner(content).get("token")
        if isinstance(token, str):
            _temporary(self.path, token).unlink(missing_ok=True)
        current = _read(self.lock)
        if current is not None and current[1] == content:
            self.lock.unlink(missing_ok=True)


def _temporary(path: Path, token: str) -> Path:
    return path.with_name(f"{path.name}.{token}.tmp")


def _read(lock: Path) -> tuple[int, bytes] | None:
    """Time stamp and content of a lock; None where there is none."""
    try:
        with lock.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None


def _owner(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:  # its owner was killed between making and filling it
        return {}
    return owner if isinstance(owner, dict) else {}


def _name(content: bytes) -> str:
    owner = _owner(content)
    return (
        f"process {owner['pid']} on {owner['machine']}" if "pid" in owner and "machine" in owner else "another process"
    )


def _is_dead(content: bytes) -> bool:
    """Whether the owner is known to be dead: it ran here, and its process is gone."""
    owner = _owner(content)
    if not owner or owner.get("system") != _system():
        return False
    return owner.get("started") is not None and _started(owner.get("pid", 0)) != owner["started"]


def _system() -> str | None:
    """This running machine and its process numbers, unlike any other's; None where Linux does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When process `pid` began, in the kernel's ticks; None where no such process lives."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else fields[18].decode()
