"""Passes over a row of logits, as functions of the row and of its statistics, which may be those of a longer row.

A row is a position's logits, of all the vocabulary or of one rank's entries. All arithmetic is fp32, and a row is
walked in blocks. Where a pass takes a `label`, it is a column of the row, or -1, which is none of them.
"""

# mypy: disable-error-code="no-untyped-def"
# The bodies are Triton's language: arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


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
