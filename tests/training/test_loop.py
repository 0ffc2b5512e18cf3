"""What a training command says, writes and refuses."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_essh.config import load_config
from megatron_essh.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_essh.data.sidecar import write_sidecar
from megatron_essh.training.checkpoint import checkpoint_steps, load_checkpoint, model_sha256


def refused(finished, *parts: str) -> None:
    """The command ended with one line of error, status 2 and no traceback."""
    assert finished.status == 2, finished.output
    errors = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, finished.output
    assert "Traceback" not in finished.output
    for part in parts:
        assert part in errors[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_says_what_it_does_and_where_everything_lies(launch, workplace) -> None:
    folder = workplace / "told"
    finished = launch("pretrain", "--set", "training.steps=12", "training.log_every=6", "--output", folder)
    assert finished.status == 0, finished.output
    for part in (
        "pretrain: 75,368 parameters, width 32, 2 spectral and 1 attention layers, vocabulary 260",
        "  full             4       192      75,368",
        "  24/32            3       128      55,078",
        "  2/32             1        64      32,930",
        "layout: 1 process on the CPU, threads: 1, fp32",
        "steps: 12 of 4 x 24 = 96 tokens in micro-batches of 2, 1,152 tokens in all",
        "starting from random weights, seed 3",
        "pace: ",
        "step  6/12  loss ",
        "validation after step 10",
        "validation after step 12",
        "  T10          4       192      75,368",
        f"saved {folder}/checkpoints/step_00000012",
        "done: 12 steps, 1,152 tokens",
        f"  TensorBoard  {folder}/tensorboard",
    ):
        assert part in finished.output
    assert str(folder) in finished.output.splitlines()[-1]
    line = next(line for line in finished.output.splitlines() if line.startswith("step 12/12"))
    assert " (full " in line
    assert "tokens/s" in line
    assert line.endswith("0 s left")


def test_metrics_hold_falling_losses_of_every_kind(pretrained) -> None:
    records = [json.loads(line) for line in (pretrained / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(4, 41, 4))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [10, 20, 30, 40]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert steps[0]["full_share"] == 1.0
    assert steps[0]["divergence"] is None
    assert steps[-1]["divergence"] > 0
    assert steps[-1]["tokens"] == 40 * 4 * 24
    assert any(len(r["loss_by_capacity"]) > 2 for r in steps)
    tiers = [r["loss_by_tier"] for r in records if r["kind"] == "validation"]
    assert set(tiers[0]) == {"T1", "T10"}
    assert tiers[-1]["T10"] < tiers[0]["T10"]


def test_the_written_config_reproduces_the_run(pretrained) -> None:
    config = load_config(pretrained / "config.yaml")
    assert config.training.output == str(pretrained)
    _, values = load_checkpoint(pretrained / "checkpoints" / "step_00000040")
    assert values["config"]["model"]["d_model"] == config.model.d_model == 32
    assert values["stage"] == "pretrain"
    assert values["step"] == 40
    assert values["progress"]["tokens"] == 40 * 4 * 24
    assert values["progress"]["seconds"] > 0
    assert values["data"]["consumed_samples"] == 160


def test_only_what_is_asked_for_is_saved_and_kept(pretrained, launch, workplace) -> None:
    assert checkpoint_steps(pretrained / "checkpoints") == [40, 36]
    folder = workplace / "saved_at_the_end"
    settings = ["training.steps=7", "checkpoint.save_every=0", "training.validate_every=0"]
    finished = launch("pretrain", "--output", folder, "--set", *settings)
    assert finished.status == 0, finished.output
    assert checkpoint_steps(folder / "checkpoints") == [7]
    assert "validation after" not in finished.output
    assert "validation" not in (folder / "metrics.jsonl").read_text()


def test_a_finished_run_started_again_does_nothing(pretrained, launch) -> None:
    before = contents(pretrained)
    finished = launch("pretrain", "--output", pretrained, "--set", "training.log_every=1")
    assert finished.status == 0, finished.output
    assert finished.output.startswith(f"nothing to do: {pretrained}/checkpoints/step_00000040 is the end")
    assert contents(pretrained) == before


def test_another_config_is_refused_and_nothing_is_touched(pretrained, launch) -> None:
    before = contents(pretrained)
    for setting, told in (
        ("training.steps=50", "training.steps: 40, and the config now says 50"),
        ("model.channels=8", "model.channels: 4, and the config now says 8"),
        ("elastic.kl_weight=0", "elastic.kl_weight: 0.5, and the config now says 0.0"),
        ("optimizer.beta2=0.9", "optimizer.beta2: 0.95, and the config now says 0.9"),
        ("training.loss_chunk=8", "training.loss_chunk: 16, and the config now says 8"),
    ):
        refused(launch("pretrain", "--output", pretrained, "--set", setting), told, "--output", "back to")
    refused(launch("refine", "--from", pretrained, "--output", pretrained), "holds a pretrain run, not a refine run")
    assert contents(pretrained) == before


def test_a_run_continues_on_moved_data_but_not_on_other_data(launch, workplace) -> None:
    folder, moved = workplace / "moved", workplace / "moved_data"
    moved.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(workplace / f"train{suffix}", moved / f"train{suffix}")
        shutil.copy(workplace / f"valid{suffix}", moved / f"valid{suffix}")
    stop = "import os\nfrom megatron_essh.training.engine import NativeEngine\n"
    stop += "NativeEngine.evaluate = lambda *_: os._exit(9)"
    assert launch("pretrain", "--output", folder, hook=stop).status == 9
    refused(launch("pretrain", "--output", folder, "--set", f"data.train={moved}/valid"), "fingerprint", "data changed")
    finished = launch("pretrain", "--output", folder, "--set", f"data.train={moved}/train")
    assert finished.status == 0, finished.output
    assert "step 6/40" in finished.output


def test_bad_data_is_refused_in_words(launch, workplace) -> None:
    out = workplace / "bad_data"

    def run(*settings: str):
        return launch("pretrain", "--output", out, "--set", *settings)

    refused(run("data.train=null"), "data.train: not set", "tools/preprocess_data.py")
    refused(run(f"data.train={workplace}/nothing"), f"{workplace}/nothing.")
    refused(run("data.sequence_length=100000"), "100001")
    refused(run("model.vocab_size=256"), "train.bin: token id 256 lies outside", "vocabulary of 256")
    refused(run(f"data.validation={workplace}/nothing"), f"{workplace}/nothing.")
    truncated = workplace / "truncated"
    shutil.copy(workplace / "train.idx", f"{truncated}.idx")
    Path(f"{truncated}.bin").write_bytes((workplace / "train.bin").read_bytes()[:-2])
    refused(run(f"data.train={truncated}"), "truncated.bin")
    refused(
        run("training.steps=1000000000000"),
        "training.steps: 1,000,000,000,000 steps of 4 samples: the order of 4,000,000,000,000 samples needs",
        "GiB of memory",
    )
    assert checkpoint_steps(out / "checkpoints") == []


def pair_with_sidecar(prefix: Path, *, end: int = 256, **changes: object) -> None:
    """The ids 0 to 99 again and again and then `end`, said to be a tokenizer's of 257 ids."""
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(np.append(np.arange(2999) % 100, end))
    dataset = IndexedDataset(prefix)
    content = {
        "tokenizer": {"type": "byte", "model": None, "pattern": "gpt2"},
        "fingerprint": "a" * 64,
        "vocab_size": 257,
        "padded_vocab_size": 384,
        "eod": 256,
        "documents": 1,
        "tokens": 3000,
        "largest_id": max(99, end),
        "data_fingerprint": dataset.fingerprint,
    }
    write_sidecar(prefix, content | changes)


