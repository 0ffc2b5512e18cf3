"""Losses that take hidden states and the output head's weight, so that nothing else decides how logits are made.

Common to all three: hidden states [N, D], weight_VD, int64 labels_N in [0, V) or `IGNORED`; sums over the positions
that are not ignored, 0-d, fp32 (fp64 for fp64); `chunk` positions at a time, None for all at once. A label outside the
vocabulary is an IndexError or RuntimeError of PyTorch's; on a GPU, where asking would wait for the device, it makes
the objective NaN.

grad_scale: None, or the factor on all gradients, 0-d fp32 on the device of the weight. The values returned are
without it. The gradients are made with it on the way forward, and what arrives at the objective on the way back is not
looked at: call `objective.backward()` itself, once, of nothing computed from it. If the weight has a `main_grad` its
gradient has then been added there before the objective is returned; without grad_scale it is added in backward.
Either way autograd is given none for it. If the weight has a `compute_copy` in the logits' dtype, that is the head.

vocabulary: None, or which entries of the vocabulary weight_VD holds. All ranks then get the same values, and each the
gradient of its own weight. The gradient of the hidden states is this rank's share: the sum of the shares over the
ranks is the gradient, and is the caller's to take. A label outside the vocabulary is an error on every rank.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.linear_loss import reference
from megatron_essh.ops.linear_loss.chunked import IGNORED, chunked_loss
from megatron_essh.ops.linear_loss.vocabulary import VocabularyShard

__all__ = ["IGNORED", "VocabularyShard", "cross_entropy", "distillation", "refinement"]


def cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    chunk: int | None = 4096,
    grad_scale: Tensor | None = None,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """Cross-entropy of the labels."""
    loss = _implementation(weight_VD).cross_entropy(vocabulary)
    (objective,) = chunked_loss(loss, 0, chunk, labels_N, grad_scale, weight_VD, hidden_ND, vocabulary=vocabulary)
    return objective


def distillation(
    hidden_ND: Tensor,
    teacher_hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    ce_weight: float,
    kl_weight: float,
    chunk: int | None = 4096,
    grad_scale: Tensor | None = None,
    vocabulary: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A reduced micro-batch's loss in pretraining: (objective, cross-entropy, KL).

    objective = ce_weight CE + kl_weight KL(p_teacher || p); the teacher's hidden states and its use of the weight
    are held fixed. Only the objective carries a gradient.
    """
    loss = _implementation(weight_VD).distillation(ce_weight, kl_weight, vocabulary)
    hidden = hidden_ND, teacher_hidden_ND.detach()
    objective, ce, kl = chunked_loss(loss, 2, chunk, labels_N, grad_scale, weight_VD, *hidden, vocabulary=vocabulary)
    return objective, ce, kl


def refinement(
    full_hidden_ND: Tensor,
    tier_hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    tv_weight: float,
    chunk: int | None = 4096,
    grad_scale: Tensor | None = None,
    vocabulary: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A micro-batch's loss in shared refinement: (objective, full cross-entropy, tier cross-entropy, TV).

    objective = CE(full) + CE(tier) + tv_weight TV(p_full, p_tier), TV half the L1 distance over the vocabulary; p_full
    is held fixed in TV. Only the objective carries a gradient.
    """
    loss = _implementation(weight_VD).refinement(tv_weight, vocabulary)
    hidden = full_hidden_ND, tier_hidden_ND
    objective, full_ce, tier_ce, tv = chunked_loss(
        loss, 3, chunk, labels_N, grad_scale, weight_VD, *hidden, vocabulary=vocabulary
    )
    return objective, full_ce, tier_ce, tv


def _implementation(weight_VD: Tensor) -> ModuleType:
    """Who computes the losses of logits: the Triton kernels on a GPU, in the dtypes that they take, or `reference`."""
    kind = weight_VD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VD.dtype
    if (
        weight_VD.is_cuda
        and weight_VD.dtype != torch.float64
        and dtype in (torch.bfloat16, torch.float32)
        and HAS_TRITON
    ):
        from megatron_essh.ops.linear_loss import triton

        return triton
    return reference
