"""The decoding benchmark counts what it says it counts, and its two ways compute the same."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_essh.benchmarks import decoding as benchmark
from megatron_essh.benchmarks.decoding import (
    DecodeCase,
    DecodeTiming,
    decode_cases,
    end_tiers,
    measure_decoding,
    moved_bytes,
)
from megatron_essh.benchmarks.decoding_plot import draw
from megatron_essh.config import RunConfig, load_config
from megatron_essh.elastic.capacity import tier_capacities
from megatron_essh.errors import UserError
from megatron_essh.inference.packing import new_decode_state, pack_model
from megatron_essh.model.accounting import parameter_counts, state_bytes, window_kv_bytes
from megatron_essh.model.language_model import LanguageModel

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
QUICK = DecodeTiming(warmup=1, steps=3, repeats=3)


def quiet(line: str) -> None:
    """Progress is not looked at."""


def test_what_is_measured_where_nothing_is_asked_for(tiny_config: RunConfig) -> None:
    def pairs(device: torch.device, **asked: Any) -> list[tuple[str, int]]:
        return [(case.tier, case.batch) for case in decode_cases(tiny_config, device, **asked)]

    assert pairs(CPU) == [("T10", 1), ("T1", 1)]
    assert pairs(CUDA) == [("T10", 1), ("T10", 16), ("T10", 128), ("T10", 512), ("T1", 1)]
    assert pairs(CUDA, batches=[1]) == [("T10", 1), ("T1", 1)]
    assert pairs(CUDA, tiers=["T4"], batches=[2, 3]) == [("T4", 2), ("T4", 3)]
    (case,) = decode_cases(tiny_config, CPU, tiers=["T4"])
    assert case == DecodeCase("T4", 1, context=8, weights="bf16")  # the window
    cases = decode_cases(tiny_config, CPU, tiers=["T4"], contexts=[5, 6], weights=["int8", "fp32"])
    assert [(c.weights, c.context) for c in cases] == [("int8", 5), ("int8", 6), ("fp32", 5), ("fp32", 6)]


def test_a_small_export_is_measured_at_the_ends_of_what_it_holds(tiny_config: RunConfig) -> None:
    def ends(channels: int, ff_width: int) -> list[str]:
        cut = dataclasses.replace(
            tiny_config.model, channels=channels, ff_width=ff_width, family_channels=6, family_ff_width=192
        )
        return end_tiers(dataclasses.replace(tiny_config, model=cut))

    tiers = tier_capacities(tiny_config.model, tiny_config.elastic)
    for name in ("T1", "T3", "T6"):
        largest, *smallest = ends(tiers[name].channels, tiers[name].ff_width)
        assert tiers[largest] == tiers[name]
        assert smallest == ([] if name == "T1" else ["T1"])
    assert ends(5, 70) == ["full", "T1"]


@pytest.mark.parametrize("context", [0, 5, 8, 21])
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "fp8"])
def test_a_row_is_of_the_same_function_as_the_models_own_step(
    context: int, weights: benchmark.Weights, tiny_config: RunConfig, random_model: Callable[..., LanguageModel]
) -> None:
    model = random_model(tiny_config.model)
    case = DecodeCase("T4", 3, context, weights)
    (row,) = measure_decoding(model, tiny_config, [case], QUICK, bandwidth=1e9, say=quiet)
    assert row["logits_difference"] < {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1, "fp8": 0.2}[weights]
    assert len(row["eager_all_ms"]) == len(row["control_all_ms"]) == 3
    assert row["median_ms"] == row["eager_ms"] == statistics.median(row["eager_all_ms"]) > 0
    assert row["control_ms"] == statistics.median(row["control_all_ms"]) > 0
    assert row["tokens_per_second"] == pytest.approx(3e3 / row["median_ms"])
    assert row["floor_ms"] == pytest.approx(sum(row["moved_bytes"].values()) / 1e9 * 1e3)
    assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["median_ms"])
    assert row["graph_ms"] is row["kernels"] is row["control_graph_ms"] is None  # no GPU


def test_a_run_has_its_steps_and_begins_at_the_context(
    tiny_config: RunConfig, random_model: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    positions: list[list[int]] = []
    step = benchmark.run

    def watched(weights: Any, state: Any, *rest: Any) -> None:
        positions.append(state.position_S.tolist())
        step(weights, state, *rest)

    monkeypatch.setattr(benchmark, "run", watched)
    model, case = random_model(tiny_config.model), DecodeCase("T1", 2, 6, "fp32")
    (row,) = measure_decoding(model, tiny_config, [case], QUICK, bandwidth=None, control=False, say=quiet)
    assert positions == [[p, p] for p in [6, 6, *[6, 7, 8] * 3]]  # the logits' step, a warm-up, three runs
    assert row["floor_ms"] is row["floor_share"] is None
    assert "control_ms" not in row


def test_attention_over_the_whole_input_has_room_for_every_step(
    tiny_config: RunConfig, random_model: Callable[..., LanguageModel]
) -> None:
    config = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, window=None))
    model = random_model(config.model)
    (row,) = measure_decoding(model, config, [DecodeCase("T10", 2, 9, "fp32")], QUICK, bandwidth=1e9, say=quiet)
    assert row["logits_difference"] < 1e-5


def test_weights_that_give_nothing_finite_are_said(
    tiny_config: RunConfig, random_model: Callable[..., LanguageModel]
) -> None:
    model = random_model(tiny_config.model)
    model.final_norm.weight[3] = torch.inf
    with pytest.raises(UserError, match="T1, bf16 weights: a step's logits are not finite"):
        measure_decoding(model, tiny_config, [DecodeCase("T1", 1, 4)], QUICK, bandwidth=None, say=quiet)
    with pytest.raises(UserError, match="capacity 'T11'"):
        measure_decoding(model, tiny_config, [DecodeCase("T11", 1, 4)], QUICK, bandwidth=None, say=quiet)


@pytest.mark.parametrize("tier", ["T1", "T10"])
def test_what_must_move_is_each_weight_once_and_each_sequences_states_and_seen_keys(
    tier: str, tiny_config: RunConfig, random_model: Callable[..., LanguageModel]
) -> None:
    shape = tiny_config.model
    capacity = tier_capacities(shape, tiny_config.elastic)[tier]
    weights = pack_model(random_model(shape), capacity, torch.float32)
    state = new_decode_state(shape, capacity, 5)
    moved = moved_bytes(weights, state, 5, context=100)
    # nine tables of m a channel are read where eight are stored: cosine and sine are two
    extra = len(shape.spectral_layers) * capacity.channels * shape.modes
    assert moved.weights == 4 * (parameter_counts(shape, capacity).total + extra + 5 * shape.d_model)
    assert moved.spectral == 5 * 2 * state_bytes(shape, capacity)
    assert moved.keys_values == 5 * window_kv_bytes(shape)
    short = moved_bytes(weights, state, 5, context=2)
    assert short.keys_values == moved.keys_values * 3 // 8  # the token's own among three keys of a window of eight
    quantized = moved_bytes(pack_model(random_model(shape), capacity, torch.float32, "int8"), state, 5, context=100)
    assert quantized.weights < moved.weights / 2


def test_the_floors_of_the_documentation_are_those_of_the_arithmetic() -> None:
    page = (ROOT / "docs/decoding.md").read_text()
    rows = re.findall(r"^\| (1.53B|370M) (T\d+), batch (\d+) \|.*\| ([\d.]+) ms \| ([\d,]+) \|$", page, re.M)
    assert len(rows) == 7
    for name, tier, batch, ms, rate in rows:
        config = load_config(ROOT / f"configs/models/{'1p5b' if name == '1.53B' else '370m'}.yaml", [])
        shape, capacity = config.model, tier_capacities(config.model, config.elastic)[tier]
        carried = 2 * state_bytes(shape, capacity) + window_kv_bytes(shape)
        seconds = (2 * parameter_counts(shape, capacity).total + int(batch) * carried) / 4.3e12
        assert abs(1e3 * seconds - float(ms)) < 0.006, (name, tier, batch)
        assert int(batch) / seconds == pytest.approx(int(rate.replace(",", "")), rel=4e-4)


def test_the_picture_shows_what_was_measured(tiny_config: RunConfig) -> None:
    row = {"capacity": "T10", "weights": "bf16", "batch": 1, "context": 8, "graph_ms": 1.0, "eager_ms": 2.0}
    rows = [row | {"floor_ms": 0.5, "control_ms": 9.0}, row | {"floor_ms": None, "graph_ms": None}]
    picture = draw(rows, "title")
    assert picture.startswith(b"\x89PNG")
    assert draw(rows, "title") == picture
    assert draw([row | {"floor_ms": 0.7, "control_ms": 9.0}, rows[1]], "title") != picture


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 40])
def test_on_a_gpu_both_ways_are_recorded_and_kernels_counted(
    batch: int, tiny_config: RunConfig, random_model: Callable[..., LanguageModel]
) -> None:
    shape = dataclasses.replace(tiny_config.model, d_model=128, head_dim=64, value_width=28, modes=8, window=64)
    config = dataclasses.replace(tiny_config, model=shape)
    model = random_model(shape).to("cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "mixer." not in name:
                parameter.mul_(0.3)
    (row,) = measure_decoding(model, config, [DecodeCase("T10", batch, 64)], QUICK, bandwidth=4.3e12, say=quiet)
    assert row["median_ms"] == row["graph_ms"] > 0
    assert row["control_graph_ms"] is not None, row["control_graph_failed"]
    assert row["kernels"] >= 4 * shape.n_layers
    assert row["logits_difference"] < 0.05
    assert row["weights_mib"] < row["peak_mib"] < 512