def test_the_tokenizer_must_fit_the_model_and_be_one(launch, workplace) -> None:
    first, second = workplace / "first", workplace / "second"
    pair_with_sidecar(first)
    pair_with_sidecar(second, fingerprint="b" * 64)
    out = workplace / "tokenizers"
    both = [f"data.train={first}", f"data.validation={first}"]

    def run(*settings: str):
        return launch("pretrain", "--output", out, "--set", "training.steps=2", *both, *settings)

    refused(
        run("model.vocab_size=200"), "first.json: the tokenizer has 257 ids and model.vocab_size is 200", "least 257"
    )
    refused(
        run(f"data.validation={second}"), "second.json: made by another tokenizer (bbbbbbbbbbbb)", "first.json tells"
    )
    refused(run("data.tokenizer={type: byte}"), "first.json: made by another tokenizer", "data.tokenizer tells")
    assert run("data.document_mask=true").status == 0, "the sidecar tells where documents end"
    refused(
        launch("pretrain", "--output", workplace / "no_eod", "--set", "data.document_mask=true"),
        "data.document_mask",
        "end-of-document",
    )


def test_a_document_mask_needs_documents_that_end(launch, workplace) -> None:
    pair_with_sidecar(workplace / "endless", end=7)
    words = ["--output", workplace / "on_endless", "--set", f"data.train={workplace}/endless", "training.steps=1"]
    refused(
        launch("pretrain", *words, "data.document_mask=true"),
        "none of the first 1 documents of",
        "endless.bin ends with the end-of-document token 256",
        "--append-eod",
    )
    finished = launch("pretrain", *words)
    assert finished.status == 0, finished.output


