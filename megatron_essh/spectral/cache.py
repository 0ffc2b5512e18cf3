"""A disk cache of small NumPy tables by content key.

An entry is one .npz file, named by the hash of its key, that also holds the hash of its contents. Entries
appear by renaming a finished file, so that any number of processes may read and build the same one at the
same time: whoever is last replaces an equal file. The cache is a convenience: what is wrong with it costs a
warning and a rebuild.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ENVIRONMENT_VARIABLE = "ESSH_CACHE"
Arrays = dict[str, NDArray[np.float64]]


def cache_directory() -> Path:
    """$ESSH_CACHE, or ~/.cache/megatron_essh.

    Raises:
        OSError: neither is known (no $ESSH_CACHE and no home directory).
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "megatron_essh"
    except RuntimeError as error:
        raise FileNotFoundError(f"no home directory to keep a cache in ({error})") from None


def cached_arrays(key: Mapping[str, str | int], build: Callable[[], Arrays]) -> Arrays:
    """The arrays of `key`: its entry's where there is a sound one, else `build`'s, which become the entry.

    Args:
        key: everything that the arrays depend on, the version of their algorithm included.
        build: makes the arrays, by name.
    """
    text = json.dumps(dict(key), sort_keys=True)
    try:
        path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz"
    except OSError as error:
        _warn(f"{error}; set ${ENVIRONMENT_VARIABLE} to a directory to keep the tables")
        return build()
    arrays = _read(path, text)
    if arrays is None:
        arrays = build()
        _write(path, text, arrays)
    return arrays


def _read(path: Path, key: str) -> Arrays | None:
    try:
        with np.load(path, allow_pickle=False) as entry:
            arrays = {name: entry[name] for name in entry.files}
        digest = str(arrays.pop("digest"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged file makes zipfile, zlib and NumPy each raise their own
        _warn(f"{path}: unreadable ({type(error).__name__}: {error}); building the tables again")
        return None
    if digest != _digest(key, arrays):
        _warn(f"{path}: damaged, or the tables of something else; building those of {key} again")
        return None
    return arrays


def _digest(key: str, arrays: Arrays) -> str:
    """SHA-256 of a key and its arrays: a zip file's own checksums do not cover its list of contents."""
    digest = hashlib.sha256(key.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _write(path: Path, key: str, arrays: Arrays) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    entry: dict[str, Any] = {"digest": np.array(_digest(key, arrays)), **arrays}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                np.savez(file, **entry)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _warn(
            f"{path.parent}: cannot be written ({error.strerror or error}); every process builds its tables "
            f"anew; set ${ENVIRONMENT_VARIABLE} to a writable directory"
        )


def _warn(message: str) -> None:
    warnings.warn(f"spectral cache: {message}", RuntimeWarning, stacklevel=4)
