"""A run killed anywhere and started again is bitwise the uninterrupted run."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_essh.training.checkpoint import checkpoint_steps, load_checkpoint

KILL = """
import os, signal
calls = 0
def die_at(count):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
"""

CALL = (
    KILL
    + """
from megatron_essh.training.{module} import {owner} as owner
inner = owner.{name}
def killed(*arguments, **keywords):
    {before}
    result = inner(*arguments, **keywords)
    {after}
    return result
owner.{name} = killed
"""
)

LOG = (
    KILL
    + """
from megatron_essh.training.metrics import MetricsWriter
inner = MetricsWriter._line
def killed(self, record):
    global calls
    calls += 1
    if calls == {count}:
        self._file.write('{{"kind": "step", "st')
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    inner(self, record)
MetricsWriter._line = killed
"""
)


def in_call(module: str, owner: str, name: str, count: int, when: str) -> str:
    """Dies before or after the `count`-th call of `name`, a function of a module or class `owner`."""
    places = {"before": "pass", "after": "pass", when: f"die_at({count})"}
    return CALL.format(module=module, owner=owner, name=name, **places)


def in_step(method: str, count: int, when: str) -> str:
    return in_call("engine", "NativeEngine", method, count, when)


def in_save(module: str, name: str, count: int, when: str) -> str:
    return in_call("checkpoint", module, name, count, when)


KILLS = {
    "before the first step": in_step("train_step", 1, "before"),
    "between gradients and update": in_step("step", 4, "before"),
    "inside the first save, before its first file": in_save("files", "write_synced", 1, "before"),
    "after the update, before the statistics": in_step("step", 8, "after"),
    "in an ordering": in_call("state", "EngineState", "permute", 2, "after"),
    "in a validation": in_step("evaluate", 2, "before"),
    "between two files of a save": in_save("files", "write_synced", 2, "after"),
    "before the rename of a save": in_save("folder", "_publish", 1, "before"),
    "after the rename of a save": in_save("folder", "_publish", 1, "after"),
    "in the pruning of old checkpoints": in_save("folder", "_remove", 1, "before"),
    "half-way through a line of metrics": LOG.format(count=2),
    "right after a save": in_save("folder", "_prune", 2, "after"),
}


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "tokens_per_second"}


def assert_same_run(left: Path, right: Path) -> None:
    """Same checkpoints to the last bit, same position and figures, same log; only the clock may differ."""
    steps = checkpoint_steps(left / "checkpoints")
    assert checkpoint_steps(right / "checkpoints")[0] == steps[0]
    name = f"step_{steps[0]:08d}"
    (tensors, values), (others, other_values) = (load_checkpoint(f / "checkpoints" / name) for f in (left, right))
    assert {"rng.torch", "statistics.mean_square.0", "model.embedding.weight"} <= set(tensors)
    assert sum(n.startswith("exp_avg") for n in tensors) == 2 * sum(n.startswith("model.") for n in tensors)
    assert set(tensors) == set(others)
    for key, tensor in tensors.items():
        assert torch.equal(tensor, others[key]), key
        assert tensor.dtype == others[key].dtype, key
    for each in (values, other_values):
        each["progress"].pop("seconds")
        each["progress"]["window"]["sums"].pop("seconds", None)
        each["config"]["training"].pop("output")
    assert values == other_values

    logs = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (left, right)]
    logs = [[without_clock(r) for r in log if r["kind"] != "damaged_checkpoint"] for log in logs]
    assert logs[0] == logs[1]
    boards = [EventAccumulator(str(f / "tensorboard")).Reload() for f in (left, right)]
    tags = set(boards[0].Tags()["scalars"])
    assert tags == set(boards[1].Tags()["scalars"])
    for tag in tags:
        points = [[(e.step, e.value) for e in board.Scalars(tag)] for board in boards]
        if tag == "train/tokens_per_second":
            points = [[step for step, _ in p] for p in points]
        assert points[0] == points[1], tag


def test_pretraining_survives_a_chain_of_kills_at_every_kind_of_place(launch, pretrained, workplace) -> None:
    folder = workplace / "killed"
    reached = []
    for place, hook in KILLS.items():
        finished = launch("pretrain", "--output", folder, hook=hook)
        assert finished.status == -signal.SIGKILL, f"{place}: {finished.output}"
        reached.append(max(checkpoint_steps(folder / "checkpoints"), default=0))
    assert reached == sorted(reached), "no kill costs a checkpoint"
    assert reached[-1] < 36, "the chain must end before the run does"
    finished = launch("pretrain", "--output", folder)
    assert finished.status == 0, finished.output
    assert f"continuing from {folder}/checkpoints/step_{reached[-1]:08d}" in finished.output
    assert_same_run(pretrained, folder)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_00000036", "step_00000040"]


def test_real_processes_stopped_and_killed_from_outside_end_the_same(
    start, wait_for_step, pretrained, workplace
) -> None:
    folder = workplace / "stopped"
    first = start("pretrain", "--output", folder, "--local_rank=0")
    wait_for_step(folder, 8, first)
    first.kill()
    assert first.wait() == -signal.SIGKILL

    second = start("pretrain", "--output", folder)
    wait_for_step(folder, 16, second)
    second.send_signal(signal.SIGTERM)
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    stopped_at = checkpoint_steps(folder / "checkpoints")[0]
    assert 16 <= stopped_at < 40, "the machine was too slow or too fast for this test"
    assert f"stopped by SIGTERM after step {stopped_at}/40: saved {folder}/checkpoints/step_{stopped_at:08d}" in output

    third = start("pretrain", "--output", folder)
    output, _ = third.communicate(timeout=120)
    assert third.returncode == 0, output
    assert f"continuing from {folder}/checkpoints/step_{stopped_at:08d}, step {stopped_at}/40" in output
    assert_same_run(pretrained, folder)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_between_two_saves_finishes_the_step_and_continues_the_same(launch, pretrained, workplace, name) -> None:
    folder = workplace / f"asked_{name}"
    hook = in_step("step", 9, "before").replace("SIGKILL", name)
    finished = launch("pretrain", "--output", folder, hook=hook)
    assert finished.status == 0, finished.output
    assert f"{name}: finishing this step, then saving" in finished.output
    assert f"stopped by {name} after step 9/40: saved" in finished.output
    assert checkpoint_steps(folder / "checkpoints") == [9, 6]
    assert launch("pretrain", "--output", folder).status == 0
    assert_same_run(pretrained, folder)


@pytest.mark.parametrize("killed_in", ["nothing", "its validation", "the step after it"])
def test_a_stop_does_not_wait_for_a_validation_which_the_next_process_makes_up(
    launch, pretrained, workplace, killed_in
) -> None:
    folder = workplace / f"asked_before_a_validation_{killed_in}"
    finished = launch("pretrain", "--output", folder, hook=in_step("step", 20, "before").replace("SIGKILL", "SIGTERM"))
    assert finished.status == 0, finished.output
    assert "validation after step 10" in finished.output
    assert "validation after step 20" not in finished.output
    assert checkpoint_steps(folder / "checkpoints")[0] == 20
    if killed_in != "nothing":
        hook = in_step("evaluate", 2, "after") if killed_in == "its validation" else in_step("step", 1, "after")
        assert launch("pretrain", "--output", folder, hook=hook).status == -signal.SIGKILL
    finished = launch("pretrain", "--output", folder)
    assert finished.status == 0, finished.output
    assert finished.output.index("continuing from") < finished.output.index("validation after step 20")
    assert_same_run(pretrained, folder)


def test_a_stop_in_the_last_step_ends_a_whole_run(launch, pretrained, workplace) -> None:
    folder = workplace / "asked_at_the_end"
    finished = launch("pretrain", "--output", folder, hook=in_step("step", 40, "before").replace("SIGKILL", "SIGTERM"))
    assert finished.status == 0, finished.output
    assert "done: 40 steps" in finished.output
    assert_same_run(pretrained, folder)


NOBODY_READS = "import os\nreader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\nos.dup2(writer, 2)\n"


def test_output_that_nobody_reads_ends_no_run_and_hinders_no_stop(launch, pretrained, workplace) -> None:
    """As in `... 2>&1 | tee log`, when Ctrl-C ends tee too, and in `... | head -3`."""
    folder = workplace / "unread"
    stop = in_step("step", 9, "before").replace("SIGKILL", "SIGINT")
    assert launch("pretrain", "--output", folder, hook=NOBODY_READS + stop).status == 0
    assert checkpoint_steps(folder / "checkpoints") == [9, 6]
    assert launch("pretrain", "--output", folder, hook=NOBODY_READS).status == 0
    assert_same_run(pretrained, folder)
    assert launch("pretrain", "--output", folder, "--set", "model.modes=8", hook=NOBODY_READS).status == 2


def test_a_stop_in_a_save_or_before_the_first_step_saves_nothing_twice(launch, workplace) -> None:
    folder = workplace / "asked_in_save"
    hook = in_save("folder", "_publish", 1, "after").replace("SIGKILL", "SIGTERM")
    finished = launch("pretrain", "--output", folder, hook=hook)
    assert finished.status == 0, finished.output
    assert f"stopped by SIGTERM after step 6/40: saved {folder}/checkpoints/step_00000006" in finished.output
    assert finished.output.count("saved") == 2

    hook = KILL + (
        "from megatron_essh.training import loop\n"
        "inner = loop.open_run_data\n"
        "def asked(*arguments):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return inner(*arguments)\n"
        "loop.open_run_data = asked\n"
    )
    finished = launch("pretrain", "--output", folder, hook=hook)
    assert finished.status == 0, finished.output
    assert "stopped by SIGTERM after step 6/40" in finished.output
    finished = launch("pretrain", "--output", workplace / "asked_at_once", hook=hook)
    assert finished.status == 0, finished.output
    assert "stopped by SIGTERM after step 0/40: nothing to save yet" in finished.output
    assert checkpoint_steps(workplace / "asked_at_once" / "checkpoints") == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_aborts_at_once(launch, workplace, name) -> None:
    folder = workplace / f"aborted_{name}"
    hook = in_step("step", 9, "before").replace("SIGKILL", name)
    kill = f"os.kill(os.getpid(), signal.{name})"
    hook = hook.replace(kill, f"{kill}; {kill}")
    finished = launch("pretrain", "--output", folder, hook=hook)
    assert finished.status == -signal.Signals[name], finished.output
    assert checkpoint_steps(folder / "checkpoints") == [6]


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(launch, pretrained, workplace) -> None:
    folder = workplace / "damaged"
    finished = launch("pretrain", "--output", folder, hook=in_step("step", 20, "before"))
    assert finished.status == -signal.SIGKILL
    assert checkpoint_steps(folder / "checkpoints") == [18, 12]
    path = folder / "checkpoints" / "step_00000018" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
    finished = launch("pretrain", "--output", folder)
    assert finished.status == 0, finished.output
    warning = rf"warning: skipping a damaged checkpoint: {re.escape(str(path))}: tensor \S+: its content is not"
    assert re.search(warning, finished.output)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (event,) = (record for record in log if record["kind"] == "damaged_checkpoint")
    assert event["step"] == 12
    assert str(path) in event["damage"]
    assert "step_00000012, step 12/40" in finished.output
    assert_same_run(pretrained, folder)


def test_refinement_survives_kills_and_needs_its_source_only_once(launch, pretrained, workplace) -> None:
    whole, killed = workplace / "refined", workplace / "refined_killed"
    assert launch("refine", "--from", pretrained, "--output", whole).status == 0
    source = workplace / "moved_source"
    shutil.copytree(pretrained, source)
    for place in ("between gradients and update", "before the rename of a save"):
        finished = launch("refine", "--from", source, "--output", killed, hook=KILLS[place])
        assert finished.status == -signal.SIGKILL, finished.output
    finished = launch("refine", "--from", source, "--output", killed, hook=in_step("step", 8, "before"))
    assert finished.status == -signal.SIGKILL, finished.output
    assert checkpoint_steps(killed / "checkpoints") == [6]
    shutil.rmtree(source)
    finished = launch("refine", "--from", source, "--output", killed)
    assert finished.status == 0, finished.output
    assert "is no longer there, and not needed" in finished.output

    for folder, origin in ((whole, pretrained), (killed, source)):
        path = folder / "checkpoints" / "step_00000009" / "state.json"
        record = json.loads(path.read_text())["source"]
        assert record["path"] == str(origin / "checkpoints" / "step_00000040")
    left, right = (load_checkpoint(f / "checkpoints" / "step_00000009") for f in (whole, killed))
    assert left[1]["source"]["model_sha256"] == right[1]["source"]["model_sha256"]
    assert left[1]["data"] == right[1]["data"]
    assert set(left[0]) == set(right[0])
    assert all(torch.equal(left[0][key], right[0][key]) for key in left[0])
