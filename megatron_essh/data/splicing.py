"""Whole stretches of other files appended to a staged file, inside the kernel where it can."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from megatron_essh.data.files import StagedFile
from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL

_SLICE = 64 << 20  # bytes between two signs of progress
_BUFFER = 4 << 20  # where the bytes must come through this process after all

_CANNOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF})
"""Error numbers by which a system call says that it does not do this between these files."""

_Way = Callable[[int, int, int, int], int]
"""Copies up to `count` bytes: (target, source, begin, count) -> bytes copied."""


class SplicedFile(StagedFile):
    """A staged file that takes stretches of other files without bringing them into this process."""

    def append(self, source: Path, begin: int, count: int, progress: Callable[[int], None] = lambda _: None) -> None:
        """Append `count` bytes of `source` from byte `begin` on; `progress` is told of every slice's bytes.

        Raises:
            UserError: the source ends too early or cannot be read, or the disk is full.
        """
        ways: list[_Way] = [
            _copy_file_range,
            _sendfile,
            _read_and_write,
        ]  # on some file systems the first shares the blocks
        end = begin + count
        try:
            with source.open("rb", buffering=0) as file:
                while begin < end:
                    copied = self._take(ways, file.fileno(), begin, min(_SLICE, end - begin))
                    if not copied:
                        raise UserError(f"{source}: ends at byte {begin}, {end - begin} too early; copy it again")
                    begin += copied
                    progress(copied)
        except OSError as error:
            remedy = "free space there or choose another output" if error.errno in DISK_FULL else "check both files"
            raise UserError(f"{source}: cannot be copied to {self.path}: {error.strerror}; {remedy}") from None

    def _take(self, ways: list[_Way], source: int, begin: int, count: int) -> int:
        """Copy up to `count` bytes by the first of `ways` that works here, and drop those that do not."""
        assert self._descriptor is not None, f"{self.path}: written after it was published or discarded"
        while True:
            try:
                copied = ways[0](self._descriptor, source, begin, count)
            except OSError as error:
                if error.errno not in _CANNOT or len(ways) == 1:
                    raise
                copied = 0
            if copied or len(ways) == 1:
                self.bytes += copied
                return copied
            del ways[0]  # some file systems give nothing where they should refuse


def _copy_file_range(target: int, source: int, begin: int, count: int) -> int:
    return os.copy_file_range(source, target, count, offset_src=begin)


def _sendfile(target: int, source: int, begin: int, count: int) -> int:
    return os.sendfile(target, source, begin, count)


def _read_and_write(target: int, source: int, begin: int, count: int) -> int:
    return os.write(target, os.pread(source, min(count, _BUFFER), begin))
