"""A run on blended, split, cached data with a growing batch: killed and continued it is the run that was not."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megatron_essh.config import RunConfig, load_config
from megatron_essh.data import IndexedDataset
from megatron_essh.training.checkpoint import load_checkpoint
from megatron_essh.training.run_data import open_run_data

KILLED_IN_STEP_14 = """
import os, signal
from megatron_essh.training.engine import NativeEngine
inner, calls = NativeEngine.step, 0
def killed(*arguments, **keywords):
    global calls
    calls += 1
    if calls == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*arguments, **keywords)
NativeEngine.step = killed
"""


@pytest.fixture
def settings(workplace: Path) -> list[str]:
    return [
        "data.train=null",
        "data.validation=null",
        f"data.blend=[{workplace}/train, {workplace}/valid]",
        "data.blend_weights=[3, 1]",
        "data.split=[80, 15, 5]",
        f"data.index_cache={workplace}/orders",
        "data.batch_ramp={start: 2, increment: 2, samples: 20}",
        "training.steps=20",
    ]


def config_of(workplace: Path, settings: list[str]) -> RunConfig:
    return load_config(workplace / "config.yaml", settings)


def test_a_killed_run_on_a_split_blend_with_a_ramp_is_bitwise_the_whole_one(launch, workplace, settings) -> None:
    whole, killed = workplace / "blend_whole", workplace / "blend_killed"
    finished = launch("pretrain", "--output", whole, "--set", *settings)
    assert finished.status == 0, finished.output
    assert f"data: {workplace}/train, {workplace}/valid" in finished.output
    assert "steps: 20 of 2 to 4 x 24 tokens in micro-batches of 2, 1,440 tokens in all" in finished.output
    assert "validation: the documents that data.split holds out" in finished.output
    orders = sorted((workplace / "orders").iterdir())
    assert [path.suffix for path in orders] == [".order"] * 3  # the blend and its two pairs

    finished = launch("pretrain", "--output", killed, "--set", *settings, hook=KILLED_IN_STEP_14)
    assert finished.status == -signal.SIGKILL
    shutil.rmtree(workplace / "orders")
    for suffix in (".bin", ".idx"):
        shutil.copy(workplace / f"train{suffix}", workplace / f"moved{suffix}")
    elsewhere = [f"data.blend=[{workplace}/moved, {workplace}/valid]", "data.index_cache=null", "data.workers=0"]
    finished = launch("pretrain", "--output", killed, "--set", *settings, *elsewhere)
    assert finished.status == 0, finished.output
    assert "step_00000012, step 12/20" in finished.output

    left, right = (load_checkpoint(folder / "checkpoints" / "step_00000020") for folder in (whole, killed))
    assert left[0].keys() == right[0].keys()
    for name, tensor in left[0].items():
        assert torch.equal(tensor, right[0][name]), name
    assert left[1]["data"] == right[1]["data"]
    assert left[1]["data"]["consumed_samples"] == 2 * 10 + 4 * 10
    assert sum(pair["consumed_samples"] for pair in left[1]["data"]["pairs"]) == 60


def test_what_decides_the_samples_cannot_change_in_a_run(launch, workplace, settings) -> None:
    folder = workplace / "blend_whole"
    if not folder.exists():
        assert launch("pretrain", "--output", folder, "--set", *settings).status == 0
    shutil.rmtree(folder / "checkpoints" / "step_00000020")
    for change, words in (
        ("data.blend_weights=[1, 1]", ["blend_weights [3.0, 1.0], and the run has [1.0, 1.0]"]),
        (f"data.blend=[{workplace}/valid, {workplace}/train]", ["valid: fingerprint", "the data changed"]),
        ("data.split=[80, 20, 0]", ["data.split: [80.0, 15.0, 5.0]"]),
        ("data.batch_ramp=null", ["data.batch_ramp"]),
        ("data.batch_ramp={start: 2, increment: 2, samples: 30}", ["data.batch_ramp.samples: 20"]),
    ):
        finished = launch("pretrain", "--output", folder, "--set", *settings, change)
        errors = [line for line in finished.output.splitlines() if line.startswith("error: ")]
        assert finished.status == 2, (change, finished.output)
        assert len(errors) == 1
        assert all(word in errors[0] for word in words), (change, errors)
    assert launch("pretrain", "--output", folder, "--set", *settings).status == 0


def test_training_and_validation_documents_of_a_split_are_apart(workplace, settings) -> None:
    config = config_of(
        workplace, [*settings, "data.blend=[]", "data.blend_weights=[]", f"data.train={workplace}/train"]
    )
    data = open_run_data(config, "pretrain")
    pair = IndexedDataset(workplace / "train")
    first, end = round(0.80 * pair.documents), round(0.95 * pair.documents)
    assert data.loader.dataset.part.documents == (0, first)
    assert set(data.loader.dataset.order.documents.tolist()) == set(range(first))
    held_out = [t for number in range(first, end) for t in pair.document(number).tolist()]
    windows = [window.tolist() for batch in data.validation for window in batch]
    assert windows
    for i, window in enumerate(windows):
        assert window == held_out[24 * i : 24 * i + 25]
    data.loader.close()


def test_every_step_of_a_run_gets_the_batch_that_its_plan_expects(workplace, settings) -> None:
    config = config_of(workplace, settings)
    data = open_run_data(config, "pretrain")
    sizes = [len(data.loader.next_batch()) for _ in range(20)]
    assert sizes == [2] * 10 + [4] * 10
    with pytest.raises(IndexError):
        data.loader.next_batch()
    data.loader.close()
    refined = open_run_data(config, "refine")
    assert len(refined.loader.next_batch()) == config.refinement.global_batch
    refined.loader.close()


def test_the_state_in_a_checkpoint_says_which_samples_were_seen(launch, workplace, settings) -> None:
    folder = workplace / "blend_state"
    assert launch("pretrain", "--output", folder, "--set", *settings, "training.steps=12").status == 0
    (path,) = (folder / "checkpoints").glob("step_00000012/state.json")
    state = json.loads(path.read_text())["data"]
    assert state["consumed_samples"] == 2 * 10 + 4 * 2
    assert [pair["consumed_samples"] for pair in state["pairs"]] == [21, 7]
    for pair, name in zip(state["pairs"], ("train", "valid"), strict=True):
        assert pair["fingerprint"] == IndexedDataset(workplace / name).fingerprint
        documents = IndexedDataset(workplace / name).documents
        assert pair["documents"] == [0, round(0.8 * documents)]
