"""The two-rate capacity map (section 4): from a budget to a channel count and a feed-forward width.

Knows nothing of tensors. A capacity is resolved against the *family's* full sizes, so that a tier's name means the
same in an export as in the model it was cut from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_essh.config import ElasticConfig, ModelConfig
from megatron_essh.errors import UserError


@dataclass(frozen=True, order=True)
class Capacity:
    """A prefix of the model: its first `channels` spectral channels and first `ff_width` feed-forward units."""

    channels: int
    ff_width: int

    def __str__(self) -> str:
        return f"{self.channels},{self.ff_width}"

    def fits(self, model: ModelConfig) -> bool:
        """Whether `model` holds this prefix."""
        return 1 <= self.channels <= model.channels and 1 <= self.ff_width <= model.ff_width


def full_capacity(model: ModelConfig) -> Capacity:
    """All that `model` holds."""
    return Capacity(model.channels, model.ff_width)


def budget_capacity(model: ModelConfig, elastic: ElasticConfig, budget: int) -> Capacity:
    """The capacity of `budget` / `elastic.budget_denominator`, capped at one (paper, equation 7).

    K = max(1, floor(K_full xi^a + 1/2)) and n = 64 max(1, floor(n_full xi^b / 64)), never above the full width.
    """
    full_channels = model.family_channels or model.channels
    full_width = model.family_ff_width or model.ff_width
    xi = min(1.0, budget / elastic.budget_denominator)
    if xi == 1.0:
        return Capacity(full_channels, full_width)
    channels = max(1, math.floor(full_channels * xi**elastic.channel_exponent + 0.5))
    ff_width = 64 * max(1, math.floor(full_width * xi**elastic.ff_exponent / 64))
    return Capacity(channels, min(ff_width, full_width))


def tier_capacities(model: ModelConfig, elastic: ElasticConfig) -> dict[str, Capacity]:
    """The deployment tiers by name: {"T1": ..., "T2": ..., ...}."""
    return {f"T{i + 1}": budget_capacity(model, elastic, budget) for i, budget in enumerate(elastic.tiers)}


def parse_capacity(text: str, model: ModelConfig, elastic: ElasticConfig) -> Capacity:
    """A capacity from what a user types: a tier's name, `full`, or `K,n`.

    Raises:
        UserError: no such tier, not two integers, or more than `model` holds.
    """
    tiers = tier_capacities(model, elastic)
    if text == "full":
        return full_capacity(model)
    if text in tiers:
        capacity = tiers[text]
    else:
        parts = text.split(",")
        if len(parts) != 2 or not all(p.strip().isdecimal() for p in parts):
            raise UserError(f"capacity {text!r}: expected a tier (T1 to T{len(tiers)}), full, or K,n such as 8,448")
        capacity = Capacity(int(parts[0]), int(parts[1]))
    if not capacity.fits(model):
        raise UserError(
            f"capacity {text!r}: {capacity.channels} channels and {capacity.ff_width} feed-forward units; this model "
            f"holds 1 to {model.channels} channels and 1 to {model.ff_width} units"
        )
    return capacity
