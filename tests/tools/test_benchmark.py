"""tools/benchmark.py as a user runs it, on a tiny model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_essh.baselines.transformer import matched_config, transformer_parameters
from megatron_essh.config import RunConfig, config_to_mapping

CPU = "training.device=cpu"

Bench = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def bench(command: Callable[..., Any], tiny_config: RunConfig, tmp_path: Path) -> Bench:
    """Runs it with the given words, the config last, and returns its figures and what it printed."""

    def run(*words: object, expect: int = 0) -> tuple[dict[str, Any], str]:
        path, figures = tmp_path / "config.yaml", tmp_path / "figures.json"
        path.write_text(yaml.safe_dump(config_to_mapping(tiny_config)))
        done = command("tools/benchmark.py", *words, "--json", figures, path)
        assert done.returncode == expect, done.stderr
        if expect:
            return {}, done.stderr
        return json.loads(figures.read_text()), done.stdout

    return run


@pytest.mark.parametrize("vocabulary", [264, 1])
def test_it_measures_scan_and_both_kinds_of_step_for_any_vocabulary(bench: Bench, vocabulary: int) -> None:
    figures, printed = bench(
        "all",
        "--set",
        f"model.vocab_size={vocabulary}",
        CPU,
        "--repeats",
        2,
        "--warmup",
        0,
        "--steps",
        3,
        "--measure",
        "2-3",
    )
    assert [row["what"] for row in figures["scan"]] == ["scan, forward", "scan, forward + backward"]
    for row in figures["scan"]:
        assert len(row["all_ms"]) == 2
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["what"] in printed
    assert [(row["model"], row["capacity"]) for row in figures["train"]] == [("essh", "full"), ("essh", "elastic")]
    for row in figures["train"]:
        assert len(row["all_ms"]) == 2
        assert all(len(run) == 3 and min(run) > 0 for run in row["all_ms"])
        means = [statistics.fmean(run[1:3]) for run in row["all_ms"]]
        assert row["ms_per_step"] == pytest.approx(statistics.median(means))
        assert row["ktok_per_s"] == pytest.approx(2 * 24 / row["ms_per_step"])
    assert figures["ratios"] == {
        "essh elastic / essh full": figures["train"][1]["ktok_per_s"] / figures["train"][0]["ktok_per_s"]
    }


def test_both_models_run_beside_each_other_with_their_ratio_and_parts(bench: Bench, tiny_config: RunConfig) -> None:
    words = ["--model", "both", "--capacity", "full", "--steps", 2, "--repeats", 1]
    figures, printed = bench(
        "train", "--set", "model.vocab_size=96", CPU, *words, "--micro-batch", 3, "--accumulation", 2
    )
    ours, theirs = figures["train"]
    assert (ours["model"], theirs["model"]) == ("essh", "transformer_pp")
    for row in (ours, theirs):
        assert (row["micro_batch"], row["accumulation"]) == (3, 2)
        assert row["ktok_per_s"] == pytest.approx(6 * 24 / row["ms_per_step"])
        tokens_per_second = 1e3 * row["ktok_per_s"]
        assert row["tflops_6n"] == pytest.approx(6 * row["parameters"] * tokens_per_second / 1e12)
        assert row["mfu"] is None
        assert sum(part["ms"] for part in row["parts"]) == pytest.approx(row["ms_per_step"])
        assert f"{row['parameters']:,} parameters" in printed
    assert "no MFU: no fp32 peak is on record" in printed
    assert figures["ratios"] == {"essh full / transformer_pp": ours["ktok_per_s"] / theirs["ktok_per_s"]}
    named = {part["part"] for part in ours["parts"]}
    assert named - {part["part"] for part in theirs["parts"]} == {"mixer projections", "scan", "unit statistics"}
    assert named >= {"embedding, head, loss", "attention", "feed-forward", "clip and optimizer", "rest"}
    # the whole input is seen by every one of the 3 layers: 25 / 2 keys a token, 4 d forward and 8 d backward each
    per_token = theirs["tflops_attention"] / theirs["ktok_per_s"] * 1e9
    assert per_token == pytest.approx(3 * 12 * 32 * 25 / 2)
    matched = matched_config(tiny_config.model)
    assert theirs["parameters"] == transformer_parameters(matched).total - (264 - 96) * 32


def test_a_tiers_steps_count_the_tier_and_its_teacher(bench: Bench) -> None:
    few = ["--set", CPU, "--steps", 1, "--repeats", 1, "--no-parts"]
    full, _ = bench("train", "--capacity", "full", *few)
    last, _ = bench("train", "--capacity", "T10", *few)
    tier, _ = bench("train", "--capacity", "T1", *few)
    alone, _ = bench("train", "--capacity", "T1", *few, "--set", "elastic.kl_weight=0")

    def work(figures: dict[str, Any]) -> float:
        (row,) = figures["train"]
        assert row["parts"] == []
        return row["tflops_6n"] / row["ktok_per_s"]

    assert work(last) == pytest.approx(work(full))
    assert work(alone) < work(full)
    assert work(tier) == pytest.approx(work(alone) + work(full) / 3)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--measure", "3-9", "--steps", 8], "--measure 3-9: not within steps 1 to 8"),
        (["--measure", "soon"], "--measure soon: expected FROM-TO"),
        (["--steps", 0], "--steps 0: at least 1"),
        (["--capacity", "T11"], "capacity 'T11': expected full or a tier, T1 to T10"),
        (["--capacity", "elastic"], "the mix is --elastic"),
        (["--model", "transformer_pp", "--elastic"], "--model transformer_pp has one capacity"),
        (["--set", "elastic.enabled=false", "--elastic"], "elastic.enabled is false"),
        (["--set", "model.head_dim=64", "model.attention_layers=[]", "--model", "both"], "model.head_dim: 64"),
    ],
)
def test_what_cannot_be_measured_is_said(bench: Bench, words: list[object], complaint: str) -> None:
    _, printed = bench("train", "--set", CPU, *words, expect=2)
    assert complaint in printed


@pytest.mark.gpu
def test_a_gpu_run_has_parts_of_both_models_and_device_memory(bench: Bench) -> None:
    settings = ["--set", "training.device=cuda", "training.precision=bf16"]
    words = ["--model", "both", "--no-compile-transformer", "--steps", 2, "--repeats", 1]
    figures, _ = bench("train", *settings, *words)
    assert [row["capacity"] for row in figures["train"]] == ["full", "elastic", "full"]
    for row in figures["train"]:
        assert 0 < row["peak_mib"] < 1024
        assert (row["mfu"] is None) == (row["peak_tflops"] is None)
        assert bool(row["parts"]) == (row["capacity"] == "full")
