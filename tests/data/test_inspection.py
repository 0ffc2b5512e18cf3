"""The figures of a pair are those of its documents, and every kind of damage that a pass can see is seen."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.config import TokenizerConfig
from megatron_essh.data import IndexedDataset, IndexedDatasetWriter, build_tokenizer, index_format
from megatron_essh.data import indexed_dataset as indexed_dataset_module
from megatron_essh.data.inspection import LengthBin, decode_document, histogram_lines, measure, verify
from megatron_essh.data.sidecar import read_sidecar, write_sidecar
from megatron_essh.data.tokenizer_reference import build_recorded, tokenizer_of
from megatron_essh.errors import UserError


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 40), max_size=3), max_size=12),
    chunk=st.integers(1, 5),
)
def test_statistics_are_those_of_the_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], chunk: int
) -> None:
    prefix = tmp_path_factory.getbasetemp() / "statistics"
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for document in documents:
            writer.add_document(*(np.ones(length, np.int64) for length in document))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_format, "CHUNK", chunk)
        patch.setattr(indexed_dataset_module, "CHUNK", chunk)
        found = measure(IndexedDataset(prefix))
    lengths = [sum(document) for document in documents]
    assert (found.documents, found.sequences) == (len(documents), sum(map(len, documents)))
    assert found.empty_documents == lengths.count(0)
    assert (found.shortest, found.longest) == (min(lengths, default=0), max(lengths, default=0))
    assert (found.tokens, found.bin_bytes) == (sum(lengths), 2 * sum(lengths))
    assert found.mean == pytest.approx(sum(lengths) / max(len(lengths), 1))
    for entry in found.histogram:
        within = [n for n in lengths if entry.shortest <= n <= entry.longest]
        assert (entry.documents, entry.tokens) == (len(within), sum(within))
        assert entry.longest in (0, 1, 2 * entry.shortest - 1)
    assert sum(entry.documents for entry in found.histogram) == len(documents)
    if documents:
        assert found.histogram[0].documents > 0
        assert found.histogram[-1].documents > 0


def test_the_histogram_is_drawn_to_scale() -> None:
    lines = histogram_lines([LengthBin(0, 0, 1, 0), LengthBin(1, 1, 0, 0), LengthBin(2, 3, 400, 1000)], width=8)
    assert lines == [
        "tokens  documents  of all tokens",
        "     0          1           0.0%  #",
        "     1          0           0.0%",
        "2 to 3        400         100.0%  ########",
    ]


def test_a_sound_pair_has_no_fault(byte_pair: object) -> None:
    prefix = byte_pair.prefix  # type: ignore[attr-defined]
    counted: list[int] = []
    found = verify(IndexedDataset(prefix), progress=counted.append)
    assert (found.faults, found.vocab_size, found.described) == ([], 257, True)
    assert (found.smallest_id, found.largest_id) == (10, 256)
    assert sum(counted) == Path(f"{prefix}.bin").stat().st_size


def test_every_token_is_held_to_the_vocabulary(
    write_pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_dataset_module, "CHUNK", 2)
    tokens = np.full(100, 5)
    for where in (0, 50, 99):
        pair = IndexedDataset(write_pair([np.where(np.arange(100) == where, 900, tokens).tolist()], "p"))
        assert verify(pair).faults == []
        assert verify(pair, vocab_size=901).faults == []
        (fault,) = verify(pair, vocab_size=900).faults
        assert "p.bin: token id 900 lies outside the vocabulary of 900" in fault
    (fault,) = verify(IndexedDataset(write_pair([[4, -3]], "n", "<i4"))).faults
    assert "n.bin: token id -3 is negative" in fault
    (fault,) = verify(IndexedDataset(write_pair([[4]], "f", "<f4"))).faults
    assert "f.bin: holds float32, not token ids" in fault


def test_a_pair_is_held_to_what_its_sidecar_says(byte_pair: object) -> None:
    prefix = byte_pair.prefix  # type: ignore[attr-defined]
    good = read_sidecar(prefix)
    assert good is not None
    for key, value in (("documents", 4), ("tokens", 1), ("largest_id", 255), ("data_fingerprint", "0" * 64)):
        write_sidecar(prefix, good | {key: value})
        (fault,) = verify(IndexedDataset(prefix)).faults
        assert f"text_document.json: {key}: {value}, and the pair has " in fault
    write_sidecar(prefix, good | {"vocab_size": 200})
    assert "token id 256 lies outside the vocabulary of 200" in verify(IndexedDataset(prefix)).faults[0]
    write_sidecar(prefix, good)
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[20] ^= 1  # a bit that went over
    Path(f"{prefix}.bin").write_bytes(content)
    assert [fault.split(": ")[1] for fault in verify(IndexedDataset(prefix)).faults] == ["data_fingerprint"]


def test_documents_come_back_as_text_by_their_number(byte_pair: object) -> None:
    prefix, texts = byte_pair.prefix, byte_pair.texts  # type: ignore[attr-defined]
    pair = IndexedDataset(prefix)
    reference = tokenizer_of(pair)
    assert reference is not None
    tokenizer = build_recorded(reference)
    for index in range(3):
        for number in (index, index - 3):
            document = decode_document(pair, number, tokenizer, 10_000)
            assert (document.index, document.text, document.sequences) == (index, texts[index], 1)
            assert document.tokens == len(document.ids) == len(texts[index].encode()) + 1
    short = decode_document(pair, 0, tokenizer, 3)
    assert (short.text, len(short.ids), short.tokens) == ("Zw\ufffd", 3, len(texts[0].encode()) + 1)
    with pytest.raises(IndexError):
        decode_document(pair, 3, tokenizer, 3)
    with pytest.raises(UserError, match="token id 256 stands for no token"):
        decode_document(pair, 0, _without_end(build_tokenizer(TokenizerConfig(type="byte"))), 10_000)


def _without_end(tokenizer: object) -> object:
    tokenizer.has = lambda token: token < 256  # type: ignore[attr-defined]
    return tokenizer


def test_a_rank_file_that_changed_since_is_refused(rank_file: Path, byte_pair: object, tmp_path: Path) -> None:
    reference = tokenizer_of(IndexedDataset(byte_pair.prefix))  # type: ignore[attr-defined]
    assert reference is not None
    copy = tmp_path / "copy.tiktoken"
    copy.write_bytes(rank_file.read_bytes())
    config = TokenizerConfig(type="tiktoken", model=str(copy))
    recorded = replace(reference, config=config, fingerprint=build_tokenizer(config).fingerprint)
    assert build_recorded(recorded).encode("a") == [97]
    copy.write_bytes(b"".join(rank_file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"copy\.tiktoken: changed since the ids were made"):
        build_recorded(recorded)
    copy.unlink()
    with pytest.raises(UserError, match=r"copy\.tiktoken: cannot be read: No such file"):
        build_recorded(recorded)


BOUNDED = """
import re, sys
from pathlib import Path
from megatron_essh.data import IndexedDataset
from megatron_essh.data.inspection import measure, verify

