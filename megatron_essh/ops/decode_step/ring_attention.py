"""Attention of one token a row to the ring of its slot, as Triton kernels that are bound by reading the ring.

A program takes one head of one row and walks the ring's filled places in blocks. Every lane of a block keeps the
running maximum, sum and weighted values of its own places, so that lanes meet only once, at the end. Where rows and
heads are too few to fill a GPU, a head's blocks are dealt out over several programs, and a second kernel puts their
parts together.

The token's own key and value never come from the ring: the place that they go to is passed over, so that the program
that writes them disturbs nobody. Softmax and sums are fp32. An angle is reduced to half a turn in fp64 and rounded to
fp32 then: it is off by less than 5e-7 radians at positions up to a million.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_essh.ops.decode_step.vector import _launch, after_tiles, before_tiles
from megatron_essh.ops.decode_step.weights import AttentionWeights

_LOWEST = tl.constexpr(-1e30)
"""Stands for the maximum of no score: finite, so that differences of it are numbers."""
_LOG_TURN = tl.constexpr(math.log(2 * math.pi))
_TURN = tl.constexpr(2 * math.pi)
_PROGRAMS = 8 * 132
"""Programs worth having: eight for every multiprocessor of the largest GPU around."""
_BLOCK = 4096
"""Elements of keys, and of values, that a program takes at a time: 32 a thread."""


@triton.jit
def rotary_turn(position, column_E, E: tl.constexpr, LOG_BASE: tl.constexpr):
    """(cos, sin) of a position's rotary angles for the columns of a head, whose halves are the pairs' members."""
    pair_E = (column_E % (E // 2)).to(tl.float64)
    log_base_E = tl.full(column_E.shape, LOG_BASE, tl.float64)
    log_turn_E = tl.full(column_E.shape, _LOG_TURN, tl.float64)
    turns_E = position.to(tl.float64) * tl.exp(-(pair_E * 2 / E) * log_base_E - log_turn_E)
    turns_E -= tl.floor(turns_E + 0.5)
    angle_E = (turns_E * tl.full(column_E.shape, _TURN, tl.float64)).to(tl.float32)
    return tl.cos(angle_E), tl.sin(angle_E)


@triton.jit
def rotated(source, column_E, cos_E, sin_E, E: tl.constexpr):
    """A head's query or key, turned, fp32."""
    own_E = tl.load(source + column_E, mask=column_E < E, other=0.0).to(tl.float32)
    other_E = tl.load(source + (column_E + E // 2) % E, mask=column_E < E, other=0.0).to(tl.float32)
    return own_E * cos_E + tl.where(column_E < E // 2, -other_E, other_E) * sin_E


@triton.jit(do_not_specialize=("window",))
def attend_kernel(
    qkv, keys, values, position, slot, y, maxima, sums, window,
    H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    LOG_BASE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [B, H, E]; with several SPLITS unscaled parts [B, H, SPLITS, E] of it, with the maxima and sums they have.

    Scores are in units of ln 2.
    """
    before_tiles(DEPENDENT)
    head = tl.program_id(0) % H
    split = tl.program_id(1)
    column_E = tl.arange(0, WIDTH)
    inside_E = column_E < E
    lane_W = tl.arange(0, BLOCK)
    after_tiles(DEPENDENT)
    own_slot = tl.load(slot + tl.program_id(0) // H)
    live = own_slot >= 0
    now = tl.load(position + own_slot, mask=live, other=0)
    here = now % window
    filled = tl.minimum(now, window).to(tl.int32)
    ring = (tl.maximum(own_slot, 0).to(tl.int64) * H + head) * window * E

    source = qkv + tl.program_id(0).to(tl.int64) * (3 * E)
    cos_E, sin_E = rotary_turn(now, column_E, E, LOG_BASE)
    # Scores are of queries and keys as the ring would hold them.
    query_E = rotated(source, column_E, cos_E, sin_E, E).to(keys.dtype.element_ty).to(tl.float32)
    new_key_E = rotated(source + E, column_E, cos_E, sin_E, E).to(keys.dtype.element_ty)
    new_value_E = tl.load(source + 2 * E + column_E, mask=inside_E, other=0.0).to(values.dtype.element_ty)
    unit = 1.4426950408889634 / (E**0.5)

    maximum_W = tl.full([BLOCK], _LOWEST, tl.float32)
    sum_W = tl.zeros([BLOCK], tl.float32)
    part_WE = tl.zeros([BLOCK, WIDTH], tl.float32)
    for block in range(split, tl.cdiv(filled, BLOCK), SPLITS):
        place_W = block * BLOCK + lane_W
        seen_W = (place_W < filled) & (place_W != here)
        place_WE = ring + place_W[:, None] * E + column_E[None, :]
        mask_WE = seen_W[:, None] & inside_E[None, :]
        key_WE = tl.load(keys + place_WE, mask=mask_WE, other=0.0, eviction_policy="evict_first")
        value_WE = tl.load(values + place_WE, mask=mask_WE, other=0.0, eviction_policy="evict_first")
        score_W = tl.sum(key_WE.to(tl.float32) * query_E[None, :], axis=1) * unit
        higher_W = tl.maximum(maximum_W, tl.where(seen_W, score_W, _LOWEST))
        share_W = tl.where(seen_W, tl.exp2(score_W - higher_W), 0.0)
        kept_W = tl.exp2(maximum_W - higher_W)
        sum_W = sum_W * kept_W + share_W
        part_WE = part_WE * kept_W[:, None] + share_W[:, None] * value_WE.to(tl.float32)
        maximum_W = higher_W

    maximum = tl.max(maximum_W, axis=0)
    new_score = tl.sum(query_E * new_key_E.to(tl.float32), axis=0) * unit
    new_score = tl.where(split == 0, new_score, _LOWEST)
    maximum = tl.maximum(maximum, new_score)
    kept_W = tl.exp2(maximum_W - maximum)
    new_share = tl.where(split == 0, tl.exp2(new_score - maximum), 0.0)
    total = tl.sum(sum_W * kept_W, axis=0) + new_share
    part_E = tl.sum(part_WE * kept_W[:, None], axis=0) + new_share * new_value_E.to(tl.float32)
    if SPLITS == 1:
        part_E = part_E / total
    else:
        tl.store(maxima + tl.program_id(0) * SPLITS + split, maximum)
        tl.store(sums + tl.program_id(0) * SPLITS + split, total)
    place = (tl.program_id(0) * SPLITS + split).to(tl.int64) * E
    tl.store(y + place + column_E, part_E.to(y.dtype.element_ty), mask=inside_E)
    written_E = inside_E & live & (split == 0)
    tl.store(keys + ring + here * E + column_E, new_key_E, mask=written_E)
    tl.store(values + ring + here * E + column_E, new_value_E, mask=written_E)


@triton.jit
def join_kernel(
    parts, maxima, sums, y, E: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """y [B H, E] of the parts that `attend_kernel` leaves of each row's head; SPLITS is a power of two."""
    before_tiles(DEPENDENT)
    column_E = tl.arange(0, WIDTH)
    split_S = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    after_tiles(DEPENDENT)
    maximum_S = tl.load(maxima + split_S)
    kept_S = tl.exp2(maximum_S - tl.max(maximum_S, axis=0))
    total = tl.sum(tl.load(sums + split_S) * kept_S, axis=0)
    place_SE = split_S[:, None] * E + column_E[None, :]
    part_SE = tl.load(parts + place_SE, mask=(column_E < E)[None, :], other=0.0)
    y_E = tl.sum(part_SE * kept_S[:, None], axis=0) / total
    tl.store(y + tl.program_id(0).to(tl.int64) * E + column_E, y_E.to(y.dtype.element_ty), mask=column_E < E)


def block_places(width: int) -> int:
    """Ring places that a program takes at a time."""
    return max(16, _BLOCK // width)


def splits(heads: int, window: int, block: int) -> int:
    """Programs that share a head, a power of two, where all rows together have `heads` of them."""
    shares = min(max(1, _PROGRAMS // heads), max(1, window // block))
    return 1 << (shares.bit_length() - 1)


def attend(
    qkv_BR: Tensor,
    weights: AttentionWeights,
    rope_base: float,
    keys_SHWE: Tensor,
    values_SHWE: Tensor,
    position_S: Tensor,
    slot_B: Tensor,
    y_BR: Tensor,
) -> None:
    """y [B, H E]: attention of the token at its position to the window's keys, itself included, which it joins.

    What is computed for an idle row is its own value.
    """
    heads, window, head_dim = keys_SHWE.shape[1:]
    assert heads == weights.heads, f"rings of {heads} heads, queries of {weights.heads}"
    assert head_dim % 2 == 0, f"head_dim {head_dim} has no halves"
    assert all(tensor.is_contiguous() for tensor in (qkv_BR, keys_SHWE, values_SHWE, position_S, slot_B, y_BR))
    total = qkv_BR.shape[0] * heads
    width = triton.next_power_of_2(head_dim)
    block = block_places(width)
    count = splits(total, window, block)
    sizes = {"E": head_dim, "WIDTH": width, "SPLITS": count}
    maxima = sums = None
    part = y_BR
    if count > 1:
        part = torch.empty(total, count, head_dim, dtype=torch.float32, device=y_BR.device)
        maxima, sums = torch.empty(2, total, count, dtype=torch.float32, device=y_BR.device)
    attend_kernel[(total, count)](
        qkv_BR, keys_SHWE, values_SHWE, position_S, slot_B, part, maxima, sums, window,
        H=heads, BLOCK=block, LOG_BASE=math.log(rope_base), **sizes, **_launch(y_BR.device, 4),
    )  # fmt: skip
    if count > 1:
        join_kernel[(total,)](part, maxima, sums, y_BR, **sizes, **_launch(y_BR.device, 2))
