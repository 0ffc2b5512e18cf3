"""The model's shape and initialisation (specification sections 1 to 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BankName = Literal["hankel", "random_damped", "non_oscillatory", "slot_shuffle", "uniform_decay", "s4d_lin"]


LARGEST_SEED = 2**32 - 1
"""NumPy's generators take seeds from 0 to this."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    d_model: int
    """Residual width d."""
    n_layers: int
    """Number of residual blocks L, attention blocks included."""
    channels: int
    """Spectral channels K at full capacity."""
    modes: int = 8
    """Damped rotation modes m per channel."""
    value_width: int
    """Width P of a channel's value. Usually d_model / channels, but a field of its own."""
    ff_width: int
    """Feed-forward units n at full capacity."""
    vocab_size: int
    """Vocabulary entries V, padding included."""
    attention_layers: tuple[int, ...] = ()
    """Zero-based indices of the blocks whose mixer is window attention."""
    window: int | None = 2048
    """Keys that a query sees, itself included. None: the whole input."""
    head_dim: int = 64
    """Width of an attention head; d_model must be a multiple of it where there is attention."""
    rope_base: float = 10_000.0
    """Base of the rotary position embedding."""
    eps: float = 1e-6
    """Epsilon of RMSNorm and of the channel-local value blend."""
    init_std: float = 0.02
    """Standard deviation of the weights' normal initialisation."""
    bank: BankName = "hankel"
    """Spectral bank that initialises the modal tables (section 2)."""
    bank_length: int = 2048
    """Size of the Hankel matrix whose eigenvectors the bank fits."""
    bank_seed: int = 0
    """Seed of the banks that draw (`random_damped`, `slot_shuffle`)."""
    clock: Literal["selective", "constant"] = "selective"
    """`constant` freezes the clock weights at zero: the clock no longer depends on the input."""
    gates: Literal["selective", "neutral"] = "selective"
    """`neutral` freezes write and read gates at one."""
    family_channels: int | None = None
    """In an export: the channel count of the family it was cut from. None: this model is the family's full one."""
    family_ff_width: int | None = None
    """In an export: the feed-forward width of the family it was cut from."""

    def __post_init__(self) -> None:
        for name in (
            "d_model",
            "n_layers",
            "channels",
            "modes",
            "value_width",
            "ff_width",
            "vocab_size",
            "head_dim",
            "bank_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (or null for the whole input), got {self.window}")
        for name in ("rope_base", "eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.bank_seed <= LARGEST_SEED:
            raise ValueError(f"bank_seed must lie in [0, {LARGEST_SEED}], got {self.bank_seed}")
        if list(self.attention_layers) != sorted(set(self.attention_layers)):
            raise ValueError(f"attention_layers must be distinct and ascending, got {list(self.attention_layers)}")
        for layer in self.attention_layers:
            if not 0 <= layer < self.n_layers:
                raise ValueError(
                    f"attention_layers: {layer} is not one of the {self.n_layers} layers (0 to {self.n_layers - 1})"
                )
        if self.attention_layers and self.d_model % self.head_dim:
            raise ValueError(f"d_model {self.d_model} is not a multiple of head_dim {self.head_dim}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary embedding turns pairs), got {self.head_dim}")
        if self.bank_length < 4 * self.modes:
            raise ValueError(f"bank_length must be at least 4 x modes = {4 * self.modes}, got {self.bank_length}")
        if (self.family_channels or self.channels) < self.channels:
            raise ValueError(f"family_channels {self.family_channels} is below channels {self.channels}")
        if (self.family_ff_width or self.ff_width) < self.ff_width:
            raise ValueError(f"family_ff_width {self.family_ff_width} is below ff_width {self.ff_width}")

    @property
    def n_heads(self) -> int:
        """Attention heads; 0 where no layer attends."""
        return self.d_model // self.head_dim if self.attention_layers else 0

    @property
    def spectral_layers(self) -> tuple[int, ...]:
        """Zero-based indices of the blocks whose mixer is spectral."""
        return tuple(i for i in range(self.n_layers) if i not in self.attention_layers)