@pytest.mark.parametrize("which", ["train", "validation"])
def test_a_sidecar_of_another_pair_is_refused(launch, workplace, which) -> None:
    pair_with_sidecar(workplace / "foreign", data_fingerprint="c" * 64)
    words = ["--output", workplace / "on_foreign", "--set", f"data.{which}={workplace}/foreign"]
    refused(launch("pretrain", *words), "foreign.json: describes another pair than", "foreign.bin")


def test_a_broken_step_ends_the_run_and_the_last_checkpoint_stays(launch, pretrained, workplace) -> None:
    folder = workplace / "broken"
    hook = """
from megatron_essh.training.engine import NativeEngine
inner, calls = NativeEngine.forward_backward, 0
def broken(self, *arguments):
    global calls
    calls += 1
    result = inner(self, *arguments)
    if calls == 9:
        self.model.embedding.weight.grad[3, 3] = float("nan")
    return result
NativeEngine.forward_backward = broken
"""
    finished = launch("pretrain", "--output", folder, "--set", "training.skip_limit=0", hook=hook)
    refused(
        finished,
        "step 9",
        "nan",
        "embedding.weight",
        f"the last checkpoint is intact: {folder}/checkpoints/step_00000006",
    )
    assert checkpoint_steps(folder / "checkpoints") == [6]
    finished = launch("pretrain", "--output", folder)
    assert finished.status == 0, finished.output
    assert model_sha256(folder / "checkpoints/step_00000040") == model_sha256(pretrained / "checkpoints/step_00000040")


def test_a_step_that_breaks_is_skipped_told_and_logged_with_its_place(launch, workplace) -> None:
    folder = workplace / "skipping"
    hook = """
import dataclasses
from megatron_essh.training.engine import NativeEngine
inner, calls = NativeEngine._loss, 0
def broken(self, *arguments):
    global calls
    calls += 1
    loss = inner(self, *arguments)
    return dataclasses.replace(loss, objective=loss.objective * float("nan")) if calls == 10 else loss
NativeEngine._loss = broken
"""
    words = ["--set", "training.steps=8", "training.validate_every=0", "training.log_every=1"]
    finished = launch("pretrain", "--output", folder, *words, hook=hook)
    assert finished.status == 0, finished.output
    told = (
        "step 5: skipped: loss nan, gradient norm nan: first in micro-batch 1, sequences 2 to 3 of the step, capacity "
    )
    line = next(line for line in finished.output.splitlines() if line.startswith(told))
    assert line.endswith(", samples 18 to 19 of the run; 1 skipped so far")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in records if r["step"] in (4, 5, 6)] == [
        ("step", 4), ("skip", 5), ("step", 5), ("step", 6),
    ]  # fmt: skip
    skip, window = (next(r for r in records if r["step"] == 5 and r["kind"] == kind) for kind in ("skip", "step"))
    assert (skip["micro_batch"], skip["samples"]) == (1, [18, 20])
    assert (window["loss"], window["grad_norm"], window["skipped_steps"]) == (None, None, 1)
    _, values = load_checkpoint(folder / "checkpoints" / "step_00000008")
    assert values["engine"]["updates"] == 7
    assert values["progress"]["skipped"] == 1
    assert values["progress"]["tokens"] == 7 * 96


def test_a_loss_that_jumps_is_told_and_logged(launch, workplace) -> None:
    folder = workplace / "jumping"
    hook = """
import dataclasses
from megatron_essh.training.engine import NativeEngine
from megatron_essh.training.guard import SpikeDetector
SpikeDetector.WARMUP = 8
inner = NativeEngine.train_step
def jumping(self, step, *arguments, **keywords):
    report = inner(self, step, *arguments, **keywords)
    losses = {name: 50.0 if step == 10 else loss for name, loss in report.loss_by_capacity.items()}
    return dataclasses.replace(report, loss_by_capacity=losses)
NativeEngine.train_step = jumping
"""
    words = ["--set", "training.steps=12", "training.validate_every=0"]
    finished = launch("pretrain", "--output", folder, *words, hook=hook)
    assert finished.status == 0, finished.output
    assert finished.output.count("the loss jumped to 50.0000 from about 4.") == 1
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spikes = [r for r in records if r["kind"] == "spike"]
    assert [(r["step"], r["loss"], r["first_sample"]) for r in spikes] == [(11, 50.0, 40)]


