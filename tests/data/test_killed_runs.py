"""A kill at any moment leaves nothing that looks finished and is not, and costs only the shard that was in work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def kill_runs(folder: Path, times: int, seed: int) -> dict[str, int]:
    script = Path(__file__).with_name("kill_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(times), str(seed)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_twenty_runs_killed_at_random_come_to_the_uninterrupted_result(tmp_path: Path) -> None:
    counts = kill_runs(tmp_path, 20, seed=0)
    assert counts["killed"] == 20
    assert counts["went on"] > 5, "the kills came before anything was finished"


@pytest.mark.slow
def test_fifty_runs_killed_at_random_come_to_the_uninterrupted_result(tmp_path: Path) -> None:
    counts = kill_runs(tmp_path, 50, seed=1)
    assert counts["killed"] == 50
    assert counts["went on"] > 12, "the kills came before anything was finished"
