"""Ordering the feed-forward units by importance (section 5), so that a tier keeps the units that matter most.

Knows nothing of optimizers: `UnitStatistics` gathers the activations' mean squares, `unit_order` turns them into a
permutation, and the engine applies it to whatever holds one row a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.config import ModelConfig


class UnitStatistics:
    """A running mean, per layer and unit, of the squared activation over full-capacity tokens.

    One update a step with the mean over all of that step's tokens, so that it does not depend on how the step was
    cut into micro-batches. A teacher's, a recomputed and a reduced forward never count.
    """

    def __init__(self, config: ModelConfig, decay: float, device: torch.device) -> None:
        self.decay = decay
        self.mean_square_LN = torch.zeros(config.n_layers, config.ff_width, device=device)
        self.square_sums_LN = torch.zeros_like(self.mean_square_LN)
        """This step's sums of squared activations, which the model's full-capacity passes add to."""
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """Say that a pass over `tokens` tokens has added to `square_sums_LN`."""
        self._tokens += tokens

    def end_step(self) -> None:
        """Fold the step's mean into the running one; a step with no full-capacity token changes nothing."""
        if self._tokens:
            self.mean_square_LN.lerp_(self.square_sums_LN / self._tokens, 1.0 - self.decay)
            self.square_sums_LN.zero_()
            self._tokens = 0

    def permute(self, layer: int, order_N: Tensor) -> None:
        """Reorder a layer's units."""
        self.mean_square_LN[layer] = self.mean_square_LN[layer, order_N]


def unit_order(mean_square_N: Tensor, down_ND: Tensor) -> Tensor:
    """int64 [N]: units by falling importance, mean squared activation times |down column|^2; ties keep their order."""
    score_N = mean_square_N.double() * down_ND.detach().double().square().sum(1)
    return torch.argsort(score_N, descending=True, stable=True)


def orders_after(completed_steps: int, total_steps: int, interval: int, until: float) -> bool:
    """Whether the units are ordered once `completed_steps` of `total_steps` are done."""
    return interval > 0 and completed_steps % interval == 0 and 0 < completed_steps < until * total_steps
