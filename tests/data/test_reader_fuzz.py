"""Inputs that someone tampered with give documents, skipped documents or one clear error, and nothing else."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_essh.data import documents
from megatron_essh.data.documents import Skipped, batches, read_batch
from megatron_essh.errors import UserError

zstandard = pytest.importorskip("zstandard")

LIMIT = 2000
NASTY = [
    b"\n",
    b"\r",
    b"\0",
    b'"',
    b"\\",
    b"{",
    b"[",
    b">",
    b"\n>",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\\ud800",
]
NASTY += [b'{"text": "', b"[" * 3000, b'{"text":' * 500, b"9" * 5000, b"x" * 2 * LIMIT, b"1e999", b"NaN"]
NASTY += [b"A\n" * 2000, b"\n" * 50]


def originals() -> dict[str, bytes]:
    """A sound file of each kind, by a name that tells the kind."""
    texts = ["plain", "Ünïcödé 漢字 😀", "", "line\nend", "\ud83d lone", "x" * 300, "y" * (LIMIT - 50)]
    lines = b"".join(json.dumps({"text": text, "id": i}).encode() + b"\n" for i, text in enumerate(texts))
    fasta = b"".join(b">r%d x\n" % i + b"ACGTN\n" * (i * 9) for i in range(6))
    sound = {"a.jsonl": lines, "a.txt": "Text é\n".encode() * 40, "a.fa": fasta}
    for name, content in list(sound.items()):
        half = len(content) // 2
        sound[f"{name}.gz"] = gzip.compress(content[:half], 1) + gzip.compress(content[half:], 9)
        sound[f"{name}.zst"] = b"".join(map(zstandard.ZstdCompressor().compress, (content[:half], content[half:])))
    return sound


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """One to four random changes: bits, bytes, stretches removed, doubled, moved, zeroed or replaced, an early end."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        size = len(data)
        begin = int(rng.integers(0, size + 1))
        end = min(size, begin + int(rng.integers(0, 40)))
        match int(rng.integers(0, 8)):
            case 0 if size:
                data[begin % size] ^= 1 << int(rng.integers(0, 8))
            case 1 if size:
                data[begin % size] = int(rng.integers(0, 256))
            case 2:
                del data[begin:end]
            case 3:
                data[begin:begin] = data[begin:end] * int(rng.integers(1, 20))
            case 4:
                data[begin:end] = bytes(end - begin)
            case 5:
                data[begin:end] = NASTY[int(rng.integers(0, len(NASTY)))]
            case 6:
                del data[begin:]
            case _:
                piece = bytes(data[begin:end])
                del data[begin:end]
                data += piece
    return bytes(data)


def read(path: Path, encoding_errors: str, skipped: Skipped) -> tuple[list[list[list[str]]], str | None]:
    """The documents, and why there are no more of them."""
    found: list[list[list[str]]] = []
    try:
        for batch in batches([path], ("text",), LIMIT):
            found += read_batch(batch, ("text",), encoding_errors, largest=LIMIT, skipped=skipped)
    except UserError as error:
        return found, str(error)
    return found, None


def fuzz(folder: Path, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Read `count` mutated files; returns how many were read whole, read in part, and refused."""
    rng = np.random.default_rng(seed)
    sound = originals()
    names = sorted(sound)
    outcomes = {"whole": 0, "in part": 0, "refused": 0}
    for i in range(count):
        name = names[i % len(names)]
        path = folder / name
        path.write_bytes(mutate(sound[name], rng))
        monkeypatch.setattr(documents, "_BATCH_BYTES", int(rng.choice([1, 64, 1000, 1 << 20])))
        errors = str(rng.choice(["strict", "replace"]))
        skipped = Skipped()
        found, refusal = read(path, errors, skipped)
        if refusal is not None:
            assert str(path) in refusal
            assert name.endswith((".gz", ".zst")), "only what is compressed can be past reading"
            outcomes["refused"] += 1
            continue
        for document in found:
            ((*texts,),) = document
            assert all(isinstance(text, str) and len(text) <= LIMIT for text in texts)
        assert all(str(path) in reason and len(reason) < 2000 for reason in skipped.reasons)
        outcomes["in part" if skipped.count else "whole"] += 1
    return outcomes


def test_thousands_of_mutated_files_give_documents_or_clear_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz(tmp_path, 50, 1, monkeypatch)  # what is imported and cached on the way is no leak
    tracemalloc.start()
    try:
        outcomes = fuzz(tmp_path, 4000, 0, monkeypatch)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > 200, outcomes


@pytest.mark.slow
def test_a_hundred_thousand_mutated_files_give_documents_or_clear_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(fuzz(tmp_path, 100_000, 2, monkeypatch).values()) == 100_000
