"""Checkpoints: exact round trips, crashes at every instant of a save, damage of every kind, full disks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_essh.errors import UserError
from megatron_essh.parallel.interleave import Sharding
from megatron_essh.training import checkpoint
from megatron_essh.training.checkpoint import (
    Want,
    checkpoint_steps,
    files,
    find_checkpoint,
    load,
    load_checkpoint,
    model_sha256,
    remove_unfinished,
    resolve_checkpoint,
    save_checkpoint,
    writer,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
CHECKPOINT_FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of every pattern (NaN and infinities among them) as `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, width), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, tensor.shape, content


def run_tensors(seed: int) -> dict[str, torch.Tensor]:
    """A small run's tensors: parameters, moments, statistics and random state."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embedding.weight": torch.randn(11, 6, generator=generator),
        "model.blocks.0.mixer.theta": torch.randn(3, 2, generator=generator),
        "exp_avg.embedding.weight": torch.randn(11, 6, generator=generator),
        "statistics.0": torch.randn(5, generator=generator),
        "rng.torch": generator.get_state(),
    }


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert {n: bits(t) for n, t in left.items()} == {n: bits(t) for n, t in right.items()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_round_trip_keeps_every_bit_dtype_and_value(tmp_path: Path, data: st.DataObject) -> None:
    name = st.text(alphabet=string.printable + "äß∂", min_size=1, max_size=12)
    prefix = st.sampled_from(["model.", "exp_avg.", ""])
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    tensors = data.draw(
        st.dictionaries(
            st.builds(str.__add__, prefix, name).filter(lambda n: n not in ("__metadata__", "model.__metadata__")),
            st.builds(random_tensor, shape, st.sampled_from(DTYPES), st.integers(0, 2**31)),
            max_size=6,
        )
    )
    values = data.draw(
        st.dictionaries(
            st.text(max_size=8),
            st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.none()),
        )
    )
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    path = save_checkpoint(folder, 7, tensors, values, keep_last=1)
    loaded, loaded_values = load_checkpoint(path)
    assert_same(loaded, tensors)
    assert loaded_values == values
    assert {k: type(v) for k, v in loaded_values.items()} == {k: type(v) for k, v in values.items()}


def test_files_are_plain_safetensors_that_the_library_reads(tmp_path: Path) -> None:
    tensors = run_tensors(0) | {f"model.{dtype}": random_tensor((3, 5), dtype, 1) for dtype in DTYPES}
    path = save_checkpoint(tmp_path / "c", 123, tensors, {}, keep_last=1)
    assert path.name == "step_00000123"
    assert sorted(p.name for p in path.iterdir()) == sorted(CHECKPOINT_FILES)
    by_library = {"model." + n: t for n, t in load_file(path / "model.safetensors").items()}
    by_library |= load_file(path / "optimizer.safetensors")
    assert_same(by_library, tensors)
    assert "embedding.weight" in load_file(path / "model.safetensors")


def test_strided_and_shared_tensors_are_saved_by_content(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "model.a": base,
        "model.transposed": base.t(),
        "prefix": base[:, :2],
        "parameter": base.requires_grad_(),
    }
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, 1, tensors, {}, keep_last=1))
    assert_same(loaded, {n: t.detach() for n, t in tensors.items()})


def test_loading_only_the_model_needs_only_the_model(tmp_path: Path) -> None:
    tensors = run_tensors(3)
    path = save_checkpoint(tmp_path, 1, tensors, {"stage": "pretrain"}, keep_last=1)
    os.remove(path / "optimizer.safetensors")
    loaded, values = load_checkpoint(path, model_only=True)
    assert_same(loaded, {n: t for n, t in tensors.items() if n.startswith("model.")})
    assert values == {"stage": "pretrain"}
    with pytest.raises(UserError, match=r"optimizer\.safetensors: missing"):
        load_checkpoint(path)


def test_values_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        save_checkpoint(tmp_path / "c", 1, run_tensors(0), {"loss": float("nan")}, keep_last=1)
    assert not (tmp_path / "c").exists()


