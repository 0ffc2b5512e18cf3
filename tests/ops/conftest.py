"""Kernels compiled for GPUs that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(params=[90, 100, 103])
def compile_ahead(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], list[str]]:
    """Runs a script that compiles kernels for the compute capability in its first argument; its lines of output.

    In a process of its own: Triton chooses between compiler and interpreter when it is imported.
    """
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

    def run(program: str) -> list[str]:
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        script = tmp_path / "compile_all.py"
        script.write_text(program)
        done = subprocess.run(
            [sys.executable, str(script), str(request.param)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    return run
