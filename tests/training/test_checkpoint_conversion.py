"""Conversion: to one file and back is the very checkpoint; DeepSpeed's folders give what was cut up; nothing is run."""

from __future__ import annotations

import enum
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_essh.config import config_to_mapping
from megatron_essh.export.loading import open_model
from megatron_essh.parallel.tensor_parallel import sharding_of
from megatron_essh.training.checkpoint import (
    CheckpointWriter,
    Piece,
    checkpoint_steps,
    load_checkpoint,
    model_sha256,
    read_values,
    save_checkpoint,
)
from megatron_essh.training.checkpoint.deepspeed_folder import read_deepspeed_folder
from megatron_essh.training.checkpoint.pieces import Span, copy_overlap
from megatron_essh.training.checkpoint.writer import save_parts

TOOL = "tools/convert_checkpoint.py"


def run_state(run: Any) -> dict[str, Tensor]:
    """A run's tensors: its model's parameters, and moments."""
    generator = torch.Generator().manual_seed(1)
    state = {f"model.{n}": p.detach() for n, p in run.model.named_parameters()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"{moment}.{n}": torch.rand(p.shape, generator=generator) for n, p in run.model.named_parameters()}
    return state


@pytest.fixture
def sharded_run(write_run: Callable[..., Any], tmp_path: Path) -> tuple[Any, Path]:
    """A run, and a checkpoint of it as two tensor-parallel ranks write it."""
    run = write_run()
    parts: list[dict[str, Piece]] = [{}, {}]
    for name, tensor in run_state(run).items():
        sharding = sharding_of(name.split(".", 1)[1], run.config.model)
        for rank in range(2 if sharding else 1):
            part = sharding.take(tensor, rank, 2) if sharding else tensor
            parts[rank][name] = Piece(part, tuple(tensor.shape), sharding, 2, rank)
    parts[0]["rng.torch"] = Piece(torch.get_rng_state(), (5056,))
    values = read_values(run.checkpoint) | {"step": 9, "position": [1, 2.5, "x"]}
    return run, save_parts(tmp_path / "sharded" / "checkpoints", 9, parts, values)


def test_a_checkpoint_of_any_layout_becomes_one_file_and_again_the_very_checkpoint(
    sharded_run: Any, command: Callable[..., Any], tmp_path: Path
) -> None:
    run, path = sharded_run
    done = command(TOOL, "to-file", tmp_path / "sharded", tmp_path / "model.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {tmp_path}/model.safetensors, ")
    plain = load_file(tmp_path / "model.safetensors")
    assert {n: t.tolist() for n, t in plain.items()} == {n: p.tolist() for n, p in run.model.named_parameters()}
    assert (tmp_path / "model.safetensors").read_bytes() == (run.checkpoint / "model.safetensors").read_bytes()

    assert command(TOOL, "to-file", path, tmp_path / "all.safetensors", "--everything").returncode == 0
    done = command(TOOL, "from-file", tmp_path / "all.safetensors", tmp_path / "back")
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path}/back/step_00000009\n")
    tensors, values = load_checkpoint(tmp_path / "back" / "step_00000009")
    original, original_values = load_checkpoint(path)
    assert values == original_values
    assert set(tensors) == set(original)
    assert all(torch.equal(tensors[n], original[n]) and tensors[n].dtype == original[n].dtype for n in original)
    assert model_sha256(path) == model_sha256(tmp_path / "back" / "step_00000009")


