"""Which unit lives where: unit u of every sharded dimension is unit u div tp of rank u mod tp (section 7).

Channels, feed-forward units, attention heads and vocabulary entries are dealt out in turn. Then the first n units of
the whole are a prefix of every rank's own units, so that a tier is a prefix on every rank, and every rank holds its
fair share of every tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def local_count(units: int, rank: int, tp: int) -> int:
    """How many of the first `units` units rank `rank` of `tp` holds; 0 is possible."""
    return (units - rank + tp - 1) // tp


@dataclass(frozen=True)
class Sharding:
    """How a parameter is dealt out: along its first dimension, in units of `rows` rows each."""

    units: int
    """Units of the whole parameter."""
    rows: int = 1
    """Rows of the first dimension that make a unit (values of a channel, or of a head, in an output projection)."""

    def local_rows(self, rank: int, tp: int) -> int:
        """Rows of the first dimension that a rank holds."""
        return local_count(self.units, rank, tp) * self.rows

    def take(self, whole: Tensor, rank: int, tp: int) -> Tensor:
        """A rank's part of the whole parameter, contiguous and of its own memory; of one rank, the whole itself."""
        if tp == 1:
            return whole
        return whole.unflatten(0, (self.units, self.rows))[rank::tp].flatten(0, 1).contiguous()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks, in their order."""
        if len(parts) == 1:
            return parts[0]
        whole = torch.empty(self.units, self.rows, *parts[0].shape[1:], dtype=parts[0].dtype, device=parts[0].device)
        for rank, part in enumerate(parts):
            units = local_count(self.units, rank, len(parts))
            whole[rank :: len(parts)] = part.reshape(units, self.rows, *part.shape[1:])
        return whole.flatten(0, 1)
