"""Many token pairs joined into one, end to end and in bounded memory: what tools/merge_datasets.py does.

Tokens go from file to file inside the kernel, and nothing is held in memory but a chunk of an index. Every position is
64 bits wide.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_essh.data.index_format import index_bytes
from megatron_essh.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_essh.data.sidecar import json_bytes, read_sidecar, sidecar_path
from megatron_essh.errors import UserError

_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Merged:
    """What was written, and how fast."""

    prefix: Path
    parts: int
    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    """Of `.bin` and `.idx`."""
    seconds: float
    described: bool
    """Whether a sidecar stands beside the pair: not where no part had one."""


def merge_pairs(
    prefixes: Sequence[Path],
    output: Path,
    report: Callable[[str], None],
    *,
    widen: bool = False,
    assume_tokenizer: bool = False,
) -> Merged:
    """Write the pair `output`: the documents of `prefixes`, in that order.

    The pair appears whole, its `.idx` last, or not at all; what a killed run leaves (`.tmp` files) the next one
    overwrites. Its sidecar is that of the parts, with a list of them under `parts`.

    Args:
        prefixes: the parts; each is opened again when its turn comes, so that there may be more of them than a
            process may have files open.
        output: prefix of the merged pair; an earlier pair there is replaced.
        report: gets progress lines.
        widen: bring parts of different token types to the narrowest type that holds all of them.
        assume_tokenizer: take parts without a sidecar for the work of the tokenizer that the others name; their ids
            are then held to its vocabulary.

    Raises:
        UserError: a part cannot be read or is not whole; parts differ in token type or tokenizer; a part is the
            output, or the validation pair of another; the disk has too little room, or cannot be written.
    """
    start = time.monotonic()
    _refuse_output_among_parts(prefixes, output)
    _refuse_validation_among_parts(prefixes)
    parts = [_examine(prefix) for prefix in prefixes]
    dtype = _common_dtype(parts, widen)
    sidecar = _common_sidecar(parts, assume_tokenizer)
    needed = sum(part.tokens for part in parts) * dtype.itemsize
    writer = IndexedDatasetWriter(output, dtype)  # empties what a killed run left, before room is measured
    try:
        sequences, documents = sum(part.sequences for part in parts), sum(part.documents for part in parts)
        # The columns of the index stand on the disk twice until they are joined.
        _check_room(output, needed + index_bytes(sequences, documents + 1) + 4 * sequences + 8 * documents)
        progress = _Progress(len(parts), needed, report)
        largest_ids = []
        for part in parts:
            pair = _open_again(part)
            writer.add_pair(pair, progress.add)
            if sidecar is not None:
                largest_ids.append(_largest_id(part, pair, sidecar))
            progress.parts_done += 1
        report("flushing to disk")
        writer.seal()
        if sidecar is not None:
            content = sidecar | {
                "documents": writer.documents,
                "tokens": writer.tokens,
                "largest_id": max(largest_ids, default=-1),
                "data_fingerprint": writer.fingerprint,
                "parts": [part.record() for part in parts],
            }
            writer.describe_with(json_bytes(content))
        written = index_bytes(writer.sequences, writer.documents + 1) + needed
        writer.publish()
    finally:
        writer.discard()  # does nothing to a published pair
    return Merged(
        prefix=output,
        parts=len(parts),
        documents=writer.documents,
        sequences=writer.sequences,
        tokens=writer.tokens,
        dtype=dtype.name,
        bytes=written,
        seconds=time.monotonic() - start,
        described=sidecar is not None,
    )


@dataclass(frozen=True)
class _Part:
    """What must be known of a part before anything is written."""

    prefix: Path
    dtype: np.dtype[Any]
    documents: int
    sequences: int
    tokens: int
    fingerprint: str
    state: list[tuple[int, int, int]]
    sidecar: dict[str, Any] | None

    def record(self) -> dict[str, Any]:
        """Its entry in the sidecar of the merged pair."""
        return {
            "prefix": str(self.prefix.resolve()),
            "documents": self.documents,
            "tokens": self.tokens,
            "data_fingerprint": self.fingerprint,
        }


def _examine(prefix: Path) -> _Part:
    state = _state(prefix)
    pair = IndexedDataset(prefix)
    pair.check_index()
    sidecar = read_sidecar(prefix)
    if sidecar is not None and sidecar["data_fingerprint"] != pair.fingerprint:
        raise UserError(
            f"{sidecar_path(prefix)}: describes another pair than {prefix}.bin; remove it, or make the pair again"
        )
    return _Part(prefix, pair.dtype, pair.documents, len(pair), pair.tokens, pair.fingerprint, state, sidecar)


def _open_again(part: _Part) -> IndexedDataset:
    if _state(part.prefix) != part.state:
        raise UserError(f"{part.prefix}: changed while it was being merged; wait for whoever writes it")
    return IndexedDataset(part.prefix)


def _state(prefix: Path) -> list[tuple[int, int, int]]:
    """By which a pair that was written to or replaced is told from what it was."""
    states = [os.stat(f"{prefix}{suffix}") for suffix in (".idx", ".bin")]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]


def _refuse_validation_among_parts(prefixes: Sequence[Path]) -> None:
    """A folder that preprocessing wrote holds both: together they would be trained on what they are validated on."""
    there = {str(prefix) for prefix in prefixes}
    for prefix in sorted(there):
        training = prefix.removesuffix("_validation") + "_document"
        if prefix.endswith("_validation") and training in there:
            raise UserError(
                f"{prefix}: the validation pair of {training}, among the inputs with it; merge them apart, say with "
                "the globs '*_document.idx' and '*_validation.idx'"
            )


def _refuse_output_among_parts(prefixes: Sequence[Path], output: Path) -> None:
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            ours, theirs = Path(f"{output}{suffix}"), Path(f"{prefix}{suffix}")
            if ours.exists() and theirs.exists() and os.path.samefile(ours, theirs):
                raise UserError(
                    f"--output-prefix {output}: is the input {prefix}, which writing would remove; name another place"
                )


def _common_dtype(parts: Sequence[_Part], widen: bool) -> np.dtype[Any]:
    first = parts[0]
    dtype = first.dtype
    for part in parts:
        if part.dtype == dtype:
            continue
        if not widen:
            raise UserError(
                f"{part.prefix}.bin: tokens of {part.dtype.name}, and {first.prefix}.bin has {first.dtype.name}; "
                "pass --widen to bring all to a type that holds both, or make them with one --vocab-size"
            )
        wider = np.result_type(dtype, part.dtype)
        if wider.kind not in "iu" or (part.dtype.kind == "f") != (dtype.kind == "f"):
            raise UserError(
                f"{part.prefix}.bin: values of {part.dtype.name}, and those before it are {dtype.name}: no token type "
                "holds both; merge them apart"
            )
        dtype = wider.newbyteorder("<")
    return dtype


def _common_sidecar(parts: Sequence[_Part], assume_tokenizer: bool) -> dict[str, Any] | None:
    """What the sidecar of the merged pair says of the tokenizer; None where no part has a sidecar."""
    described = [(part, part.sidecar) for part in parts if part.sidecar is not None]
    if not described:
        return None
    first, sidecar = described[0]
    for part, other in described:
        if other["fingerprint"] != sidecar["fingerprint"]:
            raise UserError(
                f"{sidecar_path(part.prefix)}: made by the {_name(other)} ({other['fingerprint'][:12]}), and "
                f"{first.prefix} by the {_name(sidecar)} ({sidecar['fingerprint'][:12]}): the same id stands for "
                "different text; prepare both with one tokenizer"
            )
    missing = next((part for part in parts if part.sidecar is None), None)
    if missing is not None and not assume_tokenizer:
        raise UserError(
            f"{sidecar_path(missing.prefix)}: no such file, so nothing tells whether {missing.prefix}.bin was made by "
            f"the {_name(sidecar)} of {first.prefix}; if you know that it was, pass --assume-tokenizer"
        )
    padded = max(other["padded_vocab_size"] for _, other in described)
    kept = ("tokenizer", "fingerprint", "vocab_size", "eod")
    return {key: sidecar[key] for key in kept} | {"padded_vocab_size": padded}


def _name(sidecar: dict[str, Any]) -> str:
    tokenizer = sidecar["tokenizer"]
    return f"{tokenizer.get('type')} tokenizer {tokenizer.get('model') or ''}".strip()


def _largest_id(part: _Part, pair: IndexedDataset, sidecar: dict[str, Any]) -> int:
    if part.sidecar is not None:
        return int(part.sidecar["largest_id"])
    smallest, largest = pair.id_range
    if smallest < 0 or largest >= sidecar["vocab_size"]:
        raise UserError(
            f"{part.prefix}.bin: holds ids from {smallest} to {largest}, and the {_name(sidecar)} has "
            f"{sidecar['vocab_size']}: it made something else; leave that pair out"
        )
    return largest


def _check_room(output: Path, needed: int) -> None:
    state = os.statvfs(output.parent)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise UserError(
            f"{output}.bin: the merged pair takes {needed / 1e9:.2f} GB while it is made, and {output.parent} has "
            f"{free / 1e9:.2f} GB free; free space there or choose another --output-prefix"
        )


class _Progress:
    """How much, how fast and how long still, every few seconds."""

    def __init__(self, parts: int, total: int, report: Callable[[str], None]) -> None:
        self.parts, self.total, self.report = parts, total, report
        self.done = self.parts_done = 0
        self.start = time.monotonic()
        self.said = self.start

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.said >= _REPORT_SECONDS:
            self.said = now
            rate = self.done / max(now - self.start, 1e-9)
            self.report(
                f"{self.parts_done} of {self.parts} pairs, {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, "
                f"{rate / 1e6:.0f} MB/s, {(self.total - self.done) / max(rate, 1):.0f} s left"
            )
