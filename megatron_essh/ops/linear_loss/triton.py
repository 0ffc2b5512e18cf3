"""Losses of the output head from its logits by Triton: one launch a chunk, which leaves the gradients in the logits.

`cross_entropy`, `distillation` and `refinement` are losses as `chunked` takes them and as `reference` defines them,
for bf16 and fp32 logits. A program takes one position. It walks the vocabulary in blocks: once for the largest logit
and the sum of exponentials of each distribution, once more for refinement's sums over both, and once for the gradient,
which goes where the logits were; ignored positions are only zeroed. Every pass after the first finds most of the row
in the L2 cache. All arithmetic is fp32, and each position's terms are written out and then summed in a fixed order.

The passes are functions of a row and of its statistics, so that these may also come from elsewhere than from one row.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels' bodies are Triton's language: arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_essh.ops import tuning
from megatron_essh.ops.linear_loss.chunked import IGNORED, ChunkLoss

_IGNORED = tl.constexpr(IGNORED)
# Arguments whose values compile no new variant: every vocabulary of one alignment and every chunk run the same code.
SIZES = ("units", "rows")


def _defaults(each: int, columns: int) -> dict[str, int]:
    """A block of `each` logits a thread.

    The rows that are being worked on should fit the L2 cache together: the longer they are, the larger the programs.
    """
    warps = 16 if columns <= 65536 else 32
    return {"BLOCK": min(32 * warps * each, max(1024, columns)), "num_warps": warps, "num_stages": 1}


for _kernel, _each in (("cross_entropy", 16), ("distillation", 8), ("refinement", 8)):
    tuning.declare(
        f"linear_loss.{_kernel}",
        shape_class=("columns",),
        defaults=partial(_defaults, _each),
        choices={"BLOCK": (1024, 2048, 4096, 8192, 16384), "num_warps": (4, 8, 16, 32), "num_stages": (1,)},
    )


# -- passes over a row -----------------------------------------------------------------------------------------------


@triton.jit
def load_logits(row, start, width, other, BLOCK: tl.constexpr):
    """(columns from `start` on, which of them are in the row, their logits in fp32)."""
    column_B = start + tl.arange(0, BLOCK)
    inside_B = column_B < width
    return column_B, inside_B, tl.load(row + column_B, mask=inside_B, other=other).to(tl.float32)


@triton.jit
def row_statistics(row, width, BLOCK: tl.constexpr):
    """(largest logit, sum of the exponentials of logits less the largest)."""
    largest = tl.full([], float("-inf"), tl.float32)
    sum_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        _, _, x_B = load_logits(row, start, width, float("-inf"), BLOCK)
        higher = tl.maximum(largest, tl.max(x_B, axis=0))
        sum_B = sum_B * tl.exp(largest - higher) + tl.exp(x_B - higher)
        largest = higher
    return largest, tl.sum(sum_B, axis=0)


@triton.jit
def label_logit(row, label, width):
    """The label's logit; NaN if it is not in the row."""
    return tl.load(row + label, mask=(label >= 0) & (label < width), other=float("nan")).to(tl.float32)


