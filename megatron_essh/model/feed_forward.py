"""The SwiGLU feed-forward layer, cut along its units (sections 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_essh.config import ModelConfig
from megatron_essh.model.prefix import prefix


class FeedForward(nn.Module):
    """down(silu(gate u) * up u) over the first n units. Gate and up are stored unit-major, down input-major."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.gate_up = nn.Parameter(torch.empty(config.ff_width, 2, config.d_model))
        self.down = nn.Parameter(torch.empty(config.ff_width, config.d_model))

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        config = self.config
        with torch.no_grad():
            self.gate_up.normal_(0.0, config.init_std, generator=generator)
            self.down.normal_(0.0, config.init_std / math.sqrt(2 * config.n_layers), generator=generator)

    def forward(
        self,
        u_BTD: Tensor,
        ff_width: int,
        *,
        gradient_scale: float = 1.0,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """u_BTD -> y_BTD with the first `ff_width` units; `observe` is shown the units' activations [B, T, n]."""
        gate_up = prefix(self.gate_up, ff_width, gradient_scale)
        down = prefix(self.down, ff_width, gradient_scale)
        gate_BTN, up_BTN = F.linear(u_BTD, gate_up.flatten(0, 1)).unflatten(-1, (ff_width, 2)).unbind(-1)
        units_BTN = F.silu(gate_BTN) * up_BTN
        if observe is not None:
            observe(units_BTN.detach())
        return torch.matmul(units_BTN, down)