def test_a_validation_that_is_no_number_ends_the_run(launch, workplace) -> None:
    folder = workplace / "broken_validation"
    hook = "from megatron_essh.training.engine import NativeEngine\nNativeEngine.evaluate = lambda *_: float('inf')"
    refused(launch("pretrain", "--output", folder, hook=hook), "step 10: validation loss of T1 is inf", "step_00000006")
    assert checkpoint_steps(folder / "checkpoints") == [6]


@pytest.mark.parametrize(
    ("limit", "told"),
    [(200_000, "too full for the checkpoint of step 6"), (2500, "the disk is full"), (900, "the disk is full")],
)
def test_a_full_disk_ends_the_run_in_words_and_leaves_no_half(launch, workplace, limit, told) -> None:
    """While it saves, while it logs, while it writes its config."""
    folder = workplace / f"full_{limit}"
    hook = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    settings = ["training.log_every=1"] + (["checkpoint.save_every=0"] if limit == 2500 else [])
    finished = launch("pretrain", "--output", folder, "--set", *settings, hook=hook)
    refused(finished, str(folder), told, "make room")
    assert ("step  2/40" in finished.output) == (limit > 900)
    assert not (folder / "checkpoints").exists() or list((folder / "checkpoints").iterdir()) == []


def test_environments_and_devices_that_cannot_be_are_refused(launch, workplace) -> None:
    out = workplace / "nowhere"
    refused(launch("pretrain", "--output", out, extra={"WORLD_SIZE": "2"}), "RANK is not set (WORLD_SIZE is 2)")
    refused(launch("pretrain", "--output", out, extra={"RANK": "1"}), "RANK is 1, and WORLD_SIZE is not set")
    refused(
        launch("pretrain", "--output", out, extra={"RANK": "1", "WORLD_SIZE": "1"}), "RANK is 1, and WORLD_SIZE 1 has"
    )
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "zero"}
    refused(launch("pretrain", "--output", out, extra=ranks), "LOCAL_RANK is 'zero'", "torchrun")
    refused(launch("pretrain", "--output", out, extra=ranks | {"LOCAL_RANK": "0"}), "MASTER_ADDR is not set")
    meeting = ranks | {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "port"}
    refused(launch("pretrain", "--output", out, extra=meeting), "MASTER_PORT is 'port'")
    refused(launch("pretrain", "--output", out, extra=meeting | {"MASTER_PORT": "70000"}), "ports are 1 to 65535")
    meeting |= {"MASTER_PORT": "29400", "RANK": "2"}  # refused before anything listens or is waited for
    refused(launch("pretrain", "--output", out, extra=meeting), "RANK is 2, and WORLD_SIZE 2 has ranks 0 to 1")
    refused(launch("pretrain", "--output", out, extra={"WORLD_SIZE": "0"}), "WORLD_SIZE is 0", "torchrun")
    refused(launch("pretrain", "--output", out, "--set", "parallel.tensor=2"), "parallel.tensor is 2", "torchrun")
    if not torch.cuda.is_available():
        refused(launch("pretrain", "--output", out, "--set", "training.device=cuda"), "training.device: cuda")
    refused(launch("pretrain", "--output", workplace / "config.yaml"), "training.output", "is a file")
    refused(launch("pretrain", "--output", ""), "training: output is empty")
    refused(launch("refine", "--from", workplace, "--output", ""), "training: output is empty")
    refused(launch("pretrain", "--set", "training.stepz=3"), "unknown key training.stepz")


@pytest.fixture
def free_port() -> str:
    with socket.socket() as taken:  # free once it is closed
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


SOON = "from megatron_essh.parallel import meeting\nmeeting.NOTICE = 0.5"


