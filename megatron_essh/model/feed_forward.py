"""The SwiGLU feed-forward layer, cut along its units (sections 3 and 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_essh.config import ModelConfig
from megatron_essh.ops.linear import linear, linear_input_major
from megatron_essh.ops.swiglu import swiglu


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
        square_sum_N: Tensor | None = None,
    ) -> Tensor:
        """u_BTD -> y_BTD with the first `ff_width` units.

        square_sum_N: fp32 [n]; the sum over all positions of the units' squared activations is added to it.
        """
        gate_up_BTN = linear(u_BTD, self.gate_up, ff_width, gradient_scale=gradient_scale)
        return linear_input_major(swiglu(gate_up_BTN, square_sum_N), self.down, gradient_scale=gradient_scale)
