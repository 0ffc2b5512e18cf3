"""Files that appear only whole: written under a temporary name, flushed to disk, renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatron_essh.errors import UserError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a write that found no room: disk, quota or file-size limit."""


def write_atomically(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, or, where anything fails, what it held before. Creates the folder.

    Raises:
        OSError: naming `path`, whichever step failed.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
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


def check_target(path: Path, setting: str) -> None:
    """Refuse, before work begins, a file that could not be written when it is done.

    Raises:
        UserError: `setting` names a folder, or a place in what is no folder or may not be written.
    """
    if not path.name or path.is_dir():
        raise UserError(f"{setting} {path}: a folder; name a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UserError(f"{setting} {path}: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{setting} {path}: {folder} may not be written; choose another folder")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
