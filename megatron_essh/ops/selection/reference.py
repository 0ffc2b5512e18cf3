"""The lowest value that is needed, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_lowest_needed(order_BV: Tensor, amount_BV: Tensor, needed_B1: Tensor) -> Tensor:
    """Bisection over the 32 bits of the values."""
    low_B1 = torch.full_like(needed_B1, -(2**31))  # all reach what is needed
    high_B1 = torch.full_like(needed_B1, 2**31)  # none does
    for _ in range(32):
        middle_B1 = (low_B1 + high_B1) >> 1
        reaches_B1 = torch.where(order_BV >= middle_B1, amount_BV, 0).sum(-1, keepdim=True) >= needed_B1
        low_B1 = torch.where(reaches_B1, middle_B1, low_B1)
        high_B1 = torch.where(reaches_B1, high_B1, middle_B1)
    return low_B1
