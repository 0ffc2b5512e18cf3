"""SwiGLU by Triton kernels: gates and ups are loaded as they lie, in pairs, and parted in registers.

The forward kernel takes blocks of rows and units, so that it can sum the units' squares over its rows on the way. The
backward kernel knows of no rows: its elements are independent. Neither is compiled anew for another number of rows or
units. A size reaches a kernel as a multiple of ALIGN, a power of two known to the compiler, without which it could not
load 16 bytes at once. All arithmetic is fp32; sums are deterministic.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_essh.ops import tuning


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=("rows", "aligned_units"))
def swiglu_forward_kernel(
    gate_up, units, partials, rows, aligned_units,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """units [rows, n] of gate_up [rows, 2n], for ROWS x STEPS rows and UNITS units a program, n = aligned_units ALIGN.

    partials: fp32 [row blocks, n], the block's sums of squares; or None.
    """
    n = aligned_units * ALIGN
    columns = tl.cdiv(n, UNITS)
    block = tl.program_id(0) // columns  # neighbours take neighbouring units of the same rows
    first = block.to(tl.int64) * (ROWS * STEPS)
    unit = tl.program_id(0) % columns * UNITS
    row_R = tl.arange(0, ROWS)
    unit_N = unit + tl.arange(0, UNITS)
    pair_N = 2 * unit + tl.arange(0, 2 * UNITS)
    squares_RN = tl.zeros([ROWS, UNITS], tl.float32)
    for i in range(STEPS):
        start = first + i * ROWS
        inside_R = row_R < rows - start
        pairs_RN = tl.load(
            gate_up + start * (2 * n) + row_R[:, None] * (2 * n) + pair_N[None, :],
            mask=inside_R[:, None] & (pair_N < 2 * n)[None, :],
            other=0.0,
        )
        gate_RN, up_RN = tl.split(pairs_RN.to(tl.float32).reshape(ROWS, UNITS, 2))
        units_RN = (gate_RN * sigmoid(gate_RN) * up_RN).to(units.dtype.element_ty)
        mask_RN = inside_R[:, None] & (unit_N < n)[None, :]
        tl.store(units + start * n + row_R[:, None] * n + unit_N[None, :], units_RN, mask=mask_RN)
        if partials is not None:  # rows and units beyond the end are zero
            rounded_RN = units_RN.to(tl.float32)
            squares_RN += rounded_RN * rounded_RN
    if partials is not None:
        place_N = block.to(tl.int64) * n + unit_N
        tl.store(partials + place_N, tl.sum(squares_RN, axis=0), mask=unit_N < n)


@triton.jit(do_not_specialize=("aligned_total",))
def swiglu_backward_kernel(
    gate_up, d_units, d_gate_up, aligned_total, ALIGN: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """d_gate_up of the aligned_total ALIGN units of all rows, UNITS a program."""
    start = tl.program_id(0).to(tl.int64) * UNITS
    unit_N = tl.arange(0, UNITS)
    pair_N = tl.arange(0, 2 * UNITS)
    left = aligned_total.to(tl.int64) * ALIGN - start
    pairs_N = tl.load(gate_up + 2 * start + pair_N, mask=pair_N < 2 * left, other=0.0)
    d_units_N = tl.load(d_units + start + unit_N, mask=unit_N < left, other=0.0).to(tl.float32)
    gate_N, up_N = tl.split(pairs_N.to(tl.float32).reshape(UNITS, 2))
    share_N = sigmoid(gate_N)
    silu_N = gate_N * share_N
    d_gate_N = d_units_N * up_N * (share_N + silu_N * (1.0 - share_N))
    d_pairs_N = tl.join(d_gate_N, d_units_N * silu_N).reshape(2 * UNITS)
    tl.store(d_gate_up + 2 * start + pair_N, d_pairs_N, mask=pair_N < 2 * left)


def _forward_defaults(statistics: int) -> dict[str, int]:
    """A thread loads two times 16 bytes of bf16 a step.

    With statistics a partial row is written every 64 rows, which adds 2% to the bytes that move; without them shorter
    programs end more evenly.
    """
    return {"ROWS": 4, "STEPS": 16 if statistics else 4, "UNITS": 256, "num_warps": 4, "num_stages": 1}


tuning.declare(
    "swiglu.forward",
    shape_class=("statistics",),
    defaults=_forward_defaults,
    choices={"ROWS": (2, 4, 8), "STEPS": (1, 4, 16), "UNITS": (256, 512), "num_warps": (4, 8), "num_stages": (1,)},
)
tuning.declare(
    "swiglu.backward",
    shape_class=(),
    defaults={"UNITS": 1024, "num_warps": 4, "num_stages": 1},
    choices={"UNITS": (512, 1024, 2048, 4096), "num_warps": (4, 8), "num_stages": (1,)},
)


class _SwiGLU(torch.autograd.Function):
    """Saves gate_up alone."""

    @staticmethod
    def forward(ctx: Any, gate_up_RX: Tensor, square_sum_N: Tensor | None) -> Tensor:
        rows, n = gate_up_RX.shape[0], gate_up_RX.shape[1] // 2
        units_RN = gate_up_RX.new_empty(rows, n)
        options = tuning.options("swiglu.forward", gate_up_RX.device, statistics=int(square_sum_N is not None))
        blocks = triton.cdiv(rows, options["ROWS"] * options["STEPS"])
        partials = None if square_sum_N is None else square_sum_N.new_empty(blocks, n)
        align = math.gcd(16, n)
        swiglu_forward_kernel[(blocks * triton.cdiv(n, options["UNITS"]),)](
            gate_up_RX, units_RN, partials, rows, n // align, ALIGN=align, **options
        )
        if square_sum_N is not None and partials is not None:
            square_sum_N += partials.sum(0)
        ctx.save_for_backward(gate_up_RX)
        return units_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_units_RN: Tensor) -> tuple[Tensor, None]:
        (gate_up_RX,) = ctx.saved_tensors
        d_gate_up_RX = torch.empty_like(gate_up_RX)
        options = tuning.options("swiglu.backward", gate_up_RX.device)
        total = d_units_RN.numel()
        align = math.gcd(16, d_units_RN.shape[1])
        swiglu_backward_kernel[(triton.cdiv(total, options["UNITS"]),)](
            gate_up_RX, d_units_RN.contiguous(), d_gate_up_RX, total // align, ALIGN=align, **options
        )
        return d_gate_up_RX, None


def triton_swiglu(gate_up: Tensor, square_sum_N: Tensor | None = None) -> Tensor:
    """`swiglu` (specification, section 3) for bf16 or fp32 gate_up with at least one element, on a CUDA device."""
    gate_up_RX = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
    return _SwiGLU.apply(gate_up_RX, square_sum_N).view(*gate_up.shape[:-1], -1)
