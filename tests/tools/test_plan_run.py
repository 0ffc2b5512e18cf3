"""tools/plan_run.py as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_essh.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "models" / "1p5b.yaml")

Run = Callable[..., str]


@pytest.fixture
def plan_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What the command prints, run in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setenv("COLUMNS", "100")
    from plan_run import main

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plan_run.py", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_plan_prints_memory_exchanges_and_time(plan_run: Run) -> None:
    shown = plan_run("plan", CONFIG, "--nodes", "2", "--tp", "2")
    for words in ("2 x 8 NVIDIA H200", "tp 2, dp 8", "fp32 master weights", "sum of dx, backward", "ktok/s"):
        assert words in shown
    assert "Rates: measured" in shown


def test_json_holds_every_part_and_where_rates_are_from(plan_run: Run) -> None:
    content = json.loads(plan_run("plan", CONFIG, "--gpu", "b300", "--zero-stage", "1", "--json"))
    needed = content["memory"]
    parts = [*needed["states"].values(), *needed["activations"].values(), *needed["transient"].values()]
    assert needed["tensors"] == sum(parts)
    assert needed["total"] == needed["tensors"] + needed["graphs"] + needed["outside"]
    assert needed["graphs"] == 0  # ZeRO's passes are not recorded
    assert needed["states"]["reduction bucket"] == 2**28
    assert content["fits"] is True
    assert content["layout"]["dp"] == content["layout"]["gpus"] == 8
    assert {e["kind"] for e in content["exchanges"]} == {"gradients' sum", "gather of updated weights"}
    assert content["rates"]["figures"]["product_flops"]["source"].startswith("scaled, not measured")
    assert 0 < content["prediction"]["efficiency"] <= 1


def test_a_layout_that_does_not_fit_is_shown_and_refused() -> None:
    arguments = ["plan", CONFIG, "--gpu", "a100", "--micro-batch", "16", "--set", "elastic.slot_sequences=16"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "plan_run.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "all tensors" in result.stdout
    assert "does not fit" in result.stderr
    assert "--recompute" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", CONFIG, "--micro-batch", "3"], "micro_batch 3 does not divide elastic.slot_sequences 4"),
        (["plan", CONFIG, "--gpu", "v100"], "GPU 'v100'"),
        (["plan", CONFIG, "--tp", "3"], "tp 3 does not divide the 8 GPUs of a node"),
        (["scale", CONFIG, "--gpus", "12"], "12 GPUs are not whole nodes of 8"),
    ],
)
def test_what_cannot_be_is_refused(plan_run: Run, arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_run(*arguments)


def test_fp32_has_memory_but_no_prediction(plan_run: Run) -> None:
    assert "No prediction" in plan_run("plan", CONFIG, "--precision", "fp32")


def test_scale_lists_the_gpus_asked_for(plan_run: Run) -> None:
    rows = json.loads(plan_run("scale", CONFIG, "--gpus", "8,64", "--zero-stage", "1", "--json"))
    assert [row["gpus"] for row in rows] == [8, 64]
    assert rows[1]["layout"]["nodes"] == 8
    assert rows[1]["mix"]["imbalance"] > rows[0]["mix"]["imbalance"]  # a slot a replica
    assert "predicted from measured rates" in plan_run("scale", CONFIG, "--gpus", "8")


def test_imbalance_and_rates_are_tables(plan_run: Run) -> None:
    rows = json.loads(plan_run("imbalance", CONFIG, "--gpus", "4,32", "--json"))
    assert {row["dp"] for row in rows} == {4, 32}
    assert all(row["balanced"] <= row["naive"] for row in rows)
    assert "scaled, not measured" in " ".join(plan_run("rates", "--gpu", "h100").split())
