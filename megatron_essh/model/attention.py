"""Sliding-window attention with rotary positions (section 3): multi-head, causal, the last `window` keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_essh.config import ModelConfig
from megatron_essh.model.state import OrderedUpdate, PaddedStart, RingUpdate
from megatron_essh.ops.linear import linear, linear_input_major
from megatron_essh.ops.rotary import rotate_qkv
from megatron_essh.ops.window_attention import DocumentSpans, window_attention


def rotary_table(position: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [*position.shape, 1, head_dim / 2]; the angles are built in fp64."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=position.device) / head_dim)
    angle = position.to(torch.float64)[..., None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


class WindowAttention(nn.Module):
    """u_BTD -> y_BTD. Weights are head-major: qkv [H, 3, head_dim, D]; out_proj is input-major [H head_dim, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        h, hd, d = config.n_heads, config.head_dim, config.d_model
        self.qkv = nn.Parameter(torch.empty(h, 3, hd, d))
        self.out_proj = nn.Parameter(torch.empty(h * hd, d))

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        config = self.config
        with torch.no_grad():
            self.qkv.normal_(0.0, config.init_std, generator=generator)
            self.out_proj.normal_(0.0, config.init_std / math.sqrt(2 * config.n_layers), generator=generator)

    def _project(self, u_BTD: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        heads, _, head_dim, _ = self.qkv.shape
        qkv = linear(u_BTD, self.qkv, heads).unflatten(-1, (heads, 3, head_dim))
        return rotate_qkv(qkv, *table)

    def forward(
        self,
        u_BTD: Tensor,
        table: tuple[Tensor, Tensor],
        *,
        documents_BT: Tensor | None = None,
        spans: DocumentSpans | None = None,
    ) -> Tensor:
        """Whole sequences from position 0."""
        q, k, v = self._project(u_BTD, table)
        out_BTHD = v
        if len(self.qkv):  # a share of a model may be without a head
            out_BTHD = window_attention(q, k, v, window=self.config.window, documents_BT=documents_BT, spans=spans)
        return linear_input_major(out_BTHD.flatten(-2), self.out_proj)

    def forward_cached(
        self,
        u_BTD: Tensor,
        table: tuple[Tensor, Tensor],
        keys_BWHD: Tensor,
        values_BWHD: Tensor,
        ring: RingUpdate | OrderedUpdate | PaddedStart,
    ) -> Tensor:
        """Tokens that continue the sequences whose keys and values are given; both are updated in place."""
        q, k, v = self._project(u_BTD, table)
        k, v = k.to(keys_BWHD.dtype), v.to(values_BWHD.dtype)
        out_BTHD = window_attention(
            q,
            ring.seen(keys_BWHD, k).to(q.dtype),
            ring.seen(values_BWHD, v).to(q.dtype),
            window=self.config.window,
            q_position_BT=ring.q_position_BT,
            k_position_BS=ring.k_position_BS,
        )
        ring.write(keys_BWHD, k)
        ring.write(values_BWHD, v)
        return linear_input_major(out_BTHD.flatten(-2), self.out_proj)
