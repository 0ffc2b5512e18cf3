"""The disk cache under concurrent processes, damage and directories that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import megatron_essh
from megatron_essh.spectral import banks, cache
from megatron_essh.spectral.cache import cached_arrays

KEY: dict[str, str | int] = {"name": "test", "size": 4000}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESSH_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"rho": rng.normal(size=(40, 100)), "theta": rng.normal(size=(7,))}


def refuse() -> dict[str, np.ndarray]:
    raise AssertionError("the entry should have been used")


def assert_equal(found: dict[str, np.ndarray]) -> None:
    assert found.keys() == {"rho", "theta"}
    for name, expected in tables().items():
        np.testing.assert_array_equal(found[name], expected)


def test_an_entry_is_built_once_and_read_after_that(directory: Path) -> None:
    assert_equal(cached_arrays(KEY, tables))
    assert_equal(cached_arrays(KEY, refuse))
    assert_equal(cached_arrays(dict(reversed(KEY.items())), refuse))
    assert [p.suffix for p in directory.iterdir()] == [".npz"]


def test_another_key_is_another_entry(directory: Path) -> None:
    cached_arrays(KEY, tables)
    other = {"rho": np.zeros(3)}
    assert cached_arrays({**KEY, "size": 4001}, lambda: other) == other
    assert len(list(directory.iterdir())) == 2


def test_a_bank_is_keyed_by_all_that_it_depends_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"name": "random_damped", "channels": 3, "modes": 2, "length": 32, "seed": 1}
    banks.build_bank(**arguments)
    count = len(list(directory.iterdir()))
    for change in ({"name": "slot_shuffle"}, {"channels": 4}, {"modes": 3}, {"length": 33}, {"seed": 2}):
        banks.build_bank(**{**arguments, **change})
        assert len(list(directory.iterdir())) > count, change
        count = len(list(directory.iterdir()))
    monkeypatch.setattr(banks, "ALGORITHM_VERSION", banks.ALGORITHM_VERSION + 1)
    banks.build_bank(**arguments)
    assert len(list(directory.iterdir())) > count


@pytest.mark.parametrize("keep", [0, 1, 30, 1000, 20_000, -1])
def test_a_truncated_entry_is_reported_and_rebuilt(directory: Path, keep: int) -> None:
    cached_arrays(KEY, tables)
    (entry,) = directory.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:keep])
    with pytest.warns(RuntimeWarning, match=f"{entry.name}: unreadable"):
        assert_equal(cached_arrays(KEY, tables))
    assert entry.read_bytes() == whole
    assert_equal(cached_arrays(KEY, refuse))


def test_no_flipped_byte_changes_what_comes_back(directory: Path) -> None:
    cached_arrays(KEY, tables)
    (entry,) = directory.iterdir()
    whole = bytearray(entry.read_bytes())
    rng = np.random.default_rng(1)
    reported = 0
    ends = [*range(0, 120), *range(len(whole) - 320, len(whole)), *rng.integers(0, len(whole), 100)]
    for place in ends:
        damaged = whole.copy()
        damaged[place] ^= 1 << int(rng.integers(8))
        entry.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_equal(cached_arrays(KEY, tables))
        reported += bool(caught)
    assert reported > len(ends) // 2  # a few bytes of a zip file carry nothing, such as its times


def test_an_entry_of_another_key_is_not_believed(directory: Path) -> None:
    cached_arrays(KEY, tables)
    (entry,) = directory.iterdir()
    cached_arrays({**KEY, "size": 4001}, lambda: {"rho": np.zeros(1)})
    (other,) = set(directory.iterdir()) - {entry}
    other.replace(entry)
    with pytest.warns(RuntimeWarning, match=f"{entry.name}: damaged, or the tables of something else"):
        assert_equal(cached_arrays(KEY, tables))


def test_pickled_objects_are_never_loaded(directory: Path) -> None:
    cached_arrays(KEY, tables)
    (entry,) = directory.iterdir()
    np.savez(entry, digest=np.array([{"name": "test"}], dtype=object))
    with pytest.warns(RuntimeWarning, match="unreadable.*allow_pickle"):
        assert_equal(cached_arrays(KEY, tables))


def test_a_directory_that_cannot_be_made_costs_a_warning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ESSH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"file/cache: cannot be written .*set \$ESSH_CACHE"):
        assert_equal(cached_arrays(KEY, tables))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_costs_a_warning_only(directory: Path) -> None:
    directory.mkdir(parents=True)
    directory.chmod(0o500)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert_equal(cached_arrays(KEY, tables))


def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert_equal(cached_arrays(KEY, tables))
    assert list(directory.iterdir()) == []


def test_without_a_home_directory_tables_are_built_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("ESSH_CACHE", "")
    monkeypatch.setattr(cache.Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match="no home directory"):
        assert_equal(cached_arrays(KEY, tables))


def test_the_default_directory_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ESSH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    cached_arrays(KEY, tables)
    assert len(list((tmp_path / ".cache" / "megatron_essh").glob("*.npz"))) == 1


CONTENDER = """
import sys, warnings, numpy as np
warnings.simplefilter("error")
from megatron_essh.spectral.banks import build_bank
from megatron_essh.spectral.cache import cache_directory
print("ready", flush=True)
sys.stdin.readline()
first = build_bank("random_damped", 6, 3, 96, seed=4)
for _ in range(60):
    for entry in cache_directory().glob("*.npz"):
        entry.unlink(missing_ok=True)   # so that all of them keep writing and reading the same entries
    again = build_bank("random_damped", 6, 3, 96, seed=4)
    for table in ("rho", "theta", "kc", "ks"):
        assert np.array_equal(getattr(again, table), getattr(first, table)), table
build_bank("random_damped", 6, 3, 96, seed=4)
np.savez(sys.argv[1], rho=first.rho, theta=first.theta, kc=first.kc, ks=first.ks)
"""


def test_processes_that_build_read_and_delete_the_same_entry_at_once_all_get_the_whole_bank(
    directory: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(megatron_essh.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    results = [tmp_path / f"{i}.npz" for i in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(result)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for result in results
    ]
    for process in processes:  # all have imported everything: start them together
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert [p.name for p in directory.iterdir() if p.suffix != ".npz"] == []
    expected = banks.build_bank("random_damped", 6, 3, 96, seed=4)
    for result in results:
        with np.load(result) as found:
            for table in ("rho", "theta", "kc", "ks"):
                np.testing.assert_allclose(found[table], getattr(expected, table), rtol=1e-6, atol=1e-9)
