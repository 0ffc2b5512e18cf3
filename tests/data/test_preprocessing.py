"""Text in, pairs out: every document's tokens, under the right name, or nothing at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_essh.config import TokenizerConfig
from megatron_essh.data import IndexedDataset, build_tokenizer, encoding, read_sidecar
from megatron_essh.data.documents import find_files
from megatron_essh.data.index_format import content_digest
from megatron_essh.data.parts import PartFolder, PartRecord, shards, shares
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


def contents(folder: Path) -> dict[str, bytes]:
    """The pairs and sidecars, by name; parts of an unfinished run are no output."""
    return {name: (folder / "out" / name).read_bytes() for name in outputs(folder) if not name.endswith(".parts")}


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
        "empty_documents": 1,
        "skipped_documents": 0,
        "inputs": [{"path": str(path), "bytes": path.stat().st_size, "sha256": content_digest(path).hex()}],
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
        written.append(contents(folder))
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
    before = contents(tmp_path)
    with path.open("a") as file:
        file.write('{"text": "cut')
    with pytest.raises(UserError, match=r"a\.jsonl: line 2: not JSON"):
        run(tmp_path, path, workers=workers, strict=True)
    assert contents(tmp_path) == before
    assert len(outputs(tmp_path)) == 3
    assert documents_of(pair.prefix) == [list(b"good")]


@pytest.mark.parametrize("position", range(6))  # two pairs of three files
def test_a_change_of_names_that_fails_leaves_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "uvwxyz"])
    run(tmp_path, path, validation_every=3)
    rename, renamed = os.replace, []

    def fail_once(source: Path, target: Path) -> None:
        if Path(target).parent == tmp_path / "out":
            renamed.append(target)
        if len(renamed) == position + 1:
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="broken disk"):
        run(tmp_path, path, validation_every=2)
    assert contents(tmp_path) == {}
    monkeypatch.undo()
    run(tmp_path, path, validation_every=2)
    assert len(outputs(tmp_path)) == 6


def test_a_sidecar_that_cannot_be_written_leaves_the_earlier_pairs_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "uvwxyz"])
    run(tmp_path, path, validation_every=3)
    before = contents(tmp_path)

    def fail(content: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megatron_essh.data.indexed_dataset.sidecar_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, path, validation_every=2)
    assert contents(tmp_path) == before


KILLED_EVERYWHERE = """
import os, shutil, signal, sys
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
    shutil.copytree(folder, root / f"{step} again")
    run(root / f"{step} again", "new.jsonl")
