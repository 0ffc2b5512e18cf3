"""Gradients in a few flat tensors, so that few reductions serve many parameters.

A parameter's gradient is a view of its bucket, at an address that never changes: autograd, and products that keep
gradients (ops/linear), add to it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 256 << 20
"""A bucket holds no more, unless one gradient alone is larger. Large messages run at the links' full rate."""
ALIGNMENT = 64
"""Elements; a gradient begins at a multiple, so that products find it aligned."""


class GradientBuckets:
    """Makes the gradients of `parameters`, zeroed, and reduces them over ranks.

    block_of: the block of each parameter that belongs to one; a bucket of such parameters alone is done once the
        backward pass has been through the first of their blocks.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        block_of: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        self.sharded: list[Tensor] = []
        """Flat gradients of parameters that are dealt out over the tensor-parallel ranks."""
        self.replicated: list[Tensor] = []
        """Flat gradients of parameters that every tensor-parallel rank holds whole."""
        self._done_after: dict[Tensor, int] = {}
        """By bucket, the block whose backward pass completes it; of the others the whole pass does."""
        block_of = block_of or {}
        groups: dict[tuple[bool, torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            sharded = bool(getattr(parameter, "tensor_model_parallel", False))
            groups.setdefault((sharded, parameter.dtype, parameter in block_of), []).append(parameter)
        for (sharded, _, within), members in groups.items():
            flats = self.sharded if sharded else self.replicated
            for full in _filled(members, bucket_bytes):
                flats.append(_make(full))
                if within:
                    self._done_after[flats[-1]] = min(block_of[parameter] for parameter in full)

    @property
    def flats(self) -> list[Tensor]:
        """All buckets."""
        return [*self.sharded, *self.replicated]

    def zero(self) -> None:
        """Clear all gradients, where they are."""
        torch._foreach_zero_(self.flats)

    def reduce(self, over_dp: dist.ProcessGroup | None, replicated_over_tp: dist.ProcessGroup | None) -> None:
        """Sum all gradients over `over_dp`, those of replicated parameters over `replicated_over_tp` as well."""
        _wait(_start(self.replicated, replicated_over_tp))
        _wait(_start(self.flats, over_dp))

    def reduce_beside(
        self, group: dist.ProcessGroup, done: Sequence[torch.cuda.Event], stream: torch.cuda.Stream
    ) -> None:
        """Sum all gradients over `group`, each bucket from when its last block's event has come, on `stream`.

        The backward pass may still be running; `done` has an event a block. All ranks send the same buckets in the same
        order, whatever capacities they run.
        """
        started = []
        with torch.cuda.stream(stream):
            early = sorted(self._done_after, key=lambda flat: -self._done_after[flat])
            for flat in early:
                stream.wait_event(done[self._done_after[flat]])
                started += _start([flat], group)
        started += _start([flat for flat in self.flats if flat not in self._done_after], group)
        _wait(started)


def _filled(members: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in their order, as many to a bucket as it holds."""
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in members:
        needed = _padded(parameter.numel()) * parameter.element_size()
        if size and size + needed > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += needed
    return buckets


def _padded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _make(parameters: Sequence[nn.Parameter]) -> Tensor:
    size = sum(_padded(parameter.numel()) for parameter in parameters)
    flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape)
        start += _padded(parameter.numel())
    return flat


def _start(flats: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Sums over `group` under way, of what is done on the current stream."""
    if group is None:
        return []
    started = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
    return [work for work in started if work is not None]


def _wait(started: Sequence[dist.Work]) -> None:
    for work in started:
        work.wait()
