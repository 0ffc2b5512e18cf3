"""The drift benchmark sees what a step does wrong, calls growth a drift, and keeps few logits at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron_essh.benchmarks import drift as benchmark
from megatron_essh.benchmarks.decoding import random_model
from megatron_essh.benchmarks.decoding_plot import draw_drift
from megatron_essh.benchmarks.drift import DriftCase, drift_cases, measure_drift, strengthen
from megatron_essh.config import RunConfig
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel

CASE = DriftCase("T4", 2, length=72, prompt=4)


def quiet(line: str) -> None:
    """Progress is not looked at."""


@pytest.fixture
def model(tiny_config: RunConfig) -> LanguageModel:
    model = random_model(tiny_config, torch.device("cpu"))
    strengthen(model, seed=3)
    return model


def measured(model: LanguageModel, config: RunConfig, **settings: Any) -> dict[str, Any]:
    (row,) = measure_drift(model, config, [settings.pop("case", CASE)], say=quiet, **settings)
    return row


def test_what_is_looked_at_where_nothing_is_asked_for(tiny_config: RunConfig) -> None:
    assert drift_cases(tiny_config, ["T1", "T10"], [1, 3], None, None) == [
        DriftCase(tier, batch, length=8 + 4096, prompt=4) for tier in ("T1", "T10") for batch in (1, 3)
    ]
    (case,) = drift_cases(tiny_config, ["T1"], [1], 100, 50)
    assert (case.length, case.prompt) == (100, 50)
    no_window = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, window=None))
    (case,) = drift_cases(no_window, ["T1"], [1], None, None)
    assert (case.length, case.prompt) == (12 + 4096, 12)  # half of the config's sequences
    with pytest.raises(UserError, match=r"--length 39: .* to 40 or more"):
        drift_cases(tiny_config, ["T1"], [1], 39, None)
    with pytest.raises(UserError, match="--context 0"):
        drift_cases(tiny_config, ["T1"], [1], None, 0)


def test_right_steps_are_near_in_every_kind_of_weights(model: LanguageModel, tiny_config: RunConfig) -> None:
    row = measured(model, tiny_config, weights=["bf16", "fp32", "int8"])
    lines = ["bf16 forward", "bf16 steps", "fp32 steps", "int8 steps"]
    assert list(row["errors"]) == list(row["verdicts"]) == lines
    assert (row["capacity"], row["batch"], row["length"], row["prompt"], row["window"]) == ("T4", 2, 72, 4, 8)
    assert row["positions"] == list(range(4, 72))  # as many bins as positions
    noise, bf16, fp32, int8 = (row["verdicts"][line] for line in lines)
    assert 0 < fp32["highest"] < 1e-5 < 1e-3 < noise["error"] < 0.05
    assert fp32["near"] is bf16["near"] is True
    assert bf16["over_noise"] == pytest.approx(bf16["error"] / noise["error"])
    assert bf16["error"] < int8["error"]
    assert noise["over_noise"] is fp32["over_noise"] is noise["near"] is int8["near"] is None
    # a position to a bin: what is told of all positions past the window is what the bins are
    past = [e for p, e in zip(row["positions"], row["errors"]["fp32 steps"], strict=True) if p >= 8]
    assert fp32["error"] == pytest.approx(math.sqrt(sum(e * e for e in past) / len(past)))
    first, last = (math.sqrt(sum(e * e for e in part) / 16) for part in (past[:16], past[-16:]))
    assert fp32["last_to_first"] == pytest.approx(last / first)
    assert fp32["highest"] == pytest.approx(max(row["errors"]["fp32 steps"]))


def test_the_errors_are_those_of_the_whole_models_logits(
    model: LanguageModel, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = measured(model, tiny_config)
    generator = torch.Generator().manual_seed(tiny_config.training.seed)
    tokens = torch.randint(0, 264, (2, 72), generator=generator)
    capacity = benchmark.parse_capacity("T4", tiny_config.model, tiny_config.elastic)
    with torch.no_grad():
        exact = model(tokens, capacity)[:, 4:]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens, capacity)[:, 4:]
        rounded = hidden.float() @ model.head_weight.bfloat16().float().T
    expected = ((rounded - exact).square().sum((0, 2)) / exact.square().sum((0, 2))).sqrt()
    torch.testing.assert_close(torch.tensor(row["errors"]["bf16 forward"]), expected, rtol=1e-3, atol=0)
    # However few logits and sequences are there at a time.
    monkeypatch.setattr(benchmark, "BLOCK_ELEMENTS", 7 * 2 * 264)
    monkeypatch.setattr(benchmark, "FORWARD_TOKENS", 1)
    blocked = measured(model, tiny_config)
    for line, errors in row["errors"].items():
        assert blocked["errors"][line] == pytest.approx(errors, rel=0.2 if line == "fp32 steps" else 1e-2)


def test_no_more_than_a_block_of_logits_is_there_at_a_time(
    model: LanguageModel, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch, largest_tensor: Any
) -> None:
    monkeypatch.setattr(benchmark, "BLOCK_ELEMENTS", 6 * 2 * 264)
    long = dataclasses.replace(CASE, tier="T1", length=400)
    with largest_tensor() as largest:
        measured(model, tiny_config, case=long, weights=["fp32"])
    assert largest.elements < 2 * 300 * 264


@pytest.mark.parametrize("fault", ["states", "position", "keys", "growing"])
def test_what_a_step_does_wrong_is_seen(
    model: LanguageModel, tiny_config: RunConfig, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = benchmark.run
    steps = 0

    def wrong(weights: Any, state: Any, token_B: Any, slot_B: Any, buffers: Any) -> None:
        nonlocal steps
        step(weights, state, token_B, slot_B, buffers)
        steps += 1
        if fault == "states":
            state.spectral_LSKM2P.mul_(0.999)
        elif fault == "position" and steps == 1:
            state.position_S.add_(1)
        elif fault == "keys":
            state.keys_LSHWE[:, :, :, 3].mul_(0.99)
        elif fault == "growing":
            buffers.logits_BV.mul_(1 + 1e-4 * steps)

    monkeypatch.setattr(benchmark, "run", wrong)
    row = measured(model, tiny_config, weights=["fp32"])
    verdict = row["verdicts"]["fp32 steps"]
    assert verdict["highest"] > 1e-4
    assert verdict["near"] is False
    assert verdict["drifts"] or fault != "growing"
    if fault == "growing":  # past the window are steps 5 to 68; an error is as large as its step's number
        first, last = (math.sqrt(sum(n * n for n in range(a, a + 16))) for a in (5, 53))
        assert verdict["last_to_first"] == pytest.approx(last / first, rel=0.01)
        assert verdict["slope"] > 10 * verdict["slope_deviation"] > 0


def test_growth_of_both_is_no_drift_of_the_steps(
    model: LanguageModel, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bf16 itself gets worse with length, steps in bf16 may too."""
    squares = {"bf16 forward": torch.linspace(1, 9, 100) ** 2, "fp32 steps": torch.linspace(1, 9, 100) ** 2}
    squares["bf16 steps"] = squares["bf16 forward"] * 1.2**2
    noise, fp32, bf16 = (benchmark._verdict(line, squares, 0) for line in squares)
    assert noise.last_to_first == pytest.approx(fp32.last_to_first) == pytest.approx(bf16.last_to_first)
    assert noise.drifts
    assert fp32.drifts
    assert not bf16.drifts
    assert bf16.growth == pytest.approx(1)
    assert bf16.over_noise == pytest.approx(1.2)
    assert bf16.near


