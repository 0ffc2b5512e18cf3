"""Files that appear only whole: written under a temporary name, flushed to disk, renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a write that found no room: disk, quota or file-size limit."""


def write_atomically(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, or, where anything fails, what it held before. Creates the folder.

    Raises:
        OSError: naming `path`, whichever step failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
