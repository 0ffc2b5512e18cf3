"""Text files to documents: which files a command's `--input` names, in which order, and what is in them.

Formats are told by names (`readers.format_of`). Knows nothing of tokens.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron_essh.data import parquet
from megatron_essh.data.readers import Format, InputFile, format_of
from megatron_essh.errors import UserError

LARGEST_DOCUMENT = 1 << 30
"""Bytes of a document (a JSON line, a text file, a FASTA record, a Parquet value) that is still read."""
PROBLEMS_TOLD = 20
"""Skipped documents that are told one by one; the rest are counted."""

_BATCH_BYTES = 1 << 20  # of text that travel together; a longer document travels alone
_BOM = b"\xef\xbb\xbf"
_LETTERS = bytes(range(65, 91)) + bytes(range(97, 123)) + b"*-."


@dataclass(frozen=True)
class Batch:
    """Some of the input's documents, still undecoded, in the input's order."""

    paths: tuple[Path, ...]
    """Plain text files, a document each; or the one file that `content` comes from."""
    content: bytes | None = None
    """Whole lines of a JSON lines file, whole records of a FASTA file or rows of a Parquet file; None for text."""
    first_line: int = 1
    """Number of the first line (of a Parquet file: row) in `content`, counted from 1."""
    cut: bool = False
    """Whether what follows `content` in the file was longer than a document may be, and is left out."""
    input_bytes: int = 0
    """Bytes of the files themselves, compressed as they are, that this batch takes the reader on."""


@dataclass
class Skipped:
    """Counts documents that could not be read, and keeps the first few reasons."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    """File, line and reason of the first PROBLEMS_TOLD."""

    def add(self, reason: str) -> None:
        """Count one document."""
        self.count += 1
        if len(self.reasons) < PROBLEMS_TOLD:
            self.reasons.append(reason)


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `inputs` name, in natural order (`part_2` before `part_10`).

    An input is a file, a folder (every file below it but hidden ones) or a glob (`**` goes through folders). Links to
    folders are followed.

    Raises:
        UserError: an input names nothing, or two name the same file; a folder cannot be listed, or holds what is
            neither file nor folder, such as a link to nothing: it is unknown what would be missing.
    """
    found: list[Path] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            here = [_existing(p) for p in files_below(path)]
        elif path.is_file():
            here = [path]
        else:
            here = [_existing(p) for p in matches(given) if not p.is_dir()]
        if not here:
            raise UserError(f"--input {given}: no file there; name files, folders or globs")
        found += here
    found.sort(key=lambda path: natural_key(str(path)))
    seen: dict[Path, Path] = {}
    for path in found:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            raise UserError(f"--input: {path} and {first} are the same file; name it once")
    return found


def files_below(folder: Path) -> Iterator[Path]:
    """All that is no folder below `folder`, through links too, but what is hidden.

    Raises:
        UserError: a folder cannot be listed, or is reached twice.
    """
    seen: dict[Path, str] = {}
    for here, folders, files in os.walk(folder, onerror=_cannot_list, followlinks=True):
        first = seen.setdefault(Path(here).resolve(), here)
        if first is not here:
            raise UserError(f"{here} and {first} are the same folder; remove the link, or name the files by a glob")
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in files if not name.startswith("."))


def matches(pattern: str) -> list[Path]:
    """What a glob names (`**` goes through folders).

    Raises:
        UserError: a folder that it looks into cannot be listed, which `glob` by itself takes for an empty one.
    """
    parts = (".", *Path(pattern).parts)
    for i in range(1, len(parts) + 1):
        if parts[i - 1] == "**" or glob.has_magic("".join(parts[i : i + 1])):
            for folder in glob.glob(os.path.join(*parts[:i], ""), recursive=True):
                try:
                    os.scandir(folder).close()
                except OSError as error:
                    _cannot_list(error)
    return [Path(name) for name in glob.glob(pattern, recursive=True)]


def _cannot_list(error: OSError) -> NoReturn:
    raise UserError(
        f"{error.filename}: cannot be listed: {error.strerror}; change its permissions, or leave it out"
    ) from None


def _existing(path: Path) -> Path:
    if not path.is_file():
        what = "a link to nothing" if path.is_symlink() else "neither a file nor a folder"
        raise UserError(f"--input: {path}: {what}; remove it, or name the files apart from it")
    return path


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts runs of digits by their value and everything else by its characters."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(part), "") if i % 2 else (0, 0, part) for i, part in enumerate(parts)]


