"""Single files of tensors or bytes, hashed while they are written, and synced to disk.

`write_tensors` writes the safetensors format itself (an 8-byte header length, a JSON header, the raw tensors)
so that one tensor at a time is on the host, the hash is of what memory held, and a full disk is a plain
OSError. Reading goes through the safetensors library. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_essh.errors import UserError

_DTYPE_NAMES = {
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write `tensors` to the new safetensors file `path`, synced to disk; returns its (bytes, SHA-256).

    Any shape, layout and device; dtypes are kept (floats, integers, uint8, bool).
    """
    # Widest dtype first keeps every tensor aligned to its own element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterable[bytes | memoryview]:
        yield struct.pack("<Q", len(text))
        yield text
        for name in names:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                yield flat.view(torch.uint8).numpy().data

    return write_synced(path, chunks())


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write `chunks` to the new file `path`, synced to disk; returns its (bytes, SHA-256)."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


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


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
