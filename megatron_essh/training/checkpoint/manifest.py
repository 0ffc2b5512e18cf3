"""manifest.json: which files a checkpoint consists of, which piece of which tensor lies where in them, and its hash.

Version 2 is written; version 1, of which single processes wrote model.safetensors and optimizer.safetensors with a hash
for the whole of each, is still read. Both come out as one `Manifest`. Every byte of a checkpoint is under a hash: a
tensor's by its own, a header's by its own, state.json's, and the manifest's by one that it carries itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_essh.errors import UserError
from megatron_essh.parallel.interleave import Sharding
from megatron_essh.training.checkpoint.files import DTYPE_NAMES, DTYPES, Layout, read_layout
from megatron_essh.training.checkpoint.pieces import Piece, Span, part_shape

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
MANIFEST_FILE = "manifest.json"
MODEL_PREFIX = "model."
FORMAT, VERSION = "megatron_essh checkpoint", 2


class DamagedCheckpoint(UserError):
    """What was a checkpoint once, and is not whole or not as it was saved; the message says which file and tensor."""


@dataclass(frozen=True)
class Entry:
    """A piece of a tensor in a file of a checkpoint."""

    name: str
    key: str
    """What the safetensors file calls it."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    sharding: Sharding | None
    span: Span
    offset: int
    """Its first byte, from the file's begin."""
    bytes: int
    sha256: str | None
    """None in version 1, where a file has one hash as a whole."""

    @classmethod
    def of(cls, name: str, key: str, piece: Piece, offset: int) -> Entry:
        """The entry of a piece that is to be written there; its hash is not known yet."""
        span = piece.span
        sharding = piece.sharding if span.tp > 1 else None
        return cls(name, key, piece.tensor.dtype, piece.shape, sharding, span, offset, piece.bytes, None)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return part_shape(self.shape, self.sharding, self.span)

    def to_mapping(self) -> dict[str, Any]:
        """Ready for JSON; where a piece is the whole tensor, nothing is said of its place in it."""
        mapping: dict[str, Any] = {"name": self.name}
        if self.key != self.name:
            mapping["key"] = self.key
        mapping |= {"dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape)}
        if self.sharding is not None:
            mapping |= {"units": self.sharding.units, "rows": self.sharding.rows}
            mapping |= {"tp": self.span.tp, "tp_rank": self.span.tp_rank}
        if self.span.numel != self.span.local:
            mapping |= {"start": self.span.start, "end": self.span.end}
        return mapping | {"offset": self.offset, "bytes": self.bytes, "sha256": self.sha256}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Entry:
        """What `to_mapping` gave; KeyError, TypeError or ValueError where it is nothing of the sort."""
        shape = tuple(mapping["shape"])
        sharding = Sharding(mapping["units"], mapping["rows"]) if "units" in mapping else None
        place = (mapping.get("tp", 1), mapping.get("tp_rank", 0), mapping.get("start", 0), mapping.get("end"))
        span = Span.of(shape, sharding, *place)
        dtype = DTYPES[mapping["dtype"]]
        if mapping["bytes"] != span.numel * dtype.itemsize:
            raise ValueError(f"{mapping['bytes']} bytes for {span.numel} elements")
        name = mapping["name"]
        return cls(
            name,
            mapping.get("key", name),
            dtype,
            shape,
            sharding,
            span,
            mapping["offset"],
            mapping["bytes"],
            mapping["sha256"],
        )


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file of a checkpoint."""

    bytes: int
    sha256: str | None = None
    """Of the whole file; None where its parts have hashes."""
    header_bytes: int = 0
    header_sha256: str | None = None
    entries: tuple[Entry, ...] = ()
    """In the order of the file. Empty for state.json, and for version 1, where the file's own header tells."""

    def to_mapping(self) -> dict[str, Any]:
        """Ready for JSON."""
        if self.sha256 is not None:
            return {"bytes": self.bytes, "sha256": self.sha256}
        pieces = [entry.to_mapping() for entry in self.entries]
        header = {"header_bytes": self.header_bytes, "header_sha256": self.header_sha256}
        return {"bytes": self.bytes, **header, "pieces": pieces}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> FileRecord:
        """What `to_mapping` gave; KeyError, TypeError or ValueError where it is nothing of the sort."""
        if "sha256" in mapping:
            return cls(int(mapping["bytes"]), str(mapping["sha256"]))
        entries = tuple(Entry.from_mapping(piece) for piece in mapping["pieces"])
        return cls(int(mapping["bytes"]), None, int(mapping["header_bytes"]), str(mapping["header_sha256"]), entries)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    path: Path
    """The checkpoint's folder."""
    version: int
    step: int
    save: str
    """Names the very act of saving, so that all ranks of a run can tell their own from an older one of that step."""
    files: dict[str, FileRecord]

    @property
    def tensor_files(self) -> list[str]:
        """Names of the safetensors files."""
        return [name for name in self.files if name != STATE_FILE]

    def entries(self, file: str) -> tuple[Entry, ...]:
        """The pieces in a safetensors file.

        Raises:
            DamagedCheckpoint: version 1, and the file's header cannot be read.
        """
        if self.version == VERSION:
            return self.files[file].entries
        return tuple(_entries_of_version_1(self.path / file, MODEL_PREFIX if file == MODEL_FILE else ""))

    def files_with(self, prefixes: Iterable[str]) -> list[str]:
        """Names of the safetensors files that can hold a tensor whose name begins with one of `prefixes`."""
        begins = tuple(prefixes)
        if self.version == 1:  # whose entries only the files themselves tell
            sides = {begin.startswith(MODEL_PREFIX) for begin in begins}
            return [f for f in self.tensor_files if "" in begins or (f == MODEL_FILE) in sides]
        return [
            f
            for f in self.tensor_files
            if "" in begins or any(e.name.startswith(begins) for e in self.files[f].entries)
        ]

    def all_entries(self) -> Iterator[Entry]:
        """Every piece."""
        for file in self.tensor_files:
            yield from self.entries(file)


def _entries_of_version_1(path: Path, prefix: str) -> Iterator[Entry]:
    try:
        _, stored = read_layout(path)
    except (OSError, UserError) as error:
        raise DamagedCheckpoint(str(error)) from None
    for key, t in stored.items():
        yield Entry(prefix + key, key, t.dtype, t.shape, None, Span.of(t.shape), t.offset, t.bytes, None)


def plan_file(pieces: Mapping[str, tuple[str, Piece]]) -> tuple[Layout, tuple[Entry, ...]]:
    """How a file of these pieces, key -> (name, piece), is laid out, and its entries, in the file's order."""
    shapes = {
        key: (piece.tensor.dtype, part_shape(piece.shape, piece.sharding, piece.span))
        for key, (_, piece) in pieces.items()
    }
    layout = Layout(shapes)
    return layout, tuple(Entry.of(pieces[key][0], key, pieces[key][1], s.offset) for key, s in layout.stored.items())


def encode_manifest(step: int, save: str, files: Mapping[str, FileRecord]) -> bytes:
    """The content of manifest.json."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "save": save,
        "files": {name: record.to_mapping() for name, record in files.items()},
    }
    return _dump(manifest | {"sha256": _digest(manifest)})


def _dump(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=1).encode()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(manifest)).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint `path`.

    Raises:
        DamagedCheckpoint: there is none, it cannot be read, is another program's, or was changed.
    """
    file = path / MANIFEST_FILE
    if not path.is_dir():
        raise DamagedCheckpoint(f"{path}: no such checkpoint folder")
    try:
        content = file.read_bytes()
        manifest = json.loads(content)
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path}: not a megatron_essh checkpoint, or an unfinished one: it has no {MANIFEST_FILE}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{file}: cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{file}: not the manifest of a megatron_essh checkpoint")
    version = manifest.get("version")
    if version == 1:
        return _read_version_1(path, file, manifest)
    if version != VERSION:
        raise DamagedCheckpoint(
            f"{file}: version {version!r} where this package reads versions 1 and {VERSION} (a newer one may read it)"
        )
    digest = manifest.pop("sha256", None)
    # The very bytes, because a parser forgives some changes.
    if digest != _digest(manifest) or content != _dump(manifest | {"sha256": digest}):
        raise DamagedCheckpoint(f"{file}: its content is not what was saved (it contradicts its own SHA-256)")
    try:
        records = {str(name): FileRecord.from_mapping(record) for name, record in manifest["files"].items()}
        return Manifest(path, VERSION, int(manifest["step"]), str(manifest["save"]), records)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{file}: not a manifest of version {VERSION} ({error!r})") from None


