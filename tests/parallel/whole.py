"""What an engine that is dealt out over ranks holds, put together: the parallel tests compare it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_essh.training.engine import NativeEngine
from megatron_essh.training.state import STATISTIC


def whole_state(engine: NativeEngine) -> dict[str, Tensor]:
    """The state tensors of the whole model, on the first rank; elsewhere nothing. All ranks call it."""
    mesh, gather, whole = engine.mesh, engine.model.partition.gather_parameter, {}
    for name, tensor in engine.state_tensors().items():
        span = engine.state.span(name)
        if span is not None:  # the replicas share it
            shape, start, end = span
            own, tensor = tensor, tensor.new_zeros(shape)
            tensor.view(-1)[start:end] = own
            if mesh.dp_group is not None:
                dist.all_reduce(tensor, group=mesh.dp_group)
        if mesh.dp_rank == 0 and engine.state.sharding(name) is not None:
            if name == STATISTIC:
                tensor = torch.stack([gather("blocks.0.feed_forward.down", tensor_N) for tensor_N in tensor])
            else:
                tensor = gather(name.split(".", 1)[1], tensor)
        if mesh.is_first:
            whole[name] = tensor
    return whole