def batches(files: Iterable[Path], keys: Sequence[str] = ("text",), largest: int = LARGEST_DOCUMENT) -> Iterator[Batch]:
    """The documents of `files`, in order, in batches of about a megabyte; one file at a time is open.

    Args:
        files: from `find_files`.
        keys: columns of a Parquet file to read.
        largest: bytes of a document; no more than about that is held of one that is longer.

    Raises:
        UserError: a file that cannot be read, is damaged or truncated, or lacks a column.
    """
    texts: list[Path] = []
    size = 0
    for path in files:
        kind = format_of(path)
        if kind is Format.TEXT:
            texts.append(path)
            size += _size(path)
        if texts and (kind is not Format.TEXT or size >= _BATCH_BYTES):
            yield Batch(tuple(texts), input_bytes=size)
            texts, size = [], 0
        if kind is Format.PARQUET:
            for content, first, consumed in parquet.row_batches(path, keys, _BATCH_BYTES):
                yield Batch((path,), content, first, input_bytes=consumed)
        elif kind is not Format.TEXT:
            yield from _stream_batches(path, kind, largest)
    if texts:
        yield Batch(tuple(texts), input_bytes=size)


def read_batch(
    batch: Batch,
    keys: Sequence[str],
    encoding_errors: str = "strict",
    *,
    largest: int = LARGEST_DOCUMENT,
    skipped: Skipped | None = None,
) -> Iterator[list[list[str]]]:
    """Each document's text by key: a list of sequences for every one of `keys`.

    A JSON or Parquet value is text or a list of texts (a document of several sequences). Lines of white space are no
    documents. Plain text and FASTA have one text, whatever the key is called.

    Args:
        batch: from `batches`.
        keys: of a JSON line or a Parquet row.
        encoding_errors: `strict`, or `replace` to read bytes that are not UTF-8 as U+FFFD.
        largest: bytes of the longest document, as given to `batches`.
        skipped: takes the documents that cannot be read; None: the first of them is an error.

    Raises:
        UserError: a file that cannot be read or is damaged; without `skipped`, also a document: not UTF-8, not JSON,
            no object, a key missing, a value that is no text, or too long. It names file and line.
    """
    for _, document in read_located(batch, keys, encoding_errors, largest=largest, skipped=skipped):
        yield document


def read_located(
    batch: Batch,
    keys: Sequence[str],
    encoding_errors: str = "strict",
    *,
    largest: int = LARGEST_DOCUMENT,
    skipped: Skipped | None = None,
) -> Iterator[tuple[str, list[list[str]]]]:
    """As `read_batch`, each document with the file and line it comes from."""
    for where, raw in _raw_documents(batch, keys, encoding_errors, largest):
        if not isinstance(raw, UserError):
            yield where, raw
        elif skipped is None:
            raise raw
        else:
            skipped.add(str(raw))


def _raw_documents(
    batch: Batch, keys: Sequence[str], encoding_errors: str, largest: int
) -> Iterator[tuple[str, list[list[str]] | UserError]]:
    """Where each document stands, and it, or why it is none: a generator that raised could not go on."""
    pieces: Iterator[tuple[str, bytes | None]]
    if batch.content is None:
        pieces = _texts(batch.paths, largest)
    elif format_of(batch.paths[0]) is Format.PARQUET:
        yield from _rows(batch, keys, encoding_errors, largest)
        return
    elif format_of(batch.paths[0]) is Format.FASTA:
        pieces = _records(batch)
    else:
        for where, line in _lines(batch):
            try:
                _check_length(line, where, largest)
                document = _parse(_decode(line, where, encoding_errors), keys, where)
            except UserError as error:
                yield where, error
            else:
                yield where, document
        return
    assert len(keys) == 1, "plain text and FASTA have one text a document"
    for where, piece in pieces:
        try:
            _check_length(piece, where, largest)
            assert piece is not None
            text = _decode(_sequence(piece, where) if batch.content is not None else piece, where, encoding_errors)
        except UserError as error:
            yield where, error
        else:
            yield where, [[text]]


def _stream_batches(path: Path, kind: Format, largest: int) -> Iterator[Batch]:
    """Whole lines or records of one file; no more than about `largest` bytes beyond a batch are held."""
    number, before = 1, 0
    with InputFile(path) as file:
        try:
            while content := file.stream.read(_BATCH_BYTES):
                if kind is Format.FASTA:
                    rest, cut, dropped = _rest_of_record(file.stream, content, largest)
                else:
                    rest, cut, dropped = _rest_of_line(file.stream, content, largest)
                lines = content.count(b"\n") + rest.count(b"\n") + dropped
                content += rest
                consumed = file.position - before
                before += consumed
                yield Batch(
                    (path,), content.removeprefix(_BOM) if number == 1 else content, number, cut, input_bytes=consumed
                )
                number += lines
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _rest_of_line(stream: io.BufferedReader[Any], content: bytes, largest: int) -> tuple[bytes, bool, int]:
    """What completes the last line of `content`; whether it was too long, and the line ends dropped for that."""
    if content.endswith(b"\n"):
        return b"", False, 0
    rest = stream.readline(largest + 1)
    if len(rest) <= largest or rest.endswith(b"\n"):
        return rest, False, 0
    piece = rest
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(_BATCH_BYTES)
    return b"", True, int(piece.endswith(b"\n"))