def test_keep_last_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, step, run_tensors(step), {"step": step}, keep_last=3)
    assert checkpoint_steps(tmp_path) == [40, 30, 20]
    os.remove(tmp_path / "step_00000040" / "model.safetensors")
    save_checkpoint(tmp_path, 50, run_tensors(50), {"step": 50}, keep_last=3)
    assert checkpoint_steps(tmp_path) == [50, 30, 20], "a damaged one must not push a whole one out"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_000000{s}" for s in (20, 30, 50)]


def test_keep_every_keeps_multiples_for_good(tmp_path: Path) -> None:
    for step in range(5, 65, 5):
        save_checkpoint(tmp_path, step, run_tensors(step), {"step": step}, keep_last=2, keep_every=20)
        last = [s for s in (step, step - 5) if s > 0]
        assert set(checkpoint_steps(tmp_path)) == {*last, *range(20, step + 1, 20)}
    (tmp_path / "step_00000020" / "state.json").write_bytes(b"")
    save_checkpoint(tmp_path, 65, run_tensors(65), {}, keep_last=1, keep_every=20)
    assert checkpoint_steps(tmp_path) == [65, 60, 40], "a damaged one is of no use for good"


def test_pruning_never_touches_the_one_just_written_nor_other_files(tmp_path: Path) -> None:
    for step in (300, 100):  # 300 is from a future that was abandoned
        save_checkpoint(tmp_path, step, run_tensors(step), {"step": step}, keep_last=1)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_7").mkdir()
    save_checkpoint(tmp_path, 200, run_tensors(200), {"step": 200}, keep_last=1)
    assert checkpoint_steps(tmp_path) == [300, 200]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step_7").is_dir()


