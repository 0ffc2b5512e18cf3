"""Whatever bytes stand in a pair's files: the documents that they hold, or one clear error, in bounded time and memory.

ESSH_FUZZ sets how many damaged pairs are tried (3,000; 100,000 take about two minutes).
"""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import IndexedDataset, IndexedDatasetWriter, index_format, read_sidecar
from megatron_essh.data import indexed_dataset as indexed_dataset_module
from megatron_essh.errors import UserError

from .published_layout import FORMATS, Documents, NotAPair, read_published, write_published

TRIALS = int(os.environ.get("ESSH_FUZZ", "3000"))
TELLING = [0, 1, 2, 3, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63]
TELLING += [2**64 - 1, 2**64 - 2, 2**64 - 34]


def seeds(rng: random.Random) -> list[tuple[bytes, bytes]]:
    """Small pairs of every token type, empty ones among them."""
    pairs = []
    for code in FORMATS:
        for documents in (0, 1, 6):
            tokens = [[[rng.randrange(100) for _ in range(rng.randrange(5))] for _ in range(rng.randrange(3))]]
            tokens = [tokens[0] if i == 0 else [[rng.randrange(100)] * (i % 4)] * (i % 3) for i in range(documents)]
            pairs.append(write_published(tokens, code))
    return pairs


