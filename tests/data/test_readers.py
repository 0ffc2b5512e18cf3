"""Every format gives the documents of the plain one, and what is damaged, cut off or endless is said to be."""

from __future__ import annotations

import builtins
import gzip
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.config import TokenizerConfig
from megatron_essh.data import IndexedDataset, documents
from megatron_essh.data.documents import Skipped, batches, find_files, read_batch
from megatron_essh.data.preprocessing import Preprocessing, preprocess
from megatron_essh.data.readers import Format, InputFile, check_readable, format_of
from megatron_essh.errors import UserError

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
LIMIT = 1 << 20


def texts_of(path: Path, keys: tuple[str, ...] = ("text",), **options: Any) -> list[Any]:
    largest = options.get("largest", LIMIT)
    found = [d for b in batches([path], keys, largest) for d in read_batch(b, keys, **{"largest": largest} | options)]
    return found if len(keys) > 1 else [document[0] for document in found]


def read_all(path: Path) -> bytes:
    with InputFile(path) as file:
        return file.stream.read()


def lines_of(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", Format.JSON_LINES),
        ("a.JSON.GZ", Format.JSON_LINES),
        ("a.jsonl.zst", Format.JSON_LINES),
        ("a.parquet", Format.PARQUET),
        ("chr1.fa.gz", Format.FASTA),
        ("x.fasta", Format.FASTA),
        ("p.faa", Format.FASTA),
        ("a.txt.gz", Format.TEXT),
        ("notes.gz", Format.TEXT),
        ("README", Format.TEXT),
        (".jsonl", Format.TEXT),
    ],
)
def test_the_name_tells_the_format(name: str, kind: Format) -> None:
    assert format_of(Path(name)) is kind


@settings(max_examples=30, deadline=None)
@given(
    frames=st.lists(st.binary(max_size=300) | st.just(b"long " * 500_000), min_size=1, max_size=4),
    suffix=st.sampled_from(sorted(COMPRESS)),
)
def test_frames_one_after_the_other_are_one_content(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes], suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"frames{suffix}"
    path.write_bytes(b"".join(map(COMPRESS[suffix], frames)))
    assert read_all(path) == b"".join(frames)
    if suffix == ".gz":
        path.write_bytes(path.read_bytes() + bytes(1000))  # as on a tape
        assert read_all(path) == b"".join(frames)


@pytest.mark.parametrize("suffix", sorted(COMPRESS))
def test_compressed_lines_are_the_lines_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(documents, "_BATCH_BYTES", 50)
    content = lines_of([f"text {i}" for i in range(40)]) + b"{}\n"
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    skipped = Skipped()
    assert texts_of(path, skipped=skipped) == [[f"text {i}"] for i in range(40)]
    assert (skipped.count, skipped.reasons[0].split(": ")[1]) == (1, "line 41")
    assert sum(batch.input_bytes for batch in batches([path])) == path.stat().st_size
    text = tmp_path / f"b.txt{suffix}"
    text.write_bytes(COMPRESS[suffix]("naïve".encode()))
    assert texts_of(text) == [["naïve"]]


@pytest.mark.parametrize("suffix", sorted(COMPRESS))
def test_a_compressed_file_that_is_cut_off_anywhere_is_an_error(tmp_path: Path, suffix: str) -> None:
    content = lines_of([str(i) * 20 for i in range(30)])
    whole = COMPRESS[suffix](content)
    path = tmp_path / f"a.jsonl{suffix}"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"a\.jsonl\.\w+: (truncated|damaged) \w+ file"):
            texts_of(path)
    path.write_bytes(whole + b"rubbish")
    with pytest.raises(UserError, match="damaged"):
        texts_of(path)