def _rest_of_record(stream: io.BufferedReader[Any], content: bytes, largest: int) -> tuple[bytes, bool, int]:
    """As `_rest_of_line`, up to the next line that begins with `>`."""
    pieces: list[bytes] = []
    size = dropped = 0
    last = content
    while not (last.endswith(b"\n") and stream.peek(1)[:1] == b">"):
        last = stream.readline(_BATCH_BYTES)
        if not last:
            break
        size += len(last)
        if size <= largest:
            pieces.append(last)
        else:
            dropped += last.count(b"\n") + sum(piece.count(b"\n") for piece in pieces)
            pieces = []
    return b"".join(pieces), size > largest, dropped


def _lines(batch: Batch) -> Iterator[tuple[str, bytes | None]]:
    """Where each line stands, and the line; None for one that was cut."""
    assert batch.content is not None
    lines: list[bytes | None] = [*batch.content.split(b"\n")]
    if batch.cut:
        lines[-1] = None
    for number, line in enumerate(lines, batch.first_line):
        if line is None or line.strip():
            yield f"{batch.paths[0]}: line {number}", line


def _records(batch: Batch) -> Iterator[tuple[str, bytes | None]]:
    """Where each FASTA record stands, and its lines; None for one that was cut."""
    assert batch.content is not None
    records = (b"\n" + batch.content).split(b"\n>")
    number = batch.first_line
    if records[0].strip():  # only what stands before a file's first record
        yield f"{batch.paths[0]}: line {number}", records[0][1:]
    number += records[0].count(b"\n")
    for i, record in enumerate(records[1:], 1):
        cut = batch.cut and i == len(records) - 1
        yield f"{batch.paths[0]}: line {number}", None if cut else b">" + record
        number += record.count(b"\n") + 1


def _sequence(record: bytes, where: str) -> bytes:
    if not record.startswith(b">"):
        raise UserError(f"{where}: not a FASTA record: it does not begin with '>'")
    _, _, lines = record.partition(b"\n")
    sequence = b"".join(lines.split())
    strange = sequence.translate(None, _LETTERS)
    if strange:
        raise UserError(f"{where}: a FASTA record with {strange[:1]!r} in its sequence; letters, *, - and . are right")
    return sequence


def _texts(paths: Sequence[Path], largest: int) -> Iterator[tuple[str, bytes | None]]:
    for path in paths:
        pieces: list[bytes] = []
        size = 0
        with InputFile(path) as file:
            try:
                while size <= largest + len(_BOM) and (piece := file.stream.read(_BATCH_BYTES)):
                    pieces.append(piece)
                    size += len(piece)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        yield str(path), b"".join(pieces).removeprefix(_BOM)


def _rows(
    batch: Batch, keys: Sequence[str], encoding_errors: str, largest: int
) -> Iterator[tuple[str, list[list[str]] | UserError]]:
    assert batch.content is not None
    for number, row in enumerate(parquet.rows(batch.content), batch.first_line):
        where = f"{batch.paths[0]}: row {number}"
        document = []
        try:
            for key, value in zip(keys, row, strict=True):
                sequences = value if isinstance(value, list) else [value]
                texts = []
                for content in sequences:
                    if content is None:
                        raise UserError(f"{where}: {key}: null; expected text")
                    _check_length(content, where, largest)
                    texts.append(_decode(content, where, encoding_errors))
                document.append(texts)
        except UserError as error:
            yield where, error
        else:
            yield where, document


def _check_length(content: bytes | None, where: str, largest: int) -> None:
    if content is None or len(content) > largest:
        raise UserError(f"{where}: a document of more than {largest:,} bytes; split it or raise --max-document-mb")


def _decode(content: bytes | None, where: str, encoding_errors: str) -> str:
    assert content is not None  # its length was checked
    try:
        return content.decode("utf-8", encoding_errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 text at byte {error.start} (0x{content[error.start]:02x}); convert it, "
            "leave it out, or pass --encoding-errors replace"
        ) from None


def _parse(line: str, keys: Sequence[str], where: str) -> list[list[str]]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); every line must hold one JSON object") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(content).__name__}")
    document = []
    for key in keys:
        if key not in content:
            there = ", ".join(repr(name)[:60] for name in list(content)[:20]) or "none"
            raise UserError(f"{where}: no key {key!r}; it has {there}; see --json-keys")
        value = content[key]
        sequences = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in sequences):
            raise UserError(f"{where}: {key}: expected text or a list of texts, got {json.dumps(value)[:60]}")
        document.append(sequences)
    return document


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
