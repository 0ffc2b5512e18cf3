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
from megatron_essh.elastic.capacity import tier_capacities
from megatron_essh.model.accounting import flops_per_token, parameter_counts

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
    assert named - {part["part"] for part in theirs["parts"]} == {"mixer projections", "scan"}
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


def test_a_prefill_counts_the_tiers_work_and_its_whole_prompts(bench: Bench, tiny_config: RunConfig) -> None:
    words = ["--length", 50, "--batch", 3, "--repeats", 2, "--warmup", 0]
    figures, printed = bench("prefill", "--set", CPU, "--tier", "T1", *words)
    (row,) = figures["prefill"]
    assert (row["model"], row["capacity"], row["batch"], row["length"]) == ("essh", "T1", 3, 50)
    assert len(row["all_ms"]) == 2
    assert row["median_ms"] == pytest.approx(statistics.median(row["all_ms"]))
    assert row["ktok_per_s"] == pytest.approx(150 / row["median_ms"])
    assert row["first_token_ms"] > 0
    model = tiny_config.model
    capacity = tier_capacities(model, tiny_config.elastic)["T1"]
    assert row["parameters"] == parameter_counts(model, capacity).total
    # one layer's window of 8 keys and values of 32 numbers, and the states of the two spectral layers, in fp32
    assert row["state_mib"] * 2**20 == 4 * (2 * 8 * 32 + 2 * capacity.channels * 3 * 2 * 5)
    work = flops_per_token(model, capacity, sequence_length=50)
    operations = 150 * (work.forward - work.head) + 3 * work.head  # the head sees the last tokens alone
    assert row["tflops"] == pytest.approx(operations / row["median_ms"] * 1e3 / 1e12)
    assert len(row["engine_first_token_all_ms"]) == len(row["generate_all_ms"]) == 2
    assert row["engine_first_token_ms"] == pytest.approx(statistics.median(row["engine_first_token_all_ms"]))
    assert 0 < row["engine_add_ms"] < row["engine_first_token_ms"]
    # the tokens of three sequences after the first step's, out of 128 steps
    assert row["generated"] == 128
    assert row["generate_tokens_per_second"] == pytest.approx(3e3 * 127 / statistics.median(row["generate_all_ms"]))
    assert "through a warm engine" in printed
    assert "essh T1: 3 x 50 tokens, fp32 weights" in printed
    assert figures["train"] == figures["scan"] == []


def test_a_prefill_of_both_models_gives_their_ratio(bench: Bench) -> None:
    words = ["--model", "both", "--set", CPU, "training.precision=bf16", "--repeats", 1, "--warmup", 0]
    figures, printed = bench("prefill", *words)
    ours, theirs = figures["prefill"]
    assert (ours["model"], theirs["model"]) == ("essh", "transformer_pp")
    assert ours["length"] == theirs["length"] == 24  # the config's sequences
    assert theirs["state_mib"] * 2**20 == 2 * 2 * 3 * 24 * 32  # bf16 keys and values of 3 layers
    ratio = ours["ktok_per_s"] / theirs["ktok_per_s"]
    assert figures["ratios"] == {"essh full / transformer_pp": ratio}
    assert f"essh full / transformer_pp: {ratio:.3f}" in printed


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--length", 0], "--length 0: at least 1"),
        (["--batch", 0], "--batch 0: at least 1"),
        (["--tier", "T11"], "capacity 'T11': expected a tier (T1 to T10)"),
        (["--model", "transformer_pp", "--tier", "T1"], "--model transformer_pp has one capacity"),
        (["--elastic"], "--elastic is a mix of training"),
        (
            ["--length", 10**14],
            "1 x 100,000,000,000,000 tokens: would take 2,235,174.2 GiB at least, more than cpu has",
        ),
        (["--batch", 10**10], "10,000,000,000 x 24 tokens: would take 5,364.4 GiB at least, more than cpu has; take"),
        (["--model", "transformer_pp", "--length", 10**14], "tokens: would take 2,235,174.2 GiB at least"),
        (["--length", 2**53 + 1], "--length 9007199254740993: at most 9007199254740992"),
        (["--warmup", 10**20], "--warmup 100000000000000000000: at most 1000000"),
    ],
)
def test_what_cannot_be_prefilled_is_said(bench: Bench, words: list[object], complaint: str) -> None:
    _, printed = bench("prefill", "--set", CPU, *words, expect=2)
    assert complaint in printed


