"""An engine's state in checkpoints: saved on one layout, a run goes on with any other as if nothing had been."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from whole import whole_state

from megatron_essh.config import RunConfig, config_from_mapping
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.checkpoint import CheckpointWriter, load_checkpoint, save_checkpoint
from megatron_essh.training.checkpoint.engine_state import engine_pieces, load_into
from megatron_essh.training.engine import NativeEngine

MODEL = {
    "d_model": 16, "n_layers": 2, "channels": 5, "modes": 3, "value_width": 5, "ff_width": 64, "vocab_size": 263,
    "attention_layers": [1], "window": 8, "head_dim": 8, "bank_length": 64,
}  # fmt: skip
RUN = {
    "model": MODEL,
    "elastic": {"slot_sequences": 2, "full_only_tokens": 0, "full_share": 0.5, "ordering_interval": 3},
    "data": {"sequence_length": 12},
    "optimizer": {"learning_rate": 2e-3},
    "training": {"steps": 12, "global_batch": 8, "micro_batch": 2, "precision": "fp32", "loss_chunk": 16},
}
HALF = 4
"""Steps before the checkpoint, an ordering among them; as many come after it, with another."""


def engine_on(mesh: Mesh, seed: int) -> NativeEngine:
    config = config_from_mapping(RunConfig, RUN | {"parallel": {"tensor": mesh.tp}}, "test")
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(seed))
    return NativeEngine(model, config, "pretrain", mesh)


def take_steps(engine: NativeEngine, first: int) -> list[float]:
    losses = []
    for step in range(first, first + HALF):
        tokens = torch.randint(0, 263, (8, 13), generator=torch.Generator().manual_seed(step))
        losses.append(engine.train_step(step, tokens[engine.rows(step)]).loss)
    return losses


def train_and_save(folder: Path, tp: int) -> tuple[list[float], dict[str, Tensor]]:
    mesh = Mesh.build(tp, torch.device("cpu"))
    engine = engine_on(mesh, 0)
    torch.manual_seed(3)
    losses = take_steps(engine, 0)
    with CheckpointWriter(folder, mesh, keep_last=1) as saving:
        saving.save(HALF, engine_pieces(engine), {"engine": engine.state_values()})
        losses += take_steps(engine, HALF)  # while it is saved
    return losses, {name: tensor.clone() for name, tensor in whole_state(engine).items()}


def load_and_train(path: Path, tp: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    mesh = Mesh.build(tp, torch.device("cpu"))
    engine = engine_on(mesh, 1)
    torch.manual_seed(4 + mesh.rank)
    load_into(engine, path)
    drawn = int(torch.randint(1 << 30, ()))
    restored = {name: tensor.clone() for name, tensor in whole_state(engine).items()}
    losses = take_steps(engine, HALF)
    return losses, restored, {name: tensor.clone() for name, tensor in whole_state(engine).items()}, drawn


ENGINES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]
QUICK = [((2, 1), (1, 2)), ((1, 2), (2, 2)), ((1, 1), (2, 1))]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, marks=[] if (a, b) in QUICK else pytest.mark.layouts)
        for a in ENGINES
        for b in ENGINES
    ],
)  # fmt: skip
def test_a_run_goes_on_with_another_layout_as_if_nothing_had_been(tmp_path: Path, run_ranks, before, after) -> None:
    (losses, end), *_ = run_ranks(math.prod(before), train_and_save, tmp_path, before[0])
    path = tmp_path / f"step_{HALF:08d}"
    ranks = run_ranks(math.prod(after), load_and_train, path, after[0])
    saved, _ = load_checkpoint(path)
    continued, restored, state, _ = ranks[0]
    for name, tensor in restored.items():
        if name == "statistics.mean_square":
            tensor_L = [saved[f"{name}.{layer}"] for layer in range(len(tensor))]
            assert torch.equal(tensor, torch.stack(tensor_L))
            assert tensor.any(), "there is something to restore"
        elif not name.startswith("rng."):
            assert torch.equal(tensor, saved[name]), name
    generator = torch.Generator().manual_seed(3)
    expected = int(torch.randint(1 << 30, (), generator=generator))
    assert [rank[3] for rank in ranks] == [expected] * math.prod(after), "every rank has the first one's random state"
    assert all(rank[0] == continued for rank in ranks)
    assert continued == pytest.approx(losses[HALF:], rel=1e-5)
    for name, tensor in end.items():
        if not name.startswith("rng."):
            error = (state[name] - tensor).norm()
            assert error <= (1e-5 if name.startswith("model.") else 1e-4) * tensor.norm(), f"{name}: {error:.1e}"


def test_an_engine_of_another_model_refuses_the_checkpoint(tmp_path: Path) -> None:
    engine = engine_on(Mesh.single(torch.device("cpu")), 0)
    own = {name: piece.tensor for name, piece in engine_pieces(engine).items()}
    name = "model.blocks.0.feed_forward.down"
    cases = {
        "unknown model.extra": own | {"model.extra": torch.ones(1)},
        r"has no model\.blocks\.0\.feed_forward\.down": {n: t for n, t in own.items() if n != name},
        r"down has shape \(3, 16\), and \(64, 16\) is wanted": own | {name: torch.ones(3, 16)},
    }
    for index, (message, tensors) in enumerate(cases.items()):
        path = save_checkpoint(tmp_path, index, tensors, {"engine": {"updates": 1}}, keep_last=9)
        with pytest.raises(UserError, match=message):
            load_into(engine, path)


def test_loading_an_engine_makes_no_second_copy_of_its_moments(tmp_path: Path) -> None:
    first, second = (engine_on(Mesh.single(torch.device("cpu")), seed) for seed in (0, 1))
    take_steps(first, 0)
    take_steps(second, 0)
    path = save_checkpoint(
        tmp_path,
        4,
        {n: p.tensor for n, p in engine_pieces(first).items()},
        {"engine": first.state_values()},
        keep_last=1,
    )
    places = {name: piece.tensor.data_ptr() for name, piece in engine_pieces(second).items() if "rng" not in name}
    load_into(second, path)
    after = {name: piece.tensor.data_ptr() for name, piece in engine_pieces(second).items() if "rng" not in name}
    assert places == after
    assert second.state_values() == first.state_values()
    for name, piece in engine_pieces(second).items():
        assert torch.equal(piece.tensor, engine_pieces(first)[name].tensor) or name.startswith("rng.")
