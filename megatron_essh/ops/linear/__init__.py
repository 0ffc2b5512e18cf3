"""Products with the model's weights: prefixes of rows, low-precision copies, gradients added up where they are kept.

A weight may carry four attributes. Two are set by a training engine:

- `compute_copy`: the weight in the dtype of the products, kept fresh after every change of the weight, so that no
  pass casts it anew;
- `main_grad`: an fp32 tensor of its shape. Gradients are then added to it by the product that computes them, in fp32
  and without a temporary, and none is returned to autograd; of a prefix, only its rows are touched.

Two are set by whoever deals a model out over processes:

- `exchange`: an `Exchange`, what `linear` asks of the other processes. Its input comes as this process has it and is
  gathered; the gradient of its input is reduced while that of the weight is computed;
- `output_sum`: begins to sum rows of `linear_input_major`'s result over the processes, in place, and gives the call
  that waits for it. Half of the rows are summed while the other half is computed. The result's gradient is the same
  on every process.

Without them these are ordinary differentiable products. The products' dtype is the autocast dtype where autocast is
on, else the input's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron_essh.ops.prefix import prefix

__all__ = [
    "Exchange",
    "accumulate",
    "compute_weight",
    "keep_gradients",
    "linear",
    "linear_input_major",
    "main_grad",
    "refresh_copies",
]


Sum = Callable[[Tensor], Callable[[], Tensor]]
"""Begins the sum of a tensor over processes, in its place, and gives the call that waits for it."""


class Exchange(Protocol):
    """What a product exchanges with other processes. Both begin, and give the call that waits for the result.

    All processes run the same products in the same order, whatever rows each of them holds; none is possible.
    """

    def gather(self, x_NI: Tensor) -> Callable[[], Tensor]:
        """The input of the product, [N', I], from what this process has of it, [N, I]."""

    def reduce(self, d_x_NI: Tensor) -> Callable[[], Tensor]:
        """The gradient of what this process has of the input, [N, I], from its share of the whole's, [N', I]."""


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

    Where the weight has an `exchange` that gathers, x [.., T, D] gives [.., T', ..], T' of all processes.
    """
    exchange: Exchange | None = getattr(weight, "exchange", None)
    if weight.is_cuda or exchange is not None or main_grad(weight) is not None:
        return _product(x, weight, rows, gradient_scale, 1.0, False, exchange)
    view = prefix(weight, rows, gradient_scale)
    return F.linear(x, view.flatten(0, -2))


def linear_input_major(
    x: Tensor, weight: Tensor, *, gradient_scale: float = 1.0, output_scale: float = 1.0
) -> Tensor:  # fmt: skip
    """output_scale times x [.., r] times the first r rows of an input-major weight [R, D]: [.., D]."""
    rows = x.shape[-1]
    if weight.is_cuda or main_grad(weight) is not None or hasattr(weight, "output_sum"):
        return _product(x, weight, rows, gradient_scale, output_scale, True)
    y = torch.matmul(x, prefix(weight, rows, gradient_scale))
    return y if output_scale == 1.0 else y * output_scale


def _product(
    x: Tensor,
    weight: Tensor,
    rows: int,
    gradient_scale: float,
    output_scale: float,
    input_major: bool,
    exchange: Exchange | None = None,
) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        x_NI = x.to(dtype).flatten(0, -2)
        y: Tensor = _Product.apply(x_NI, weight, rows, gradient_scale, output_scale, input_major, exchange)
        return y.unflatten(0, x.shape[:-1] if exchange is None else (*x.shape[:-2], -1))


class _Product(torch.autograd.Function):
    """Saves the input. The way back asks for the weight again, which does not change before the step: nothing is held
    of a weight that is whole in passes only."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight: Tensor,
        rows: int,
        gradient_scale: float,
        output_scale: float,
        input_major: bool,
        exchange: Exchange | None,
    ) -> Tensor:
        matrix = compute_weight(weight, x_NI.dtype)[:rows].flatten(0, -2)
        ctx.save_for_backward(x_NI)
        ctx.exchange = exchange
        if exchange is not None:
            x_NI = exchange.gather(x_NI)()
        ctx.weight, ctx.rows, ctx.input_major = weight, rows, input_major
        ctx.gradient_scale, ctx.output_scale = gradient_scale, output_scale
        output_sum: Sum | None = getattr(weight, "output_sum", None)
        matrix_IO = matrix if input_major else matrix.T
        return (
            _times(x_NI, matrix_IO, output_scale)
            if output_sum is None
            else _summed(x_NI, matrix_IO, output_scale, output_sum)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        (x_NI,) = ctx.saved_tensors
        weight, exchange = ctx.weight, ctx.exchange
        matrix = compute_weight(weight, x_NI.dtype)[: ctx.rows].flatten(0, -2)
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        d_x_NI = d_weight = gathered = reduced = None
        if exchange is not None and wants_weight:
            gathered = exchange.gather(x_NI)
        if wants_input:
            d_x_NI = _times(dy_NO, matrix.T if ctx.input_major else matrix, ctx.output_scale)
        if exchange is not None and wants_input:
            reduced = exchange.reduce(d_x_NI)
        if wants_weight:
            x_NI = x_NI if gathered is None else gathered()
            kept = main_grad(weight)
            grad = torch.zeros_like(weight) if kept is None else kept
            left, right = (x_NI, dy_NO) if ctx.input_major else (dy_NO, x_NI)
            if ctx.rows:
                accumulate(grad[: ctx.rows].flatten(0, -2), left, right, ctx.gradient_scale * ctx.output_scale)
            d_weight = grad if kept is None else None
        if reduced is not None:
            d_x_NI = reduced()
        return d_x_NI, d_weight, None, None, None, None, None


def _times(x_NI: Tensor, matrix_IO: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """scale times x times matrix, the scale applied before the result is rounded."""
    if scale == 1.0:
        return torch.mm(x_NI, matrix_IO, out=out)
    return torch.addmm(x_NI.new_empty(()), x_NI, matrix_IO, beta=0, alpha=scale, out=out)


def _summed(x_NI: Tensor, matrix_IO: Tensor, scale: float, start: Sum) -> Tensor:
    """`_times` summed over the processes: the first half of the rows is under way while the second is computed."""
    y_NO = x_NI.new_empty(x_NI.shape[0], matrix_IO.shape[1])
    waits = []
    for x, y in zip(x_NI.chunk(2), y_NO.chunk(2), strict=True):
        waits.append(start(_times(x, matrix_IO, scale, out=y)))
    for wait in waits:
        wait()
    return y_NO
