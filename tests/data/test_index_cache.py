"""An order is drawn once for all who share the cache, appears only whole, and survives kills at any point."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_essh.data import IndexedDatasetWriter, PackedDataset, build_lock, index_cache, packing
from megatron_essh.data.blend import BlendedDataset
from megatron_essh.data.build_lock import BuildLock
from megatron_essh.data.index_cache import Arrays, cached_arrays
from megatron_essh.data.packing import DatasetPart
from megatron_essh.errors import UserError

KEY = {"format": 1, "what": "test"}
ARRAYS: Arrays = {
    "documents": np.arange(1000, dtype=np.int32),
    "samples": np.arange(34, dtype=np.int64).reshape(17, 2),
    "empty": np.empty((0, 2), np.uint16),
    "shuffle": np.arange(16, dtype=np.uint32),
}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


class Child:
    """A function in a forked process of its own."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def kill(self) -> int:
        """Kill -9, and the status that it ended with."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of so many documents that drawing and writing its order can be interrupted."""
    prefix = tmp_path_factory.mktemp("cache") / "pair"
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, 400_000)
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        tokens = rng.integers(0, 999, int(lengths.sum())).astype("<u2")
        writer.add_documents(tokens, lengths, np.ones(len(lengths), np.int64))
    return prefix


def test_what_was_built_comes_back_mapped_and_is_built_once(tmp_path: Path) -> None:
    built: list[int] = []

    def build() -> Arrays:
        built.append(1)
        return ARRAYS

    for _ in range(3):
        found = cached_arrays(tmp_path / "new" / "folder", KEY, build)
        assert_same(found, ARRAYS)
        assert not found["documents"].flags.writeable
        assert all(array.ctypes.data % 64 == 0 for array in found.values() if array.size)
    assert built == [1]
    assert_same(cached_arrays(tmp_path / "new" / "folder", {**KEY, "seed": 1}, build), ARRAYS)
    assert_same(cached_arrays(None, KEY, build), ARRAYS)
    assert built == [1, 1, 1]


def test_an_order_from_the_cache_is_the_order_and_belongs_to_the_files_content(
    write_pair: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    drawn: list[int] = []
    draw = packing.draw_order
    monkeypatch.setattr(packing, "draw_order", lambda *a, **k: (drawn.append(1), draw(*a, **k))[1])
    documents = [[i] * 9 for i in range(50)]
    prefix = write_pair(documents)

    def same(*, seed: int = 3, samples: int = 100, source: Path = prefix) -> int:
        """Samples with and without the cache agree; how often the cache had to draw."""
        plain = PackedDataset(source, 16, seed, samples=samples)
        before = len(drawn)
        cached = PackedDataset(source, 16, seed, samples=samples, cache=cache)
        for name in ("documents", "samples", "shuffle", "epochs", "last_epoch_apart"):
            np.testing.assert_array_equal(getattr(cached.order, name), getattr(plain.order, name))
        np.testing.assert_array_equal(cached[7], plain[7])
        return len(drawn) - before

    assert [same(), same()] == [1, 0]
    assert [same(seed=4), same(samples=200), same(seed=4)] == [1, 1, 0]
    assert same(samples=101) == 0, "as many epochs: the same order"
    assert same(source=write_pair(documents, "copy")) == 0, "a copy of the files has their order"
    documents[30] = [7] * 10
    write_pair(documents)
    assert same() == 1, "other content under the old name"
    same_sizes = np.memmap(f"{prefix}.bin", "<u2", "r+")
    same_sizes[3] = 444
    same_sizes.flush()
    assert same() == 1, "other tokens in a file of the same size"


def test_a_blend_is_cached_with_its_pairs(write_pair: Callable[..., Path], tmp_path: Path) -> None:
    parts = [DatasetPart.of(write_pair([[i] * 30 for i in range(20)], name)) for name in ("a", "b")]
    for weights in ((0.7, 0.3), None):
        plain = BlendedDataset(parts, weights, 16, 3, 90)
        for _ in range(2):
            cached = BlendedDataset(parts, weights, 16, 3, 90, cache=tmp_path / "cache")
            for i in range(90):
                np.testing.assert_array_equal(cached[i], plain[i])


def test_of_many_processes_one_builds_and_all_see_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def build() -> Arrays:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        return ARRAYS

    children = [Child(lambda: assert_same(cached_arrays(tmp_path / "cache", KEY, build), ARRAYS)) for _ in range(8)]
    assert [child.wait() for child in children] == [0] * 8
    assert len(log.read_text().split()) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".order"]


