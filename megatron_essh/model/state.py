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
    """Where the tokens of one call stand, for the attention layers of that call; pads may be among them."""

    q_position_BT: Tensor
    """int64 position of each token; of a pad, that of the last token before it."""
    k_position_BS: Tensor
    """int64 positions of the ring's keys, then of this call's keys; -1 where there is none."""
    batch_N: Tensor
    """int64 sequence of each token that the ring keeps."""
    token_N: Tensor
    """int64 place in this call of each token that the ring keeps."""
    slot_N: Tensor
    """int64 ring slot of each token that the ring keeps."""

    @property
    def position(self) -> Tensor:
        """int64 [B, T] position of each token, for its rotary angle."""
        return self.q_position_BT

    def seen(self, ring_BWHD: Tensor, new_BTHD: Tensor) -> Tensor:
        """The keys, or values, that attention is given: those of the ring in its order, then the new ones."""
        return torch.cat([ring_BWHD, new_BTHD], dim=1)

    def write(self, ring_BWHD: Tensor, new_BTHD: Tensor) -> None:
        """Put the new keys, or values, into the ring."""
        ring_BWHD[self.batch_N, self.slot_N] = new_BTHD[self.batch_N, self.token_N]


@dataclass(frozen=True)
class OrderedUpdate:
    """The same for sequences that all stand at one position and have no pads: keys come in order, slots are ranges."""

    position: Tensor
    """int64 [T] position of each token, the same in every sequence, for its rotary angle."""
    start: int
    """Tokens that every sequence has taken in before."""
    q_position_BT: None = None
    """Attention needs no positions: the queries are the last of the keys."""
    k_position_BS: None = None

    def seen(self, ring_BWHD: Tensor, new_BTHD: Tensor) -> Tensor:
        """The ring's keys, or values, that a new query may see, in the order of their positions, then the new ones."""
        window = ring_BWHD.shape[1]
        # The key W before the first new one is seen by nobody; while the ring is not full, nothing has wrapped.
        first = max(0, self.start - window + 1)
        return torch.cat([*(ring_BWHD[:, slots] for slots in _slots(first, self.start, window)), new_BTHD], dim=1)

    def write(self, ring_BWHD: Tensor, new_BTHD: Tensor) -> None:
        """Put the last of the new keys, values or positions into the ring, [B, W, ...] from [B, T, ...]."""
        window = ring_BWHD.shape[1]
        end = self.start + new_BTHD.shape[1]
        place = max(0, new_BTHD.shape[1] - window)
        for slots in _slots(self.start + place, end, window):
            taken = slots.stop - slots.start
            ring_BWHD[:, slots] = new_BTHD[:, place : place + taken]
            place += taken


@dataclass(frozen=True)
class PaddedStart:
    """The same for sequences that begin with this call and end in pads: the device alone knows how long they are."""

    position: Tensor
    """int64 [T] position of each token, the same in every sequence, for its rotary angle."""
    place_BW: Tensor
    """int64 place in this call of the token that each ring slot keeps; 0 where the slot stays empty."""
    empty_BW: Tensor
    """bool."""
    q_position_BT: None = None
    """Attention needs no positions: no token sees the pads, which come after it."""
    k_position_BS: None = None

    def seen(self, ring_BWHD: Tensor, new_BTHD: Tensor) -> Tensor:
        """The keys, or values, that attention is given: the new ones, since the ring is empty."""
        return new_BTHD

    def write(self, ring_BWHD: Tensor, new_BTHD: Tensor) -> None:
        """Put the last of the new keys, or values, into the ring, and zeros where there are none."""
        kept_BWHD = torch.take_along_dim(new_BTHD, self.place_BW[..., None, None], dim=1)
        ring_BWHD.copy_(kept_BWHD.masked_fill(self.empty_BW[..., None, None], 0))


def _slots(first: int, end: int, window: int) -> list[slice]:
    """The ring slots of positions first to end - 1, at most W of them, as ranges in the order of the positions."""
    if first >= end or window == 0:
        return []
    begin, stop = first % window, (end - 1) % window + 1
    return [slice(begin, stop)] if begin < stop else [slice(begin, window), slice(0, stop)]


def advance(state: ModelState, valid_BT: Tensor) -> RingUpdate:
    """Give the tokens of a call their positions and slots; `state`'s positions move on, its tensors do not yet.

    The ring keeps the last W tokens of each sequence, so that no two tokens of a call share a slot.
    """
    window, length = state.key_position_BW.shape[1], valid_BT.shape[1]
    counted_BT = valid_BT.cumsum(1)
    q_position_BT = (state.position_B[:, None] + counted_BT - 1).clamp_min(0)
    own_position_BT = torch.where(valid_BT, q_position_BT, -1)
    k_position_BS = torch.cat([state.key_position_BW, own_position_BT], dim=1)
    state.position_B = state.position_B + counted_BT[:, -1]
    kept_BT = valid_BT
    if 0 < window < length:
        kept_BT = valid_BT & (q_position_BT >= state.position_B[:, None] - window)
    batch_N, token_N = kept_BT.nonzero(as_tuple=True)
    position_N = q_position_BT[batch_N, token_N]
    slot_N = position_N % window if window else position_N
    if window:
        state.key_position_BW[batch_N, slot_N] = position_N
    return RingUpdate(q_position_BT, k_position_BS, batch_N, token_N, slot_N)


def advance_together(state: ModelState, start: int, length: int) -> OrderedUpdate:
    """`advance` for `length` tokens, none a pad, of sequences that have all taken in `start`: waits for no device."""
    position_T = torch.arange(start, start + length, device=state.position_B.device)
    update = OrderedUpdate(position_T, start)
    update.write(state.key_position_BW, position_T.expand(len(state.position_B), -1))
    state.position_B = state.position_B + length
    return update


def ring_positions(count_B: Tensor, window: int) -> Tensor:
    """int64 [B, W]: which position each ring slot holds once `count_B` tokens were taken in, the last that falls on it;
    -1 for none."""
    last_B1 = count_B[:, None] - 1
    kept_BW = last_B1 - (last_B1 - torch.arange(window, device=count_B.device)) % max(window, 1)
    return kept_BW.clamp_min(-1)


def start_padded(state: ModelState, count_B: Tensor, length: int) -> tuple[PaddedStart, Tensor]:
    """`advance` for sequences that begin with a call of `length` places, the first `count_B` of which are no pads.

    Waits for no device. Returns the update and valid_BT, True where there is no pad.
    """
    position_T = torch.arange(length, device=count_B.device)
    state.key_position_BW = ring_positions(count_B, state.key_position_BW.shape[1])
    state.position_B = count_B.clone()
    empty_BW = state.key_position_BW < 0
    return PaddedStart(position_T, state.key_position_BW.clamp_min(0), empty_BW), position_T < count_B[:, None]


def common_start(state: ModelState, valid_BT: Tensor | None) -> int | None:
    """The number of tokens that every sequence has taken in; None where they differ or a coming token is a pad.

    Waits for the device.
    """
    given = torch.stack(torch.aminmax(state.position_B))
    if valid_BT is not None:
        given = torch.cat([given, valid_BT.all()[None]])
    least, most, *whole = given.tolist()
    return int(least) if least == most and all(whole) else None
