"""tools/inspect_model.py as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def inspect(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "inspect_model.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == expect, result.stderr
    return result


def config(name: str) -> str:
    return str(ROOT / "configs" / "models" / f"{name}.yaml")


def test_json_holds_the_specified_costs_of_370m() -> None:
    costs = json.loads(inspect(config("370m"), "--json").stdout)
    assert costs["parameters"] == 370_866_144
    assert sum(costs["parts"].values()) == 370_866_144
    assert costs["state_bytes"] == 1_089_536
    assert costs["window_kv_bytes"] == 22_020_096
    assert list(costs["tiers"]) == [f"T{i}" for i in range(1, 11)]
    first, last = costs["tiers"]["T1"], costs["tiers"]["T10"]
    assert (first["channels"], first["ff_width"], first["parameters"]) == (8, 448, 92_144_664)
    assert (last["channels"], last["ff_width"], last["parameters"]) == (32, 4608, 370_866_144)
    assert first["state_bytes"] * 4 == last["state_bytes"] == costs["state_bytes"]
    for tier in costs["tiers"].values():
        assert sum(tier["parts"].values()) == tier["parameters"]
        assert tier["share"] == tier["parameters"] / costs["parameters"]
        flops = tier["flops_per_token"]
        assert flops["training"] == 3 * flops["forward"]
        assert flops["forward"] == sum(flops[part] for part in ("projections", "head", "scan", "attention"))
    assert last["flops_per_token"] == costs["flops_per_token"]


def test_overrides_reach_the_model() -> None:
    overrides = ["model.channels=64", "model.value_width=14", "data.sequence_length=512"]
    arguments = [word for override in overrides for word in ("--set", override)]
    costs = json.loads(inspect(config("370m"), *arguments, "--json").stdout)
    assert costs["tiers"]["T10"]["channels"] == 64
    assert costs["tiers"]["T5"]["channels"] == 41  # floor(64 sqrt(13 / 32) + 1/2)
    assert costs["state_bytes"] == 1_089_536  # K P is unchanged
    assert costs["sequence_length"] == 512


def test_the_cache_of_a_model_without_a_window_is_that_of_a_training_sequence() -> None:
    costs = json.loads(inspect(config("synthetic"), "--set", "data.sequence_length=100", "--json").stdout)
    assert costs["window_kv_bytes"] == 2 * 100 * 128 * 2


def test_an_export_lists_the_tiers_that_it_holds_and_names_the_others() -> None:
    shape = {"channels": 18, "family_channels": 32, "ff_width": 192, "family_ff_width": 512}
    arguments = [word for key, value in shape.items() for word in ("--set", f"model.{key}={value}")]
    costs = json.loads(inspect(config("synthetic"), *arguments, "--json").stdout)
    assert list(costs["tiers"]) == ["T1", "T2", "T3", "T4"]
    assert costs["tiers"]["T4"]["parameters"] == costs["parameters"]
    text = inspect(config("synthetic"), *arguments).stdout
    assert "larger one: T5, T6, T7, T8, T9, T10" in " ".join(text.split())


@pytest.mark.parametrize("name", ["370m", "1p5b", "dna"])
def test_the_table_shows_every_tier_whole_within_eighty_columns(name: str) -> None:
    costs = json.loads(inspect(config(name), "--json").stdout)
    text = inspect(config(name)).stdout
    assert f"{costs['parameters']:,} parameters" in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "…" not in text
    for tier, cost in costs["tiers"].items():
        (row,) = re.findall(rf"^{tier} .*$", text, flags=re.MULTILINE)
        assert row.split()[:4] == [
            tier,
            str(cost["channels"]),
            str(cost["ff_width"]),
            f"{cost['parameters']:,}",
        ]
    for part, count in costs["parts"].items():
        assert re.search(rf"^{part.replace('_', '-')} +{count:,} ", text, flags=re.MULTILINE)


def test_it_answers_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('inspect_model needs no torch')")
    answered = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "inspect_model.py"), config("1p5b")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        check=True,
    )
    assert b"1,531,089,696" in answered.stdout


def test_overrides_come_one_by_one_or_several_at_once() -> None:
    at_once = inspect(config("370m"), "--set", "model.channels=16", "model.value_width=56", "--json")
    one_by_one = inspect(config("370m"), "--set", "model.channels=16", "--json", "--set", "model.value_width=56")
    assert at_once.stdout == one_by_one.stdout
    assert json.loads(at_once.stdout)["channels"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml: no such config file"),
        ([config("370m"), "--set", "model.chanels=3"], "did you mean model.channels?"),
        ([config("370m"), "--set", "model.channels=0"], "channels must be at least 1, got 0"),
        ([config("370m"), "--set", "model.channels=many"], "model.channels: expected an integer, got 'many'"),
        ([config("370m"), "--set", "model.ff_width=100"], "model.ff_width 100 is not a multiple of 64"),
    ],
)
def test_a_bad_config_is_one_line_and_status_two(arguments: list[str], message: str) -> None:
    for more in ([], ["--json"]):
        result = inspect(*arguments, *more, expect=2)
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
