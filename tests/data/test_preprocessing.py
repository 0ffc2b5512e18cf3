"""Text in, pairs out: every document's tokens, under the right name, or nothing at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_essh.config import TokenizerConfig
from megatron_essh.data import IndexedDataset, build_tokenizer, read_sidecar
from megatron_essh.data.documents import find_files
from megatron_essh.data.preprocessing import PairSummary, Preprocessing, preprocess
from megatron_essh.errors import UserError

BYTE = TokenizerConfig(type="byte")
END = 256


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(folder: Path, *inputs: Path, tokenizer: TokenizerConfig = BYTE, **options: Any) -> list[PairSummary]:
    task = Preprocessing(tokenizer=tokenizer, output_prefix=str(folder / "out" / "x"), **options)
    return preprocess(find_files([str(path) for path in inputs]), task, lambda _: None)


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(i).tolist() for i in range(dataset.documents)]


def outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir()) if (folder / "out").exists() else []


def random_texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abc é漢\n"), rng.integers(0, 300))) for _ in range(count)]


@pytest.mark.parametrize("append_eod", [True, False])
def test_documents_become_their_tokens_in_order(tmp_path: Path, bpe_file: Path, append_eod: bool) -> None:
    texts = [*random_texts(50), "", "last"]
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    config = TokenizerConfig(type="huggingface", model=str(bpe_file))
    (pair,) = run(tmp_path, path, tokenizer=config, append_eod=append_eod)
    tokenizer = build_tokenizer(config)
    end = [tokenizer.eod] if append_eod else []
    expected = [ids + end if (ids := tokenizer.encode(text)) else [] for text in texts]
    assert documents_of(pair.prefix) == expected
    assert (pair.documents, pair.tokens, pair.dtype) == (52, sum(map(len, expected)), "uint16")
    assert outputs(tmp_path) == ["x_text_document.bin", "x_text_document.idx", "x_text_document.json"]


def test_the_sidecar_says_what_made_the_pair_and_what_is_in_it(
    tmp_path: Path, bpe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bpe_file.parent)
    config = TokenizerConfig(type="huggingface", model="tokenizer.json")
    path = write_lines(tmp_path / "a.jsonl", [{"text": "some text"}, {"text": ""}])
    (pair,) = run(tmp_path, path, tokenizer=config, append_eod=True, vocab_size=384)
    tokenizer = build_tokenizer(config)
    dataset = IndexedDataset(pair.prefix)
    assert read_sidecar(pair.prefix) == {
        "tokenizer": {"type": "huggingface", "model": str(bpe_file.resolve()), "pattern": "gpt2"},
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": 384,
        "eod": tokenizer.eod,
        "documents": 2,
        "tokens": dataset.tokens,
        "largest_id": int(dataset.flat.max()),
        "data_fingerprint": dataset.fingerprint,
    }


def test_every_key_gets_its_own_pair_and_lists_are_sequences(tmp_path: Path) -> None:
    rows = [{"a": ["xy", "", "z"], "b": "w"}, {"a": [], "b": ""}, {"a": "q", "b": ["u", "v"]}]
    a, b = run(tmp_path, write_lines(tmp_path / "a.jsonl", rows), keys=("a", "b"), append_eod=True)
    assert (a.prefix.name, b.prefix.name) == ("x_a_document", "x_b_document")
    assert documents_of(a.prefix) == [[120, 121, 122, END], [], [113, END]]
    assert IndexedDataset(a.prefix).boundaries.tolist() == [0, 2, 2, 3]
    assert documents_of(b.prefix) == [[119, END], [], [117, 118, END]]


def test_the_output_does_not_depend_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_essh.data.documents._BATCH_BYTES", 2000)
    lines = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in random_texts(300)])
    for i, text in enumerate(random_texts(40, seed=1)):
        (tmp_path / f"a_{i}.txt").write_text(text, encoding="utf-8")
    written = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        inputs = [lines, *tmp_path.glob("a_*.txt")]
        run(folder, *inputs, workers=workers, append_eod=True, validation_every=7)
        written.append({name: (folder / "out" / name).read_bytes() for name in outputs(folder)})
    assert len(written[0]) == 6
    assert written[0] == written[1]


def test_every_nth_document_is_held_out_for_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_essh.data.documents._BATCH_BYTES", 100)
    rows = [{"text": ["ab", chr(97 + i)] if i % 3 else ""} for i in range(23)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    (whole,) = run(tmp_path / "whole", path)
    everything = documents_of(whole.prefix)
    train, validation = run(tmp_path, path, validation_every=5)
    assert validation.prefix.name == "x_text_validation"
    assert documents_of(validation.prefix) == everything[4::5]
    assert documents_of(train.prefix) == [d for i, d in enumerate(everything, 1) if i % 5]
    assert IndexedDataset(train.prefix).sizes.tolist().count(2) == sum(1 for i in range(23) if i % 3 and (i + 1) % 5)


@pytest.mark.parametrize(
    ("padded", "dtype"), [(None, "uint16"), (65_499, "uint16"), (65_500, "int32"), (128_256, "int32")]
)
def test_the_padded_vocabulary_decides_the_token_type(tmp_path: Path, padded: int | None, dtype: str) -> None:
    (pair,) = run(tmp_path, write_lines(tmp_path / "a.jsonl", [{"text": "é"}]), vocab_size=padded)
    assert pair.dtype == IndexedDataset(pair.prefix).dtype.name == dtype
    assert documents_of(pair.prefix) == [[195, 169]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "--vocab-size 256: the tokenizer has 257 tokens"),
        ({"vocab_size": 0}, "--vocab-size 0: must be at least 1"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
        ({"validation_every": 1}, "--validation-every 1: must be at least 2"),
        ({"validation_every": 4}, "--validation-every 4: the input has 3 documents, so none is held out"),
        ({"log_interval": 0}, "--log-interval 0"),
        ({"keys": ("text", "text")}, "--json-keys text text: name every key once"),
        ({"keys": ("a/b",)}, "--json-keys 'a/b'"),
        ({"keys": ("body",)}, r"a\.jsonl: line 1: no key 'body'; it has 'text'"),
        ({"tokenizer": TokenizerConfig(type="tiktoken", model="absent")}, "absent: cannot be read"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_wrong_option_is_named_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], message: str, workers: int
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "xyz"])
    with pytest.raises(UserError, match=message):
        run(tmp_path, path, **({"workers": workers} | options))
    assert outputs(tmp_path) == []


def test_plain_text_has_one_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("xy")
    (pair,) = run(tmp_path, tmp_path / "a.txt", keys=("content",))
    assert (pair.prefix.name, documents_of(pair.prefix)) == ("x_content_document", [[120, 121]])
    with pytest.raises(UserError, match=r"--json-keys: .*a\.txt is plain text"):
        run(tmp_path, tmp_path / "a.txt", keys=("a", "b"))


def test_input_without_a_token_is_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("")
        with pytest.raises(UserError, match=r"x_text_document: the input's \d documents leave it without a token"):
            run(tmp_path, tmp_path / name)
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_run_leaves_the_earlier_pair_as_it_was(tmp_path: Path, workers: int) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "good"}])
    (pair,) = run(tmp_path, path)
    before = {name: (tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)}
    with path.open("a") as file:
        file.write('{"text": "cut')
    with pytest.raises(UserError, match=r"a\.jsonl: line 2: not JSON"):
        run(tmp_path, path, workers=workers)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)} == before
    assert documents_of(pair.prefix) == [list(b"good")]


@pytest.mark.parametrize("position", range(6))  # two pairs of three files
def test_a_change_of_names_that_fails_leaves_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "uvwxyz"])
    run(tmp_path, path, validation_every=3)
    rename, renamed = os.replace, []

    def fail_once(source: Path, target: Path) -> None:
        renamed.append(target)
        if len(renamed) == position + 1:
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="broken disk"):
        run(tmp_path, path, validation_every=2)
    assert outputs(tmp_path) == []


def test_a_sidecar_that_cannot_be_written_leaves_the_earlier_pairs_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "uvwxyz"])
    run(tmp_path, path, validation_every=3)
    before = {name: (tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)}

    def fail(content: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megatron_essh.data.indexed_dataset.sidecar_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, path, validation_every=2)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)} == before


KILLED_EVERYWHERE = """
import os, signal, sys
from pathlib import Path
from megatron_essh.config import TokenizerConfig
from megatron_essh.data.preprocessing import Preprocessing, preprocess

