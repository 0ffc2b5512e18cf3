"""tools/tune_kernels.py: what it plans, which candidates it takes, what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megatron_essh.benchmarks.tuning import (
    HARNESSES,
    Inputs,
    Judge,
    Outcome,
    Work,
    candidates,
    chosen_together,
    import_kernels,
    tune_kernel,
)
from megatron_essh.config import RunConfig, config_to_mapping
from megatron_essh.errors import UserError
from megatron_essh.ops import tuning
from megatron_essh.ops.tuning import Options, Table, declare, options, overriding, read_table, write_table

CPU = torch.device("cpu")
KERNEL = "window_attention.fake"  # an operator that there is, a kernel that there is not


# -- accepting and rejecting -----------------------------------------------------------------------------------------


def exact(x: Tensor) -> dict[str, Tensor]:
    return {"y": x.square()}


class Fake:
    """x^2, right for 1 and 2 warps; every other count has a fault of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        warps = options(KERNEL, x.device, width=8)["num_warps"]
        y = x.square()
        if warps == 4:
            y = y * (1.01 if x.dtype == torch.bfloat16 else 1)
        elif warps == 8:
            raise RuntimeError("out of resource: shared memory\nRequired: 1, Hardware limit: 0")
        elif warps == 16:
            y = y * (1 + 1e-6 * (self.calls % 2))  # within the tolerance, but another at every call
        elif warps == 32:
            y = y + 0.01 * (x - x.detach())  # the right value with a wrong gradient
        elif warps == 64:
            y = torch.where(torch.arange(x.numel()) == 0, torch.nan, y)
        return {"y": y}


