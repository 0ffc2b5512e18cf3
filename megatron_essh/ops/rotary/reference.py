"""Rotary positions (specification, section 3): queries and keys turned by their position, values as they are."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + D/2}); arithmetic in the tables' dtype, result in x's."""
    first, second = x_BTHD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHD.dtype)


def reference_rotate_qkv(qkv_BTH3D: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rotated queries, rotated keys, values), each [B, T, H, D], contiguous."""
    q_BTHD, k_BTHD, v_BTHD = qkv_BTH3D.unbind(-2)
    return rotate(q_BTHD, cos, sin), rotate(k_BTHD, cos, sin), v_BTHD.contiguous()
