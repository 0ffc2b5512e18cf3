"""DeepSpeed's ZeRO stages take the native one-process run's steps, and its checkpoints go on where others ended."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import test_engine_layouts as layouts
import torch
from whole import whole_state

from megatron_essh.config import RunConfig, config_from_mapping
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.checkpoint import CheckpointWriter, load_checkpoint
from megatron_essh.training.checkpoint.engine_state import engine_pieces, load_into
from megatron_essh.training.deepspeed_engine import OURS, deepspeed_settings
from megatron_essh.training.engine import NativeEngine, build_engine

LAYOUTS = [(1, 2), (2, 1), (2, 2)]
EVERYTHING_DEALT_OUT = {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 0, "sub_group_size": 20_000}
"""A step is many buckets, a parameter is larger than one, and in stage 3 not even small parameters are whole."""


def settings_of(zero: int, folder: Path) -> dict[str, Any]:
    """The parallel section of a run under ZeRO `zero`."""
    path = folder / f"zero{zero}.json"
    path.write_text(json.dumps({"zero_optimization": EVERYTHING_DEALT_OUT}))
    return {"engine": "deepspeed", "zero_stage": zero, "deepspeed_config": str(path)}


@pytest.mark.parametrize("zero", [1, 2])
def test_thirty_steps_on_two_replicas_are_the_native_one_process_runs(run_ranks, zero) -> None:
    """Elastic steps and an ordering among them; the losses of a micro-batch are divided by the step's tokens, so that
    any mean over replicas or micro-batches would show in the first step."""
    layouts.check_same(run_ranks, 1, 2, engine="deepspeed", zero_stage=zero)


@pytest.mark.layouts
@pytest.mark.parametrize("stage", ["pretrain", "refine"])
@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_takes_the_native_one_process_runs_steps(run_ranks, tmp_path, zero, tp, dp, stage) -> None:
    layouts.check_same(run_ranks, tp, dp, stage, **settings_of(zero, tmp_path))


@pytest.mark.layouts
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_positions_may_be_shared(run_ranks, tmp_path, zero) -> None:
    layouts.check_same(run_ranks, 2, 2, sequence_parallel=True, **settings_of(zero, tmp_path))


@pytest.mark.layouts
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_what_is_computed_anew_changes_nothing(run_ranks, tmp_path, zero, recompute) -> None:
    sections = {"training": {"recompute": recompute}}
    layouts.check_same(run_ranks, 1, 2, sections=sections, count=14, **settings_of(zero, tmp_path))


@pytest.mark.layouts
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("sections", [
    {"data": {"document_mask": True}},
    {"model": {"gates": "neutral", "clock": "constant"}},  # parameters without a gradient
    {"elastic": {"kl_weight": 0.0, "ff_gradient_scale": 0.5}},
], ids=["documents", "neutral", "no teacher"])  # fmt: skip
def test_other_recipes(run_ranks, tmp_path, zero, sections) -> None:
    layouts.check_same(run_ranks, 1, 2, sections=sections, count=14, **settings_of(zero, tmp_path))


def steps_with_a_broken_one(parallel: dict[str, Any]) -> list[Any]:
    """Reports of 6 steps; the losses of the fourth are no numbers."""
    mesh = Mesh.build(1, torch.device("cpu"))
    engine = engine_on(mesh, parallel, 0)
    honest, reports = engine._loss, []

    def broken(*arguments: Any) -> Any:
        loss = honest(*arguments)
        return dataclasses.replace(loss, objective=loss.objective * float("nan"))

    for step in range(6):
        engine._loss = broken if step == 3 else honest  # type: ignore[method-assign]
        reports.append(engine.train_step(step, layouts.batch(step, engine.config)[engine.rows(step)]))
    engine.close()
    return reports


@pytest.mark.parametrize("zero", [2, *(pytest.param(z, marks=pytest.mark.layouts) for z in (0, 1, 3))])
def test_a_broken_step_updates_nothing_and_leaves_nothing_behind(run_ranks, tmp_path, zero) -> None:
    (expected,) = run_ranks(1, steps_with_a_broken_one, {})
    for reports in run_ranks(2, steps_with_a_broken_one, settings_of(zero, tmp_path)):
        assert [report.skipped is not None for report in reports] == [step == 3 for step in range(6)]
        for index in (0, 1, 2, 4, 5):
            assert reports[index].loss == pytest.approx(expected[index].loss, rel=1e-5)


# -- checkpoints ----------------------------------------------------------------------------------------------------

HALF = 13
"""Steps before a checkpoint, an ordering among them; 4 come after it."""


def engine_on(mesh: Mesh, parallel: dict[str, Any], seed: int) -> NativeEngine:
    config = layouts.make_config(mesh.tp, parallel=parallel)
    return build_engine(
        LanguageModel(config.model, generator=torch.Generator().manual_seed(seed)), config, "pretrain", mesh
    )


def take_steps(engine: NativeEngine, first: int, count: int) -> list[float]:
    steps = range(first, first + count)
    return [engine.train_step(s, layouts.batch(s, engine.config)[engine.rows(s)]).loss for s in steps]


def train_and_save(folder: Path, tp: int, parallel: dict[str, Any]) -> tuple[list[float], int]:
    """Losses after the checkpoint, and the elements that this rank gave to it."""
    mesh = Mesh.build(tp, torch.device("cpu"))
    engine = engine_on(mesh, parallel, 0)
    take_steps(engine, 0, HALF)
    pieces = engine_pieces(engine)
    held = sum(piece.tensor.numel() for name, piece in pieces.items() if name.startswith("exp_avg."))
    with CheckpointWriter(folder, mesh, keep_last=1) as saving:
        saving.save(HALF, pieces, {"engine": engine.state_values()})
        losses = take_steps(engine, HALF, 4)  # while it is saved
    engine.close()
    return losses, held


def load_and_train(path: Path, tp: int, parallel: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state that was restored, and the losses after it."""
    engine = engine_on(Mesh.build(tp, torch.device("cpu")), parallel, 1)
    load_into(engine, path)
    restored = {name: tensor.clone() for name, tensor in whole_state(engine).items()}
    losses = take_steps(engine, HALF, 4)
    engine.close()
    return restored, losses


