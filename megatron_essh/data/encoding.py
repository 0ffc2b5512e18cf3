"""Batches of documents to arrays of tokens: what a worker of preprocessing does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_essh.config import TokenizerConfig
from megatron_essh.data.documents import Batch, Skipped, read_located
from megatron_essh.data.parts import InputRecord
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Work:
    """How every batch is read and encoded."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str
    """Token type."""
    encoding_errors: str
    strict: bool
    """Whether a document that cannot be read is an error instead of a skipped one."""
    largest: int
    """Bytes of a document."""


@dataclass(frozen=True)
class EndOfShard:
    """After the batches of an input shard: its files, to be recorded."""

    files: tuple[Path, ...]


@dataclass
class Encoded:
    """Some documents' tokens under one key."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    """[sequences], tokens in each."""
    sequences: npt.NDArray[np.int64]
    """[documents], sequences in each; 0 for an empty document."""

    def select(self, documents: npt.NDArray[np.bool_]) -> Encoded:
        """The documents where the mask is true."""
        kept = np.repeat(documents, self.sequences)
        return Encoded(self.tokens[np.repeat(kept, self.lengths)], self.lengths[kept], self.sequences[documents])


@dataclass
class EncodedBatch:
    """What became of a batch."""

    keys: list[Encoded]
    skipped: Skipped
    text_bytes: int
    """Of the texts that were encoded, as UTF-8."""
    input_bytes: int


def encoder(work: Work) -> Callable[[Batch | EndOfShard], EncodedBatch | list[InputRecord]]:
    """The function that encodes a batch, and hashes a shard's files. Runs on one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(work.tokenizer)

    def encode(item: Batch | EndOfShard) -> EncodedBatch | list[InputRecord]:
        if isinstance(item, EndOfShard):
            return [InputRecord.of(path) for path in item.files]
        skipped = Skipped()
        located = list(
            read_located(
                item,
                work.keys,
                work.encoding_errors,
                largest=work.largest,
                skipped=None if work.strict else skipped,
            )
        )
        try:
            encoded, size = _columns(tokenizer, work, [document for _, document in located])
        except UserError:  # some tokenizers do not take every text
            documents = list(_encodable(tokenizer, located, None if work.strict else skipped))
            encoded, size = _columns(tokenizer, work, documents)
        return EncodedBatch(encoded, skipped, size, item.input_bytes)

    return encode


def _columns(tokenizer: Tokenizer, work: Work, documents: list[list[list[str]]]) -> tuple[list[Encoded], int]:
    """Each key's tokens, and the bytes of their texts."""
    columns = [[document[i] for document in documents] for i in range(len(work.keys))]
    size = sum(map(_utf8_bytes, (text for column in columns for texts in column for text in texts)))
    return [encode_documents(tokenizer, column, work.append_eod, work.dtype) for column in columns], size


def _encodable(
    tokenizer: Tokenizer, located: list[tuple[str, list[list[str]]]], skipped: Skipped | None
) -> Iterator[list[list[str]]]:
    """The documents that the tokenizer takes; the first that it does not take is an error without `skipped`."""
    for where, document in located:
        try:
            for texts in document:
                tokenizer.encode_batch(texts)
        except UserError as error:
            if skipped is None:
                raise UserError(f"{where}: {error}") from None
            skipped.add(f"{where}: {error}")
        else:
            yield document


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Sequence[str]], append_eod: bool, dtype: npt.DTypeLike
) -> Encoded:
    """The tokens of documents, a list of texts each; texts without a token leave no sequence.

    Args:
        tokenizer: every id below its `vocab_size` must fit `dtype`.
        documents: the sequences of each.
        append_eod: end every document that is not empty with the end-of-document token, in its last sequence.
        dtype: token type.
    """
    ids, lengths = tokenizer.encode_batch([text for document in documents for text in document])
    counts = np.fromiter(map(len, documents), np.int64, len(documents))
    owners = np.repeat(np.arange(len(documents)), counts)[lengths > 0]
    lengths = lengths[lengths > 0]
    sequences = np.bincount(owners, minlength=len(documents)).astype(np.int64)
    tokens = ids.astype(dtype)
    del ids  # of a document of a gibibyte it is four
    if append_eod:
        last = np.cumsum(sequences)[sequences > 0] - 1
        tokens = np.insert(tokens, np.cumsum(lengths)[last], tokenizer.eod)
        lengths[last] += 1
    return Encoded(tokens, lengths, sequences)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="replace"))
