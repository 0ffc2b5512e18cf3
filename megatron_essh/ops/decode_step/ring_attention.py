"""Attention of one token a row to the ring of its slot, as a Triton kernel that is bound by reading the ring.

A program takes one head of one row and walks the ring's filled places in blocks; while it works on one block the next
is on its way. Every lane of a block keeps the running maximum, sum and weighted values of its own places, so that lanes
meet only once, at the end. Where rows and heads are too few to fill a GPU evenly, a head's blocks are dealt out over
several programs, and the last of them to be done puts their parts together. Programs count themselves in on a counter
that the last one sets to 0 again.

The token's own key and value never come from the ring: the place that they go to is passed over, so that the program
that writes them disturbs nobody. Softmax and sums are fp32. An angle is reduced to half a turn in fp64 and rounded to
fp32 then: it is off by less than 5e-7 radians at positions up to a million.

Positions, slots and, where it comes to registers, the first block are asked for before the kernels ahead of this one
have ended. They were written a step ago at the latest: the ring's filled places by this kernel in earlier steps,
positions by `advance`; slots and the rings of new sequences by copies and kernels of another kind, which wait by
themselves. So it is safe as long as a step begins with a kernel that lets no other start before all of the step before
has ended, as `embed` does.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels are Triton's language: their arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math
from functools import cache
from typing import Any

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
_PROGRAMS = 32 * 132
"""Programs worth having: some eight rounds of them on every multiprocessor of the largest GPU around."""
_FEW_HEADS = 132
"""Up to so many, a program has few blocks, and what counts is when the first one comes."""
_WARP_BLOCK = 1024
"""Elements of keys, and of values, that a warp takes at a time: 32 a thread."""


@triton.jit
def rotary_rate(column_E, E: tl.constexpr, LOG_BASE: tl.constexpr):
    """Turns a token, fp64, of the rotary angles for the columns of a head, whose halves are the pairs' members."""
    pair_E = (column_E % (E // 2)).to(tl.float64)
    log_base_E = tl.full(column_E.shape, LOG_BASE, tl.float64)
    log_turn_E = tl.full(column_E.shape, _LOG_TURN, tl.float64)
    return tl.exp(-(pair_E * 2 / E) * log_base_E - log_turn_E)


@triton.jit
def rotary_turn(position, rate_E):
    """(cos, sin) of a position's rotary angles."""
    turns_E = position.to(tl.float64) * rate_E
    turns_E -= tl.floor(turns_E + 0.5)
    angle_E = (turns_E * tl.full(rate_E.shape, _TURN, tl.float64)).to(tl.float32)
    return tl.cos(angle_E), tl.sin(angle_E)


@triton.jit
def rotated(source, column_E, cos_E, sin_E, E: tl.constexpr):
    """A head's query or key, turned, fp32."""
    own_E = tl.load(source + column_E, mask=column_E < E, other=0.0).to(tl.float32)
    other_E = tl.load(source + (column_E + E // 2) % E, mask=column_E < E, other=0.0).to(tl.float32)
    return own_E * cos_E + tl.where(column_E < E // 2, -other_E, other_E) * sin_E


@triton.jit
def seen_places(block, filled, here, BLOCK: tl.constexpr):
    """A block's places, and which of them hold a token before this one."""
    place_W = block * BLOCK + tl.arange(0, BLOCK)
    return place_W, (place_W < filled) & (place_W != here)


@triton.jit
def ring_block(
    ring, block, filled, here, column_E, E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[BLOCK, WIDTH] of a head's ring. For a place that is not seen another one is read, so that no load has a mask."""
    place_W, seen_W = seen_places(block, filled, here, BLOCK)
    another = tl.where(here == 0, tl.maximum(filled - 1, 0), 0)
    at_WE = ring + (tl.where(seen_W, place_W, another)[:, None] * E + column_E[None, :])
    if WIDTH == E:
        block_WE = tl.load(at_WE, eviction_policy="evict_first")
    else:
        block_WE = tl.load(at_WE, mask=(column_E < E)[None, :], other=0.0, eviction_policy="evict_first")
    return block_WE


@triton.jit
def taken_in(key_WE, value_WE, seen_W, query_E, maximum_W, sum_W, part_WE):
    """(maximum, sum, part) of every lane after one more block."""
    score_W = tl.where(seen_W, tl.sum(key_WE.to(tl.float32) * query_E[None, :], axis=1), _LOWEST)
    higher_W = tl.maximum(maximum_W, score_W)
    share_W = tl.where(seen_W, tl.exp2(score_W - higher_W), 0.0)
    kept_W = tl.exp2(maximum_W - higher_W)
    part_WE = part_WE * kept_W[:, None] + share_W[:, None] * value_WE.to(tl.float32)
    return higher_W, sum_W * kept_W + share_W, part_WE


@triton.jit
def attend_kernel(
    qkv, keys, values, position, slot, y, parts, maxima, sums, counter,
    H: tl.constexpr, WINDOW: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, LOG_BASE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y [B, H, E]; program (row and head, share of the blocks).

    With several SPLITS, a power of two: unscaled parts [B H, SPLITS, E] of y, the maxima and sums [B H, SPLITS] that
    they have, and counter, int32 [B H], zero before and after. STAGES: 1 takes the next block to registers while one
    is worked on, more take STAGES - 1 to shared memory. Scores are in units of ln 2.
    """
    before_tiles(DEPENDENT)
    row = tl.program_id(0)
    head = row % H
    split = tl.program_id(1)
    column_E = tl.arange(0, WIDTH)
    inside_E = column_E < E
    rate_E = rotary_rate(column_E, E, LOG_BASE)
    own_slot = tl.load(slot + row // H)
    live = own_slot >= 0
    now = tl.load(position + own_slot, mask=live, other=0)
    here = (now % WINDOW).to(tl.int32)
    filled = tl.minimum(now, WINDOW).to(tl.int32)
    ring = (tl.maximum(own_slot, 0).to(tl.int64) * H + head) * (WINDOW * E)
    if STAGES == 1:
        key_WE = ring_block(keys + ring, split, filled, here, column_E, E, WIDTH, BLOCK)
        value_WE = ring_block(values + ring, split, filled, here, column_E, E, WIDTH, BLOCK)
    cos_E, sin_E = rotary_turn(now, rate_E)
    after_tiles(DEPENDENT)

    source = qkv + row.to(tl.int64) * (3 * E)
    # Scores are of queries and keys as the ring would hold them.
    query_E = rotated(source, column_E, cos_E, sin_E, E).to(keys.dtype.element_ty).to(tl.float32)
    query_E *= 1.4426950408889634 / (E**0.5)
    new_key_E = rotated(source + E, column_E, cos_E, sin_E, E).to(keys.dtype.element_ty)
    new_value_E = tl.load(source + 2 * E + column_E, mask=inside_E, other=0.0).to(values.dtype.element_ty)

    maximum_W = tl.full([BLOCK], _LOWEST, tl.float32)
    sum_W = tl.zeros([BLOCK], tl.float32)
    part_WE = tl.zeros([BLOCK, WIDTH], tl.float32)
    blocks = tl.cdiv(filled, BLOCK)
    if STAGES == 1:
        for block in range(split, blocks, SPLITS):
            next_key_WE = ring_block(keys + ring, block + SPLITS, filled, here, column_E, E, WIDTH, BLOCK)
            next_value_WE = ring_block(values + ring, block + SPLITS, filled, here, column_E, E, WIDTH, BLOCK)
            _, seen_W = seen_places(block, filled, here, BLOCK)
            maximum_W, sum_W, part_WE = taken_in(key_WE, value_WE, seen_W, query_E, maximum_W, sum_W, part_WE)
            key_WE = next_key_WE
            value_WE = next_value_WE
    else:
        for block in tl.range(split, blocks, SPLITS, num_stages=STAGES):
            key_WE = ring_block(keys + ring, block, filled, here, column_E, E, WIDTH, BLOCK)
            value_WE = ring_block(values + ring, block, filled, here, column_E, E, WIDTH, BLOCK)
            _, seen_W = seen_places(block, filled, here, BLOCK)
            maximum_W, sum_W, part_WE = taken_in(key_WE, value_WE, seen_W, query_E, maximum_W, sum_W, part_WE)

    maximum = tl.max(maximum_W, axis=0)
    new_score = tl.sum(query_E * new_key_E.to(tl.float32), axis=0)
    new_score = tl.where(split == 0, new_score, _LOWEST)
    maximum = tl.maximum(maximum, new_score)
    kept_W = tl.exp2(maximum_W - maximum)
    new_share = tl.where(split == 0, tl.exp2(new_score - maximum), 0.0)
    total = tl.sum(sum_W * kept_W, axis=0) + new_share
    part_E = tl.sum(part_WE * kept_W[:, None], axis=0) + new_share * new_value_E.to(tl.float32)
    written_E = inside_E & live & (split == 0)
    tl.store(keys + ring + here * E + column_E, new_key_E, mask=written_E)
    tl.store(values + ring + here * E + column_E, new_value_E, mask=written_E)
    y_E = y + row.to(tl.int64) * E + column_E
    if SPLITS == 1:
        tl.store(y_E, (part_E / total).to(y.dtype.element_ty), mask=inside_E)
    else:
        share = row * SPLITS + split
        tl.store(maxima + share, maximum)
        tl.store(sums + share, total)
        tl.store(parts + share.to(tl.int64) * E + column_E, part_E, mask=inside_E)
        tl.debug_barrier()  # the count is of all threads' parts
        if tl.atomic_add(counter + row, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter + row, 0)
            tl.store(y_E, joined(parts, maxima, sums, row, column_E, E, SPLITS).to(y.dtype.element_ty), mask=inside_E)


@triton.jit
def joined(parts, maxima, sums, row, column_E, E: tl.constexpr, SPLITS: tl.constexpr):
    """A head's result of its parts. Other programs wrote them: past the first cache, which holds what was there."""
    share_S = row * SPLITS + tl.arange(0, SPLITS)
    at_SE = parts + share_S.to(tl.int64)[:, None] * E + column_E[None, :]
    part_SE = tl.load(at_SE, mask=(column_E < E)[None, :], other=0.0, cache_modifier=".cg")
    maximum_S = tl.load(maxima + share_S, cache_modifier=".cg")
    kept_S = tl.exp2(maximum_S - tl.max(maximum_S, axis=0))
    total = tl.sum(tl.load(sums + share_S, cache_modifier=".cg") * kept_S, axis=0)
    return tl.sum(part_SE * kept_S[:, None], axis=0) / total


def options(heads: int, window: int, width: int, device: torch.device) -> dict[str, Any]:
    """How the kernel is launched where all rows together have `heads` heads, padded to `width`.

    Heads that are dealt out go to programs of at least two blocks. Blocks come by way of shared memory on compute
    capability 9 alone: on 10 and 12 Triton's pipelines have given wrong results. As measured on an H200.
    """
    block = max(16, 2 * _WARP_BLOCK // width)
    shares = max(1, min(_PROGRAMS // heads, window // (2 * block)))
    few, whole = heads <= _FEW_HEADS, shares == 1
    chosen = {
        "BLOCK": max(16, 4 * _WARP_BLOCK // width) if whole else block,
        "SPLITS": 1 << (shares.bit_length() - 1),
        "STAGES": 1 if few or _capability(device) != 9 else 3 if whole else 4,
        "num_warps": 4 if whole else 2,
    }
    # By itself a program of few heads takes a few registers too many for eight on a multiprocessor.
    return chosen | {"maxnreg": 128} if few and not whole else chosen


@cache
def _capability(device: torch.device) -> int:
    """The major compute capability of a device; 0 of none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


_counters: dict[tuple[torch.device, int, int], Tensor] = {}


def _counter(keys_SHWE: Tensor, heads: int) -> Tensor:
    """Zero counters of `heads` heads, for all layers of a state, which steps take one by one.

    Known by the state's address: two launches that shared them would be writing the same rings at the same time.
    """
    device = keys_SHWE.device
    key = (device, keys_SHWE.untyped_storage().data_ptr(), heads)
    if key not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a decode step must have run once on its state before it is recorded as a CUDA graph")
        _counters[key] = torch.zeros(heads, dtype=torch.int32, device=device)
    return _counters[key]


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
    chosen = options(total, window, width, y_BR.device)
    splits = chosen["SPLITS"]
    parts = maxima = sums = counter = None
    if splits > 1:
        parts = torch.empty(total, splits, head_dim, dtype=torch.float32, device=y_BR.device)
        maxima, sums = torch.empty(2, total, splits, dtype=torch.float32, device=y_BR.device)
        counter = _counter(keys_SHWE, total)
    attend_kernel[(total, splits)](
        qkv_BR, keys_SHWE, values_SHWE, position_S, slot_B, y_BR, parts, maxima, sums, counter,
        H=heads, WINDOW=window, E=head_dim, WIDTH=width, LOG_BASE=math.log(rope_base),
        **(_launch(y_BR.device, 4) | chosen),
    )  # fmt: skip
