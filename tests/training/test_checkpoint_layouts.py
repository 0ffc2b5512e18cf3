"""Checkpoints fit any layout: saved on one, read on every other; a rank killed in a save; damage; memory at load.

Every rank of these tests is a process, and they meet as the ranks of a run do.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_essh.config import ModelConfig
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.interleave import Sharding
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.tensor_parallel import sharding_of
from megatron_essh.training.checkpoint import (
    CheckpointWriter,
    Piece,
    Want,
    checkpoint_steps,
    find_checkpoint,
    load,
    load_checkpoint,
    model_sha256,
    read_values,
    remove_unfinished,
    save_checkpoint,
    writer,
)
from megatron_essh.training.checkpoint.files import CHUNK_BYTES, file_sha256
from megatron_essh.training.checkpoint.manifest import read_manifest
from megatron_essh.training.checkpoint.pieces import Span, copy_overlap, deal, overlaps
from megatron_essh.training.checkpoint.reading import READERS

MODEL = ModelConfig(
    d_model=16,
    n_layers=2,
    channels=5,
    modes=3,
    value_width=5,
    ff_width=64,
    vocab_size=263,
    attention_layers=(1,),
    window=8,
    head_dim=8,
    bank_length=64,
)
"""Five channels, two heads and 263 entries: no number of ranks above one has equal parts, four leave some without."""

LAYOUTS = {
    "tp1 dp1": (1, 1, False),
    "tp1 dp2": (1, 2, False),
    "tp2 dp1": (2, 1, False),
    "tp2 dp2": (2, 2, False),
    "tp4 dp1": (4, 1, False),
    "tp1 dp4": (1, 4, False),
    "zero dp2": (1, 2, True),
    "zero tp2 dp2": (2, 2, True),
}
"""(tp, dp, whether the moments are cut into flat partitions over the data-parallel ranks)"""


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As the fixture of tests/parallel."""
    file = Path(__file__).resolve().parents[1] / "parallel" / "processes.py"
    spec = importlib.util.spec_from_file_location("processes", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["processes"] = module
    spec.loader.exec_module(module)
    server = module.Server()
    yield server.run
    server.close()


def whole_state(seed: int) -> dict[str, Tensor]:
    """A run's tensors, every value another one."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LanguageModel(MODEL).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    state = {
        f"{kind}.{name}": torch.randn(shape, generator=generator)
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }
    state |= {f"statistics.mean_square.{n}": torch.randn(MODEL.ff_width, generator=generator) for n in range(2)}
    return state | {"rng.torch": torch.randint(0, 256, (77,), generator=generator, dtype=torch.uint8)}


def dealt_out(name: str) -> Sharding | None:
    if name.startswith("rng."):
        return None
    if name.startswith("statistics."):
        return Sharding(MODEL.ff_width)
    return sharding_of(name.split(".", 1)[1], MODEL)


def held(layout: str, rank: int, seed: int) -> dict[str, Piece]:
    """What `rank` of `layout` holds of the state `seed`."""
    tp, dp, zero = LAYOUTS[layout]
    tp_rank, dp_rank = rank % tp, rank // tp
    pieces: dict[str, Piece] = {}
    local: dict[str, Piece] = {}
    for name, whole in whole_state(seed).items():
        sharding = dealt_out(name)
        part = whole if sharding is None else sharding.take(whole, tp_rank, tp)
        local[name] = Piece(
            part, tuple(whole.shape), sharding, tp, tp_rank, copies="all" if sharding is None else "data"
        )
    for name, piece in local.items():
        if name.startswith("rng."):
            if rank == 0:
                pieces[name] = Piece(piece.tensor, piece.shape)
        elif not zero or not name.startswith("exp_avg"):
            pieces[name] = piece
    if zero:
        names = [name for name in local if name.startswith("exp_avg")]
        total = sum(local[name].tensor.numel() for name in names)
        size = -(-total // dp)
        begin = 0
        for name in names:
            piece = local[name]
            low = min(max(0, dp_rank * size - begin), piece.tensor.numel())
            high = min(max(0, (dp_rank + 1) * size - begin), piece.tensor.numel())
            begin += piece.tensor.numel()
            if low < high:
                cut = piece.cut(low, high)
                copies = "tensor" if piece.sharding is None else "none"
                pieces[name] = Piece(cut.tensor, cut.shape, cut.sharding, tp, tp_rank, cut.start, cut.end, copies)
    return pieces


def save_on_rank(folder: Path, layout: str, seed: int, step: int, keep_last: int = 1) -> int:
    """Save as a rank of a run does; returns the bytes that this rank wrote."""
    mesh = Mesh.build(LAYOUTS[layout][0], torch.device("cpu"))
    pieces = held(layout, mesh.rank, seed)
    values = {"step": step, "layout": layout}
    with CheckpointWriter(folder, mesh, keep_last=keep_last) as saving:
        path = saving.save(step, pieces, values)
        for piece in pieces.values():
            piece.tensor.fill_(0)  # the run goes on
        (done,) = saving.wait()
    assert done.path == path
    name = f"rank_{mesh.rank:05d}.safetensors"
    return sum(entry.bytes for entry in read_manifest(path).entries(name)) if mesh.world > 1 else 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, run_ranks) -> dict[str, Path]:
    """A checkpoint of each layout, saved by its own number of processes."""
    root = tmp_path_factory.mktemp("layouts")
    paths = {}
    for index, (layout, (tp, dp, _)) in enumerate(LAYOUTS.items()):
        written = run_ranks(tp * dp, save_on_rank, root / str(index), layout, 7, 3)
        paths[layout] = root / str(index) / "step_00000003"
        for tp_rank in range(tp):  # tensor-parallel parts differ in size by themselves
            replicas = written[tp_rank::tp]
            assert max(replicas) - min(replicas) < 200, f"{layout}: ranks wrote {written} bytes"
    return paths


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_what_one_layout_saves_every_layout_reads_to_the_last_bit(saved, before: str, after: str) -> None:
    tp, dp, _ = LAYOUTS[after]
    for rank in range(tp * dp):
        expected = held(after, rank, 7)
        wanted = {
            name: Want(p.sharding, p.tp, p.tp_rank, p.start, p.end, shape=p.shape) for name, p in expected.items()
        }
        found = load(saved[before], wanted)
        assert list(found) == list(wanted)
        for name, piece in expected.items():
            assert torch.equal(found[name], piece.tensor), f"rank {rank}: {name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tools_see_the_same_whole_tensors_and_the_same_identity_whatever_the_layout(saved, layout: str) -> None:
    tensors, values = load_checkpoint(saved[layout])
    expected = whole_state(7)
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert values == {"step": 3, "layout": layout}
    assert model_sha256(saved[layout]) == file_sha256(saved["tp1 dp1"] / "model.safetensors")
    model, _ = load_checkpoint(saved[layout], model_only=True)
    assert set(model) == {name for name in expected if name.startswith("model.")}
    assert find_checkpoint(saved[layout].parent) == saved[layout]
    tp, dp, _ = LAYOUTS[layout]
    count = {f"rank_{r:05d}.safetensors" for r in range(tp * dp)}
    files = count if tp * dp > 1 else {"model.safetensors", "optimizer.safetensors"}
    assert {p.name for p in saved[layout].iterdir()} == {"manifest.json", "state.json", *files}


def test_what_is_read_goes_into_the_readers_own_tensors_and_precision(saved) -> None:
    name = "model.blocks.0.feed_forward.down"
    whole = whole_state(7)[name]
    for dtype in (torch.float64, torch.bfloat16):
        into = torch.full((32, 16), math.nan, dtype=dtype)
        assert load(saved["tp4 dp1"], {name: Want(Sharding(64), 2, 1, into=into)})[name] is into
        assert torch.equal(into, whole[1::2].to(dtype))


def test_another_models_checkpoint_is_refused_by_name(saved) -> None:
    name = "model.blocks.0.feed_forward.down"
    cases = {
        r"has no model\.nothing \(1 missing in all\)": {"model.nothing": Want()},
        r"down has shape \(64, 16\), and \(32, 16\) is wanted": {name: Want(shape=(32, 16))},
        r"down: shape \(64, 16\) is not dealt out by": {name: Want(Sharding(32), 2, 0)},
        "down: saved dealt out in 64 x 16 and in 32 x 32: of another model": {name: Want(Sharding(32, 2), 2, 0)},
        "down: 1024 elements for a tensor of 5": {name: Want(into=torch.zeros(5))},
        "down: elements 3:5000 of a part that has 1024": {name: Want(start=3, end=5000)},
    }
    for message, wanted in cases.items():
        with pytest.raises(UserError, match=message):
            load(saved["tp2 dp1"], wanted)


def test_a_resume_from_parameters_alone_is_told_what_they_are_good_for(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model.weight": torch.ones(4)}, {}, keep_last=1)
    with pytest.raises(UserError, match=r"has no exp_avg\.weight \(1 missing in all\); parameters alone can be"):
        load(path, {"model.weight": Want(), "exp_avg.weight": Want()})
    with pytest.raises(
        UserError, match=r"has no model\.other \(1 missing in all\): of another model; continue it with"
    ):
        load(path, {"model.other": Want()})


@st.composite
def spans(draw: st.DrawFn, shape: tuple[int, ...], sharding: Sharding) -> tuple[Span, Tensor]:
    """A span of a tensor of that shape, and the flat indices of its elements."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    tp_rank = draw(st.integers(0, tp - 1))
    indices = sharding.take(torch.arange(math.prod(shape)).reshape(shape), tp_rank, tp).reshape(-1)
    start = draw(st.integers(0, len(indices)))
    end = draw(st.integers(start, len(indices)))
    return Span.of(shape, sharding, tp, tp_rank, start, end), indices[start:end]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_part_gives_any_other_exactly_what_they_share(data: st.DataObject) -> None:
    units, rows, width = (data.draw(st.integers(low, 7)) for low in (1, 1, 0))
    shape, sharding = (units * rows, width), Sharding(units, rows)
    (source, held_), (target, wanted) = data.draw(spans(shape, sharding)), data.draw(spans(shape, sharding))
    found = torch.full((len(wanted),), -1)
    copied = copy_overlap(held_, source, found, target)
    shared = torch.isin(wanted, held_)
    assert torch.equal(found, torch.where(shared, wanted, -1))
    assert copied == int(shared.sum())
    assert overlaps(source, target) == bool(copied)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 4), st.integers(1, 3))
