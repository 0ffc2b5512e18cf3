"""The losses of the output head from its logits, in plain PyTorch (specification, section 5): the definition.

`cross_entropy`, `distillation` and `refinement` are losses as `chunked` takes them; their terms are written in
log-probabilities, in fp32, or in fp64 where that is asked for.

Shape suffixes: N positions, V vocabulary. Labels are int64; a position whose label is `IGNORED` takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_essh.ops.linear_loss.chunked import IGNORED, ChunkLoss

Terms = Callable[[Sequence[Tensor], Tensor, Tensor], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""(log-probabilities of every head input, labels with 0 for ignored ones, valid_N) -> (the objective and the parts to
report, each summed over the valid positions; the objective's gradients with respect to the logits that carry one,
which may hold anything at ignored positions). Log-probabilities may be overwritten."""


def _minus_one_at(probabilities_NV: Tensor, labels_N: Tensor, weight: float = 1.0) -> Tensor:
    """Subtract `weight` at each position's label, in place."""
    column = labels_N[:, None]
    return probabilities_NV.scatter_add_(1, column, probabilities_NV.new_tensor(-weight).expand(column.shape))


def _label_loss(log_probabilities_NV: Tensor, labels_N: Tensor, valid_N: Tensor) -> Tensor:
    """Sum of the valid positions' cross-entropy."""
    return -log_probabilities_NV.gather(1, labels_N[:, None])[:, 0].where(valid_N, 0).sum()


def cross_entropy_terms(logs: Sequence[Tensor], labels_N: Tensor, valid_N: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """CE; its gradient is p - onehot."""
    (log_p,) = logs
    loss = _label_loss(log_p, labels_N, valid_N)
    return [loss], [_minus_one_at(log_p.exp_(), labels_N)]


def distillation_terms(ce_weight: float, kl_weight: float) -> Terms:
    """ce_weight CE(p) + kl_weight KL(teacher || p), of gradient ce_weight (p - onehot) + kl_weight (p - teacher)."""

    def terms(logs: Sequence[Tensor], labels_N: Tensor, valid_N: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        log_p, log_teacher = logs
        ce = _label_loss(log_p, labels_N, valid_N)
        teacher = log_teacher.exp()
        kl = torch.linalg.vecdot(teacher, log_teacher.sub_(log_p)).where(valid_N, 0).sum()
        gradient = log_p.exp_().mul_(ce_weight + kl_weight).sub_(teacher, alpha=kl_weight)
        return [ce_weight * ce + kl_weight * kl, ce, kl], [_minus_one_at(gradient, labels_N, ce_weight)]

    return terms


def refinement_terms(tv_weight: float) -> Terms:
    """CE(full) + CE(tier) + tv_weight TV(full, tier), TV = half the L1 distance, full held fixed in it.

    With g = tv_weight sign(tier - full) / 2, TV adds tier (g - sum tier g) to the tier's gradient.
    """

    def terms(logs: Sequence[Tensor], labels_N: Tensor, valid_N: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        full_ce, tier_ce = (_label_loss(log_p, labels_N, valid_N) for log_p in logs)
        full, tier = (log_p.exp_() for log_p in logs)
        distance = tier - full
        tv = (distance.abs().sum(-1) / 2).where(valid_N, 0).sum()
        pull = distance.sign_().mul_(tv_weight / 2)
        pull = pull.sub_(torch.linalg.vecdot(tier, pull)[:, None]).mul_(tier)
        gradients = [_minus_one_at(full, labels_N), _minus_one_at(tier, labels_N).add_(pull)]
        return [full_ce + tier_ce + tv_weight * tv, full_ce, tier_ce, tv], gradients

    return terms


def cross_entropy() -> ChunkLoss:
    """CE; reports nothing beside it."""
    return _from_terms(cross_entropy_terms)


def distillation(ce_weight: float, kl_weight: float) -> ChunkLoss:
    """ce_weight CE + kl_weight KL(teacher || student) of student and teacher; reports CE and KL."""
    return _from_terms(distillation_terms(ce_weight, kl_weight))


def refinement(tv_weight: float) -> ChunkLoss:
    """CE(full) + CE(tier) + tv_weight TV of full and tier; reports all three."""
    return _from_terms(refinement_terms(tv_weight))


def _from_terms(terms: Terms) -> ChunkLoss:
    def loss(
        logits: list[Tensor], labels_N: Tensor, sums: Tensor, grad_scale: Tensor | None, differentiate: bool
    ) -> Sequence[Tensor]:
        dtype = logits[0].dtype
        valid_N = labels_N != IGNORED
        labels_N = labels_N.where(valid_N, 0)
        logs = [F.log_softmax(logits.pop(0), dim=-1, dtype=sums.dtype) for _ in range(len(logits))]
        chunk_sums, gradients = terms(logs, labels_N, valid_N)
        sums += torch.stack(list(chunk_sums))
        if not differentiate:
            return ()
        if grad_scale is not None:
            gradients = [gradient.mul_(grad_scale) for gradient in gradients]
        return [gradient.masked_fill_(~valid_N[:, None], 0).to(dtype) for gradient in gradients]

    return loss
