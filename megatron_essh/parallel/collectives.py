"""Exchanges between the ranks of a group, as differentiable functions and as calls that are waited for later.

A sum over ranks and its transpose, a copy to every rank, come in pairs: what is one on the way forward is the other on
the way back. The same holds for the pair that sequence parallelism puts in their place, in which each rank keeps its
slab of the positions. All of it runs on the stream of the caller, or on the backend's and is joined by events, so that
a pass can be recorded as a CUDA graph.

A slab of x [.., T, D] on tp ranks is [.., T / tp, D]: the rank's run of rows of x seen as [rows, D]. Slabs lie one
behind the other in memory, so that neither a gather nor a scatter copies anything; which positions are in which slab
is nobody's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Pending = Callable[[], Tensor]
"""An exchange under way: the call waits for its result."""

# PyTorch 2.13 renamed both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_sum(x: Tensor, group: dist.ProcessGroup, *, beside: bool = False) -> Pending:
    """The sum of the ranks' x, in the place of x. `beside`: on another stream, for what is waited for later."""
    return _pending(x, dist.all_reduce(x, group=group, async_op=beside))


def start_gather(x: Tensor, group: dist.ProcessGroup, *, beside: bool = False) -> Pending:
    """[tp n, ..] from the ranks' slabs [n, ..]."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    return _pending(whole, _all_gather(whole, x.contiguous(), group=group, async_op=beside))


def start_scatter_sum(x: Tensor, group: dist.ProcessGroup, *, beside: bool = False) -> Pending:
    """This rank's slab [n, ..] of the sum of the ranks' x [tp n, ..]."""
    slab = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    return _pending(slab, _reduce_scatter(slab, x.contiguous(), group=group, async_op=beside))


def _pending(result: Tensor, work: dist.Work | None) -> Pending:
    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return result

    return wait


@dataclass(frozen=True)
class InputExchange:
    """What the input product of a sub-layer exchanges; `ops.linear` calls it by the weight's `exchange`."""

    group: dist.ProcessGroup
    slabs: bool
    """Whether inputs come as slabs (sequence parallelism), or whole on every rank."""

    def gather(self, x_NI: Tensor) -> Pending:
        """The input of all positions."""
        return start_gather(x_NI, self.group, beside=True) if self.slabs else lambda: x_NI

    def reduce(self, d_x_NI: Tensor) -> Pending:
        """The gradient of the input as it came, from this rank's share of it, which is overwritten."""
        start = start_scatter_sum if self.slabs else start_sum
        return start(d_x_NI, self.group, beside=True)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' x, on every rank, in the place of x; its gradient is every rank's."""
    y: Tensor = _Sum.apply(x, group)
    return y


def same_on_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which is the same on every rank; its gradient is the sum of the ranks'."""
    y: Tensor = _Same.apply(x, group)
    return y


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slab of the sum of the ranks' x."""
    y: Tensor = _ScatterSum.apply(x, group)
    return y


def gather_slabs(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of all positions, from the ranks' slabs; its gradient is summed over the ranks."""
    y: Tensor = _GatherSlabs.apply(x, group)
    return y


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = start_gather(_rows(x), group)()
    return whole.view(*x.shape[:-2], x.shape[-2] * group.size(), x.shape[-1])


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    slab = start_scatter_sum(_rows(x), group)()
    return slab.view(*x.shape[:-2], x.shape[-2] // group.size(), x.shape[-1])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        # In place and not marked so: x is a product's output, which nobody else reads and no backward pass keeps.
        return start_sum(x.detach(), group)()

    @staticmethod
    def backward(ctx: Any, *d_y: Tensor) -> tuple[Tensor, None]:
        return d_y[0], None


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_y: Tensor) -> tuple[Tensor, None]:
        own = d_y[0].clone(memory_format=torch.contiguous_format)  # the gradient that came may be another's too
        return start_sum(own, ctx.group)(), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_y: Tensor) -> tuple[Tensor, None]:
        return _gathered(d_y[0], ctx.group), None


class _GatherSlabs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_y: Tensor) -> tuple[Tensor, None]:
        return _scattered(d_y[0], ctx.group), None
