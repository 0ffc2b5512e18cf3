"""A pre-norm residual block (section 3): x += mixer(norm(x)); x += feed_forward(norm(x))."""

from __future__ import annotations

from torch import nn

from megatron_essh.config import ModelConfig
from megatron_essh.model.attention import WindowAttention
from megatron_essh.model.feed_forward import FeedForward
from megatron_essh.model.mixer import SpectralMixer


class Block(nn.Module):
    """The modules of one block. `mixer` or `attention` is there, by the block's place in the config.

    The two ways through a block, whole sequences and tokens that continue a state, stand in `LanguageModel`.
    """

    mixer: SpectralMixer | None
    attention: WindowAttention | None

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        attends = index in config.attention_layers
        self.mixer_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.mixer = None if attends else SpectralMixer(config)
        self.attention = WindowAttention(config) if attends else None
        self.ff_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.feed_forward = FeedForward(config)