def damage(content: bytes, other: bytes, rng: random.Random) -> bytes:
    """`content` changed in one to four of the ways that files go wrong."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(9)
        if how == 0 and data:  # a bit
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1:  # cut
            del data[at:]
        elif how == 2:  # a hole, or a piece twice
            end = at + rng.randrange(40)
            data[at:end] = b"" if rng.random() < 0.5 else bytes(data[at:end]) * 2
        elif how == 3:  # something appended
            data += rng.randbytes(rng.choice((1, 3, 4, 8, 12, 100)))
        elif how == 4:  # another file's tail
            data[at:] = other[at:]
        elif how == 5 and len(data) >= 34:  # a header field
            offset, form = rng.choice(((9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q")))
            struct.pack_into(form, data, offset, rng.choice(TELLING) % (256 if form == "<B" else 2**64))
        elif how == 6 and len(data) > 34 + 8:  # an entry
            width, form = rng.choice(((4, "<I"), (8, "<Q")))
            entry = 34 + 4 * rng.randrange((len(data) - 34) // 4)
            if entry + width <= len(data):
                struct.pack_into(form, data, entry, rng.choice(TELLING) % 2 ** (8 * width))
        elif how == 7 and data:  # zeros, as a file system leaves them after a power cut
            length = rng.randrange(1, 64)
            data[at : at + length] = bytes(len(data[at : at + length]))
        elif how == 8 and len(data) >= 34:  # counts that fit the size again: more of one entry, fewer of another
            sequences, entries = struct.unpack_from("<QQ", data, 18)
            shift = rng.choice((-2, 2, 4))
            struct.pack_into("<QQ", data, 18, (sequences + shift) % 2**64, (entries - shift * 3 // 2) % 2**64)
    return bytes(data)


@contextmanager
def at_most(seconds: int, megabytes: int) -> Iterator[None]:
    """Ends what hangs, and holds the process's largest size to `megabytes` more than it is."""

    def late(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes << 10


def same(ours: list[list[float]], theirs: Documents) -> bool:
    joined = [[token for sequence in document for token in sequence] for document in theirs]
    return np.array_equal(
        np.array([len(d) for d in ours]), np.array([len(d) for d in joined])
    ) and np.array_equal(
        np.array([t for d in ours for t in d], np.float64), np.array([t for d in joined for t in d], np.float64),
        equal_nan=True,
    )  # fmt: skip


def test_damaged_pairs_give_their_documents_or_one_clear_error(tmp_path: Path) -> None:
    rng = random.Random(197)
    stock = seeds(rng)
    prefix = tmp_path / "p"
    refused = 0
    with at_most(60 + TRIALS // 100, 64):
        for trial in range(TRIALS):
            idx, bin_ = rng.choice(stock)
            other = rng.choice(stock)
            if rng.random() < 0.9:
                idx = damage(idx, other[0], rng)
            if rng.random() < 0.2:
                bin_ = damage(bin_, other[1], rng)
            Path(f"{prefix}.idx").write_bytes(idx)
            Path(f"{prefix}.bin").write_bytes(bin_)
            try:
                expected = read_published(idx, bin_)
            except NotAPair:
                with pytest.raises(UserError, match=r"p\.(idx|bin): "):
                    IndexedDataset(prefix)
                refused += 1
            else:
                pair = IndexedDataset(prefix)
                assert same([pair.document(i).tolist() for i in range(pair.documents)], expected), trial
    assert TRIALS // 3 < refused < TRIALS  # else the claim above is about nothing


def test_damage_that_opening_a_large_index_overlooks_is_found_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset_module, "WHOLLY_CHECKED", 20)
    monkeypatch.setattr(index_format, "_CHECKED_BLOCKS", 4)
    monkeypatch.setattr(index_format, "_CHECKED_BLOCK", 3)
    monkeypatch.setattr(index_format, "CHUNK", 5)
    rng = random.Random(7)
    documents = [[[i % 100] * (i % 5) for _ in range(i % 3)] for i in range(60)]
    idx, bin_ = write_published(documents, 8)
    prefix = tmp_path / "p"
    Path(f"{prefix}.bin").write_bytes(bin_)
    opened = found_on_reading = 0
    for _ in range(max(TRIALS // 3, 500)):
        damaged = damage(idx, idx, rng)
        Path(f"{prefix}.idx").write_bytes(damaged)
        try:
            whole = read_published(damaged, bin_)
        except NotAPair:
            whole = None
        try:
            pair = IndexedDataset(prefix)
        except UserError:
            assert whole is None
            continue
        opened += 1
        errors = 0
        for i in range(pair.documents):
            try:
                assert len(pair.document(i)) <= pair.tokens
            except UserError:
                errors += 1
        for i in range(len(pair)):
            try:
                assert len(pair[i]) == int(pair.sizes[i])
            except UserError:
                errors += 1
        if whole is None:
            found_on_reading += errors > 0
            with pytest.raises(UserError, match=r"p\.idx: "):
                pair.check_index()
        else:
            assert errors == 0
            pair.check_index()
    assert opened > 20 < found_on_reading


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=12),
    code=st.sampled_from(sorted(FORMATS)),
)
def test_pairs_cross_between_this_package_and_the_published_layout(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, code: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "crossing"
    folder.mkdir(exist_ok=True)
    # Ours to theirs. Our writer keeps no sequence without a token.
    kept = [[sequence for sequence in document if sequence] for document in documents]
    with IndexedDatasetWriter(folder / "ours", index_format.DTYPES[code]) as writer:
        for document in documents:
            writer.add_document(*document)
    written = (folder / "ours.idx").read_bytes(), (folder / "ours.bin").read_bytes()
    assert read_published(*written) == kept
    assert written == write_published(kept, code)
    # Theirs to ours, sequences without a token included.
    idx, bin_ = write_published(documents, code)
    (folder / "theirs.idx").write_bytes(idx)
    (folder / "theirs.bin").write_bytes(bin_)
    pair = IndexedDataset(folder / "theirs")
    sequences = [sequence for document in documents for sequence in document]
    assert [pair[i].tolist() for i in range(len(pair))] == sequences
    assert [pair.document(i).tolist() for i in range(pair.documents)] == [[t for s in d for t in s] for d in documents]


def test_a_damaged_sidecar_is_one_clear_error(tmp_path: Path) -> None:
    rng = random.Random(3)
    good = (
        b'{"tokenizer": {"type": "byte", "model": null, "pattern": "gpt2"}, "fingerprint": "f", "vocab_size": 257, '
        b'"padded_vocab_size": 257, "eod": 256, "documents": 1, "tokens": 3, "largest_id": 7, "data_fingerprint": "a"}'
    )
    path = tmp_path / "p.json"
    for _ in range(TRIALS // 3):
        path.write_bytes(damage(good, good[::-1], rng))
        try:
            content = read_sidecar(tmp_path / "p")
        except UserError as error:
            message = str(error)
        else:
            assert content is not None
            message = f"p.json: {content['eod']}"
        assert "p.json: " in message


TERABYTE = """
import re, sys, time
from pathlib import Path
import numpy as np
from megatron_essh.data import IndexedDataset

def largest():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = largest()
start = time.perf_counter()
pair = IndexedDataset(sys.argv[1])
opened = time.perf_counter() - start
assert pair.document(pair.documents - 1)[-3:].tolist() == [7, 8, 9]
assert pair.tokens == int(sys.argv[2]) and len(pair) == int(sys.argv[3])
identity = len(pair.fingerprint)
print(opened, time.perf_counter() - start, (largest() - before) / 1024)
"""


def test_a_terabyte_of_a_billion_sequences_opens_in_less_than_a_second_and_in_little_memory(tmp_path: Path) -> None:
    full, count = 2**31 - 1, 1_000_000_000
    last = 240  # sequences as long as the format allows; those before them are empty, and the files holes
    tokens = last * full
    with (tmp_path / "p.idx").open("wb") as file:
        file.write(index_format.pack_header(np.dtype("<u2"), count, count))
        lengths, offsets = 34 + 4 * count, 34 + 12 * count
        file.seek(lengths - 4 * last)
        file.write(np.full(last, full, "<i4").tobytes())
        file.seek(offsets - 8 * last)
        file.write((np.arange(last, dtype="<i8") * full * 2).tobytes())
        file.seek(offsets + 8 * count)
        file.write(struct.pack("<q", count))
    with (tmp_path / "p.bin").open("wb") as file:
        file.seek(2 * tokens - 6)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    assert (tmp_path / "p.bin").stat().st_size > 10**12
    done = subprocess.run(
        [sys.executable, "-c", TERABYTE, str(tmp_path / "p"), str(tokens), str(count)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    opened, identified, megabytes = map(float, done.stdout.split())
    assert opened < 1, done.stdout
    assert identified < 5, done.stdout
    assert megabytes < 64, done.stdout
