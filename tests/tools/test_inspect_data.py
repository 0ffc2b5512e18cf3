"""The inspection command: tables or JSON, one pair or many, and an exit status that a script can use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
TOOL = "tools/inspect_data.py"


def test_a_pair_is_described_in_words(byte_pair: Any, command: Command) -> None:
    done = command(TOOL, byte_pair.prefix)
    assert (done.returncode, done.stderr) == (0, "")
    tokens = f"{len(byte_pair.ids):,}"
    assert f"3 documents in 3 sequences, {tokens} tokens of uint16" in done.stdout
    assert "tokenizer   byte, 257 entries, padded to 264, end of document 256" in done.stdout
    assert "verified" not in done.stdout
    assert "sound; the sidecar agrees" in command(TOOL, byte_pair.prefix, "--verify").stdout


def test_many_pairs_are_described_and_summed_and_a_broken_one_does_not_hide_the_rest(
    write_byte_pair: Callable[..., Any], command: Command, tmp_path: Path
) -> None:
    for name, text in (("a_1", "one"), ("a_2", "two"), ("a_10", "three")):
        write_byte_pair([text], name)
    sound = command(TOOL, tmp_path / "data", "--verify")
    assert sound.returncode == 0
    assert "together: 3 pairs, 3 documents, 14 tokens" in sound.stdout
    with (tmp_path / "data/a_2.bin").open("ab") as file:
        file.write(b"\0\0")
    done = command(TOOL, tmp_path / "data", "--verify", "--json")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/data/a_2.bin: 10 bytes, and ")
    assert done.stderr.count("\n") == 1
    content = json.loads(done.stdout)
    assert [Path(pair["prefix"]).name for pair in content["pairs"]] == ["a_1", "a_2", "a_10"]
    assert [len(pair["faults"]) for pair in content["pairs"]] == [0, 1, 0]
    assert content["total"] == {
        **{"pairs": 3, "sound": 2, "documents": 2, "sequences": 2, "tokens": 10, "bin_bytes": 20},
    }
    assert content["pairs"][0]["verification"]["largest_id"] == 256
    assert content["pairs"][2]["histogram"] == [{"shortest": 4, "longest": 7, "documents": 1, "tokens": 6}]


def test_a_fault_inside_is_one_line_and_status_2(byte_pair: Any, command: Command) -> None:
    done = command(TOOL, byte_pair.prefix, "--verify", "--vocab-size", 100)
    assert done.returncode == 2
    assert "token id 256 lies outside the vocabulary of 100 (" in done.stdout
    assert done.stderr == f"error: {byte_pair.prefix}.bin: token id 256 lies outside the vocabulary of 100\n"


def test_a_document_is_shown_as_text(byte_pair: Any, command: Command) -> None:
    done = command(TOOL, byte_pair.prefix, "--document", 1)
    assert done.stdout == byte_pair.texts[1] + "\n"
    done = command(TOOL, byte_pair.prefix, "--document", -1, "--tokens", 6, "--json")
    content = json.loads(done.stdout)
    assert (content["index"], content["text"], len(content["ids"])) == (2, "αβγ", 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--document", 3], "--document 3: .* has documents 0 to 2"),
        (["--document", 0, "--tokens", 0], "--tokens 0: must be at least 1"),
        (["--document", 0, "--tokenizer-type", "tiktoken"], "--tokenizer-type, .*: tokenizer type tiktoken needs"),
        (["--document", 0, "--tokenizer-model", "x"], "--tokenizer-model: give --tokenizer-type with it"),
    ],
)
def test_what_cannot_be_shown_is_one_line(byte_pair: Any, command: Command, words: list[object], message: str) -> None:
    import re

    done = command(TOOL, byte_pair.prefix, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"error: {message}", done.stderr), done.stderr


def test_a_pair_without_a_sidecar_needs_its_tokenizer_named(byte_pair: Any, command: Command) -> None:
    Path(f"{byte_pair.prefix}.json").unlink()
    assert "not recorded (no sidecar)" in command(TOOL, byte_pair.prefix).stdout
    done = command(TOOL, byte_pair.prefix, "--document", 0)
    assert done.returncode == 2
    assert "no sidecar records its tokenizer; give --tokenizer-type" in done.stderr
    done = command(TOOL, byte_pair.prefix, "--document", 0, "--tokenizer-type", "byte")
    assert done.stdout == byte_pair.texts[0] + "\n"


def test_the_sidecar_of_another_pair_is_never_shown_as_this_ones(
    write_byte_pair: Callable[..., Any], command: Command
) -> None:
    pair, other = write_byte_pair(["one", "two"], "a").prefix, write_byte_pair(["three"], "b").prefix
    Path(f"{pair}.json").write_bytes(Path(f"{other}.json").read_bytes())
    for more in ([], ["--json"], ["--document", "0"]):
        done = command(TOOL, pair, *more)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"error: {pair}.json: describes another pair than {pair}.bin; remove it" in done.stderr
        assert "257" not in done.stdout
