"""Megatron's pair, byte for byte: written, read, and refused when it is not whole."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import IndexedDataset, IndexedDatasetWriter, check_token_ids, index_format, token_dtype
from megatron_essh.data import indexed_dataset as indexed_dataset_module
from megatron_essh.data.sidecar import read_sidecar, write_sidecar
from megatron_essh.errors import UserError

DTYPES = ["<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]

# Documents [1, 2, 3], [], [4, 5 | 6, 7] as uint16, spelled out by hand.
GOLDEN_BIN = bytes.fromhex("0100 0200 0300 0400 0500 0600 0700".replace(" ", ""))
GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000"  # magic
    "0100000000000000"  # version
    "08"  # uint16
    "0300000000000000"  # sequences
    "0400000000000000"  # boundaries
    "030000000200000002000000"  # lengths
    "000000000000000006000000000000000a00000000000000"  # offsets
    "0000000000000000010000000000000001000000000000000300000000000000"  # boundaries
)
assert len(GOLDEN_IDX) == 102

documents_of = st.lists(st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=5), max_size=3), max_size=12)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def golden(folder: Path, idx: bytes = GOLDEN_IDX, bin_: bytes = GOLDEN_BIN) -> Path:
    (folder / "g.idx").write_bytes(idx)
    (folder / "g.bin").write_bytes(bin_)
    return folder / "g"


def test_golden_documents_are_written_as_the_golden_bytes(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "g", "<u2") as writer:
        writer.add_document([1, 2, 3])
        writer.add_document()
        writer.add_document([4, 5], [6, 7])
    assert (tmp_path / "g.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "g.idx").read_bytes() == GOLDEN_IDX
    assert listing(tmp_path) == ["g.bin", "g.idx"]


def test_golden_bytes_are_read_as_the_golden_documents(tmp_path: Path) -> None:
    dataset = IndexedDataset(golden(tmp_path))
    assert (len(dataset), dataset.documents, dataset.tokens, dataset.dtype) == (3, 3, 7, np.uint16)
    assert [dataset[i].tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7]]
    assert [dataset.document(i).tolist() for i in range(3)] == [[1, 2, 3], [], [4, 5, 6, 7]]
    assert dataset.sizes.tolist() == [3, 2, 2]
    assert dataset.boundaries.tolist() == [0, 1, 1, 3]
    assert dataset.flat.tolist() == list(range(1, 8))
    assert dataset[-1].tolist() == [6, 7]
    for index in (3, -1):
        with pytest.raises(IndexError):
            dataset.document(index)


@pytest.mark.parametrize(("code", "dtype"), list(enumerate(DTYPES, 1)))
def test_every_token_type_has_megatrons_code(tmp_path: Path, code: int, dtype: str) -> None:
    values = np.arange(1, 100).astype(dtype)
    with IndexedDatasetWriter(tmp_path / "p", dtype) as writer:
        writer.add_document(values)
    assert (tmp_path / "p.idx").read_bytes()[17] == code
    assert (tmp_path / "p.bin").read_bytes() == values.tobytes()
    assert IndexedDataset(tmp_path / "p").document(0).tolist() == values.tolist()


def test_tokens_take_16_bits_below_65500_entries() -> None:
    assert [token_dtype(v).name for v in (257, 65_499, 65_500, 128_256)] == ["uint16", "uint16", "int32", "int32"]


@settings(max_examples=60, deadline=None)
@given(documents=documents_of, chunk=st.integers(1, 7), cut=st.integers(0, 12))
def test_any_corpus_comes_back_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], chunk: int, cut: int
) -> None:
    prefix = tmp_path_factory.mktemp("any") / "p"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_format, "CHUNK", chunk)
        patch.setattr(indexed_dataset_module, "CHUNK", chunk)
        with IndexedDatasetWriter(prefix, "<u2") as writer:
            for document in documents[:cut]:
                writer.add_document(*document)
            rest = documents[cut:]  # the others all at once
            sequences = [sequence for document in rest for sequence in document]
            tokens = np.array([token for sequence in sequences for token in sequence], np.int64)
            writer.add_documents(tokens, [len(s) for s in sequences], [len(d) for d in rest])
        dataset = IndexedDataset(prefix)
        assert dataset.documents == len(documents) == writer.documents
        assert [dataset[i].tolist() for i in range(len(dataset))] == [s for d in documents for s in d]
        assert [dataset.document(i).tolist() for i in range(len(documents))] == [
            [t for s in d for t in s] for d in documents
        ]
        largest = max((t for d in documents for s in d for t in s), default=-1)
        assert writer.largest_id == largest == dataset.id_range[1]


def test_offsets_beyond_32_bits_are_read(tmp_path: Path) -> None:
    lengths = [2**31 - 1, 2**31 - 1, 5]
    offsets = [0, 4 * (2**31 - 1), 8 * (2**31 - 1)]
    index = struct.pack("<9sQBQQ3i3q4q", b"MMIDIDX\0\0", 1, 4, 3, 4, *lengths, *offsets, 0, 1, 2, 3)
    prefix = golden(tmp_path, index, b"")
    with Path(f"{prefix}.bin").open("wb") as file:  # 17 GB, all holes but the last five tokens
        file.seek(offsets[2])
        file.write(np.arange(7, 12, dtype="<i4").tobytes())
    dataset = IndexedDataset(prefix)
    assert dataset.tokens == sum(lengths)
    assert dataset.document(2).tolist() == [7, 8, 9, 10, 11]
    assert len(dataset.fingerprint) == 64


def test_an_empty_pair_opens_and_holds_nothing(tmp_path: Path) -> None:
    IndexedDatasetWriter(tmp_path / "none", "<u2").finish()
    with IndexedDatasetWriter(tmp_path / "hollow", "<i4") as writer:
        writer.add_document()
        writer.add_document([])
    for name, documents in (("none", 0), ("hollow", 2)):
        dataset = IndexedDataset(tmp_path / name)
        assert (len(dataset), dataset.documents, dataset.tokens) == (0, documents, 0)


def patched(offset: int, value: bytes) -> bytes:
    return GOLDEN_IDX[:offset] + value + GOLDEN_IDX[offset + len(value) :]


@pytest.mark.parametrize(
    ("idx", "bin_", "field"),
    [
        (b"", GOLDEN_BIN, "g.idx: empty file"),
        (b"PK\x03\x04 a zip, say, of some length" * 4, GOLDEN_BIN, "g.idx: magic"),
        (patched(9, b"\x02"), GOLDEN_BIN, "g.idx: version: 2"),
        (patched(17, b"\x09"), GOLDEN_BIN, "g.idx: token type: code 9"),
        (patched(18, b"\x04"), GOLDEN_BIN, "g.idx: 102 bytes, and 4 sequences"),
        (patched(18, b"\xff" * 8), GOLDEN_BIN, "g.idx: 102 bytes, and 18446744073709551615 sequences"),
        (patched(26, bytes(8)), GOLDEN_BIN, "g.idx: document boundaries: 0"),
        (GOLDEN_IDX + bytes(3), GOLDEN_BIN, "multimodal"),
        (GOLDEN_IDX + bytes(4), GOLDEN_BIN, "not an index of this layout"),
        (patched(34, b"\xff\xff\xff\xff"), GOLDEN_BIN, "g.idx: lengths: sequence 0 has -1 tokens"),
        (patched(34, b"\x04"), GOLDEN_BIN, "g.idx: offsets: sequence 1 at byte 6 of the .bin, expected 8"),
        (patched(54, b"\x0e"), GOLDEN_BIN, "g.idx: offsets: sequence 1 at byte 14"),
        (patched(70, b"\x01"), GOLDEN_BIN, "g.idx: document boundaries: from 1 to 3"),
        (patched(94, b"\x02"), GOLDEN_BIN, "g.idx: document boundaries: from 0 to 2"),
        (patched(78, b"\x02"), GOLDEN_BIN, "g.idx: document boundaries: entry 2 is 1, below"),
        (patched(78, b"\xff" * 7 + b"\x7f"), GOLDEN_BIN, "g.idx: document boundaries: entry 2"),
        (GOLDEN_IDX, b"", "g.bin: 0 bytes, .* describes 14: the file is truncated"),
        (GOLDEN_IDX, GOLDEN_BIN[:-1], "g.bin: 13 bytes, .* truncated"),
        (GOLDEN_IDX, GOLDEN_BIN + b"\0\0", "g.bin: 16 bytes, .* does not belong to this index"),
    ],
)
def test_a_pair_that_is_not_whole_is_refused_by_file_and_field(
    tmp_path: Path, idx: bytes, bin_: bytes, field: str
) -> None:
    with pytest.raises(UserError, match=field):
        IndexedDataset(golden(tmp_path, idx, bin_))


def test_an_index_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for length in range(len(GOLDEN_IDX)):
        with pytest.raises(UserError, match=r"g\.idx: "):
            IndexedDataset(golden(tmp_path, GOLDEN_IDX[:length]))


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 101), value=st.integers(0, 255), length=st.integers(0, 102))
def test_a_damaged_index_gives_a_clear_error_or_whole_documents(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, length: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    damaged = bytearray(GOLDEN_IDX)
    damaged[position] = value
    try:
        dataset = IndexedDataset(golden(folder, bytes(damaged[: length + position])))
    except UserError:
        return
    assert sum(len(dataset.document(i)) for i in range(dataset.documents)) == 7


def test_missing_files_and_wrong_names_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.bin: no such file"):
        IndexedDataset(tmp_path / "absent")
    prefix = golden(tmp_path)
    with pytest.raises(UserError, match="name the pair by its prefix"):
        IndexedDataset(f"{prefix}.bin")
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(UserError, match=r"g\.idx: no such file"):
        IndexedDataset(prefix)
    Path(f"{prefix}.idx").mkdir()
    with pytest.raises(UserError, match=r"g\.idx: not a file"):
        IndexedDataset(prefix)


def test_a_token_that_does_not_fit_its_type_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for token in (65_536, -1):
        with (
            pytest.raises(UserError, match=f"token id {token} does not fit uint16"),
            IndexedDatasetWriter(tmp_path / "p", "<u2") as writer,
        ):
            writer.add_document([5, token])
    assert listing(tmp_path) == []


def test_nothing_has_its_name_before_the_end_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    class Interruption(Exception):
        pass

    def interrupted() -> None:
        with IndexedDatasetWriter(tmp_path / "new" / "p", "<u2") as writer:
            writer.add_document(np.arange(1000))
            writer.seal()
            assert all(name.endswith(".tmp") for name in listing(tmp_path / "new"))
            raise Interruption

    with pytest.raises(Interruption):
        interrupted()
    assert listing(tmp_path / "new") == []


def test_a_replaced_pair_is_never_half_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = golden(tmp_path)
    rename = os.replace

    def no_index(source: Path, target: Path) -> None:
        if str(target).endswith(".idx"):
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(os, "replace", no_index)
    writer = IndexedDatasetWriter(prefix, "<u2")
    writer.add_document([9] * 7)  # as many bytes as the old pair: sizes alone would not tell
    with pytest.raises(OSError, match="broken disk"):
        writer.finish()
    assert listing(tmp_path) == []
    monkeypatch.undo()
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        writer.add_document([1, 2])
    assert IndexedDataset(prefix).document(0).tolist() == [1, 2]
    assert listing(tmp_path) == ["g.bin", "g.idx"]


def test_two_writers_of_one_prefix_are_told_apart(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "p", "<u2") as first:
        first.add_document([1])
        with pytest.raises(UserError, match="another run is writing this file"):
            IndexedDatasetWriter(tmp_path / "p", "<u2")
        first.add_document([2])
    assert IndexedDataset(tmp_path / "p").flat.tolist() == [1, 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("at", ["write", "fsync"])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, at: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    def write() -> None:
        with IndexedDatasetWriter(tmp_path / "p", "<u2") as writer:
            writer.add_document([1, 2])
            monkeypatch.setattr(os, at, full)
            writer.add_document([3, 4])

    with pytest.raises(UserError, match=r"p\.\w+: cannot be written: .*; free space there"):
        write()
    assert listing(tmp_path) == []


def test_a_killed_writer_leaves_no_pair_and_the_next_one_is_not_hindered(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np\n"
        "from megatron_essh.data.indexed_dataset import IndexedDatasetWriter\n"
        "writer = IndexedDatasetWriter(sys.argv[1], '<u2')\n"
        "while True: writer.add_document(np.arange(1000)); print('x', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "p")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert listing(tmp_path)
    assert all(name.endswith(".tmp") for name in listing(tmp_path))
    with IndexedDatasetWriter(tmp_path / "p", "<u2") as writer:
        writer.add_document([1, 2])
    assert IndexedDataset(tmp_path / "p").flat.tolist() == [1, 2]
    assert listing(tmp_path) == ["p.bin", "p.idx"]


def test_the_fingerprint_is_of_the_content_and_only_of_it(write_pair: Callable[..., Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, n).tolist() for n in (30, 1, 50)]
    base = IndexedDataset(write_pair(documents)).fingerprint
    (tmp_path / "elsewhere").mkdir()
    assert IndexedDataset(write_pair(documents, "elsewhere/copy")).fingerprint == base
    others = [documents[::-1], [*documents, []], [documents[0] + documents[1], documents[2]]]
    for i in range(30):
        others.append([[*documents[0][:i], 1001, *documents[0][i + 1 :]], *documents[1:]])
    prints = {IndexedDataset(write_pair(other, f"other{i}")).fingerprint for i, other in enumerate(others)}
    assert len(prints | {base}) == len(others) + 1


def test_the_fingerprint_of_a_large_file_reads_blocks_that_reach_both_ends(
    write_pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_format, "WHOLLY_HASHED", 1000)
    monkeypatch.setattr(index_format, "_HASHED_BLOCKS", 8)
    monkeypatch.setattr(index_format, "_HASHED_BLOCK", 64)
    tokens = list(range(4000))
    base = IndexedDataset(write_pair([tokens])).fingerprint
    for i, changed in enumerate((0, 3999, 2, 3980)):
        other = [*tokens[:changed], 5000, *tokens[changed + 1 :]]
        assert IndexedDataset(write_pair([other], f"other{i}")).fingerprint != base
    assert IndexedDataset(write_pair([[*tokens, 1]], "longer")).fingerprint != base


def test_a_terabyte_is_identified_by_a_bounded_read() -> None:
    assert index_format._HASHED_BLOCKS * index_format._HASHED_BLOCK <= index_format.WHOLLY_HASHED == 64 << 20


def test_ids_outside_the_vocabulary_are_named(write_pair: Callable[..., Path]) -> None:
    dataset = IndexedDataset(write_pair([[3, 999], [7]]))
    check_token_ids(dataset, 1000)
    with pytest.raises(UserError, match=r"pair\.bin: token id 999 .* vocabulary of 999; .* at least 1000"):
        check_token_ids(dataset, 999)
    with pytest.raises(UserError, match=r"negative\.bin: token id -5 is negative"):
        check_token_ids(IndexedDataset(write_pair([[3, -5]], "negative", "<i4")), 10)
    with pytest.raises(UserError, match=r"float\.bin: holds float32, not token ids"):
        check_token_ids(IndexedDataset(write_pair([[3]], "float", "<f4")), 10)


def test_the_largest_id_comes_from_a_sidecar_only_while_it_describes_the_pair(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair([[1, 2, 3]])
    content = {
        "tokenizer": {"type": "byte", "model": None, "pattern": "gpt2"},
        "fingerprint": "f",
        "vocab_size": 257,
        "padded_vocab_size": 257,
        "eod": 256,
        "documents": 1,
        "tokens": 3,
        "largest_id": 77,
        "data_fingerprint": IndexedDataset(prefix).fingerprint,
    }
    write_sidecar(prefix, content)
    assert read_sidecar(prefix) == content
    assert IndexedDataset(prefix).id_range == (0, 77)  # taken on trust, not measured
    bytes_ = bytearray(Path(f"{prefix}.bin").read_bytes())
    bytes_[0] = 200
    Path(f"{prefix}.bin").write_bytes(bytes_)
    assert IndexedDataset(prefix).id_range == (2, 200)


def test_a_new_pair_drops_the_old_sidecar(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair([[1]])
    Path(f"{prefix}.json").write_text("{}")
    write_pair([[2]])
    assert read_sidecar(prefix) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"tokens": "7"}', b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_sidecar_is_refused(write_pair: Callable[..., Path], content: bytes) -> None:
    prefix = write_pair([[1]])
    Path(f"{prefix}.json").write_bytes(content)
    with pytest.raises(UserError, match=r"pair\.json: "):
        read_sidecar(prefix)
