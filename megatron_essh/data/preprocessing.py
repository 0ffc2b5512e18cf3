"""Documents to token pairs, on many processes: what tools/preprocess_data.py does.

One process reads the input and writes the output, the workers parse and tokenise in between (`encoding`); the output
does not depend on how many they are. Each input shard becomes a part (`parts`), which a later run of the same command
does not make again; at the end the parts are joined.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_essh.config import TokenizerConfig, config_to_mapping
from megatron_essh.data.documents import LARGEST_DOCUMENT, PROBLEMS_TOLD, Batch, Skipped, batches
from megatron_essh.data.encoding import Encoded, EncodedBatch, EndOfShard, Work, encoder
from megatron_essh.data.indexed_dataset import IndexedDatasetWriter, publish_together, token_dtype
from megatron_essh.data.parts import InputRecord, PairFigures, PartFolder, PartRecord, shards, shares
from megatron_essh.data.readers import Format, check_readable, format_of
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.data.worker_pool import map_in_order
from megatron_essh.errors import UserError

_SHARD_BYTES = 256 << 20  # of input files that make one part; a larger file is one by itself
_LOG_SECONDS = 60
_MOST_WORKERS = 4096

_Results = Generator[EncodedBatch | list[InputRecord], None, None]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What to do with the input. `config` names the tokenizer; paths in it are as the user gave them."""

    tokenizer: TokenizerConfig
    """The tokenizer."""
    output_prefix: str
    """Pairs are `{output_prefix}_{key}_document` and, with validation_every, `..._validation`."""
    keys: tuple[str, ...] = ("text",)
    """Keys of a JSON line or columns of a Parquet file, a pair each; plain text and FASTA go under the only one."""
    append_eod: bool = False
    """Put the end-of-document token after every document that is not empty."""
    vocab_size: int | None = None
    """Vocabulary with its padding, which decides the token type; None: the tokenizer's."""
    validation_every: int | None = None
    """Every how many documents one goes to the validation pair instead; None: no validation pair."""
    partitions: int = 1
    """Pairs of each name to write, `{output_prefix}_{i}_of_{partitions}...`, each from its share of the files."""
    partition: int | None = None
    """The only one of them to write, counted from 0; None: all."""
    workers: int = 1
    """Processes that parse and tokenise."""
    log_interval: int = 10_000
    """Documents between progress lines."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are not UTF-8: skip the document, or read them as U+FFFD."""
    strict: bool = False
    """Whether a document that cannot be read ends the run instead of being skipped."""
    max_document_mb: int = LARGEST_DOCUMENT >> 20
    """Mebibytes of a document; a longer one cannot be read."""
    fresh: bool = False
    """Whether to start anew where parts of an earlier run are found."""

    def __post_init__(self) -> None:
        for name, least in (
            ("vocab_size", 1),
            ("validation_every", 2),
            ("partitions", 1),
            ("workers", 1),
            ("log_interval", 1),
            ("max_document_mb", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        if self.workers > _MOST_WORKERS:
            raise UserError(f"--workers {self.workers}: must be at most {_MOST_WORKERS}; one a core is enough")
        if self.max_document_mb > 2047:  # 2^31 tokens, the most that the format can hold in a sequence
            raise UserError(f"--max-document-mb {self.max_document_mb}: must be at most 2047")
        if self.partition is not None and not 0 <= self.partition < self.partitions:
            raise UserError(
                f"--partition {self.partition}/{self.partitions}: partitions are numbered 0 to {self.partitions - 1}"
            )
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise UserError(f"--json-keys {' '.join(self.keys)}: name every key once")
        for key in self.keys:
            if not key or "/" in key:
                raise UserError(f"--json-keys {key!r}: must be able to stand in a file's name")

    @property
    def splits(self) -> tuple[str, ...]:
        """Ends of the pairs' names."""
        return ("document",) if self.validation_every is None else ("document", "validation")


@dataclass(frozen=True)
class PairSummary:
    """What was written under one prefix."""

    prefix: Path
    documents: int
    empty: int
    """Documents without a token, among `documents`."""
    tokens: int
    dtype: str


def preprocess(files: list[Path], task: Preprocessing, report: Callable[[str], None]) -> list[PairSummary]:
    """Tokenise `files` into the pairs that `task` names; `report` gets progress, and what was skipped and why.

    All pairs appear at the end, whole, each with its sidecar; a failure leaves none of them, and the earlier ones
    as they were if it comes before the names change (`publish_together`). What was finished of the input stays in
    `{output_prefix}.parts`, and the same command goes on from there.

    Raises:
        UserError: unreadable input (with file and line), a vocabulary that is too small, an output that
            cannot be written or is an input, an earlier validation pair that this run would leave standing, parts
            of another command, a worker that died or could not be started, or nothing to write.
        RuntimeError: another exception in a worker, with its traceback.
    """
    check_readable(files)
    tokenizer = build_tokenizer(task.tokenizer)
    vocab_size = tokenizer.vocab_size if task.vocab_size is None else task.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {vocab_size}: the tokenizer has {tokenizer.vocab_size} tokens; give that or more, "
            "or leave it out"
        )
    single = next((path for path in files if format_of(path) in (Format.TEXT, Format.FASTA)), None)
    if single is not None and len(task.keys) > 1:
        raise UserError(
            f"--json-keys: {single} is {'plain text' if format_of(single) is Format.TEXT else 'FASTA'}, "
            "which has one text a document; name one key"
        )
    dtype = token_dtype(vocab_size)
    with ExitStack() as stack:
        runs = []
        for share, prefix in _shares(files, task):
            _refuse_own_output(files, prefix, task)
            runs.append(_Run(task, share, prefix, dtype, tokenizer, vocab_size))
            stack.callback(runs[-1].leave, report)
        work = Work(
            tokenizer=task.tokenizer,
            keys=task.keys,
            append_eod=task.append_eod,
            dtype=dtype.str,
            encoding_errors=task.encoding_errors,
            strict=task.strict,
            largest=task.max_document_mb << 20,
        )
        progress = _Progress(runs, task.log_interval, report)
        items = (item for run in runs for item in run.items(work.largest))
        results = stack.enter_context(closing(map_in_order(encoder, (work,), items, task.workers, _size)))
        for run in runs:
            for number in range(len(run.parts.finished), len(run.shards)):
                run.make_part(number, results, progress)
        progress.finish()
        for run in runs:
            run.refuse_nothing()
        for run in runs:
            run.join()
        publish_together([writer for run in runs for writer in run.writers.values()])
        for run in runs:
            run.parts.remove()
    return [summary for run in runs for summary in run.summaries()]


class _Run:
    """One partition: its files, its outputs and the parts that lead to them."""

    def __init__(
        self, task: Preprocessing, files: list[Path], prefix: str, dtype: Any, tokenizer: Tokenizer, vocab_size: int
    ) -> None:
        self.task = task
        self.prefix = prefix
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        if task.validation_every is None:
            _refuse_earlier_validation(prefix, task.keys)
        self.shards = shards(files, _SHARD_BYTES)
        self.status = {str(path): (s.st_size, s.st_mtime_ns) for path in files for s in [path.stat()]}
        self.writers: dict[str, IndexedDatasetWriter] = {}
        self.empty: dict[str, int] = {}
        self._opened = False
        try:
            for key in task.keys:
                for split in task.splits:
                    name = f"{key}_{split}"
                    self.writers[name] = IndexedDatasetWriter(f"{prefix}_{name}", dtype)
            self.parts = PartFolder(prefix, self._command(files), fresh=task.fresh)
            self._opened = True
            for number, part in enumerate(self.parts.finished):
                if [source.path for source in part.inputs] != [str(path) for path in self.shards[number]]:
                    raise UserError(f"{self.parts.folder}: part {number} is of other files; pass --fresh to start anew")
        except BaseException:
            self.close()
            raise
        self.documents = sum(part.documents for part in self.parts.finished)

    def _command(self, files: list[Path]) -> dict[str, Any]:
        task = self.task
        return {
            "files": [str(path) for path in files],
            "tokenizer": self.tokenizer.fingerprint,
            "token_type": self.dtype.name,
            "json_keys": list(task.keys),
            "append_eod": task.append_eod,
            "validation_every": task.validation_every,
            "encoding_errors": task.encoding_errors,
            "strict": task.strict,
            "max_document_mb": task.max_document_mb,
            "shard_bytes": _SHARD_BYTES,
        }

    def items(self, largest: int) -> Iterator[Batch | EndOfShard]:
        """The batches of every shard that is not yet a part, and the end of each shard."""
        for shard in self.shards[len(self.parts.finished) :]:
            yield from batches(shard, self.task.keys, largest)
            yield EndOfShard(tuple(shard))

    def make_part(self, number: int, results: _Results, progress: _Progress) -> None:
        """Take one shard's results and keep them as a part."""
        part = PartRecord(inputs=[])
        skipped = Skipped()
        with ExitStack() as stack:
            writers = {}
            for name in self.writers:
                writers[name] = IndexedDatasetWriter(self.parts.prefix(number, name), self.dtype)
                stack.callback(writers[name].discard)
            empty = dict.fromkeys(writers, 0)
            while isinstance(result := next(results), EncodedBatch):
                self._write(result, writers, empty)
                part.documents += len(result.keys[0].sequences)
                for reason in result.skipped.reasons:
                    progress.tell_skipped(reason)
                    skipped.reasons = [*skipped.reasons, reason][:PROBLEMS_TOLD]
                skipped.count += result.skipped.count
                progress.add(result)
            for source in result:
                if self.status[source.path] != (source.bytes, source.mtime_ns):
                    raise UserError(f"{source.path}: changed while it was read; run the command again")
            part.inputs, part.skipped, part.reasons = result, skipped.count, skipped.reasons
            for name, writer in writers.items():
                writer.finish()
                part.pairs[name] = PairFigures(writer.documents, empty[name], writer.tokens, writer.largest_id)
        self.parts.add(part)

    def _write(self, batch: EncodedBatch, writers: dict[str, IndexedDatasetWriter], empty: dict[str, int]) -> None:
        count = len(batch.keys[0].sequences)
        held_out = np.zeros(count, np.bool_)
        if self.task.validation_every is not None:
            held_out = (self.documents + 1 + np.arange(count)) % self.task.validation_every == 0
        for key, encoded in zip(self.task.keys, batch.keys, strict=True):
            chosen: dict[str, Encoded] = {"document": encoded}
            if held_out.any():
                chosen = {"document": encoded.select(~held_out), "validation": encoded.select(held_out)}
            for split, some in chosen.items():
                writers[f"{key}_{split}"].add_documents(some.tokens, some.lengths, some.sequences)
                empty[f"{key}_{split}"] += int(np.count_nonzero(some.sequences == 0))
        self.documents += count

    def refuse_nothing(self) -> None:
        """UserError where a pair would be without a token; its parts are then worth nothing."""
        every = self.task.validation_every
        for name, writer in self.writers.items():
            if self.parts.total(name).tokens:
                continue
            skipped, reasons = self.skipped, [reason for part in self.parts.finished for reason in part.reasons]
            self.parts.remove()
            if name.endswith("_validation") and self.documents < (every or 0):
                raise UserError(
                    f"--validation-every {every}: the input has {self.documents} documents, so none "
                    "is held out for validation; give a smaller number or leave it out"
                )
            why = f" and {skipped} were skipped, the first of them: {reasons[0]}" if reasons else ""
            raise UserError(
                f"{writer.prefix}: the input's {self.documents} documents leave it without a token{why}; "
                "nothing was written"
            )

    def join(self) -> None:
        """Make the pairs of the parts, whole but for their names."""
        for name, writer in self.writers.items():
            self.parts.join(name, writer)
            self.empty[name] = self.parts.total(name).empty
            writer.seal()
            writer.describe(self._sidecar(name, writer))

    def _sidecar(self, name: str, writer: IndexedDatasetWriter) -> dict[str, Any]:
        config = config_to_mapping(self.task.tokenizer)
        if config["model"] is not None:
            config["model"] = str(Path(config["model"]).resolve())
        sources = [source for part in self.parts.finished for source in part.inputs]
        return {
            "tokenizer": config,
            "fingerprint": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "padded_vocab_size": self.vocab_size,
            "eod": self.tokenizer.eod,
            "documents": writer.documents,
            "tokens": writer.tokens,
            "largest_id": writer.largest_id,
            "data_fingerprint": writer.fingerprint,
            "empty_documents": self.empty[name],
            "skipped_documents": self.skipped,
            "inputs": [
                {"path": str(Path(source.path).resolve()), "bytes": source.bytes, "sha256": source.sha256}
                for source in sources
            ],
        }

    @property
    def skipped(self) -> int:
        """Documents of the input that could not be read."""
        return sum(part.skipped for part in self.parts.finished)

    def summaries(self) -> list[PairSummary]:
        """What the published pairs hold."""
        return [
            PairSummary(w.prefix, w.documents, self.empty[name], w.tokens, self.dtype.name)
            for name, w in self.writers.items()
        ]

    def leave(self, report: Callable[[str], None]) -> None:
        """End the run as far as it came, and say what stays for the next one."""
        if self.parts.finished:
            count = len(self.parts.finished)
            report(f"{self.parts.folder}: {count} finished parts stay; the same command goes on after them")
        self.close()

    def close(self) -> None:
        """Remove what is not finished; does nothing to published pairs and finished parts."""
        for writer in self.writers.values():
            writer.discard()
        if self._opened:
            self.parts.close()


def _shares(files: list[Path], task: Preprocessing) -> list[tuple[list[Path], str]]:
    """The files and the output prefix of each partition to write."""
    if task.partitions == 1:
        return [(files, task.output_prefix)]
    digits = len(str(task.partitions - 1))
    named = [
        (share, f"{task.output_prefix}_{i:0{digits}d}_of_{task.partitions}")
        for i, share in enumerate(shares(files, task.partitions))
    ]
    return named if task.partition is None else [named[task.partition]]


def _refuse_own_output(files: list[Path], prefix: str, task: Preprocessing) -> None:
    """What this run writes, or a killed one left, must not be read as text and then be written over."""
    pairs = [str(Path(f"{prefix}_{key}_{split}").resolve()) for key in task.keys for split in task.splits]
    own = re.compile(rf"(?:{'|'.join(map(re.escape, pairs))})\.(?:bin|idx|json|.*\.tmp)")
    parts = Path(f"{prefix}.parts").resolve()
    for path in files:
        if own.fullmatch(str(path.resolve())) or parts in path.resolve().parents:
            raise UserError(
                f"--input: {path}: is an output of this command; choose an --output-prefix in another folder, or name "
                "the text by a glob"
            )


def _refuse_earlier_validation(prefix: str, keys: tuple[str, ...]) -> None:
    """A validation pair of an earlier run must not stand beside training data that holds its documents."""
    for key in keys:
        index = Path(f"{prefix}_{key}_validation.idx")
        if index.exists():
            raise UserError(
                f"{index}: the validation pair of an earlier run, whose documents this run would put into the "
                "training pair; remove it, give --validation-every again, or choose another --output-prefix"
            )


def _size(item: Batch | EndOfShard) -> int:
    if isinstance(item, EndOfShard):
        return 0
    return item.input_bytes if item.content is None else len(item.content)


class _Progress:
    """Counts and says how far, how fast and how long still."""

    def __init__(self, runs: list[_Run], interval: int, report: Callable[[str], None]) -> None:
        sizes = [
            (number < len(run.parts.finished), run.status[str(path)][0])
            for run in runs
            for number, shard in enumerate(run.shards)
            for path in shard
        ]
        self.total_bytes = sum(size for _, size in sizes)
        self.earlier_bytes = sum(size for finished, size in sizes if finished)
        self.interval = interval
        self.report = report
        self.documents = self.tokens = self.text_bytes = self.input_bytes = 0
        self.skipped = sum(run.skipped for run in runs)
        self.told = 0
        self.next = interval
        self.start = self.last = time.monotonic()
        if self.earlier_bytes:
            parts = sum(len(run.parts.finished) for run in runs)
            share = self.earlier_bytes / max(self.total_bytes, 1)
            report(f"going on after {parts} finished parts, {share:.0%} of the input")

    def tell_skipped(self, reason: str) -> None:
        """Report one skipped document, as long as they are few."""
        if self.told < PROBLEMS_TOLD:
            self.report(f"skipped: {reason}")
        self.told += 1

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch, and report when it is time."""
        self.documents += len(batch.keys[0].sequences)
        self.tokens += sum(encoded.tokens.size for encoded in batch.keys)
        self.text_bytes += batch.text_bytes
        self.input_bytes += batch.input_bytes
        self.skipped += batch.skipped.count
        now = time.monotonic()
        if self.documents >= self.next or now - self.last >= _LOG_SECONDS:
            self.next = (self.documents // self.interval + 1) * self.interval
            self.last = now
            elapsed = now - self.start
            done = self.earlier_bytes + self.input_bytes
            left = elapsed * (self.total_bytes - done) / max(self.input_bytes, 1)
            self.report(f"{self._line(elapsed)}, {done / max(self.total_bytes, 1):.0%}, {left:.0f} s left")

    def finish(self) -> None:
        """Report the whole run."""
        self.report(self._line(time.monotonic() - self.start))
        if self.skipped:
            self.report(f"{self.skipped:,} documents skipped, {min(self.told, PROBLEMS_TOLD)} of them named above")

    def _line(self, elapsed: float) -> str:
        seconds = max(elapsed, 1e-9)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.text_bytes / 1e6:.1f} MB in "
            f"{elapsed:.1f} s: {self.text_bytes / 1e6 / seconds:.2f} MB/s, {self.tokens / seconds:,.0f} tokens/s"
        )
