"""A launched run under DeepSpeed ends as the native one does, in good order, and its checkpoints are anyone's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_essh.training.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = [
    pytest.param([sys.executable], id="alone", marks=pytest.mark.layouts),
    pytest.param([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], id="torchrun"),
    pytest.param(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2"],
        id="deepspeed",
        marks=pytest.mark.layouts,
    ),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_under_deepspeed_ends_as_the_native_one(workplace, environment, pretrained, tmp_path, launcher) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    if "--num_gpus=2" in launcher:
        launcher = [*launcher, f"--master_port={port}"]
    words = [*launcher, str(ROOT / "launch" / "pretrain.py"), str(workplace / "config.yaml"), "--output", str(tmp_path)]
    words += ["--set", "parallel.engine=deepspeed", "parallel.zero_stage=2"]
    run = {"capture_output": True, "text": True, "timeout": 240, "env": os.environ | environment}
    ended = subprocess.run(words, **run)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done: 40 steps") == 1, "one rank speaks for all"
    assert len(launcher) == 1 or "layout: 2 processes, tensor 1 x data 2 under DeepSpeed, ZeRO 2," in ended.stdout
    assert "destroy" not in ended.stderr
    logs = [f / "metrics.jsonl" for f in (tmp_path, pretrained)]
    found, wanted = ([r for r in map(json.loads, log.read_text().splitlines()) if r["kind"] == "step"] for log in logs)
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in wanted], rel=1e-5)
    tensors, others = (load_checkpoint(f / "checkpoints" / "step_00000040")[0] for f in (tmp_path, pretrained))
    assert set(tensors) == set(others)
    for name, tensor in others.items():
        if name.startswith("model."):
            assert (tensors[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
