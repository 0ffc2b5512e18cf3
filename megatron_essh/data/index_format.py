"""The layout of `P.bin` and `P.idx`, and the checks that a file must pass to be taken for one.

`P.bin` holds raw little-endian tokens without a header; `P.idx`, little-endian and unpadded:

    byte 0         the nine bytes "MMIDIDX\\0\\0"
    byte 9         u64 version, 1
    byte 17        u8 token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    byte 18        u64 number of sequences N
    byte 26        u64 number of document boundaries D, documents + 1
    byte 34        i32[N] lengths in tokens
    byte 34 + 4N   i64[N] byte offsets into P.bin
    byte 34 + 12N  i64[D] boundaries: document d is sequences boundary[d] to boundary[d + 1]

An empty document repeats a boundary and has no sequence.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_essh.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_TYPE_NAMES = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")  # codes 1 to 8
DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name) for code, name in enumerate(_TYPE_NAMES, 1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 1 << 20  # entries handled at one time wherever a whole file is walked

WHOLLY_CHECKED = 4 << 20
"""Sequences and boundaries up to which opening a pair checks every one (80 MB of index, 50 ms)."""
_CHECKED_BLOCKS = 64
_CHECKED_BLOCK = 4096

_INT32_VOCABULARY = 65_500  # from here on a token no longer goes into 16 bits
_AGAIN = "copy or make the pair again"

WHOLLY_HASHED = 64 << 20
"""Bytes of a file up to which `content_digest` covers all of it."""
_HASHED_BLOCKS = 256
_HASHED_BLOCK = 256 << 10


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that tokens of a vocabulary are stored in: uint16 under 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < _INT32_VOCABULARY else np.dtype("<i4")


def pack_header(dtype: np.dtype[Any], sequences: int, documents: int) -> bytes:
    """The first 34 bytes of an index."""
    return HEADER.pack(MAGIC, 1, CODES[dtype], sequences, documents + 1)


def index_bytes(sequences: int, boundaries: int) -> int:
    """Size of an index."""
    return HEADER.size + 12 * sequences + 8 * boundaries


def file_bytes(path: Path, prefix: Path) -> int:
    """Size of a file of the pair `prefix`; UserError where it is none."""
    if not path.is_file():
        if Path(f"{prefix}").suffix in (".bin", ".idx") and prefix.is_file():
            raise UserError(f"{prefix}: name the pair by its prefix, {prefix.with_suffix('')}")
        what = "not a file" if path.exists() else "no such file"
        raise UserError(
            f"{path}: {what}; {prefix} must name a pair .bin and .idx (tools/preprocess_data.py makes them)"
        )
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def read_header(path: Path, size: int) -> tuple[np.dtype[Any], int, int]:
    """Token type, sequences N and boundaries D, all consistent with the file's size."""
    if size == 0:
        raise UserError(f"{path}: empty file; {_AGAIN}")
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise UserError(f"{path}: magic: {head[: len(MAGIC)]!r}, expected {MAGIC!r}: not a Megatron index; {_AGAIN}")
    if len(head) < HEADER.size:
        raise UserError(f"{path}: {size} bytes, shorter than its header of {HEADER.size}: truncated; {_AGAIN}")
    _, version, code, sequences, boundaries = HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{path}: version: {version}, and 1 is the only one there is; {_AGAIN}")
    if code not in DTYPES:
        raise UserError(f"{path}: token type: code {code}, expected 1 to 8; {_AGAIN}")
    if boundaries < 1:
        raise UserError(f"{path}: document boundaries: {boundaries}, expected documents + 1; {_AGAIN}")
    expected = index_bytes(sequences, boundaries)
    if size == expected + sequences and sequences:
        raise UserError(f"{path}: a multimodal index (a mode per sequence); only pairs of plain text can be read")
    if size != expected:
        state = "truncated" if size < expected else "not an index of this layout"
        raise UserError(
            f"{path}: {size} bytes, and {sequences} sequences with {boundaries} boundaries take "
            f"{expected}: {state}; {_AGAIN}"
        )
    return DTYPES[code], sequences, boundaries


