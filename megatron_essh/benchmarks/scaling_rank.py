"""One rank of one layout of `tools/benchmark.py scaling`: what is measured inside a process group.

`scaling.py` starts these processes. Each imports what it needs, then waits for a line on standard input, its task in
JSON; the first rank writes what it has found to the task's file, a JSON line a part, as soon as it has it. A rank ends
when its standard input does, so that none outlives who started it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_essh.benchmarks.timing import free_memory, peak_memory_mib, reset_peak_memory, wait
from megatron_essh.benchmarks.training import build_engine, make_case, meet_every_capacity
from megatron_essh.config import RunConfig, config_from_mapping
from megatron_essh.device import device_name
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.processes import open_mesh
from megatron_essh.training.checkpoint import CheckpointWriter
from megatron_essh.training.checkpoint.engine_state import engine_pieces, load_into
from megatron_essh.training.engine import NativeEngine

FEW_TOKENS = 256
"""Different tokens in steps whose losses are compared, at most."""
MARK = "spin_kernel"
"""Kernel of torch.cuda._sleep, behind which a profiled step begins."""
EXCHANGE = "nccl"
"""What the names of NCCL's kernels begin with."""

Interval = tuple[int, int]
"""Begin and end, in ns."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the processes of one launch do."""

    full: dict[str, Any]
    """The config whose full-capacity steps are measured, as a mapping."""
    mix: dict[str, Any]
    """The config whose elastic steps are measured, and compared with one GPU's."""
    compared: int
    """Elastic steps whose losses are compared; full-capacity steps before the timed ones."""
    timed: int
    """Steps that are timed, of each."""
    resumed: int
    """Steps after a checkpoint whose losses are compared."""
    found: str
    """File that the first rank writes to."""
    failures: str
    """Folder in which a rank that fails leaves why."""
    save: str | None
    """Folder to save a checkpoint in; None: none."""
    resume: str | None
    """A checkpoint of another layout to go on from; None: none."""
    world: int
    port: int


