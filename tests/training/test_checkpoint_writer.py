"""Saving behind the back of a run: what is saved is what was, the run is not held up, and no error is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_essh.errors import UserError
from megatron_essh.training.checkpoint import (
    CheckpointWriter,
    Piece,
    checkpoint_steps,
    files,
    load_checkpoint,
    save_checkpoint,
    writer,
)


def pieces(value: float) -> dict[str, Piece]:
    tensors = {
        "model.a": torch.full((5, 4), value),
        "model.transposed": torch.full((4, 3), value).t(),
        "exp_avg.a": torch.full((5, 4), -value, dtype=torch.bfloat16),
        "rng.torch": torch.tensor([int(value)], dtype=torch.uint8),
        "model.scalar": torch.tensor(value, dtype=torch.float64),
    }
    return {name: Piece(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}


def assert_saved(path: Path, value: float) -> None:
    tensors, values = load_checkpoint(path)
    assert values == {"value": value}
    expected = pieces(value)
    assert set(tensors) == set(expected)
    for name, piece in expected.items():
        assert torch.equal(tensors[name], piece.tensor)
        assert tensors[name].dtype == piece.tensor.dtype


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves stand still before their first byte until it is set."""
    opened, write = threading.Event(), files.write_synced

    def waiting(*arguments, **options):
        assert opened.wait(20)
        return write(*arguments, **options)

    monkeypatch.setattr(files, "write_synced", waiting)
    return opened


def test_the_run_goes_on_while_it_is_saved_and_what_is_saved_is_what_was(tmp_path: Path, gate) -> None:
    with CheckpointWriter(tmp_path, keep_last=3) as saving:
        state = pieces(1)
        path = saving.save(10, state, {"value": 1})
        assert saving.poll() == []
        for piece in state.values():
            piece.tensor.fill_(9)
        assert checkpoint_steps(tmp_path) == []
        gate.set()
        (done,) = saving.wait()
    assert (done.path, done.step) == (path, 10)
    assert done.seconds > 0
    assert_saved(path, 1)


def test_a_save_waits_for_the_one_before_and_both_are_told_of(tmp_path: Path, gate) -> None:
    with CheckpointWriter(tmp_path, keep_last=3) as saving:
        first = saving.save(1, pieces(1), {"value": 1})
        timer = threading.Timer(0.1, gate.set)
        timer.start()
        begin = time.monotonic()
        second = saving.save(2, pieces(2), {"value": 2})
        assert time.monotonic() - begin > 0.09
        assert first.is_dir()
        assert [done.step for done in saving.wait()] == [1, 2]
        assert saving.wait() == saving.poll() == []
    assert_saved(first, 1)  # the memory that held it was used again
    assert_saved(second, 2)


def test_the_block_ends_when_the_save_does_even_if_the_run_fails(tmp_path: Path, gate) -> None:
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(KeyError, match="the run has failed"):
        failing_run(CheckpointWriter(tmp_path, keep_last=1))
    assert_saved(tmp_path / "step_00000007", 1)


def failing_run(saving: CheckpointWriter) -> None:
    with saving:
        saving.save(7, pieces(1), {"value": 1})
        raise KeyError("the run has failed")


def test_an_error_comes_up_at_the_next_step_at_the_next_save_and_at_the_end(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_hashed_tensors", fail)
    message = r"too full for the checkpoint of step 7, .* \(No space left on device\); older checkpoints are intact"

    saving = CheckpointWriter(tmp_path, keep_last=1)
    saving.save(7, pieces(1), {})
    while saving._thread is not None and saving._thread.is_alive():
        time.sleep(0.001)
    with pytest.raises(UserError, match=message):
        saving.poll()
    assert saving.wait() == [], "an error is told once"

    saving.save(7, pieces(1), {})
    with pytest.raises(UserError, match=message):
        saving.save(8, pieces(1), {})

    with pytest.raises(UserError, match=message), saving:
        saving.save(7, pieces(1), {})

    with pytest.raises(KeyError, match="the run has failed"):
        failing_run(saving)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_disk_does_not_give_back_is_not_published(tmp_path: Path, monkeypatch) -> None:
    """As a failing disk, which says that all went well."""
    drop = writer._drop_from_memory

    def forget(path: Path) -> None:
        drop(path)
        content = bytearray(path.read_bytes())
        content[-3] ^= 4
        path.write_bytes(content)

    monkeypatch.setattr(writer, "_drop_from_memory", forget)
    with pytest.raises(
        UserError, match=r"model\.safetensors: tensor model\.transposed: its content is not what was saved"
    ):
        save_checkpoint(tmp_path, 1, {n: p.tensor for n, p in pieces(1).items()}, {}, keep_last=1)
    assert list(tmp_path.iterdir()) == []


def test_values_that_json_cannot_hold_are_refused_at_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c", keep_last=1) as saving, pytest.raises(ValueError, match="JSON compliant"):
        saving.save(1, pieces(1), {"loss": float("nan")})
    assert not (tmp_path / "c").exists()


def test_an_interpreter_that_ends_waits_for_the_save(tmp_path: Path) -> None:
    program = f"""
import sys, time, torch
from pathlib import Path
from megatron_essh.training.checkpoint import CheckpointWriter, Piece, files
write = files.write_synced
files.write_synced = lambda *a, **k: (time.sleep(0.3), write(*a, **k))[1]
saving = CheckpointWriter(Path({str(tmp_path)!r}), keep_last=1)
saving.save(1, {{"model.a": Piece(torch.ones(3), (3,))}}, {{"value": 1}})
sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 3
    tensors, _ = load_checkpoint(tmp_path / "step_00000001")
    assert torch.equal(tensors["model.a"], torch.ones(3))


def test_retention_is_the_writers_too(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=1, keep_every=4) as saving:
        for step in range(1, 8):
            saving.save(step, pieces(step), {"value": step})
    assert checkpoint_steps(tmp_path) == [7, 4]


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_saved_as_they_were_when_save_returned(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 24, dtype=torch.float32, device="cuda")
    expected = tensor.cpu()
    with CheckpointWriter(tmp_path, keep_last=1) as saving:
        path = saving.save(1, {"model.a": Piece(tensor, tuple(tensor.shape))}, {})
        tensor.fill_(-1.0)
    assert torch.equal(load_checkpoint(path)[0]["model.a"], expected)