def run(folder, name):
    task = Preprocessing(tokenizer=TokenizerConfig(type="byte"), output_prefix=f"{folder}/x", validation_every=2)
    preprocess([root / name], task, lambda _: None)

def kill_before(call, step):
    def counted(*arguments, **options):
        steps.append(call)
        if len(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return counted

root, steps = Path(sys.argv[1]), []
for step in range(1, 100):
    folder = root / str(step)
    run(folder, "old.jsonl")
    child = os.fork()
    if child == 0:
        os.replace, os.unlink = kill_before(os.replace, step), kill_before(os.unlink, step)
        run(folder, "new.jsonl")
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_run_killed_at_any_change_of_names_leaves_whole_pairs_of_one_run(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}] * 4)
    subprocess.run([sys.executable, "-c", KILLED_EVERYWHERE, str(tmp_path)], check=True, timeout=60)
    found = []
    for step in range(1, len(list(tmp_path.iterdir())) - 1):
        contents = []
        for split in ("document", "validation"):
            prefix = tmp_path / str(step) / f"x_text_{split}"
            if not Path(f"{prefix}.idx").exists():
                contents.append("none")
                continue
            sidecar = read_sidecar(prefix)
            assert sidecar is not None, f"killed at step {step}"
            assert sidecar["data_fingerprint"] == IndexedDataset(prefix).fingerprint
            assert len({bytes(document).decode() for document in documents_of(prefix)}) == 1
            contents.append(bytes(documents_of(prefix)[0]).decode())
        assert contents != ["old", "new"]
        assert contents != ["new", "old"]
        found.append(contents)
    assert len(found) > 12
    assert (found[0], found[-1]) == (["old", "old"], ["new", "new"])
    assert ["none", "none"] in found


