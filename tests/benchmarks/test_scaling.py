"""tools/benchmark.py scaling: its layouts, its budget, what becomes of a layout that fails, and a real run."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_essh.benchmarks import scaling_processes
from megatron_essh.benchmarks.scaling import (
    TOLERANCES,
    Launch,
    Scaling,
    ScalingLayout,
    Settings,
    compare,
    layouts,
)
from megatron_essh.benchmarks.scaling_rank import covered, exchange_times
from megatron_essh.config import RunConfig, config_from_mapping, config_to_mapping
from megatron_essh.elastic.plan import pretraining_plan
from megatron_essh.errors import UserError
from megatron_essh.parallel import planning, prediction
from megatron_essh.parallel.rates import load_rates


def settings_for(gpus: int, **changes: Any) -> Settings:
    given = {
        "gpus": gpus,
        "layouts": layouts(gpus, None, deepspeed=True),
        "budget": 540.0,
        "micro_batch": None,
        "accumulation": 2,
        "compared": 3,
        "timed": 2,
        "resumed": 2,
        "rates": None,
        "scratch": None,
    }
    return Settings(**{**given, **changes})


# -- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, ["dp 2", "tp 2", "dp 2, ZeRO 1", "dp 2, ZeRO 3", "dp 2, ZeRO 2"]),
        (3, ["dp 3", "tp 3", "dp 3, ZeRO 1", "dp 3, ZeRO 3", "dp 3, ZeRO 2"]),
        (4, ["dp 4", "tp 2 x dp 2", "dp 4, ZeRO 1", "tp 4", "dp 4, ZeRO 3", "dp 4, ZeRO 2"]),
        (8, ["dp 8", "tp 2 x dp 4", "dp 8, ZeRO 1", "tp 4 x dp 2", "tp 8", "dp 8, ZeRO 3", "dp 8, ZeRO 2"]),
    ],
)
def test_every_layout_that_fits_is_there_once(gpus: int, expected: list[str]) -> None:
    found = layouts(gpus, None, deepspeed=True)
    assert [layout.label for layout in found] == expected
    assert {layout.gpus for layout in found} == {gpus}
    assert [layout.label for layout in layouts(gpus, None, deepspeed=False)] == [x for x in expected if "ZeRO" not in x]
    for layout in found:
        assert layouts(gpus, [layout.name], deepspeed=True) == [layout]


# -- communication -------------------------------------------------------------------------------------------------


def test_what_runs_alone_is_what_no_other_kernel_covers() -> None:
    """Held to counting every ns of random intervals, which overlap and touch."""
    drawn = random.Random(5)
    for _ in range(50):
        pairs = [[sorted(drawn.sample(range(60), 2)) for _ in range(drawn.randrange(6))] for _ in range(2)]
        exchanges, others = ([(begin, end) for begin, end in kind] for kind in pairs)
        sets = [{t for begin, end in kind for t in range(begin, end)} for kind in (exchanges, others)]
        found = exchange_times(exchanges, others)
        assert found["exchanging_ms"] == pytest.approx(len(sets[0]) / 1e6)
        assert found["alone_ms"] == pytest.approx(len(sets[0] - sets[1]) / 1e6)
        assert found["busy_ms"] == pytest.approx(len(sets[0] | sets[1]) / 1e6)
        joined = covered(exchanges)
        assert all(a[1] < b[0] for a, b in pairwise(joined))


# -- one config on one layout --------------------------------------------------------------------------------------


def test_every_layout_takes_the_same_sequences_and_one_gpu_the_work_of_a_replica(tiny_config: RunConfig) -> None:
    settings = settings_for(4)
    launches = [Launch.of("tiny", tiny_config, layout, settings) for layout in (ScalingLayout(1, 1), *settings.layouts)]
    assert {launch.mix.training.global_batch for launch in launches} == {2 * 2 * 4}
    plans = [[pretraining_plan(launch.config_of("mix"), step) for step in range(5)] for launch in launches]
    assert all(plan == plans[0] for plan in plans)
    assert launches[0].full.training.global_batch == 2 * 2
    assert {launch.full.training.global_batch for launch in launches[1:]} == {16}
    for launch in launches:
        sent = json.loads(json.dumps(config_to_mapping(launch.mix)))
        assert config_from_mapping(RunConfig, sent, "test") == launch.mix


def test_predictions_are_the_planners_own(tiny_config: RunConfig) -> None:
    config = dataclasses.replace(tiny_config, training=dataclasses.replace(tiny_config.training, precision="bf16"))
    rates = load_rates("h200")
    layout = ScalingLayout(2, 2)
    launch = Launch.of("tiny", config, layout, settings_for(4))
    plan = planning.Layout(gpus_per_node=4, tp=2)
    said = prediction.predict(launch.config_of("mix"), plan, rates)
    assert said.mix is not None
    assert launch.predicted("mix", rates)["ktok_per_s"] == said.mix.tokens_per_second / 1e3
    full = launch.predicted("full", rates)
    assert full["ktok_per_s"] == pytest.approx(said.tokens_per_second / 1e3)
    assert full["peak_mib"] == planning.memory(launch.config_of("full"), plan).before_moments / 2**20
    assert launch.predicted("full", None)["ktok_per_s"] is None


def test_imbalance_is_one_where_nobody_waits_and_more_for_more_replicas(tiny_config: RunConfig) -> None:
    settings = settings_for(4)
    shares = {
        layout: Launch.of("tiny", tiny_config, layout, settings).imbalance(3, 8)
        for layout in (ScalingLayout(4, 1), ScalingLayout(2, 2), ScalingLayout(1, 4), ScalingLayout(1, 4, 2))
    }
    whole, two, four, in_step = shares.values()
    assert whole == 1.0
    assert 1.0 < two < four
    assert in_step >= four


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_are_equal_within_the_tolerance_alone(precision: str) -> None:
    loss, norm = TOLERANCES[precision]
    steps = [{"loss": 5.0, "grad_norm": 2.0}, {"loss": 4.0, "grad_norm": 1.0}]

    def changed(key: str, by: float) -> list[dict[str, float]]:
        return [steps[0], {**steps[1], key: steps[1][key] * (1 + by)}]

    for key, most in (("loss", loss), ("grad_norm", norm)):
        assert compare(changed(key, 0.9 * most), steps, precision)["equal"]
        assert not compare(changed(key, -1.1 * most), steps, precision)["equal"]
        assert not compare(changed(key, float("nan")), steps, precision)["equal"]


# -- all of them ---------------------------------------------------------------------------------------------------


class Pretended:
    """A launcher whose launches take no time; `fate` says of a layout what becomes of it."""

    def __init__(self, fate: Callable[[RunConfig], str] = lambda config: "done", seconds: float = 0.0) -> None:
        self._fate, self._seconds = fate, seconds
        self.launched: list[tuple[int, int, bool, bool]] = []
        """(world, tensor, saves, resumes)"""

    def launch(self, task: Any, limit: float, following: int) -> Any:
        config = config_from_mapping(RunConfig, task.mix, "test")
        self.launched.append((task.world, config.parallel.tensor, task.save is not None, task.resume is not None))
        time.sleep(self._seconds)  # what the launch would take of the budget
        fate = self._fate(config)
        steps = [{"loss": 5.0, "grad_norm": 1.0}]
        row = {"ms_per_step": 100.0 / task.world, "all_ms": [], "tokens": 1000, "peak_mib": 10.0, "seconds": 0.0}
        row["peak_of"] = "allocations"
        yield {"part": "begun", "device": "pretended", "seconds": 0.0}
        yield {"part": "full", **row}
        ranks = [{"alone_ms": 1.0, "exchanging_ms": 2.0, "busy_ms": 9.0}, {"alone_ms": 3.0, "exchanging_ms": 4.0}]
        if task.world > 1:
            profile = None if fate == "unseen" else {"ms": 10.0, "ranks": ranks}
            yield {"part": "profile", "capacity": "full", "profile": profile}
        if fate == "fails":
            yield {"part": "end", "failure": "rank 1: RuntimeError: no memory", "late": False, "log": "its log"}
            return
        if fate == "hangs":
            yield {"part": "end", "failure": None, "late": True, "log": ""}
            return
        yield {"part": "mix", **row}
        yield {"part": "compared", "steps": steps if fate != "wrong" else [{"loss": 6.0, "grad_norm": 1.0}]}
        if task.save:
            path = f"{task.save}/step_00000006"
            yield {"part": "checkpoint", "path": path, "bytes": 5, "held_up_s": 0.1, "save_s": 1.0, "load_s": 0.5,
                   "steps": steps, "seconds": 0.05}  # fmt: skip
        if task.resume:
            assert task.resume.endswith("checkpoints/step_00000006")
            yield {"part": "resume", "load_s": 0.5, "steps": steps, "seconds": 1.0}
        yield {"part": "end", "failure": None, "late": False, "log": ""}


def pretend(config: RunConfig, folder: Path, launcher: Pretended, **changes: Any) -> tuple[Scaling, list[str]]:
    said: list[str] = []
    kept: list[dict[str, Any]] = []
    whole = Scaling(
        {"big": config, "small": config}, settings_for(4, **changes), say=said.append, keep=kept.append,
        begin=time.monotonic(),
    )  # fmt: skip
    whole.run(launcher, folder)
    json.dumps(kept)
    return whole, said


def test_every_config_is_measured_on_every_layout_the_important_first(tiny_config: RunConfig, tmp_path: Path) -> None:
    launcher = Pretended()
    whole, said = pretend(tiny_config, tmp_path, launcher)
    rows = list(whole.rows.values())
    assert [row["status"] for row in rows] == ["measured"] * 28
    assert [(row["config"], row["layout"]) for row in rows[:8:2]] == [
        ("big", "one"), ("small", "one"), ("big", "dp 4"), ("small", "dp 4"),
    ]  # fmt: skip
    assert launcher.launched[:6:2] == [(1, 1, False, False), (4, 1, True, False), (4, 2, True, True)]
    assert all(row["over_one_gpu"] == pytest.approx(row["gpus"]) for row in rows if row["gpus"] > 1)
    first = whole.rows[2, "full"]["communication"]
    assert first["share"] == pytest.approx(0.2)
    assert first["share_worst_rank"] == pytest.approx(0.3)
    assert first["exchanging"] == pytest.approx(0.3)
    assert first["beyond_one_gpu"] == pytest.approx(1 - 4)
    assert whole.rows[4, "full"]["communication"]["beyond_one_gpu"] is None  # tp: no step of one GPU is its work
    assert [check["config"] for check in whole.checks if "resumed" in check] == ["big", "small"]
    assert whole.unequal() == []
    assert whole.dropped() == []
    assert any("going on from dp 4's checkpoint: the same" in line for line in said)


@pytest.mark.parametrize("fate", ["fails", "hangs"])
def test_a_layout_that_fails_loses_no_other_and_says_why(tiny_config: RunConfig, tmp_path: Path, fate: str) -> None:
    launcher = Pretended(lambda config: fate if config.parallel.tensor == 2 else "done")
    whole, said = pretend(tiny_config, tmp_path, launcher)
    missing = [row for row in whole.rows.values() if row["status"] != "measured"]
    assert [(row["layout"], row["capacity"], row["status"]) for row in missing] == [
        ("tp 2 x dp 2", "mix", "failed")
    ] * 2
    why = {"fails": "rank 1: RuntimeError: no memory", "hangs": "not done in 180 s"}[fate]
    assert {row["reason"] for row in missing} == {why}
    assert sum(why in line for line in said) == 2


def test_losses_that_differ_are_told(tiny_config: RunConfig, tmp_path: Path) -> None:
    launcher = Pretended(lambda config: "wrong" if config.parallel.engine == "deepspeed" else "done")
    whole, said = pretend(tiny_config, tmp_path, launcher)
    expected = [f"{config} dp 4, ZeRO {stage}: steps" for stage in (1, 3, 2) for config in ("big", "small")]
    assert sorted(whole.unequal()) == sorted(expected)
    assert sum("NOT the same" in line for line in said) == 6


def test_a_device_whose_kernels_are_not_seen_has_no_share(tiny_config: RunConfig, tmp_path: Path) -> None:
    whole, said = pretend(tiny_config, tmp_path, Pretended(lambda config: "unseen"))
    talk = whole.rows[2, "full"]["communication"]
    assert talk["share"] is None
    assert talk["why_not"] in " ".join(said)


def test_the_least_important_is_dropped_when_the_budget_is_over(tiny_config: RunConfig, tmp_path: Path) -> None:
    launcher = Pretended(seconds=0.2)
    whole, _ = pretend(tiny_config, tmp_path, launcher, budget=5.0 + 1.1)  # five seconds are kept for the end
    status = [whole.rows[i, "full"]["status"] for i in range(14)]
    done = status.count("measured")
    assert 4 <= done <= 7
    assert status == ["measured"] * done + ["dropped"] * (14 - done)
    assert whole.dropped()[-1] in (
        "small dp 4, ZeRO 2 mix",
        "big tp 2 x dp 2 checkpoint",
        "small tp 2 x dp 2 checkpoint",
    )
    assert "small dp 4, ZeRO 2 full" in whole.dropped()
    assert "of --budget 6.1" in whole.rows[13, "mix"]["reason"]


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tiny_config: RunConfig, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    config = dataclasses.replace(tiny_config, training=dataclasses.replace(tiny_config.training, device="cpu"))
    path.write_text(yaml.safe_dump(config_to_mapping(config)))
    return path


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--layout", "pp2"], "--layout 'pp2': expected one of dp, tp2"),
        (["--processes", "3", "--layout", "tp2"], "--layout tp2: tp 2 is no layout of 3 GPUs here; use one of dp, tp3"),
        (["--processes", "1"], "--processes 1: 1 process, and scaling needs 2 or more"),
        (["--budget", "10"], "--budget 10: at least 30"),
        (["--budget", "nan"], "--budget nan: at least 30"),
        (["--json", "nowhere/figures.json"], "--json nowhere/figures.json: there is no folder nowhere; make it first"),
        (["--scratch", "nowhere"], "--scratch nowhere: there is no folder nowhere"),
        (["--accumulation", "0"], "--accumulation 0: at least 1"),
        (["--gpu", "v100"], "GPU 'v100'"),
        (["--set", "elastic.enabled=false"], "elastic.enabled is false"),
        (["--set", "model.width=3"], "width"),
    ],
)
def test_what_cannot_be_is_one_error(command: Callable[..., Any], written: Path, words: list[str], error: str) -> None:
    done = command("tools/benchmark.py", "scaling", written, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert error in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_config_is_named_once_and_one_gpu_does_not_scale(command: Callable[..., Any], written: Path) -> None:
    done = command("tools/benchmark.py", "scaling", written, written)
    assert (done.returncode, "called tiny is given already" in done.stderr) == (2, True)
    with pytest.raises(UserError, match="at least 2"):
        layouts(1, None, deepspeed=True)


@pytest.mark.slow
def test_two_processes_are_measured_and_take_one_process_steps(
    command: Callable[..., Any], written: Path, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    words = ["--accumulation", 1, "--steps", 2, "--layout", "dp", "--layout", "tp2", "--json", figures]
    words += ["--scratch", tmp_path, "--set", "optimizer.learning_rate=0.01"]
    done = command("tools/benchmark.py", "scaling", written, "--processes", 2, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(figures.read_text())
    assert [row["status"] for row in content["rows"]] == ["measured"] * 6
    assert all(row["ktok_per_s"] == pytest.approx(row["tokens"] / row["ms_per_step"]) for row in content["rows"])
    one, replicas, shared = content["launches"]
    for launch in (replicas, shared):
        assert launch["verified"]["equal"]
        assert launch["verified"]["loss_difference"] < TOLERANCES["fp32"][0]
        assert launch["checkpoint"]["bytes"] > 0
    losses = [step["loss"] for step in one["compared"]["steps"]]
    assert losses[-1] < 0.999 * losses[0]  # what is compared has been trained
    assert shared["resumed"]["equal"]
    assert shared["resumed"]["from"] == "dp 2"
    assert content["dropped"] == content["unequal"] == []
    assert "busiest" in done.stdout
    assert [path.name for path in tmp_path.glob("scaling-*")] == []


@pytest.mark.slow
def test_a_layout_that_breaks_says_why(
    command: Callable[..., Any], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO's settings are no JSON: the layout alone fails, in its processes. They start while others are measured."""
    monkeypatch.setattr(scaling_processes, "CORES_A_RANK", 0)
    broken, figures = tmp_path / "zero.json", tmp_path / "figures.json"
    broken.write_text("{")
    config = yaml.safe_load(written.read_text())
    config["parallel"] |= {"engine": "deepspeed", "deepspeed_config": str(broken)}
    written.write_text(yaml.safe_dump(config))
    words = ["--accumulation", 1, "--steps", 1, "--layout", "dp", "--layout", "zero1", "--json", figures]
    done = command("tools/benchmark.py", "scaling", written, "--processes", 2, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [row["status"] for row in rows] == ["measured"] * 4 + ["failed"] * 2
    assert all("no JSON" in row["reason"] for row in rows[4:])
