"""The stages of a decode step for any number of rows: weights meet all rows in matrix units.

Two forms of a product. Quantised weights, and 16-bit ones while rows are few, go through a kernel of our own, which
takes a tile of weight rows with all inputs, dequantises it on the way and does what comes before and after the product
itself: the norm, SwiGLU, the residual stream. All other weights go through cuBLAS, with kernels around it.

Where a row's norm is part of the product, its scale is applied to the product's sum instead of to each input.

All sums are fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_essh.ops import tuning
from megatron_essh.ops.decode_step.ring_attention import attend
from megatron_essh.ops.decode_step.vector import (
    _ELEMENTS,
    _launch,
    _stored,
    after_tiles,
    as_fp32,
    before_tiles,
    embed,
    scan_rows,
)
from megatron_essh.ops.decode_step.weights import FeedForwardWeights, PackedWeight, SpectralWeights
from megatron_essh.ops.rms_norm.triton import triton_norm
from megatron_essh.ops.selective_scan.triton_forward import sigmoid
from megatron_essh.ops.swiglu.triton import swiglu_forward_kernel

__all__ = ["add_product", "advance", "attend", "embed", "normed_product", "scan_step", "spectral", "units"]

_FEW_ROWS = 32
"""The largest batch of which 16-bit weights are read by the kernel here."""
_NORM_ROWS = 16
"""The largest batch of which a program of the product norms all rows by itself: they are read as often as that."""
_PROGRAMS = 132
"""Multiprocessors of the largest GPU around."""
_MOST_BATCH = 128
"""Rows of the batch that a program takes."""
_SCAN_ELEMENTS = 1024
"""State elements of a lane that a program of the scan step takes."""
_ADVANCE = 256
"""Rows that a program moves on."""


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("batch", "rows"))
def product_kernel(
    x, norm, values, scale, y, batch, rows, eps, factor,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, ACTIVATION: tl.constexpr,
    UNITS: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [batch, rows] = x W^T for ROWS of its columns and BATCH of its rows a program, the inputs COLUMNS at a time.

    norm: of x [batch, INPUTS], or None. UNITS: y [batch, rows / 2] = silu(gate) up of them. ADD: y += factor x W^T.
    """
    before_tiles(DEPENDENT)
    first = tl.program_id(0) * ROWS
    row_R = first + tl.arange(0, ROWS)
    weight_R = values + tl.minimum(row_R, rows - 1).to(tl.int64) * INPUTS
    b_B = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    inside_B = b_B < batch
    x_B = x + b_B * INPUTS
    column_C = tl.arange(0, COLUMNS)
    after_tiles(DEPENDENT)
    sum_RB = tl.zeros([ROWS, BATCH], tl.float32)
    square_BC = tl.zeros([BATCH, COLUMNS], tl.float32)
    for start in range(0, INPUTS, COLUMNS):
        place_C = start + column_C
        if INPUTS % COLUMNS == 0:
            tile_RC = tl.load(weight_R[:, None] + place_C[None, :])
            x_BC = tl.load(x_B[:, None] + place_C[None, :], mask=inside_B[:, None], other=0.0)
        else:
            tile_RC = tl.load(weight_R[:, None] + place_C[None, :], mask=(place_C < INPUTS)[None, :], other=0)
            x_BC = tl.load(
                x_B[:, None] + place_C[None, :], mask=inside_B[:, None] & (place_C < INPUTS)[None, :], other=0.0
            )
        if norm is not None:
            norm_C = tl.load(norm + place_C, mask=place_C < INPUTS, other=0.0)
            square_BC += x_BC * x_BC
            x_BC = x_BC * norm_C[None, :]
        if tile_RC.dtype == ACTIVATION:
            weight_RC = tile_RC
        else:
            weight_RC = as_fp32(tile_RC, DEPENDENT).to(ACTIVATION)
        sum_RB = tl.dot(weight_RC, tl.trans(x_BC.to(ACTIVATION)), sum_RB, input_precision="ieee")

    y_BR = tl.trans(sum_RB)
    if scale is not None:
        y_BR = y_BR * tl.load(scale + row_R, mask=row_R < rows, other=0.0)[None, :]
    if norm is not None:
        y_BR = y_BR * (1.0 / tl.sqrt(tl.sum(square_BC, axis=1) / INPUTS + eps))[:, None]
    # A product's columns and rows together may be more than 32 bits count: logits of many rows.
    y_B = y + b_B.to(tl.int64) * (rows // 2 if UNITS else rows)
    if UNITS:
        gate_BN, up_BN = tl.split(y_BR.reshape(BATCH, ROWS // 2, 2))
        unit_N = first // 2 + tl.arange(0, ROWS // 2)
        h_BN = (gate_BN * sigmoid(gate_BN) * up_BN).to(y.dtype.element_ty)
        tl.store(y_B[:, None] + unit_N[None, :], h_BN, mask=inside_B[:, None] & (unit_N < rows // 2)[None, :])
    else:
        y_at_BR = y_B[:, None] + row_R[None, :]
        mask_BR = inside_B[:, None] & (row_R < rows)[None, :]
        if ADD:
            y_BR = tl.load(y_at_BR, mask=mask_BR, other=0.0) + factor * y_BR
        tl.store(y_at_BR, y_BR.to(y.dtype.element_ty), mask=mask_BR)


@triton.jit
def scan_step_kernel(
    raw, tables, beta, state, slot, z, eps, B: tl.constexpr, K: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    MODES: tl.constexpr, VALUES: tl.constexpr, STEP: tl.constexpr, NEUTRAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token of the selective scan; program (channel, STEP rows). raw: fp32 [B, K (P + 3M)]."""
    before_tiles(DEPENDENT)
    after_tiles(DEPENDENT)
    first = tl.program_id(1) * STEP
    channel = tl.program_id(0)
    scan_rows(raw, tables, beta, state, slot, z, channel, first, eps, B, K, M, P, MODES, VALUES, STEP, NEUTRAL)


@triton.jit(do_not_specialize=("batch",))
def advance_kernel(position, slot, batch, BATCH: tl.constexpr, DEPENDENT: tl.constexpr):
    """The positions of BATCH rows' slots, of which no two are alike."""
    before_tiles(DEPENDENT)
    row_B = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    after_tiles(DEPENDENT)
    slot_B = tl.load(slot + row_B, mask=row_B < batch, other=-1)
    at_B = position + tl.maximum(slot_B, 0)
    tl.store(at_B, tl.load(at_B, mask=slot_B >= 0, other=0) + 1, mask=slot_B >= 0)


# -- launches --------------------------------------------------------------------------------------------------------


def normed_product(x_BD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, y_BR: Tensor) -> None:
    """y = RMSNorm(x) W^T: the queries, keys and values of an attention layer, and the head's logits (fp32)."""
    _normed_product(x_BD, norm_D, eps, weight, y_BR, _activation(weight, y_BR))


def units(x_BD: Tensor, weights: FeedForwardWeights, eps: float, h_BN: Tensor) -> None:
    """h = silu(gate) up of RMSNorm(x); between cuBLAS and SwiGLU gates and ups are rounded to h's dtype."""
    if _kernel_takes(weights.gate_up, x_BD.shape[0]):
        _normed_product(x_BD, weights.norm_D, eps, weights.gate_up, h_BN, h_BN.dtype, units=True)
        return
    batch, count = h_BN.shape
    gate_up_BR = torch.empty(batch, 2 * count, dtype=h_BN.dtype, device=h_BN.device)
    _normed_product(x_BD, weights.norm_D, eps, weights.gate_up, gate_up_BR, h_BN.dtype)
    options = tuning.options("swiglu.forward", h_BN.device, statistics=0)
    blocks = triton.cdiv(batch, options["ROWS"] * options["STEPS"]) * triton.cdiv(count, options["UNITS"])
    align = math.gcd(16, count)
    swiglu_forward_kernel[(blocks,)](gate_up_BR, h_BN, None, batch, count // align, ALIGN=align, **options)


def add_product(h_BI: Tensor, weight: PackedWeight, scale: float, x_BD: Tensor) -> None:
    """x += scale h W^T."""
    if _kernel_takes(weight, h_BI.shape[0]):
        _launch_product(h_BI, None, 0.0, weight, x_BD, h_BI.dtype, add=scale)
    elif h_BI.dtype == x_BD.dtype:
        x_BD.addmm_(h_BI, weight.values_RI.T, alpha=scale)
    else:
        torch.addmm(x_BD, h_BI, weight.values_RI.T, out_dtype=x_BD.dtype, alpha=scale, out=x_BD)


def spectral(
    x_BD: Tensor, weights: SpectralWeights, eps: float, state_SKM2P: Tensor, slot_B: Tensor, z_BR: Tensor
) -> None:
    """z [B, K P]: what the channels give for RMSNorm(x), their states moved on by one token."""
    raw_BR = torch.empty(x_BD.shape[0], weights.in_proj.rows, dtype=torch.float32, device=x_BD.device)
    _normed_product(x_BD, weights.norm_D, eps, weights.in_proj, raw_BR, z_BR.dtype)
    scan_step(raw_BR, weights, eps, state_SKM2P, slot_B, z_BR)


def scan_step(
    raw_BR: Tensor, weights: SpectralWeights, eps: float, state_SKM2P: Tensor, slot_B: Tensor, z_BR: Tensor
) -> None:
    """One token of the selective scan, from the raw input projection [B, K X] (section 1)."""
    raw_BR = raw_BR.float()
    assert all(tensor.is_contiguous() for tensor in (raw_BR, weights.tables_KTM, state_SKM2P, slot_B, z_BR))
    batch = raw_BR.shape[0]
    channels, _, modes = weights.tables_KTM.shape
    width = state_SKM2P.shape[-1]
    padded_modes, padded_width = triton.next_power_of_2(modes), triton.next_power_of_2(width)
    step = max(1, _SCAN_ELEMENTS // (padded_modes * padded_width))
    scan_step_kernel[(channels, triton.cdiv(batch, step))](
        raw_BR, weights.tables_KTM, weights.beta_K, state_SKM2P, slot_B, z_BR, eps,
        B=batch, K=channels, M=modes, P=width, MODES=padded_modes, VALUES=padded_width, STEP=step,
        NEUTRAL=weights.neutral_gates, **_launch(z_BR.device, 4),
    )  # fmt: skip


def advance(position_S: Tensor, slot_B: Tensor) -> None:
    """The live rows' sequences have taken in one token more."""
    batch = slot_B.shape[0]
    assert position_S.is_contiguous()
    assert slot_B.is_contiguous()
    grid = (triton.cdiv(batch, _ADVANCE),)
    advance_kernel[grid](position_S, slot_B, batch, BATCH=_ADVANCE, **_launch(slot_B.device, 4))


def _activation(weight: PackedWeight, result: Tensor) -> torch.dtype:
    """The dtype in which a product takes its inputs: the weight's; of a quantised one the result's, or bf16."""
    if weight.scale_R is None:
        return weight.values_RI.dtype
    return result.dtype if result.dtype != torch.float32 else torch.bfloat16


def _kernel_takes(weight: PackedWeight, batch: int) -> bool:
    """Whether the product is the kernel's here, or cuBLAS's."""
    return weight.scale_R is not None or (batch <= _FEW_ROWS and weight.values_RI.dtype != torch.float32)


def _normed_product(
    x_BD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: PackedWeight,
    y_BR: Tensor,
    dtype: torch.dtype,
    units: bool = False,
) -> None:
    """y = RMSNorm(x) W^T, or `units` of it; the product takes its inputs in `dtype`."""
    taken = _kernel_takes(weight, x_BD.shape[0])
    if taken and x_BD.shape[0] <= _NORM_ROWS:
        _launch_product(x_BD, norm_D, eps, weight, y_BR, dtype, units=units)
        return
    u_BD = triton_norm(x_BD, norm_D, eps, dtype)
    if taken:
        _launch_product(u_BD, None, eps, weight, y_BR, dtype, units=units)
    elif dtype == y_BR.dtype:
        torch.mm(u_BD, weight.values_RI.T, out=y_BR)
    else:
        torch.mm(u_BD, weight.values_RI.T, out_dtype=y_BR.dtype, out=y_BR)


def tile(rows: int, batch: int, itemsize: int) -> dict[str, int]:
    """What a program takes of a product of `rows` weight rows, each weight of `itemsize` bytes, and how.

    As many weight rows as leave a program to every multiprocessor, and as many inputs at a time as make 8 KB of them.
    """
    weight_rows = 64
    while weight_rows > 16 and rows < weight_rows * 2 * _PROGRAMS:
        weight_rows //= 2
    taken = min(_MOST_BATCH, max(16, triton.next_power_of_2(batch)))
    columns = min(256 if taken <= 32 else 128, max(64, 8192 // (weight_rows * itemsize)))
    return {"ROWS": weight_rows, "BATCH": taken, "COLUMNS": columns}


def _launch_product(
    x_BI: Tensor,
    norm_I: Tensor | None,
    eps: float,
    weight: PackedWeight,
    y_BR: Tensor,
    dtype: torch.dtype,
    units: bool = False,
    add: float | None = None,
) -> None:
    assert all(tensor.is_contiguous() for tensor in (x_BI, weight.values_RI, y_BR))
    batch = x_BI.shape[0]
    sizes = tile(weight.rows, batch, weight.values_RI.element_size())
    grid = (triton.cdiv(weight.rows, sizes["ROWS"]), triton.cdiv(batch, sizes["BATCH"]))
    launch = _launch(x_BI.device, 4) | {"num_stages": 4 if sizes["BATCH"] <= 32 else 3}
    product_kernel[grid](
        x_BI, norm_I, _stored(weight), weight.scale_R, y_BR, batch, weight.rows, eps, 1.0 if add is None else add,
        INPUTS=weight.inputs, ACTIVATION=_ELEMENTS[dtype], UNITS=units, ADD=add is not None, **sizes, **launch,
    )  # fmt: skip
