"""Single files of tensors or bytes, hashed while they are written, and synced to disk.

The safetensors format itself (an 8-byte header length, a JSON header, the raw tensors) is written here so that one
tensor at a time is on the host, the hashes are of what memory held, and a full disk is a plain OSError. Knows nothing
of what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_essh.errors import UserError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

CHUNK_BYTES = 4 << 20
"""What a reader has on the host at a time of a file, and what is hashed at a time of one that is written."""
LARGEST_HEADER = 100_000_000
"""Bytes; what the safetensors library accepts."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Its first byte, from the file's begin."""
    bytes: int


class Layout:
    """Where everything is in a safetensors file of these tensors: a function of their names, dtypes and shapes."""

    def __init__(
        self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
    ) -> None:
        # Widest dtype first keeps every tensor aligned to its own element size.
        order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
        header: dict[str, dict[str, object]] = {"__metadata__": dict(metadata)} if metadata else {}
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name in order:
            dtype, shape = tensors[name]
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            places[name] = begin, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = struct.pack("<Q", len(text)) + text
        """The file's first bytes: all that is not tensors."""
        self.bytes = len(self.header) + end
        """The file's size."""
        self.stored = {
            name: Stored(*tensors[name], len(self.header) + begin, end - begin) for name, (begin, end) in places.items()
        }
        """In the order of the file."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of a file of these very tensors."""
        return cls({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})


def raw_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor of any device and layout, in order, a chunk at a time."""
    if tensor.numel():
        flat = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for begin in range(0, len(flat), CHUNK_BYTES):
            yield flat[begin : begin + CHUNK_BYTES]


def file_chunks(layout: Layout, tensor: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file of that layout; `tensor` is asked for one tensor after the other."""
    yield layout.header
    for name in layout.stored:
        yield from raw_chunks(tensor(name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write `tensors` to the new safetensors file `path`, synced to disk; returns its (bytes, SHA-256).

    Any shape, layout and device; dtypes are kept (floats, integers, uint8, bool).
    """
    return write_synced(path, file_chunks(Layout.of(tensors), tensors.__getitem__))


def write_hashed_tensors(path: Path, layout: Layout, tensor: Callable[[str], Tensor]) -> dict[str, str]:
    """Write a new safetensors file, synced to disk; returns the SHA-256 of each tensor's bytes, by name."""
    hashes: dict[str, str] = {}

    def chunks() -> Iterator[bytes | memoryview]:
        yield layout.header
        for name in layout.stored:
            digest = hashlib.sha256()
            for chunk in raw_chunks(tensor(name)):
                digest.update(chunk)
                yield chunk
            hashes[name] = digest.hexdigest()

    write_synced(path, chunks(), hashed=False)
    return hashes


def write_synced(path: Path, chunks: Iterable[bytes | memoryview], *, hashed: bool = True) -> tuple[int, str]:
    """Write `chunks` to the new file `path`, synced to disk; returns its (bytes, SHA-256).

    `hashed` False leaves the hash empty, for a caller that hashes the chunks itself.
    """
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            if hashed:
                digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest() if hashed else ""


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU, in memory of their own, `prefix` before each name.

    Raises:
        UserError: the file is not in the safetensors format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # A clone, because the library may map the file and a checkpoint may be deleted under a live run.
            names = file.keys()  # the handle itself cannot be iterated
            return {prefix + name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None


def map_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A safetensors file's tensors, which are read from it when they are used, and its metadata. The file must stay.

    Raises:
        UserError: the file is not in the safetensors format, or of a dtype that is not ours.
    """
    header, stored = read_layout(path)
    metadata = json.loads(header[8:]).get("__metadata__", {})
    content = torch.from_numpy(np.memmap(path, np.uint8, "c")) if stored else torch.empty(0, dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    for name, place in stored.items():
        raw = content[place.offset : place.offset + place.bytes]
        if raw.data_ptr() % place.dtype.itemsize:
            raw = raw.clone()
        tensors[name] = (
            raw.view(place.dtype).view(place.shape) if place.bytes else torch.empty(place.shape).to(place.dtype)
        )
    return tensors, metadata


def read_layout(path: Path) -> tuple[bytes, dict[str, Stored]]:
    """The header of a safetensors file, as bytes, and where its tensors lie.

    Raises:
        UserError: the file is not in the safetensors format, or of a dtype that is not ours.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        text = file.read(length) if length <= min(LARGEST_HEADER, size - 8) else b""
    try:
        header = json.loads(text)
        stored = {}
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            begin, end = fields["data_offsets"]
            dtype, shape = DTYPES[fields["dtype"]], tuple(fields["shape"])
            if not 0 <= begin <= end <= size - 8 - length or torch.Size(shape).numel() * dtype.itemsize != end - begin:
                raise ValueError(f"tensor {name} lies outside the file")
            stored[name] = Stored(dtype, shape, 8 + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); write or copy it again") from None
    return prefix + text, stored


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
