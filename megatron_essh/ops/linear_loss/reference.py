"""Losses from hidden states and the output head, in chunks of positions (specification, section 5).

The logits [N, V] of a long micro-batch are the peak of memory, so they are never there at once: a chunk's logits,
its log-softmax in fp32 and its share of the gradients are done before the next chunk begins. The gradients are taken
on the way forward, which spares the backward pass a second product with the head, and wait there as a
[N, D] and a [V, D] tensor.

Shape suffixes: N positions, D residual width, V vocabulary. Labels are int64; a position whose label is `IGNORED`
takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Label of a position that is not to be predicted."""

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


class _LinearLoss(torch.autograd.Function):
    """The objective of `terms`, which carries the gradient, and the parts to report, which do not."""

    @staticmethod
    def forward(
        ctx: Any, terms: Terms, parts: int, chunk: int | None, labels_N: Tensor, weight_VD: Tensor, *hidden_ND: Tensor
    ) -> tuple[Tensor, ...]:
        device = weight_VD.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight_VD.dtype
        exact = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        wants_weight, *wants_hidden = ctx.needs_input_grad[4:]
        grad_weight = torch.zeros_like(weight_VD, dtype=exact) if wants_weight else None
        grad_hidden = [
            torch.zeros_like(h) if wanted else None for h, wanted in zip(hidden_ND, wants_hidden, strict=True)
        ]
        sums = weight_VD.new_zeros(1 + parts, dtype=exact)

        with torch.autocast(device.type, enabled=False):
            head_VD = weight_VD.to(dtype)
            for start in range(0, len(labels_N), chunk or len(labels_N) or 1):
                rows = slice(start, start + (chunk or len(labels_N)))
                inputs = [h[rows].to(dtype) for h in hidden_ND]
                valid = labels_N[rows] != IGNORED
                labels = labels_N[rows].where(valid, 0)
                logs = [F.log_softmax(F.linear(x, head_VD), dim=-1, dtype=exact) for x in inputs]
                chunk_sums, gradients = terms(logs, labels, valid)
                sums += torch.stack(list(chunk_sums))
                if not any(ctx.needs_input_grad):
                    continue
                # Inputs behind those with a gradient are teachers.
                for x, gradient, out in zip(inputs, gradients, grad_hidden, strict=False):
                    gradient = gradient.masked_fill_(~valid[:, None], 0).to(dtype)
                    if out is not None:
                        out[rows] = gradient @ head_VD
                    if grad_weight is not None:
                        if dtype == exact:
                            grad_weight.addmm_(gradient.T, x)
                        else:
                            grad_weight += gradient.T @ x
        ctx.gradients = (grad_weight, *grad_hidden)
        ctx.weight_dtype = weight_VD.dtype
        objective, *reported = sums.unbind()
        ctx.mark_non_differentiable(*reported)
        return objective, *reported

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outgoing: Tensor) -> tuple[Tensor | None, ...]:
        scale = outgoing[0]
        grad_weight, *grad_hidden = (None if g is None else g * scale.to(g.dtype) for g in ctx.gradients)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return None, None, None, None, grad_weight, *grad_hidden


def linear_loss(
    terms: Terms, parts: int, chunk: int | None, labels_N: Tensor, weight_VD: Tensor, *hidden_ND: Tensor
) -> tuple[Tensor, ...]:
    """`terms` of the head's distributions at the given hidden states, summed over valid positions, 0-d each.

    Logits are computed in the autocast dtype where autocast is on, else in the weight's; log-softmax, sums and the
    weight's accumulated gradient in fp32 (fp64 stays fp64). `chunk` is the number of positions at a time; None takes
    all at once. Only the first result, the objective, carries a gradient.
    """
    assert chunk is None or chunk > 0, f"chunk must be positive or None, got {chunk}"
    results: tuple[Tensor, ...] = _LinearLoss.apply(terms, parts, chunk, labels_N, weight_VD, *hidden_ND)
    return results