def test_a_plain_file_of_parameters_with_its_config_opens_as_a_model(
    write_run: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    run = write_run()
    file, config = tmp_path / "plain.safetensors", tmp_path / "config.yaml"
    save_file({n: p.detach().clone() for n, p in run.model.named_parameters()}, file)
    config.write_text(yaml.safe_dump(config_to_mapping(run.config)))
    done = command(TOOL, "from-file", file, tmp_path / "made", "--config", config, "--step", 5)
    assert (done.returncode, done.stderr) == (0, "")
    model, _, provenance = open_model(tmp_path / "made")
    assert (provenance.step, provenance.stage) == (5, "pretrain")
    assert all(torch.equal(p, dict(run.model.named_parameters())[n]) for n, p in model.named_parameters())
    assert provenance.sha256 == model_sha256(run.checkpoint)


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(
    write_run: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    run = write_run()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_to_mapping(run.config)))
    file = tmp_path / "f.safetensors"
    named = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    first = next(iter(named))
    cases: list[tuple[dict[str, Tensor], list[object], str]] = [
        (named, [], "holds parameters alone; give --config"),
        ({**named, "odd": torch.ones(1)}, ["--config", tmp_path / "config.yaml"], "with odd (0 missing, 1 unknown)"),
        ({n: t for n, t in named.items() if n != first}, ["--config", tmp_path / "config.yaml"], f"without {first}"),
        ({**named, first: torch.ones(2)}, ["--config", tmp_path / "config.yaml"], f"{first}: shape (2,); the config"),
    ]
    for tensors, words, message in cases:
        save_file(tensors, file)
        done = command(TOOL, "from-file", file, tmp_path / "made", *words)
        assert done.returncode == 2
        assert message in done.stderr
        assert not (tmp_path / "made").exists()
    done = command(TOOL, "to-file", run.folder, file)
    assert done.returncode == 2
    assert f"{file}: is already there" in done.stderr
    content = bytearray((run.checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run.checkpoint / "model.safetensors").write_bytes(content)
    done = command(TOOL, "to-file", run.checkpoint, tmp_path / "new.safetensors")
    assert done.returncode == 2
    assert "its content is not what was saved" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if "safetensors" in p.name) == ["f.safetensors"]


def test_conversion_adds_to_a_folder_and_removes_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, {"model.a": torch.ones(1)}, {}, keep_last=5)
    save_parts(tmp_path, 3, [{"model.a": Piece(torch.ones(1), (1,))}, {}], {"step": 3})
    assert checkpoint_steps(tmp_path) == [3, 2, 1]
    with CheckpointWriter(tmp_path, keep_last=2) as saving:
        saving.save(4, {"model.a": Piece(torch.ones(1), (1,))}, {})
    assert checkpoint_steps(tmp_path) == [4, 3]


# -- DeepSpeed ------------------------------------------------------------------------------------------------------


class FakeClass:
    """Pickles as a class of DeepSpeed, which need not be there."""

    def __init__(self, value: int = 1) -> None:
        self.value = value


@pytest.fixture
def deepspeed_classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """LossScaler, fragment_address and ZeroStageEnum, to be written and then gone."""
    classes: dict[str, type] = {}
    for module, name, kind in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", FakeClass),
        ("deepspeed.utils.tensor_fragment", "fragment_address", FakeClass),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", enum.IntEnum),
    ):
        if kind is FakeClass:
            made = type(name, (FakeClass,), {"__module__": module})
        else:
            made = enum.IntEnum(name, {"one": 1, "two": 2, "three": 3}, module=module)  # type: ignore[misc]
        home = ModuleType(module)
        setattr(home, name, made)
        parts = module.split(".")
        for length in range(1, len(parts)):
            parent = ".".join(parts[:length])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, module, home)
        classes[name] = made
    return classes


