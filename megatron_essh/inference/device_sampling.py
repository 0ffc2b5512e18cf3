"""Drawing the next tokens of many sequences on the device, each with settings of its own; `sampling` is the definition.

Nothing is sorted and nothing is read on the host, so that the draws can be recorded as a CUDA graph. Two things make
them the same on every device and in every batch:

- a token's weight exp((score - highest) / temperature) is rounded to an integer share of the highest one's, 2^bits
  with as many bits as the sum over the vocabulary leaves (45 at 131,072 entries): sums have no order to depend on;
- the uniform number of a draw is a hash of the sequence's seed and the token's position, see `uniform`.

A token whose weight rounds to zero, 2^-46 of the most probable one's, is never drawn. That apart, a draw differs from
`sampling.draw` of the same uniform number only where rounding decides.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_essh.inference.recordings import send
from megatron_essh.inference.sampling import SamplingConfig, penalised
from megatron_essh.ops.selection import lowest_needed

MOST_BITS = 52
"""Bits of the highest weight where the vocabulary is small: those of a float64."""
NOT_FINITE = -1
"""What is drawn where a logit of a real token is NaN or +inf, or all are -inf."""

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64
"""splitmix64's constants, as int64."""


class Needs(NamedTuple):
    """What a batch's settings ask for; what no row needs is not computed."""

    draws: bool
    """A temperature above 0."""
    filters: bool
    """Top-k, top-p or min-p, at such a temperature."""
    penalises: bool
    """A repetition penalty."""

    @classmethod
    def of(cls, configs: list[SamplingConfig]) -> Needs:
        drawing = [c for c in configs if c.temperature > 0]
        return cls(
            bool(drawing),
            any(c.top_k is not None or c.top_p < 1 or c.min_p > 0 for c in drawing),
            any(c.repetition_penalty != 1 for c in configs),
        )


class RowSettings(NamedTuple):
    """The settings of B rows."""

    temperature_B: Tensor
    """float64; 0 takes the most probable token."""
    top_k_B: Tensor
    """int64; the vocabulary's size, or more, keeps all."""
    top_p_B: Tensor
    """float64."""
    min_p_B: Tensor
    """float64."""
    penalty_B: Tensor
    """fp32, the repetition penalty."""


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """float64 [B] in [0, 1): 53 bits of splitmix64(splitmix64(seed) + position), both int64.

    splitmix64(x) is the output function of Steele, Lea and Flood's generator after one step from state x.
    """
    bits_B = _splitmix(_splitmix(seed_B) + position_B * GOLDEN)
    return _shifted(bits_B, 11).double() * 2.0**-53


def _splitmix(x_B: Tensor) -> Tensor:
    x_B = x_B + GOLDEN
    x_B = (x_B ^ _shifted(x_B, 30)) * FIRST_FACTOR
    x_B = (x_B ^ _shifted(x_B, 27)) * SECOND_FACTOR
    return x_B ^ _shifted(x_B, 31)