def test_a_damaged_checkpoint_makes_way_and_a_whole_one_does_not(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 5, run_tensors(0), {}, keep_last=1)
    with pytest.raises(UserError, match="whole checkpoint of this step is already there"):
        save_checkpoint(tmp_path, 5, run_tensors(1), {}, keep_last=1)
    assert_same(load_checkpoint(path)[0], run_tensors(0))
    (path / "state.json").write_bytes(b"x")
    assert save_checkpoint(tmp_path, 5, run_tensors(1), {}, keep_last=1) == path
    assert_same(load_checkpoint(path)[0], run_tensors(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def tick_on_disk_operations(tick, monkeypatch_setattr) -> None:
    """Calls `tick` before each operation of a save: open, write, sync, make, rename, remove."""
    events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
    sys.addaudithook(lambda event, _: tick() if event in events else None)
    fsync, write_synced = os.fsync, files.write_synced

    def ticking_fsync(descriptor):
        tick()
        fsync(descriptor)

    def ticking_write(path, chunks, **options):
        def ticking_chunks():
            for chunk in chunks:
                yield chunk[: len(chunk) // 2]
                tick()
                yield chunk[len(chunk) // 2 :]

        return write_synced(path, ticking_chunks(), **options)

    monkeypatch_setattr(os, "fsync", ticking_fsync)
    monkeypatch_setattr(files, "write_synced", ticking_write)
    monkeypatch_setattr(writer, "write_synced", ticking_write)


def test_a_kill_at_any_instant_of_a_save_leaves_the_old_set_or_the_new(tmp_path: Path, in_child, capfd) -> None:
    before = tmp_path / "before"
    for step in (10, 20):
        save_checkpoint(before, step, run_tensors(step), {"step": step}, keep_last=2)
    outcomes = []
    for instant in range(1, 200):
        folder = tmp_path / f"killed_{instant}"
        shutil.copytree(before, folder)

        def killed_save(folder: Path = folder, instant: int = instant) -> None:
            left = instant

            def tick() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            tick_on_disk_operations(tick, setattr)
            save_checkpoint(folder, 30, run_tensors(30), {"step": 30}, keep_last=2)

        status, text = in_child(killed_save)
        assert status in (0, -signal.SIGKILL), text
        found = find_checkpoint(folder)
        tensors, values = load_checkpoint(found)
        assert values["step"] in (20, 30)
        assert_same(tensors, run_tensors(values["step"]))
        if values["step"] == 20:
            assert checkpoint_steps(folder) == [20, 10], "the old set must be whole"
        assert capfd.readouterr().err == "", "a crash must leave no damaged checkpoint behind"
        # The next run cleans up and saves the same step.
        remove_unfinished(folder)
        if values["step"] == 20:
            save_checkpoint(folder, 30, run_tensors(30), {"step": 30}, keep_last=2)
        save_checkpoint(folder, 40, run_tensors(40), {"step": 40}, keep_last=2)
        assert sorted(p.name for p in folder.iterdir()) == ["step_00000030", "step_00000040"]
        shutil.rmtree(folder)
        if status == 0:
            break
        outcomes.append(values["step"])
    else:
        pytest.fail("the save never came to its end")
    assert outcomes == sorted(outcomes), "once the new set is in place it stays"
    assert len(outcomes) > 30
    assert set(outcomes) == {20, 30}


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_truncation_is_found_and_the_older_checkpoint_is_taken(tmp_path: Path, name: str, capsys) -> None:
    old = save_checkpoint(tmp_path, 1, run_tensors(1), {"step": 1}, keep_last=5)
    new = save_checkpoint(tmp_path, 2, run_tensors(2), {"step": 2}, keep_last=5)
    content = (new / name).read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        (new / name).write_bytes(content[:length])
        with pytest.raises(UserError, match=name):
            load_checkpoint(new)
        assert find_checkpoint(tmp_path) == old
        warning = capsys.readouterr().err
        assert warning.startswith("warning: skipping a damaged checkpoint: ")
        assert str(new / name) in warning
    (new / name).write_bytes(content)
    assert find_checkpoint(tmp_path) == new


@pytest.mark.parametrize("name", CHECKPOINT_FILES[:3])
def test_any_flipped_bit_is_found(tmp_path: Path, name: str, capsys) -> None:
    path = save_checkpoint(tmp_path, 1, run_tensors(1), {"step": 1, "note": "abc"}, keep_last=5)
    shutil.copytree(path, tmp_path / "kept" / path.name)
    prefix = "model." if name == "model.safetensors" else ""
    content = bytearray((path / name).read_bytes())
    chosen = random.Random(name).sample(range(len(content) * 8), 25)
    for bit in chosen:
        content[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(content)
        place = "state.json: its content"
        if name != "state.json":
            layout = files.read_layout(tmp_path / "kept" / path.name / name)[1]
            tensor = next((n for n, t in layout.items() if t.offset <= bit // 8 < t.offset + t.bytes), None)
            place = f"{name}: tensor {prefix}{tensor}: its content" if tensor else f"{name}: its header"
        with pytest.raises(UserError, match=f"{re.escape(place)} is not what was saved .*SHA-256"):
            load_checkpoint(path)
        assert find_checkpoint(tmp_path) is None
        content[bit // 8] ^= 1 << bit % 8
    (path / name).write_bytes(content)
    assert find_checkpoint(tmp_path) == path


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, 1, run_tensors(1), {}, keep_last=5)
    os.remove(path / name)
    with pytest.raises(UserError, match=name):
        load_checkpoint(path)


def signed(manifest: dict[str, Any]) -> bytes:
    """A manifest of version 2 with the right hash of itself, whatever it says."""
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps(manifest | {"sha256": digest}, indent=1).encode()


def test_foreign_manifests_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, run_tensors(1), {}, keep_last=5)
    original = (path / "manifest.json").read_bytes()
    manifest = json.loads(original)
    assert signed(manifest) == original
    pieces = manifest["files"]["model.safetensors"]["pieces"]
    other = {"bytes": pieces[0]["bytes"] + 4}
    foreign = {
        "not the manifest of a megatron_essh checkpoint": ["{}", "[]", "null", signed(manifest | {"format": "other"})],
        "version 3 where this package reads versions 1 and 2": [signed(manifest | {"version": 3})],
        "it contradicts its own SHA-256": [
            json.dumps(manifest),
            json.dumps(manifest | {"step": 2}, indent=1),
            original + b"\n",
            original.replace(b'"units"', b'"rows"').replace(b'"shape"', b'"Shape"'),
        ],
        "not a manifest of version 2": [
            signed(manifest | {"files": [1]}),
            signed(manifest | {"files": {"model.safetensors": {"bytes": 3}}}),
            signed(manifest | {"files": {"model.safetensors": {"pieces": [pieces[0] | other], "bytes": 3}}}),
        ],
        "does not list the size and SHA-256": [json.dumps({"format": manifest["format"], "version": 1, "files": {}})],
        "cannot be read": ["{", b"\xff\xfe", ""],
    }
    for message, contents in foreign.items():
        for content in contents:
            (path / "manifest.json").write_bytes(content.encode() if isinstance(content, str) else content)
            with pytest.raises(UserError, match=message):
                load_checkpoint(path)


def write_version_1(folder: Path, step: int, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> Path:
    """A checkpoint as this package once wrote them."""
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    model = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    others = {n: t for n, t in tensors.items() if not n.startswith("model.")}
    records = {
        "model.safetensors": files.write_tensors(path / "model.safetensors", model),
        "optimizer.safetensors": files.write_tensors(path / "optimizer.safetensors", others),
        "state.json": files.write_synced(path / "state.json", [json.dumps(values).encode()]),
    }
    manifest = {"format": "megatron_essh checkpoint", "version": 1, "step": step}
    manifest["files"] = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in records.items()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_checkpoints_of_version_1_still_load_and_their_damage_is_found(tmp_path: Path) -> None:
    tensors = run_tensors(5)
    path = write_version_1(tmp_path, 5, tensors, {"step": 5})
    loaded, values = load_checkpoint(path)
    assert_same(loaded, tensors)
    assert values == {"step": 5}
    assert find_checkpoint(tmp_path) == resolve_checkpoint(tmp_path) == path
    assert model_sha256(path) == files.file_sha256(path / "model.safetensors")
    rows = Sharding(11)
    part = load(path, {"model.embedding.weight": Want(rows, 2, 1), "exp_avg.embedding.weight": Want(start=5, end=9)})
    assert torch.equal(part["model.embedding.weight"], tensors["model.embedding.weight"][1::2])
    assert torch.equal(part["exp_avg.embedding.weight"], tensors["exp_avg.embedding.weight"].reshape(-1)[5:9])
    for name in CHECKPOINT_FILES[:3]:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}.*SHA-256"):
            load_checkpoint(path)
        assert find_checkpoint(tmp_path) is None
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)
    os.remove(path / "optimizer.safetensors")
    assert set(load_checkpoint(path, model_only=True)[0]) == {n for n in tensors if n.startswith("model.")}
    save_checkpoint(tmp_path, 6, run_tensors(6), {}, keep_last=2)
    assert checkpoint_steps(tmp_path) == [6], "a damaged one goes, whatever its version"


@pytest.mark.parametrize("write", [write_version_1, lambda *args: save_checkpoint(*args, keep_last=1)])
def test_statistics_saved_as_one_tensor_are_read_layer_by_layer(tmp_path: Path, write) -> None:
    stack = torch.arange(24.0).reshape(3, 8)
    path = write(tmp_path, 1, {"model.a": torch.ones(2), "statistics.mean_square": stack}, {})
    wanted = {f"statistics.mean_square.{layer}": Want(Sharding(8), 4, 3, shape=(8,)) for layer in range(3)}
    parts = load(path, wanted | {"model.a": Want()})
    for layer in range(3):
        assert torch.equal(parts[f"statistics.mean_square.{layer}"], stack[layer, 3::4])
    assert list(parts) == [*wanted, "model.a"]
    with pytest.raises(UserError, match=r"has no statistics\.mean_square\.3: of another model"):
        load(path, {"statistics.mean_square.3": Want()})


def test_foreign_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint folder"):
        load_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="no such checkpoint folder"):
        load_checkpoint(tmp_path / "file")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"not a megatron_essh checkpoint.*no manifest\.json"):
        load_checkpoint(tmp_path / "foreign")
    assert find_checkpoint(tmp_path / "nothing") is None
    assert find_checkpoint(tmp_path) is None


def test_a_run_a_folder_of_checkpoints_or_a_checkpoint_all_resolve(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_checkpoint(run / "checkpoints", 1, run_tensors(1), {}, keep_last=5)
    newest = save_checkpoint(run / "checkpoints", 2, run_tensors(2), {}, keep_last=5)
    first = run / "checkpoints" / "step_00000001"
    assert resolve_checkpoint(run) == resolve_checkpoint(run / "checkpoints") == resolve_checkpoint(newest) == newest
    assert resolve_checkpoint(first) == first
    moved = tmp_path / "renamed"
    shutil.copytree(first, moved)
    assert resolve_checkpoint(moved) == moved
    (newest / "state.json").unlink()
    assert resolve_checkpoint(run) == first
    with pytest.raises(UserError, match=r"state\.json: missing"):
        resolve_checkpoint(newest)
    (first / "state.json").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        resolve_checkpoint(run)
    with pytest.raises(UserError, match="no such folder"):
        resolve_checkpoint(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no checkpoint"):
        resolve_checkpoint(tmp_path / "empty")


def test_the_manifest_records_the_models_hash(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, run_tensors(1), {}, keep_last=5)
    assert model_sha256(path) == files.file_sha256(path / "model.safetensors")
    other = save_checkpoint(tmp_path, 2, run_tensors(1) | {"statistics.0": torch.zeros(5)}, {}, keep_last=5)
    assert model_sha256(other) == model_sha256(path)
    with pytest.raises(UserError, match="no such checkpoint folder"):
        model_sha256(tmp_path / "nothing")


def test_too_little_free_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    old = save_checkpoint(tmp_path, 1, run_tensors(1), {}, keep_last=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(
        UserError, match=r"too full for the checkpoint of step 2, which needs 1\.05 MB, 0\.00 MB are free"
    ):
        save_checkpoint(tmp_path, 2, run_tensors(2), {}, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == [old.name]


def test_a_disk_that_fills_during_the_save_leaves_the_old_checkpoints_only(tmp_path: Path, in_child) -> None:
    old = save_checkpoint(tmp_path, 1, run_tensors(1), {"step": 1}, keep_last=1)

    def save_with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        save_checkpoint(tmp_path, 2, {"model.a": torch.ones(50_000)}, {"step": 2}, keep_last=1)

    status, text = in_child(save_with_little_room)
    assert status == 1
    assert text.startswith(f"UserError: {tmp_path}: the disk is too full for the checkpoint of step 2")
    assert "File too large" in text.splitlines()[0]
    assert [p.name for p in tmp_path.iterdir()] == [old.name]
    assert_same(load_checkpoint(old)[0], run_tensors(1))


def test_any_other_failure_of_a_save_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write_synced", fail)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, run_tensors(2), {}, keep_last=1)
    assert list(tmp_path.iterdir()) == []


def test_finding_changes_nothing_and_cleaning_removes_only_leftovers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, run_tensors(1), {}, keep_last=1)
    (tmp_path / "step_00000002.tmp-77").mkdir()
    (tmp_path / "step_00000002.tmp-77" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "mine.tmp-1").mkdir()
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000001"
    assert (tmp_path / "step_00000002.tmp-77").is_dir(), "another process may be writing it"
    remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.tmp-1", "step_00000001"]
    remove_unfinished(tmp_path / "nothing")


def test_the_package_exports_what_it_names() -> None:
    assert all(hasattr(checkpoint, name) for name in checkpoint.__all__)