def write_deepspeed(
    folder: Path,
    state: dict[str, Tensor],
    groups: list[list[str]],
    stage: int,
    dp: int,
    classes: dict[str, Any],
    **tp: Any,
) -> None:
    """The files that DeepSpeed 0.19.8 writes of `state` (model.NAME, exp_avg.NAME, exp_avg_sq.NAME).

    Their form is that of files which it wrote itself, in fp32 and bf16, on two ranks.
    """
    tag, tp_rank = folder / "global_step12", tp.get("tp_rank", 0)
    tag.mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_text("global_step12")
    shapes = [OrderedDict((n, state[f"model.{n}"].shape) for n in group) for group in groups]
    model = {
        "module": OrderedDict(
            (n, state[f"model.{n}"].bfloat16() if stage < 3 else torch.ones(0)) for g in groups for n in g
        ),
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": {},
        "global_steps": 12,
        "dp_world_size": dp,
        "ds_config": {"zero_optimization": {"stage": stage}},
    }
    flat: dict[str, list[list[Tensor]]] = {}
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        flat[kind] = [[] for _ in range(dp)]
        for group in groups:
            tensors = [state[f"{kind}.{n}"].reshape(-1) for n in group]
            if stage < 3:
                joined = torch.cat(tensors)
                size = -(-len(joined) // (2 * dp)) * 2
                padded = torch.cat([joined, torch.full((size * dp - len(joined),), math.nan)])
                for rank in range(dp):
                    lean = kind == "model" and rank == dp - 1  # as its stages 1 and 2 strip the parameters' padding
                    end = len(joined) if lean else size * (rank + 1)
                    flat[kind][rank].append(padded[size * rank : max(end, size * rank)].clone())
            else:
                cuts: list[list[Tensor]] = [[] for _ in range(dp)]
                for tensor in tensors:
                    size = -(-len(tensor) // dp)
                    padded = torch.cat([tensor, torch.full((size * dp - len(tensor),), math.nan)])
                    for rank in range(dp):
                        cuts[rank].append(padded[size * rank : size * (rank + 1)])
                for rank in range(dp):
                    flat[kind][rank].append(torch.cat(cuts[rank]))
    for rank in range(dp):
        kept = {
            "state": {
                g: {
                    "step": torch.tensor(11.0),
                    "exp_avg": flat["exp_avg"][rank][g],
                    "exp_avg_sq": flat["exp_avg_sq"][rank][g],
                }
                for g in range(len(groups))
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        }
        content: dict[str, Any] = {
            "loss_scaler": classes["LossScaler"](),
            "zero_stage": classes["ZeroStageEnum"](stage),
        }
        if stage < 3:
            content |= {
                "single_partition_of_fp32_groups": flat["model"][rank],
                "base_optimizer_state": kept,
                "partition_count": [dp] * len(groups),
                "param_alignment_paddings": [[0] * len(group) for group in groups],
                "param_slice_mappings": [OrderedDict((n, classes["fragment_address"]()) for n in g) for g in groups],
            }
        else:
            content |= {"fp32_flat_groups": flat["model"][rank], "optimizer_state_dict": kept, "partition_count": dp}
        prefix = "bf16_" if stage == 1 else ""
        file = f"{prefix}zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": content, "ds_config": {}}, tag / file)
        if stage == 3:
            torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}_model_states.pt")
    if stage < 3:
        torch.save(model, tag / f"mp_rank_{tp_rank:02d}_model_states.pt")


def joined(parts: list[dict[str, Piece]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    count: dict[str, int] = {}
    for part in parts:
        for name, piece in part.items():
            target = whole.setdefault(name, torch.full(piece.shape, math.nan))
            count[name] = count.get(name, 0) + copy_overlap(
                piece.tensor.reshape(-1), piece.span, target.view(-1), Span.of(piece.shape)
            )
    assert count == {name: tensor.numel() for name, tensor in whole.items()}, "every element once"
    return whole


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_deepspeeds_partitions_give_parameters_and_moments_back(
    tmp_path: Path, deepspeed_classes: dict[str, type], stage: int, dp: int, command: Callable[..., Any]
) -> None:
    shapes = {"a.weight": (3, 5), "a.bias": (3,), "embedding.weight": (7, 5), "norm": (1,)}
    state = {f"{k}.{n}": torch.randn(s) for k in ("model", "exp_avg", "exp_avg_sq") for n, s in shapes.items()}
    write_deepspeed(
        tmp_path / "ds", state, [["a.weight", "a.bias"], ["embedding.weight", "norm"]], stage, dp, deepspeed_classes
    )
    read = read_deepspeed_folder(tmp_path / "ds")
    assert (read.step, read.updates) == (12, 11)
    found = joined(read.parts)
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    done = command(TOOL, "to-file", tmp_path / "ds", tmp_path / "model.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    plain = load_file(tmp_path / "model.safetensors")
    assert {n: t.tolist() for n, t in plain.items()} == {n: state[f"model.{n}"].tolist() for n in shapes}


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_with_tensor_parallel_ranks_becomes_a_checkpoint_of_our_model(
    tmp_path: Path,
    deepspeed_classes: dict[str, type],
    stage: int,
    write_run: Callable[..., Any],
    command: Callable[..., Any],
) -> None:
    run = write_run()
    state = run_state(run)
    names = [n for n, _ in run.model.named_parameters()]
    for tp_rank in range(2):
        local = {}
        for name, tensor in state.items():
            sharding = sharding_of(name.split(".", 1)[1], run.config.model)
            local[name] = sharding.take(tensor, tp_rank, 2) if sharding else tensor
        write_deepspeed(tmp_path / "ds", local, [names[::2], names[1::2]], stage, 2, deepspeed_classes, tp_rank=tp_rank)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_to_mapping(run.config)))
    done = command(TOOL, "to-file", tmp_path / "ds", tmp_path / "m.safetensors")
    assert done.returncode == 2
    assert "of 2 tensor-parallel ranks: give --config" in done.stderr
    words = ("from-deepspeed", tmp_path / "ds", tmp_path / "made", "--config", tmp_path / "config.yaml")
    done = command(TOOL, *words)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"wrote {tmp_path}/made/step_00000012\n")
    tensors, values = load_checkpoint(tmp_path / "made" / "step_00000012")
    assert set(tensors) == set(state)
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    assert values["engine"] == {"updates": 11}
    model, _, provenance = open_model(tmp_path / "made")
    assert (provenance.step, provenance.sha256) == (12, model_sha256(run.checkpoint))
    assert all(torch.equal(p, state[f"model.{n}"]) for n, p in model.named_parameters())


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(MARK),)


