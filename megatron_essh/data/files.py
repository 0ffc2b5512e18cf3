"""Files that appear only whole: written under a temporary name, synchronised, renamed.

Knows nothing of tokens. The temporary name is fixed (`<path>.tmp`) and locked while a run writes it: what a
killed run leaves behind is overwritten by the next one, and two runs that write the same path at once are
told apart.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL


class StagedFile:
    """A file that exists as `<path>.tmp` until `publish` gives it its name.

    Raises:
        UserError: the folder cannot be made or written, the disk is full, another run writes the same path, or a
            folder has that name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staged = path.with_name(path.name + ".tmp")
        self.bytes = 0
        self._descriptor: int | None = None
        if path.is_dir():
            raise UserError(f"{path}: a folder has this name; remove it or choose another output")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open_locked(self.staged)
        except BlockingIOError:
            raise UserError(
                f"{self.staged}: another run is writing this file; wait for it or choose another output"
            ) from None
        except OSError as error:
            raise _cannot_write(self.staged, error) from None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        assert self._descriptor is not None, f"{self.path}: written after it was published or discarded"
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._descriptor, view)
                self.bytes += written
                view = view[written:]
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes that were written earlier."""
        assert self._descriptor is not None, f"{self.path}: read after it was published or discarded"
        return os.pread(self._descriptor, size, offset)

    def seal(self) -> None:
        """Bring everything written to the disk: after this nothing but the name is missing."""
        assert self._descriptor is not None, f"{self.path}: sealed after it was published or discarded"
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _cannot_write(self.path, error) from None

    def publish(self) -> None:
        """Give the sealed file its name. Follow the last of a group with `files.sync_folder`."""
        os.replace(self.staged, self.path)
        self._close()

    def discard(self) -> None:
        """Remove the temporary file; does nothing after `publish`."""
        if self._descriptor is not None:
            self.staged.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between our open and our lock the former owner may have renamed or removed the file: the lock is
            # then on a file that is no longer this one, and truncating it would empty a finished output.
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _cannot_write(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    if error.errno in DISK_FULL:
        return UserError(f"{path}: cannot be written: {reason}; free space there or choose another output")
    return UserError(f"{path}: cannot be written: {reason}; check the folder and its permissions")