def largest():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = largest()
pair = IndexedDataset(sys.argv[1])
statistics, found = measure(pair), verify(pair)
assert statistics.documents == 20_000_000 and not found.faults
print((largest() - before) / 1024)
"""


@pytest.mark.slow
def test_inspection_of_a_large_pair_takes_bounded_memory(tmp_path: Path) -> None:
    count = 20_000_000  # 400 MB of index, 1 GB of tokens that are holes
    with (tmp_path / "p.idx").open("wb") as file:
        file.write(index_format.pack_header(np.dtype("<u2"), count, count))
        file.write(np.full(count, 25, "<i4").tobytes())
        file.write((np.arange(count, dtype="<i8") * 50).tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    with (tmp_path / "p.bin").open("wb") as file:
        file.truncate(50 * count)
    done = subprocess.run([sys.executable, "-c", BOUNDED, str(tmp_path / "p")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 160, done.stdout


def test_an_entry_that_opening_overlooked_is_found_by_verifying(
    write_pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair([[1, 2]] * 1000)
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into("<q", index, 34 + 4 * 1000 + 8 * 499, 7)  # an offset in the middle
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(UserError, match=r"pair\.idx: offsets: sequence 499"):
        IndexedDataset(prefix)
    monkeypatch.setattr(indexed_dataset_module, "WHOLLY_CHECKED", 100)
    monkeypatch.setattr(index_format, "_CHECKED_BLOCKS", 4)
    monkeypatch.setattr(index_format, "_CHECKED_BLOCK", 10)
    for look in (verify, measure):
        with pytest.raises(UserError, match=r"pair\.idx: offsets: sequence 499"):
            look(IndexedDataset(prefix))
