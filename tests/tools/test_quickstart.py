"""The quickstart keeps its hands off what is not its own, and makes documents of any text."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_essh.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "tools/quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fresh_deletes_an_earlier_quickstart_and_nothing_else(quickstart, tmp_path):
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for fresh in (True, False):
        with pytest.raises(UserError, match="no quickstart"):
            quickstart.claim(out, {"short": True}, fresh=fresh)
    assert (out / "thesis.txt").read_text() == "years of work"

    own = tmp_path / "own"
    quickstart.claim(own, {"short": True}, fresh=False)
    (own / "left").write_text("over")
    quickstart.claim(own, {"short": True}, fresh=False)
    assert (own / "left").exists()
    with pytest.raises(UserError, match="other settings"):
        quickstart.claim(own, {"short": False}, fresh=False)
    quickstart.claim(own, {"short": False}, fresh=True)
    assert [p.name for p in own.iterdir()] == ["quickstart.json"]
    (own / "quickstart.json").write_text("junk")
    with pytest.raises(UserError, match="other settings"):
        quickstart.claim(own, {"short": False}, fresh=False)


def test_one_long_file_becomes_documents_that_join_to_it(quickstart, tmp_path):
    text = "".join(f"line {i} of a long book\r\n" for i in range(5000)) + "x" * 50_000
    (tmp_path / "book.txt").write_bytes(text.encode())
    target = tmp_path / "corpus.jsonl"
    count = quickstart.write_corpus(str(tmp_path / "book.txt"), target)
    pieces = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert len(pieces) == count > 5
    assert "".join(pieces) == text
    assert max(map(len, pieces[:-1])) <= quickstart.LONGEST_DOCUMENT
    (tmp_path / "book.txt").write_text(" \n")
    with pytest.raises(UserError, match="no text there"):
        quickstart.write_corpus(str(tmp_path / "book.txt"), target)


def test_the_default_corpus_is_the_standard_library_without_its_tests(quickstart):
    files = quickstart.stdlib_files()
    assert {"argparse.py", "decoder.py"} <= {p.name for p in files}
    assert sum(p.stat().st_size for p in files) > 3_000_000
    assert not any(part in p.parts for p in files for part in ("test", "site-packages", "encodings"))


def test_figures_that_should_not_come_out_are_named(quickstart, capsys):
    rows = [{"parameters": n, "nll": nll, "perplexity": 1.0} for n, nll in ((1, 4.0), (2, 3.5), (3, 3.4), (4, 3.3))]
    assert quickstart.summarize([8.0, 4.0], rows) == []
    rows[2]["nll"] = 3.6
    assert len(quickstart.summarize([8.0, 7.9], rows)) == 2
    assert "T10" in capsys.readouterr().out


def test_an_interrupt_waits_for_the_stage_to_end_in_order(tmp_path):
    script = tmp_path / "stage.py"
    script.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), open('saved', 'w').close(), exit(0)))\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    caller = tmp_path / "caller.py"
    caller.write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('q', {str(ROOT / 'tools/quickstart.py')!r})\n"
        "q = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(q)\n"
        f"q.Stages()('stage', {str(script)!r})\n"
    )
    process = subprocess.Popen([sys.executable, str(caller)], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)  # waits for the other process, asserts no time
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert (tmp_path / "saved").exists()
