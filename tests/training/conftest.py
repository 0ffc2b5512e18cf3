"""Shared by the training tests: processes that may be killed, a tiny data set, and the commands run on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_essh.data.indexed_dataset import IndexedDatasetWriter

ROOT = Path(__file__).resolve().parents[2]

SERVER = """
import json, os, runpy, sys, traceback
import torch
import megatron_essh.training.loop  # here and not in each run, which then starts in no time
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports a good deal of PyTorch on its first use
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(task["environment"])
        try:
            exec(task["hook"], {})
            sys.argv = [task["script"], *task["arguments"]]
            runpy.run_path(task["script"], run_name="__main__")
            status = 0
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def in_child() -> Callable[[Callable[[], object]], tuple[int, str]]:
    """Runs a function in a forked process: (exit code or minus the signal that killed it, error text)."""

    def run(function: Callable[[], object]) -> tuple[int, str]:
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            status = 0
            try:
                function()
            except BaseException as error:
                status = 1
                os.write(writer, f"{type(error).__name__}: {error}\n{traceback.format_exc()}".encode()[:60_000])
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), text

    return run


@dataclass(frozen=True)
class Finished:
    """A command that ended: its exit code, or minus the signal that killed it, and all it printed."""

    status: int
    output: str


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny token pair `train`, another, `valid`, and `config.yaml` of a run of 40 steps on them."""
    folder = tmp_path_factory.mktemp("training")
    generator = np.random.default_rng(0)
    for name, documents in (("train", 90), ("valid", 10)):
        with IndexedDatasetWriter(folder / name, np.dtype(np.uint16)) as writer:
            for length in generator.integers(1, 60, documents):
                # Half of the tokens are the same one, so that there is something to learn in a few steps.
                text = np.where(generator.random(length) < 0.5, 7, generator.integers(0, 256, length))
                writer.add_document(np.append(text, 256))
    config = {
        "model": {
            "d_model": 32,
            "n_layers": 3,
            "channels": 4,
            "modes": 4,
            "value_width": 8,
            "ff_width": 192,
            "vocab_size": 260,
            "attention_layers": [1],
            "window": 16,
            "head_dim": 16,
            "bank_length": 64,
        },
        "elastic": {
            "slot_sequences": 2,
            "full_only_fraction": 0.1,
            "full_share": 0.5,
            "ordering_interval": 6,
        },
        "data": {"train": str(folder / "train"), "validation": str(folder / "valid"), "sequence_length": 24},
        "optimizer": {"learning_rate": 0.01},
        "training": {
            "steps": 40,
            "global_batch": 4,
            "micro_batch": 2,
            "precision": "fp32",
            "seed": 3,
            "loss_chunk": 16,
            "validate_every": 10,
            "validation_batches": 2,
            "validation_tiers": ["T1", "T10"],
            "log_every": 4,
            "device": "cpu",
            "threads": 1,
        },
        "refinement": {"steps": 9, "global_batch": 4, "learning_rate": 0.001},
        "checkpoint": {"save_every": 6, "keep_last": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="session")
def environment(workplace: Path) -> dict[str, str]:
    """Variables for a command's process: one thread, and a cache of its own."""
    return {"ESSH_CACHE": str(workplace / "cache"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def launch(workplace: Path, environment: dict[str, str]) -> Iterator[Callable[..., Finished]]:
    """Runs `launch/<command>.py` on the tiny config in a fresh process and waits for its end.

    `launch("pretrain", "--output", path, hook=code, extra={"WORLD_SIZE": "2"})`: `hook` is Python that the
    process executes first, `extra` are environment variables.
    """
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run(command: str, *arguments: object, hook: str = "", extra: dict[str, str] | None = None) -> Finished:
        log = workplace / "log.txt"
        task = {
            "script": str(ROOT / "launch" / f"{command}.py"),
            "arguments": [str(workplace / "config.yaml"), *map(str, arguments)],
            "log": str(log),
            "hook": hook,
            "environment": extra or {},
        }
        print(json.dumps(task), file=server.stdin, flush=True)
        server.stdout.readline()
        status = int(server.stdout.readline())
        return Finished(status, log.read_text())

    yield run
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="session")
def pretrained(workplace: Path, launch: Callable[..., Finished]) -> Path:
    """The folder of an uninterrupted pretraining run."""
    folder = workplace / "pretrained"
    finished = launch("pretrain", "--output", folder)
    assert finished.status == 0, finished.output
    return folder


@pytest.fixture
def start(workplace: Path, environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `launch/<command>.py` on the tiny config as a process of the operating system; does not wait."""
    started: list[subprocess.Popen[str]] = []

    def run(command: str, *arguments: object) -> subprocess.Popen[str]:
        # At a low priority, so that on a busy machine the run does not end before the test can interrupt it.
        words = [
            "nice",
            "-n",
            "19",
            sys.executable,
            ROOT / "launch" / f"{command}.py",
            workplace / "config.yaml",
            *arguments,
        ]
        process = subprocess.Popen(
            list(map(str, words)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def wait_for_step() -> Callable[[Path, int, subprocess.Popen[str]], None]:
    """Waits until a run's metrics.jsonl shows a step, while its process lives."""

    def wait(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            if (folder / "metrics.jsonl").exists():
                lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
                if any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n")):
                    return
            time.sleep(0.002)
        raise AssertionError(f"step {step} never came; the process ended with {process.poll()}")

    return wait
