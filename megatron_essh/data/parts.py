"""Finished work of an unfinished run: a pair for each input shard, in a folder beside the output.

`{output_prefix}.parts/` holds `command.json` (what the run was asked), and for each finished shard its pairs and a
record `{number}.json`, written last: with its record a part is whole. A run that finds the folder goes on after the
last part, or says why it cannot. Knows nothing of text and of tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_essh.data.files import StagedFile
from megatron_essh.data.index_format import content_digest
from megatron_essh.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_essh.errors import UserError
from megatron_essh.files import write_atomically

_FRESH = "pass --fresh to start anew, or choose another --output-prefix"


@dataclass(frozen=True)
class InputRecord:
    """An input file as it was when it was read."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str
    """Of size and content; of 256 blocks spread over the content where it is larger than 64 MiB."""

    @classmethod
    def of(cls, path: Path) -> InputRecord:
        """The file as it is now.

        Raises:
            UserError: it cannot be read.
        """
        try:
            status = path.stat()
            return cls(str(path), status.st_size, status.st_mtime_ns, content_digest(path).hex())
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    def is_current(self) -> bool:
        """Whether the file still has this content; one of the same size and time is taken to have it."""
        try:
            status = Path(self.path).stat()
        except OSError:
            return False
        if status.st_size != self.bytes:
            return False
        return status.st_mtime_ns == self.mtime_ns or InputRecord.of(Path(self.path)).sha256 == self.sha256


@dataclass(frozen=True)
class PairFigures:
    """What a pair holds."""

    documents: int
    empty: int
    """Documents without a token, among `documents`."""
    tokens: int
    largest_id: int
    """-1 where there is no token."""


@dataclass
class PartRecord:
    """What a finished shard held."""

    inputs: list[InputRecord]
    documents: int = 0
    """In all pairs of one key together; skipped ones are not among them."""
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)
    """Of the first skipped documents."""
    pairs: dict[str, PairFigures] = field(default_factory=dict)
    """By the pair's name."""


