"""Real process groups for the parallel tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # whole.py, test_engine_layouts.py: the ranks' processes have it too


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`run_ranks(world, function, *args, backend="gloo", timeout=60)`: its results, one a rank.

    `function` stands at the top level of the test's file; arguments and results are pickled. See processes.py.
    """
    processes = importlib.import_module("processes")
    server = processes.Server()
    yield server.run
    server.close()
