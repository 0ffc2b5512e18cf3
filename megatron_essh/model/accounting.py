"""What a capacity costs, in closed form: parameters, bytes, floating-point operations (sections 3, 4, 8).

Allocates nothing and does without PyTorch. A capacity of None is the full one; every function raises
`UserError` for a capacity that is not within the model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError

STATE_ITEM_BYTES = 4
"""Spectral states are fp32."""
KV_ITEM_BYTES = 2
"""Cached keys and values are bf16."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by part, over all layers."""

    embedding: int
    """Token embedding, which is also the output head."""
    mixer: int
    """Spectral layers."""
    attention: int
    """Attention layers."""
    feed_forward: int
    """Feed-forward of every block."""
    norms: int
    """Norm weights."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations of one token's forward pass; a multiplication and an addition are two."""

    projections: int
    """Products with the weights of mixers, attention and feed-forward."""
    head: int
    """Product with the output head."""
    scan: int
    """The spectral scan, counted in its recurrent form; the chunked form does more, on faster units."""
    attention: int
    """Scores and weighted values over the keys that a token sees, averaged over a sequence's positions."""

    @property
    def forward(self) -> int:
        """One token, forward."""
        return self.projections + self.head + self.scan + self.attention

    @property
    def training(self) -> int:
        """One token, forward and backward: the backward pass counts as two forward ones."""
        return 3 * self.forward


def parameter_counts(model: ModelConfig, capacity: Capacity | None = None) -> ParameterCounts:
    """Parameters of `model` cut to `capacity`: exactly those of the export."""
    capacity = _checked(model, capacity)
    d, m, p = model.d_model, model.modes, model.value_width
    # per channel: projections in (P + 3m) x d and out P x d, three biases and five tables of m, and beta
    channel = 2 * d * p + 3 * m * d + 8 * m + 1
    return ParameterCounts(
        embedding=model.vocab_size * d,
        mixer=len(model.spectral_layers) * capacity.channels * channel,
        attention=len(model.attention_layers) * 4 * d * d,
        feed_forward=model.n_layers * 3 * d * capacity.ff_width,
        norms=(2 * model.n_layers + 1) * d,
    )


def state_bytes(model: ModelConfig, capacity: Capacity | None = None) -> int:
    """Bytes of one sequence's spectral states [spectral layers, K, m, 2, P], fp32."""
    capacity = _checked(model, capacity)
    layer = capacity.channels * model.modes * 2 * model.value_width
    return len(model.spectral_layers) * layer * STATE_ITEM_BYTES


def window_kv_bytes(model: ModelConfig, sequence_length: int | None = None) -> int:
    """Bytes of one sequence's keys and values [attention layers, 2, window, d], bf16, at any capacity.

    Args:
        sequence_length: how long a sequence may grow; takes the window's place where `model.window` is None.

    Raises:
        UserError: there is attention over the whole input and no `sequence_length`.
    """
    if not model.attention_layers:
        return 0
    window = model.window if model.window is not None else sequence_length
    if window is None:
        raise UserError("model.window is null (the whole input): give the sequence_length to keep")
    return len(model.attention_layers) * 2 * window * model.d_model * KV_ITEM_BYTES


def flops_per_token(model: ModelConfig, capacity: Capacity | None = None, *, sequence_length: int) -> TokenFlops:
    """Floating-point operations a token, averaged over a sequence of `sequence_length` tokens.

    Elementwise work that does not grow with a product of widths (norms, activations, gates) is not counted.
    """
    capacity = _checked(model, capacity)
    d, m, p, k = model.d_model, model.modes, model.value_width, capacity.channels
    spectral, attention = len(model.spectral_layers), len(model.attention_layers)
    mixer_weights = k * (2 * p + 3 * m) * d
    weights = spectral * mixer_weights + attention * 4 * d * d + model.n_layers * 3 * d * capacity.ff_width
    # per mode and value: rotate and decay (6), write (2), read (4); per value: zero-lag correction (2)
    recurrence = k * p * (12 * m + 2)
    window = min(model.window or sequence_length, sequence_length)
    seen = window * (window + 1) // 2 + (sequence_length - window) * window
    return TokenFlops(
        projections=2 * weights,
        head=2 * model.vocab_size * d,
        scan=spectral * recurrence,
        attention=attention * 4 * d * seen // sequence_length,
    )


def _checked(model: ModelConfig, capacity: Capacity | None) -> Capacity:
    if capacity is None:
        return full_capacity(model)
    if not capacity.fits(model):
        raise UserError(f"capacity {capacity}: this model holds up to {full_capacity(model)} (channels, units)")
    return capacity