class PartFolder:
    """The parts of one run, locked for it until `close`.

    Args:
        output_prefix: of the run; the folder is `{output_prefix}.parts`.
        command: what decides the content of the parts, values that JSON can hold.
        fresh: forget the parts of an earlier run.

    Attributes:
        finished: records of the parts that are there, from the first shard on.

    Raises:
        UserError: parts of another command or of other input, or another run at work.
    """

    def __init__(self, output_prefix: str, command: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = Path(f"{output_prefix}.parts")
        self.finished: list[PartRecord] = []
        self._closed = False
        self._lock = StagedFile(self.folder / "lock")
        try:
            if fresh:
                self._forget()
            self._resume(json.loads(json.dumps(command)))
        except BaseException:
            self._lock.discard()
            raise

    def prefix(self, number: int, name: str) -> Path:
        """Of the pair `name` of shard `number`."""
        return self.folder / f"{number:06d}_{name}"

    def add(self, record: PartRecord) -> None:
        """Note that the next shard's pairs are whole, under their names."""
        path = self.folder / f"{len(self.finished):06d}.json"
        write_atomically(path, json.dumps(asdict(record)).encode())
        self.finished.append(record)

    def join(self, name: str, writer: IndexedDatasetWriter) -> None:
        """Append the pairs `name` of all parts, in order, to `writer`."""
        for number, record in enumerate(self.finished):
            pair = IndexedDataset(self.prefix(number, name))
            pair.check_index()
            writer.add_pair(pair)
            writer.largest_id = max(writer.largest_id, record.pairs[name].largest_id)

    def total(self, name: str) -> PairFigures:
        """Figures of the pairs `name` of all parts together."""
        figures = [record.pairs[name] for record in self.finished]
        return PairFigures(
            documents=sum(one.documents for one in figures),
            empty=sum(one.empty for one in figures),
            tokens=sum(one.tokens for one in figures),
            largest_id=max((one.largest_id for one in figures), default=-1),
        )

    def remove(self) -> None:
        """Delete the parts: their work is in the output, or worth nothing."""
        self._forget()
        self.close()

    def close(self) -> None:
        """Let go of the folder, which goes too where it holds no part; does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        if not self.finished:
            self._forget()
        self._lock.discard()
        try:
            self.folder.rmdir()
        except OSError:
            return  # it holds parts, or another run has come

    def _forget(self) -> None:
        # Records first: what has none is no part. The command last: a kill in between leaves no parts of no command.
        command = self.folder / "command.json"
        there = self.folder.iterdir() if self.folder.exists() else ()  # someone may have removed it
        for path in sorted(there, key=lambda path: (path == command, path.suffix != ".json", path)):
            if path != self._lock.staged:
                path.unlink()
        self.finished = []

    def _resume(self, command: dict[str, Any]) -> None:
        path = self.folder / "command.json"
        while (record := self._record(len(self.finished))) is not None:
            self.finished.append(record)
        if not self.finished:
            self._forget()
            write_atomically(path, json.dumps(command, indent=1).encode())
            return
        earlier = self._load(path) or {}
        for name in sorted({*earlier, *command}):
            if earlier.get(name) != command.get(name):
                what = _difference(name, earlier.get(name), command.get(name))
                raise UserError(f"{self.folder}: holds finished parts of another command: {what}; {_FRESH}")
        for number, record in enumerate(self.finished):
            for source in record.inputs:
                if not source.is_current():
                    raise UserError(
                        f"{self.folder}: part {number} was made from {source.path} with another content; {_FRESH}"
                    )
            for name, figures in record.pairs.items():
                dataset = IndexedDataset(self.prefix(number, name))
                if (dataset.documents, dataset.tokens) != (figures.documents, figures.tokens):
                    raise UserError(f"{dataset.prefix}: not the pair that its record describes; {_FRESH}")

    def _record(self, number: int) -> PartRecord | None:
        content = self._load(self.folder / f"{number:06d}.json")
        if content is None:
            return None
        try:
            inputs = [InputRecord(**source) for source in content["inputs"]]
            pairs = {name: PairFigures(**figures) for name, figures in content["pairs"].items()}
            return PartRecord(**content | {"inputs": inputs, "pairs": pairs})
        except (TypeError, KeyError, AttributeError):
            raise UserError(f"{self.folder}/{number:06d}.json: not the record of a part; {_FRESH}") from None

    def _load(self, path: Path) -> dict[str, Any] | None:
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error}); {_FRESH}") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a JSON object; {_FRESH}")
        return content


def shards(files: Sequence[Path], least: int) -> list[list[Path]]:
    """The files, in order, in groups of at least `least` bytes, but for the last: a part each."""
    groups: list[list[Path]] = []
    size = least
    for path in files:
        if size >= least:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    return groups


def shares(files: Sequence[Path], count: int) -> list[list[Path]]:
    """The files, in order, in `count` runs of about as many bytes each, none without a file.

    Raises:
        UserError: fewer files than that.
    """
    if len(files) < count:
        raise UserError(f"--partitions {count}: the input has {len(files)} files; give at most that, or split them")
    ends = np.cumsum([0, *(path.stat().st_size for path in files)])
    cuts = [0]
    for i in range(1, count):
        nearest = int(np.abs(ends - ends[-1] * i / count).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(files) - (count - i)))
    return [list(files[begin:end]) for begin, end in zip(cuts, [*cuts[1:], len(files)], strict=True)]


def _difference(name: str, earlier: Any, now: Any) -> str:
    if isinstance(earlier, list) and isinstance(now, list):
        gone, new = [x for x in earlier if x not in now], [x for x in now if x not in earlier]
        return f"{name}: then {len(earlier)}, now {len(now)}; gone {gone[:3]}, new {new[:3]}"
    return f"{name} was {earlier!r} and is {now!r}"