@pytest.mark.gpu
def test_a_gpus_prefill_is_in_bf16_and_its_memory_the_devices(bench: Bench) -> None:
    settings = ["--set", "training.device=cuda", "training.precision=bf16"]
    words = ["--model", "both", "--no-compile-transformer", "--length", 3000, "--repeats", 1, "--warmup", 1]
    figures, _ = bench("prefill", *settings, *words)
    for row in figures["prefill"]:
        assert row["precision"] == "bf16"
        assert 0 < row["peak_mib"] < 1024


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


def test_decoding_gives_every_case_with_its_memory_and_control(bench: Bench, tmp_path: Path) -> None:
    words = ["--tier", "T10", "--tier", "T1", "--batch", 1, "--batch", 3, "--context", 6, "--weights", "fp32"]
    few = ["--steps", 2, "--warmup", 1, "--repeats", 1, "--bandwidth", 0.5, "--plot", tmp_path / "times.png"]
    figures, printed = bench("decode", "--set", CPU, *words, *few)
    rows = figures["decode"]
    cases = [(row["capacity"], row["batch"]) for row in rows]
    assert cases == [("T10", 1), ("T10", 3), ("T1", 1), ("T1", 3)]
    assert (figures["warmup"], figures["steps"], figures["repeats"]) == (1, 2, 1)
    assert figures["random_weights"] is True
    for row in rows:
        assert row["floor_ms"] == pytest.approx(sum(row["moved_bytes"].values()) / 0.5e12 * 1e3)
        assert row["logits_difference"] < 1e-4
        assert f"{row['capacity']} fp32 {row['batch']}x6" in printed
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    assert "floor: what must move, at 0.5 TB/s" in printed


