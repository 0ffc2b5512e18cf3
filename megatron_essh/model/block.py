"""A pre-norm residual block (section 3): x += mixer(norm(x)); x += feed_forward(norm(x)).

What a sub-layer adds to the residual stream stays beside it until the next norm, which adds it and normalises in one
pass over memory: a block takes and gives the stream and the last branch.
"""

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
from megatron_essh.model.partition import Whole
from megatron_essh.model.prefix import GradientScale
from megatron_essh.ops.rms_norm import add_rms_norm, rms_norm
from megatron_essh.ops.window_attention import DocumentSpans


@dataclass(frozen=True)
class WholePass:
    """What one pass over whole sequences gives to every block."""

    capacity: Capacity
    share: Capacity
    """What of the capacity is here; `partition` brings it together with the rest."""
    partition: Whole
    rotary: tuple[Tensor, Tensor]
    """cos and sin of the positions' rotary angles."""
    documents_BT: Tensor | None
    """int64 document of each position; scan and attention are cut where it changes."""
    spans: DocumentSpans | None
    """The same documents as the attention kernels take them; None lets each attention layer find them."""
    scale: GradientScale


def normed(x_BTD: Tensor, branch_BTD: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """The stream with the branch added to it, and its norm in the dtype of the products."""
    assert norm.eps is not None
    if branch_BTD is None:
        return x_BTD, rms_norm(x_BTD, norm.weight, norm.eps)
    return add_rms_norm(x_BTD, branch_BTD, norm.weight, norm.eps)


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
        self,
        x_BTD: Tensor,
        branch_BTD: Tensor | None,
        given: WholePass,
        square_sum_N: Tensor | None,
        recompute: Recompute,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x_BTD and what is still to be added to it, after this block, from the same before it.

        `recompute` says what the backward pass computes anew instead of keeping it: `block` all of the block,
        `selective` the feed-forward part, whose activations are the largest. `square_sum_N` (fp32 [n]) gets the sums of
        the units' squared activations, once in any case.
        """
        once = _Once(square_sum_N)
        if recompute == "block":
            return run_again(lambda x, branch: self._feed(*self._mix(x, branch, given), given, once), x_BTD, branch_BTD)
        x_BTD, branch_BTD = self._mix(x_BTD, branch_BTD, given)
        if recompute == "selective":
            return run_again(self._feed, x_BTD, branch_BTD, given, once)
        return self._feed(x_BTD, branch_BTD, given, once)

    def _mix(self, x_BTD: Tensor, branch_BTD: Tensor | None, given: WholePass) -> tuple[Tensor, Tensor]:
        x_BTD, u_BTD = normed(x_BTD, branch_BTD, self.mixer_norm)
        if self.mixer is not None:
            y_BTD, _ = self.mixer(
                u_BTD,
                given.share.channels,
                of=given.capacity.channels,
                gradient_scale=given.scale.mixer,
                documents_BT=given.documents_BT,
            )
        else:
            assert self.attention is not None
            y_BTD = self.attention(u_BTD, given.rotary, documents_BT=given.documents_BT, spans=given.spans)
        return x_BTD, given.partition.leave(y_BTD)

    def _feed(self, x_BTD: Tensor, branch_BTD: Tensor, given: WholePass, once: _Once) -> tuple[Tensor, Tensor]:
        x_BTD, u_BTD = normed(x_BTD, branch_BTD, self.ff_norm)
        y_BTD = self.feed_forward(
            u_BTD, given.share.ff_width, gradient_scale=given.scale.feed_forward, square_sum_N=once.take()
        )
        return x_BTD, given.partition.leave(y_BTD)


def run_again(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, keeping its inputs alone: the backward pass runs it again. Nothing here is random."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class _Once:
    """Gives its tensor the first time only: a recomputed forward pass is not counted."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor = tensor

    def take(self) -> Tensor | None:
        tensor, self._tensor = self._tensor, None
        return tensor
