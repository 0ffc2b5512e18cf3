"""The stages of a decode step for any number of rows: weights meet all rows in matrix units.

Three forms of a product. Quantised weights, and 16-bit ones where it is faster, go through a kernel of our own, which
takes a tile of weight rows, dequantises it on the way and does what comes after the product itself: SwiGLU, the
residual stream. All other weights go through cuBLAS, with kernels around it. `product_launch` says which, and with what
tiles. Large 16-bit weights of up to 16 rows go through `streamed` where it can be built.

A norm has no kernel of its own where our kernel is on both sides of it: who adds to the residual stream leaves it times
the norm's weights and each tile's sums of squares (`Scaled`), and the norm's scale is applied to the sums of the
product that reads it. Elsewhere a small kernel norms the rows.

Where a product has fewer tiles than a GPU has room for programs, several share the inputs of one: each leaves its sums
in memory, and the last to be done joins them, always in the same order. Programs count themselves in on a counter that
the last one sets to 0 again. A program that holds its whole share of the weights asks for it before it waits for the
kernel ahead.

All sums are fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_essh.ops import tuning
from megatron_essh.ops.decode_step import streamed
from megatron_essh.ops.decode_step.ring_attention import attend
from megatron_essh.ops.decode_step.state import Scaled
from megatron_essh.ops.decode_step.vector import (
    _ELEMENTS,
    _launch,
    _stored,
    after_tiles,
    as_fp32,
    before_tiles,
    embed,
    normed_row,
    scan_rows,
)
from megatron_essh.ops.decode_step.weights import FeedForwardWeights, PackedWeight, SpectralWeights
from megatron_essh.ops.selective_scan.triton_forward import sigmoid
from megatron_essh.ops.swiglu.triton import swiglu_forward_kernel

__all__ = ["add_product", "advance", "attend", "embed", "normed_product", "scan_step", "spectral", "units"]

_FEW_ROWS = 32
"""The largest batch at which reading the weights is all that counts."""
_MOST_BATCH = 128
"""Rows of the batch that a program takes."""
_PROGRAMS = 132
"""Multiprocessors of the largest GPU around."""
_TILE_ROWS = 64
"""Weight rows that a program takes where nothing says otherwise."""
_HELD_COLUMNS = 256
"""Inputs that a program which holds its weights takes at a time: one block of 128 rows, or two of 64, are 64 KiB."""
_MOST_SPLITS = 8
"""Programs that share a tile: joining more parts takes longer than it saves."""
_MOST_TILES = 4096
"""Tiles of a product whose inputs are shared out."""
_ADVANCE = 256
"""Rows that a program moves on."""


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def norm_kernel(x, norm, u, eps, D: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    """u [B, D] = RMSNorm(x), a row a program."""
    before_tiles(DEPENDENT)
    column_C = tl.arange(0, WIDTH)
    norm_C = tl.load(norm + column_C, mask=column_C < D, other=0.0)
    place = tl.program_id(0).to(tl.int64) * D
    after_tiles(DEPENDENT)
    u_C = normed_row(x + place, norm_C, column_C, eps, D, u.dtype.element_ty)
    tl.store(u + place + column_C, u_C.to(u.dtype.element_ty), mask=column_C < D)


@triton.jit
def weight_block(weight_R, place_C, INPUTS: tl.constexpr, MASKED: tl.constexpr):
    """Columns place_C of the rows at weight_R, as they are stored. They leave the cache first."""
    at_RC = weight_R[:, None] + place_C[None, :]
    if MASKED:
        tile_RC = tl.load(at_RC, mask=(place_C < INPUTS)[None, :], other=0, eviction_policy="evict_first")
    else:
        tile_RC = tl.load(at_RC, eviction_policy="evict_first")
    return tile_RC


@triton.jit
def input_block(x_B, place_C, inside_B, INPUTS: tl.constexpr, MASKED: tl.constexpr):
    """Columns place_C of the rows at x_B; 0 for those that are not inside_B."""
    at_BC = x_B[:, None] + place_C[None, :]
    if MASKED:
        x_BC = tl.load(at_BC, mask=inside_B[:, None] & (place_C < INPUTS)[None, :], other=0.0)
    else:
        x_BC = tl.load(at_BC, mask=inside_B[:, None], other=0.0)
    return x_BC


@triton.jit
def add_block(sum, tile_RC, x_BC, ACTIVATION: tl.constexpr, TURNED: tl.constexpr, DEPENDENT: tl.constexpr):
    """sum [R, B] + W x^T, or where TURNED sum [B, R] + x W^T."""
    if tile_RC.dtype == ACTIVATION:
        weight_RC = tile_RC
    else:
        weight_RC = as_fp32(tile_RC, DEPENDENT).to(ACTIVATION)
    if TURNED:
        sum = tl.dot(x_BC.to(ACTIVATION), tl.trans(weight_RC), sum, input_precision="ieee")
    else:
        sum = tl.dot(weight_RC, tl.trans(x_BC.to(ACTIVATION)), sum, input_precision="ieee")
    return sum


@triton.jit
def norm_scale(squares, b_B, batch, eps, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """[B], what a norm scales rows by; squares [TILES, batch]."""
    tile_T = tl.arange(0, triton.next_power_of_2(TILES))
    inside_TB = (tile_T < TILES)[:, None] & (b_B < batch)[None, :]
    square_TB = tl.load(squares + tile_T[:, None] * batch + b_B[None, :], mask=inside_TB, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(square_TB, axis=0) / WIDTH + eps)


@triton.jit
def finish(
    y_BR, row_scale_B, scale, y, norm, u, squares, b_B, first, batch, rows, factor,
    ROWS: tl.constexpr, BATCH: tl.constexpr, UNITS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """What comes after the sums of a tile: the scales of rows and weights; SwiGLU or the residual stream.

    row_scale_B, norm: None, or what a norm scales rows by; the weights of the norm that reads the stream next.
    """
    row_R = first + tl.arange(0, ROWS)
    inside_B = b_B < batch
    if row_scale_B is not None:
        y_BR = y_BR * row_scale_B[:, None]
    if scale is not None:
        y_BR = y_BR * tl.load(scale + row_R, mask=row_R < rows, other=0.0)[None, :]
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
            if norm is not None:
                u_BR = y_BR * tl.load(norm + row_R, mask=row_R < rows, other=0.0)[None, :]
                u_at_BR = u + b_B[:, None].to(tl.int64) * rows + row_R[None, :]
                tl.store(u_at_BR, u_BR.to(u.dtype.element_ty), mask=mask_BR)
                square_B = tl.sum(tl.where(mask_BR, y_BR * y_BR, 0.0), axis=1)
                tl.store(squares + first // ROWS * batch + b_B, square_B, mask=inside_B)
        tl.store(y_at_BR, y_BR.to(y.dtype.element_ty), mask=mask_BR)


@triton.jit(do_not_specialize=("batch", "rows"))
def product_kernel(
    x, x_squares, values, scale, y, norm, u, squares, parts, counter, batch, rows, factor, eps,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr,
    TILES: tl.constexpr, HELD: tl.constexpr, TURNED: tl.constexpr, ACTIVATION: tl.constexpr, UNITS: tl.constexpr,
    ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [batch, rows] = x W^T; program (BATCH of its rows, ROWS of its columns, one of SPLITS shares of the inputs).

    UNITS: y [batch, rows / 2] = silu(gate) up of them. ADD: y += factor x W^T.
    x_squares: [TILES, batch], or None; rows of the result are scaled as a norm would that has such squares.
    norm: of whoever reads y next, or None; where ADD, u [batch, rows] = y times its weights, and squares [tiles, batch]
    the sums of y's squares.
    HELD: a program has its whole share of the weights under way before it waits. TURNED: x is the product's first
    operand.
    parts: fp32 [tiles, SPLITS, BATCH, ROWS]; counter: int32 [tiles], zero before and after. The last program of a tile
    joins its parts, in their order.
    """
    BLOCKS: tl.constexpr = (INPUTS + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    SHARE: tl.constexpr = BLOCKS * COLUMNS
    EVEN: tl.constexpr = INPUTS % SHARE == 0
    MASKED: tl.constexpr = not EVEN if HELD else INPUTS % COLUMNS != 0
    before_tiles(DEPENDENT)
    first = tl.program_id(1) * ROWS
    row_R = tl.minimum(first + tl.arange(0, ROWS), rows - 1)
    weight_R = values + row_R.to(tl.int64) * INPUTS
    b_B = tl.program_id(0) * BATCH + tl.arange(0, BATCH)
    inside_B = b_B < batch
    x_B = x + b_B * INPUTS
    split = tl.program_id(2)
    begin = split * SHARE
    column_C = begin + tl.arange(0, COLUMNS)
    sum = tl.zeros([BATCH, ROWS] if TURNED else [ROWS, BATCH], tl.float32)
    if HELD:
        tiles = ()
        for i in tl.static_range(BLOCKS):
            tiles += (weight_block(weight_R, column_C + i * COLUMNS, INPUTS, MASKED),)  # type: ignore[assignment]
        after_tiles(DEPENDENT)
        inputs = ()
        for i in tl.static_range(BLOCKS):
            inputs += (input_block(x_B, column_C + i * COLUMNS, inside_B, INPUTS, MASKED),)  # type: ignore[assignment]
        row_scale_B = None if x_squares is None else norm_scale(x_squares, b_B, batch, eps, INPUTS, TILES)
        for i in tl.static_range(BLOCKS):
            sum = add_block(sum, tiles[i], inputs[i], ACTIVATION, TURNED, DEPENDENT)
    else:
        if EVEN:
            end = SHARE
        else:
            end = tl.maximum(0, tl.minimum(SHARE, INPUTS - begin))
        after_tiles(DEPENDENT)
        row_scale_B = None if x_squares is None else norm_scale(x_squares, b_B, batch, eps, INPUTS, TILES)
        for start in range(0, end, COLUMNS):
            place_C = start + column_C
            tile_RC = weight_block(weight_R, place_C, INPUTS, MASKED)
            x_BC = input_block(x_B, place_C, inside_B, INPUTS, MASKED)
            sum = add_block(sum, tile_RC, x_BC, ACTIVATION, TURNED, DEPENDENT)

    y_BR = sum if TURNED else tl.trans(sum)
    if SPLITS == 1:
        finish(
            y_BR, row_scale_B, scale, y, norm, u, squares, b_B, first, batch, rows, factor, ROWS, BATCH, UNITS, ADD
        )  # fmt: skip
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        place_BR = tl.arange(0, BATCH)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        part_at_BR = parts + tile * (SPLITS * BATCH * ROWS) + place_BR
        tl.store(part_at_BR + split * (BATCH * ROWS), y_BR, mask=inside_B[:, None])
        tl.debug_barrier()  # the count is of all threads' parts
        if tl.atomic_add(counter + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter + tile, 0)
            total_BR = tl.zeros([BATCH, ROWS], tl.float32)
            for i in tl.static_range(SPLITS):
                # Other programs wrote it: past the first cache, which may hold what was there before.
                part_BR = part_at_BR + i * (BATCH * ROWS)
                total_BR += tl.load(part_BR, mask=inside_B[:, None], other=0.0, cache_modifier=".cg")
            finish(
                total_BR, row_scale_B, scale, y, norm, u, squares, b_B, first, batch, rows, factor,
                ROWS, BATCH, UNITS, ADD,
            )  # fmt: skip


@triton.jit
def scan_step_kernel(
    raw, tables, beta, state, slot, z, eps, B: tl.constexpr, K: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
    MODES: tl.constexpr, VALUES: tl.constexpr, NEUTRAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token of the selective scan; program (channel, row). raw: fp32 [B, K (P + 3M)]."""
    before_tiles(DEPENDENT)
    scan_rows(
        raw, tables, beta, state, slot, z, tl.program_id(0), tl.program_id(1), eps, B, K, M, P, MODES, VALUES, 1,
        NEUTRAL, DEPENDENT,
    )  # fmt: skip


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


class Launch(NamedTuple):
    """How a product is launched."""

    rows: int
    """Weight rows that a program takes; all sizes are powers of two."""
    batch: int
    """Rows of the batch that it takes, 16 at least."""
    columns: int
    """Inputs that it takes at a time."""
    splits: int = 1
    """Programs that share a tile's inputs; any number."""
    warps: int = 4
    stages: int = 1
    """Of a program's loop over inputs."""
    held: bool = False
    """Whether a program loads all its weights before it waits for the kernel ahead; they lie in shared memory then."""
    turned: bool = False
    """Whether the batch is the product's first operand, and not the weights."""


def product_launch(
    rows: int, inputs: int, batch: int, itemsize: int, dtype: torch.dtype = torch.bfloat16, units: bool = False
) -> Launch | None:
    """How a product of `rows` weight rows, of `itemsize` bytes a weight, is best launched; None leaves it to cuBLAS.

    As measured on an H200 with 16-bit weights. Products of eight-bit weights are never cuBLAS's. With inputs in fp32,
    `dtype`, they are not matrix units' either. `units`: beside cuBLAS they would need one more kernel.
    """
    taken = min(_MOST_BATCH, max(16, triton.next_power_of_2(batch)))
    width = max(32, triton.next_power_of_2(inputs))
    if dtype == torch.float32:
        return Launch(16, min(taken, 32), min(64, width), stages=2)
    if batch > _FEW_ROWS and itemsize > 1:
        # Square tiles, if half of the multiprocessors at least have one, and there is room for all of them at once.
        once = triton.cdiv(rows, taken) >= _PROGRAMS // 2 and triton.cdiv(rows, _MOST_BATCH) <= _PROGRAMS
        if not units or not once or batch > _MOST_BATCH:
            return None
        return Launch(taken, taken, min(64, width), 1, taken // 16, 5 if taken == 64 else 4, turned=True)
    tiles = triton.cdiv(rows, _TILE_ROWS)
    columns = min(_HELD_COLUMNS, width)
    blocks = triton.cdiv(inputs, columns)
    programs = tiles * triton.cdiv(blocks, 2)
    if batch <= _FEW_ROWS and tiles < _PROGRAMS and blocks <= _MOST_SPLITS and programs <= 3 * _PROGRAMS:
        # All weights under way at once. A multiprocessor has room for two programs of two blocks of 64 rows, and for
        # three of one block of 128 where the batch's rows are few; otherwise cuBLAS is as fast, but for units.
        if programs > 2 * _PROGRAMS:
            if taken == 16:
                return Launch(2 * _TILE_ROWS, taken, columns, blocks, 8, held=True)
            if itemsize > 1 and not units:
                return None
        splits = blocks if programs < _PROGRAMS * 3 // 4 else triton.cdiv(blocks, 2)
        return Launch(_TILE_ROWS, taken, columns, splits, 4, held=True)
    columns = min(128, width)
    splits = max(1, min(_PROGRAMS // (tiles * triton.cdiv(batch, taken)), inputs // 512, _MOST_SPLITS))
    blocks = triton.cdiv(inputs, columns * splits)
    splits = triton.cdiv(inputs, columns * blocks)
    return Launch(_TILE_ROWS, taken, columns, splits, 4, 3 if splits == 1 else 6 if taken == 16 else 4)


def normed_product(
    x_BD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, y_BR: Tensor, scaled: Scaled | None = None
) -> None:
    """y = RMSNorm(x) W^T: the queries, keys and values of an attention layer, and the head's logits (fp32)."""
    _normed_product(x_BD, norm_D, eps, weight, y_BR, weight.input_dtype(y_BR), scaled)


def units(x_BD: Tensor, weights: FeedForwardWeights, eps: float, h_BN: Tensor, scaled: Scaled | None = None) -> None:
    """h = silu(gate) up of RMSNorm(x); between cuBLAS and SwiGLU gates and ups are rounded to h's dtype."""
    launch = _chosen(weights.gate_up, x_BD.shape[0], h_BN.dtype, units=True)
    if launch is not None:
        _launch_normed(x_BD, weights.norm_D, eps, weights.gate_up, h_BN, h_BN.dtype, scaled, launch, units=True)
        return
    batch, count = h_BN.shape
    gate_up_BR = torch.empty(batch, 2 * count, dtype=h_BN.dtype, device=h_BN.device)
    torch.mm(_normed(x_BD, weights.norm_D, eps, h_BN.dtype), weights.gate_up.values_RI.T, out=gate_up_BR)
    options = tuning.options("swiglu.forward", h_BN.device, statistics=0)
    blocks = triton.cdiv(batch, options["ROWS"] * options["STEPS"]) * triton.cdiv(count, options["UNITS"])
    align = math.gcd(16, count)
    swiglu_forward_kernel[(blocks,)](gate_up_BR, h_BN, None, batch, count // align, ALIGN=align, **options)


def add_product(
    h_BI: Tensor, weight: PackedWeight, scale: float, x_BD: Tensor, norm_D: Tensor | None = None
) -> Scaled | None:
    """x += scale h W^T; returned: the new x times norm_D, where it was our kernel that added."""
    launch = _chosen(weight, h_BI.shape[0], h_BI.dtype)
    if launch is not None:
        leaves = None
        if norm_D is not None:
            squares_TB = x_BD.new_empty(triton.cdiv(weight.rows, launch.rows), len(x_BD))
            leaves = Scaled(torch.empty_like(x_BD, dtype=h_BI.dtype), squares_TB)
        _launch_product(h_BI, weight, x_BD, launch, x_BD, add=scale, norm_D=norm_D, leaves=leaves)
        return leaves
    if h_BI.dtype == x_BD.dtype:
        x_BD.addmm_(h_BI, weight.values_RI.T, alpha=scale)
    else:
        torch.addmm(x_BD, h_BI, weight.values_RI.T, out_dtype=x_BD.dtype, alpha=scale, out=x_BD)
    return None


def spectral(
    x_BD: Tensor,
    weights: SpectralWeights,
    eps: float,
    state_SKM2P: Tensor,
    slot_B: Tensor,
    z_BR: Tensor,
    scaled: Scaled | None = None,
) -> None:
    """z [B, K P]: what the channels give for RMSNorm(x), their states moved on by one token."""
    raw_BR = torch.empty(x_BD.shape[0], weights.in_proj.rows, dtype=torch.float32, device=x_BD.device)
    _normed_product(x_BD, weights.norm_D, eps, weights.in_proj, raw_BR, z_BR.dtype, scaled)
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
    scan_step_kernel[(channels, batch)](
        raw_BR, weights.tables_KTM, weights.beta_K, state_SKM2P, slot_B, z_BR, eps,
        B=batch, K=channels, M=modes, P=width, MODES=padded_modes, VALUES=padded_width,
        NEUTRAL=weights.neutral_gates, **_launch(z_BR.device, 2),
    )  # fmt: skip


def advance(position_S: Tensor, slot_B: Tensor) -> None:
    """The live rows' sequences have taken in one token more."""
    batch = slot_B.shape[0]
    assert position_S.is_contiguous()
    assert slot_B.is_contiguous()
    grid = (triton.cdiv(batch, _ADVANCE),)
    advance_kernel[grid](position_S, slot_B, batch, BATCH=_ADVANCE, **_launch(slot_B.device, 4))


def _chosen(weight: PackedWeight, batch: int, dtype: torch.dtype, units: bool = False) -> Launch | None:
    """How the kernel here is launched for a product of inputs in `dtype`, or None where it is cuBLAS's."""
    if weight.values_RI.dtype == torch.float32:
        return None
    return product_launch(weight.rows, weight.inputs, batch, weight.values_RI.element_size(), dtype, units)


def _normed_product(
    x_BD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: PackedWeight,
    y_BR: Tensor,
    dtype: torch.dtype,
    scaled: Scaled | None,
) -> None:
    """y = RMSNorm(x) W^T; the product takes its inputs in `dtype`."""
    launch = _chosen(weight, x_BD.shape[0], dtype)
    if launch is not None:
        _launch_normed(x_BD, norm_D, eps, weight, y_BR, dtype, scaled, launch)
        return
    u_BD = _normed(x_BD, norm_D, eps, dtype)
    if dtype == y_BR.dtype:
        torch.mm(u_BD, weight.values_RI.T, out=y_BR)
    else:
        torch.mm(u_BD, weight.values_RI.T, out_dtype=y_BR.dtype, out=y_BR)


def _normed(x_BD: Tensor, norm_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    assert x_BD.is_contiguous()
    batch, columns = x_BD.shape
    u_BD = torch.empty(batch, columns, dtype=dtype, device=x_BD.device)
    width = triton.next_power_of_2(columns)
    launch = _launch(x_BD.device, 8 if width >= 2048 else 4)
    norm_kernel[(batch,)](x_BD, norm_D, u_BD, eps, D=columns, WIDTH=width, **launch)
    return u_BD


def _launch_normed(
    x_BD: Tensor,
    norm_D: Tensor,
    eps: float,
    weight: PackedWeight,
    y_BR: Tensor,
    dtype: torch.dtype,
    scaled: Scaled | None,
    launch: Launch,
    units: bool = False,
) -> None:
    """Our kernel's product of the normed stream: of what is left of it, or else normed now."""
    if scaled is not None and scaled.u_BD.dtype == dtype:
        _launch_product(scaled.u_BD, weight, y_BR, launch, x_BD, units, squares_TB=scaled.squares_TB, eps=eps)
    else:
        _launch_product(_normed(x_BD, norm_D, eps, dtype), weight, y_BR, launch, x_BD, units)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(x_BD: Tensor) -> Tensor:
    """Zero counters of the tiles of all products of a residual stream, which steps take one by one.

    Known by its address: two launches that shared them would be writing what the other reads.
    """
    device = x_BD.device
    key = (device, x_BD.untyped_storage().data_ptr())
    if key not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a decode step must have run once on its buffers before it is recorded as a CUDA graph")
        _counters[key] = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
    return _counters[key]


def _launch_product(
    x_BI: Tensor,
    weight: PackedWeight,
    y_BR: Tensor,
    launch: Launch,
    stream: Tensor,
    units: bool = False,
    *,
    squares_TB: Tensor | None = None,
    eps: float = 0.0,
    add: float | None = None,
    norm_D: Tensor | None = None,
    leaves: Scaled | None = None,
) -> None:
    """See `product_kernel`; where `streamed` is faster, it is that one.

    stream: the residual stream that is read or written, whose counters the launch takes.
    """
    assert all(tensor.is_contiguous() for tensor in (x_BI, weight.values_RI, y_BR))
    if add is None and streamed.worthwhile(x_BI, weight, units=units):
        streamed.product(x_BI, weight, y_BR, units=units, squares_TB=squares_TB, eps=eps)
        return
    batch = x_BI.shape[0]
    share = triton.cdiv(weight.inputs, launch.columns * launch.splits) * launch.columns
    assert share * (launch.splits - 1) < weight.inputs, f"{launch} leaves a program none of {weight.inputs} inputs"
    grid = (triton.cdiv(batch, launch.batch), triton.cdiv(weight.rows, launch.rows), launch.splits)
    parts = counter = None
    if launch.splits > 1:
        tiles = grid[0] * grid[1]
        assert tiles <= _MOST_TILES, f"{tiles} tiles of split products; there are counters for {_MOST_TILES}"
        size = tiles * launch.splits * launch.batch * launch.rows
        parts, counter = torch.empty(size, dtype=torch.float32, device=x_BI.device), _counter(stream)
    options = _launch(x_BI.device, launch.warps)
    if x_BI.is_cuda and tuning.pipelined(torch.cuda.get_device_capability(x_BI.device)):
        options["num_stages"] = launch.stages
    product_kernel[grid](
        x_BI, squares_TB, _stored(weight), weight.scale_R, y_BR, norm_D, *(leaves or (None, None)), parts, counter,
        batch, weight.rows, 1.0 if add is None else add, eps,
        INPUTS=weight.inputs, COLUMNS=launch.columns, ROWS=launch.rows, BATCH=launch.batch, SPLITS=launch.splits,
        TILES=0 if squares_TB is None else len(squares_TB), HELD=launch.held, TURNED=launch.turned,
        ACTIVATION=_ELEMENTS[x_BI.dtype], UNITS=units, ADD=add is not None,
        **options,
    )  # fmt: skip
