"""Rotary positions, fused with the parting of queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.rotary.reference import reference_rotate_qkv

__all__ = ["rotate_qkv"]


def rotate_qkv(qkv_BTH3D: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each [B, T, H, D] and contiguous, with q and k turned by their positions (specification, section 3).

    qkv_BTH3D: head-major queries, keys and values, bf16, fp32 or fp64; D is even.
    cos, sin: of the positions' angles, [T, 1, D / 2] or [B, T, 1, D / 2], fp32 or fp64; no gradient reaches them.

    The pair (x_i, x_{i + D/2}) is turned by angle i, in the tables' dtype; results have qkv's.
    """
    batch, length, _, three, head_dim = qkv_BTH3D.shape
    assert three == 3, f"{three} matrices a head; there must be 3, for queries, keys and values"
    assert head_dim % 2 == 0, f"heads of {head_dim} columns have no pairs"
    expected = [(*lead, 1, head_dim // 2) for lead in ((length,), (1, length), (batch, length))]
    assert cos.shape == sin.shape, f"tables {tuple(cos.shape)} and {tuple(sin.shape)}"
    assert tuple(cos.shape) in expected, f"tables {tuple(cos.shape)}; must be one of {expected}"
    if (
        HAS_TRITON
        and qkv_BTH3D.is_cuda
        and qkv_BTH3D.dtype in (torch.bfloat16, torch.float32)
        and cos.dtype == torch.float32
        and qkv_BTH3D.numel() > 0
    ):
        from megatron_essh.ops.rotary.triton import triton_rotate_qkv

        return triton_rotate_qkv(qkv_BTH3D, cos, sin)
    return reference_rotate_qkv(qkv_BTH3D, cos, sin)
