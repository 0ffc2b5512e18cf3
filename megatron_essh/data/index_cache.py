"""Orders kept on disk: drawn once, then mapped into memory by every process that needs them.

An entry is one file of named arrays, `<hash of its key>.order`:

    byte 0     the eight bytes "ESSHORD1"
    byte 8     u64 length of the header
    byte 16    the header, JSON: the key, and of each array name, type, shape and place
    then       the arrays, little-endian, each at a multiple of 64 bytes

Its key holds everything that the arrays depend on: of files, the hash of their content. An entry is written under a
temporary name, brought to the disk and renamed, so that what has the name is whole. Knows nothing of what the arrays
mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_essh.data.build_lock import BuildLock
from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL, sync_folder

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

_MAGIC = b"ESSHORD1"
_START = struct.Struct("<8sQ")
_LONGEST_HEADER = 1 << 20
_ALIGNED = 64
_PIECE = 64 << 20


def cached_arrays(folder: Path | None, key: Mapping[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """The arrays of `key`: those that lie in `folder`, mapped read-only, or `build`'s, which from then on lie there.

    However many processes ask at once, on however many machines that share the folder, one builds and the others wait
    for it. A process that is killed meanwhile leaves no entry, and does not hold up the others.

    Args:
        folder: of the cache; made where it is missing. None: nothing is kept.
        key: everything that the arrays depend on, the version of their algorithm included; JSON-able.
        build: makes the arrays, by name.

    Raises:
        UserError: the folder cannot be read or written.
    """
    if folder is None:
        return build()
    text = json.dumps(dict(key), sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.order"
    try:
        found = _open(path, text)
        if found is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with BuildLock(path) as lock:
            found = lock.made_or_held(lambda: _open(path, text))
            if found is None:
                if path.exists():
                    print(f"warning: {path}: not a whole entry of the index cache; making it anew", file=sys.stderr)
                _write(path, lock.temporary, text, build())
                found = _open(path, text)
        assert found is not None, f"{path}: was written, and does not open"
        return found
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "free space there" if error.errno in DISK_FULL else "check the folder and its permissions"
        raise UserError(
            f"data.index_cache: {path}: cannot be read or written: {reason}; {remedy}, name another folder, or set "
            "data.index_cache: null"
        ) from None


def _write(path: Path, temporary: Path, text: str, arrays: Arrays) -> None:
    described: list[dict[str, Any]] = []
    place = 0
    stored = {name: array.astype(array.dtype.newbyteorder("<"), copy=False) for name, array in arrays.items()}
    for name, array in stored.items():
        described.append({"name": name, "dtype": array.dtype.str, "shape": array.shape, "place": place})
        place = _aligned(place + array.nbytes)
    header = json.dumps({"key": text, "arrays": described}).encode()
    assert len(header) <= _LONGEST_HEADER, f"a header of {len(header)} bytes"
    first = _aligned(_START.size + len(header))
    with temporary.open("wb") as file:
        file.write(_START.pack(_MAGIC, len(header)) + header)
        for description, array in zip(described, stored.values(), strict=True):
            file.seek(first + description["place"])
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for begin in range(0, len(raw), _PIECE):
                file.write(raw[begin : begin + _PIECE].data)
        file.truncate(first + place)  # the last array's padding: the size tells a whole entry
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def _open(path: Path, text: str) -> Arrays | None:
    """The entry's arrays, or None where none of this key stands there whole."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            places = _described(file.read(_START.size + _LONGEST_HEADER), size, text)
            if places is None:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
    return {name: np.ndarray(shape, dtype, mapped, offset) for name, dtype, shape, offset in places}


def _described(head: bytes, size: int, text: str) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int]] | None:
    """Name, type, shape and offset of each array by the file's first bytes; None where it is no whole entry."""
    try:
        magic, length = _START.unpack_from(head)
        header = json.loads(head[_START.size : _START.size + length])
        if magic != _MAGIC or header["key"] != text:
            return None
        place = _aligned(_START.size + length)
        found = []
        for array in header["arrays"]:
            dtype, shape = np.dtype(array["dtype"]), tuple(map(int, array["shape"]))
            found.append((str(array["name"]), dtype, shape, place + array["place"]))
        _, dtype, shape, offset = found[-1]
        whole = _aligned(offset + math.prod(shape) * dtype.itemsize)
    except (struct.error, ValueError, KeyError, TypeError, IndexError):
        return None
    return found if whole == size else None


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNED) * _ALIGNED
