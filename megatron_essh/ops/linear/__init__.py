"""Products with the model's weights: prefixes of rows, low-precision copies, gradients added up where they are kept.

A weight may carry two attributes, both set by a training engine:

- `compute_copy`: the weight in the dtype of the products, kept fresh after every change of the weight, so that no
  pass casts it anew;
- `main_grad`: an fp32 tensor of its shape. Gradients are then added to it by the product that computes them, in fp32
  and without a temporary, and none is returned to autograd; of a prefix, only its rows are touched.

Without them these are ordinary differentiable products. The products' dtype is the autocast dtype where autocast is
on, else the input's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_essh.ops.prefix import prefix

__all__ = [
    "accumulate",
    "compute_weight",
    "keep_gradients",
    "linear",
    "linear_input_major",
    "main_grad",
    "refresh_copies",
]


def keep_gradients(weights: Sequence[Tensor]) -> None:
    """Let products add the weights' gradients to `weight.grad`, which is made, and must then stay where it is."""
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.main_grad = weight.grad  # type: ignore[attr-defined]


def refresh_copies(weights: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Bring the weights' copies in `dtype` up to date, in place; the first call makes them."""
    for weight in weights:
        if getattr(weight, "compute_copy", None) is None:
            weight.compute_copy = torch.empty_like(weight, dtype=dtype, requires_grad=False)  # type: ignore[attr-defined]
    with torch.no_grad():
        torch._foreach_copy_([weight.compute_copy for weight in weights], list(weights))  # type: ignore[attr-defined]


def main_grad(weight: Tensor) -> Tensor | None:
    """The fp32 tensor that the weight's gradients are added to, or None."""
    return getattr(weight, "main_grad", None)


def compute_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, detached: its fresh copy if it has one, else cast."""
    copy: Tensor | None = getattr(weight, "compute_copy", None)
    return copy if copy is not None and copy.dtype == dtype else weight.detach().to(dtype)


def accumulate(grad_RD: Tensor, dy_NR: Tensor, x_ND: Tensor, scale: float = 1.0) -> None:
    """Add scale dy^T x to an fp32 (fp64) tensor; the product is accumulated in its dtype."""
    if grad_RD.is_cuda and dy_NR.dtype != grad_RD.dtype:
        torch.ops.aten.addmm.dtype_out(grad_RD, dy_NR.T, x_ND, grad_RD.dtype, alpha=scale, out=grad_RD)
    else:
        grad_RD.addmm_(dy_NR.T.to(grad_RD.dtype), x_ND.to(grad_RD.dtype), alpha=scale)


def linear(x: Tensor, weight: Tensor, rows: int, *, gradient_scale: float = 1.0) -> Tensor:
    """x [.., D] times the first `rows` of an output-major weight [R, .., D]: [.., rows times what lies between].

    gradient_scale: factor on the weight's gradient (specification, section 5).
    """
    if weight.is_cuda or main_grad(weight) is not None:
        return _product(x, weight, rows, gradient_scale, 1.0, False)
    view = prefix(weight, rows, gradient_scale)
    return F.linear(x, view.flatten(0, -2))


def linear_input_major(
    x: Tensor, weight: Tensor, *, gradient_scale: float = 1.0, output_scale: float = 1.0
) -> Tensor:  # fmt: skip
    """output_scale times x [.., r] times the first r rows of an input-major weight [R, D]: [.., D]."""
    rows = x.shape[-1]
    if weight.is_cuda or main_grad(weight) is not None:
        return _product(x, weight, rows, gradient_scale, output_scale, True)
    y = torch.matmul(x, prefix(weight, rows, gradient_scale))
    return y if output_scale == 1.0 else y * output_scale


def _product(
    x: Tensor, weight: Tensor, rows: int, gradient_scale: float, output_scale: float, input_major: bool
) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        x_NI = x.to(dtype).flatten(0, -2)
        y: Tensor = _Product.apply(x_NI, weight, rows, gradient_scale, output_scale, input_major)
        return y.unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    """Saves the input; the weight it multiplied with is kept as it is, for the copy is not written before the step."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight: Tensor,
        rows: int,
        gradient_scale: float,
        output_scale: float,
        input_major: bool,
    ) -> Tensor:
        matrix = compute_weight(weight, x_NI.dtype)[:rows].flatten(0, -2)
        ctx.save_for_backward(x_NI)
        ctx.weight, ctx.matrix, ctx.rows, ctx.input_major = weight, matrix, rows, input_major
        ctx.gradient_scale, ctx.output_scale = gradient_scale, output_scale
        return _times(x_NI, matrix if input_major else matrix.T, output_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        (x_NI,) = ctx.saved_tensors
        weight, matrix = ctx.weight, ctx.matrix
        d_x_NI = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x_NI = _times(dy_NO, matrix.T if ctx.input_major else matrix, ctx.output_scale)
        if ctx.needs_input_grad[1]:
            kept = main_grad(weight)
            grad = torch.zeros_like(weight) if kept is None else kept
            left, right = (x_NI, dy_NO) if ctx.input_major else (dy_NO, x_NI)
            accumulate(grad[: ctx.rows].flatten(0, -2), left, right, ctx.gradient_scale * ctx.output_scale)
            d_weight = grad if kept is None else None
        return d_x_NI, d_weight, None, None, None, None


def _times(x_NI: Tensor, matrix_IO: Tensor, scale: float) -> Tensor:
    """scale times x times matrix, the scale applied before the result is rounded."""
    if scale == 1.0:
        return torch.mm(x_NI, matrix_IO)
    return torch.addmm(x_NI.new_empty(()), x_NI, matrix_IO, beta=0, alpha=scale)
