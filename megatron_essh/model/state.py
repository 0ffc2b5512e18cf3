"""What a sequence carries from token to token: spectral states, a ring of keys and values, its position (section 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ModelState:
    """The state of a batch of sequences. `prefill` and `step` update it in place; `clone` forks it.

    A request starts from `LanguageModel.init_state`: zero states, an empty ring, position 0.
    """

    spectral: list[Tensor]
    """[B, K_T, m, 2, P] fp32, one a spectral layer."""
    keys: list[Tensor]
    """[B, W, H, head_dim], rotated, one an attention layer; the key of position p lies in slot p mod W."""
    values: list[Tensor]
    """[B, W, H, head_dim], one an attention layer."""
    key_position_BW: Tensor
    """int64 position of the key in each slot, -1 where the slot is empty; shared by the attention layers."""
    position_B: Tensor
    """int64 number of tokens each sequence has taken in."""

    def clone(self) -> ModelState:
        """An independent copy."""
        return ModelState(
            [s.clone() for s in self.spectral],
            [k.clone() for k in self.keys],
            [v.clone() for v in self.values],
            self.key_position_BW.clone(),
            self.position_B.clone(),
        )

    def select(self, index: Tensor) -> ModelState:
        """An independent copy of the sequences `index` (int64 [B'])."""
        return ModelState(
            [s[index] for s in self.spectral],
            [k[index] for k in self.keys],
            [v[index] for v in self.values],
            self.key_position_BW[index],
            self.position_B[index],
        )

    def nbytes(self) -> tuple[int, int]:
        """Bytes of the spectral states and of the keys and values."""
        return (
            sum(s.numel() * s.element_size() for s in self.spectral),
            sum(t.numel() * t.element_size() for t in [*self.keys, *self.values]),
        )


@dataclass(frozen=True)
class RingUpdate:
    """Where the tokens of one call stand, for the attention layers of that call."""

    q_position_BT: Tensor
    """int64 position of each token; of a pad, that of the last token before it."""
    k_position_BS: Tensor
    """int64 positions of the ring's keys, then of this call's keys; -1 where there is none."""
    batch_N: Tensor
    """int64 sequence of each token that is no pad."""
    token_N: Tensor
    """int64 place in this call of each token that is no pad."""
    slot_N: Tensor
    """int64 ring slot of each token that is no pad."""


def advance(state: ModelState, valid_BT: Tensor) -> RingUpdate:
    """Give the tokens of a call their positions and slots; `state`'s positions move on, its tensors do not yet.

    At most W tokens a call, so that no two of them share a slot.
    """
    window = state.key_position_BW.shape[1]
    counted_BT = valid_BT.cumsum(1)
    q_position_BT = (state.position_B[:, None] + counted_BT - 1).clamp_min(0)
    own_position_BT = torch.where(valid_BT, q_position_BT, -1)
    k_position_BS = torch.cat([state.key_position_BW, own_position_BT], dim=1)
    batch_N, token_N = valid_BT.nonzero(as_tuple=True)
    position_N = q_position_BT[batch_N, token_N]
    slot_N = position_N % window if window else position_N
    if window:
        state.key_position_BW[batch_N, slot_N] = position_N
    state.position_B = state.position_B + counted_BT[:, -1]
    return RingUpdate(q_position_BT, k_position_BS, batch_N, token_N, slot_N)
