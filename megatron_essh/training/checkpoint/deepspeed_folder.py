"""DeepSpeed's own checkpoint folders, read as pieces: fp32 parameters and Adam's moments of ZeRO stages 1 to 3.

A pickle can run code; these are opened by `torch.load(weights_only=True)` alone, with inert stand-ins for the four
classes of DeepSpeed that its files name, so that DeepSpeed itself is not needed. Files are mapped: a tensor is read
when it is used.

Not read, and said so: other parallelism than tensor and data (pipeline stages, experts), universal folders, frozen
parameters, and optimizers that keep anything else than `exp_avg` and `exp_avg_sq`. Stage 0 gives parameters without
moments, because its files do not tell whose they are.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_essh.config import ModelConfig
from megatron_essh.errors import UserError
from megatron_essh.parallel.interleave import Sharding
from megatron_essh.parallel.tensor_parallel import sharding_of
from megatron_essh.training.checkpoint.manifest import MODEL_PREFIX
from megatron_essh.training.checkpoint.pieces import Piece
from megatron_essh.training.optimizer import MOMENTS

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

_COPY = "copy the files of all ranks again"
_WITHOUT = "save it again without them"
_THEIR_CONFIG = "give the config of the run that saved it"


class _Inert:
    """Stands for an object of DeepSpeed that is of no use here."""

    def __init__(self, *_: object) -> None:
        pass


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class DeepSpeedState:
    """What a folder holds."""

    path: Path
    """The tag's folder."""
    step: int
    """Optimizer steps done, skipped ones among them."""
    updates: int
    """Updates of the moments; 0 without moments."""
    parts: list[dict[str, Piece]]
    """Of each rank, `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`: together all of every tensor, once."""


def is_deepspeed_folder(path: Path) -> bool:
    """Whether `path` is such a folder, or one of its tags."""
    if not path.is_dir():
        return False
    return any(_MODEL_FILE.fullmatch(p.name) for f in (path, *filter(Path.is_dir, path.iterdir())) for p in f.iterdir())


def read_deepspeed_folder(path: Path, tag: str | None = None, model: ModelConfig | None = None) -> DeepSpeedState:
    """Open DeepSpeed's folder `path`, at the tag that its file `latest` names unless `tag` is given.

    Args:
        path: the folder given to DeepSpeed's save_checkpoint, or a tag's folder in it.
        model: needed where tensor-parallel ranks hold parts of a parameter: says how it is dealt out.

    Raises:
        UserError: there is none, a file is missing or cannot be read safely, or holds what is not supported.
    """
    folder = _tag_folder(path, tag)
    models: dict[tuple[int, int], Path] = {}
    optimizers: dict[tuple[int, int], Path] = {}
    for file in sorted(folder.iterdir()):
        if match := _MODEL_FILE.fullmatch(file.name):
            models[int(match[2]), int(match[1] or 0)] = file
        elif match := _OPTIMIZER_FILE.fullmatch(file.name):
            optimizers[int(match[2]), int(match[1])] = file
        elif file.name.startswith(("layer_", "expp_rank_")) or file.name == "zero":
            raise UserError(
                f"{file}: of pipeline stages, experts or a universal checkpoint, which cannot be converted; {_WITHOUT}"
            )
    if not models:
        raise UserError(
            f"{folder}: has no mp_rank_XX_model_states.pt: not a checkpoint of DeepSpeed; give the folder that it "
            "saved to"
        )
    tp = max(tp_rank for tp_rank, _ in models) + 1
    if tp > 1 and model is None:
        raise UserError(f"{folder}: of {tp} tensor-parallel ranks: give --config, which says how they share the model")
    parts: list[dict[str, Piece]] = []
    step = updates = 0
    for tp_rank in range(tp):
        if (tp_rank, 0) not in models:
            raise UserError(
                f"{folder}: the model states of tensor-parallel rank {tp_rank} of {tp} are missing; {_COPY}"
            )
        file = models[tp_rank, 0]
        states = _load(file)
        _refuse_unsupported(file, states)
        step = int(states["global_steps"])
        place = _Place(folder, tp, tp_rank, model)
        parts.append({})
        shapes = [{name: tuple(shape) for name, shape in group.items()} for group in states["param_shapes"] or []]
        for name, tensor in states["module"].items():  # stage 0; else only buffers have their values here
            if not shapes or name in states["buffer_names"]:
                value = tensor.float() if tensor.is_floating_point() else tensor
                place.add(parts[-1], MODEL_PREFIX, name, tuple(tensor.shape), 0, value)
        if not shapes:
            continue
        dp, every = int(states["dp_world_size"]), {name: shape for group in shapes for name, shape in group.items()}
        for dp_rank in range(dp):
            if (tp_rank, dp_rank) not in optimizers:
                raise UserError(
                    f"{folder}: zero_pp_rank_{dp_rank}_mp_rank_{tp_rank:02d}_optim_states.pt is missing, and {dp} "
                    f"data-parallel ranks saved this checkpoint; {_COPY}"
                )
            partition = _Partition(optimizers[tp_rank, dp_rank], dp)
            updates = partition.updates
            if dp_rank:
                parts.append({})
            for prefix, name, start, tensor in partition.fragments(shapes, dp_rank, dp):
                place.add(parts[-1], prefix, name, every[name], start, tensor)
    return DeepSpeedState(folder, step, updates, parts)


