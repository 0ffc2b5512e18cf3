"""Where to cut a row so that its highest entries amount to what is needed, without sorting it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.selection.reference import reference_lowest_needed

__all__ = ["lowest_needed"]


def lowest_needed(order_BV: Tensor, amount_BV: Tensor, needed_B1: Tensor) -> Tensor:
    """int64 [B, 1]: the highest value at which the amounts of all entries at least as high reach what is needed.

    Exact, and recordable as a CUDA graph.

    order_BV: int32, what the entries are ranked by; contiguous.
    amount_BV: int64, at least 0; may be expanded.
    needed_B1: int64, 0 to the row's sum of amounts.
    """
    assert order_BV.dtype == torch.int32, f"ranked by {order_BV.dtype}"
    assert amount_BV.dtype == needed_B1.dtype == torch.int64, f"amounts {amount_BV.dtype}, needed {needed_B1.dtype}"
    if HAS_TRITON and order_BV.is_cuda:
        from megatron_essh.ops.selection.triton import triton_lowest_needed

        return triton_lowest_needed(order_BV, amount_BV, needed_B1)
    return reference_lowest_needed(order_BV, amount_BV, needed_B1)
