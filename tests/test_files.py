"""A small file is replaced whole or not at all, whatever fails on the way."""

import os

import pytest

from megatron_essh.files import write_atomically


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "deep" / "a.json"
    write_atomically(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(path, b"new")
    assert caught.value.errno == 28
    assert caught.value.filename == str(path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_errors_name_the_file_that_was_wanted(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "folder", b"x")
    assert caught.value.filename == str(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(OSError, match="too long") as caught:
        write_atomically(tmp_path / ("n" * 300), b"x")
    assert caught.value.filename == str(tmp_path / ("n" * 300))
