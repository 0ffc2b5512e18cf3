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
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