def test_who_waits_takes_over_at_once_from_an_owner_that_was_killed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def hang() -> Arrays:
        time.sleep(60)
        return ARRAYS

    owner = Child(lambda: cached_arrays(cache, KEY, hang))
    while not list(cache.glob("*.lock")):
        time.sleep(0.005)
    waiting = Child(lambda: assert_same(cached_arrays(cache, KEY, lambda: ARRAYS), ARRAYS))
    time.sleep(0.2)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert owner.kill() == -signal.SIGKILL
    begin = time.monotonic()
    assert waiting.wait() == 0
    assert time.monotonic() - begin < 5
    assert [path.suffix for path in cache.iterdir()] == [".order"]


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """Where the entry of KEY will lie."""
    cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    (path,) = tmp_path.iterdir()
    path.unlink()
    return path


def lock_of(entry: Path, **changes: object) -> Path:
    """A lock as another process would have left it, with its temporary file."""
    system, started = build_lock._system(), build_lock._started(os.getpid())
    owner = {"machine": socket.gethostname(), "system": system, "pid": os.getpid(), "started": started, "token": "x"}
    lock = entry.with_name(entry.name + ".lock")
    lock.write_text(json.dumps({**owner, **changes}))
    entry.with_name(f"{entry.name}.x.tmp").write_bytes(b"half of an order")
    return lock


@pytest.mark.parametrize(
    "changes",
    [{"started": "1"}, {"pid": 2**22 + 1}],
    ids=["its number is another process's now", "no such process"],
)
def test_a_lock_of_a_process_that_is_gone_is_taken_away_with_its_half_file(
    entry: Path, changes: dict[str, object]
) -> None:
    lock_of(entry, **changes)
    begin = time.monotonic()
    assert_same(cached_arrays(entry.parent, KEY, lambda: ARRAYS), ARRAYS)
    assert time.monotonic() - begin < 2
    assert list(entry.parent.iterdir()) == [entry]