@pytest.mark.parametrize("suffix", sorted(COMPRESS))
def test_a_file_of_endless_zeros_takes_no_memory_to_speak_of(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bomb.jsonl{suffix}"
    if suffix == ".gz":
        compressor = zlib.compressobj(9, wbits=31)
        pieces = [compressor.compress(bytes(1 << 20)) for _ in range(300)]
        path.write_bytes(b"".join(pieces) + compressor.flush())
    else:
        path.write_bytes(COMPRESS[suffix](bytes(300 << 20)))
    assert path.stat().st_size < 1 << 20
    text = tmp_path / f"bomb.txt{suffix}"
    text.write_bytes(path.read_bytes())
    tracemalloc.start()
    try:
        for one in (path, text):
            skipped = Skipped()
            assert texts_of(one, skipped=skipped) == []
            assert "of more than 1,048,576 bytes" in skipped.reasons[0]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("batch_bytes", [1, 7, 1000])
def test_a_line_that_is_too_long_is_skipped_and_the_next_has_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(documents, "_BATCH_BYTES", batch_bytes)
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "x" * 5000}).encode()
    path.write_bytes(b'{"text": "a"}\n' + long + b'\n{"text": "b"}\n{}\n' + long)
    skipped = Skipped()
    assert texts_of(path, largest=100, skipped=skipped) == [["a"], ["b"]]
    assert [reason.split(": ")[1] for reason in skipped.reasons] == ["line 2", "line 4", "line 5"]
    with pytest.raises(UserError, match="line 2: a document of more than 100 bytes"):
        texts_of(path, largest=100)
    path.write_bytes(b'{"text": "' + b"y" * 88 + b'"}\n')
    assert texts_of(path, largest=100) == [["y" * 88]]  # 100 bytes are not more than 100


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.tuples(st.text("ab c", max_size=8), st.text("ACGTNacgt*-", max_size=60)), max_size=8),
    width=st.integers(1, 70),
    batch_bytes=st.integers(1, 200),
    newline=st.sampled_from(["\n", "\r\n"]),
    head=st.sampled_from(["", "\n", "\ufeff"]),
    suffix=st.sampled_from(["", *COMPRESS]),
)
def test_a_fasta_record_is_a_document(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[tuple[str, str]],
    width: int,
    batch_bytes: int,
    newline: str,
    head: str,
    suffix: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.fa{suffix}"
    lines = []
    for name, sequence in records:
        lines += [f">{name}", *(sequence[i : i + width] for i in range(0, len(sequence), width))]
    content = (head + newline.join(lines)).encode()
    path.write_bytes(COMPRESS[suffix](content) if suffix else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BATCH_BYTES", batch_bytes)
        assert texts_of(path) == [[sequence] for _, sequence in records]


@pytest.mark.parametrize("batch_bytes", [1, 30, 10_000])
def test_a_bad_fasta_record_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(documents, "_BATCH_BYTES", batch_bytes)
    path = tmp_path / "a.fa"
    long = b"\n".join([b"ACGTACGTAC"] * 50)
    path.write_bytes(b"junk\n>a\nAC\nGT\n>b\nA1C\n>c\n" + long + b"\n>d\n\n>e\nTT\xff\n>f\nGG\n>g\n" + long)
    skipped = Skipped()
    assert texts_of(path, largest=300, skipped=skipped) == [["ACGT"], [""], ["GG"]]
    assert [reason.split(": ")[1] for reason in skipped.reasons] == [f"line {n}" for n in (1, 5, 7, 60, 64)]
    assert "does not begin with '>'" in skipped.reasons[0]
    assert "b'1' in its sequence" in skipped.reasons[1]
    assert "more than 300 bytes" in skipped.reasons[2]


@pytest.mark.parametrize("row_group", [3, 1000])
@pytest.mark.parametrize("batch_bytes", [1, 1000, 1 << 20])
def test_parquet_rows_are_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group: int, batch_bytes: int
) -> None:
    monkeypatch.setattr(documents, "_BATCH_BYTES", batch_bytes)
    bodies = [f"body é {i}" * (i % 5) for i in range(50)]
    lists = [[f"a{i}", "b"] * (i % 3) for i in range(50)]
    table = pyarrow.table(
        {
            "number": list(range(50)),
            "lists": lists,
            "coded": pyarrow.array(["x", "y"] * 25).dictionary_encode(),
            "body": pyarrow.array(bodies, pyarrow.large_string()),
        }
    )
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, row_group_size=row_group)
    found = texts_of(path, ("body", "lists", "coded"))
    assert found == [[[body], some, ["xy"[i % 2]]] for i, (body, some) in enumerate(zip(bodies, lists, strict=True))]
    assert sum(batch.input_bytes for batch in batches([path], ("body",))) == path.stat().st_size


