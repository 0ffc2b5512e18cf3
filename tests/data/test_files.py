"""A file has its name when it is whole, and only one run at a time works towards it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from megatron_essh.data.files import StagedFile
from megatron_essh.errors import UserError


def test_a_file_is_there_only_after_it_is_published(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    staged = StagedFile(path)
    staged.write(b"some ")
    staged.write(memoryview(b"bytes"))
    assert (staged.bytes, staged.read_at(3, 4)) == (10, b"e by")
    staged.seal()
    assert not path.exists()
    staged.publish()
    staged.discard()
    assert path.read_bytes() == b"some bytes"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_what_a_killed_run_left_does_not_reach_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"left over and longer")
    staged = StagedFile(tmp_path / "file")
    staged.write(b"new")
    staged.publish()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_file_that_was_published_while_we_waited_for_its_lock_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    (tmp_path / "file.tmp").write_bytes(b"finished by another run")
    lock = fcntl.flock

    def published_meanwhile(descriptor: int, operation: int) -> None:
        if not path.exists():
            os.replace(tmp_path / "file.tmp", path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", published_meanwhile)
    staged = StagedFile(path)
    assert path.read_bytes() == b"finished by another run"
    staged.write(b"ours")
    staged.publish()
    assert path.read_bytes() == b"ours"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/x\.tmp: cannot be written: .*; check the folder"):
        StagedFile(tmp_path / "file" / "x")


def test_a_folder_in_the_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match=r"/x: a folder has this name; remove it"):
        StagedFile(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