def check_boundaries(
    path: Path, boundaries: npt.NDArray[np.int64], sequences: int, blocks: Iterable[tuple[int, int]]
) -> None:
    """Hold `boundaries` to run from 0 to `sequences` without ever falling.

    Args:
        path: for the error.
        boundaries: int64 [D].
        sequences: N.
        blocks: the parts [begin, end) to look at, in order, the last one up to D.
    """
    known, previous = 0, 0
    for begin, end in blocks:
        chunk = boundaries[begin:end]
        if begin != known:
            previous = int(chunk[0])
            if not 0 <= previous <= sequences:
                raise UserError(
                    f"{path}: document boundaries: entry {begin} is {previous}, expected 0 to {sequences}; {_AGAIN}"
                )
        falls = np.flatnonzero(chunk < np.concatenate([[previous], chunk[:-1]]))
        if falls.size:
            where = begin + int(falls[0])
            raise UserError(
                f"{path}: document boundaries: entry {where} is {int(boundaries[where])}, "
                f"below the one before it; {_AGAIN}"
            )
        known, previous = end, int(chunk[-1])
    if int(boundaries[0]) != 0 or previous != sequences:
        raise UserError(
            f"{path}: document boundaries: from {int(boundaries[0])} to {previous}, expected 0 to {sequences}; {_AGAIN}"
        )


def check_sequences(
    path: Path,
    sizes: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    itemsize: int,
    blocks: Iterable[tuple[int, int]],
) -> int:
    """Bytes of the `.bin` that the sequences take; each must begin where the one before it ends.

    Stricter than a range check on purpose: offsets of 32 bits that wrapped around, which merging long corpora
    has produced elsewhere, are in range and wrong.

    Args:
        path: for the error.
        sizes: int32 [N], tokens in each sequence.
        offsets: int64 [N], where each begins.
        itemsize: bytes of a token.
        blocks: the parts [begin, end) to look at, in order, the last one up to N.
    """
    known, position = 0, 0
    for begin, end in blocks:
        lengths = sizes[begin:end].astype(np.int64)
        negative = np.flatnonzero(lengths < 0)
        if negative.size:
            where = int(negative[0])
            raise UserError(f"{path}: lengths: sequence {begin + where} has {int(lengths[where])} tokens; {_AGAIN}")
        if begin != known:
            position = int(offsets[begin])
            if not 0 <= position < 1 << 62 or position % itemsize:
                raise UserError(
                    f"{path}: offsets: sequence {begin} at byte {position} of the .bin, where no token of {itemsize} "
                    f"bytes can begin; {_AGAIN}"
                )
        ends = position + np.cumsum(lengths) * itemsize
        wrong = np.flatnonzero(offsets[begin:end] != ends - lengths * itemsize)
        if wrong.size:
            where = int(wrong[0])
            raise UserError(
                f"{path}: offsets: sequence {begin + where} at byte {int(offsets[begin + where])} of the "
                f".bin, expected {int(ends[where] - lengths[where] * itemsize)} (the end of the one before "
                "it); make the pair again, or merge its parts again"
            )
        known, position = end, int(ends[-1])
    return position


def whole_blocks(entries: int) -> Iterator[tuple[int, int]]:
    """All of `entries` as parts [begin, end) of bounded size."""
    return ((begin, min(begin + CHUNK, entries)) for begin in range(0, entries, CHUNK))


def spread_blocks(entries: int) -> list[tuple[int, int]]:
    """Parts [begin, end) spread evenly over `entries`, both ends among them; all of it where there are few."""
    if entries <= _CHECKED_BLOCKS * _CHECKED_BLOCK:
        return list(whole_blocks(entries))
    last = entries - _CHECKED_BLOCK
    begins = (last * i // (_CHECKED_BLOCKS - 1) for i in range(_CHECKED_BLOCKS))
    return [(begin, begin + _CHECKED_BLOCK) for begin in begins]


def content_digest(path: Path) -> bytes:
    """SHA-256 of a file's size and content, of 256 blocks spread over it where it is larger than 64 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode() + b"\n")
    with path.open("rb", buffering=0) as file:
        if size <= WHOLLY_HASHED:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            last = size - _HASHED_BLOCK
            for i in range(_HASHED_BLOCKS):
                file.seek(last * i // (_HASHED_BLOCKS - 1))
                digest.update(file.read(_HASHED_BLOCK))
    return digest.digest()


def pair_fingerprint(idx: Path, bin_: Path) -> str:
    """SHA-256 of a pair's content, 64 hex digits; see `IndexedDataset.fingerprint`."""
    digest = hashlib.sha256(b"megatron_essh token pair\n")
    for path in (idx, bin_):
        digest.update(content_digest(path))
    return digest.hexdigest()