def test_a_slope_is_that_of_the_logarithm() -> None:
    errors = torch.exp(0.3 * torch.arange(4000) / 1000)
    slope, deviation = benchmark._slope(errors.square())
    assert slope == pytest.approx(0.3, rel=1e-3)
    assert deviation < 1e-3


def test_every_part_of_a_strengthened_model_shows_in_the_logits(model: LanguageModel, tiny_config: RunConfig) -> None:
    tokens = torch.randint(0, 264, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(tokens)
        for name, parameter in model.named_parameters():
            kept = parameter.clone()
            parameter.mul_(1.01)
            change = (model(tokens) - exact).norm() / exact.norm()
            parameter.copy_(kept)
            assert change > 1e-5, name


def test_weights_that_give_nothing_finite_are_said(model: LanguageModel, tiny_config: RunConfig) -> None:
    model.final_norm.weight[3] = torch.inf
    with pytest.raises(UserError, match="T4, bf16 forward: logits are not finite"):
        measured(model, tiny_config)


def test_the_picture_has_a_panel_a_case(model: LanguageModel, tiny_config: RunConfig) -> None:
    row = measured(model, tiny_config, weights=["fp32"])
    picture = draw_drift([row], "title")
    assert picture.startswith(b"\x89PNG")
    assert draw_drift([row], "title") == picture
    exact = row | {"errors": {"fp32 steps": [0.0] * len(row["positions"])}, "window": None}
    assert len(draw_drift([row, row, exact], "title")) > len(picture)