def _tag_folder(path: Path, tag: str | None) -> Path:
    if tag is None and path.is_dir() and any(_MODEL_FILE.fullmatch(file.name) for file in path.iterdir()):
        return path
    if tag is None:
        latest = path / "latest"
        if not latest.is_file():
            raise UserError(f"{path}: has no file `latest`, which names the newest tag; give --tag, or a tag's folder")
        tag = latest.read_text().strip()
    if not (path / tag).is_dir():
        raise UserError(f"{path / tag}: no such folder; give the tag of a checkpoint in {path}")
    return path / tag


def _load(file: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"names {named[1]}" if named else "cannot be read as plain tensors"
        raise UserError(
            f"{file}: {what}: a file that could run code is not opened; save without client_state objects"
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]}); {_COPY}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a file of DeepSpeed's checkpoints; {_COPY}")
    return content


def _refuse_unsupported(file: Path, states: dict[str, Any]) -> None:
    missing = {"module", "buffer_names", "param_shapes", "global_steps", "dp_world_size"} - set(states)
    if missing:
        raise UserError(
            f"{file}: has no {min(missing)}: not the model states of a DeepSpeed that is supported; save it again with "
            "the DeepSpeed that this package installs"
        )
    for key, what in (("frozen_param_shapes", "frozen parameters"), ("shared_params", "parameters that share memory")):
        if states.get(key):
            raise UserError(f"{file}: holds {what} ({next(iter(states[key]))}), which cannot be converted; {_WITHOUT}")


@dataclass(frozen=True)
class _Place:
    """A tensor-parallel rank, and what it holds."""

    folder: Path
    tp: int
    tp_rank: int
    model: ModelConfig | None

    def add(
        self, part: dict[str, Piece], prefix: str, name: str, local: tuple[int, ...], start: int, tensor: Tensor
    ) -> None:
        """Add elements of the local part, of shape `local`, from `start` on, unless another rank gives the same."""
        sharding = self._sharding(name)
        if sharding is None and self.tp_rank > 0:
            return
        shape = local if sharding is None else (sharding.units * sharding.rows, *local[1:])
        try:
            end = start + tensor.numel()
            part[prefix + name] = Piece(tensor, shape, sharding, self.tp, self.tp_rank, start, end)
        except ValueError as error:
            raise UserError(
                f"{self.folder}: {name}: {error}: not the parameter of the config's model; {_THEIR_CONFIG}"
            ) from None

    def _sharding(self, name: str) -> Sharding | None:
        if self.tp == 1:
            return None
        assert self.model is not None
        try:
            return sharding_of(name, self.model)
        except KeyError as error:
            raise UserError(
                f"{self.folder}: {error.args[0]}: how tensor-parallel ranks share it is not known; {_THEIR_CONFIG}"
            ) from None


