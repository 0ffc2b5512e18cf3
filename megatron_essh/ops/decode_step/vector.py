"""The stages of a decode step for few rows, as Triton kernels that are bound by reading the weights.

A program takes a tile of whole weight rows into its registers, once for all B rows, and multiplies and sums on the
CUDA cores. Nothing in a tile depends on what ran before: on devices that can (compute capability 9 and up) a kernel is
started while the one before it still runs (programmatic dependent launch), loads its tile, and only then waits.
So every kernel here waits before it touches anything else, and no weight or table may be written between launches
without a kernel of another kind, which waits by itself, in between.

`spectral` is one kernel too: the program that is the last of its channel to have its products does the channel's scan
step. Programs count themselves in on a counter that the last one sets to 0 again.

Sizes of the model and B are known to the compiler. All sums are fp32, in the same order every time.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_essh.ops.decode_step.state import Scaled
from megatron_essh.ops.decode_step.weights import TABLES, FeedForwardWeights, PackedWeight, SpectralWeights
from megatron_essh.ops.selective_scan.triton_forward import sigmoid, softplus

MOST_ROWS = 2
"""The largest batch that the kernels take. They are made for one row; each further row costs its sums again."""

_ELEMENTS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_TABLES = tl.constexpr(len(TABLES))


# -- parts -----------------------------------------------------------------------------------------------------------


@triton.jit
def weight_tile(values, row_R, column_C, INPUTS: tl.constexpr):
    """Rows row_R of values [., INPUTS], as they are stored; 0 beyond. Read once: they leave the cache first."""
    at_RC = values + row_R.to(tl.int64)[:, None] * INPUTS + column_C[None, :]
    return tl.load(at_RC, mask=(column_C < INPUTS)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def as_fp32(tile, DEPENDENT: tl.constexpr):
    """Stored weights as fp32: of int8 by its bits, which takes half as long as a conversion; uint8 holds e4m3."""
    if tile.dtype == tl.int8:  # 2^23 + 128 + the value, less what is too much
        bits = tile.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080
        weight = bits.to(tl.float32, bitcast=True) - 8388736.0
    elif tile.dtype == tl.uint8:
        if DEPENDENT:  # devices from compute capability 9 on convert by themselves
            weight = tile.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:  # exponent and mantissa in their fp32 places, the exponent too small by 120
            byte = tile.to(tl.int32)
            bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
            weight = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        weight = tile.to(tl.float32)
    return weight


@triton.jit
def normed_row(x, norm_C, column_C, eps, D: tl.constexpr, ACTIVATION: tl.constexpr):
    """A row's RMSNorm as it enters the product: rounded to ACTIVATION, as fp32."""
    x_C = tl.load(x + column_C, mask=column_C < D, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x_C * x_C, axis=0) / D + eps)
    return (x_C * scale * norm_C).to(ACTIVATION).to(tl.float32)


@triton.jit
def before_tiles(DEPENDENT: tl.constexpr):
    """The next kernel may start as soon as all programs of this one have: it waits for their end by itself."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_tiles(DEPENDENT: tl.constexpr):
    """From here on all that earlier kernels wrote is there."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def embed_kernel(embedding, token, x, D: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    """x [B, D] = rows of the embedding; program (b, block of WIDTH columns)."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside_C = column_C < D
    after_tiles(DEPENDENT)
    before_tiles(DEPENDENT)  # in this order: nothing of a step starts before all of the step before it has ended
    place = tl.load(token + row).to(tl.int64) * D
    tl.store(x + row * D + column_C, tl.load(embedding + place + column_C, mask=inside_C).to(tl.float32), mask=inside_C)