def test_replicas_share_the_writing_without_gap_or_overlap_and_evenly(sizes: list[int], dp: int, tp: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    tensors = {str(i): torch.arange(n).to(dtypes[i % 3]) for i, n in enumerate(sizes)}
    for copies, sharers in (("all", dp * tp), ("data", dp), ("tensor", tp), ("none", 1)):
        places = [(d, t) for d in range(dp if copies in ("all", "data") else 1) for t in range(tp)]
        places = [(d, t) for d, t in places if t == 0 or copies in ("all", "tensor")]
        shares = [
            deal(
                {name: Piece(x, tuple(x.shape), copies=copies) for name, x in tensors.items()},
                Mesh(tp, dp, t, d, torch.device("cpu")),
            )
            for d, t in places
        ]
        assert len(shares) == sharers
        for name, tensor in tensors.items():
            parts = sorted((s[name] for s in shares if name in s), key=lambda p: p.span.start)
            assert torch.equal(torch.cat([p.tensor.reshape(-1) for p in parts]), tensor)
            assert [p.span.start for p in parts][1:] == [p.span.end for p in parts][:-1]
        written = [sum(piece.bytes for piece in share.values()) for share in shares]
        assert max(written) - min(written) <= 8


def test_ranks_that_do_not_give_all_of_a_tensor_publish_nothing(tmp_path: Path, run_ranks) -> None:
    results = run_ranks(2, save_with_a_gap, tmp_path)
    assert "tensor exp_avg.w: the elements 0:8 should be there once, and there are 0:3, 4:8" in results[0]
    assert "the checkpoint of step 2 was not saved: rank 0" in results[1]
    assert checkpoint_steps(tmp_path) == []
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def save_with_a_gap(folder: Path) -> str:
    mesh = Mesh.build(1, torch.device("cpu"))
    start, end = ((0, 3), (4, 8))[mesh.rank]
    saving = CheckpointWriter(folder, mesh, keep_last=1)
    saving.save(2, {"exp_avg.w": Piece(torch.ones(end - start), (8,), start=start, end=end)}, {})
    with pytest.raises(UserError) as error:
        saving.wait()
    return str(error.value)


def test_a_rank_that_cannot_write_ends_the_save_on_all_and_is_named(tmp_path: Path, run_ranks) -> None:
    for failing in (0, 1):
        folder = tmp_path / str(failing)
        results = run_ranks(2, save_with_a_full_disk, folder, failing)
        assert results[failing].startswith(f"{folder}: the disk is too full for the checkpoint of step 2")
        assert f"the checkpoint of step 2 was not saved: rank {failing}: " in results[1 - failing]
        assert "the disk is too full" in results[1 - failing]
        assert checkpoint_steps(folder) == []


def save_with_a_full_disk(folder: Path, failing: int) -> str:
    mesh = Mesh.build(1, torch.device("cpu"))
    if mesh.rank == failing:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    saving = CheckpointWriter(folder, mesh, keep_last=1)
    saving.save(2, {"model.w": Piece(torch.ones(20_000), (20_000,), copies="data")}, {})
    with pytest.raises(UserError) as error:
        saving.wait()
    return str(error.value)


def test_a_rank_that_is_gone_is_not_waited_for_for_ever(tmp_path: Path, run_ranks) -> None:
    first, _ = run_ranks(2, save_alone, tmp_path)
    assert re.search(r"rank 1 has not written its part after \d s; the folder must be on a file system", first)


def save_alone(folder: Path) -> str:
    mesh = Mesh.build(1, torch.device("cpu"))
    writer.PATIENCE_AFTER_ERROR = 0.5
    saving = CheckpointWriter(folder, mesh, keep_last=1)
    message = ""
    if mesh.rank == 0:
        saving.save(2, held("tp1 dp2", 0, 1), {})
        with pytest.raises(KeyError), saving:
            raise KeyError("the run has failed")
        with pytest.raises(UserError) as error:
            saving.wait()
        message = str(error.value)
    dist.barrier()
    return message


# -- killed and damaged ---------------------------------------------------------------------------------------------


def save_in_the_background(folder: Path, rank: int, steps: list[int]) -> None:
    """Save as rank `rank` of tp 2 x dp 2 does, one step after the other, the run going on meanwhile."""
    mesh = Mesh(2, 2, rank % 2, rank // 2, torch.device("cpu"))
    with CheckpointWriter(folder, mesh, keep_last=2) as saving:
        for step in steps:
            saving.save(step, held("tp2 dp2", rank, step), {"step": step})
            while not saving.poll():
                torch.ones(50, 50).square().sum()


def test_a_rank_killed_at_any_moment_of_a_save_costs_no_older_checkpoint(tmp_path: Path, monkeypatch, capfd) -> None:
    """Four processes without a process group, which a writer only needs to be built."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, **_: box.__setitem__(0, "run"))
    before = tmp_path / "before"
    for step in (10, 20):
        save_checkpoint(before, step, whole_state(step), {"step": step}, keep_last=2)
    generator = random.Random(0)
    newest = []
    for trial in range(20):
        folder = tmp_path / str(trial)
        shutil.copytree(before, folder)
        ranks = [fork(save_in_the_background, folder, rank, [30, 40]) for rank in range(4)]
        victim = ranks.pop(generator.randrange(4))
        time.sleep(generator.uniform(0.0, 0.4))
        for process in (victim, *ranks):  # the others a moment later, as a launcher does
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        found = find_checkpoint(folder)
        assert found is not None
        tensors, values = load_checkpoint(found)
        newest.append(values["step"])
        expected = whole_state(values["step"])
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert capfd.readouterr().err == "", "nothing that looks like a checkpoint is damaged"
        older = [step for step in (10, 20, 30) if step < values["step"]]
        assert older[-1] in checkpoint_steps(folder)
        remove_unfinished(folder)
        assert all(re.fullmatch(r"step_\d{8}", p.name) for p in folder.iterdir())
        shutil.rmtree(folder)
    assert len(set(newest)) > 1, f"all kills came before or after the saves: {newest}"


def fork(function: Callable[..., None], *arguments: object) -> int:
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    return child


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_anywhere_is_found_and_placed(saved, tmp_path: Path, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(["tp1 dp1", "zero tp2 dp2"]))
    folder = tmp_path / "checkpoints"
    path = folder / "step_00000003"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved[layout], path)
    manifest = read_manifest(path)
    name = data.draw(st.sampled_from(sorted(p.name for p in path.iterdir())))
    content = bytearray((path / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (path / name).write_bytes(content)

    told: list[str] = []
    assert find_checkpoint(folder, on_damage=told.append) is None
    (damage,) = told
    assert str(path / name) in damage
    entries = manifest.entries(name) if name.endswith(".safetensors") else ()
    tensor = next((e.name for e in entries if e.offset <= place < e.offset + e.bytes), None)
    if tensor is not None:
        assert f"{path / name}: tensor {tensor}: its content is not what was saved" in damage
    with pytest.raises(UserError, match=re.escape(str(path / name))):
        load_checkpoint(path)


def find_together(folder: Path) -> tuple[str | None, list[str]]:
    told: list[str] = []
    mesh = Mesh.build(1, torch.device("cpu"))
    found = find_checkpoint(folder, mesh, on_damage=told.append)
    return (None if found is None else found.name), told


def test_all_ranks_agree_on_the_last_good_checkpoint(tmp_path: Path, run_ranks) -> None:
    run_ranks(2, save_on_rank, tmp_path, "tp1 dp2", 1, 1, 3)
    run_ranks(4, save_on_rank, tmp_path, "tp2 dp2", 2, 2, 3)
    run_ranks(2, save_on_rank, tmp_path, "zero dp2", 3, 3, 3)
    assert run_ranks(3, find_together, tmp_path) == [("step_00000003", [])] * 3
    damaged = tmp_path / "step_00000003" / "rank_00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (tmp_path / "step_00000002" / "rank_00003.safetensors").unlink()
    first, *others = run_ranks(3, find_together, tmp_path)
    assert first[0] == "step_00000001"
    assert len(first[1]) == 2
    assert f"{damaged}: tensor " in first[1][0]
    assert "step_00000002/rank_00003.safetensors: missing" in first[1][1]
    assert others == [("step_00000001", [])] * 2
    assert read_values(tmp_path / "step_00000001")["layout"] == "tp1 dp2"


# -- memory ---------------------------------------------------------------------------------------------------------


def load_measured(path: Path, wanted: dict[str, Want]) -> int:
    """Bytes by which this process grew at its largest while it read."""
    torch.ones(1000).sum()
    load(path, {"model.small": Want()})
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    load(path, wanted)
    return _memory("VmHWM") - before


def _memory(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def test_a_rank_needs_memory_for_its_own_part_and_a_chunk_a_reader(tmp_path: Path, run_ranks) -> None:
    tensors = {f"model.w{i}": torch.randn(4096, 1 << 10) for i in range(6)} | {"model.small": torch.ones(3)}
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep_last=1)
    whole = sum(t.numel() * 4 for t in tensors.values())
    assert whole > 96 << 20
    for wanted, part in (
        ({f"model.w{i}": Want(Sharding(4096), 8, 3) for i in range(6)}, whole // 8),
        ({"model.w2": Want(start=1 << 20, end=2 << 20)}, 4 << 20),
    ):
        (grown,) = run_ranks(1, load_measured, path, wanted)
        assert part * 0.9 < grown < part + READERS * CHUNK_BYTES + (6 << 20), (
            f"{grown / 1e6:.1f} MB for {part / 1e6:.1f}"
        )
