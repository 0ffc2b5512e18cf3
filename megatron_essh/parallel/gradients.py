"""Gradients in a few flat tensors, so that few reductions serve many parameters.

A parameter's gradient is a view of its bucket, at an address that never changes: autograd, and products that keep
gradients (ops/linear), add to it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 256 << 20
"""A bucket holds no more, unless one gradient alone is larger. Large messages run at the links' full rate."""
ALIGNMENT = 64
"""Elements; a gradient begins at a multiple, so that products find it aligned."""


class GradientBuckets:
    """Makes the gradients of `parameters`, zeroed, and reduces them over ranks."""

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.sharded: list[Tensor] = []
        """Flat gradients of parameters that are dealt out over the tensor-parallel ranks."""
        self.replicated: list[Tensor] = []
        """Flat gradients of parameters that every tensor-parallel rank holds whole."""
        groups: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters:
            sharded = bool(getattr(parameter, "tensor_model_parallel", False))
            groups.setdefault((sharded, parameter.dtype), []).append(parameter)
        for (sharded, _), members in groups.items():
            flats = self.sharded if sharded else self.replicated
            full: list[nn.Parameter] = []
            size = 0
            for parameter in members:
                needed = _padded(parameter.numel())
                if size and (size + needed) * parameter.element_size() > bucket_bytes:
                    flats.append(_make(full, size))
                    full, size = [], 0
                full.append(parameter)
                size += needed
            flats.append(_make(full, size))

    @property
    def flats(self) -> list[Tensor]:
        """All buckets."""
        return [*self.sharded, *self.replicated]

    def zero(self) -> None:
        """Clear all gradients, where they are."""
        torch._foreach_zero_(self.flats)

    def reduce(self, over_dp: dist.ProcessGroup | None, replicated_over_tp: dist.ProcessGroup | None) -> None:
        """Sum all gradients over `over_dp`, those of replicated parameters over `replicated_over_tp` as well."""
        _reduce(self.replicated, replicated_over_tp)
        _reduce(self.flats, over_dp)


def _padded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _make(parameters: Sequence[nn.Parameter], size: int) -> Tensor:
    flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape)
        start += _padded(parameter.numel())
    return flat


def _reduce(flats: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    if group is not None:
        for work in [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]:
            assert work is not None
            work.wait()
