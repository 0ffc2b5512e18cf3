"""Losses of the output head from its logits by Triton: one launch a chunk, which leaves the gradients in the logits.

`cross_entropy`, `distillation` and `refinement` are losses as `chunked` takes them and as `reference` defines them,
for bf16 and fp32 logits. A program takes one position. It walks the vocabulary in blocks: once for the largest logit
and the sum of exponentials of each distribution, once more for refinement's sums over both, and once for the gradient,
which goes where the logits were; ignored positions are only zeroed. Every pass after the first finds most of the row
in the L2 cache. All arithmetic is fp32, and each position's terms are written out and then summed in a fixed order.

Of a vocabulary dealt out over ranks, the losses are those of `triton_vocabulary`.
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
from megatron_essh.ops.linear_loss import triton_vocabulary
from megatron_essh.ops.linear_loss.chunked import IGNORED, ChunkLoss
from megatron_essh.ops.linear_loss.triton_passes import (
    cross_entropy_gradient,
    divergence_and_gradient,
    label_logit,
    refinement_gradients,
    row_statistics,
    total_variation,
    zero_row,
)
from megatron_essh.ops.linear_loss.vocabulary import VocabularyShard

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


def cross_entropy(vocabulary: VocabularyShard | None = None) -> ChunkLoss:
    """CE; reports nothing beside it."""
    if vocabulary is not None:
        return triton_vocabulary.cross_entropy(vocabulary)
    return _launching("cross_entropy", cross_entropy_kernel, (), inputs=1)


def distillation(ce_weight: float, kl_weight: float, vocabulary: VocabularyShard | None = None) -> ChunkLoss:
    """ce_weight CE + kl_weight KL(teacher || student) of student and teacher; reports CE and KL."""
    if vocabulary is not None:
        return triton_vocabulary.distillation(float(ce_weight), float(kl_weight), vocabulary)
    return _launching("distillation", distillation_kernel, (float(ce_weight), float(kl_weight)), inputs=1)


def refinement(tv_weight: float, vocabulary: VocabularyShard | None = None) -> ChunkLoss:
    """CE(full) + CE(tier) + tv_weight TV of full and tier; reports all three."""
    if vocabulary is not None:
        return triton_vocabulary.refinement(float(tv_weight), vocabulary)
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
