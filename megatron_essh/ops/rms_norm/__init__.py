"""RMS normalisation, alone and fused with the addition of a branch to the residual stream before it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.rms_norm.reference import output_dtype, reference_add_norm, reference_norm

LARGEST_KERNEL_WIDTH = 8192
"""Columns that the kernels take: a row is held in the registers of one program."""

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, [..., D] (specification, section 3).

    x: bf16, fp32 or fp64. weight_D: [D], of any floating dtype.
    out_dtype: of the result; None takes the autocast dtype where autocast is on for x's device, else x's.

    Arithmetic is fp32 (fp64 for fp64), whatever the dtypes.
    """
    assert weight_D.shape == x.shape[-1:], f"weight {tuple(weight_D.shape)} for rows of {x.shape[-1]}"
    dtype = output_dtype(x, out_dtype)
    if _kernels_take(x):
        from megatron_essh.ops.rms_norm.triton import triton_norm

        return triton_norm(x, weight_D, eps, dtype)
    return reference_norm(x, weight_D, eps, dtype)


def add_rms_norm(
    x: Tensor, branch: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(x + branch, rms_norm(x + branch)): a branch joins the residual stream, and the next one reads its norm.

    x: the residual stream [..., D], bf16, fp32 or fp64; the sum has its dtype. branch: [..., D], any floating dtype.
    The rest as for `rms_norm`. The sum's gradient and the norm's reach x and branch together, each in its dtype.
    """
    assert branch.shape == x.shape, f"branch {tuple(branch.shape)} for a stream {tuple(x.shape)}"
    assert weight_D.shape == x.shape[-1:], f"weight {tuple(weight_D.shape)} for rows of {x.shape[-1]}"
    dtype = output_dtype(x, out_dtype)
    if _kernels_take(x):
        from megatron_essh.ops.rms_norm.triton import triton_add_norm

        return triton_add_norm(x, branch, weight_D, eps, dtype)
    return reference_add_norm(x, branch, weight_D, eps, dtype)


def _kernels_take(x: Tensor) -> bool:
    """Whether the Triton kernels serve this input: on a GPU, in a size and dtype that they are held to."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() > 0
        and x.shape[-1] <= LARGEST_KERNEL_WIDTH
    )
