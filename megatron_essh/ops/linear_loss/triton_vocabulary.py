"""Losses of one rank's columns of the logits by Triton: statistics, an exchange, and the gradients in their place.

What `triton` computes in one launch is here cut where ranks must hear of each other (see `vocabulary`): a kernel takes
the largest logit and the sum of exponentials of every row, these are gathered, and another kernel joins them and goes
on as if it had read the whole row. Refinement has two of the latter, with the sum of tier sign(tier - full) between
them. Passes over a row, arithmetic and launch options are those of the whole vocabulary's kernels.

A rank's terms are its share: the cross-entropy is with the rank that has the label. The sum of exponentials of a
position whose label is outside the vocabulary is NaN, and with it everything that any rank makes of that position.
"""

# mypy: disable-error-code="no-untyped-def"
# The kernels' bodies are Triton's language: arguments are pointers, scalars and blocks, which have no Python types.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_essh.ops import tuning
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
# Arguments whose values compile no new variant.
SIZES = ("units", "rows", "rank")


# -- rows and labels of a rank ---------------------------------------------------------------------------------------


@triton.jit
def local_label(labels, n, width, rank, TP: tl.constexpr):
    """(whether the position is ignored; the label's column here or -1; whether it is known here to be no label)."""
    label = tl.load(labels + n)
    ignored = label == _IGNORED
    negative = label < 0
    mine = (label % TP == rank) & ~negative
    here = mine & (label // TP < width)
    return ignored, tl.where(here, label // TP, -1).to(tl.int32), (negative & ~ignored) | (mine & ~here)


@triton.jit
def joined_statistics(statistics, n, rows, distribution, DISTRIBUTIONS: tl.constexpr, TP: tl.constexpr):
    """(largest logit, sum of exponentials of logits less the largest) of all ranks, from statistics [TP, .., 2, N]."""
    own = statistics + distribution * 2 * rows + n
    largest = tl.load(own)
    for rank in tl.static_range(1, TP):
        largest = tl.maximum(largest, tl.load(own + rank * DISTRIBUTIONS * 2 * rows))
    total = tl.full([], 0.0, tl.float32)
    for rank in tl.static_range(TP):
        part = own + rank * DISTRIBUTIONS * 2 * rows
        total += tl.load(part + rows) * tl.exp(tl.load(part) - largest)
    return largest, total


@triton.jit
def label_loss(row, label, largest, total, width):
    """The position's cross-entropy, of the rank that has the label; else 0, or NaN where the sum is."""
    loss = largest - label_logit(row, tl.maximum(label, 0), width) + tl.log(total)
    return tl.where((label >= 0) | (total != total), loss, 0.0)


@triton.jit
def gradient_factor(scale, HAS_SCALE: tl.constexpr):
    if HAS_SCALE:
        factor = tl.load(scale).to(tl.float32)
    else:
        factor = tl.full([], 1.0, tl.float32)
    return factor


# -- kernels: one program a position ---------------------------------------------------------------------------------


@triton.jit(do_not_specialize=SIZES)
def statistics_kernel(
    logits, labels, statistics, units, rows, rank, ALIGN: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """statistics [2, N]: largest logit and sum of exponentials of this rank's columns."""
    n = tl.program_id(0)
    width = units * ALIGN
    ignored, _, outside = local_label(labels, n, width, rank, TP)
    if ignored:
        tl.store(statistics + n, 0.0)
        tl.store(statistics + rows + n, 1.0)
    else:
        largest, total = row_statistics(logits + n.to(tl.int64) * width, width, BLOCK)
        tl.store(statistics + n, largest)
        tl.store(statistics + rows + n, tl.where(outside, float("nan"), total))


@triton.jit(do_not_specialize=SIZES)
def local_cross_entropy_kernel(
    logits, labels, statistics, terms, scale, units, rows, rank,
    ALIGN: tl.constexpr, TP: tl.constexpr, HAS_SCALE: tl.constexpr, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms [1, N]: CE."""
    n = tl.program_id(0)
    width = units * ALIGN
    row = logits + n.to(tl.int64) * width
    ignored, label, _ = local_label(labels, n, width, rank, TP)
    if ignored:
        tl.store(terms + n, 0.0)
        if DIFFERENTIATE:
            zero_row(row, width, BLOCK)
    else:
        largest, total = joined_statistics(statistics, n, rows, 0, 1, TP)
        tl.store(terms + n, label_loss(row, label, largest, total, width))
        if DIFFERENTIATE:
            cross_entropy_gradient(row, label, largest, total, gradient_factor(scale, HAS_SCALE), width, BLOCK)


@triton.jit(do_not_specialize=SIZES)
def local_distillation_kernel(
    logits, teacher_logits, labels, statistics, terms, scale, ce_weight, kl_weight, units, rows, rank,
    ALIGN: tl.constexpr, TP: tl.constexpr, HAS_SCALE: tl.constexpr, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms [3, N]: objective, CE, KL."""
    n = tl.program_id(0)
    width = units * ALIGN
    row, teacher_row = logits + n.to(tl.int64) * width, teacher_logits + n.to(tl.int64) * width
    ignored, label, _ = local_label(labels, n, width, rank, TP)
    if ignored:
        tl.store(terms + n, 0.0)
        tl.store(terms + rows + n, 0.0)
        tl.store(terms + 2 * rows + n, 0.0)
        if DIFFERENTIATE:
            zero_row(row, width, BLOCK)
    else:
        largest, total = joined_statistics(statistics, n, rows, 0, 2, TP)
        teacher_largest, teacher_total = joined_statistics(statistics, n, rows, 1, 2, TP)
        ce = label_loss(row, label, largest, total, width)
        factor = gradient_factor(scale, HAS_SCALE)
        kl = divergence_and_gradient(
            row, teacher_row, label, largest, total, teacher_largest, teacher_total,
            ce_weight * factor, kl_weight * factor, width, BLOCK, DIFFERENTIATE,
        )  # fmt: skip
        tl.store(terms + n, ce_weight * ce + kl_weight * kl)
        tl.store(terms + rows + n, ce)
        tl.store(terms + 2 * rows + n, kl)


@triton.jit(do_not_specialize=SIZES)
def local_variation_kernel(
    full_logits, tier_logits, labels, statistics, terms, pulls, tv_weight, units, rows, rank,
    ALIGN: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """terms [4, N]: objective, CE of full, CE of tier, TV; pulls [N]: sum of tier sign(tier - full)."""
    n = tl.program_id(0)
    width = units * ALIGN
    full_row, tier_row = full_logits + n.to(tl.int64) * width, tier_logits + n.to(tl.int64) * width
    ignored, label, _ = local_label(labels, n, width, rank, TP)
    if ignored:
        tl.store(terms + n, 0.0)
        tl.store(terms + rows + n, 0.0)
        tl.store(terms + 2 * rows + n, 0.0)
        tl.store(terms + 3 * rows + n, 0.0)
        tl.store(pulls + n, 0.0)
    else:
        full_largest, full_total = joined_statistics(statistics, n, rows, 0, 2, TP)
        tier_largest, tier_total = joined_statistics(statistics, n, rows, 1, 2, TP)
        full_ce = label_loss(full_row, label, full_largest, full_total, width)
        tier_ce = label_loss(tier_row, label, tier_largest, tier_total, width)
        tv, pull = total_variation(full_row, tier_row, full_largest, full_total, tier_largest, tier_total, width, BLOCK)
        tl.store(terms + n, full_ce + tier_ce + tv_weight * tv)
        tl.store(terms + rows + n, full_ce)
        tl.store(terms + 2 * rows + n, tier_ce)
        tl.store(terms + 3 * rows + n, tv)
        tl.store(pulls + n, pull)


@triton.jit(do_not_specialize=SIZES)
def local_refinement_kernel(
    full_logits, tier_logits, labels, statistics, pulls, scale, tv_weight, units, rows, rank,
    ALIGN: tl.constexpr, TP: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients; pulls [N]: sum of tier sign(tier - full) over the vocabulary."""
    n = tl.program_id(0)
    width = units * ALIGN
    full_row, tier_row = full_logits + n.to(tl.int64) * width, tier_logits + n.to(tl.int64) * width
    ignored, label, _ = local_label(labels, n, width, rank, TP)
    if ignored:
        zero_row(full_row, width, BLOCK)
        zero_row(tier_row, width, BLOCK)
    else:
        full_largest, full_total = joined_statistics(statistics, n, rows, 0, 2, TP)
        tier_largest, tier_total = joined_statistics(statistics, n, rows, 1, 2, TP)
        refinement_gradients(
            full_row, tier_row, label, full_largest, full_total, tier_largest, tier_total,
            tl.load(pulls + n), tv_weight, gradient_factor(scale, HAS_SCALE), width, BLOCK,
        )  # fmt: skip


# -- losses ----------------------------------------------------------------------------------------------------------


def cross_entropy(vocabulary: VocabularyShard) -> ChunkLoss:
    """CE; reports nothing beside it."""

    def loss(
        logits: list[Tensor], labels_N: Tensor, sums: Tensor, grad_scale: Tensor | None, differentiate: bool
    ) -> Sequence[Tensor]:
        chunk = _Chunk("cross_entropy", logits, labels_N, vocabulary)
        terms = sums.new_empty(len(sums), chunk.rows)
        chunk.launch(
            local_cross_entropy_kernel, chunk.statistics(), terms, grad_scale,
            HAS_SCALE=grad_scale is not None, DIFFERENTIATE=differentiate,
        )  # fmt: skip
        sums += terms.sum(dim=1)
        return logits if differentiate else ()

    return loss


def distillation(ce_weight: float, kl_weight: float, vocabulary: VocabularyShard) -> ChunkLoss:
    """ce_weight CE + kl_weight KL(teacher || student) of student and teacher; reports CE and KL."""

    def loss(
        logits: list[Tensor], labels_N: Tensor, sums: Tensor, grad_scale: Tensor | None, differentiate: bool
    ) -> Sequence[Tensor]:
        chunk = _Chunk("distillation", logits, labels_N, vocabulary)
        terms = sums.new_empty(len(sums), chunk.rows)
        chunk.launch(
            local_distillation_kernel, chunk.statistics(), terms, grad_scale, ce_weight, kl_weight,
            HAS_SCALE=grad_scale is not None, DIFFERENTIATE=differentiate,
        )  # fmt: skip
        sums += terms.sum(dim=1)
        return logits[:1] if differentiate else ()

    return loss


def refinement(tv_weight: float, vocabulary: VocabularyShard) -> ChunkLoss:
    """CE(full) + CE(tier) + tv_weight TV of full and tier; reports all three."""

    def loss(
        logits: list[Tensor], labels_N: Tensor, sums: Tensor, grad_scale: Tensor | None, differentiate: bool
    ) -> Sequence[Tensor]:
        chunk = _Chunk("refinement", logits, labels_N, vocabulary)
        statistics = chunk.statistics()
        terms, pulls = sums.new_empty(len(sums), chunk.rows), sums.new_empty(chunk.rows)
        chunk.launch(local_variation_kernel, statistics, terms, pulls, tv_weight)
        sums += terms.sum(dim=1)
        if not differentiate:
            return ()
        vocabulary.sum_(pulls)
        chunk.launch(
            local_refinement_kernel, statistics, pulls, grad_scale, tv_weight, HAS_SCALE=grad_scale is not None
        )  # fmt: skip
        return logits

    return loss


class _Chunk:
    """A chunk's logits and labels on their way through the kernels."""

    def __init__(self, name: str, logits: list[Tensor], labels_N: Tensor, vocabulary: VocabularyShard) -> None:
        """name: of the whole vocabulary's kernel, whose launch options are taken."""
        assert all(z.is_contiguous() and z.dtype in (torch.bfloat16, torch.float32) for z in logits)
        self.rows, columns = logits[0].shape
        self._logits, self._labels_N, self._vocabulary = tuple(logits), labels_N.contiguous(), vocabulary
        align = math.gcd(columns, 8)
        self._sizes = columns // align, self.rows, vocabulary.rank
        self._constants = {"ALIGN": align, "TP": vocabulary.tp}
        padded = triton.next_power_of_2(columns)
        self._options, self._statistics_options = (
            tuning.options(f"linear_loss.{kernel}", labels_N.device, columns=padded)
            for kernel in (name, "cross_entropy")
        )

    def statistics(self) -> Tensor:
        """[tp, distributions, 2, N] in fp32, of all ranks."""
        own = self._logits[0].new_empty(len(self._logits), 2, self.rows, dtype=torch.float32)
        for logits, out in zip(self._logits, own, strict=True):
            statistics_kernel[(self.rows,)](
                logits, self._labels_N, out, *self._sizes, **self._constants, **self._statistics_options
            )  # fmt: skip
        return self._vocabulary.gather(own)

    def launch(self, kernel: Any, *arguments: Any, **constants: bool) -> None:
        """Launch a kernel of logits, labels, arguments and sizes, in this order."""
        kernel[(self.rows,)](
            *self._logits, self._labels_N, *arguments, *self._sizes, **self._constants, **constants, **self._options
        )  # fmt: skip
