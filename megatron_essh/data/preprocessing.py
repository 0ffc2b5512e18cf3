"""Documents to token pairs, on many processes: what tools/preprocess_data.py does.

One process reads the input and writes the output, the workers parse and tokenise in between; the output does
not depend on how many they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_essh.config import TokenizerConfig, config_to_mapping
from megatron_essh.data.documents import Batch, batches, is_json_lines, read_batch
from megatron_essh.data.indexed_dataset import IndexedDatasetWriter, publish_together, token_dtype
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.data.worker_pool import map_in_order
from megatron_essh.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What to do with the input. `config` names the tokenizer; paths in it are as the user gave them."""

    tokenizer: TokenizerConfig
    """The tokenizer."""
    output_prefix: str
    """Pairs are `{output_prefix}_{key}_document` and, with validation_every, `..._validation`."""
    keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line, a pair each; plain text goes under the only one."""
    append_eod: bool = False
    """Put the end-of-document token after every document that is not empty."""
    vocab_size: int | None = None
    """Vocabulary with its padding, which decides the token type; None: the tokenizer's."""
    validation_every: int | None = None
    """Every how many documents one goes to the validation pair instead; None: no validation pair."""
    workers: int = 1
    """Processes that parse and tokenise."""
    log_interval: int = 10_000
    """Documents between progress lines."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are not UTF-8: refuse them, or read them as U+FFFD."""

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 1), ("validation_every", 2), ("workers", 1), ("log_interval", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise UserError(f"--json-keys {' '.join(self.keys)}: name every key once")
        for key in self.keys:
            if not key or "/" in key:
                raise UserError(f"--json-keys {key!r}: must be able to stand in a file's name")


@dataclass(frozen=True)
class PairSummary:
    """What was written under one prefix."""

    prefix: Path
    documents: int
    tokens: int
    dtype: str


@dataclass
class _Encoded:
    """Some documents' tokens under one key."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    """[sequences], tokens in each."""
    sequences: npt.NDArray[np.int64]
    """[documents], sequences in each; 0 for an empty document."""

    def select(self, documents: npt.NDArray[np.bool_]) -> _Encoded:
        """The documents where the mask is true."""
        kept = np.repeat(documents, self.sequences)
        return _Encoded(self.tokens[np.repeat(kept, self.lengths)], self.lengths[kept], self.sequences[documents])


class _Column:
    """Gathers the `_Encoded` of one key document by document."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.lengths: list[int] = []
        self.sequences: list[int] = []

    def add(self, document: list[list[int]]) -> None:
        for ids in document:
            self.ids += ids
            self.lengths.append(len(ids))
        self.sequences.append(len(document))

    def encoded(self, dtype: str) -> _Encoded:
        return _Encoded(np.array(self.ids, dtype), np.array(self.lengths, np.int64), np.array(self.sequences, np.int64))


@dataclass
class _EncodedBatch:
    keys: list[_Encoded]
    text_bytes: int


def preprocess(files: list[Path], task: Preprocessing, report: Callable[[str], None]) -> list[PairSummary]:
    """Tokenise `files` into the pairs that `task` names; `report` gets progress lines.

    All pairs appear at the end, whole, each with its sidecar; a failure leaves none of them, and the earlier ones
    as they were if it comes before the names change (`publish_together`).

    Raises:
        UserError: unreadable input (with file and line), a vocabulary that is too small, an output that
            cannot be written, an earlier validation pair that this run would leave standing, a worker that died,
            or nothing to write.
    """
    tokenizer = build_tokenizer(task.tokenizer)
    vocab_size = tokenizer.vocab_size if task.vocab_size is None else task.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size}: the tokenizer has {tokenizer.vocab_size} tokens; give that or more, "
            "or leave it out"
        )
    plain = next((path for path in files if not is_json_lines(path)), None)
    if plain is not None and len(task.keys) > 1:
        raise UserError(f"--json-keys: {plain} is plain text, which has one text a document; name one key")
    dtype = token_dtype(vocab_size)
    splits = ["document"] if task.validation_every is None else ["document", "validation"]
    prefixes = {(key, split): Path(f"{task.output_prefix}_{key}_{split}") for key in task.keys for split in splits}
    if task.validation_every is None:
        _refuse_earlier_validation(task)
    progress = _Progress(sum(path.stat().st_size for path in files), task.log_interval, report)
    with ExitStack() as stack:
        writers = {}
        for name, prefix in prefixes.items():
            writers[name] = IndexedDatasetWriter(prefix, dtype)
            stack.callback(writers[name].discard)  # does nothing to a published pair
        setup = (task.tokenizer, task.keys, task.append_eod, dtype.str, task.encoding_errors)
        results = stack.enter_context(closing(map_in_order(_encoder, setup, batches(files), task.workers)))
        documents = 0
        for batch in results:
            count = len(batch.keys[0].sequences)
            held_out = np.zeros(count, np.bool_)
            if task.validation_every is not None:
                held_out = (documents + 1 + np.arange(count)) % task.validation_every == 0
            for key, encoded in zip(task.keys, batch.keys, strict=True):
                _write(writers[key, "document"], encoded.select(~held_out) if held_out.any() else encoded)
                if held_out.any():
                    _write(writers[key, "validation"], encoded.select(held_out))
            documents += count
            progress.add(count, sum(encoded.tokens.size for encoded in batch.keys), batch.text_bytes)
        for (_, split), writer in writers.items():
            if writer.tokens == 0:
                if split == "validation" and documents < (task.validation_every or 0):
                    raise UserError(
                        f"--validation-every {task.validation_every}: the input has {documents} documents, so none "
                        "is held out for validation; give a smaller number or leave it out"
                    )
                raise UserError(
                    f"{writer.prefix}: the input's {documents} documents leave it without a token; nothing was written"
                )
        for writer in writers.values():
            writer.seal()
            writer.describe(_sidecar(writer, task, tokenizer, vocab_size))
        publish_together(list(writers.values()))
    progress.finish()
    return [PairSummary(w.prefix, w.documents, w.tokens, dtype.name) for w in writers.values()]


