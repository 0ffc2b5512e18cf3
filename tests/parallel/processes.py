"""Runs a function on every rank of a small process group, for the parallel tests.

Ranks are forked from one server process that has PyTorch loaded and has computed nothing: they start in no time, and
share no thread with the tests; ranks of GPUs are processes of their own. This file is also what both run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE = 3.0
"""Seconds that the other ranks have to end once one has failed."""
START = 120.0
"""Seconds that the server has to start: PyTorch may have to be read from a cold disk."""


class RankError(AssertionError):
    """A rank raised, died, or did not end in time."""


class Server:
    """The process that ranks are forked from. One a test session; `run` may be called any number of times."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo", timeout: float = 60.0
    ) -> list[Any]:
        """What `function(*args)` returns on each of `world` ranks, in their order.

        The default process group is there when it is called (rendezvous through a file, no port). `function` is a
        function of a module's top level, arguments and results are pickled; its file is loaded anew by each rank, under
        the name that it has here. With `backend` nccl rank r is given CUDA device r.

        Raises:
            RankError: with the traceback of every rank that failed, the first one first, or with the ranks that had
                not ended after `timeout` seconds, and where they were.
        """
        with tempfile.TemporaryDirectory(prefix="ranks-") as name:
            folder = Path(name)
            (folder / "arguments").write_bytes(pickle.dumps(args))
            task = {
                "folder": name,
                "world": world,
                "file": sys.modules[function.__module__].__file__,
                "module": function.__module__,
                "function": function.__qualname__,
                "backend": backend,
                "timeout": timeout,
                "environment": dict(os.environ),
            }
            failures = self._ask(task, timeout)
            if failures:
                raise RankError("\n".join(f"rank {rank} {what}" for rank, what in failures))
            return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None

    def _ask(self, task: dict[str, Any], timeout: float) -> list[tuple[int, str]]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            assert self._line(START) == "ready"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        failures: list[tuple[int, str]] = json.loads(self._line(timeout + GRACE + 30))
        return failures

    def _line(self, timeout: float) -> str:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], timeout)
        line = process.stdout.readline() if readable else ""
        if not line:
            process.kill()
            self._process = None
            raise RankError("the process that ranks are forked from gave no answer")
        return line.rstrip("\n")


def serve() -> None:
    """Read tasks from stdin, a line each, and answer each with the list of what failed."""
    import torch
    import torch.distributed

    import megatron_essh.elastic.distillation
    import megatron_essh.training.engine  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports a good deal of PyTorch on its first use
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        started = {_fork(task, rank): rank for rank in range(task["world"])}
        print(json.dumps(_wait(started, Path(task["folder"]), task["timeout"])), flush=True)


def _wait(running: dict[int, int], folder: Path, timeout: float) -> list[tuple[int, str]]:
    """Wait for the ranks by process id; kill those that are left after the timeout or after another's failure."""
    failures: list[tuple[int, str]] = []
    end = time.monotonic() + timeout
    late = f"had not ended after {timeout:.0f} s"
    while running and time.monotonic() < end:
        for process, rank in list(running.items()):
            if os.waitpid(process, os.WNOHANG)[0] == 0:
                continue
            del running[process]
            if not (folder / f"result-{rank}").exists():
                if not failures:
                    end, late = min(end, time.monotonic() + GRACE), "was still running when another had failed"
                log = (folder / f"log-{rank}").read_text(errors="replace")
                failures.append((rank, f"failed:\n{log[-8000:]}"))
        time.sleep(0.005)
    for process in running:
        os.kill(process, signal.SIGUSR1)  # says where it is
    if running:
        time.sleep(0.3)
    for process, rank in running.items():
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        failures.append((rank, f"{late}:\n{(folder / f'log-{rank}').read_text(errors='replace')[-8000:]}"))
    return failures


def _fork(task: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    folder = Path(task["folder"])
    try:
        log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if task["backend"] == "nccl":  # CUDA cannot be used in a fork of a process that has so much as counted devices
            os.execv(sys.executable, [sys.executable, __file__, json.dumps(task), str(rank)])
        _run(task, rank, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(task: dict[str, Any], rank: int, folder: Path) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.environ.update(task["environment"])
    if task["backend"] == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        task["backend"],
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=task["world"],
        timeout=timedelta(seconds=task["timeout"]),
    )
    function = getattr(_load(task["file"], task["module"]), task["function"])
    result = function(*pickle.loads((folder / "arguments").read_bytes()))
    dist.barrier()  # nobody leaves while another still speaks to it
    dist.destroy_process_group()
    part = folder / f"part-{rank}"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"result-{rank}")


def _load(file: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if len(sys.argv) == 3:
        alone = json.loads(sys.argv[1])
        _run(alone, int(sys.argv[2]), Path(alone["folder"]))
    else:
        serve()
