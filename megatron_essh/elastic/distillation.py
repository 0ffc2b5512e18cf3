"""What one micro-batch minimises in pretraining and in shared refinement (section 5).

All losses are sums over valid tokens; the engine divides by the step's token count. To each it may hand the factor
that this comes to, as `grad_scale` (0-d fp32, on the model's device): gradients are then made with it on the way
forward, where the head's is added to its `main_grad` at once, and the values stay sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.prefix import GradientScale
from megatron_essh.ops.linear_loss import cross_entropy, distillation, refinement


@dataclass(frozen=True)
class MicroLoss:
    """Sums over a micro-batch's valid tokens; only `objective` carries a gradient."""

    objective: Tensor
    """What is minimised. Made with a `grad_scale`, its gradients have that factor already: call objective.backward()
    itself, once, not of a multiple or a sum of it."""
    cross_entropy: Tensor
    """Cross-entropy of the capacity that the plan gave the micro-batch."""
    full_cross_entropy: Tensor | None = None
    """Cross-entropy of the full capacity, in refinement."""
    divergence: Tensor | None = None
    """KL (pretraining) or total variation (refinement) from the full prediction."""


def reduced_gradient_scale(config: RunConfig) -> GradientScale:
    """The factors on a reduced capacity's weight gradients."""
    return GradientScale(config.elastic.ff_gradient_scale, config.elastic.mixer_gradient_scale)


def full_loss(
    model: LanguageModel,
    config: RunConfig,
    inputs_BT: Tensor,
    labels_BT: Tensor,
    documents_BT: Tensor | None,
    square_sums_LN: Tensor | None,
    *,
    grad_scale: Tensor | None = None,
) -> MicroLoss:
    """A full-capacity micro-batch: CE. `square_sums_LN`: as `LanguageModel.hidden` takes it."""
    hidden = model.hidden(inputs_BT, documents_BT=documents_BT, square_sums_LN=square_sums_LN)
    ce = cross_entropy(
        hidden.flatten(0, 1),
        model.head_weight,
        labels_BT.flatten(),
        chunk=config.training.loss_chunk,
        grad_scale=grad_scale,
        vocabulary=model.partition.vocabulary,
    )
    return MicroLoss(ce, ce.detach())


def reduced_loss(
    model: LanguageModel,
    config: RunConfig,
    inputs_BT: Tensor,
    labels_BT: Tensor,
    documents_BT: Tensor | None,
    capacity: Capacity,
    *,
    grad_scale: Tensor | None = None,
) -> MicroLoss:
    """A reduced micro-batch: CE(p_T) + w KL(stopgrad p_full || p_T), the teacher being the current full model."""
    elastic, chunk = config.elastic, config.training.loss_chunk
    hidden = model.hidden(
        inputs_BT, capacity, documents_BT=documents_BT, gradient_scale=reduced_gradient_scale(config)
    ).flatten(0, 1)
    labels = labels_BT.flatten()
    if elastic.kl_weight == 0:
        weight = elastic.reduced_ce_weight
        # A gradient made on the way forward does not see the product below.
        scale = None if grad_scale is None else weight * grad_scale
        ce = cross_entropy(
            hidden,
            model.head_weight,
            labels,
            chunk=chunk,
            grad_scale=scale,
            vocabulary=model.partition.vocabulary,
        )
        return MicroLoss(weight * ce, ce.detach())
    with torch.no_grad():
        teacher = model.hidden(inputs_BT, documents_BT=documents_BT).flatten(0, 1)
    objective, ce, kl = distillation(
        hidden,
        teacher,
        model.head_weight,
        labels,
        ce_weight=elastic.reduced_ce_weight,
        kl_weight=elastic.kl_weight,
        chunk=chunk,
        grad_scale=grad_scale,
        vocabulary=model.partition.vocabulary,
    )
    return MicroLoss(objective, ce, divergence=kl)


def refinement_loss(
    model: LanguageModel,
    config: RunConfig,
    inputs_BT: Tensor,
    labels_BT: Tensor,
    documents_BT: Tensor | None,
    capacity: Capacity,
    *,
    grad_scale: Tensor | None = None,
) -> MicroLoss:
    """A refinement micro-batch: CE(full) + CE(T) + w TV(stopgrad p_full, p_T); one full forward serves both."""
    full = model.hidden(inputs_BT, documents_BT=documents_BT)
    tier = model.hidden(inputs_BT, capacity, documents_BT=documents_BT, gradient_scale=reduced_gradient_scale(config))
    objective, full_ce, tier_ce, tv = refinement(
        full.flatten(0, 1),
        tier.flatten(0, 1),
        model.head_weight,
        labels_BT.flatten(),
        tv_weight=config.refinement.tv_weight,
        chunk=config.training.loss_chunk,
        grad_scale=grad_scale,
        vocabulary=model.partition.vocabulary,
    )
    return MicroLoss(objective, tier_ce, full_ce, tv)