def covered(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of `intervals`, as intervals that do not touch, ascending."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def exchange_times(exchanges: Iterable[Interval], others: Iterable[Interval]) -> dict[str, float]:
    """Milliseconds in which exchanges ran, in which nothing else ran beside them, and in which anything ran.

    Args:
        exchanges: kernels that exchange; they may overlap.
        others: all other kernels and copies.
    """

    def length(intervals: Iterable[Interval]) -> int:
        return sum(end - begin for begin, end in covered(intervals))

    exchanges, others = list(exchanges), list(others)
    busy, work = length([*exchanges, *others]), length(others)
    return {"exchanging_ms": length(exchanges) / 1e6, "alone_ms": (busy - work) / 1e6, "busy_ms": busy / 1e6}


def main() -> None:
    task = Task(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_starter, daemon=True).start()
    rank = os.environ["RANK"]
    os.environ |= {"WORLD_SIZE": str(task.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port)}
    full, mix = (config_from_mapping(RunConfig, mapping, "the task") for mapping in (task.full, task.mix))
    if full.training.threads is not None:
        torch.set_num_threads(full.training.threads)
    with open_mesh(full.parallel, full.training.device) as mesh:
        try:
            _work(task, full, mix, mesh)
        except BaseException as error:
            # Before the other ranks hear of it: what ends them would be told in its place.
            first = (str(error).strip() or "no message").splitlines()[0]
            reason = f"{type(error).__name__}: {first}"
            (Path(task.failures) / f"{time.time_ns():020}-{rank}").write_text(f"rank {rank}: {reason}")
            raise


def _end_with_starter() -> None:
    """End this process when whoever started it is gone."""
    if not sys.stdin.read():
        os._exit(1)


def _work(task: Task, full: RunConfig, mix: RunConfig, mesh: Mesh) -> None:
    begin = time.perf_counter()

    def tell(part: str, **figures: Any) -> None:
        nonlocal begin
        now = time.perf_counter()
        if mesh.is_first:
            with open(task.found, "a") as file:
                file.write(json.dumps({"part": part, "seconds": now - begin, **figures}) + "\n")
        begin = now

    tell("begun", device=device_name(mesh.device))
    _measure(full, "full", task, mesh, tell)
    _measure(mix, "elastic", task, mesh, tell)


def _measure(config: RunConfig, capacity: str, task: Task, mesh: Mesh, tell: Callable[..., None]) -> None:
    """Time and profile steps of `capacity`; with the mix's, compare, resume and save too."""
    reset_peak_memory(mesh.device)
    engine = build_engine(make_case(config, "essh", capacity, compiled=False), mesh)
    native = config.parallel.engine == "native"
    if native and config.training.capture and not config.data.document_mask:
        meet_every_capacity(engine)
    before = train(engine, 0, task.compared, few_tokens(config))
    timed = train(engine, task.compared, task.timed, config.model.vocab_size)
    step = task.compared + task.timed
    peaks = _gathered(mesh, [peak_memory_mib(mesh.device), _reserved_mib(mesh.device)])
    part = "mix" if capacity == "elastic" else "full"
    tell(
        part,
        ms_per_step=statistics.fmean(row["ms"] for row in timed),
        all_ms=[row["ms"] for row in timed],
        tokens=config.training.global_batch * config.data.sequence_length,
        peak_mib=max(peak for peak, _ in peaks),
        peak_of="allocations" if mesh.device.type == "cuda" else "process",
        reserved_mib=max(reserved for _, reserved in peaks),
    )
    if part == "mix":
        tell("compared", steps=before)
    if mesh.world > 1:
        tell("profile", capacity=part, profile=profile_step(engine, step, config.model.vocab_size))
        step += 1
    if part == "mix":
        if task.resume is not None:
            tell("resume", **_resume(engine, Path(task.resume), task.resumed))
        if task.save is not None:
            tell("checkpoint", **_save(engine, Path(task.save), step, task.resumed))
    engine.close()
    del engine
    free_memory(mesh.device)


def few_tokens(config: RunConfig) -> int:
    """Different tokens in steps whose losses are compared: so few of the vocabulary that the model has learnt after a
    step or two which they are, and losses show whether updates are the same."""
    return max(1, min(FEW_TOKENS, config.model.vocab_size // 8))


def train(engine: NativeEngine, first: int, count: int, tokens: int) -> list[dict[str, Any]]:
    """Take steps `first` and on, of random tokens below `tokens` that depend on the step alone; what each came to."""
    config, rows = engine.config, []
    for step in range(first, first + count):
        shape = (config.training.global_batch, config.data.sequence_length + 1)
        batch = torch.randint(0, tokens, shape, generator=torch.Generator().manual_seed(step))[engine.rows(step)]
        wait(engine.device)
        begin = time.perf_counter()
        report = engine.train_step(step, batch)
        wait(engine.device)
        ms = 1e3 * (time.perf_counter() - begin)
        rows.append({"step": step, "loss": report.loss, "grad_norm": report.grad_norm, "ms": ms})
    return rows


def profile_step(engine: NativeEngine, step: int, tokens: int) -> dict[str, Any] | None:
    """One step under the profiler: `exchange_times` of its kernels, by rank; None where there is no GPU or it sees
    none. The ranks begin it together, so that none waits in an exchange for another's profiler."""
    mesh = engine.mesh
    if mesh.device.type != "cuda":
        train(engine, step, 1, tokens)
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        if mesh.world_group is not None:
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.world_group)
        wait(mesh.device)
        torch.cuda._sleep(1000)
        (row,) = train(engine, step, 1, tokens)
    kernels = [
        (event.name(), (event.start_ns(), event.start_ns() + event.duration_ns()))
        for event in record.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    mark = max((span[1] for name, span in kernels if MARK in name), default=None)
    after = [] if mark is None else [(name, span) for name, span in kernels if span[0] >= mark]
    times = exchange_times(
        [span for name, span in after if name.startswith(EXCHANGE)],
        [span for name, span in after if not name.startswith(EXCHANGE)],
    )
    found = _gathered(mesh, [float(len(after)), *times.values()])
    if min(row[0] for row in found) == 0:
        return None
    return {"ms": row["ms"], "ranks": [dict(zip(times, values, strict=True)) for _, *values in found]}


def _save(engine: NativeEngine, folder: Path, step: int, resumed: int) -> dict[str, Any]:
    """Save after `step` steps, read it back, and go on for `resumed` steps."""
    mesh, begin = engine.mesh, time.perf_counter()
    with CheckpointWriter(folder, mesh, keep_last=1) as writer:
        path = writer.save(step, engine_pieces(engine), {"step": step, "engine": engine.state_values()})
        held_up = time.perf_counter() - begin
        writer.wait()
    saved = time.perf_counter() - begin
    _together(mesh)
    loaded = _load(engine, path)
    times = _gathered(mesh, [held_up, saved])
    size = sum(file.stat().st_size for file in path.iterdir())
    return {
        "path": str(path),
        "bytes": size,
        "held_up_s": max(row[0] for row in times),
        "save_s": max(row[1] for row in times),
        "load_s": loaded,
        "steps": train(engine, step, resumed, few_tokens(engine.config)),
    }


def _resume(engine: NativeEngine, path: Path, resumed: int) -> dict[str, Any]:
    """Go on from another layout's checkpoint for `resumed` steps."""
    loaded = _load(engine, path)
    step = int(path.name.removeprefix("step_"))
    return {"load_s": loaded, "steps": train(engine, step, resumed, few_tokens(engine.config))}


def _load(engine: NativeEngine, path: Path) -> float:
    """Seconds of the slowest rank."""
    begin = time.perf_counter()
    load_into(engine, path)
    wait(engine.device)
    return max(row[0] for row in _gathered(engine.mesh, [time.perf_counter() - begin]))


def _gathered(mesh: Mesh, values: list[float]) -> list[list[float]]:
    """Every rank's `values`, in their order, on all of them."""
    own = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    if mesh.world_group is None:
        return [own.tolist()]
    all_of = [torch.empty_like(own) for _ in range(mesh.world)]
    dist.all_gather(all_of, own, group=mesh.world_group)
    return [row.tolist() for row in all_of]


def _together(mesh: Mesh) -> None:
    _gathered(mesh, [0.0])


def _reserved_mib(device: torch.device) -> float:
    return torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else peak_memory_mib(device)


if __name__ == "__main__":
    main()
