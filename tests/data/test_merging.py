"""A merged pair is its parts end to end, whole whatever kills the merge, and refused where ids would not agree."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import IndexedDataset, IndexedDatasetWriter, index_format, merging, read_sidecar, splicing
from megatron_essh.data import indexed_dataset as indexed_dataset_module
from megatron_essh.data.merging import merge_pairs
from megatron_essh.data.pair_files import find_pairs
from megatron_essh.data.sidecar import write_sidecar
from megatron_essh.data.tokenizer_reference import tokenizer_of
from megatron_essh.errors import UserError

from .published_layout import read_published

Write = Callable[..., Path]


def silent(_: str) -> None:
    """No progress."""


def describe(prefix: Path, **changes: object) -> Path:
    """Give a pair a sidecar."""
    pair = IndexedDataset(prefix)
    content = {
        "tokenizer": {"type": "byte", "model": None, "pattern": "gpt2"},
        "fingerprint": "f" * 64,
        "vocab_size": 257,
        "padded_vocab_size": 257,
        "eod": 256,
        "documents": pair.documents,
        "tokens": pair.tokens,
        "largest_id": pair.id_range[1],
        "data_fingerprint": pair.fingerprint,
    }
    write_sidecar(prefix, content | changes)
    return prefix


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=4), max_size=3), max_size=5),
        min_size=1,
        max_size=4,
    ),
    chunk=st.integers(1, 5),
)
def test_merging_parts_is_writing_their_documents_at_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[list[int]]]], chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for i, documents in enumerate(parts):
        with IndexedDatasetWriter(folder / f"part_{i}", "<u2") as writer:
            for document in documents:
                writer.add_document(*document)
    with IndexedDatasetWriter(folder / "once", "<u2") as writer:
        for document in (document for documents in parts for document in documents):
            writer.add_document(*document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_format, "CHUNK", chunk)
        patch.setattr(indexed_dataset_module, "CHUNK", chunk)
        merged = merge_pairs([folder / f"part_{i}" for i in range(len(parts))], folder / "merged", silent)
    assert files(folder / "merged") == files(folder / "once")
    assert read_published(*files(folder / "merged")) == [document for documents in parts for document in documents]
    assert (merged.parts, merged.documents) == (len(parts), sum(map(len, parts)))


@pytest.mark.parametrize("refused", [[], ["copy_file_range"], ["copy_file_range", "sendfile"]])
@pytest.mark.parametrize("how", ["refuses", "gives nothing"])
def test_every_way_of_copying_gives_the_same_bytes(
    write_pair: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: list[str], how: str
) -> None:
    rng = np.random.default_rng(0)
    parts = [write_pair([rng.integers(0, 60_000, n).tolist() for n in (5, 900, 1)], f"part_{i}") for i in range(3)]

    def no(*_: object, **__: object) -> int:
        if how == "refuses":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return 0

    for name in refused:
        monkeypatch.setattr(os, name, no)
    monkeypatch.setattr(splicing, "_SLICE", 100)
    merge_pairs(parts, tmp_path / "out", silent)
    assert files(tmp_path / "out")[1] == b"".join(files(part)[1] for part in parts)
    assert IndexedDataset(tmp_path / "out").sizes.tolist() == [5, 900, 1] * 3


def test_offsets_beyond_32_bits_are_merged_right(tmp_path: Path) -> None:
    """48 GB of holes in three parts; what wrapped around elsewhere from 4 GB on."""
    length = 2**31 - 1
    for i in range(3):
        idx = index_format.pack_header(np.dtype("<i4"), 2, 2)
        idx += np.array([length, length], "<i4").tobytes() + np.array([0, 4 * length, 0, 1, 2], "<i8").tobytes()
        (tmp_path / f"part_{i}.idx").write_bytes(idx)
        with (tmp_path / f"part_{i}.bin").open("wb") as file:
            file.truncate(8 * length)
            file.write(np.array([1000 + i], "<i4").tobytes())
    lengths: list[int] = []

    class Shallow(merging.IndexedDatasetWriter):
        """Writes the index as it is, and of the tokens holes of the same size."""

        def __init__(self, prefix: Path, dtype: np.dtype) -> None:  # type: ignore[type-arg]
            super().__init__(prefix, dtype)
            self._bin.append = self._hole  # type: ignore[method-assign]

        def _hole(self, source: Path, begin: int, count: int, progress: object) -> None:
            lengths.append(count)
            descriptor = self._bin._descriptor
            assert descriptor is not None
            os.ftruncate(descriptor, sum(lengths))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "IndexedDatasetWriter", Shallow)
        merged = merge_pairs([tmp_path / f"part_{i}" for i in range(3)], tmp_path / "out", silent)
    pair = IndexedDataset(tmp_path / "out")
    assert lengths == [8 * length] * 3
    assert merged.tokens == pair.tokens == 6 * length
    assert [pair.start(i) for i in range(6)] == [i * length for i in range(6)]
    assert pair.boundaries.tolist() == list(range(7))


def test_the_sidecar_is_the_parts_with_a_list_of_them(write_pair: Write, tmp_path: Path) -> None:
    parts = [describe(write_pair([[1, 2], [i + 5]], f"part_{i}"), padded_vocab_size=257 + i) for i in (2, 10)]
    assert merge_pairs(find_pairs([str(tmp_path)]), tmp_path / "out/all", silent).described
    sidecar = read_sidecar(tmp_path / "out/all")
    assert sidecar is not None
    assert [part["prefix"] for part in sidecar["parts"]] == [str(part) for part in parts]
    assert [part["data_fingerprint"] for part in sidecar["parts"]] == [IndexedDataset(p).fingerprint for p in parts]
    assert [sidecar[key] for key in ("documents", "tokens", "largest_id", "padded_vocab_size")] == [4, 6, 15, 267]
    reference = tokenizer_of(IndexedDataset(tmp_path / "out/all"))  # which holds it to describe the pair
    assert reference is not None
    assert reference.eod == 256


def test_parts_without_sidecars_merge_without_one(write_pair: Write, tmp_path: Path) -> None:
    parts = [write_pair([[1]], "a"), write_pair([[2]], "b")]
    (tmp_path / "out.json").write_text("an earlier pair's")
    assert not merge_pairs(parts, tmp_path / "out", silent).described
    assert listing(tmp_path) == sorted(f"{n}.{s}" for n in ("a", "b", "out") for s in ("bin", "idx"))


def test_parts_of_different_tokenizers_are_refused(write_pair: Write, tmp_path: Path) -> None:
    a = describe(write_pair([[1]], "a"))
    b = describe(write_pair([[2]], "b"), fingerprint="e" * 64)
    for assume in (False, True):
        with pytest.raises(UserError, match=r"b\.json: made by the byte tokenizer .* different text"):
            merge_pairs([a, b], tmp_path / "out", silent, assume_tokenizer=assume)
    assert not list(tmp_path.glob("out*"))


def test_a_part_without_a_sidecar_is_taken_on_the_users_word_and_held_to_the_vocabulary(
    write_pair: Write, tmp_path: Path
) -> None:
    a, b = describe(write_pair([[1]], "a")), write_pair([[200]], "b")
    with pytest.raises(UserError, match=r"b\.json: no such file, .* --assume-tokenizer"):
        merge_pairs([a, b], tmp_path / "out", silent)
    assert merge_pairs([a, b], tmp_path / "out", silent, assume_tokenizer=True).described
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar is not None
    assert sidecar["largest_id"] == 200
    with pytest.raises(UserError, match=r"c\.bin: holds ids from 257 to 257, and the byte tokenizer has 257"):
        merge_pairs([a, write_pair([[257]], "c")], tmp_path / "new", silent, assume_tokenizer=True)
    assert not list(tmp_path.glob("new*"))


def test_a_sidecar_of_another_pair_is_refused(write_pair: Write, tmp_path: Path) -> None:
    a = describe(write_pair([[1]], "a"), data_fingerprint="0" * 64)
    with pytest.raises(UserError, match=r"a\.json: describes another pair than"):
        merge_pairs([a], tmp_path / "out", silent)


def test_token_types_are_mixed_only_when_asked_and_without_loss(write_pair: Write, tmp_path: Path) -> None:
    a, b = write_pair([[1, 65_535]], "a"), write_pair([[70_000], [-1]], "b", "<i4")
    with pytest.raises(UserError, match=r"b\.bin: tokens of int32, and .*a\.bin has uint16; pass --widen"):
        merge_pairs([a, b], tmp_path / "out", silent)
    merge_pairs([a, b], tmp_path / "out", silent, widen=True)
    pair = IndexedDataset(tmp_path / "out")
    assert (pair.dtype.name, pair.flat.tolist()) == ("int32", [1, 65_535, 70_000, -1])
    merge_pairs([a, write_pair([[-5]], "c", "<i2")], tmp_path / "signed", silent, widen=True)
    assert IndexedDataset(tmp_path / "signed").flat.tolist() == [1, 65_535, -5]
    with pytest.raises(UserError, match=r"f\.bin: values of float32, and those before it are uint16: no token type"):
        merge_pairs([a, write_pair([[1]], "f", "<f4")], tmp_path / "new", silent, widen=True)


def test_too_small_a_disk_is_found_before_anything_is_copied(
    write_pair: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [write_pair([[1] * 50], "a"), write_pair([[2] * 50], "b")]
    needed = 200 + (34 + 24 + 24) + 8 + 16
    free = os.statvfs(tmp_path)

    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((1, 1, *list(free)[2:4], room, *list(free)[5:]))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(splicing.SplicedFile, "append", None)  # would fail
    room = needed - 1
    with pytest.raises(UserError, match=r"out\.bin: the merged pair takes .* GB free; free space there"):
        merge_pairs(parts, tmp_path / "out", silent)
    assert not list(tmp_path.glob("out*"))
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", statvfs)
    room = needed
    merge_pairs(parts, tmp_path / "out", silent)


def test_a_full_disk_half_way_is_one_error_and_leaves_nothing(
    write_pair: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    a = write_pair([[1]], "a")
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(UserError, match=r"a\.bin: cannot be copied to .*out\.bin: .*; free space there"):
        merge_pairs([a], tmp_path / "out", silent)
    assert listing(tmp_path) == ["a.bin", "a.idx"]


def test_a_part_that_is_cut_or_replaced_meanwhile_is_an_error(
    write_pair: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [write_pair([[1] * 50], "a"), write_pair([[2] * 50], "b")]
    room = merging._check_room

    def meddle(output: Path, needed: int) -> None:
        room(output, needed)
        write_pair([[3] * 50], "b")

    monkeypatch.setattr(merging, "_check_room", meddle)
    with pytest.raises(UserError, match="b: changed while it was being merged"):
        merge_pairs(parts, tmp_path / "out", silent)
    assert not list(tmp_path.glob("out*"))
    file = splicing.SplicedFile(tmp_path / "x")
    with pytest.raises(UserError, match=r"a\.bin: ends at byte 100, 10 too early"):
        file.append(tmp_path / "a.bin", 0, 110)
    file.discard()


def test_pairs_are_found_in_natural_order_each_once_and_whole(write_pair: Write, tmp_path: Path) -> None:
    for name in ("part_10", "part_2", "deep/part_1", ".hidden/part_3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_pair([[1]], name)
    (tmp_path / "notes.txt").write_text("not a pair")
    (tmp_path / "part_9.bin.tmp").write_bytes(b"a killed run's")

    def names(*inputs: str) -> list[str]:
        return [str(p.relative_to(tmp_path)) for p in find_pairs([str(tmp_path / i) for i in inputs])]

    assert names("") == ["deep/part_1", "part_2", "part_10"]
    assert names("part_*") == ["part_2", "part_10"]
    assert names("part_*.idx") == names("part_*.bin") == ["part_2", "part_10"]
    assert names("**/part_*") == ["deep/part_1", "part_2", "part_10"]
    assert names("part_10", "part_2.bin") == ["part_2", "part_10"]
    with pytest.raises(UserError, match="are the same pair; name it once"):
        names("part_2", "part_*")
    for nothing in ("absent", "notes.txt", "no_*"):
        with pytest.raises(UserError, match=r"no pair \.bin and \.idx there"):
            names(nothing)
    (tmp_path / "part_10.idx").unlink()
    with pytest.raises(UserError, match=r"part_10\.idx: no such file, and .*part_10\.bin is there"):
        names("")
    assert len(find_pairs([str(tmp_path)], tmp_path / "part_10")) == 2


def test_an_output_that_is_one_of_the_inputs_is_refused_and_left(write_pair: Write, tmp_path: Path) -> None:
    a = write_pair([[1]], "a")
    before = files(a)
    (tmp_path / "link").symlink_to(tmp_path)
    for output in (a, tmp_path / "link/a"):
        with pytest.raises(UserError, match=r"is the input .*a, which writing would remove"):
            merge_pairs([a], output, silent)
    assert files(a) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_essh.data.merging import merge_pairs
from megatron_essh.data import splicing
from megatron_essh.data.pair_files import find_pairs

splicing._SLICE = 1 << 16
steps, last = 0, int(sys.argv[2])

def counted(call):
    def step(*arguments, **named):
        global steps
        for _ in (0, 1):  # a step may die before and after it is done
            steps += 1
            if steps == last:
                os.kill(os.getpid(), signal.SIGKILL)
            if _ == 0:
                result = call(*arguments, **named)
        return result
    return step

for name in ("open", "write", "fsync", "replace", "unlink", "ftruncate", "copy_file_range"):
    setattr(os, name, counted(getattr(os, name)))
folder = Path(sys.argv[1])
merge_pairs(find_pairs([str(folder / "parts")]), folder / "out", lambda _: None)
print(steps)
"""


