"""tools/benchmark.py as a user runs it, on a tiny model."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron_essh.config import config_to_mapping


@pytest.mark.parametrize("vocabulary", [264, 1])
def test_it_measures_scan_and_both_kinds_of_step_for_any_vocabulary(command, tiny_config, tmp_path, vocabulary) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_to_mapping(tiny_config)))
    settings = [f"model.vocab_size={vocabulary}", "elastic.full_only_tokens=48", "training.device=cpu"]
    figures = tmp_path / "figures.json"
    words = ["--set", *settings, "--repeats", 2, "--warmup", 0, "--json", figures]
    done = command("tools/benchmark.py", "all", path, *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())["rows"]
    assert [row["what"] for row in rows] == [
        "scan, forward",
        "scan, forward + backward",
        "step, full capacity",
        "step, elastic mix",
    ]
    for row in rows:
        assert len(row["all_ms"]) == 2
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["what"] in done.stdout
