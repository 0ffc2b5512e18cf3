"""Prefix views of weights: what a capacity is made of (section 4), with the scaled gradient of section 5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def scale_gradient(weight: Tensor, scale: float) -> Tensor:
    """`weight`, bit for bit, whose gradient arrives multiplied by `scale`.

    Written as a function of its own, because a W + (1 - a) W is not W in floating point.
    """
    if scale == 1.0:
        return weight
    return _ScaledGradient.apply(weight, scale)


def prefix(weight: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """The first `rows` rows of `weight`, as a view, with its gradient multiplied by `scale`.

    All rows are the weight itself: the full capacity pays for no slice, forward or backward.
    """
    view = weight if rows == weight.shape[0] else weight[:rows]
    return scale_gradient(view, scale)
