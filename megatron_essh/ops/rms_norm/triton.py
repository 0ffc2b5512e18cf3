"""RMS normalisation by Triton kernels, forward and backward, with or without an addition before it.

A program holds one row at a time in its registers and walks the rows from its own number on, in steps of the number of
programs. So the weight is read once a program, and its gradient is summed where it arises: each program writes one
partial row, and those are added up afterwards, always in the same order. All arithmetic is fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_essh.device import multiprocessors
from megatron_essh.ops import tuning


@triton.jit(do_not_specialize=("rows",))
def norm_forward_kernel(
    x, branch, weight, total, normed, scale, rows, eps, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """normed and scale, the rows' 1 / root mean square, of x; with a branch, of x + branch, which goes to total."""
    d_D = tl.arange(0, WIDTH)
    inside_D = d_D < D
    weight_D = tl.load(weight + d_D, mask=inside_D, other=0.0).to(tl.float32)
    start, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for i in range(tl.cdiv(rows - start, step)):
        row = start + i * step
        place_D = row * D + d_D
        x_D = tl.load(x + place_D, mask=inside_D, other=0.0).to(tl.float32)
        if branch is not None:
            x_D += tl.load(branch + place_D, mask=inside_D, other=0.0).to(tl.float32)
            # The norm is that of the sum as it is stored.
            stored_D = x_D.to(total.dtype.element_ty)
            tl.store(total + place_D, stored_D, mask=inside_D)
            x_D = stored_D.to(tl.float32)
        row_scale = 1.0 / tl.sqrt(tl.sum(x_D * x_D, axis=0) / D + eps)
        tl.store(normed + place_D, x_D * row_scale * weight_D, mask=inside_D)
        tl.store(scale + row, row_scale)


@triton.jit(do_not_specialize=("rows",))
def norm_backward_kernel(
    x, weight, scale, d_total, d_normed, d_x, d_branch, partials, rows, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """d_x, again as d_branch where that is of another dtype, and the program's share of the weight's gradient.

    x: the rows that were normed. d_total: gradient that reaches the same rows past the norm, or None.
    partials: fp32 [programs, D].
    """
    d_D = tl.arange(0, WIDTH)
    inside_D = d_D < D
    weight_D = tl.load(weight + d_D, mask=inside_D, other=0.0).to(tl.float32)
    d_weight_D = tl.zeros([WIDTH], tl.float32)
    start, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for i in range(tl.cdiv(rows - start, step)):
        row = start + i * step
        place_D = row * D + d_D
        row_scale = tl.load(scale + row)
        unit_D = tl.load(x + place_D, mask=inside_D, other=0.0).to(tl.float32) * row_scale
        d_normed_D = tl.load(d_normed + place_D, mask=inside_D, other=0.0).to(tl.float32)
        if d_total is not None:
            d_total_D = tl.load(d_total + place_D, mask=inside_D, other=0.0).to(tl.float32)
        d_weight_D += d_normed_D * unit_D
        d_unit_D = d_normed_D * weight_D
        d_x_D = row_scale * (d_unit_D - unit_D * (tl.sum(d_unit_D * unit_D, axis=0) / D))
        if d_total is not None:
            d_x_D += d_total_D
        tl.store(d_x + place_D, d_x_D, mask=inside_D)
        if d_branch is not None:
            tl.store(d_branch + place_D, d_x_D, mask=inside_D)
    tl.store(partials + start * D + d_D, d_weight_D, mask=inside_D)


def _defaults(resident: int, width: int) -> dict[str, int]:
    """Eight columns a thread, which are one 16-byte load of bf16 and two of fp32; `resident` warps a multiprocessor.

    As many programs are launched as run at once, so that none waits for another's end.
    """
    warps = max(1, min(16, width // 256))
    return {"programs": max(1, resident // warps), "num_warps": warps, "num_stages": 1}


# The backward pass takes up to 80 registers a thread, with which 24 warps fit a multiprocessor.
for _kernel, _resident in (("forward", 32), ("backward", 24)):
    tuning.declare(
        f"rms_norm.{_kernel}",
        shape_class=("width",),
        defaults=partial(_defaults, _resident),
        choices={"programs": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), "num_warps": (1, 2, 4, 8, 16), "num_stages": (1,)},
    )


def _launch(kernel: str, rows_ND: Tensor) -> tuple[int, dict[str, int]]:
    """(number of programs, compile-time arguments and launch options) of a kernel over rows."""
    rows, columns = rows_ND.shape
    width = triton.next_power_of_2(columns)
    options = dict(tuning.options(f"rms_norm.{kernel}", rows_ND.device, width=width))
    programs = min(rows, multiprocessors(rows_ND.device) * options.pop("programs"))
    return programs, {"D": columns, "WIDTH": width, **options}


class _Norm(torch.autograd.Function):
    """Saves the rows that were normed, which the residual stream keeps alive anyway, and their fp32 scales."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        total_ND = None if branch_ND is None else torch.empty_like(x_ND)
        normed_ND = torch.empty_like(x_ND, dtype=out_dtype)
        scale_N = x_ND.new_empty(x_ND.shape[0], dtype=torch.float32)
        programs, options = _launch("forward", x_ND)
        norm_forward_kernel[(programs,)](
            x_ND, branch_ND, weight_D, total_ND, normed_ND, scale_N, x_ND.shape[0], eps, **options
        )  # fmt: skip
        ctx.save_for_backward(x_ND if total_ND is None else total_ND, weight_D, scale_N)
        ctx.branch_dtype = None if branch_ND is None else branch_ND.dtype
        ctx.set_materialize_grads(False)
        return total_ND, normed_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total_ND: Tensor | None, d_normed_ND: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, scale_N = ctx.saved_tensors
        branch_dtype = ctx.branch_dtype
        if d_normed_ND is None:  # the sum alone was used
            d_branch_ND = None if branch_dtype is None or d_total_ND is None else d_total_ND.to(branch_dtype)
            return d_total_ND, d_branch_ND, None, None, None
        if d_total_ND is not None:
            d_total_ND = d_total_ND.contiguous()
        d_x_ND = torch.empty_like(x_ND)
        # One tensor serves both where they are of one dtype.
        apart = branch_dtype not in (None, x_ND.dtype)
        d_branch_ND = torch.empty_like(x_ND, dtype=branch_dtype) if apart else None
        programs, options = _launch("backward", x_ND)
        partials = scale_N.new_empty(programs, x_ND.shape[1])
        norm_backward_kernel[(programs,)](
            x_ND, weight_D, scale_N, d_total_ND, d_normed_ND.contiguous(), d_x_ND, d_branch_ND, partials,
            x_ND.shape[0], **options,
        )  # fmt: skip
        if branch_dtype == x_ND.dtype:
            d_branch_ND = d_x_ND
        return d_x_ND, d_branch_ND, partials.sum(0).to(weight_D.dtype), None, None


def triton_norm(x: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """`rms_norm` (specification, section 3) for bf16 or fp32 x with at least one row, on a CUDA device."""
    _, normed_ND = _Norm.apply(_as_rows(x), None, weight_D.contiguous(), eps, out_dtype)
    return normed_ND.view(x.shape)


def triton_add_norm(
    x: Tensor, branch: Tensor, weight_D: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` (specification, section 3) for bf16 or fp32 x with at least one row, on a CUDA device."""
    total_ND, normed_ND = _Norm.apply(_as_rows(x), _as_rows(branch), weight_D.contiguous(), eps, out_dtype)
    return total_ND.view(x.shape), normed_ND.view(x.shape)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()
