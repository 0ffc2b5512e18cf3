"""The command as a user meets it: other processes, kills, limits, exit codes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_essh.data import IndexedDataset, IndexedDatasetWriter

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "tools" / "preprocess_data.py")]


def arguments(folder: Path, *more: str) -> list[str]:
    output = ["--output-prefix", str(folder / "out" / "x"), "--tokenizer-type", "byte"]
    return [*COMMAND, "--input", str(folder / "in"), *output, *more]


def outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir()) if (folder / "out").exists() else []


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder whose `in/` holds 24 MB of JSON lines in three files."""
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    line = json.dumps({"text": "".join(rng.choice(list("abcdefgh \n"), 2000))}) + "\n"
    for part in (1, 2, 10):
        (tmp_path / "in" / f"part_{part}.jsonl").write_text(line * 4000)
    return tmp_path


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Its spawned workers, the resource tracker not among them; none of a process that has ended."""
    found: list[int] = []
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except FileNotFoundError:
        return found
    for child in children:
        try:
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
        except FileNotFoundError:
            continue
    return found


def is_running(pid: int) -> bool:
    """Not gone, and no zombie that only waits for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: object, seconds: float = 20) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_says_what_it_did_and_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, text in ((10, "ten"), (2, "two"), (1, "one")):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    done = subprocess.run(arguments(tmp_path, "--append-eod", "--workers", "2"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 files" in done.stdout
    assert "MB/s" in done.stdout
    assert f"{tmp_path}/out/x_text_document.bin, .idx, .json: 3 documents, 12 tokens of uint16" in done.stdout
    dataset = IndexedDataset(tmp_path / "out" / "x_text_document")
    assert [bytes(dataset.document(i)[:-1].tolist()).decode() for i in range(3)] == ["one", "two", "ten"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--json-keys", "body"], "part_1.jsonl: line 1: no key 'body'"),
        (["--vocab-size", "100"], "--vocab-size 100: the tokenizer has 257 tokens"),
        (["--tokenizer-model", "x"], "the byte tokenizer takes no model file"),
        (["--input", "nowhere"], "--input nowhere: no file there"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, more: list[str], message: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part_1.jsonl").write_text('{"text": "x"}\n')
    done = subprocess.run(arguments(tmp_path, *more), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert outputs(tmp_path) == []


def test_a_worker_killed_from_outside_ends_the_run(corpus: Path) -> None:
    process = start(arguments(corpus, "--workers", "2"))
    wait_until(lambda: len(workers_of(process)) == 2)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "was killed by signal 9" in stderr
    assert outputs(corpus) == []


def kill_after(command: list[str], delay: float) -> None:
    """Run, kill the parent `delay` seconds after its workers started, and see the workers go too."""
    process = start(command)
    wait_until(lambda: process.poll() is not None or len(workers_of(process)) == 2)
    workers = workers_of(process)
    time.sleep(delay)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_running, workers)))


def test_a_run_killed_anywhere_leaves_no_worker_and_no_half_pair(corpus: Path) -> None:
    prefix = corpus / "out" / "x_text_document"
    for delay in np.random.default_rng(1).uniform(0, 0.7, 4):
        kill_after(arguments(corpus, "--workers", "2"), float(delay))
        if Path(f"{prefix}.idx").exists():  # the run was done: what took its name is whole
            assert IndexedDataset(prefix).documents == 12_000
        else:
            assert all(name.endswith((".tmp", ".bin", ".json", ".parts")) for name in outputs(corpus))
    done = subprocess.run(arguments(corpus, "--workers", "2"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert outputs(corpus) == ["x_text_document.bin", "x_text_document.idx", "x_text_document.json"]
    dataset = IndexedDataset(prefix)
    assert (dataset.documents, dataset.tokens) == (12_000, 24_000_000)


def test_two_machines_make_two_partitions(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(4):
        (tmp_path / "in" / f"{i}.txt").write_text("abcd"[i])
    for machine in ("0/2", "1/2"):
        done = subprocess.run(arguments(tmp_path, "--partition", machine), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = [IndexedDataset(tmp_path / "out" / f"x_{i}_of_2_text_document").flat.tolist() for i in range(2)]
    assert found == [[97, 98], [99, 100]]
    for wrong, message in (("2/2", "numbered 0 to 1"), ("1", "expected I/N"), ("0/9", "the input has 4 files")):
        done = subprocess.run(arguments(tmp_path, "--partition", wrong), capture_output=True, text=True)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_an_unreadable_document_is_told_and_strict_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\n{"text": 3}\n\n{"text": ""}\n')
    done = subprocess.run(arguments(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"skipped: {tmp_path}/in/a.jsonl: line 2: text: expected text or a list of texts, got 3" in done.stdout
    assert "1 documents skipped" in done.stdout
    assert "2 documents (1 empty), 1 tokens" in done.stdout
    done = subprocess.run(arguments(tmp_path, "--strict"), capture_output=True, text=True)
    assert (done.returncode, "a.jsonl: line 2: text" in done.stderr) == (2, True)


def test_a_disk_that_fills_is_one_error_and_leaves_nothing(corpus: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))

    done = subprocess.run(
        arguments(corpus, "--workers", "1"), capture_output=True, text=True, preexec_fn=limit, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {corpus}/out/x.parts/000000_text_document.bin: cannot be written: File too")
    assert done.stderr.count("\n") == 1
    assert outputs(corpus) == []


def test_two_runs_to_one_output_are_told_apart(corpus: Path) -> None:
    prefix = corpus / "out" / "x_text_document"
    with IndexedDatasetWriter(prefix, "<u2") as first:
        first.add_document([1, 2])
        second = subprocess.run(arguments(corpus, "--workers", "1"), capture_output=True, text=True)
        assert second.returncode == 2
        assert f"{prefix}.bin.tmp: another run is writing this file" in second.stderr
    assert IndexedDataset(prefix).flat.tolist() == [1, 2]


def test_a_file_name_that_is_not_utf8_is_recorded_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    name = os.fsencode(tmp_path / "in") + b"/caf\xe9.jsonl"
    with open(name, "wb") as file:
        file.write(b'{"text": "a"}\n')
    done = subprocess.run(arguments(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    recorded = json.loads((tmp_path / "out" / "x_text_document.json").read_bytes())["inputs"][0]["path"]
    assert os.fsencode(recorded) == name


def test_the_commands_own_output_is_not_read_as_text(corpus: Path) -> None:
    into_input = ["--output-prefix", str(corpus / "in" / "x")]
    assert subprocess.run(arguments(corpus, *into_input), capture_output=True).returncode == 0
    before = {path.name: path.read_bytes() for path in (corpus / "in").iterdir()}
    done = subprocess.run(arguments(corpus, *into_input), capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/in/x_text_document.idx: the index of a token pair, and no text" in done.stderr
    assert {path.name: path.read_bytes() for path in (corpus / "in").iterdir()} == before


@pytest.mark.parametrize("name", ["x_text_document.json", "x_text_document.bin.tmp", "x.parts/000000.json"])
def test_an_input_that_the_output_would_replace_is_refused(corpus: Path, name: str) -> None:
    own = corpus / "in" / name
    own.parent.mkdir(exist_ok=True)
    own.write_text('{"text": "precious"}\n')
    done = subprocess.run(
        arguments(corpus, "--output-prefix", str(corpus / "in" / "x")), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"--input: {own}: is an output of this command; choose an --output-prefix" in done.stderr
    assert own.read_text() == '{"text": "precious"}\n'


def test_more_workers_than_the_machine_gives_are_one_line(corpus: Path) -> None:
    done = subprocess.run(arguments(corpus, "--workers", "100000000"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: --workers 100000000: must be at most 4096; one a core is enough\n",
    )

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    done = subprocess.run(arguments(corpus, "--workers", "30"), capture_output=True, text=True, preexec_fn=few_files)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be started: Too many open files; use fewer" in done.stderr
    assert outputs(corpus) == []


@pytest.mark.parametrize("wait", [0.0, 0.03, 0.1])  # the workers take longer than that to import what they need
def test_ctrl_c_while_the_workers_start_is_one_line(corpus: Path, wait: float) -> None:
    process = subprocess.Popen(
        arguments(corpus, "--workers", "3"), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: workers_of(process))
    time.sleep(wait)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "error: interrupted\n"
    assert process.returncode == 130
    assert outputs(corpus) == []
