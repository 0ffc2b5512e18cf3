"""Losses that take hidden states and the output head's weight, so that nothing else decides how logits are made.

Common to all three: hidden states [N, D], weight_VD, int64 labels_N in [0, V) or `IGNORED`; sums over the positions
that are not ignored, 0-d, fp32 (fp64 for fp64); `chunk` positions at a time, None for all at once. A label outside the
vocabulary is an IndexError or RuntimeError of PyTorch's.
"""

from __future__ import annotations

from torch import Tensor

from megatron_essh.ops.linear_loss.reference import (
    IGNORED,
    cross_entropy_terms,
    distillation_terms,
    linear_loss,
    refinement_terms,
)

__all__ = ["IGNORED", "cross_entropy", "distillation", "refinement"]


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, chunk: int | None = 4096) -> Tensor:
    """Cross-entropy of the labels."""
    (loss,) = linear_loss(cross_entropy_terms, 0, chunk, labels_N, weight_VD, hidden_ND)
    return loss


def distillation(
    hidden_ND: Tensor,
    teacher_hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ce_weight: float,
    kl_weight: float,
    chunk: int | None = 4096,
) -> tuple[Tensor, Tensor, Tensor]:
    """A reduced micro-batch's loss in pretraining: (objective, cross-entropy, KL).

    objective = ce_weight CE + kl_weight KL(p_teacher || p); the teacher's hidden states and its use of the weight
    are held fixed. Only the objective carries a gradient.
    """
    objective, ce, kl = linear_loss(
        distillation_terms(ce_weight, kl_weight), 2, chunk, labels_N, weight_VD, hidden_ND, teacher_hidden_ND.detach()
    )
    return objective, ce, kl


def refinement(
    full_hidden_ND: Tensor,
    tier_hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    tv_weight: float,
    chunk: int | None = 4096,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A micro-batch's loss in shared refinement: (objective, full cross-entropy, tier cross-entropy, TV).

    objective = CE(full) + CE(tier) + tv_weight TV(p_full, p_tier), TV half the L1 distance over the vocabulary; p_full
    is held fixed in TV. Only the objective carries a gradient.
    """
    objective, full_ce, tier_ce, tv = linear_loss(
        refinement_terms(tv_weight), 3, chunk, labels_N, weight_VD, full_hidden_ND, tier_hidden_ND
    )
    return objective, full_ce, tier_ce, tv
