"""One decode step of a whole model: the stages of `ops.decode_step` in the order of the blocks.

Waits for nothing and allocates nothing but what a stage needs for itself, so that it can be recorded as a CUDA graph.
Knows nothing of prompts, sampling or slots' owners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_essh.ops import decode_step as stages
from megatron_essh.ops.decode_step.state import DecodeState
from megatron_essh.ops.decode_step.weights import AttentionWeights, DecodeWeights, SpectralWeights


@dataclass(frozen=True)
class StepBuffers:
    """Where a step of B rows puts what it works out. Activations are in the embedding's dtype."""

    x_BD: Tensor
    """fp32, the residual stream."""
    z_BR: Tensor
    """[B, K P], what a spectral layer's channels give."""
    qkv_BR: Tensor
    """[B, H 3 head_dim], an attention layer's queries, keys and values; empty where there is none."""
    y_BR: Tensor
    """[B, H head_dim], what its heads give."""
    h_BN: Tensor
    """[B, N], feed-forward units."""
    logits_BV: Tensor
    """fp32, the step's result."""

    @classmethod
    def of(cls, weights: DecodeWeights, batch: int) -> StepBuffers:
        """Buffers on the weights' device for a step of `batch` rows."""
        embedding_VD = weights.embedding_VD

        def new(columns: int, dtype: torch.dtype = embedding_VD.dtype) -> Tensor:
            return torch.zeros(batch, columns, dtype=dtype, device=embedding_VD.device)

        entries, width = embedding_VD.shape
        spectral = [mixer for mixer in weights.mixers if isinstance(mixer, SpectralWeights)]
        attention = [mixer for mixer in weights.mixers if isinstance(mixer, AttentionWeights)]
        return cls(
            x_BD=new(width, torch.float32),
            z_BR=new(spectral[0].out_proj.inputs if spectral else 0),
            qkv_BR=new(attention[0].qkv.rows if attention else 0),
            y_BR=new(attention[0].out_proj.inputs if attention else 0),
            h_BN=new(weights.feed_forwards[0].down.inputs),
            logits_BV=new(entries, torch.float32),
        )

    def rows(self, batch: int) -> StepBuffers:
        """The same memory, for a step of fewer rows."""
        assert batch <= len(self.x_BD), (batch, len(self.x_BD))
        return StepBuffers(
            self.x_BD[:batch],
            self.z_BR[:batch],
            self.qkv_BR[:batch],
            self.y_BR[:batch],
            self.h_BN[:batch],
            self.logits_BV[:batch],
        )

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (self.x_BD, self.z_BR, self.qkv_BR, self.y_BR, self.h_BN, self.logits_BV)
        return sum(t.numel() * t.element_size() for t in tensors)


def run(weights: DecodeWeights, state: DecodeState, token_B: Tensor, slot_B: Tensor, buffers: StepBuffers) -> None:
    """Take in one token of each row's sequence: `buffers.logits_BV` for the next ones; the state moves on in place.

    Args:
        token_B: int64 [B] token ids; of an idle row, any.
        slot_B: int32 [B] where each row's sequence is, no two alike; -1 is an idle row.
        buffers: of as many rows.
    """
    x_BD, eps = buffers.x_BD, weights.eps
    stages.embed(weights.embedding_VD, token_B, x_BD)
    spectral = attending = 0
    norms = [mixer.norm_D for mixer in weights.mixers[1:]] + [weights.final_norm_D]
    scaled = None
    for mixer, feed_forward, next_norm_D in zip(weights.mixers, weights.feed_forwards, norms, strict=True):
        if isinstance(mixer, SpectralWeights):
            stages.spectral(x_BD, mixer, eps, state.spectral_LSKM2P[spectral], slot_B, buffers.z_BR, scaled)
            scaled = stages.add_product(buffers.z_BR, mixer.out_proj, mixer.output_scale, x_BD, feed_forward.norm_D)
            spectral += 1
        else:
            stages.normed_product(x_BD, mixer.norm_D, eps, mixer.qkv, buffers.qkv_BR, scaled)
            stages.attend(
                buffers.qkv_BR,
                mixer,
                weights.rope_base,
                state.keys_LSHWE[attending],
                state.values_LSHWE[attending],
                state.position_S,
                slot_B,
                buffers.y_BR,
            )
            scaled = stages.add_product(buffers.y_BR, mixer.out_proj, 1.0, x_BD, feed_forward.norm_D)
            attending += 1
        stages.units(x_BD, feed_forward, eps, buffers.h_BN, scaled)
        scaled = stages.add_product(buffers.h_BN, feed_forward.down, 1.0, x_BD, next_norm_D)
    stages.normed_product(x_BD, weights.final_norm_D, eps, weights.head, buffers.logits_BV, scaled)
    stages.advance(state.position_S, slot_B)
