"""What a rank holds of each parameter under DeepSpeed's ZeRO: a run of its elements, with their moments and gradient.

Stages 1 and 2 lay a group's parameters one behind the other and cut the whole into a piece a replica; stage 3 cuts
every parameter. Either way a rank updates the elements start:end of a parameter, flattened, and keeps them in fp32 in a
flat tensor of the optimizer's. All that is read of DeepSpeed's insides stands in this file and in deepspeed_engine.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_essh.elastic.ffn_order import UnitStatistics
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.optimizer import MOMENTS
from megatron_essh.training.state import EngineState


@dataclass(frozen=True)
class Share:
    """The elements start:end of a parameter that this rank updates; of some parameters, none."""

    shape: tuple[int, ...]
    """Of all of the parameter that the replica has on this tensor-parallel rank."""
    start: int
    end: int
    flat: Tensor
    """The optimizer's tensor that has them."""
    offset: int
    """Their place in it."""
    group: int
    member: int
    """Which of the group's gradient tensors has theirs."""
    gradient_offset: int

    def _of(self, flat: Tensor) -> Tensor:
        return flat.detach()[self.offset : self.offset + self.end - self.start]

    @property
    def weight(self) -> Tensor:
        """fp32 [end - start]: the weights that the optimizer updates."""
        return self._of(self.flat)

    def moment(self, optimizer: torch.optim.Optimizer, name: str) -> Tensor:
        """fp32 [end - start]: of the moment `name`, which is there."""
        return self._of(optimizer.state[self.flat][name])

    def gradient(self, zero: Any) -> Tensor:
        """fp32 [end - start]: of the step's gradient, once it is reduced."""
        flat: Tensor = zero.averaged_gradients[self.group][self.member].reshape(-1)
        return flat[self.gradient_offset : self.gradient_offset + self.end - self.start]

    def gather(self, own: Tensor, mesh: Mesh) -> Tensor:
        """All elements, of `shape`, from the replicas' runs `own`. All replicas call it."""
        whole = own.new_zeros(self.shape)
        whole.view(-1)[self.start : self.end] = own
        if mesh.dp_group is not None:
            dist.all_reduce(whole, group=mesh.dp_group)
        return whole


class ShareState(EngineState):
    """As `EngineState`, of the shares of parameters that this rank updates.

    Args:
        shares: by the parameter's name.
        flats: the tensors that the optimizer updates.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        statistics: UnitStatistics,
        mesh: Mesh,
        shares: Mapping[str, Share],
        flats: Sequence[Tensor],
    ) -> None:
        super().__init__(model, optimizer, statistics, mesh)
        self._shares = shares
        self._optimized = flats

    def _parameter_tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": share.weight for name, share in self._shares.items()}
        for name, share in self._shares.items():
            tensors.update({f"{moment}.{name}": share.moment(self.optimizer, moment) for moment in MOMENTS})
        return tensors

    def span(self, name: str) -> tuple[tuple[int, ...], int, int] | None:
        share = self._shares.get(name.split(".", 1)[1])
        return None if share is None else (share.shape, share.start, share.end)

    def _part(self, name: str, whole: Tensor, mine: Tensor) -> Tensor:
        span = self.span(name)
        if span is None:
            return super()._part(name, whole, mine)
        if whole.shape == mine.shape and whole.data_ptr() == mine.data_ptr():  # read into its very place
            return mine
        shape, start, end = span
        return super()._part(name, whole, mine.new_empty(shape, device="meta")).reshape(-1)[start:end]

    def unit_rows(self, name: str) -> list[Tensor]:
        return [self._shares[name].gather(run, self.mesh) for run in self._runs(name)]

    def _put_unit_rows(self, name: str, rows: Sequence[Tensor], changed: Iterable[Tensor]) -> None:
        share = self._shares[name]
        for run, new in zip(self._runs(name), changed, strict=True):
            run.copy_(new.reshape(-1)[share.start : share.end])

    def _runs(self, name: str) -> list[Tensor]:
        """What is here of a parameter and its moments."""
        share = self._shares[name]
        return [share.weight, *(share.moment(self.optimizer, moment) for moment in MOMENTS)]


def find_shares(zero: Any, model: nn.Module, stage: int, mesh: Mesh) -> dict[str, Share]:
    """This rank's share of every parameter of `model`, by name, in DeepSpeed's optimizer `zero` of `stage` 1 to 3."""
    find = _in_group if stage < 3 else _of_each
    return {name: find(zero, parameter, mesh) for name, parameter in model.named_parameters()}


def _in_group(zero: Any, parameter: Any, mesh: Mesh) -> Share:
    mapping, shape = parameter._hp_mapping, tuple(parameter.shape)
    if mapping is None:
        return Share(shape, 0, 0, zero.single_partition_of_fp32_groups[0], 0, 0, 0, 0)
    here, there, group = mapping.lp_fragment_address, mapping.hp_fragment_address, mapping.param_group_index
    flat = zero.single_partition_of_fp32_groups[group]
    return Share(shape, here.start, here.start + here.numel, flat, there.start, group, 0, there.start)


def _of_each(zero: Any, parameter: Any, mesh: Mesh) -> Share:
    group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
    start = min(mesh.dp_rank * size, parameter.ds_numel)
    end = min(start + size, parameter.ds_numel)  # the last runs are padded
    member = next(i for i, other in enumerate(zero.fp16_groups[group]) if other is parameter)
    flat = zero.fp32_partitioned_groups_flat[group]
    return Share(tuple(parameter.ds_shape), start, end, flat, offset, group, member, 0)


def optimized(zero: Any, stage: int) -> list[Tensor]:
    """The flat tensors that this rank's optimizer updates."""
    return list(zero.single_partition_of_fp32_groups if stage < 3 else zero.fp32_partitioned_groups_flat)


def join_weights(zero: Any, model: nn.Module, stage: int, mesh: Mesh) -> None:
    """Let the optimizer update the model's own fp32 weights; DeepSpeed gives it copies, for lower precisions."""
    own = zero.parallel_partitioned_bit16_groups if stage < 3 else zero.fp16_partitioned_groups_flat
    copies = optimized(zero, stage)
    for flat, weights in zip(copies, own, strict=True):
        flat.data = weights[mesh.dp_rank] if stage < 3 else weights
    if stage < 3:
        for parameter in model.parameters():
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                there = mapping.hp_fragment_address
                mapping.hp_fragment = copies[mapping.param_group_index].narrow(0, there.start, there.numel)


def publish_weights(zero: Any, stage: int) -> None:
    """After shares' weights were written: bring the model's own up to date. All ranks call it."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