"""


def test_a_run_killed_at_any_change_of_names_leaves_whole_pairs_of_one_run(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}] * 4)
    subprocess.run([sys.executable, "-c", KILLED_EVERYWHERE, str(tmp_path)], check=True, timeout=60)
    found = []
    steps = [path for path in tmp_path.iterdir() if path.is_dir() and path.name.isdigit()]
    expected = {path.name: path.read_bytes() for path in (tmp_path / str(len(steps))).iterdir()}
    for step in range(1, len(steps) + 1):
        if step < len(steps):
            again = {path.name: path.read_bytes() for path in (tmp_path / f"{step} again").iterdir()}
            assert again == expected, f"run again after a kill at step {step}"
        state = []
        for split in ("document", "validation"):
            prefix = tmp_path / str(step) / f"x_text_{split}"
            if not Path(f"{prefix}.idx").exists():
                state.append("none")
                continue
            sidecar = read_sidecar(prefix)
            assert sidecar is not None, f"killed at step {step}"
            assert sidecar["data_fingerprint"] == IndexedDataset(prefix).fingerprint
            assert len({bytes(document).decode() for document in documents_of(prefix)}) == 1
            state.append(bytes(documents_of(prefix)[0]).decode())
        assert state != ["old", "new"]
        assert state != ["new", "old"]
        found.append(state)
    assert len(found) > 20
    assert (found[0], found[-1]) == (["old", "old"], ["new", "new"])
    assert ["none", "none"] in found


def test_a_validation_pair_of_an_earlier_run_is_not_left_beside_its_own_documents(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in "uvwxyz"])
    _, validation = run(tmp_path, path, validation_every=3)
    before = contents(tmp_path)
    with pytest.raises(
        UserError, match=r"x_text_validation\.idx: .* earlier run.* remove it, .*--validation-every.*--output-prefix"
    ):
        run(tmp_path, path)
    assert contents(tmp_path) == before
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
    with pytest.raises(UserError, match=r"_text_document\.\S+: cannot be written: No space left on device"):
        run(tmp_path, path)
    assert outputs(tmp_path) == []  # no part was finished


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


def small_shards(folder: Path, monkeypatch: pytest.MonkeyPatch, files: int = 5) -> list[Path]:
    """JSON lines files of which each makes a part of its own."""
    monkeypatch.setattr("megatron_essh.data.preprocessing._SHARD_BYTES", 1)
    texts = random_texts(40 * files)
    return [
        write_lines(folder / f"part_{i}.jsonl", [{"text": text} for text in texts[40 * i : 40 * (i + 1)]])
        for i in range(files)
    ]


def stop_after(folder: Path, inputs: list[Path], parts: int, **options: Any) -> list[str]:
    """A run that is interrupted once that many parts are finished; what it said."""
    told: list[str] = []
    task = Preprocessing(tokenizer=BYTE, output_prefix=str(folder / "out" / "x"), **options)
    with pytest.MonkeyPatch.context() as patch:
        add = PartFolder.add

        def stop(self: PartFolder, record: PartRecord) -> None:
            add(self, record)
            if len(self.finished) == parts:
                raise KeyboardInterrupt

        patch.setattr(PartFolder, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess(find_files([str(path) for path in inputs]), task, told.append)
    return told


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_command_goes_on_after_the_finished_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, workers: int
) -> None:
    inputs = small_shards(tmp_path, monkeypatch)
    options = {"append_eod": True, "validation_every": 7}
    run(tmp_path / "whole", *inputs, **options)
    told = stop_after(tmp_path, inputs, parts, **options)
    assert contents(tmp_path) == {}
    lines: list[str] = []
    task = Preprocessing(tokenizer=BYTE, output_prefix=str(tmp_path / "out" / "x"), workers=workers, **options)
    assert told == [f"{tmp_path}/out/x.parts: {parts} finished parts stay; the same command goes on after them"]
    read = encoding.read_located

    def unfinished_only(batch: Any, *arguments: Any, **options: Any) -> Any:
        assert batch.paths[0] not in inputs[:parts]
        return read(batch, *arguments, **options)

    monkeypatch.setattr(encoding, "read_located", unfinished_only)
    preprocess(find_files([str(path) for path in inputs]), task, lines.append)
    assert lines[0].startswith(f"going on after {parts} finished parts")
    assert contents(tmp_path) == contents(tmp_path / "whole")
    assert outputs(tmp_path) == outputs(tmp_path / "whole")  # the parts are gone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"append_eod": True}, "append_eod was False and is True"),
        ({"keys": ("id",)}, "json_keys"),
        ({"vocab_size": 100_000}, "token_type was 'uint16' and is 'int32'"),
        ({"validation_every": 3}, "validation_every was None and is 3"),
        ({"strict": True}, "strict was False and is True"),
        ({"inputs": 4}, r"files: then 5, now 4; gone \['.*part_4"),
    ],
)
def test_another_command_does_not_take_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    inputs = small_shards(tmp_path, monkeypatch)
    stop_after(tmp_path, inputs, 2)
    change = dict(change)
    given = inputs[: change.pop("inputs", 5)]
    with pytest.raises(UserError, match=rf"x\.parts: holds finished parts of another command: {message}.*--fresh"):
        run(tmp_path, *given, **change)
    assert len(list((tmp_path / "out" / "x.parts").glob("*.json"))) == 3  # they are still there
    if "keys" not in change:
        run(tmp_path, *given, fresh=True, **change)
        run(tmp_path / "whole", *given, **change)
        assert contents(tmp_path) == contents(tmp_path / "whole")


def test_other_input_does_not_go_with_the_parts_and_the_same_one_moved_in_time_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = small_shards(tmp_path, monkeypatch)
    stop_after(tmp_path, inputs, 2)
    content = inputs[1].read_bytes()
    for other in (content.replace(b"a", b"b"), content + b"\n"):
        inputs[1].write_bytes(other)
        with pytest.raises(UserError, match=r"part 1 was made from .*part_1\.jsonl with another content; .*--fresh"):
            run(tmp_path, *inputs)
    inputs[1].write_bytes(content)
    os.utime(inputs[1], (1, 1))
    run(tmp_path, *inputs)
    assert outputs(tmp_path) == ["x_text_document.bin", "x_text_document.idx", "x_text_document.json"]


def test_a_part_that_is_not_as_recorded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small_shards(tmp_path, monkeypatch)
    stop_after(tmp_path, inputs, 2)
    parts = tmp_path / "out" / "x.parts"
    os.truncate(parts / "000001_text_document.bin", 10)
    with pytest.raises(UserError, match=r"000001_text_document\.bin: .* is truncated"):
        run(tmp_path, *inputs)
    for name in ("000000_text_document.bin", "000000_text_document.idx"):
        (parts / name.replace("000000", "000001")).write_bytes((parts / name).read_bytes())
    with pytest.raises(UserError, match="not the pair that its record describes"):
        run(tmp_path, *inputs)
    (parts / "000000.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object"):
        run(tmp_path, *inputs)
    run(tmp_path, *inputs, fresh=True)
    assert len(outputs(tmp_path)) == 3


def test_small_files_share_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small_shards(tmp_path, monkeypatch, 7)
    sizes = [path.stat().st_size for path in inputs]
    least = sizes[0] + sizes[1] + 1
    groups = shards(inputs, least)
    assert [path for group in groups for path in group] == inputs
    assert all(sum(path.stat().st_size for path in group) >= least for group in groups[:-1])
    assert all(sum(path.stat().st_size for path in group[:-1]) < least for group in groups)


def test_input_that_grows_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small_shards(tmp_path, monkeypatch)
    read = encoding.read_located

    def grow(batch: Any, *arguments: Any, **options: Any) -> Any:
        if batch.paths[0] == inputs[2] and batch.first_line == 1:
            with inputs[2].open("a") as file:
                file.write("\n")
        return read(batch, *arguments, **options)

    monkeypatch.setattr(encoding, "read_located", grow)
    with pytest.raises(UserError, match=r"part_2\.jsonl: changed while it was read"):
        run(tmp_path, *inputs)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_that_cannot_be_read_are_counted_and_the_first_twenty_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("megatron_essh.data.documents._BATCH_BYTES", 100)
    bad = [b'{"text": "cut', b"{}", b'{"text": 5}', b'{"text": "\xff"}', b"[]"] * 6
    good = [b'{"text": "%d"}' % i for i in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line for pair in zip(good, bad, strict=True) for line in pair))
    lines: list[str] = []
    task = Preprocessing(tokenizer=BYTE, output_prefix=str(tmp_path / "out" / "x"), workers=workers)
    (pair,) = preprocess([path], task, lines.append)
    assert documents_of(pair.prefix) == [list(b"%d" % i) for i in range(30)]
    told = [line for line in lines if line.startswith("skipped: ")]
    assert [line.split(": ")[2] for line in told] == [f"line {2 * i + 2}" for i in range(20)]
    assert "a.jsonl: line 8: not UTF-8 text at byte 10 (0xff)" in told[3]
    assert lines[-1] == "30 documents skipped, 20 of them named above"
    sidecar = read_sidecar(pair.prefix)
    assert sidecar is not None
    assert (sidecar["documents"], sidecar["skipped_documents"]) == (30, 30)
    with pytest.raises(UserError, match=r"a\.jsonl: line 2: not JSON"):
        preprocess([path], replace(task, strict=True), lines.append)


def test_a_document_that_is_too_long_is_skipped_by_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in ("x", "y" * (3 << 20), "z")])
    (tmp_path / "b.txt").write_text("v" * ((1 << 20) + 1))
    (tmp_path / "c.txt").write_text("w" * (1 << 20))
    inputs = [path, tmp_path / "b.txt", tmp_path / "c.txt"]
    (pair,) = run(tmp_path, *inputs, max_document_mb=1)
    assert documents_of(pair.prefix) == [[120], [122], [119] * (1 << 20)]
    with pytest.raises(
        UserError, match=r"a\.jsonl: line 2: a document of more than 1,048,576 bytes; .*--max-document-mb"
    ):
        run(tmp_path, *inputs, max_document_mb=1, strict=True)
    (pair,) = run(tmp_path, *inputs, max_document_mb=4)
    assert pair.documents == 5


def test_partitions_are_shares_of_the_input_and_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = small_shards(tmp_path, monkeypatch, 7)
    (whole,) = run(tmp_path / "whole", *inputs, append_eod=True)
    pairs = run(tmp_path, *inputs, append_eod=True, partitions=3)
    assert [pair.prefix.name for pair in pairs] == [f"x_{i}_of_3_text_document" for i in range(3)]
    assert [document for pair in pairs for document in documents_of(pair.prefix)] == documents_of(whole.prefix)
    assert max(pair.tokens for pair in pairs) < 0.5 * whole.tokens
    for machine in range(3):
        run(tmp_path / "many", *inputs, append_eod=True, partitions=3, partition=machine)
    assert contents(tmp_path / "many") == contents(tmp_path)


def test_every_partition_has_a_file(tmp_path: Path) -> None:
    for i, size in enumerate((1, 1, 100_000, 1, 1)):
        (tmp_path / f"{i}.txt").write_text("x" * size)
    files = find_files([str(tmp_path)])
    for count in range(1, 6):
        parts = shares(files, count)
        assert [path for part in parts for path in part] == files
        assert len(parts) == count
        assert all(parts)
    with pytest.raises(UserError, match="--partitions 6: the input has 5 files"):
        shares(files, 6)
    with pytest.raises(UserError, match="--partition 3/3: partitions are numbered 0 to 2"):
        run(tmp_path, *files, partitions=3, partition=3)


def test_an_interrupted_run_of_partitions_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = small_shards(tmp_path, monkeypatch, 6)
    run(tmp_path / "whole", *inputs, partitions=2)
    stop_after(tmp_path, inputs, 2, partitions=2)
    run(tmp_path, *inputs, partitions=2)
    assert contents(tmp_path) == contents(tmp_path / "whole")
    assert outputs(tmp_path) == outputs(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_the_tokenizer_does_not_take_is_skipped_by_its_line(tmp_path: Path, workers: int) -> None:
    dna = TokenizerConfig(type="dna")
    path = tmp_path / "a.fa"
    path.write_text(">one\nACGT\nAC\n>protein\nMKV*\n>two\nNNA\n")
    lines: list[str] = []
    task = Preprocessing(tokenizer=dna, output_prefix=str(tmp_path / "out" / "x"), workers=workers)
    (pair,) = preprocess([path], task, lines.append)
    assert documents_of(pair.prefix) == [build_tokenizer(dna).encode(text) for text in ("ACGTAC", "NNA")]
    assert any(line.startswith(f"skipped: {path}: line 4: ") for line in lines)
    with pytest.raises(UserError, match=r"a\.fa: line 4: "):
        preprocess([path], replace(task, strict=True), lines.append)