def test_the_first_rank_says_who_has_not_come_soon_and_at_last(launch, workplace, free_port) -> None:
    place = {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    settings = ["--output", workplace / "alone", "--set", "parallel.timeout_seconds=2"]
    finished = launch("pretrain", *settings, extra=place, hook=SOON)
    assert re.search(
        r"rank 0 has waited \d s at 127.*: of 3 ranks \(WORLD_SIZE\) ranks 1, 2 did not come yet", finished.output
    )
    refused(
        finished, f"rank 0 waited at 127.0.0.1:{free_port} for parallel.timeout_seconds 2", "ranks 1, 2 did not come;"
    )


def test_a_rank_that_finds_no_first_one_says_so(launch, workplace, free_port) -> None:
    place = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    settings = ["--output", workplace / "alone", "--set", "parallel.timeout_seconds=2", "training.device=cpu"]
    finished = launch("pretrain", *settings, extra=place, hook=SOON)
    assert f"rank 1 waits for an answer at 127.0.0.1:{free_port}, for parallel.timeout_seconds 2" in finished.output
    refused(
        finished, f"rank 1 could not reach the first rank at 127.0.0.1:{free_port} within parallel.timeout_seconds 2"
    )


def test_an_output_folder_may_have_any_name(launch, workplace) -> None:
    folder = workplace / "\N{FOX FACE} \"'\\: #"
    finished = launch("pretrain", "--output", folder, "--set", "training.steps=1", "training.validate_every=0")
    assert finished.status == 0, finished.output
    assert load_config(folder / "config.yaml").training.output == str(folder)


def test_the_deepspeed_launchers_rank_argument_is_accepted(launch, workplace) -> None:
    arguments = ["--local_rank=0", "--output", workplace / "ranked", "--set", "training.steps=1"]
    finished = launch("pretrain", *arguments, extra={"WORLD_SIZE": "1", "RANK": "0"})
    assert finished.status == 0, finished.output


def test_refinement_starts_from_the_named_checkpoint_with_fresh_moments(launch, pretrained, workplace) -> None:
    source = pretrained / "checkpoints" / "step_00000036"
    folder = workplace / "from_36"
    # At a rate of zero the first update leaves the parameters what they were.
    still = ["refinement.steps=1", "training.output=" + str(folder)]
    hook = "from megatron_essh.training import engine\nengine.learning_rate = lambda *_, **__: 0.0"
    finished = launch("refine", "--from", source, "--set", *still, "--output", folder, hook=hook)
    assert finished.status == 0, finished.output
    assert f"refining {source}, step 36" in finished.output
    assert f"warning: {source}: step 36 of 40: pretraining is not finished" in finished.output
    tensors, values = load_checkpoint(folder / "checkpoints" / "step_00000001")
    original, _ = load_checkpoint(source)
    parameters = [key for key in original if key.startswith("model.")]
    assert all(torch.equal(tensors[key], original[key]) for key in parameters)
    assert values["source"] == {"path": str(source), "model_sha256": model_sha256(source), "step": 36}
    assert values["engine"]["updates"] == 1
    assert values["stage"] == "refine"
    assert values["data"]["seed"] == 4, "refinement draws an order of its own"


def test_refinement_refuses_what_it_cannot_start_from(launch, pretrained, workplace) -> None:
    out = workplace / "refused_refinement"

    def run(source: Path, *settings: str):
        return launch("refine", "--from", source, "--output", out, *(["--set", *settings] if settings else []))

    refused(run(workplace / "nothing"), f"{workplace}/nothing: no such folder")
    (workplace / "empty").mkdir()
    refused(run(workplace / "empty"), "no checkpoint")
    refused(run(pretrained, "model.modes=8"), "model.modes: 4, and the config says 8")
    assert launch("refine", "--from", pretrained, "--set", "refinement.steps=1", "--output", out).status == 0
    refused(
        launch("refine", "--from", out, "--output", workplace / "twice"), "holds a refine run; refinement starts from"
    )
    older = pretrained / "checkpoints" / "step_00000036"
    refused(run(older, "refinement.steps=1"), "holds a refinement of", "--from now leads to", str(older))
    damaged = workplace / "damaged_source"
    shutil.copytree(pretrained / "checkpoints" / "step_00000040", damaged)
    (damaged / "model.safetensors").write_bytes(b"")
    refused(run(damaged, "refinement.steps=1"), "damaged_source/model.safetensors: 0 bytes")


def test_refinement_without_an_output_goes_beside_the_configs(launch, pretrained, workplace) -> None:
    base = workplace / "beside"
    settings = [f"training.output={base}/", "refinement.steps=1", "training.validate_every=0"]
    finished = launch("refine", "--from", pretrained, "--set", *settings)
    assert finished.status == 0, finished.output
    assert checkpoint_steps(workplace / "beside-refined" / "checkpoints") == [1]
