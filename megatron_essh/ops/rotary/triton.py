"""Rotary positions by Triton kernels: one reads qkv and writes q, k and v, one goes back.

A row is one head of one token: 3 D columns that lie side by side in qkv, D in each of q, k and v. A half of D columns
is a block, so that both members of a pair are in one thread's registers. All arithmetic is fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_essh.ops import tuning


@triton.jit
def load_halves(source, place_RI, inside_RI, HALF: tl.constexpr):
    first_RI = tl.load(source + place_RI, mask=inside_RI, other=0.0)
    second_RI = tl.load(source + HALF + place_RI, mask=inside_RI, other=0.0)
    return first_RI, second_RI


@triton.jit
def store_halves(target, place_RI, first_RI, second_RI, inside_RI, HALF: tl.constexpr):
    tl.store(target + place_RI, first_RI, mask=inside_RI)
    tl.store(target + HALF + place_RI, second_RI, mask=inside_RI)


@triton.jit
def turn(first_RI, second_RI, cos_RI, sin_RI):
    first_RI, second_RI = first_RI.to(tl.float32), second_RI.to(tl.float32)
    return first_RI * cos_RI - second_RI * sin_RI, second_RI * cos_RI + first_RI * sin_RI


@triton.jit(do_not_specialize=("rows", "heads", "period"))
def rotary_kernel(
    qkv, q, k, v, cos, sin, rows, heads, period,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """q, k and v of ROWS rows of qkv; or, backward, qkv's gradient from theirs by the inverse rotation.

    The tables hold `period` tokens and begin anew after them.
    """
    start = tl.program_id(0) * ROWS
    local_R = tl.arange(0, ROWS)
    column_I = tl.arange(0, WIDTH)
    inside_RI = (local_R < rows - start)[:, None] & (column_I < HALF)[None, :]
    # Offsets from a program's first row fit 32 bits; that row's own may not.
    joint = qkv + start.to(tl.int64) * (6 * HALF)
    joint_RI = local_R[:, None] * (6 * HALF) + column_I[None, :]
    apart = start.to(tl.int64) * (2 * HALF)
    apart_RI = local_R[:, None] * (2 * HALF) + column_I[None, :]
    angle_RI = ((start + local_R) // heads % period)[:, None] * HALF + column_I[None, :]
    cos_RI = tl.load(cos + angle_RI, mask=inside_RI, other=0.0)
    sin_RI = tl.load(sin + angle_RI, mask=inside_RI, other=0.0)
    # All loads come before the first store: the compiler may not move them past one.
    if BACKWARD:
        q1_RI, q2_RI = load_halves(q + apart, apart_RI, inside_RI, HALF)
        k1_RI, k2_RI = load_halves(k + apart, apart_RI, inside_RI, HALF)
        v1_RI, v2_RI = load_halves(v + apart, apart_RI, inside_RI, HALF)
        q1_RI, q2_RI = turn(q1_RI, q2_RI, cos_RI, -sin_RI)
        k1_RI, k2_RI = turn(k1_RI, k2_RI, cos_RI, -sin_RI)
        store_halves(joint, joint_RI, q1_RI, q2_RI, inside_RI, HALF)
        store_halves(joint + 2 * HALF, joint_RI, k1_RI, k2_RI, inside_RI, HALF)
        store_halves(joint + 4 * HALF, joint_RI, v1_RI, v2_RI, inside_RI, HALF)
    else:
        q1_RI, q2_RI = load_halves(joint, joint_RI, inside_RI, HALF)
        k1_RI, k2_RI = load_halves(joint + 2 * HALF, joint_RI, inside_RI, HALF)
        v1_RI, v2_RI = load_halves(joint + 4 * HALF, joint_RI, inside_RI, HALF)
        q1_RI, q2_RI = turn(q1_RI, q2_RI, cos_RI, sin_RI)
        k1_RI, k2_RI = turn(k1_RI, k2_RI, cos_RI, sin_RI)
        store_halves(q + apart, apart_RI, q1_RI, q2_RI, inside_RI, HALF)
        store_halves(k + apart, apart_RI, k1_RI, k2_RI, inside_RI, HALF)
        store_halves(v + apart, apart_RI, v1_RI, v2_RI, inside_RI, HALF)


def _defaults(half: int) -> dict[str, int]:
    """A thread loads 16 bytes of bf16 of each of the six halves at once."""
    return {"ROWS": max(1, 1024 // half), "num_warps": 4, "num_stages": 1}


tuning.declare(
    "rotary.rotate",
    shape_class=("half",),
    defaults=_defaults,
    choices={"ROWS": tuple(1 << i for i in range(11)), "num_warps": (2, 4, 8), "num_stages": (1,)},
)


def _launch(qkv_BTH3D: Tensor, apart: tuple[Tensor, ...], cos: Tensor, sin: Tensor, *, backward: bool) -> None:
    head_dim = qkv_BTH3D.shape[-1]
    rows, half = qkv_BTH3D.numel() // (3 * head_dim), head_dim // 2
    width = triton.next_power_of_2(half)
    options = tuning.options("rotary.rotate", qkv_BTH3D.device, half=width)
    rotary_kernel[(triton.cdiv(rows, options["ROWS"]),)](
        qkv_BTH3D, *apart, cos, sin, rows, qkv_BTH3D.shape[2], cos.numel() // half,
        HALF=half, WIDTH=width, BACKWARD=backward, **options,
    )  # fmt: skip


class _RotateQKV(torch.autograd.Function):
    """Saves the tables alone."""

    @staticmethod
    def forward(ctx: Any, qkv_BTH3D: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, heads, _, head_dim = qkv_BTH3D.shape
        q_BTHD, k_BTHD, v_BTHD = (qkv_BTH3D.new_empty(batch, length, heads, head_dim) for _ in range(3))
        _launch(qkv_BTH3D, (q_BTHD, k_BTHD, v_BTHD), cos, sin, backward=False)
        ctx.save_for_backward(cos, sin)
        return q_BTHD, k_BTHD, v_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        batch, length, heads, head_dim = gradients[0].shape
        d_qkv_BTH3D = gradients[0].new_empty(batch, length, heads, 3, head_dim)
        _launch(d_qkv_BTH3D, tuple(x.contiguous() for x in gradients), cos, sin, backward=True)
        return d_qkv_BTH3D, None, None


def triton_rotate_qkv(qkv_BTH3D: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate_qkv` (specification, section 3) for bf16 or fp32 qkv and fp32 tables, on a CUDA device."""
    assert cos.dtype == sin.dtype == torch.float32, f"tables are {cos.dtype}; the kernels take fp32"
    return _RotateQKV.apply(qkv_BTH3D.contiguous(), cos.contiguous(), sin.contiguous())