MARK = Path("/tmp/megatron_essh_test_that_must_never_exist")


def test_what_deepspeed_folders_hold_is_never_run_and_what_is_not_supported_is_named(
    tmp_path: Path, deepspeed_classes: dict[str, type], command: Callable[..., Any]
) -> None:
    state = {f"{k}.w": torch.randn(4, 3) for k in ("model", "exp_avg", "exp_avg_sq")}
    folder = tmp_path / "ds"
    tag = folder / "global_step12"
    write_deepspeed(folder, state, [["w"]], 2, 2, deepspeed_classes)
    model_file, optimizer_file = tag / "mp_rank_00_model_states.pt", tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    models, optimizers = (torch.load(f, weights_only=False) for f in (model_file, optimizer_file))

    def refused(message: str) -> None:
        done = command(TOOL, "to-file", folder, tmp_path / "m.safetensors")
        assert done.returncode == 2, done
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "m.safetensors").exists()

    torch.save(models | {"note": Hostile()}, model_file)
    refused(f"{model_file}: names posix.mkdir: a file that could run code is not opened")
    assert not MARK.exists()
    for key, value, what in (
        ("frozen_param_shapes", {"x": torch.Size([1])}, "holds frozen parameters (x)"),
        ("shared_params", {"y": "w"}, "holds parameters that share memory (y)"),
    ):
        torch.save(models | {key: value}, model_file)
        refused(what)
    torch.save({"module": {}}, model_file)
    refused("has no buffer_names: not the model states")
    model_file.write_bytes(b"PK\x03\x04 rubbish")
    refused(f"{model_file}: cannot be read")
    torch.save(models, model_file)

    kept = optimizers["optimizer_state_dict"]
    kept["base_optimizer_state"]["state"][0]["exp_inf"] = torch.ones(6)
    torch.save(optimizers, optimizer_file)
    refused("keeps exp_avg, exp_avg_sq, exp_inf, step: only Adam's moments can be converted")
    del kept["base_optimizer_state"]["state"][0]["exp_inf"]
    kept["partition_count"] = [1]
    torch.save(optimizers, optimizer_file)
    refused("in [1] partitions, and 2 ranks saved it")
    kept["partition_count"], kept["single_partition_of_fp32_groups"] = [2], [torch.ones(5)]
    torch.save(optimizers, optimizer_file)
    refused("5 elements where its parameters have 6 or more: not complete")
    optimizer_file.unlink()
    refused("zero_pp_rank_1_mp_rank_00_optim_states.pt is missing, and 2 data-parallel ranks saved this checkpoint")
    (tag / "layer_00-model_states.pt").touch()
    refused("layer_00-model_states.pt: of pipeline stages, experts or a universal checkpoint")
    (folder / "latest").write_text("global_step99")
    refused("global_step99: no such folder; give the tag of a checkpoint")
    (folder / "latest").unlink()
    refused("has no file `latest`, which names the newest tag")