def check_goes_on(run_ranks, folder: Path, before: tuple[int, int, int | None], after: tuple[int, int, int | None]):
    """`before`, `after`: tp, dp and the ZeRO stage, None for the native engine."""
    runs = []
    for function, place, (tp, dp, zero) in (
        (train_and_save, folder, before),
        (load_and_train, folder / f"step_{HALF:08d}", after),
    ):
        parallel = {} if zero is None else settings_of(zero, folder)
        runs.append(run_ranks(tp * dp, function, place, tp, parallel, timeout=120))
    saved, _ = load_checkpoint(folder / f"step_{HALF:08d}")
    restored, continued = runs[1][0]
    for name, tensor in restored.items():
        if name != "statistics.mean_square" and not name.startswith("rng."):
            assert torch.equal(tensor, saved[name]), name
    assert continued == pytest.approx(runs[0][0][0], rel=1e-5)
    return [held for _, held in runs[0]]


def test_a_deepspeed_run_goes_on_natively_and_each_rank_gave_its_own_part_alone(run_ranks, tmp_path) -> None:
    held = check_goes_on(run_ranks, tmp_path, (1, 2, 1), (1, 1, None))
    elements = sum(p.numel() for p in LanguageModel(layouts.make_config().model).parameters())
    assert sum(held) == elements
    assert max(held) < 0.51 * elements


def test_a_native_run_goes_on_under_deepspeed(run_ranks, tmp_path) -> None:
    check_goes_on(run_ranks, tmp_path, (1, 1, None), (1, 2, 2))


@pytest.mark.layouts
@pytest.mark.parametrize(("before", "after"), [
    ((1, 2, 0), (1, 2, 3)),
    ((1, 2, 3), (1, 1, None)),
    ((2, 1, None), (1, 2, 3)),
    ((2, 2, 1), (1, 2, None)),
    ((2, 2, 2), (2, 2, 3)),
    ((2, 2, 3), (4, 1, None)),
    ((1, 4, 2), (2, 2, 1)),
    ((1, 1, 1), (1, 4, 3)),
])  # fmt: skip
def test_checkpoints_go_between_stages_layouts_and_engines(run_ranks, tmp_path, before, after) -> None:
    held = check_goes_on(run_ranks, tmp_path, before, after)
    if before[2]:
        assert max(held) < 0.6 * sum(held) or math.prod(before[:2]) == 1


# -- settings -------------------------------------------------------------------------------------------------------


def run_config(**parallel: Any) -> RunConfig:
    return config_from_mapping(
        RunConfig, {"model": layouts.MODEL, "parallel": {"engine": "deepspeed"} | parallel}, "test"
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_settings_in_the_repository_are_taken_as_they_are(zero) -> None:
    settings = deepspeed_settings(run_config(zero_stage=zero))
    assert settings["zero_optimization"]["stage"] == zero
    assert settings["gradient_clipping"] == 0.0


@pytest.mark.parametrize("key", OURS)
def test_a_setting_that_the_config_has_the_word_on_is_refused(tmp_path, key) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({key: 1}))
    with pytest.raises(UserError, match=rf"own\.json: {key} is set by the run's config"):
        deepspeed_settings(run_config(deepspeed_config=str(path)))


@pytest.mark.parametrize(("content", "message"), [
    ('{"zero_optimization": {"stage": 2}}', r"stage is 2, parallel\.zero_stage needs 1"),
    ('{"zero_optimization": {"overlap_comm": true}}', "overlap_comm is True, this engine needs False"),
    ('{"zero_optimization": {"offload_param": {}}}', r"offload_param is no setting of this engine; it takes reduce_"),
    ("{", "no JSON"),
    ("[]", "a JSON object is wanted"),
])  # fmt: skip
def test_settings_that_contradict_the_config_are_refused(tmp_path, content, message) -> None:
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        deepspeed_settings(run_config(deepspeed_config=str(path)))


def test_a_missing_file_of_settings_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: no such file"):
        deepspeed_settings(run_config(deepspeed_config="nowhere.json"))


def test_settings_without_deepspeed_are_refused() -> None:
    with pytest.raises((UserError, ValueError), match="engine is native"):
        run_config(engine="native", deepspeed_config="zero1.json")
