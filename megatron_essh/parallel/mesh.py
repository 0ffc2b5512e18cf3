"""The ranks of a run as a grid: tensor parallel inside, data parallel outside (specification, section 7).

Rank r is tensor-parallel rank r mod tp of data-parallel rank r div tp, so that the ranks which exchange activations
in every layer are neighbours, on one node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_essh.errors import UserError


class ModelParallelUnit:
    """A mesh under the names that DeepSpeed knows from Megatron; a group of one is a group."""

    def __init__(self, mesh: Mesh, tp_group: dist.ProcessGroup, dp_group: dist.ProcessGroup) -> None:
        self._mesh, self._tp_group, self._dp_group = mesh, tp_group, dp_group

    def get_model_parallel_rank(self) -> int:
        return self._mesh.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.tp

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._dp_group


@dataclass(frozen=True)
class Mesh:
    """Where this process stands, and its groups; a group of one is None."""

    tp: int
    """Ranks that share one replica of the model."""
    dp: int
    """Replicas."""
    tp_rank: int
    dp_rank: int
    device: torch.device
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None

    @classmethod
    def single(cls, device: torch.device) -> Mesh:
        """One process."""
        return cls(1, 1, 0, 0, device)

    @classmethod
    def build(cls, tp: int, device: torch.device) -> Mesh:
        """The grid of torch.distributed's default group, which all ranks build together.

        Raises:
            UserError: tp does not divide the number of ranks.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        if world % tp:
            fitting = [n for n in range(1, world + 1) if world % n == 0]
            raise UserError(f"parallel.tensor {tp} does not divide the {world} ranks; use one of {fitting}")
        dp = world // tp
        tp_group = dp_group = None
        # Every rank takes part in the making of every group.
        for replica in range(dp):
            group = dist.new_group(range(replica * tp, (replica + 1) * tp)) if tp > 1 else None
            tp_group = group if replica == rank // tp else tp_group
        for place in range(tp):
            group = dist.new_group(range(place, world, tp)) if dp > 1 else None
            dp_group = group if place == rank % tp else dp_group
        return cls(tp, dp, rank % tp, rank // tp, device, tp_group, dp_group, dist.group.WORLD if world > 1 else None)

    def mpu(self) -> ModelParallelUnit:
        """The mesh as DeepSpeed asks for it. All ranks call it together, once: it makes the groups of one rank.

        Raises:
            RuntimeError: there is no process group.
        """
        own = None
        if self.tp == 1 or self.dp == 1:
            for rank in range(self.world):
                group = dist.new_group([rank])
                own = group if rank == self.rank else own
        tp_group, dp_group = self.tp_group or own, self.dp_group or own
        assert tp_group is not None
        assert dp_group is not None
        return ModelParallelUnit(self, tp_group, dp_group)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.dp

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0
