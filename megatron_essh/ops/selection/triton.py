"""The lowest value that is needed, by a Triton kernel: four bits a launch, in eight launches and one that gives it out.

A launch sums, in each row, the amounts of what reaches each of fifteen thresholds. Sums are of integers: their order
does not matter. Launches follow one another on the device; the host waits for nothing.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernel is Triton's language: its arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
PROGRAMS = 2048
"""About as many as keep a large GPU busy."""
ROUNDS = 8


@triton.jit(do_not_specialize=("entries", "rows", "amount_row", "amount_column", "steps"))
def narrow_kernel(
    order, amount, needed, sums, lowest, entries, rows, amount_row, amount_column, steps,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round ROUND of 8, in BLOCK x steps entries of a row a program; after the last round (8), the result.

    sums: int64 [8, rows, 16], zero before round 0; what reaches threshold j of a round, for j of 1 to 15.
    """
    row = tl.program_id(0).to(tl.int64)
    part_J = tl.arange(0, 16)
    need = tl.load(needed + row)
    low = tl.full([], -2147483648, tl.int64)
    for before in tl.static_range(ROUND):
        sum_J = tl.load(sums + (before * rows + row) * 16 + part_J, mask=part_J > 0, other=-1)
        low += tl.sum((sum_J >= need).to(tl.int64)) << (28 - 4 * before)
    if ROUND == 8:
        tl.store(lowest + row, low)
    else:
        threshold_J = (low + (part_J.to(tl.int64) << (28 - 4 * ROUND))).to(tl.int32)
        total_J = tl.zeros([16], tl.int64)
        for step in range(steps):
            column_N = (tl.program_id(1) * steps + step) * BLOCK + tl.arange(0, BLOCK)
            inside_N = column_N < entries
            order_N = tl.load(order + row * entries + column_N, mask=inside_N, other=0)
            place_N = row * amount_row + column_N.to(tl.int64) * amount_column
            amount_N = tl.load(amount + place_N, mask=inside_N, other=0)
            total_J += tl.sum(tl.where(order_N[:, None] >= threshold_J[None, :], amount_N[:, None], 0), axis=0)
        tl.atomic_add(sums + (ROUND * rows + row) * 16 + part_J, total_J, mask=part_J > 0, sem="relaxed")


def triton_lowest_needed(order_BV: Tensor, amount_BV: Tensor, needed_B1: Tensor) -> Tensor:
    """int64 [B, 1]; see `lowest_needed`."""
    rows, entries = order_BV.shape
    sums = torch.zeros(ROUNDS, rows, 16, dtype=torch.int64, device=order_BV.device)
    lowest_B1 = torch.empty(rows, 1, dtype=torch.int64, device=order_BV.device)
    blocks = triton.cdiv(entries, BLOCK)
    steps = min(blocks, max(1, rows * blocks // PROGRAMS))
    for round_ in range(ROUNDS + 1):
        grid = (rows, triton.cdiv(blocks, steps) if round_ < ROUNDS else 1)
        narrow_kernel[grid](
            order_BV.contiguous(), amount_BV, needed_B1.contiguous(), sums, lowest_B1, entries, rows,
            *amount_BV.stride(), steps, ROUND=round_, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return lowest_B1
