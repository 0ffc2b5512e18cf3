"""Runs of several processes end as one process does, and end together: launched, killed, failing, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_essh.training.checkpoint import checkpoint_steps, load_checkpoint

ROOT = Path(__file__).resolve().parents[2]

AT_STEP = """
import os, signal, sys
from megatron_essh.training.engine import NativeEngine
inner, calls = NativeEngine.forward_backward, 0
def broken(self, *arguments):
    global calls
    calls += 1
    if calls == {count} and self.mesh.rank == {rank}:
        {what}
    return inner(self, *arguments)
NativeEngine.forward_backward = broken
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """The words that run `launch/pretrain.py` after some Python."""

    def write(hook: str) -> list[str]:
        path = tmp_path / "hooked.py"
        path.write_text(
            f"{hook}\nimport runpy\nrunpy.run_path({str(ROOT / 'launch/pretrain.py')!r}, run_name='__main__')\n"
        )
        return [str(path)]

    return write


@pytest.fixture
def torchrun(workplace, environment, script) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the tiny config on two ranks under torchrun, which starts them anew up to `restarts` times."""

    def run(*arguments: object, hook: str = "", restarts: int = 0) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words += [f"--max-restarts={restarts}", *script(hook)]
        return subprocess.run(
            [*words, str(workplace / "config.yaml"), *map(str, arguments)],
            capture_output=True, text=True, timeout=120, env=os.environ | environment,
        )  # fmt: skip

    return run


@pytest.fixture
def ranks(workplace, environment, script) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Starts the tiny config on two ranks that no launcher watches over; does not wait."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, hook: str = "") -> list[subprocess.Popen[str]]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            words = [sys.executable, *script(hook), f"--local_rank={rank}", workplace / "config.yaml", *arguments]
            started.append(
                subprocess.Popen(
                    list(map(str, words)),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | environment | place,
                )
            )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def assert_near(folder: Path, expected: Path) -> None:
    """The same log and the same end, but for rounding."""
    logs = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (folder, expected)]
    assert [(r["kind"], r["step"]) for r in logs[0]] == [(r["kind"], r["step"]) for r in logs[1]]
    for found, wanted in zip(*logs, strict=True):
        for key in {"loss", "loss_by_capacity", "loss_by_tier", "full_share", "tokens"} & set(wanted):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), (wanted["step"], key)
    (tensors, values), (others, other_values) = (
        load_checkpoint(f / "checkpoints" / "step_00000040") for f in (folder, expected)
    )
    assert set(tensors) == set(others)
    for name, tensor in others.items():
        if name.startswith("model."):
            assert (tensors[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert values["data"] == other_values["data"]
    assert values["progress"]["tokens"] == other_values["progress"]["tokens"]


def test_a_rank_killed_under_torchrun_ends_all_and_the_resume_ends_as_one_process_does(
    torchrun, pretrained, workplace, tmp_path
) -> None:
    folder = workplace / "two_ranks"
    killed_at = tmp_path / "killed"
    kill = f"open({str(killed_at)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    finished = torchrun("--output", folder, hook=AT_STEP.format(count=9, rank=1, what=kill))
    assert finished.returncode != 0
    assert time.time() - killed_at.stat().st_mtime < 60
    assert "SIGKILL" in finished.stderr
    assert checkpoint_steps(folder / "checkpoints") == [6]
    assert "layout: 2 processes, tensor 1 x data 2, each on the CPU" in finished.stdout

    finished = torchrun("--output", folder)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(f"continuing from {folder}/checkpoints/step_00000006") == 1, "one rank speaks for all"
    assert finished.stdout.count("done: 40 steps") == 1
    assert_near(folder, pretrained)
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
    assert 0 <= record["ranks"]["communication_share"] + record["ranks"]["waiting_share"] < 1
    assert record["ranks"]["slowest_pace"] >= 1


def test_ranks_that_torchrun_starts_anew_go_on_from_the_checkpoint(torchrun, pretrained, workplace) -> None:
    """torchrun keeps its store, in which the ranks before left where to reach them."""
    folder = workplace / "restarted"
    kill = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), signal.SIGKILL)"
    finished = torchrun("--output", folder, hook=AT_STEP.format(count=9, rank=1, what=kill), restarts=1)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(f"continuing from {folder}/checkpoints/step_00000006") == 1
    assert_near(folder, pretrained)


def test_without_a_launcher_too_a_killed_rank_ends_the_other(ranks, workplace) -> None:
    """The other one waits in an exchange for one that will never come."""
    kill = AT_STEP.format(count=3, rank=1, what="os.kill(os.getpid(), signal.SIGKILL)")
    first, second = ranks("--output", workplace / "killed_alone", hook=kill)
    assert second.wait(120) == -signal.SIGKILL
    begin = time.monotonic()
    output, _ = first.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    assert first.returncode == 1
    assert "rank 0 ends because rank 1 has ended: its process is gone: killed" in output


def test_a_failing_rank_is_told_with_its_traceback(ranks, workplace) -> None:
    fail = AT_STEP.format(count=3, rank=1, what="raise KeyError('a defect of rank 1')")
    first, second = ranks("--output", workplace / "failed_alone", hook=fail)
    output, _ = first.communicate(timeout=120)
    assert (first.returncode, second.wait(60)) == (1, 1)
    assert "rank 0 ends because rank 1 has ended: Traceback" in output
    assert "in broken" in output
    assert "KeyError: 'a defect of rank 1'" in output


def test_one_error_of_all_ranks_is_told_once(ranks, workplace) -> None:
    words = ["--output", workplace / "refused_together", "--set", "elastic.slot_sequences=4", "training.micro_batch=4"]
    processes = ranks(*words)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert outputs[0].count("error: training.global_batch 4: 1 slots of elastic.slot_sequences 4 do not divide") == 1
    assert "set it to 8" in outputs[0]
    assert "Traceback" not in outputs[0]
    assert outputs[1] == ""


def test_a_stop_of_one_rank_saves_and_ends_both_and_one_process_continues(ranks, launch, pretrained, workplace) -> None:
    folder = workplace / "stopped_together"
    ask = AT_STEP.format(count=9, rank=1, what="os.kill(os.getpid(), signal.SIGTERM)")
    first, second = ranks("--output", folder, hook=ask)
    output, _ = first.communicate(timeout=120)
    assert (first.returncode, second.wait(60)) == (0, 0), output
    assert "stopped by a signal to another rank after step 9/40: saved" in output
    assert checkpoint_steps(folder / "checkpoints") == [9, 6]
    finished = launch("pretrain", "--output", folder)
    assert finished.status == 0, finished.output
    assert_near(folder, pretrained)
