"""Ordering the feed-forward units by importance (section 5), so that a tier keeps the units that matter most.

Knows nothing of optimizers: `UnitStatistics` gathers the activations' mean squares, `unit_scores` and `unit_order` turn
them into a permutation, and the engine applies it to whatever holds one row a unit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_essh.config import ModelConfig


class UnitStatistics:
    """A running mean, per layer and unit, of the squared activation over full-capacity tokens.

    One update a step with the mean over all of that step's tokens, so that it does not depend on how the step was
    cut into micro-batches. A teacher's, a recomputed and a reduced forward never count.

    Args:
        width: units that this rank holds; None: all of the model's.
    """

    def __init__(self, config: ModelConfig, decay: float, device: torch.device, *, width: int | None = None) -> None:
        self.decay = decay
        units = config.ff_width if width is None else width
        self.mean_square_LN = torch.zeros(config.n_layers, units, device=device)
        self.square_sums_LN = torch.zeros_like(self.mean_square_LN)
        """This step's sums of squared activations, which the model's full-capacity passes add to."""
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """Say that a pass over `tokens` tokens has added to `square_sums_LN`, on this rank or another replica."""
        self._tokens += tokens

    def discard(self) -> None:
        """Forget this step's sums: its update was skipped."""
        self.square_sums_LN.zero_()
        self._tokens = 0

    def end_step(self, replicas: dist.ProcessGroup | None = None) -> None:
        """Fold the step's mean into the running one; a step with no full-capacity token changes nothing.

        replicas: the group over which each has added its own sums.
        """
        if self._tokens:
            if replicas is not None:
                dist.all_reduce(self.square_sums_LN, group=replicas)
            self.mean_square_LN.lerp_(self.square_sums_LN / self._tokens, 1.0 - self.decay)
            self.square_sums_LN.zero_()
            self._tokens = 0


def unit_scores(mean_square_N: Tensor, down_ND: Tensor) -> Tensor:
    """fp64 [N]: the units' importance, mean squared activation times |down column|^2."""
    return mean_square_N.double() * down_ND.detach().double().square().sum(1)


def unit_order(score_N: Tensor) -> Tensor:
    """int64 [N]: units by falling importance; ties keep their order."""
    return torch.argsort(score_N, descending=True, stable=True)


def orders_after(completed_steps: int, total_steps: int, interval: int, until: float) -> bool:
    """Whether the units are ordered once `completed_steps` of `total_steps` are done."""
    return interval > 0 and completed_steps % interval == 0 and 0 < completed_steps < until * total_steps