def test_a_parquet_value_that_is_no_text_is_skipped_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = [b"good", None, b"\xff", b"long" * 100, b"end"]
    parquet.write_table(pyarrow.table({"text": pyarrow.array(values, pyarrow.binary())}), path)
    skipped = Skipped()
    assert texts_of(path, largest=300, skipped=skipped) == [["good"], ["end"]]
    assert [reason.split(": ")[1] for reason in skipped.reasons] == ["row 2", "row 3", "row 4"]
    with pytest.raises(UserError, match=r"a\.parquet: row 2: text: null; expected text"):
        texts_of(path)


def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x"] * 1000, "id": list(range(1000))}), path)
    with pytest.raises(UserError, match=r"a\.parquet: no column 'text'; it has 'body', 'id'; see --json-keys"):
        texts_of(path)
    with pytest.raises(UserError, match=r"a\.parquet: column 'id' holds int64; expected text"):
        texts_of(path, ("id",))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet"):
        texts_of(path, ("body",))
    path.with_suffix(".parquet.gz").write_bytes(b"")
    with pytest.raises(UserError, match="compressed as a whole"):
        check_readable([path.with_suffix(".parquet.gz")])


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    find = builtins.__import__

    def without(module: str, *arguments: Any, **options: Any) -> Any:
        if module.split(".")[0] == package:
            raise ImportError(module)
        return find(module, *arguments, **options)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(UserError, match=rf"{name}: reading it needs the package {package}, .*pip install {package}"):
        check_readable(find_files([str(tmp_path)]))


def test_a_folder_of_all_formats_becomes_one_pair_whatever_the_workers(tmp_path: Path) -> None:
    texts = [f"text é {i}" * (i % 4) for i in range(60)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1.jsonl").write_bytes(lines_of(texts[:10]))
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(lines_of(texts[10:30])))
    (folder / "3.jsonl.zst").write_bytes(COMPRESS[".zst"](lines_of(texts[30:40])))
    parquet.write_table(pyarrow.table({"text": texts[40:]}), folder / "4.parquet")
    (folder / "5.fa.gz").write_bytes(gzip.compress(b">a\nAC\nGT\n>b\nTT\n"))
    (folder / "6.txt.zst").write_bytes(COMPRESS[".zst"](b"plain"))
    expected = [list(text.encode()) for text in [*texts, "ACGT", "TT", "plain"]]
    for workers in (1, 2):
        prefix = str(tmp_path / f"out{workers}" / "x")
        task = Preprocessing(tokenizer=TokenizerConfig(type="byte"), output_prefix=prefix, workers=workers)
        lines: list[str] = []
        (pair,) = preprocess(find_files([str(folder)]), task, lines.append)
        dataset = IndexedDataset(pair.prefix)
        assert [dataset.document(i).tolist() for i in range(dataset.documents)] == expected
        assert lines[-1].startswith("63 documents")


def test_the_index_of_a_pair_is_not_taken_for_text(tmp_path: Path) -> None:
    (tmp_path / "notes.idx").write_text("an index of another kind")
    check_readable(find_files([str(tmp_path)]))
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\0\0" + bytes(25))
    with pytest.raises(UserError, match=r"--input: .*/a\.idx: the index of a token pair, and no text; keep pairs"):
        check_readable(find_files([str(tmp_path)]))
