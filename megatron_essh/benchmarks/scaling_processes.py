"""Processes of this machine that measure one layout after another: started, given a task, listened to, ended.

Knows nothing of what is measured: a task goes in, what `scaling_rank.py` finds comes out, line by line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from megatron_essh.benchmarks.scaling_rank import Task

ROOT = Path(__file__).resolve().parents[2]
CORES_A_RANK = 8
"""From this many on, the next launch's processes start while one is measured: imports are no longer waited for."""
LOG = 8000
"""Characters that are kept of what a failed rank printed."""

Events = Iterator[dict[str, Any]]


class Launcher(Protocol):
    """What runs a task on as many processes as it says, for at most `limit` seconds."""

    def launch(self, task: Task, limit: float, following: int) -> Events:
        """The parts that the first rank finds, each when it has it; at last {"part": "end", "failure": why or None,
        "late": whether `limit` was its end, "log": of a rank that failed, the end of what it printed}.

        following: processes of the launch after this one; 0: there is none.
        """


class Processes:
    """A `Launcher` of processes on this machine. Ends those that are left when it is exited."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._ready: list[subprocess.Popen[bytes]] = []
        """Processes that wait for a task, by rank."""
        self._logs: list[Path] = []
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._running + self._ready)

    def launch(self, task: Task, limit: float, following: int) -> Events:
        end = time.monotonic() + limit
        if len(self._ready) != task.world:
            _end(self._ready)
            self._start(task.world)
        self._running, logs, self._ready = self._ready, self._logs, []
        failures = Path(task.failures)
        failures.mkdir()
        for process in self._running:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it is dead, which its status tells
                process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
                process.stdin.flush()
        read, late = 0, False
        while True:
            over = all(process.poll() is not None for process in self._running)
            for event in _lines(Path(task.found), read):
                read += 1
                yield event
                if event["part"] == "begun" and following and (os.cpu_count() or 1) >= CORES_A_RANK * following:
                    self._start(following)
            if over:
                break
            if time.monotonic() > end:
                late = True
                _end(self._running)
                break
            time.sleep(0.02)  # ranks end and write lines; neither can be waited for together
        failed = late or any(process.returncode for process in self._running)
        failure, log = _reason(failures, logs, self._running) if failed and not late else (None, "")
        self._running = []
        yield {"part": "end", "failure": failure, "late": late, "log": log}

    def _start(self, world: int) -> None:
        """Start the processes of a launch; they wait for its task."""
        self._count += 1
        self._logs = [self._folder / f"log-{self._count}-{rank}" for rank in range(world)]
        threads = os.environ.get("OMP_NUM_THREADS", "1" if world > 1 else str(os.cpu_count() or 1))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        for rank, log in enumerate(self._logs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": threads,
                "PYTHONPATH": path,
            }
            with open(log, "wb") as out:
                command = [sys.executable, "-m", "megatron_essh.benchmarks.scaling_rank"]
                self._ready.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment)
                )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End them, whatever they do."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def _lines(path: Path, read: int) -> list[dict[str, Any]]:
    """What was written since `read` lines; whole lines alone."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines[read:]]


def _reason(failures: Path, logs: Sequence[Path], processes: Sequence[subprocess.Popen[bytes]]) -> tuple[str, str]:
    """Why a launch failed, in a line, and that rank's log: what the first rank that failed said, else how the first of
    them ended."""
    tails = [log.read_text(errors="replace")[-LOG:] for log in logs]
    if told := sorted(failures.iterdir()):
        return told[0].read_text(), tails[int(told[0].name.split("-")[1])]
    for rank, (tail, process) in enumerate(zip(tails, processes, strict=True)):
        if process.returncode:
            said = [line for line in tail.splitlines() if line.strip()]
            last = next((line for line in reversed(said) if line.startswith("error:")), said[-1] if said else "")
            return f"rank {rank} ended with status {process.returncode}: {last or 'it said nothing'}", tail
    return "no rank says why", tails[0]