REASONS = {
    4: "y, bfloat16: off by 0.01",
    8: "RuntimeError: out of resource: shared memory",
    16: "y, float32: not the same bits twice",
    32: "gradient of x, float32: off by",
    64: "y, bfloat16: off by nan",
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Work on one declared kernel whose launches are `Fake`'s."""
    for name in ("_kernels", "_tables", "_found", "_overrides"):
        monkeypatch.setattr(tuning, name, {})
    defaults = {"num_warps": 1, "num_stages": 1}
    warps = (1, 2, 4, 8, 16, 32, 64)
    declare(KERNEL, shape_class=("width",), defaults=defaults, choices={"num_warps": warps, "num_stages": (1,)})

    def small(seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        return {"x": torch.randn(50, generator=torch.Generator().manual_seed(seed)).to(device, dtype)}

    def real(device: torch.device) -> Inputs:
        raise AssertionError("nothing is timed at real size here")

    return Work(operator="window_attention", sizes={"width": 8}, call=Fake(), reference=exact, small=small, real=real)


def tune(work: Work, microseconds: dict[int, float], most: int = 99) -> tuple[Outcome, list[str]]:
    """The outcome where each count of warps takes these times, and what was said."""

    def clock(work: Work, kernel: str, tried: Sequence[Options]) -> list[float]:
        return [microseconds[o["num_warps"]] for o in tried]

    (kernel,) = work.kernels()
    said: list[str] = []
    return tune_kernel(work, kernel, Judge(work, CPU), CPU, clock, most=most, say=said.append), said


def test_a_wrong_candidate_is_rejected_with_its_reason_however_fast_and_the_fastest_right_one_taken(fake: Work) -> None:
    outcome, said = tune(fake, {1: 10.0, 2: 8.0})  # the clock knows no time of a wrong one
    assert (outcome.current["num_warps"], outcome.current_us) == (1, 10.0)
    assert (outcome.best["num_warps"], outcome.best_us) == (2, 8.0)
    assert outcome.tried == 6
    reasons = {o["num_warps"]: reason for o, reason in outcome.rejected}
    assert reasons.keys() == REASONS.keys()
    for warps, reason in REASONS.items():
        assert reasons[warps].startswith(reason)
        assert "\n" not in reasons[warps]
    assert len(said) == 6
    assert all(str(o) in line for (o, _), line in zip(outcome.rejected, said[1:], strict=True))  # said before it ran


@pytest.mark.parametrize(("second_us", "best"), [(9.9, 1), (10.0, 1), (11.0, 1), (9.7, 2)])
def test_other_options_must_save_more_than_noise(fake: Work, second_us: float, best: int) -> None:
    outcome, _ = tune(fake, {1: 10.0, 2: second_us})
    assert outcome.best["num_warps"] == best
    assert outcome.best_us == (10.0 if best == 1 else second_us)


def test_an_operator_that_is_wrong_under_its_present_options_cannot_be_tuned(fake: Work) -> None:
    with overriding({KERNEL: {"num_warps": 4}}), pytest.raises(UserError, match="wrong under its present options"):
        tune(fake, {})


def test_options_good_one_by_one_are_held_to_the_reference_and_the_clock_together(fake: Work) -> None:
    judge, (outcome, _) = Judge(fake, CPU), tune(fake, {1: 10.0, 2: 8.0})

    def times(seconds: float) -> Callable[[Sequence[dict[str, Options]]], list[float]]:
        return lambda choices: [10.0 if choice[KERNEL]["num_warps"] == 1 else seconds for choice in choices]

    assert chosen_together(fake, judge, [outcome], times(9.0)) is None
    slower = chosen_together(fake, judge, [outcome], times(11.0))
    assert slower == "a whole pass takes 11 us with them, 10 us without"
    wrong = Outcome(KERNEL, {"width": 8}, outcome.current, 10.0, {"num_warps": 4, "num_stages": 1}, 1.0, 1, ())
    assert str(chosen_together(fake, judge, [wrong], times(1.0))).startswith("y, bfloat16: off by")


def test_candidates_go_from_near_to_far_up_to_a_bound_and_pipeline_only_where_allowed(fake: Work) -> None:
    choices = {"BLOCK": (16, 32), "num_warps": (1, 2), "num_stages": (1, 2)}
    current = {"BLOCK": 16, "num_warps": 1, "num_stages": 1}
    declare("window_attention.second", shape_class=(), defaults=current, choices=choices)
    kernel = tuning.declared()["window_attention.second"]
    found, left_out = candidates(kernel, current, (9, 0), 99)
    assert (len(found), left_out) == (7, 0)
    differences = [sum(o[name] != current[name] for name in choices) for o in found]
    assert differences == [1, 1, 1, 2, 2, 2, 3]
    assert candidates(kernel, current, (9, 0), 4) == (found[:4], 3)
    on_blackwell, _ = candidates(kernel, current, (10, 3), 99)
    assert len(on_blackwell) == 3
    assert all(o["num_stages"] == 1 for o in on_blackwell)


def test_what_was_found_is_written_and_then_looked_up(
    fake: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, _ = tune(fake, {1: 10.0, 2: 8.0})
    made = {"torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-30", "command": "python tools/tune_kernels.py"}
    write_table(tmp_path / "mine.json", Table("NVIDIA H200", (9, 0), made, {KERNEL: (outcome.entry,)}))
    monkeypatch.setattr(tuning, "_describe", lambda device: ("NVIDIA H200", (9, 0)))
    monkeypatch.setenv(tuning.USER_TABLE, str(tmp_path / "mine.json"))
    assert options(KERNEL, torch.device("cuda", 0), width=8) == {"num_warps": 2, "num_stages": 1}
    assert options(KERNEL, torch.device("cuda", 0), width=16) == {"num_warps": 1, "num_stages": 1}


@pytest.mark.parametrize("operator", sorted(HARNESSES))
def test_a_harness_calls_its_operator_as_it_is_and_finds_it_right(operator: str, tiny_config: RunConfig) -> None:
    for work in HARNESSES[operator](tiny_config):
        assert Judge(work, CPU).fault() is None


@pytest.mark.parametrize("operator", sorted(HARNESSES))
def test_a_harness_knows_the_sizes_that_its_kernels_declare(operator: str, tiny_config: RunConfig) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    import_kernels([operator])
    works = HARNESSES[operator](tiny_config)
    known = {kernel.name for work in works for kernel in work.kernels()}
    assert known == {name for name in tuning.declared() if name.startswith(f"{operator}.")}
    for work in works:
        for kernel in work.kernels():
            assert kernel.default(work.shape_class(kernel), None)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(command: Callable[..., Any], tiny_config: RunConfig, tmp_path: Path) -> Callable[..., Any]:
    """Runs it on the tiny model with the given words behind the config."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_to_mapping(tiny_config)))
    return lambda *words: command("tools/tune_kernels.py", path, *words)


def test_a_dry_run_prints_every_kernel_and_class_once_and_writes_nothing(
    tool: Callable[..., Any], tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text((tmp_path / "config.yaml").read_text().replace("vocab_size: 264", "vocab_size: 2000"))
    done = tool(other, "--dry-run", "--output", tmp_path / "table.json")
    assert done.returncode == 0, done.stderr
    for kernel in ("cross_entropy", "distillation", "refinement"):
        lines = [line for line in done.stdout.splitlines() if f"linear_loss.{kernel} " in line]
        assert ["columns=512" in line for line in lines] == [True, False]
        assert "columns=2048" in lines[1]
    assert not (tmp_path / "table.json").exists()


def test_only_the_kernels_asked_for_and_no_more_candidates_than_asked_for(tool: Callable[..., Any]) -> None:
    done = tool("--dry-run", "--kernel", "linear_loss.refinement", "--most", 3)
    lines = [line.split() for line in done.stdout.splitlines() if "linear_loss" in line]
    assert [words[0] for words in lines] == ["linear_loss.refinement"]
    assert lines[0][-3:-1] == ["3", "of"]
    assert int(lines[0][-1]) > 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run", "--kernel", "linear_loss.fake"], "--kernel linear_loss.fake: no such kernel; there are"),
        (["--dry-run", "--most", 0], "--most 0: at least 1"),
    ],
)
def test_words_that_mean_nothing_are_one_line(tool: Callable[..., Any], words: list[object], said: str) -> None:
    done = tool(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tool: Callable[..., Any], tmp_path: Path) -> None:
    done = tool("--output", tmp_path / "table.json")
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_a_small_run_writes_a_table_that_the_kernels_take(tool: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    words = ["--kernel", "linear_loss.cross_entropy", "--most", 2, "--set", "training.precision=bf16"]
    done = tool("--output", path, *words)
    assert done.returncode == 0, done.stderr
    table = read_table(path)
    tuning.check_operator(path, table, "linear_loss")
    (found,) = table.kernels["linear_loss.cross_entropy"]
    assert found.shape_class == {"columns": 512}
    assert found.microseconds > 0
    assert json.loads(path.read_text())["made"]["torch"] == torch.__version__
    again = tool("--output", path, *words)
    assert again.returncode == 2
    assert "--force" in again.stderr
