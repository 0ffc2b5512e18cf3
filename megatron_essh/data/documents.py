"""Text files to documents: which files a command's `--input` names, in which order, and what is in them.

`.jsonl` and `.json` hold JSON lines, a document a line; every other file is one document of plain text. Knows
nothing of tokens.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_essh.errors import UserError

_JSON_LINES = (".jsonl", ".json")
_BATCH_BYTES = 1 << 20  # of text that travel together; a longer document travels alone
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Batch:
    """Some of the input's documents, still unread or undecoded, in the input's order."""

    paths: tuple[Path, ...]
    """Plain text files, a document each; or the one file that `lines` come from."""
    lines: bytes | None = None
    """Whole lines of a JSON lines file; None for plain text."""
    first_line: int = 1
    """Number of the first of them, counted from 1."""


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `inputs` name, in natural order (`part_2` before `part_10`).

    An input is a file, a folder (every file below it but hidden ones) or a glob (`**` goes through folders).

    Raises:
        UserError: an input names nothing, or two name the same file.
    """
    found: list[Path] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            here = [p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))]
        elif path.is_file():
            here = [path]
        else:
            here = [Path(p) for p in glob.glob(given, recursive=True) if Path(p).is_file()]
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


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts runs of digits by their value and everything else by its characters."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(part), "") if i % 2 else (0, 0, part) for i, part in enumerate(parts)]


def is_json_lines(path: Path) -> bool:
    """Whether the file holds a JSON document a line, by its name."""
    return path.suffix.lower() in _JSON_LINES


def batches(files: Iterable[Path]) -> Iterator[Batch]:
    """The documents of `files`, in order, in batches of about a megabyte."""
    texts: list[Path] = []
    size = 0
    for path in files:
        if is_json_lines(path):
            if texts:
                yield Batch(tuple(texts))
                texts, size = [], 0
            yield from _line_batches(path)
            continue
        texts.append(path)
        size += path.stat().st_size
        if size >= _BATCH_BYTES:
            yield Batch(tuple(texts))
            texts, size = [], 0
    if texts:
        yield Batch(tuple(texts))


def read_batch(batch: Batch, keys: Sequence[str], encoding_errors: str = "strict") -> Iterator[list[list[str]]]:
    """Each document's text by key: a list of sequences for every one of `keys`.

    A JSON value is text or a list of texts (a document of several sequences). Lines of white space are no
    documents. Plain text has one text, whatever the key is called.

    Args:
        batch: from `batches`.
        keys: of a JSON line.
        encoding_errors: `strict`, or `replace` to read bytes that are not UTF-8 as U+FFFD.

    Raises:
        UserError: naming file and line: not UTF-8, not JSON, no object, a key missing, a value that is no
            text.
    """
    if batch.lines is None:
        assert len(keys) == 1, "plain text has one text a document"
        for path in batch.paths:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from None
            yield [[_decode(content.removeprefix(_BOM), str(path), encoding_errors)]]
        return
    for number, line in enumerate(batch.lines.split(b"\n"), batch.first_line):
        if line.strip():
            where = f"{batch.paths[0]}: line {number}"
            yield _parse(_decode(line, where, encoding_errors), keys, where)


def _line_batches(path: Path) -> Iterator[Batch]:
    number = 1
    with path.open("rb") as file:
        while lines := file.read(_BATCH_BYTES):
            lines += file.readline()  # to the end of the line that the megabyte ended in
            yield Batch((path,), lines.removeprefix(_BOM) if number == 1 else lines, number)
            number += lines.count(b"\n")


def _decode(content: bytes, where: str, encoding_errors: str) -> str:
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
            there = ", ".join(map(repr, list(content)[:20])) or "none"
            raise UserError(f"{where}: no key {key!r}; it has {there}; see --json-keys")
        value = content[key]
        sequences = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in sequences):
            raise UserError(f"{where}: {key}: expected text or a list of texts, got {str(value)[:60]!r}")
        document.append(sequences)
    return document


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