def _read_version_1(path: Path, file: Path, manifest: Mapping[str, Any]) -> Manifest:
    files = manifest.get("files")
    wanted = {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE}
    if (
        not isinstance(files, dict)
        or set(files) != wanted
        or not all(isinstance(f, dict) and {"bytes", "sha256"} <= set(f) for f in files.values())
    ):
        raise DamagedCheckpoint(f"{file}: does not list the size and SHA-256 of {', '.join(sorted(wanted))}")
    records = {name: FileRecord(record["bytes"], record["sha256"]) for name, record in files.items()}
    return Manifest(path, 1, manifest.get("step", 0), "", records)


def check_whole(entries: Iterable[Entry], where: Path) -> None:
    """Raise unless the pieces of every tensor fit together without gap or overlap.

    Raises:
        DamagedCheckpoint: naming the tensor and what is missing of it.
    """
    tensors: dict[str, list[Entry]] = {}
    for entry in entries:
        tensors.setdefault(entry.name, []).append(entry)
    for name, pieces in tensors.items():
        first = pieces[0]
        for piece in pieces:
            if (piece.shape, piece.dtype, piece.sharding, piece.span.tp) != (
                first.shape,
                first.dtype,
                first.sharding,
                first.span.tp,
            ):
                raise DamagedCheckpoint(f"{where}: tensor {name}: its pieces are of two shapes, dtypes or layouts")
        for tp_rank in range(first.span.tp):
            spans = sorted((p.span for p in pieces if p.span.tp_rank == tp_rank), key=lambda s: (s.start, s.end))
            expected = Span.of(first.shape, first.sharding, first.span.tp, tp_rank).end
            end = 0
            for span in spans:
                if span.start != end:
                    break
                end = span.end
            else:
                if end == expected and spans:
                    continue
            place = f" of tensor-parallel part {tp_rank} of {first.span.tp}" if first.span.tp > 1 else ""
            given = ", ".join(f"{s.start}:{s.end}" for s in spans) or "none"
            raise DamagedCheckpoint(
                f"{where}: tensor {name}: the elements 0:{expected}{place} should be there once, and there are {given}"
            )
