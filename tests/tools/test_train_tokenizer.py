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


def test_a_unigram_model_gives_any_text_back_and_training_twice_gives_the_same_file(texts: Path) -> None:
    runs = [train(texts, f"{i}.model", "--type", "unigram", "--vocab-size", "400") for i in range(3)]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[0].stderr
    assert len({(texts / f"{i}.model").read_bytes() for i in range(3)}) == 1
    tokenizer = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(texts / "0.model")))
    assert f"{texts}/0.model: {tokenizer.vocab_size} entries" in runs[0].stdout
    assert tokenizer.decode([tokenizer.eod]) == ""
    assert len(tokenizer.encode(" theme")) < 4
    every_byte = "  " + "".join(map(chr, range(0x250))) + "漢😀\r\n\n </s>  "
    assert tokenizer.decode(tokenizer.encode(every_byte)) == every_byte


def test_long_lines_are_trained_on_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    line = "αβγ δεζ ηθι " * 3000  # 66 kB without a line end
    (tmp_path / "in" / "a.txt").write_text(line, encoding="utf-8")
    done = train(tmp_path, "t.model", "--type", "unigram", "--vocab-size", "300")
    assert done.returncode == 0, done.stderr
    tokenizer = build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(tmp_path / "t.model")))
    assert len(tokenizer.encode(line)) < 0.6 * len(line)  # in bytes it would be 1.75 times as long


def test_the_command_says_how_to_go_on(texts: Path) -> None:
    done = train(texts, "t.json", "--vocab-size", "500")
    assert "--tokenizer-type huggingface, and train with model.vocab_size=512, the next multiple of 128" in done.stdout


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
        (["--vocab-size", "300", "--json-keys", "body"], "last.jsonl: line 1: no key 'body'"),
        (["--type", "unigram", "--vocab-size", "259"], "--vocab-size 259: must be at least 260"),
        (["--type", "unigram", "--vocab-size", "1000001"], "--vocab-size 1000001: must be at most 1000000"),
        (["--type", "unigram", "--vocab-size", "262"], "--vocab-size 262: no model could be trained: Vocabulary size"),
        (["--type", "unigram", "--vocab-size", "300", "--json-keys", "body"], "last.jsonl: line 1: no key 'body'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(texts: Path, more: list[str], message: str) -> None:
    done = train(texts, "t.json", *more)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert sorted(path.name for path in texts.iterdir()) == ["in"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_an_empty_text_is_said_to_be_empty(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("")
    done = train(tmp_path, "t", "--type", kind, "--vocab-size", "300")
    if kind == "bpe":  # every byte, and the end of a document: a tokenizer all the same
        assert (done.returncode, "257 entries only" in done.stdout) == (0, True)
    else:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "no model could be trained: the text is empty" in done.stderr


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_text_itself_is_never_written_over(texts: Path, kind: str) -> None:
    before = (texts / "in" / "3.txt").read_bytes()
    (texts / "link.txt").symlink_to(texts / "in" / "3.txt")
    for output in ("in/3.txt", "link.txt"):
        done = train(texts, output, "--type", kind, "--vocab-size", "400")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"--output {texts / output}: is an input, which writing would replace" in done.stderr
    assert (texts / "in" / "3.txt").read_bytes() == before
