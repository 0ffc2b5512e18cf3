"""RMS normalisation of the residual stream (specification, section 3), alone and after an addition.

norm(x) = x / sqrt(mean(x^2) + eps) * weight          over the last dimension
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def output_dtype(x: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """dtype of a normed output: `asked`, else the one that autocast gives the matrix product after it, else x's."""
    if asked is not None:
        return asked
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):  # autocast leaves fp64 alone
        return torch.get_autocast_dtype(kind)
    return x.dtype


def reference_norm(x: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """norm(x), [..., D], in `out_dtype`; arithmetic in fp32 (fp64 for fp64), rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), weight_D.shape, weight_D.to(dtype), eps).to(out_dtype)


def reference_add_norm(
    x: Tensor, branch: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(x + branch in x's dtype, its norm in `out_dtype`)."""
    total = (x + branch).to(x.dtype)
    return total, reference_norm(total, weight_D, eps, out_dtype)
