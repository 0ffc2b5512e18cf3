"""Token pairs `P.bin` + `P.idx`, byte for byte Megatron's (`index_format`), written and read.

Knows nothing of text and of tokenizers.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_essh.data.files import StagedFile
from megatron_essh.data.index_format import (
    CHUNK,
    CODES,
    HEADER,
    WHOLLY_CHECKED,
    WHOLLY_HASHED,
    check_boundaries,
    check_sequences,
    file_bytes,
    pack_header,
    pair_fingerprint,
    read_header,
    spread_blocks,
    token_dtype,
    whole_blocks,
)
from megatron_essh.data.sidecar import read_sidecar, sidecar_bytes, sidecar_path
from megatron_essh.data.splicing import SplicedFile
from megatron_essh.errors import UserError
from megatron_essh.files import sync_folder

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "check_ids",
    "check_token_ids",
    "publish_together",
    "token_dtype",
]


class IndexedDatasetWriter:
    """Writes a pair document by document in bounded memory.

    The pair appears when `finish` is called (or the `with` block ends well), whole: `.bin` and, where `describe`
    was called, the sidecar take their names first, the `.idx` that makes them a pair last. A pair of the same
    prefix is replaced, and from the moment it is touched until the new one stands there is no `.idx`: a run that
    is killed leaves the old pair, none, or the new one. `discard` (or an exception in the `with` block) leaves
    nothing.

    Args:
        prefix: path without `.bin` and `.idx`; missing folders are made.
        dtype: token type, see `token_dtype`.

    Raises:
        UserError: the output cannot be written (a full disk, another run at the same prefix), or a token does
            not fit `dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in CODES, f"no code for token type {self.dtype}"
        self.documents = 0
        self.sequences = 0
        self.tokens = 0
        self.largest_id = -1
        self._published = False
        self._json: SplicedFile | None = None
        self._parts: list[SplicedFile] = []
        try:
            self._bin = self._stage(".bin")
            # The index's columns grow in files of their own and are joined at the end: a corpus of a billion
            # documents does not fit in memory twice.
            self._lengths = self._stage(".idx.lengths")
            self._boundaries = self._stage(".idx.boundaries")
            self._idx = self._stage(".idx")
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._published:
            self.finish()

    def add_document(self, *sequences: npt.ArrayLike) -> None:
        """Append one document of one or more sequences of token ids; without tokens it is empty."""
        arrays = [array for array in map(np.asarray, sequences) if array.size]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        self.add_documents(tokens, [array.size for array in arrays], [len(arrays)])

    def add_documents(self, tokens: npt.NDArray[Any], lengths: npt.ArrayLike, sequences: npt.ArrayLike) -> None:
        """Append many documents at once.

        Args:
            tokens: the ids of all sequences, one after the other.
            lengths: tokens in each sequence.
            sequences: number of sequences in each document, 0 for an empty one.
        """
        lengths_N, sequences_D = np.asarray(lengths, np.int64), np.asarray(sequences, np.int64)
        assert int(lengths_N.sum()) == tokens.size, "lengths do not add up to the tokens"
        assert int(sequences_D.sum()) == lengths_N.size, "sequences do not add up to the lengths"
        if tokens.size:
            if int(lengths_N.max()) > np.iinfo(np.int32).max:
                raise UserError(
                    f"{self.prefix}.bin: a sequence of {int(lengths_N.max())} tokens; the format's limit is "
                    f"{np.iinfo(np.int32).max}; split the document"
                )
            self._check_fit(tokens)
            self.largest_id = max(self.largest_id, int(tokens.max()))
            self._bin.write(_raw(tokens.astype(self.dtype, copy=False)))
            self._lengths.write(_raw(lengths_N.astype("<i4")))
        self._boundaries.write(_raw((self.sequences + np.cumsum(sequences_D)).astype("<i8")))
        self.documents += sequences_D.size
        self.sequences += lengths_N.size
        self.tokens += tokens.size

    def add_pair(self, pair: IndexedDataset, progress: Callable[[int], None] = lambda _: None) -> None:
        """Append all documents of a pair whose index is checked; `largest_id` does not follow.

        Tokens of this type go from file to file inside the kernel.

        Args:
            pair: of this token type, or of one whose every value this type holds.
            progress: told of the bytes that were written to `.bin`, as they are.

        Raises:
            UserError: as for `add_documents`, or the pair's files changed.
        """
        assert np.can_cast(pair.dtype, self.dtype), f"{pair.dtype} does not fit {self.dtype}"
        idx, bin_ = Path(f"{pair.prefix}.idx"), Path(f"{pair.prefix}.bin")
        if pair.dtype == self.dtype:
            self._bin.append(bin_, 0, pair.flat.nbytes, progress)
        else:
            for chunk in pair.chunks():
                self._bin.write(_raw(chunk.astype(self.dtype)))
                progress(chunk.size * self.dtype.itemsize)
        self._lengths.append(idx, HEADER.size, 4 * len(pair))
        for begin, end in pair._released(whole_blocks(pair.documents)):
            self._boundaries.write(_raw((self.sequences + pair.boundaries[begin + 1 : end + 1]).astype("<i8")))
        self.documents += pair.documents
        self.sequences += len(pair)
        self.tokens += pair.tokens

    def finish(self) -> None:
        """Complete the pair and give it its name."""
        try:
            self.seal()
            self.publish()
        except BaseException:
            self.discard()
            raise

    def seal(self) -> None:
        """Bring the complete pair to the disk under its temporary names: what can still fail, fails here."""
        self._idx.write(pack_header(self.dtype, self.sequences, self.documents))
        for chunk in _chunks(self._lengths, 4):
            self._idx.write(chunk)
        offset = 0
        for chunk in _chunks(self._lengths, 4):
            ends = offset + np.cumsum(np.frombuffer(chunk, "<i4"), dtype=np.int64) * self.dtype.itemsize
            self._idx.write(_raw(np.concatenate([[offset], ends[:-1]]).astype("<i8")))
            offset = int(ends[-1])
        self._idx.write(bytes(8))
        for chunk in _chunks(self._boundaries, 8):
            self._idx.write(chunk)
        self._bin.seal()
        self._idx.seal()

    @property
    def fingerprint(self) -> str:
        """Of the sealed pair, before it has its name: what `IndexedDataset.fingerprint` will be."""
        return pair_fingerprint(self._idx.staged, self._bin.staged)

    def describe(self, sidecar: Mapping[str, Any]) -> None:
        """Bring the sealed pair's sidecar (see `sidecar.write_sidecar`) to the disk under its temporary name."""
        self.describe_with(sidecar_bytes(sidecar))

    def describe_with(self, sidecar: bytes) -> None:
        """The same for a sidecar that is a file's content already."""
        self._json = self._stage(".json")
        self._json.write(sidecar)
        self._json.seal()

    def publish(self) -> None:
        """Give the sealed pair its name."""
        publish_together([self])

    def discard(self) -> None:
        """Remove every temporary file."""
        for part in self._parts:
            part.discard()

    def _stage(self, suffix: str) -> SplicedFile:
        part = SplicedFile(Path(f"{self.prefix}{suffix}"))
        self._parts.append(part)
        return part

    def _check_fit(self, tokens: npt.NDArray[Any]) -> None:
        if tokens.dtype == self.dtype or self.dtype.kind == "f":
            return
        limits = np.iinfo(self.dtype)
        for value in (int(tokens.min()), int(tokens.max())):
            if not limits.min <= value <= limits.max:
                raise UserError(
                    f"{self.prefix}.bin: token id {value} does not fit {self.dtype.name}; "
                    "name the tokenizer's real vocabulary size"
                )


def publish_together(writers: Sequence[IndexedDatasetWriter]) -> None:
    """Give sealed pairs their names: all of them or, where that fails, none.

    Earlier pairs of these prefixes go first, all of them, so that pairs of two runs never stand side by side. A
    kill at any point leaves only whole pairs, each with its sidecar.
    """
    for writer in writers:
        _retract(writer)
    try:
        for writer in writers:
            writer._bin.publish()
            if writer._json is not None:
                writer._json.publish()
            sync_folder(writer.prefix.parent)
        for writer in writers:
            writer._idx.publish()  # from here on the pair exists
            sync_folder(writer.prefix.parent)
    except BaseException:
        for writer in writers:
            _retract(writer)
        raise
    for writer in writers:
        writer._published = True
        writer.discard()


def _retract(writer: IndexedDatasetWriter) -> None:
    """Take away what stands under the writer's prefix, the `.idx` first: without it the rest is no pair."""
    for path in (writer._idx.path, sidecar_path(writer.prefix), writer._bin.path):
        path.unlink(missing_ok=True)
        sync_folder(writer.prefix.parent)


class IndexedDataset:
    """A pair, memory-mapped and checked when opened.

    Opening takes bounded time and memory. An index of up to 4 Mi entries is read and checked whole; of a larger one
    both ends and blocks spread between them are, and what was not looked at is checked where it is used:
    `check_index` checks the rest at once. Tokens are read from the map when asked for.

    Attributes:
        prefix: path without suffix.
        dtype: token type.
        sizes: int32 [N], tokens in each sequence. A map of the file, not aligned in memory.
        boundaries: int64 [documents + 1], first sequence of each document. A map of the file, not aligned.
        tokens: tokens in all.
        documents: documents in all, empty ones included.
        flat: every token in the file's order, [tokens].

    Raises:
        UserError: a file is missing, empty, truncated or not Megatron's, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        bin_bytes = file_bytes(bin_path, self.prefix)
        idx_bytes = file_bytes(idx_path, self.prefix)
        self.dtype, sequences, boundaries = read_header(idx_path, idx_bytes)
        self._index = index = _map(idx_path)
        start = HEADER.size
        self.sizes: npt.NDArray[np.int32] = np.ndarray((sequences,), "<i4", index, start)
        self._offsets: npt.NDArray[np.int64] = np.ndarray((sequences,), "<i8", index, start + 4 * sequences)
        self.boundaries: npt.NDArray[np.int64] = np.ndarray((boundaries,), "<i8", index, start + 12 * sequences)
        self.documents = boundaries - 1
        self._wholly_checked = sequences + boundaries <= WHOLLY_CHECKED
        described = self._check(whole_blocks if self._wholly_checked else spread_blocks)
        if bin_bytes != described:
            state = "is truncated" if bin_bytes < described else "does not belong to this index"
            raise UserError(
                f"{bin_path}: {bin_bytes} bytes, and {idx_path} describes {described}: the file {state}; "
                "copy or make the pair again"
            )
        self.tokens = described // self.dtype.itemsize
        self.flat: npt.NDArray[Any] = np.empty(0, self.dtype)
        if self.tokens:
            self.flat = np.frombuffer(_map(bin_path), self.dtype)

    def check_index(self) -> None:
        """Check every entry of the index, where opening has not.

        Raises:
            UserError: naming the entry.
        """
        if not self._wholly_checked:
            self._check(whole_blocks)
            self._wholly_checked = True

    def _check(self, parts: Callable[[int], Iterable[tuple[int, int]]]) -> int:
        """Check `parts` of each column of the index, and give the bytes that it describes."""
        path = Path(f"{self.prefix}.idx")
        # Reading ahead of a block, by megabytes on some machines, would take longer than the blocks.
        self._index.madvise(mmap.MADV_RANDOM if parts is spread_blocks else mmap.MADV_NORMAL)
        try:
            check_boundaries(path, self.boundaries, len(self), self._released(parts(self.documents + 1)))
            sequences = self._released(parts(len(self)))
            return check_sequences(path, self.sizes, self._offsets, self.dtype.itemsize, sequences)
        finally:
            self._index.madvise(mmap.MADV_NORMAL)

    def _released(self, blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """`blocks`; the pages of the index that one of them has mapped are let go after it."""
        for block in blocks:
            yield block
            self._index.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        """Number of sequences N."""
        return len(self.sizes)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """Tokens of sequence `index`, [sizes[index]], a read-only view of the file."""
        return self._tokens_of(index, index)

    def start(self, index: int) -> int:
        """Position in `flat` of the first token of sequence `index`."""
        return int(self._offsets[index]) // self.dtype.itemsize

    def document(self, index: int) -> npt.NDArray[Any]:
        """Tokens of document `index`, its sequences joined; a read-only view of the file."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        first, end = int(self.boundaries[index]), int(self.boundaries[index + 1])
        if not 0 <= first <= end <= len(self):
            raise UserError(
                f"{self.prefix}.idx: document boundaries: document {index} is sequences {first} to {end} of "
                f"{len(self)}; copy or make the pair again"
            )
        return self._tokens_of(first, end - 1) if first < end else self.flat[:0]

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens in each document, in order, a bounded number of documents at a time; of a checked index."""
        self.check_index()
        for begin, end in self._released(whole_blocks(self.documents)):
            bounds = self.boundaries[begin : end + 1]
            starts = np.full(len(bounds), self.tokens * self.dtype.itemsize, np.int64)
            within = bounds < len(self)
            starts[within] = self._offsets[bounds[within]]
            yield np.diff(starts) // self.dtype.itemsize

    def _tokens_of(self, first: int, last: int) -> npt.NDArray[Any]:
        begin, size = self.start(first), int(self.sizes[last])
        end = self.start(last) + size
        if size < 0 or not 0 <= begin <= end <= self.tokens:  # only where the index was not checked whole
            raise UserError(
                f"{self.prefix}.idx: sequence {last} of {size} tokens ends at token {end} of {self.tokens}; "
                "copy or make the pair again"
            )
        return self.flat[begin:end]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the pair's content, 64 hex digits; the same wherever the files lie.

        A file of up to 64 MiB counts whole; of a larger one its size, its head and tail and 254 blocks of 256
        KiB spread evenly between them count, so that a terabyte is identified in less than a second.
        """
        return pair_fingerprint(Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin"))

    @cached_property
    def recorded_largest_id(self) -> int | None:
        """The largest token id by the sidecar, None where no sidecar describes this content.

        As sure as the fingerprint: of a file above 64 MiB not every token is looked at.
        """
        sidecar = read_sidecar(self.prefix)
        if sidecar is None or sidecar["data_fingerprint"] != self.fingerprint:
            return None
        return int(sidecar["largest_id"])

    @cached_property
    def id_range(self) -> tuple[int, int]:
        """Smallest and largest token id; (0, -1) where there is no token.

        Exact: taken from the sidecar where that describes this content and the fingerprint covers every token,
        else measured by reading all of them.
        """
        if self.tokens == 0:
            return 0, -1
        if self.flat.nbytes <= WHOLLY_HASHED and self.recorded_largest_id is not None:
            return 0, self.recorded_largest_id
        return self.measured_id_range()

    def measured_id_range(self, progress: Callable[[int], None] = lambda _: None) -> tuple[int, int]:
        """`id_range` by reading every token; `progress` is told of the bytes as they are read."""
        smallest, largest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        for chunk in self.chunks():
            progress(chunk.nbytes)
            smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        return (smallest, largest) if self.tokens else (0, -1)

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """All tokens in the file's order, a bounded number at a time.

        Read through a buffer and not from the map, whose pages would count as this process's memory.
        """
        left = self.tokens
        with Path(f"{self.prefix}.bin").open("rb", buffering=0) as file:
            while left:
                chunk = np.fromfile(file, self.dtype, min(4 * CHUNK, left))
                if not chunk.size:
                    raise UserError(f"{self.prefix}.bin: ends {left} tokens too early; copy or make the pair again")
                left -= chunk.size
                yield chunk


def check_token_ids(dataset: IndexedDataset, vocab_size: int, *, trust_sidecar: bool = False) -> None:
    """Hold every token of `dataset` to 0 <= id < vocab_size.

    Args:
        dataset: the pair; one above 64 MiB is read whole.
        vocab_size: the model's.
        trust_sidecar: take the largest id from the sidecar of a pair of any size. For a caller that passes all it
            serves through `check_ids`: what is wrong as a whole then shows before the work begins.

    Raises:
        UserError: an id lies outside, or the pair holds no token ids at all (a floating-point type).
    """
    _check_dtype(dataset)
    recorded = dataset.recorded_largest_id if trust_sidecar else None
    _check_range(dataset, dataset.id_range if recorded is None else (0, recorded), vocab_size)


def check_ids(dataset: IndexedDataset, ids: npt.NDArray[Any], vocab_size: int) -> None:
    """Hold `ids`, any number of tokens out of `dataset`, to 0 <= id < vocab_size.

    Raises:
        UserError: as for `check_token_ids`.
    """
    _check_dtype(dataset)
    if ids.size:
        _check_range(dataset, (int(ids.min()), int(ids.max())), vocab_size)


def _check_dtype(dataset: IndexedDataset) -> None:
    if dataset.dtype.kind == "f":
        raise UserError(f"{dataset.prefix}.bin: holds {dataset.dtype.name}, not token ids; name a pair of tokens")


def _check_range(dataset: IndexedDataset, id_range: tuple[int, int], vocab_size: int) -> None:
    name = f"{dataset.prefix}.bin"
    smallest, largest = id_range
    if smallest < 0:
        raise UserError(
            f"{name}: token id {smallest} is negative: the file is damaged or holds no tokens; make it again"
        )
    if largest >= vocab_size:
        raise UserError(
            f"{name}: token id {largest} lies outside the model's vocabulary of {vocab_size}; "
            f"set model.vocab_size to at least {largest + 1}, or make the data with the model's tokenizer"
        )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path}: cannot be mapped into memory: {error.strerror}") from None


def _raw(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _chunks(part: StagedFile, itemsize: int) -> Iterator[bytes]:
    """What was written to `part`, in pieces of whole items."""
    for offset in range(0, part.bytes, CHUNK * itemsize):
        yield part.read_at(offset, min(CHUNK * itemsize, part.bytes - offset))
