"""Which token pairs a command's inputs name, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_essh.data.documents import files_below, matches, natural_key
from megatron_essh.errors import UserError

_SUFFIXES = (".bin", ".idx")


def find_pairs(inputs: Sequence[str], output: Path | None = None) -> list[Path]:
    """The prefixes of the pairs that `inputs` name, in natural order (`part_2` before `part_10`).

    An input is a pair's prefix, its `.bin` or `.idx`, a folder (every pair below it that is not hidden) or a glob of
    any of these (`**` goes through folders). Files of other kinds beside the pairs are left alone; a `.bin` or `.idx`
    without its other half is an error, because it is what a copy that broke off leaves; but half of `output`, the pair
    that the command is about to write, is what its own killed run left, and is passed over.

    Raises:
        UserError: an input names no pair, or half of one, or two name the same; a folder cannot be listed.
    """
    found: list[Path] = []
    for given in inputs:
        here = _prefixes([Path(given)]) or _prefixes(matches(given))
        if not here:
            raise UserError(f"{given}: no pair .bin and .idx there; name prefixes, folders or globs of pairs")
        found += here
    found.sort(key=lambda prefix: natural_key(str(prefix)))
    if output is not None:
        found = [p for p in found if p.resolve() != output.resolve() or Path(f"{p}.idx").exists()]
    seen: dict[Path, Path] = {}
    for prefix in found:
        for suffix in _SUFFIXES:
            if not Path(f"{prefix}{suffix}").is_file():
                other = _SUFFIXES[suffix == ".bin"]
                raise UserError(f"{prefix}{suffix}: no such file, and {prefix}{other} is there; copy the pair whole")
        first = seen.setdefault(Path(f"{prefix}.idx").resolve(), prefix)
        if first is not prefix:
            raise UserError(f"{prefix} and {first} are the same pair; name it once")
    return found


def _prefixes(paths: Iterable[Path]) -> list[Path]:
    """Prefixes of the pairs, whole or half, that stand at `paths` or in these folders; each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            for entry in files_below(path):
                if entry.suffix in _SUFFIXES:
                    found[entry.with_suffix("")] = None
        elif path.suffix in _SUFFIXES and path.is_file():
            found[path.with_suffix("")] = None
        elif any(Path(f"{path}{suffix}").is_file() for suffix in _SUFFIXES):
            found[path] = None
    return list(found)
