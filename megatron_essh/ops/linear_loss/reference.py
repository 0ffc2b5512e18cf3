"""The losses of the output head from its logits, in plain PyTorch (specification, section 5): the definition.

`cross_entropy`, `distillation` and `refinement` are losses as `chunked` takes them; their terms are written in
log-probabilities, in fp32, or in fp64 where that is asked for. Of a vocabulary dealt out over ranks, each computes its
own entries' terms; only the sums over the vocabulary that a term or a normaliser needs are exchanged.

Shape suffixes: N positions, V vocabulary (this rank's entries), R ranks. Labels are int64; a position whose label is
`IGNORED` takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_essh.ops.linear_loss.chunked import IGNORED, ChunkLoss
from megatron_essh.ops.linear_loss.vocabulary import VocabularyShard


@dataclass(frozen=True)
class Labels:
    """What a chunk's positions are to predict."""

    column_N: Tensor
    """The label's column of the logits; 0 where it is not among them."""
    present_N: Tensor
    """Whether it is: the position is valid and its label one of this rank's entries."""
    valid_N: Tensor
    """Whether the position is not ignored."""
    total: Callable[[Tensor], Tensor]
    """From sums over this rank's entries to sums over the vocabulary."""


Terms = Callable[[Sequence[Tensor], Labels], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""(log-probabilities of every head input, labels) -> (the objective and the parts to report, each summed over the valid
positions and over this rank's entries; the objective's gradients with respect to the logits that carry one, which may
hold anything at ignored positions). Log-probabilities may be overwritten."""


def _minus_one_at(probabilities_NV: Tensor, labels: Labels, weight: float = 1.0) -> Tensor:
    """Subtract `weight` at each position's label, in place."""
    change_N = labels.present_N.to(probabilities_NV.dtype) * -weight
    return probabilities_NV.scatter_add_(1, labels.column_N[:, None], change_N[:, None])


def _label_loss(log_probabilities_NV: Tensor, labels: Labels) -> Tensor:
    """Sum of the cross-entropy of the labels that are here."""
    return -log_probabilities_NV.gather(1, labels.column_N[:, None])[:, 0].where(labels.present_N, 0).sum()


def cross_entropy_terms(logs: Sequence[Tensor], labels: Labels) -> tuple[list[Tensor], list[Tensor]]:
    """CE; its gradient is p - onehot."""
    (log_p,) = logs
    loss = _label_loss(log_p, labels)
    return [loss], [_minus_one_at(log_p.exp_(), labels)]


def distillation_terms(ce_weight: float, kl_weight: float) -> Terms:
    """ce_weight CE(p) + kl_weight KL(teacher || p), of gradient ce_weight (p - onehot) + kl_weight (p - teacher)."""

    def terms(logs: Sequence[Tensor], labels: Labels) -> tuple[list[Tensor], list[Tensor]]:
        log_p, log_teacher = logs
        ce = _label_loss(log_p, labels)
        teacher = log_teacher.exp()
        kl = torch.linalg.vecdot(teacher, log_teacher.sub_(log_p)).where(labels.valid_N, 0).sum()
        gradient = log_p.exp_().mul_(ce_weight + kl_weight).sub_(teacher, alpha=kl_weight)
        return [ce_weight * ce + kl_weight * kl, ce, kl], [_minus_one_at(gradient, labels, ce_weight)]

    return terms


def refinement_terms(tv_weight: float) -> Terms:
    """CE(full) + CE(tier) + tv_weight TV(full, tier), TV = half the L1 distance, full held fixed in it.

    With g = tv_weight sign(tier - full) / 2, TV adds tier (g - sum tier g) to the tier's gradient.
    """

    def terms(logs: Sequence[Tensor], labels: Labels) -> tuple[list[Tensor], list[Tensor]]:
        full_ce, tier_ce = (_label_loss(log_p, labels) for log_p in logs)
        full, tier = (log_p.exp_() for log_p in logs)
        distance = tier - full
        tv = (distance.abs().sum(-1) / 2).where(labels.valid_N, 0).sum()
        pull = distance.sign_().mul_(tv_weight / 2)
        pull = pull.sub_(labels.total(torch.linalg.vecdot(tier, pull))[:, None]).mul_(tier)
        gradients = [_minus_one_at(full, labels), _minus_one_at(tier, labels).add_(pull)]
        return [full_ce + tier_ce + tv_weight * tv, full_ce, tier_ce, tv], gradients

    return terms


def cross_entropy(vocabulary: VocabularyShard | None = None) -> ChunkLoss:
    """CE; reports nothing beside it."""
    return _from_terms(cross_entropy_terms, vocabulary)


def distillation(ce_weight: float, kl_weight: float, vocabulary: VocabularyShard | None = None) -> ChunkLoss:
    """ce_weight CE + kl_weight KL(teacher || student) of student and teacher; reports CE and KL."""
    return _from_terms(distillation_terms(ce_weight, kl_weight), vocabulary)


def refinement(tv_weight: float, vocabulary: VocabularyShard | None = None) -> ChunkLoss:
    """CE(full) + CE(tier) + tv_weight TV of full and tier; reports all three."""
    return _from_terms(refinement_terms(tv_weight), vocabulary)


def _from_terms(terms: Terms, vocabulary: VocabularyShard | None) -> ChunkLoss:
    def loss(
        logits: list[Tensor], labels_N: Tensor, sums: Tensor, grad_scale: Tensor | None, differentiate: bool
    ) -> Sequence[Tensor]:
        dtype = logits[0].dtype
        valid_N = labels_N != IGNORED
        labels_N = labels_N.where(valid_N, 0)
        if vocabulary is None:
            labels = Labels(labels_N, valid_N, valid_N, lambda own_N: own_N)
            logs = [F.log_softmax(logits.pop(0), dim=-1, dtype=sums.dtype) for _ in range(len(logits))]
        else:
            row_N, mine_N = labels_N // vocabulary.tp, labels_N % vocabulary.tp == vocabulary.rank
            here_N = mine_N & (row_N >= 0) & (row_N < logits[0].shape[1])
            labels = Labels(row_N.where(here_N, 0), here_N & valid_N, valid_N, vocabulary.sum_)
            logs = [logits.pop(0).to(sums.dtype) for _ in range(len(logits))]
            outside_N = _normalise(logs, mine_N & ~here_N, vocabulary)
            if not outside_N.is_cuda and outside_N.any():
                raise IndexError(f"label {labels_N[outside_N][0]} is out of the vocabulary")
        chunk_sums, gradients = terms(logs, labels)
        sums += torch.stack(list(chunk_sums))
        if not differentiate:
            return ()
        if grad_scale is not None:
            gradients = [gradient.mul_(grad_scale) for gradient in gradients]
        return [gradient.masked_fill_(~valid_N[:, None], 0).to(dtype) for gradient in gradients]

    return loss


def _normalise(logits: Sequence[Tensor], outside_N: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Turn logits [N, V] of every head input into log-probabilities, in place, by one exchange.

    outside_N: which labels this rank knows to be none of the vocabulary's. Returned: which labels any rank knows; what
    becomes of their positions is NaN.
    """
    own = [outside_N.to(logits[0].dtype)]
    for logits_NV in logits:
        largest_N = logits_NV.amax(-1)
        own += [largest_N, logits_NV.sub_(largest_N[:, None]).exp().sum(-1)]
    outside_RN, *pairs = vocabulary.gather(torch.stack(own)).unbind(1)
    outside_N = outside_RN.any(0)
    for logits_NV, largest_RN, sum_RN in zip(logits, pairs[::2], pairs[1::2], strict=True):
        largest_N = largest_RN.amax(0)
        sum_N = (sum_RN * (largest_RN - largest_N).exp()).sum(0).masked_fill(outside_N, torch.nan)
        logits_NV.sub_((largest_N - largest_RN[vocabulary.rank] + sum_N.log())[:, None])
    return outside_N