class _Partition:
    """What a data-parallel rank keeps: of each kind (parameters, moments) flat tensors, one a group."""

    def __init__(self, file: Path, dp: int) -> None:
        self.file = file
        content = _load(file).get("optimizer_state_dict")
        if not isinstance(content, dict) or "partition_count" not in content:
            raise UserError(f"{file}: not the optimizer states of ZeRO stage 1, 2 or 3; {_COPY}")
        counts = content["partition_count"]
        if {int(c) for c in (counts if isinstance(counts, list) else [counts])} != {dp}:
            raise UserError(
                f"{file}: in {counts} partitions, and {dp} ranks saved it: experts cannot be converted; {_WITHOUT}"
            )
        self.by_parameter = "fp32_flat_groups" in content
        """Stage 3 cuts each parameter, stages 1 and 2 cut each group of them."""
        key, state = "single_partition_of_fp32_groups", "base_optimizer_state"
        if self.by_parameter:
            key, state = "fp32_flat_groups", "optimizer_state_dict"
        self.flat: dict[str, list[Tensor]] = {MODEL_PREFIX: list(content[key])}
        self.alignment: list[list[int]] | None = content.get("param_alignment_paddings")
        kept = content[state]
        if not isinstance(kept, dict) or "state" not in kept:
            raise UserError(
                f"{file}: keeps the optimizer's state in a way that cannot be converted; save it again with Adam"
            )
        groups = [kept["state"][number] for number in sorted(kept["state"])]
        self.updates = 0
        for group in groups:
            unknown = set(group) - {"step", *MOMENTS}
            if unknown or not set(MOMENTS) <= set(group):
                names = ", ".join(sorted(map(str, group)))
                raise UserError(
                    f"{file}: the optimizer keeps {names}: only Adam's moments can be converted; save again with Adam"
                )
            self.updates = int(group.get("step", 0))
        if groups:
            self.flat |= {f"{moment}.": [group[moment] for group in groups] for moment in MOMENTS}

    def fragments(
        self, shapes: Sequence[dict[str, tuple[int, ...]]], dp_rank: int, dp: int
    ) -> Iterator[tuple[str, str, int, Tensor]]:
        """(prefix, parameter, its first element here, its elements here) of all that this rank keeps."""
        for prefix, flat in self.flat.items():
            if self.by_parameter:
                yield from self._of_parameters(prefix, flat, shapes, dp_rank, dp)
                continue
            if len(flat) != len(shapes):
                raise UserError(
                    f"{self.file}: {len(flat)} groups of {prefix}* for {len(shapes)} of parameters; {_COPY}"
                )
            for number, (partition, group) in enumerate(zip(flat, shapes, strict=True)):
                # The last partition may lack its padding; the moments of every one have it.
                kept = [self.flat[kind][number].numel() for kind in self.flat]
                size, begin = max(kept), 0
                first = dp_rank * size
                for index, (name, shape) in enumerate(group.items()):
                    end = begin + math.prod(shape)
                    low, high = max(begin, first), min(end, first + size)
                    if low < high:
                        yield prefix, name, low - begin, self._slice([partition], low - first, high - first)
                    begin = end + (0 if self.alignment is None else self.alignment[number][index])

    def _of_parameters(
        self, prefix: str, flat: list[Tensor], shapes: Sequence[dict[str, tuple[int, ...]]], dp_rank: int, dp: int
    ) -> Iterator[tuple[str, str, int, Tensor]]:
        offset = 0
        for group in shapes:
            for name, shape in group.items():
                count = math.prod(shape)
                size = -(-count // dp)
                low, high = min(count, dp_rank * size), min(count, (dp_rank + 1) * size)
                if low < high:
                    yield prefix, name, low, self._slice(flat, offset, offset + high - low)
                offset += size

    def _slice(self, flat: Sequence[Tensor], begin: int, end: int) -> Tensor:
        """Elements begin:end of the tensors one after the other."""
        found, offset = [], 0
        for tensor in flat:
            low, high = max(begin, offset), min(end, offset + tensor.numel())
            if low < high:
                found.append(tensor[low - offset : high - offset])
            offset += tensor.numel()
        if end > offset:
            raise UserError(
                f"{self.file}: {offset} elements where its parameters have {end} or more: not complete; {_COPY}"
            )
        return found[0] if len(found) == 1 else torch.cat(found)
