"""Many processes give what one gives, in order, and none of them can keep the run waiting by dying."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from types import ModuleType

import pytest

from megatron_essh.data import worker_pool
from megatron_essh.data.worker_pool import map_in_order
from megatron_essh.errors import UserError


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("pool_work")


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_from_all_workers(work: ModuleType, workers: int) -> None:
    results = list(map_in_order(work.squarer, (0.004,), range(40), workers))
    assert [square for square, _ in results] == [i * i for i in range(40)]
    assert len({pid for _, pid in results}) == workers
    assert list(map_in_order(work.squarer, (0.0,), [], workers)) == []


def test_the_input_is_read_only_a_little_ahead(work: ModuleType) -> None:
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for i in range(1000):
            read += 1
            yield i

    with closing(map_in_order(work.squarer, (0.0,), items(), 2)) as results:
        for taken in range(1, 30):
            next(results)
            assert read <= taken + 8


def test_large_items_are_read_no_further_ahead_than_their_bytes_allow(
    work: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_AHEAD_BYTES", 100)
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for i in range(40):
            read += 1
            yield i

    sizes = [60 if i % 2 else 250 for i in range(40)]
    with closing(map_in_order(work.squarer, (0.0,), items(), 2, sizes.__getitem__)) as results:
        for taken, (square, _) in enumerate(results):
            assert square == taken**2
            assert read <= taken + 3  # two of 60 bytes, or a large one
    assert read == 40


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "was killed by signal 9 .* fewer --workers"),
        ("kill in a result", "was killed by signal 9"),
        ("exit", "ended with status 3"),
        ("crash", "was killed by signal 11"),
    ],
)
def test_a_worker_that_dies_ends_the_run_with_an_error(work: ModuleType, how: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(map_in_order(work.fail_at, (5, how), range(100), 2))
    assert active_children() == []


def test_a_crash_shows_where_it_happened(work: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="was killed by signal 11"):
        list(map_in_order(work.fail_at, (5, "crash"), range(100), 2))
    told = capfd.readouterr().err
    assert "Segmentation fault" in told
    assert "pool_work.py" in told


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_keep_their_kind_and_their_place(work: ModuleType, workers: int) -> None:
    for how, kind, message in (
        ("user", UserError, r"^file: line 7: bad$"),
        ("defect", KeyError if workers == 1 else RuntimeError, "a defect"),
    ):
        taken = []
        with pytest.raises(kind, match=message):  # noqa: PT012
            for result in map_in_order(work.fail_at, (5, how), range(100), workers):
                taken.append(result)
        assert len(taken) == 5


def test_what_is_no_exception_is_told_and_not_taken_for_a_death(work: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="a panic of a native library"):
        list(map_in_order(work.fail_at, (5, "panic"), range(100), 2))
    assert active_children() == []


def test_closing_early_ends_every_worker(work: ModuleType) -> None:
    with closing(map_in_order(work.squarer, (0.0,), range(10**9), 2)) as results:
        assert next(results)[0] == 0
        assert len(active_children()) == 2
    assert active_children() == []


def test_a_worker_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        list(map_in_order(os.listdir, (str(tmp_path / "absent"),), range(3), 2))
