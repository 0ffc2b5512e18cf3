"""A pre-norm residual block (section 3): x += mixer(norm(x)); x += feed_forward(norm(x))."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_essh.config import ModelConfig
from megatron_essh.config.components import Recompute
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.model.attention import WindowAttention
from megatron_essh.model.feed_forward import FeedForward
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.model.prefix import GradientScale


@dataclass(frozen=True)
class WholePass:
    """What one pass over whole sequences gives to every block."""

    capacity: Capacity
    rotary: tuple[Tensor, Tensor]
    """cos and sin of the positions' rotary angles."""
    documents_BT: Tensor | None
    """int64 document of each position; scan and attention are cut where it changes."""
    scale: GradientScale


class Block(nn.Module):
    """The modules of one block. `mixer` or `attention` is there, by the block's place in the config.

    `forward` takes whole sequences; tokens that continue a state go through the modules in `LanguageModel`.
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

    def forward(
        self, x_BTD: Tensor, given: WholePass, observe: Callable[[Tensor], None] | None, recompute: Recompute
    ) -> Tensor:
        """The residual stream x_BTD after this block.

        `recompute` says what the backward pass computes anew instead of keeping it: `block` all of the block,
        `selective` the feed-forward part, whose activations are the largest. `observe` is called once in any case.
        """
        observe = None if observe is None else _Once(observe)
        if recompute == "block":
            return run_again(lambda x: self._feed(self._mix(x, given), given, observe), x_BTD)
        x_BTD = self._mix(x_BTD, given)
        if recompute == "selective":
            return run_again(self._feed, x_BTD, given, observe)
        return self._feed(x_BTD, given, observe)

    def _mix(self, x_BTD: Tensor, given: WholePass) -> Tensor:
        u_BTD = self.mixer_norm(x_BTD)
        if self.mixer is not None:
            y_BTD, _ = self.mixer(
                u_BTD, given.capacity.channels, gradient_scale=given.scale.mixer, documents_BT=given.documents_BT
            )
        else:
            assert self.attention is not None
            y_BTD = self.attention(u_BTD, given.rotary, documents_BT=given.documents_BT)
        return x_BTD + y_BTD

    def _feed(self, x_BTD: Tensor, given: WholePass, observe: Callable[[Tensor], None] | None) -> Tensor:
        return x_BTD + self.feed_forward(
            self.ff_norm(x_BTD), given.capacity.ff_width, gradient_scale=given.scale.feed_forward, observe=observe
        )


def run_again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`function(*arguments)`, keeping its inputs alone: the backward pass runs it again. Nothing here is random."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class _Once:
    """Passes on the first call only: a recomputed forward pass is not observed."""

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        self._observe: Callable[[Tensor], None] | None = observe

    def __call__(self, units_BTN: Tensor) -> None:
        if self._observe is not None:
            self._observe(units_BTN)
            self._observe = None