@triton.jit
def zero_row(row, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        column_B = start + tl.arange(0, BLOCK)
        tl.store(row + column_B, tl.zeros([BLOCK], row.dtype.element_ty), mask=column_B < width)


@triton.jit
def cross_entropy_gradient(row, label, largest, total, scale, width, BLOCK: tl.constexpr):
    """scale (p - onehot), in place."""
    factor = scale / total
    for start in range(0, width, BLOCK):
        column_B, inside_B, x_B = load_logits(row, start, width, float("-inf"), BLOCK)
        gradient_B = tl.exp(x_B - largest) * factor - tl.where(column_B == label, scale, 0.0)
        tl.store(row + column_B, gradient_B.to(row.dtype.element_ty), mask=inside_B)


@triton.jit
def divergence_and_gradient(
    row, teacher_row, label, largest, total, teacher_largest, teacher_total, ce_scale, kl_scale, width,
    BLOCK: tl.constexpr, DIFFERENTIATE: tl.constexpr,
):  # fmt: skip
    """KL(teacher || p); ce_scale (p - onehot) + kl_scale (p - teacher) in the place of the student's logits."""
    # Of log teacher - log p, what is the same for the whole row.
    offset = largest - teacher_largest + tl.log(total) - tl.log(teacher_total)
    factor, teacher_factor = (ce_scale + kl_scale) / total, 1.0 / teacher_total
    kl_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column_B, inside_B, x_B = load_logits(row, start, width, 0.0, BLOCK)
        _, _, teacher_x_B = load_logits(teacher_row, start, width, 0.0, BLOCK)
        teacher_B = tl.exp(teacher_x_B - teacher_largest) * teacher_factor
        kl_B += tl.where(inside_B, teacher_B * (teacher_x_B - x_B + offset), 0.0)
        if DIFFERENTIATE:
            gradient_B = tl.exp(x_B - largest) * factor - kl_scale * teacher_B
            gradient_B -= tl.where(column_B == label, ce_scale, 0.0)
            tl.store(row + column_B, gradient_B.to(row.dtype.element_ty), mask=inside_B)
    return tl.sum(kl_B, axis=0)


@triton.jit
def total_variation(full_row, tier_row, full_largest, full_total, tier_largest, tier_total, width, BLOCK: tl.constexpr):
    """(TV(full, tier), sum of tier sign(tier - full))."""
    full_factor, tier_factor = 1.0 / full_total, 1.0 / tier_total
    distance_B = tl.zeros([BLOCK], tl.float32)
    pull_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        _, _, full_x_B = load_logits(full_row, start, width, float("-inf"), BLOCK)
        _, _, tier_x_B = load_logits(tier_row, start, width, float("-inf"), BLOCK)
        full_B = tl.exp(full_x_B - full_largest) * full_factor
        tier_B = tl.exp(tier_x_B - tier_largest) * tier_factor
        distance_B += tl.abs(tier_B - full_B)
        pull_B += tier_B * sign(tier_B - full_B)
    return tl.sum(distance_B, axis=0) / 2, tl.sum(pull_B, axis=0)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def refinement_gradients(
    full_row, tier_row, label, full_largest, full_total, tier_largest, tier_total, pull, tv_weight, scale, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Both rows' gradients, in place; pull: the sum of tier sign(tier - full)."""
    full_factor, tier_factor = 1.0 / full_total, 1.0 / tier_total
    for start in range(0, width, BLOCK):
        column_B, inside_B, full_x_B = load_logits(full_row, start, width, float("-inf"), BLOCK)
        _, _, tier_x_B = load_logits(tier_row, start, width, float("-inf"), BLOCK)
        full_B = tl.exp(full_x_B - full_largest) * full_factor
        tier_B = tl.exp(tier_x_B - tier_largest) * tier_factor
        onehot_B = tl.where(column_B == label, 1.0, 0.0)
        pull_B = tv_weight * 0.5 * (sign(tier_B - full_B) - pull)
        full_gradient_B = scale * (full_B - onehot_B)
        tier_gradient_B = scale * (tier_B - onehot_B + tier_B * pull_B)
        tl.store(full_row + column_B, full_gradient_B.to(full_row.dtype.element_ty), mask=inside_B)
        tl.store(tier_row + column_B, tier_gradient_B.to(tier_row.dtype.element_ty), mask=inside_B)


# -- kernels: one program a position ---------------------------------------------------------------------------------


@triton.jit
def label_and_scale(labels, scale, n, width, HAS_SCALE: tl.constexpr):
    """(the position's label, the factor on its gradient); -1 and NaN for a label outside the vocabulary."""
    label = tl.load(labels + n)
    known = ((label >= 0) & (label < width)) | (label == _IGNORED)
    if HAS_SCALE:
        factor = tl.load(scale).to(tl.float32)
    else:
        factor = tl.full([], 1.0, tl.float32)
    return tl.where(known, label, -1).to(tl.int32), tl.where(known, factor, float("nan"))


@triton.jit(do_not_specialize=SIZES)
def cross_entropy_kernel(
    logits, labels, terms, scale, units, rows,
    ALIGN: tl.constexpr, HAS_SCALE: tl.constexpr, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms [1, N]: CE."""
    n = tl.program_id(0)
    # A product with ALIGN, so that the compiler knows what divides every row's offset and the number of columns.
    width = units * ALIGN
    row = logits + n.to(tl.int64) * width
    label, factor = label_and_scale(labels, scale, n, width, HAS_SCALE)
    if label == _IGNORED:
        tl.store(terms + n, 0.0)
        if DIFFERENTIATE:
            zero_row(row, width, BLOCK)
    else:
        chosen = label_logit(row, label, width)
        largest, total = row_statistics(row, width, BLOCK)
        tl.store(terms + n, largest - chosen + tl.log(total))
        if DIFFERENTIATE:
            cross_entropy_gradient(row, label, largest, total, factor, width, BLOCK)


@triton.jit(do_not_specialize=SIZES)
def distillation_kernel(
    logits, teacher_logits, labels, terms, scale, ce_weight, kl_weight, units, rows,
    ALIGN: tl.constexpr, HAS_SCALE: tl.constexpr, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms [3, N]: objective, CE, KL."""
    n = tl.program_id(0)
    width = units * ALIGN
    row, teacher_row = logits + n.to(tl.int64) * width, teacher_logits + n.to(tl.int64) * width
    label, factor = label_and_scale(labels, scale, n, width, HAS_SCALE)
    if label == _IGNORED:
        tl.store(terms + n, 0.0)
        tl.store(terms + rows + n, 0.0)
        tl.store(terms + 2 * rows + n, 0.0)
        if DIFFERENTIATE:
            zero_row(row, width, BLOCK)
    else:
        chosen = label_logit(row, label, width)
        largest, total = row_statistics(row, width, BLOCK)
        teacher_largest, teacher_total = row_statistics(teacher_row, width, BLOCK)
        ce = largest - chosen + tl.log(total)
        kl = divergence_and_gradient(
            row, teacher_row, label, largest, total, teacher_largest, teacher_total,
            ce_weight * factor, kl_weight * factor, width, BLOCK, DIFFERENTIATE,
        )  # fmt: skip
        tl.store(terms + n, ce_weight * ce + kl_weight * kl)
        tl.store(terms + rows + n, ce)
        tl.store(terms + 2 * rows + n, kl)


@triton.jit(do_not_specialize=SIZES)
def refinement_kernel(
    full_logits, tier_logits, labels, terms, scale, tv_weight, units, rows,
    ALIGN: tl.constexpr, HAS_SCALE: tl.constexpr, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms [4, N]: objective, CE of full, CE of tier, TV."""
    n = tl.program_id(0)
    width = units * ALIGN
    full_row, tier_row = full_logits + n.to(tl.int64) * width, tier_logits + n.to(tl.int64) * width
    label, factor = label_and_scale(labels, scale, n, width, HAS_SCALE)
    if label == _IGNORED:
        tl.store(terms + n, 0.0)
        tl.store(terms + rows + n, 0.0)
        tl.store(terms + 2 * rows + n, 0.0)
        tl.store(terms + 3 * rows + n, 0.0)
        if DIFFERENTIATE:
            zero_row(full_row, width, BLOCK)
            zero_row(tier_row, width, BLOCK)
    else:
        full_chosen, tier_chosen = label_logit(full_row, label, width), label_logit(tier_row, label, width)
        full_largest, full_total = row_statistics(full_row, width, BLOCK)
        tier_largest, tier_total = row_statistics(tier_row, width, BLOCK)
        full_ce = full_largest - full_chosen + tl.log(full_total)
        tier_ce = tier_largest - tier_chosen + tl.log(tier_total)
        tv, pull = total_variation(full_row, tier_row, full_largest, full_total, tier_largest, tier_total, width, BLOCK)
        tl.store(terms + n, full_ce + tier_ce + tv_weight * tv)
        tl.store(terms + rows + n, full_ce)
        tl.store(terms + 2 * rows + n, tier_ce)
        tl.store(terms + 3 * rows + n, tv)
        if DIFFERENTIATE:
            refinement_gradients(
                full_row, tier_row, label, full_largest, full_total, tier_largest, tier_total,
                pull, tv_weight, factor, width, BLOCK,
            )  # fmt: skip


# -- losses ----------------------------------------------------------------------------------------------------------


def cross_entropy() -> ChunkLoss:
    """CE; reports nothing beside it."""
    return _launching("cross_entropy", cross_entropy_kernel, (), inputs=1)


def distillation(ce_weight: float, kl_weight: float) -> ChunkLoss:
    """ce_weight CE + kl_weight KL(teacher || student) of student and teacher; reports CE and KL."""
    return _launching("distillation", distillation_kernel, (float(ce_weight), float(kl_weight)), inputs=1)


def refinement(tv_weight: float) -> ChunkLoss:
    """CE(full) + CE(tier) + tv_weight TV of full and tier; reports all three."""
    return _launching("refinement", refinement_kernel, (float(tv_weight),), inputs=2)


def _launching(name: str, kernel: Any, weights: tuple[float, ...], inputs: int) -> ChunkLoss:
    """inputs: how many of the logits are given a gradient."""

    def loss(
        logits: list[Tensor], labels_N: Tensor, sums: Tensor, grad_scale: Tensor | None, differentiate: bool
    ) -> Sequence[Tensor]:
        rows, columns = logits[0].shape
        assert all(z.is_contiguous() and z.dtype in (torch.bfloat16, torch.float32) for z in logits)
        terms = sums.new_empty(len(sums), rows)
        align = math.gcd(columns, 8)
        kernel[(rows,)](
            *logits, labels_N.contiguous(), terms, grad_scale, *weights, columns // align, rows,
            ALIGN=align, HAS_SCALE=grad_scale is not None, DIFFERENTIATE=differentiate,
            **tuning.options(f"linear_loss.{name}", terms.device, columns=triton.next_power_of_2(columns)),
        )  # fmt: skip
        sums += terms.sum(dim=1)
        return logits[:inputs] if differentiate else ()

    return loss
