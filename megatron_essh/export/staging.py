"""Where an export is written before it gets its name: a hidden folder beside it, which one process owns.

The lock is the operating system's: it ends with its process, so that what a killed export left is cleared by the
next one to the same place, and two that run at once are told apart. Knows nothing of what an export holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_essh.errors import UserError

LOCK = "lock"
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A folder on `target`'s disk, empty but for its lock, that is gone with all in it when the block ends.

    Makes the parent of `target` when missing.

    Raises:
        UserError: another process is writing `target`.
    """
    place = target.with_name(f".{target.name}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(place, target)
    try:
        _clear(place)
        yield place
    finally:
        # The lock goes last: from then on the folder may be another process's, and is removed only if empty.
        _clear(place)
        (place / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            place.rmdir()
        os.close(lock)


def _lock(place: Path, target: Path) -> int:
    while True:
        with contextlib.suppress(FileExistsError):
            place.mkdir()
        try:
            lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # its former owner removed the folder just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"{target}: another process is writing an export there; wait for it") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(lock)
                raise
            print(f"warning: {place} cannot be locked here: never write one export twice at once", file=sys.stderr)
            return lock
        # Between our open and our lock the former owner may have removed the file, which then locks nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(place / LOCK), os.fstat(lock)):
                return lock
        os.close(lock)


def _clear(place: Path) -> None:
    for entry in place.iterdir():
        if entry.name != LOCK:
            shutil.rmtree(entry)
