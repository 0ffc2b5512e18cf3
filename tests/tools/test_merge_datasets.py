"""The merge command: its inputs in order, its figures, and one line for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_essh.data import IndexedDataset


def test_the_parts_are_joined_in_natural_order(
    write_byte_pair: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    for number in (10, 2, 1):
        write_byte_pair([f"number {number}"], f"part_{number}")
    done = command("tools/merge_datasets.py", "--input", tmp_path / "data", "--output-prefix", tmp_path / "out/all")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"3 pairs, 0.0 MB: {tmp_path}/data/part_1 to {tmp_path}/data/part_10" in done.stdout
    assert f"{tmp_path}/out/all.bin, .idx, .json: 3 documents, 28 tokens of uint16" in done.stdout
    assert re.search(r"MB in \d+\.\d s: \d+ MB/s", done.stdout)
    pair = IndexedDataset(tmp_path / "out/all")
    assert [bytes(pair.document(i)[:-1].astype("u1")).decode() for i in range(3)] == [
        "number 1",
        "number 2",
        "number 10",
    ]


def test_every_pair_in_a_folder_can_be_merged_into_the_same_folder_once(
    write_byte_pair: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    write_byte_pair(["a"], "a")
    words = ("--input", tmp_path / "data", "--output-prefix", tmp_path / "data/all")
    assert command("tools/merge_datasets.py", *words).returncode == 0
    again = command("tools/merge_datasets.py", *words)
    assert again.returncode == 2
    assert "data/all: is the input" in again.stderr
    (tmp_path / "data/all.idx").unlink()  # as a run that is killed at the end leaves it
    assert command("tools/merge_datasets.py", *words).returncode == 0


@pytest.mark.parametrize("given", ["absent", "absent_*"])
def test_an_input_that_names_nothing_is_one_line(command: Callable[..., Any], tmp_path: Path, given: str) -> None:
    done = command("tools/merge_datasets.py", "--input", tmp_path / given, "--output-prefix", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path / given}: no pair")
    assert done.stderr.count("\n") == 1
