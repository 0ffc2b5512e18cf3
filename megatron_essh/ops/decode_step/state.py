"""What sequences carry from token to token while they are decoded, in slots that they enter and leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Scaled(NamedTuple):
    """A residual stream times the weights of the norm that reads it next, as whoever wrote the stream left it."""

    u_BD: Tensor
    """x times the norm's weights, in the activations' dtype; what it lacks is the norm's scale of each row."""
    squares_TB: Tensor
    """fp32, whose sum over T is the sum of x's squares."""


@dataclass(frozen=True)
class DecodeState:
    """The states of S slots. A step reads and writes some of them, in place, at addresses that never change.

    The key of position p lies in ring slot p mod W; a sequence that has taken in n tokens has min(n, W) of them.
    """

    spectral_LSKM2P: Tensor
    """fp32 [spectral layers, S, K, M, 2, P]."""
    keys_LSHWE: Tensor
    """[attention layers, S, H, W, head_dim], rotated."""
    values_LSHWE: Tensor
    """As the keys."""
    position_S: Tensor
    """int64 tokens that each slot's sequence has taken in."""

    @property
    def slots(self) -> int:
        return self.position_S.shape[0]

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the spectral states and of the keys and values."""
        kv = (self.keys_LSHWE, self.values_LSHWE)
        return (
            self.spectral_LSKM2P.numel() * self.spectral_LSKM2P.element_size(),
            sum(t.numel() * t.element_size() for t in kv),
        )