@triton.jit(do_not_specialize=("rows",))
def normed_product_kernel(
    x, norm, values, scale, y, rows, eps,
    B: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
    UNITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [B, rows] = RMSNorm(x) W^T, ROWS of its columns a program; with UNITS silu(gate) up of them, [B, rows / 2]."""
    before_tiles(DEPENDENT)
    first = tl.program_id(0) * ROWS
    row_R = first + tl.arange(0, ROWS)
    column_C = tl.arange(0, WIDTH)
    tile_RC = weight_tile(values, tl.minimum(row_R, rows - 1), column_C, D)
    norm_C = tl.load(norm + column_C, mask=column_C < D, other=0.0)
    if scale is not None:
        scale_R = tl.load(scale + row_R, mask=row_R < rows, other=0.0)
    after_tiles(DEPENDENT)
    for b in tl.static_range(B):
        x_C = normed_row(x + b * D, norm_C, column_C, eps, D, ACTIVATION)
        y_R = tl.sum(as_fp32(tile_RC, DEPENDENT) * x_C[None, :], axis=1)
        if scale is not None:
            y_R *= scale_R
        if UNITS:
            gate_N, up_N = tl.split(y_R.reshape(ROWS // 2, 2))
            unit_N = first // 2 + tl.arange(0, ROWS // 2)
            h_N = gate_N * sigmoid(gate_N) * up_N
            tl.store(y + b * (rows // 2) + unit_N, h_N.to(y.dtype.element_ty), mask=unit_N < rows // 2)
        else:
            tl.store(y + b * rows + row_R, y_R.to(y.dtype.element_ty), mask=row_R < rows)


@triton.jit(do_not_specialize=("rows",))
def add_product_kernel(
    h, values, scale, x, rows, factor,
    B: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [B, rows] += factor h W^T, ROWS of its columns a program, the inputs in blocks of WIDTH."""
    before_tiles(DEPENDENT)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, WIDTH)
    tiles = ()
    for start in tl.static_range(0, INPUTS, WIDTH):
        tiles += (weight_tile(values, tl.minimum(row_R, rows - 1), start + column_C, INPUTS),)  # type: ignore[assignment]
    if scale is not None:
        scale_R = tl.load(scale + row_R, mask=row_R < rows, other=0.0)
    after_tiles(DEPENDENT)
    for b in tl.static_range(B):
        x_R = tl.load(x + b * rows + row_R, mask=row_R < rows, other=0.0)
        sum_RC = tl.zeros([ROWS, WIDTH], tl.float32)
        for i in tl.static_range((INPUTS + WIDTH - 1) // WIDTH):
            place_C = i * WIDTH + column_C
            h_C = tl.load(h + b * INPUTS + place_C, mask=place_C < INPUTS, other=0.0).to(tl.float32)
            sum_RC += as_fp32(tiles[i], DEPENDENT) * h_C[None, :]
        y_R = tl.sum(sum_RC, axis=1)
        if scale is not None:
            y_R *= scale_R
        tl.store(x + b * rows + row_R, x_R + factor * y_R, mask=row_R < rows)


@triton.jit
def scan_rows(
    raw, tables, beta, state, slot, z, channel, first, eps, B: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    P: tl.constexpr, MODES: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, NEUTRAL: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """One token of the selective scan of a channel, for STEP rows from the first on; raw [B, K (P + 3M)].

    DEPENDENT: nothing has waited yet for the kernels ahead of this one; states are asked for before.
    """
    row_B = first + tl.arange(0, STEP)
    mode_M = tl.arange(0, MODES)
    place_P = tl.arange(0, WIDTH)
    slot_B = tl.load(slot + row_B, mask=row_B < B, other=-1)
    inside_MP = (mode_M < M)[:, None] & (place_P < P)[None, :]
    own_B = tl.maximum(slot_B, 0).to(tl.int64) * K + channel
    state_BMP = state + own_B[:, None, None] * (M * 2 * P) + (mode_M[:, None] * (2 * P) + place_P[None, :])[None, :, :]
    live_BMP = (slot_B >= 0)[:, None, None] & inside_MP[None, :, :]
    first_BMP = tl.load(state_BMP, mask=live_BMP, other=0.0)
    second_BMP = tl.load(state_BMP + P, mask=live_BMP, other=0.0)
    # A layer's states were written a step ago at the latest, slots by a copy ahead of the step, and a step begins with
    # a kernel that lets no other start before all of the step before has ended.
    after_tiles(DEPENDENT)

    # Other programs wrote these: past the first cache, which may hold what was there before.
    raw_B = raw + row_B * (K * (P + 3 * M)) + channel * (P + 3 * M)
    inside_BP = (row_B < B)[:, None] & (place_P < P)[None, :]
    inside_BM = (row_B < B)[:, None] & (mode_M < M)[None, :]
    raw_BP = tl.load(raw_B[:, None] + place_P[None, :], mask=inside_BP, other=0.0, cache_modifier=".cg")
    gates_BM = raw_B[:, None] + P + mode_M[None, :]
    clock_BM = tl.load(gates_BM + 2 * M, mask=inside_BM, other=0.0, cache_modifier=".cg")

    table_M = tables + channel * (_TABLES * M) + mode_M
    clock_bias_M = tl.load(table_M + 2 * M, mask=mode_M < M, other=0.0)
    gamma_M = tl.load(table_M + 3 * M, mask=mode_M < M, other=0.0)
    cos_M = tl.load(table_M + 4 * M, mask=mode_M < M, other=0.0)
    sin_M = tl.load(table_M + 5 * M, mask=mode_M < M, other=0.0)
    kc_M = tl.load(table_M + 6 * M, mask=mode_M < M, other=0.0)
    ks_M = tl.load(table_M + 7 * M, mask=mode_M < M, other=0.0)
    zero_lag_M = tl.load(table_M + 8 * M, mask=mode_M < M, other=0.0)
    blend = tl.load(beta + channel)
    if NEUTRAL:
        write_BM = tl.full([STEP, MODES], 1.0, tl.float32)
        read_BM = tl.full([STEP, MODES], 1.0, tl.float32)
    else:
        write_BM = tl.load(gates_BM, mask=inside_BM, other=0.0, cache_modifier=".cg")
        write_BM = 2.0 * sigmoid(write_BM + tl.load(table_M, mask=mode_M < M, other=0.0)[None, :])
        read_BM = tl.load(gates_BM + M, mask=inside_BM, other=0.0, cache_modifier=".cg")
        read_BM = 2.0 * sigmoid(read_BM + tl.load(table_M + M, mask=mode_M < M, other=0.0)[None, :])

    scale_B = 1.0 / tl.sqrt(tl.sum(raw_BP * raw_BP, axis=1) / P + eps)
    value_BP = raw_BP * (1.0 - blend + blend * scale_B)[:, None]
    keep_BM = tl.exp(-(gamma_M[None, :] + softplus(clock_BM + clock_bias_M[None, :])))
    along_BMP = (keep_BM * cos_M[None, :])[:, :, None]
    across_BMP = (keep_BM * sin_M[None, :])[:, :, None]
    turned_BMP = along_BMP * first_BMP - across_BMP * second_BMP + write_BM[:, :, None] * value_BP[:, None, :]
    second_BMP = across_BMP * first_BMP + along_BMP * second_BMP
    tl.store(state_BMP, turned_BMP, mask=live_BMP)
    tl.store(state_BMP + P, second_BMP, mask=live_BMP)
    readout_BMP = (read_BM * kc_M[None, :])[:, :, None] * turned_BMP - (read_BM * ks_M[None, :])[
        :, :, None
    ] * second_BMP
    lag_B = tl.sum(zero_lag_M[None, :] * read_BM * write_BM, axis=1)
    z_BP = tl.sum(readout_BMP, axis=1) - lag_B[:, None] * value_BP
    z_at_BP = z + row_B[:, None] * (K * P) + channel * P + place_P[None, :]
    tl.store(z_at_BP, z_BP.to(z.dtype.element_ty), mask=inside_BP)


@triton.jit
def spectral_kernel(
    x, norm, values, scale, tables, beta, state, slot, raw, counter, z, eps,
    B: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr,
    K: tl.constexpr, M: tl.constexpr, P: tl.constexpr, MODES: tl.constexpr, VALUES: tl.constexpr,
    STEP: tl.constexpr, NEUTRAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """raw [B, K X] = RMSNorm(x) W^T, ROWS rows of a channel a program; the last of a channel: its scan step.

    counter: int32 [K], zero before and after.
    """
    X: tl.constexpr = P + 3 * M
    TILES: tl.constexpr = (X + ROWS - 1) // ROWS
    before_tiles(DEPENDENT)
    channel = tl.program_id(0) // TILES
    row_R = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < X
    row_R = channel * X + tl.minimum(row_R, X - 1)
    column_C = tl.arange(0, WIDTH)
    tile_RC = weight_tile(values, row_R, column_C, D)
    norm_C = tl.load(norm + column_C, mask=column_C < D, other=0.0)
    if scale is not None:
        scale_R = tl.load(scale + row_R)
    after_tiles(DEPENDENT)
    for b in tl.static_range(B):
        x_C = normed_row(x + b * D, norm_C, column_C, eps, D, ACTIVATION)
        raw_R = tl.sum(as_fp32(tile_RC, DEPENDENT) * x_C[None, :], axis=1)
        if scale is not None:
            raw_R *= scale_R
        tl.store(raw + b * (K * X) + row_R, raw_R, mask=inside_R)
    tl.debug_barrier()  # the count is of all threads' products
    if tl.atomic_add(counter + channel, 1, sem="acq_rel", scope="gpu") == TILES - 1:
        tl.store(counter + channel, 0)
        for first in tl.static_range(0, B, STEP):
            scan_rows(raw, tables, beta, state, slot, z, channel, first, eps, B, K, M, P, MODES, VALUES, STEP, NEUTRAL)


# -- launches --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """What a program takes, and the warps it has."""

    rows: int
    width: int
    """Inputs that it takes at a time, a power of two."""
    warps: int


_PROGRAMS = 2 * 132
"""Fewest programs worth having: two for every multiprocessor of the largest GPU around."""
_TILE_BYTES = 32 * 1024
"""Of a tile, where there is a choice: four such programs of 4 warps fit a multiprocessor and are 128 KiB under way."""
_WARP_BYTES = 8 * 1024
"""Of a tile that a warp holds: 64 registers a thread. More warps would do the same reductions over fewer weights."""
_MOST_TILE_ROWS = 16


def whole_rows(rows: int, inputs: int, itemsize: int, least: int = 1) -> Tile:
    """Tiles of whole rows, for a product whose inputs a program must see at once: it normalises them."""
    width = max(32, triton.next_power_of_2(inputs))
    count = _tile_rows(rows, width * itemsize, least)
    return Tile(count, width, _warps(count * width * itemsize))


def blocks_of_rows(rows: int, inputs: int, itemsize: int) -> Tile:
    """Tiles of rows in blocks of inputs: 16 bytes a thread of each row, so that little lies beyond the last input."""
    count = _tile_rows(rows, inputs * itemsize, 1)
    warps = _warps(count * inputs * itemsize)
    width = min(max(32, triton.next_power_of_2(inputs)), 32 * warps * 16 // itemsize)
    return Tile(count, width, warps)


def _tile_rows(rows: int, row_bytes: int, least: int) -> int:
    count = _MOST_TILE_ROWS
    while count > least and (rows < count * _PROGRAMS or count * row_bytes > _TILE_BYTES):
        count //= 2
    return count


def _warps(tile_bytes: int) -> int:
    if tile_bytes <= _WARP_BYTES // 2:
        return 1
    return min(16, max(2, triton.next_power_of_2(triton.cdiv(tile_bytes, _WARP_BYTES))))


@cache
def _dependent(device: torch.device) -> bool:
    """Whether kernels on a device may start before those ahead of them have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _launch(device: torch.device, warps: int) -> dict[str, Any]:
    dependent = _dependent(device)
    options: dict[str, Any] = {"DEPENDENT": dependent, "num_warps": warps, "num_stages": 1}
    return {**options, "launch_pdl": True} if dependent else options


def _stored(weight: PackedWeight) -> Tensor:
    """The values as kernels take them: e4m3 by its bits."""
    values_RI = weight.values_RI
    return values_RI.view(torch.uint8) if values_RI.dtype == torch.float8_e4m3fn else values_RI


def _check(weight: PackedWeight, *others: Tensor) -> None:
    """Kernels count on what packed weights and step buffers are: contiguous."""
    assert weight.values_RI.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in others)


def embed(embedding_VD: Tensor, token_B: Tensor, x_BD: Tensor) -> None:
    """x = the tokens' rows."""
    rows, columns = x_BD.shape
    assert embedding_VD.is_contiguous()
    assert x_BD.is_contiguous()
    width = min(1024, triton.next_power_of_2(columns))
    grid = (rows, triton.cdiv(columns, width))
    embed_kernel[grid](embedding_VD, token_B, x_BD, D=columns, WIDTH=width, **_launch(x_BD.device, 4))


def normed_product(
    x_BD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, y_BR: Tensor, scaled: Scaled | None = None
) -> None:
    """y = RMSNorm(x) W^T: the queries, keys and values of an attention layer, and the head's logits (fp32)."""
    _normed_product(x_BD, norm_D, eps, weight, y_BR, _ELEMENTS[weight.input_dtype(y_BR)], units=False)


def units(x_BD: Tensor, weights: FeedForwardWeights, eps: float, h_BN: Tensor, scaled: Scaled | None = None) -> None:
    """h = silu(gate) up of RMSNorm(x)."""
    _normed_product(x_BD, weights.norm_D, eps, weights.gate_up, h_BN, _ELEMENTS[h_BN.dtype], units=True)


def _normed_product(
    x_BD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, y: Tensor, activation: Any, units: bool
) -> None:
    _check(weight, x_BD, y)
    tile = whole_rows(weight.rows, weight.inputs, weight.values_RI.element_size(), least=2 if units else 1)
    normed_product_kernel[(triton.cdiv(weight.rows, tile.rows),)](
        x_BD, norm_D, _stored(weight), weight.scale_R, y, weight.rows, eps,
        B=x_BD.shape[0], D=weight.inputs, WIDTH=tile.width, ROWS=tile.rows, ACTIVATION=activation, UNITS=units,
        **_launch(x_BD.device, tile.warps),
    )  # fmt: skip


def add_product(
    h_BI: Tensor, weight: PackedWeight, scale: float, x_BD: Tensor, norm_D: Tensor | None = None
) -> Scaled | None:
    """x += scale h W^T."""
    _check(weight, h_BI, x_BD)
    tile = blocks_of_rows(weight.rows, weight.inputs, weight.values_RI.element_size())
    add_product_kernel[(triton.cdiv(weight.rows, tile.rows),)](
        h_BI, _stored(weight), weight.scale_R, x_BD, weight.rows, scale,
        B=x_BD.shape[0], INPUTS=weight.inputs, WIDTH=tile.width, ROWS=tile.rows, **_launch(x_BD.device, tile.warps),
    )  # fmt: skip
    return None


_workspaces: dict[tuple[torch.device, int, int, int], tuple[Tensor, Tensor]] = {}


def _workspace(state_SKM2P: Tensor, channels: int, columns: int) -> tuple[Tensor, Tensor]:
    """raw fp32 [MOST_ROWS, K X] and the zero counters [K] of all layers of a state, which steps take one by one.

    Known by the state's address: two launches that shared them would be writing the same state at the same time.
    """
    device = state_SKM2P.device
    key = (device, state_SKM2P.untyped_storage().data_ptr(), channels, columns)
    if key not in _workspaces:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a decode step must have run once on its state before it is recorded as a CUDA graph")
        _workspaces[key] = (
            torch.empty(MOST_ROWS, channels * columns, dtype=torch.float32, device=device),
            torch.zeros(channels, dtype=torch.int32, device=device),
        )
    return _workspaces[key]


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
    weight = weights.in_proj
    _check(weight, x_BD, state_SKM2P, z_BR, weights.tables_KTM)
    batch = x_BD.shape[0]
    assert batch <= MOST_ROWS, f"{batch} rows; the workspace holds {MOST_ROWS}"
    channels, _, modes = weights.tables_KTM.shape
    width = state_SKM2P.shape[-1]
    columns = width + 3 * modes
    raw_BR, counter_K = _workspace(state_SKM2P, channels, columns)
    tile = whole_rows(weight.rows, weight.inputs, weight.values_RI.element_size())
    padded_modes, padded_width = triton.next_power_of_2(modes), triton.next_power_of_2(width)
    # Rows of the batch that one pass of the scan step takes: their states lie in registers.
    step = max(1, min(triton.next_power_of_2(batch), 2048 // (padded_modes * padded_width)))
    spectral_kernel[(channels * triton.cdiv(columns, tile.rows),)](
        x_BD, weights.norm_D, _stored(weight), weight.scale_R, weights.tables_KTM, weights.beta_K, state_SKM2P, slot_B,
        raw_BR, counter_K, z_BR, eps,
        B=batch, D=weight.inputs, WIDTH=tile.width, ROWS=tile.rows, ACTIVATION=_ELEMENTS[z_BR.dtype],
        K=channels, M=modes, P=width, MODES=padded_modes, VALUES=padded_width, STEP=step,
        NEUTRAL=weights.neutral_gates, **_launch(x_BD.device, tile.warps),
    )  # fmt: skip
