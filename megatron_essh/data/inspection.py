"""What a token pair holds, and whether all of it is sound: what tools/inspect_data.py does.

Every figure is gathered in one pass over the index or the tokens, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.sidecar import read_sidecar, sidecar_path
from megatron_essh.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class LengthBin:
    """Documents of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Statistics:
    """What the index of a pair says."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    shortest: int
    """Tokens of the shortest document, an empty one included; 0 where there is none."""
    longest: int
    mean: float
    """Tokens a document."""
    histogram: list[LengthBin]
    """Bins by powers of two, 0 and 1 apart; from the first to the last that holds a document."""


def measure(pair: IndexedDataset) -> Statistics:
    """Read the index of `pair` once.

    Raises:
        UserError: an entry is wrong.
    """
    documents = np.zeros(65, np.int64)  # bin i > 0: lengths of i binary digits
    tokens = np.zeros(65, np.int64)
    shortest, longest = np.iinfo(np.int64).max, 0
    for lengths in pair.document_lengths():
        digits = np.frexp(lengths.astype(np.float64))[1]  # exact below 2**53 tokens
        documents += np.bincount(digits, minlength=65)
        for i in np.unique(digits):
            tokens[i] += int(lengths[digits == i].sum())
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    held = np.flatnonzero(documents)
    return Statistics(
        prefix=str(pair.prefix),
        dtype=pair.dtype.name,
        documents=pair.documents,
        empty_documents=int(documents[0]),
        sequences=len(pair),
        tokens=pair.tokens,
        bin_bytes=Path(f"{pair.prefix}.bin").stat().st_size,
        idx_bytes=Path(f"{pair.prefix}.idx").stat().st_size,
        shortest=int(shortest) if pair.documents else 0,
        longest=longest,
        mean=pair.tokens / max(pair.documents, 1),
        histogram=[
            LengthBin((1 << i) >> 1, max((1 << i) - 1, 0), int(documents[i]), int(tokens[i]))
            for i in (range(held[0], held[-1] + 1) if held.size else ())
        ],
    )


@dataclass(frozen=True)
class Verification:
    """What reading all of a pair found."""

    smallest_id: int | None
    """None where the pair holds no token ids, but floating-point values."""
    largest_id: int | None
    vocab_size: int | None
    """What the ids were held to; None: to nothing but being no less than 0."""
    described: bool
    """Whether there is a sidecar, and with it what the pair was compared to."""
    faults: list[str]
    """What is wrong, a line each; empty for a sound pair."""


def verify(
    pair: IndexedDataset, *, vocab_size: int | None = None, progress: Callable[[int], None] = lambda _: None
) -> Verification:
    """Read all of `pair`: every entry of the index, every token, and the sidecar if there is one.

    Sizes, and both ends of the index, were held to each other when the pair was opened.

    Args:
        pair: the pair.
        vocab_size: that the ids are held to; None takes the tokenizer's from the sidecar.
        progress: told of the bytes of `.bin` as they are read.

    Raises:
        UserError: an entry of the index is wrong, or a file cannot be read; what can still be told together is
            in `Verification.faults`.
    """
    pair.check_index()
    sidecar = read_sidecar(pair.prefix)
    faults: list[str] = []
    bin_, json_ = f"{pair.prefix}.bin", sidecar_path(pair.prefix)
    smallest = largest = None
    if pair.dtype.kind == "f":
        for chunk in pair.chunks():
            progress(chunk.nbytes)
        faults.append(f"{bin_}: holds {pair.dtype.name}, not token ids")
    else:
        smallest, largest = pair.measured_id_range(progress)
        if vocab_size is None and sidecar is not None:
            vocab_size = sidecar["vocab_size"]
        if smallest < 0:
            faults.append(f"{bin_}: token id {smallest} is negative")
        if vocab_size is not None and largest >= vocab_size:
            faults.append(f"{bin_}: token id {largest} lies outside the vocabulary of {vocab_size}")
    if sidecar is not None:
        found = {
            "documents": pair.documents,
            "tokens": pair.tokens,
            "largest_id": largest,
            "data_fingerprint": pair.fingerprint,
        }
        for key, value in found.items():
            if value is not None and sidecar[key] != value:
                faults.append(f"{json_}: {key}: {sidecar[key]}, and the pair has {value}")
    return Verification(smallest, largest, vocab_size, sidecar is not None, faults)


@dataclass(frozen=True)
class DocumentText:
    """A document, or its beginning."""

    index: int
    tokens: int
    """In the whole document."""
    sequences: int
    ids: list[int]
    text: str
    """Of `ids`; a character that their end cuts through shows as U+FFFD."""


def decode_document(pair: IndexedDataset, index: int, tokenizer: Tokenizer, limit: int) -> DocumentText:
    """Document `index`, counted from the end where negative; at most `limit` tokens of it.

    Raises:
        UserError: an id that the tokenizer does not have.
        IndexError: there is no such document.
    """
    if index < 0:
        index += pair.documents
    tokens = pair.document(index)
    ids = [int(token) for token in tokens[:limit]]
    sequences = int(pair.boundaries[index + 1] - pair.boundaries[index])
    return DocumentText(index, len(tokens), sequences, ids, tokenizer.decode(ids))


def histogram_lines(histogram: Sequence[LengthBin], width: int = 40) -> list[str]:
    """The histogram as text: documents by bars, and each bin's share of the tokens."""
    most = max((entry.documents for entry in histogram), default=0)
    total = sum(entry.tokens for entry in histogram)
    rows = []
    for entry in histogram:
        span = f"{entry.shortest:,}" + (f" to {entry.longest:,}" if entry.longest > entry.shortest else "")
        bar = "#" * -(-entry.documents * width // max(most, 1))  # rounded up: a single document shows
        rows.append((span, f"{entry.documents:,}", f"{entry.tokens / max(total, 1):.1%}", bar))
    rows.insert(0, ("tokens", "documents", "of all tokens", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    ]
