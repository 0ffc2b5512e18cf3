"""From logits to the next token: repetition penalty, temperature, top-k, top-p, min-p.

Pure functions: the uniform numbers that decide a draw are arguments, so a text depends on its seed alone, not
on what else is in the batch or on a device's random generator. This is the definition; `device_sampling` draws by it
without sorting. Knows nothing of models or tokenizers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_essh.errors import UserError

MOST_PENALTY = 1000.0
"""Largest repetition penalty, and one over the smallest: fp32 logits stay finite."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn. All apply in this order: penalty, temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    """Divides the logits. 0 takes the most probable token, the lowest id among equals."""
    top_k: int | None = None
    """Keep the k most probable tokens; of equals at the edge, the lower ids. None, or over V, keeps all."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose mass reaches p (at least one); 1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens at least this share as probable as the most probable one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens that are in the text or its prompt."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature: {self.temperature} is not a finite number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k: {self.top_k} keeps no token; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p} must lie above 0 and at most at 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p: {self.min_p} must lie in 0 to 1")
        if not 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise UserError(
                f"repetition_penalty: {self.repetition_penalty} must lie in {1 / MOST_PENALTY:g} to {MOST_PENALTY:g}"
            )


def penalised(logits_BV: Tensor, seen_BV: Tensor, penalty: float | Tensor) -> Tensor:
    """The logits with those of seen tokens (bool [B, V]) made smaller, in their dtype; `penalty` may be [B, 1]."""
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def token_probabilities(
    logits_BV: Tensor, config: SamplingConfig, *, real_V: Tensor | None = None, seen_BV: Tensor | None = None
) -> Tensor:
    """The distribution that `draw` samples.

    Args:
        logits_BV: [B, V], any floating dtype.
        config: temperature and filters.
        real_V: bool [V], False for entries that stand for no token (vocabulary padding): they get probability
            zero. None: every entry is a token.
        seen_BV: bool [B, V], the tokens that the repetition penalty is for. None: none.

    Returns:
        [B, V] float64; every row sums to one. At temperature 0 all mass is on one token.

    Raises:
        UserError: a logit of a real token is NaN or +inf, or all of them are -inf.
    """
    if seen_BV is not None and config.repetition_penalty != 1:
        logits_BV = penalised(logits_BV, seen_BV, config.repetition_penalty)
    scores_BV = logits_BV.double()
    if real_V is not None:
        scores_BV = scores_BV.masked_fill(~real_V, -torch.inf)
    top_B1 = scores_BV.amax(dim=-1, keepdim=True)  # NaN where any is NaN
    if not bool(torch.isfinite(top_B1).all()):
        raise UserError("logits: not finite, so no token can be drawn; the model's weights or activations blew up")
    if config.temperature == 0:
        probabilities_BV = torch.zeros_like(scores_BV)
        return probabilities_BV.scatter_(-1, scores_BV.argmax(dim=-1, keepdim=True), 1.0)
    # Centred before the division: a tiny temperature must sharpen, not overflow.
    return _filter(((scores_BV - top_B1) / config.temperature).softmax(dim=-1), config)


def _filter(probabilities_BV: Tensor, config: SamplingConfig) -> Tensor:
    vocabulary = probabilities_BV.shape[-1]
    top_k = min(config.top_k or vocabulary, vocabulary)
    if top_k == vocabulary and config.top_p == 1 and config.min_p == 0:
        return probabilities_BV
    # Stable: equals stay in the order of their ids.
    sorted_BV, ids_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BV[:, top_k:] = 0
    if config.top_p < 1:
        sorted_BV = sorted_BV / sorted_BV.sum(dim=-1, keepdim=True)
        dropped_BV = torch.zeros_like(sorted_BV, dtype=torch.bool)  # the most probable always stays
        dropped_BV[:, 1:] = sorted_BV.cumsum(dim=-1)[:, :-1] >= config.top_p
        sorted_BV = sorted_BV.masked_fill(dropped_BV, 0)
    sorted_BV = sorted_BV.masked_fill(sorted_BV < config.min_p * sorted_BV[:, :1], 0)
    kept_BV = torch.zeros_like(probabilities_BV).scatter_(-1, ids_BV, sorted_BV)
    return kept_BV / kept_BV.sum(dim=-1, keepdim=True)


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Invert each row's cumulative distribution at its uniform number.

    Args:
        probabilities_BV: [B, V] float64, rows summing to one.
        uniform_B: [B] float64 in [0, 1).

    Returns:
        [B] int64 token ids, none of probability zero.
    """
    cumulative_BV = probabilities_BV.cumsum(dim=-1)
    target_B1 = uniform_B.to(probabilities_BV)[:, None] * cumulative_BV[:, -1:]
    ids_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    # A GPU sums in parallel, and rounding there may put a target past the last token that has any probability.
    positions_V = torch.arange(probabilities_BV.shape[-1], device=probabilities_BV.device)
    last_B1 = torch.where(probabilities_BV > 0, positions_V, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(ids_B1, last_B1)[:, 0]