def test_a_lock_of_a_living_process_is_respected(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = lock_of(entry)
    found: list[Arrays] = []
    waiter = threading.Thread(target=lambda: found.append(cached_arrays(entry.parent, KEY, lambda: ARRAYS)))
    waiter.start()
    time.sleep(0.5)
    assert found == []
    assert lock.exists()
    lock.unlink()
    waiter.join(10)
    assert_same(found[0], ARRAYS)


@pytest.mark.parametrize("content", [None, b""], ids=["of another machine", "not yet signed"])
def test_a_lock_that_tells_no_process_of_ours_is_stale_when_its_time_stands_still(
    entry: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(build_lock, "STALE_SECONDS", 0.6)
    monkeypatch.setattr(build_lock, "UNSIGNED_SECONDS", 0.6)
    monkeypatch.setattr(build_lock, "LONGEST_PAUSE", 0.05)
    lock = lock_of(entry, system="another boot")
    if content is not None:
        lock.write_bytes(content)
    found: list[Arrays] = []
    begin = time.monotonic()
    waiter = threading.Thread(target=lambda: found.append(cached_arrays(entry.parent, KEY, lambda: ARRAYS)))
    waiter.start()
    for renewal in range(12):  # its owner lives
        time.sleep(0.1)
        os.utime(lock, ns=(renewal, renewal))  # as its own clock has it, wrong as that may be
    assert found == []
    waiter.join(10)
    assert time.monotonic() - begin > 1.2 + 0.5
    assert_same(found[0], ARRAYS)


def test_the_time_stamp_is_renewed_while_the_owner_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_lock, "RENEW_SECONDS", 0.05)
    stamps = set()

    def build() -> Arrays:
        (lock,) = tmp_path.glob("*.lock")
        for _ in range(30):
            stamps.add(lock.stat().st_mtime_ns)
            time.sleep(0.02)
        return ARRAYS

    cached_arrays(tmp_path, KEY, build)
    assert len(stamps) > 3


def test_two_owners_at_once_do_no_harm(tmp_path: Path) -> None:
    """What a race between two that take over from the same dead owner may come to."""
    path = tmp_path / "entry"
    with BuildLock(path) as first:
        assert first.made_or_held(lambda: None) is None
        first.lock.unlink()
        with BuildLock(path) as second:
            assert second.made_or_held(lambda: None) is None
            for lock in (first, second):
                index_cache._write(path, lock.temporary, "key", ARRAYS)
        assert_same(index_cache._open(path, "key") or {}, ARRAYS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["cut", "longer", "foreign", "empty", "another key"])
def test_a_file_that_is_no_whole_entry_is_told_and_replaced(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cached_arrays(tmp_path, KEY, lambda: ARRAYS)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "longer": whole + b"\0",
        "foreign": b"\x93NUMPY" + whole,
        "empty": b"",
        "another key": whole.replace(b"test", b"tost"),
    }
    path.write_bytes(damaged[damage])
    assert_same(cached_arrays(tmp_path, KEY, lambda: ARRAYS), ARRAYS)
    assert f"warning: {path}: not a whole entry" in capfd.readouterr().err
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_named_and_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.index_cache: .*file/.*\.order: .*index_cache: null"):
        cached_arrays(tmp_path / "file", KEY, lambda: ARRAYS)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_cache.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; free space there"):
        cached_arrays(tmp_path / "cache", KEY, lambda: ARRAYS)
    monkeypatch.undo()
    assert list((tmp_path / "cache").iterdir()) == []


def calls_until_done(function: Callable[[int], object]) -> Iterator[Child]:
    """Children that run `function(n)` for n = 1, 2, ..., which kills itself at the n-th system call; to the first
    that lives."""
    for number in range(1, 100):
        child = Child(lambda number=number: function(number))
        yield child
        if child.wait() == 0:
            return
    raise AssertionError("never lived")


def die_at_call(number: int) -> None:
    """Kill this process at the `number`-th of the calls that leave traces on the disk, before or after it."""
    calls = 0

    def dying(inner: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **keywords: object) -> object:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            result = inner(*arguments, **keywords)
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("open", "write", "fsync", "replace", "unlink"):
        setattr(os, name, dying(getattr(os, name)))

    class Dying:
        """A file that dies at its writes, what was written before being on the disk."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> Dying:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, content: Any) -> None:
            dying(self._file.write)(content)
            self._file.flush()

    plain = Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        file = plain(path, mode, *arguments, **keywords)
        return Dying(file) if "w" in mode else file

    Path.open = opened


def test_a_kill_at_any_call_leaves_nothing_that_looks_whole_and_the_next_run_is_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_lock, "UNSIGNED_SECONDS", 0.1)

    def work(number: int) -> None:
        die_at_call(number)
        cached_arrays(tmp_path, KEY, lambda: ARRAYS)

    killed = 0
    for child in calls_until_done(work):
        status = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        killed += status.si_status == signal.SIGKILL
        for path in tmp_path.glob("*.order"):  # it has its name: then it is whole
            text = json.dumps(KEY, sort_keys=True)
            assert_same(index_cache._open(path, text) or {}, ARRAYS)
        begin = time.monotonic()
        assert_same(cached_arrays(tmp_path, KEY, lambda: ARRAYS), ARRAYS)
        assert time.monotonic() - begin < 3
        for path in tmp_path.iterdir():  # a kill after the rename may leave the lock; the next build takes it away
            assert path.suffix in (".order", ".lock")
            path.unlink()
    assert killed > 20


def kill_at_random(pair: Path, folder: Path, kills: int) -> None:
    """Kill processes that draw and write the order of `pair` at random moments; each time a rerun finishes right."""
    expected = PackedDataset(pair, 64, 3, samples=50_000).order

    def build(cache: Path) -> PackedDataset:
        return PackedDataset(pair, 64, 3, samples=50_000, cache=cache)

    whole = 60.0
    for number in range(3):
        begin = time.monotonic()
        assert Child(lambda number=number: build(folder / f"whole {number}")).wait() == 0
        whole = min(whole, time.monotonic() - begin)
    rng = np.random.default_rng()
    stages = {"nothing": 0, "under way": 0, "whole": 0}
    for number in range(kills):
        cache = folder / str(number)
        child = Child(lambda cache=cache: build(cache))
        time.sleep(float(rng.uniform(0.02, 1.1)) * whole)
        child.kill()
        left = sorted(path.suffix for path in cache.iterdir()) if cache.exists() else []
        stages["whole" if left == [".order"] else "under way" if left else "nothing"] += 1
        named = {path: path.stat().st_mtime_ns for path in cache.glob("*.order")}
        begin = time.monotonic()
        rerun = build(cache)
        assert time.monotonic() - begin < 20 * whole + build_lock.UNSIGNED_SECONDS + 1
        for name in ("documents", "samples", "shuffle"):
            np.testing.assert_array_equal(getattr(rerun.order, name), getattr(expected, name))
        assert not list(cache.glob("*.tmp"))
        for path, written in named.items():
            assert path.stat().st_mtime_ns == written, "what had its name was whole, and is not made again"
    assert stages["under way"] >= kills // 10, f"the kills came at other times: {stages}"


def test_kills_at_random_moments_leave_no_partial_order(pair: Path, tmp_path: Path) -> None:
    kill_at_random(pair, tmp_path, 15)


@pytest.mark.slow
def test_fifty_kills_at_random_moments_leave_no_partial_order(pair: Path, tmp_path: Path) -> None:
    kill_at_random(pair, tmp_path, 50)