def _shifted(x_B: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: int64 keeps its sign in `>>`."""
    return (x_B >> bits) & ((1 << (64 - bits)) - 1)


def draw_rows(
    logits_BV: Tensor,
    settings: RowSettings,
    uniform_B: Tensor,
    needs: Needs,
    *,
    real_V: Tensor | None = None,
    seen_BV: Tensor | None = None,
) -> Tensor:
    """The next token of each row, int64 [B]; `NOT_FINITE` where the logits allow none.

    Args:
        logits_BV: fp32.
        uniform_B: float64 in [0, 1), one a row.
        needs: at least what the rows' settings ask for.
        real_V: bool, False for entries that are never drawn. None: all may be.
        seen_BV: bool, what the repetition penalty is for; needed if `needs.penalises`.
    """
    if needs.penalises:
        assert seen_BV is not None
        logits_BV = penalised(logits_BV, seen_BV, settings.penalty_B[:, None])
    if real_V is not None:
        logits_BV = logits_BV.masked_fill(~real_V, -torch.inf)
    top_B1, token_B1 = logits_BV.max(dim=-1, keepdim=True)  # NaN where any is NaN
    if needs.draws:
        # Rows at temperature 0 are worked out at 1, and not used.
        greedy_B1 = settings.temperature_B[:, None] == 0
        temperature_B1 = torch.where(greedy_B1, 1.0, settings.temperature_B[:, None])
        weight_BV = ((logits_BV.double() - top_B1) / temperature_B1).exp().nan_to_num(0.0)
        bits = min(MOST_BITS, 62 - logits_BV.shape[-1].bit_length())
        mass_BV = (weight_BV * 2.0**bits).round().long()
        if needs.filters:
            kept_BV = _kept(logits_BV, mass_BV, settings)
            mass_BV = torch.where(kept_BV & (weight_BV >= settings.min_p_B[:, None]), mass_BV, 0)
        reached_BV = mass_BV.cumsum(-1)
        total_B1 = reached_BV[:, -1:]
        target_B1 = torch.minimum((uniform_B[:, None] * total_B1).long(), total_B1 - 1)
        token_B1 = torch.where(greedy_B1, token_B1, torch.searchsorted(reached_BV, target_B1, right=True))
    return torch.where(top_B1.isfinite(), token_B1, NOT_FINITE)[:, 0]


def _kept(logits_BV: Tensor, mass_BV: Tensor, settings: RowSettings) -> Tensor:
    """bool [B, V]: what top-k and then top-p keep."""
    order_BV = _ordered_bits(logits_BV)
    top_k_B1 = settings.top_k_B.clamp_max(logits_BV.shape[-1])[:, None]
    kept_BV = _leading(order_BV, torch.ones_like(mass_BV[:1, :1]).expand_as(mass_BV), top_k_B1)
    mass_BV = torch.where(kept_BV, mass_BV, 0)
    total_B1 = mass_BV.sum(-1, keepdim=True)
    needed_B1 = torch.minimum((settings.top_p_B[:, None] * total_B1).ceil().long().clamp_min(1), total_B1)
    return kept_BV & ((settings.top_p_B[:, None] == 1) | _leading(order_BV, mass_BV, needed_B1))


def _ordered_bits(logits_BV: Tensor) -> Tensor:
    """int32 in the order of the fp32 logits, equal where they are equal."""
    bits_BV = (logits_BV + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return torch.where(bits_BV < 0, bits_BV ^ 0x7FFFFFFF, bits_BV)


def _leading(order_BV: Tensor, amount_BV: Tensor, needed_B1: Tensor) -> Tensor:
    """bool [B, V]: the fewest entries, highest first and lower ids first among equals, whose amounts reach `needed`."""
    lowest_B1 = lowest_needed(order_BV, amount_BV, needed_B1)
    above_BV = order_BV > lowest_B1
    at_BV = order_BV == lowest_B1
    above_B1 = torch.where(above_BV, amount_BV, 0).sum(-1, keepdim=True)
    amount_at_BV = torch.where(at_BV, amount_BV, 0)
    before_BV = above_B1 + amount_at_BV.cumsum(-1) - amount_at_BV
    return above_BV | (at_BV & (before_BV < needed_B1))


class SlotSampling:
    """How each slot's sequence is sampled, and what it has come to. A row past the last slot is that of idle rows."""

    def __init__(self, slots: int, entries: int, device: torch.device, real_V: Tensor | None = None) -> None:
        self._slots, self._entries = slots, entries
        self._real_V = None if real_V is None else real_V.to(device)
        idle = torch.tensor(self._bits(SamplingConfig(temperature=0.0), 0), device=device)
        self._settings_S6 = idle.repeat(slots + 1, 1)
        """int64: the bits of temperature, top-p, min-p and repetition penalty, all float64; top-k; the seed."""
        # One of the host's would be waited for, and cannot be recorded.
        self._true = torch.ones((), dtype=torch.bool, device=device)
        self.token_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        """The last token of each slot's sequence, which the next step takes in."""
        self.seen_SV = torch.zeros(slots + 1, entries, dtype=torch.bool, device=device)
        """The tokens of each slot's sequence."""

    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(t.numel() * t.element_size() for t in (self._settings_S6, self.token_S, self.seen_SV))

    def _bits(self, config: SamplingConfig, seed: int) -> tuple[int, ...]:
        fractions = (config.temperature, config.top_p, config.min_p, config.repetition_penalty)
        top_k = min(config.top_k or self._entries, self._entries)
        return struct.unpack("=6q", struct.pack("=4d2q", *fractions, top_k, seed))

    def set(self, slot: int, config: SamplingConfig, seed: int) -> None:
        """Settings and seed of a slot's draws. Does not wait for the device."""
        send(self._bits(config, seed), self._settings_S6[slot])

    def begin(self, slot_1: Tensor, tokens_T: Tensor) -> None:
        """The tokens of a slot's sequence, whose last one is yet to be taken in. Nothing is read on the host.

        Args:
            slot_1: int64 [1], on the device.
            tokens_T: int64 [T].
        """
        seen_V = torch.zeros_like(self.seen_SV[0]).index_fill_(0, tokens_T, True)
        self.seen_SV.index_copy_(0, slot_1, seen_V[None])
        self.token_S.index_copy_(0, slot_1, tokens_T[-1:])

    def force(self, slot: int, token: int) -> None:
        """The slot's last token; the one that it replaces stays among the seen ones. Does not wait for the device."""
        # Assigned to one element, a number of the host's would be copied and waited for.
        self.token_S[slot].fill_(token)
        self.seen_SV[slot, token].fill_(True)

    def copy(self, source: int, target: int) -> None:
        """Make `target`'s sequence, settings and seed those of `source`."""
        for table_S in (self._settings_S6, self.token_S, self.seen_SV):
            table_S[target] = table_S[source]

    def row_of(self, slot_B: Tensor) -> Tensor:
        """int64 [B], the tables' row of each row's slot."""
        return torch.where(slot_B >= 0, slot_B, self._slots).long()

    def tokens(self, slot_B: Tensor) -> Tensor:
        """int64 [B], what a step of these slots takes in."""
        return self.token_S[self.row_of(slot_B)].clamp_min(0)

    def draw(self, logits_BV: Tensor, slot_B: Tensor, position_S: Tensor, needs: Needs) -> Tensor:
        """The next token of each row, int64 [B], which becomes its slot's last one.

        The position that the uniform number is of is the new token's own: the number of tokens before it.
        """
        row_B = self.row_of(slot_B)
        settings_B6 = self._settings_S6[row_B]
        temperature_B, top_p_B, min_p_B, penalty_B = settings_B6[:, :4].view(torch.float64).unbind(1)
        top_k_B, seed_B = settings_B6[:, 4:].unbind(1)
        token_B = draw_rows(
            logits_BV,
            RowSettings(temperature_B, top_k_B, top_p_B, min_p_B, penalty_B.float()),
            uniform(seed_B, position_S[slot_B.clamp_min(0).long()]),
            needs,
            real_V=self._real_V,
            seen_BV=self.seen_SV[row_B] if needs.penalises else None,
        )
        self.token_S[row_B] = token_B
        self.seen_SV[row_B, token_B.clamp_min(0)] = self._true
        return token_B