@pytest.mark.slow
def test_twenty_kills_leave_no_partial_pair_and_the_next_run_finishes(write_pair: Write, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    (tmp_path / "parts").mkdir()
    for i in range(4):
        describe(write_pair([rng.integers(0, 200, 9000).tolist() for _ in range(6)], f"parts/part_{i}"))

    def merge(steps: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path), str(steps)], capture_output=True, text=True, check=False
        )

    whole = merge(0)
    assert whole.returncode == 0, whole.stderr
    good = {name: (tmp_path / name).read_bytes() for name in ("out.bin", "out.idx", "out.json")}
    assert json.loads(good["out.json"])["parts"][3]["documents"] == 6
    steps = int(whole.stdout)
    assert steps > 60
    kills = sorted(random.Random(197).sample(range(1, steps + 1), 20))
    states = set()
    for kill in kills:
        if kill % 2:  # half of them over an earlier pair of another content
            for path in tmp_path.glob("out*"):
                path.unlink()
            write_pair([[9, 9]], "out")
        assert merge(kill).returncode == -9
        if (tmp_path / "out.idx").exists():
            pair = IndexedDataset(tmp_path / "out")
            assert pair.flat.tolist() == [9, 9] or files(tmp_path / "out") == (good["out.idx"], good["out.bin"])
            states.add(pair.tokens)
        else:
            states.add(0)
    assert len(states) == 3, states  # the old pair, none, the new one: all were seen
    done = merge(0)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == good


def test_a_pair_and_its_validation_pair_are_not_merged(write_pair: Write, tmp_path: Path) -> None:
    for name in ("c_0_of_2_text_document", "c_0_of_2_text_validation", "c_1_of_2_text_document"):
        write_pair([[1]], name)
    with pytest.raises(UserError, match=r"c_0_of_2_text_validation: the validation pair of .*0_of_2_text_document, "):
        merge_pairs(find_pairs([str(tmp_path)]), tmp_path / "out", silent)
    assert not list(tmp_path.glob("out*"))
    merge_pairs(find_pairs([str(tmp_path / "*_document.idx")]), tmp_path / "out", silent)
    assert IndexedDataset(tmp_path / "out").documents == 2