def test_a_validation_pair_of_an_earlier_run_is_not_left_beside_its_own_documents(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "uvwxyz"])
    _, validation = run(tmp_path, path, validation_every=3)
    before = {name: (tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)}
    with pytest.raises(
        UserError, match=r"x_text_validation\.idx: .* earlier run.* remove it, .*--validation-every.*--output-prefix"
    ):
        run(tmp_path, path)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)} == before
    run(tmp_path, path, validation_every=2)
    assert documents_of(validation.prefix) == [[ord(t)] for t in "vxz"]
    Path(f"{validation.prefix}.idx").unlink()
    (train,) = run(tmp_path, path)
    assert train.documents == 6


def test_a_disk_that_fills_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in random_texts(200)])
    write, room = os.write, 20_000

    def limited(descriptor: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:room])  # a disk takes what it can, then nothing
        room -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(UserError, match=r"x_text_document\.\S+: cannot be written: No space left on device"):
        run(tmp_path, path)
    assert outputs(tmp_path) == []


def test_progress_tells_rates_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_essh.data.documents._BATCH_BYTES", 100)
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abcdefgh"}] * 100)
    lines: list[str] = []
    task = Preprocessing(tokenizer=BYTE, output_prefix=str(tmp_path / "out" / "x"), log_interval=30)
    preprocess([path], task, lines.append)
    assert len(lines) == 4
    assert all("MB/s" in line and "tokens/s" in line for line in lines)
    assert all("s left" in line for line in lines[:-1])
    assert lines[-1].startswith("100 documents, 800 tokens")
