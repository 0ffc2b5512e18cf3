"""What a decode step reads of a model: weights laid out for one token a sequence, and small tables worked out once.

Everything here is of one capacity, contiguous, on one device. `inference.packing.pack_model` makes it.

Shape suffixes: D model width, R output rows of a product, I its inputs, K channels, M modes, P values per channel,
X = P + 3M, H heads, N feed-forward units, V vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TABLES = ("write_bias", "read_bias", "clock_bias", "gamma", "cos", "sin", "kc", "ks", "zero_lag")
"""Rows of `SpectralWeights.tables_KTM`: biases; gamma = softplus(rho_raw); cos and sin of theta; a times kc."""


@dataclass(frozen=True)
class PackedWeight:
    """The weight of a product y_R = W_RI x_I, output-major: a row is what one output reads."""

    values_RI: Tensor
    """fp32 or bf16; or int8 or float8_e4m3fn, to be multiplied by `scale_R`."""
    scale_R: Tensor | None = None
    """fp32, of each row; None where the values are the weights."""

    @property
    def rows(self) -> int:
        return self.values_RI.shape[0]

    @property
    def inputs(self) -> int:
        return self.values_RI.shape[1]

    def input_dtype(self, result: Tensor) -> torch.dtype:
        """In which a product takes its inputs: the weight's; of a quantised one the result's, or bf16."""
        if self.scale_R is None:
            return self.values_RI.dtype
        return result.dtype if result.dtype != torch.float32 else torch.bfloat16

    def nbytes(self) -> int:
        """Bytes that one step reads of it."""
        tensors = [self.values_RI] if self.scale_R is None else [self.values_RI, self.scale_R]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True)
class SpectralWeights:
    """A spectral sub-layer (specification, section 1)."""

    norm_D: Tensor
    """fp32."""
    in_proj: PackedWeight
    """[K X, D], channel by channel: P rows of values, M each of the write gate, the read gate and the clock."""
    out_proj: PackedWeight
    """[D, K P]."""
    output_scale: float
    """K^-1/2, on the product with `out_proj`."""
    tables_KTM: Tensor
    """fp32 [K, 9, M], in the order of `TABLES`."""
    beta_K: Tensor
    """fp32."""
    neutral_gates: bool
    """Both gates are 1 instead of what is computed for them."""


@dataclass(frozen=True)
class AttentionWeights:
    """An attention sub-layer (section 3)."""

    norm_D: Tensor
    """fp32."""
    qkv: PackedWeight
    """[H 3 head_dim, D], head by head: query, key, value."""
    out_proj: PackedWeight
    """[D, H head_dim]."""
    heads: int


@dataclass(frozen=True)
class FeedForwardWeights:
    """A feed-forward sub-layer (section 3)."""

    norm_D: Tensor
    """fp32."""
    gate_up: PackedWeight
    """[2 N, D], unit by unit: gate_0, up_0, gate_1, up_1, ..."""
    down: PackedWeight
    """[D, N]."""


@dataclass(frozen=True)
class DecodeWeights:
    """A whole model at one capacity."""

    embedding_VD: Tensor
    """fp32 or bf16."""
    mixers: tuple[SpectralWeights | AttentionWeights, ...]
    """One a block."""
    feed_forwards: tuple[FeedForwardWeights, ...]
    """One a block."""
    final_norm_D: Tensor
    """fp32."""
    head: PackedWeight
    """[V, D]: the embedding, or its quantised form."""
    eps: float
    rope_base: float
    modes: int
    value_width: int
    head_dim: int
