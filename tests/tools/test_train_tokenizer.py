"""A trained tokenizer holds every byte and the end of a document, and training again gives the same file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_essh.config import TokenizerConfig
from megatron_essh.data import build_tokenizer

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "tools" / "train_tokenizer.py")]


def train(folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--input", str(folder / "in"), "--output", str(folder / name), *more]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for i in range(20):  # many ties among the pairs: what could make two runs differ
        words = " ".join(f"{a}{b}{a}" for a in "abcdefghijklm" for b in "nopqrstuvwxyz")
        (tmp_path / "in" / f"{i}.txt").write_text(words, encoding="utf-8")
    (tmp_path / "in" / "last.jsonl").write_text('{"text": "the theme, then"}\n' * 500)
    return tmp_path


def test_training_twice_gives_the_same_file(texts: Path) -> None:
    runs = [train(texts, f"{i}.json", "--vocab-size", "500") for i in range(3)]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[0].stderr
    assert f"{texts}/0.json: 500 entries" in runs[0].stdout
    assert len({(texts / f"{i}.json").read_bytes() for i in range(3)}) == 1


def test_the_trained_tokenizer_is_byte_level_with_an_end(texts: Path) -> None:
    assert train(texts, "t.json", "--vocab-size", "400").returncode == 0
    tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(texts / "t.json")))
    assert (tokenizer.vocab_size, tokenizer.decode([tokenizer.eod])) == (400, "<|endoftext|>")
    assert len(tokenizer.encode(" the")) == 1
    every_byte = "".join(map(chr, range(0x250))) + "漢😀"
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte


def test_what_preprocessing_reads_can_be_trained_on(texts: Path) -> None:
    (texts / "in" / "half.json").write_text(r'{"text": "\ud800abc and \ud83d\ude00"}')
    done = train(texts, "t.json", "--vocab-size", "300")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_small_text_gives_a_small_vocabulary_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abab abab")
    done = train(tmp_path, "t.json", "--vocab-size", "5000")
    assert done.returncode == 0
    assert "entries only, not for 5,000" in done.stdout
    tokenizer = build_tokenizer(TokenizerConfig(type="huggingface", model=str(tmp_path / "t.json")))
    assert 257 < tokenizer.vocab_size < 270


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vocab-size", "256"], "--vocab-size 256: must be at least 257"),
        (["--vocab-size", "1000000000000000"], "--vocab-size 1000000000000000: must be at most 10000000"),
        (["--vocab-size", "300", "--json-key", "body"], "last.jsonl: line 1: no key 'body'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(texts: Path, more: list[str], message: str) -> None:
    done = train(texts, "t.json", *more)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert sorted(path.name for path in texts.iterdir()) == ["in"]
