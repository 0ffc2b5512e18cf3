"""The selective spectral mixer (section 1): projection, selective scan, projection.

Weights are stored so that every prefix of channels is one contiguous view (section 4): the input projection
channel-major, the output projection input-major.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_essh.config import ModelConfig
from megatron_essh.ops.linear import linear, linear_input_major
from megatron_essh.ops.prefix import prefix
from megatron_essh.ops.selective_scan import ModalTables, selective_scan
from megatron_essh.spectral.banks import build_bank

CLOCK_BIAS_AT_START = -3.0
ZERO_LAG_AT_START = 0.5


class SpectralMixer(nn.Module):
    """Spectral channels with input-dependent decay and gates, u_BTD -> y_BTD.

    The modal tables, `beta` and the gate and clock biases are fp32 (fp64 in an fp64 model) in every mode of training.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        k, m, p, d = config.channels, config.modes, config.value_width, config.d_model
        self.in_proj = nn.Parameter(torch.empty(k, p + 3 * m, d))
        self.write_bias = nn.Parameter(torch.empty(k, m))
        self.read_bias = nn.Parameter(torch.empty(k, m))
        self.clock_bias = nn.Parameter(torch.empty(k, m))
        self.rho_raw = nn.Parameter(torch.empty(k, m))
        self.theta = nn.Parameter(torch.empty(k, m))
        self.kc = nn.Parameter(torch.empty(k, m))
        self.ks = nn.Parameter(torch.empty(k, m))
        self.zero_lag = nn.Parameter(torch.empty(k, m))
        self.beta = nn.Parameter(torch.empty(k))
        self.out_proj = nn.Parameter(torch.empty(k * p, d))

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        """Draw the projections and load the spectral bank; gates start at one, the clock at softplus(-3)."""
        config = self.config
        bank = build_bank(config.bank, config.channels, config.modes, config.bank_length, config.bank_seed)
        gamma = -torch.log(torch.from_numpy(bank.rho))
        with torch.no_grad():
            self.in_proj.zero_()
            self.in_proj[:, : config.value_width].normal_(0.0, config.init_std, generator=generator)
            self.out_proj.normal_(0.0, config.init_std / math.sqrt(2 * config.n_layers), generator=generator)
            self.write_bias.zero_()
            self.read_bias.zero_()
            self.clock_bias.fill_(CLOCK_BIAS_AT_START)
            self.rho_raw.copy_(torch.log(torch.expm1(gamma)))
            self.theta.copy_(torch.from_numpy(bank.theta))
            self.kc.copy_(torch.from_numpy(bank.kc))
            self.ks.copy_(torch.from_numpy(bank.ks))
            self.zero_lag.fill_(ZERO_LAG_AT_START)
            self.beta.zero_()

    def tables(self, channels: int, scale: float = 1.0) -> ModalTables:
        """The first `channels` rows of every per-channel table."""
        named = (getattr(self, name) for name in ModalTables._fields)
        return ModalTables(*(prefix(table, channels, scale) for table in named))

    def forward(
        self,
        u_BTD: Tensor,
        channels: int,
        *,
        of: int | None = None,
        gradient_scale: float = 1.0,
        documents_BT: Tensor | None = None,
        valid_BT: Tensor | None = None,
        state_BKM2P: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mix along time with the first `channels` channels, which may be none.

        Args:
            of: the capacity's channels, where these are a share of them and the others' output is added; None: these.

        Returns:
            y_BTD, to be added to the residual, and the leaving state_BKM2P.
        """
        config = self.config
        p, m = config.value_width, config.modes
        raw_BTX = linear(u_BTD, self.in_proj, channels, gradient_scale=gradient_scale)
        raw_BTKX = raw_BTX.unflatten(-1, (channels, p + 3 * m))
        if config.clock == "constant":  # the clock's weights stay at zero: its pre-activation is the bias alone
            raw_BTKX = torch.cat([raw_BTKX[..., : p + 2 * m], torch.zeros_like(raw_BTKX[..., p + 2 * m :])], dim=-1)
        z_BTKP, state_BKM2P = selective_scan(
            raw_BTKX,
            self.tables(channels, gradient_scale),
            eps=config.eps,
            neutral_gates=config.gates == "neutral",
            state_BKM2P=state_BKM2P,
            documents_BT=documents_BT,
            valid_BT=valid_BT,
        )
        y_BTD = linear_input_major(
            z_BTKP.flatten(-2), self.out_proj, gradient_scale=gradient_scale, output_scale=(of or channels) ** -0.5
        )
        return y_BTD, state_BKM2P
