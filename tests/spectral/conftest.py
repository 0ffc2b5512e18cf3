"""The spectral tests share one cache directory, apart from the user's, so that each bank is built once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bank_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the spectral tests cache banks in."""
    return tmp_path_factory.mktemp("banks")


@pytest.fixture(autouse=True)
def _own_cache(bank_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESSH_CACHE", str(bank_cache))