def test_decoding_takes_a_trained_model(
    command: Callable[..., Any], write_run: Callable[..., Any], tmp_path: Path, byte_pair: Any
) -> None:
    words = ["decode", write_run().folder, "--steps", 1, "--repeats", 1, "--warmup", 0, "--no-control"]
    done = command("tools/benchmark.py", *words, "--tier", "T4", "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["random_weights"] is False
    assert [(row["capacity"], row["weights"], row["context"]) for row in figures["decode"]] == [("T4", "bf16", 8)]
    assert "LanguageModel.step" not in done.stdout
    refused = command("tools/benchmark.py", *words, "--set", CPU)
    assert "is a trained model, whose config stands" in refused.stderr


def test_drift_gives_every_case_its_lines_and_a_verdict(bench: Bench, tmp_path: Path) -> None:
    words = [
        "--tier",
        "T10",
        "--tier",
        "T1",
        "--batch",
        2,
        "--length",
        60,
        "--context",
        5,
        "--plot",
        tmp_path / "d.png",
    ]
    figures, printed = bench("drift", "--set", CPU, *words)
    rows = figures["drift"]
    assert [(row["capacity"], row["batch"], row["length"], row["prompt"]) for row in rows] == [
        ("T10", 2, 60, 5),
        ("T1", 2, 60, 5),
    ]
    assert figures["random_weights"] is True
    for row in rows:
        assert list(row["errors"]) == ["bf16 forward", "bf16 steps", "fp32 steps"]
        assert row["verdicts"]["fp32 steps"]["near"] is True
        assert f"{row['capacity']} x2 bf16 steps" in printed
    assert "errors of logits past the window of 8" in printed
    assert ("no drift: " in printed) == (
        not any(
            row["verdicts"][f"{k} steps"]["drifts"] or row["verdicts"][f"{k} steps"]["near"] is False
            for row in rows
            for k in ("bf16", "fp32")
        )
    )
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_drift_takes_a_trained_model(
    command: Callable[..., Any], write_run: Callable[..., Any], tmp_path: Path, byte_pair: Any
) -> None:
    words = ["drift", write_run().folder, "--tier", "T4", "--batch", 1, "--length", 50, "--weights", "int8"]
    done = command("tools/benchmark.py", *words, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["random_weights"] is False
    assert list(figures["drift"][0]["errors"]) == ["bf16 forward", "int8 steps"]


@pytest.mark.parametrize(
    ("what", "words", "complaint"),
    [
        ("drift", ["--bandwidth", 4], "--bandwidth: belongs to decode, not to drift"),
        ("drift", ["--no-control"], "--no-control: belongs to decode, not to drift"),
        ("drift", ["--elastic"], "leave out --model, --elastic"),
        ("drift", ["--length", 20], "--length 20: steps must go on for 32 tokens past the window"),
        ("drift", ["--context", 0], "--context 0: drift takes in at least 1 token"),
        ("drift", ["--context", 4, "--context", 5], "--context: given 2 times; drift takes one"),
        ("decode", ["--batch", 4, "--batch", 0], "--batch 0: at least 1"),
        ("decode", ["--context", -1], "--context -1: at least 0"),
        ("decode", ["--bandwidth", 0], "--bandwidth 0: TB/s, 1e-6 to 1e6"),
        ("decode", ["--bandwidth", "inf"], "--bandwidth inf: TB/s"),
        ("decode", ["--length", 64], "--length: belongs to prefill, drift, not to decode"),
        ("decode", ["--no-parts"], "--no-parts: belongs to all, train, not to decode"),
        ("drift", ["--steps", 4], "--steps: belongs to all, train, decode, not to drift"),
        ("decode", ["--batch", 2, "--batch", 2], "--batch: 2 2; give each once"),
        ("drift", ["--weights", "int8", "--weights", "int8"], "--weights: int8 int8; give each once"),
        ("decode", ["--plot", ""], "--plot .: a folder; name a file"),
        ("decode", ["--plot", "/dev/null/x.png"], "--plot /dev/null/x.png: /dev/null is no folder"),
        ("decode", ["--batch", 10**11], "GiB, more than cpu has; take fewer at a time"),
        ("decode", ["--context", 99999999999999999999], "--context 99999999999999999999: at most 9007199254740992"),
        ("decode", ["--context", 4, "--context", 2**63 - 1], "--context 9223372036854775807: at most"),
        ("decode", ["--steps", 10**20], "--steps 100000000000000000000: at most 1000000"),
        ("decode", ["--repeats", 1_000_001], "--repeats 1000001: at most 1000000"),
        ("drift", ["--batch", 10**20], "--batch 100000000000000000000: at most 9007199254740992"),
        ("drift", ["--length", 10**14], "T10: 1 x 100,000,000,000,000 tokens: would take 18,626,451.5 GiB at least"),
        ("drift", ["--batch", 1, "--batch", 10**10], "T10: 10,000,000,000 x 4,104 tokens: would take 7,644,295.7 GiB"),
        ("drift", ["--context", 2**53], "GiB at least, more than cpu has; take fewer at a time, or shorter ones"),
        ("scan", ["--set", "data.sequence_length=100000000000000"], "scan: takes more memory than cpu has"),
        ("data", ["--documents", 2**53], "data: takes more memory than cpu has"),
        ("decode", ["--tier", "T11"], "capacity 'T11'"),
        ("decode", ["--model", "both"], "leave out --model, --elastic"),
        ("prefill", ["--context", 4], "--context: belongs to decode and drift, not to prefill"),
        ("train", ["--weights", "int8"], "--weights: belongs to decode"),
        ("scan", ["--no-control"], "--no-control: belongs to decode"),
        ("prefill", ["--tier", "T1", "--tier", "T2"], "--capacity: given 2 times; prefill takes one"),
    ],
)
def test_what_cannot_be_decoded_is_said(bench: Bench, what: str, words: list[object], complaint: str) -> None:
    _, printed = bench(what, "--set", CPU, *words, expect=2)
    assert complaint in printed


@pytest.mark.parametrize("what", ["decode", "drift"])
def test_figures_and_their_plot_do_not_go_into_one_file(bench: Bench, what: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for same in (tmp_path / "figures.json", tmp_path / "folder/../figures.json"):
        _, printed = bench(what, "--set", CPU, "--plot", same, expect=2)
        assert printed == f"error: --plot {same}: the file of --json too; name another one\n"
    assert not (tmp_path / "figures.json").exists()


def test_the_largest_context_is_finite(bench: Bench) -> None:
    few = ["--steps", 2, "--repeats", 1, "--warmup", 0, "--tier", "T1"]
    figures, _ = bench("decode", "--set", CPU, "--context", 2**53, "--weights", "fp32", *few)
    assert figures["decode"][0]["context"] == 2**53
    assert figures["decode"][0]["logits_difference"] < 1e-4