def _refuse_earlier_validation(task: Preprocessing) -> None:
    """A validation pair of an earlier run must not stand beside training data that holds its documents."""
    for key in task.keys:
        index = Path(f"{task.output_prefix}_{key}_validation.idx")
        if index.exists():
            raise UserError(
                f"{index}: the validation pair of an earlier run, whose documents this run would put into the "
                "training pair; remove it, give --validation-every again, or choose another --output-prefix"
            )


def _write(writer: IndexedDatasetWriter, encoded: _Encoded) -> None:
    writer.add_documents(encoded.tokens, encoded.lengths, encoded.sequences)


def _sidecar(
    writer: IndexedDatasetWriter, task: Preprocessing, tokenizer: Tokenizer, vocab_size: int
) -> dict[str, Any]:
    config = config_to_mapping(task.tokenizer)
    if config["model"] is not None:
        config["model"] = str(Path(config["model"]).resolve())
    return {
        "tokenizer": config,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": vocab_size,
        "eod": tokenizer.eod,
        "documents": writer.documents,
        "tokens": writer.tokens,
        "largest_id": writer.largest_id,
        "data_fingerprint": writer.fingerprint,
    }


def _encoder(
    config: TokenizerConfig, keys: tuple[str, ...], append_eod: bool, dtype: str, encoding_errors: str
) -> Callable[[Batch], _EncodedBatch]:
    tokenizer = build_tokenizer(config)

    def encode(batch: Batch) -> _EncodedBatch:
        columns = [_Column() for _ in keys]
        for document in read_batch(batch, keys, encoding_errors):
            for texts, column in zip(document, columns, strict=True):
                encoded = [ids for ids in map(tokenizer.encode, texts) if ids]
                if encoded and append_eod:
                    encoded[-1].append(tokenizer.eod)
                column.add(encoded)
        text_bytes = sum(path.stat().st_size for path in batch.paths) if batch.lines is None else len(batch.lines)
        return _EncodedBatch([column.encoded(dtype) for column in columns], text_bytes)

    return encode


class _Progress:
    """Counts and says how far, how fast and how long still."""

    def __init__(self, total_bytes: int, interval: int, report: Callable[[str], None]) -> None:
        self.total_bytes = total_bytes
        self.interval = interval
        self.report = report
        self.documents = self.tokens = self.bytes = 0
        self.next = interval
        self.start = time.monotonic()

    def add(self, documents: int, tokens: int, text_bytes: int) -> None:
        self.documents += documents
        self.tokens += tokens
        self.bytes += text_bytes
        if self.documents >= self.next:
            self.next = (self.documents // self.interval + 1) * self.interval
            elapsed = time.monotonic() - self.start
            left = elapsed * (self.total_bytes - self.bytes) / max(self.bytes, 1)
            self.report(f"{self._line(elapsed)}, {self.bytes / max(self.total_bytes, 1):.0%}, {left:.0f} s left")

    def finish(self) -> None:
        self.report(self._line(time.monotonic() - self.start))

    def _line(self, elapsed: float) -> str:
        seconds = max(elapsed, 1e-9)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.bytes / 1e6:.1f} MB in "
            f"{elapsed:.1f} s: {self.bytes / 1e6 / seconds:.2f} MB/s, {self.tokens / seconds:,.0f} tokens/s"
        )
