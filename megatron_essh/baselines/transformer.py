"""Transformer++, the model that a user would train instead: causal attention over the whole input with rotary
positions, pre-norm RMSNorm, SwiGLU, a tied head, no biases.

Plain PyTorch that torch.compile takes block by block (`for block in model.blocks: block.compile()`). It has one
capacity and no state of its own: `hidden` and `head_weight` are all that training needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import ParameterCounts, TokenFlops, parameter_counts
from megatron_essh.model.attention import rotary_table
from megatron_essh.model.partition import Whole
from megatron_essh.model.prefix import GradientScale
from megatron_essh.ops.rotary.reference import rotate

UNIT_MULTIPLE = 64
"""Matched feed-forward widths are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    d_model: int
    """Residual width d."""
    n_layers: int
    """Number of blocks L."""
    head_dim: int = 64
    """Width of an attention head; divides d_model, even."""
    ff_width: int
    """Feed-forward units n."""
    vocab_size: int
    """Vocabulary entries V, padding included."""
    rope_base: float = 10_000.0
    """Base of the rotary position embedding."""
    eps: float = 1e-6
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the weights' normal initialisation."""

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "head_dim", "ff_width", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("rope_base", "eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.head_dim % 2 or self.d_model % self.head_dim:
            raise ValueError(f"head_dim must be even and divide d_model {self.d_model}, got {self.head_dim}")

    @property
    def n_heads(self) -> int:
        """Attention heads."""
        return self.d_model // self.head_dim


def matched_config(model: ModelConfig) -> TransformerConfig:
    """The Transformer++ of `model`'s depth, width, heads and vocabulary whose parameters come nearest to `model`'s.

    The feed-forward width is the free size, in multiples of 64.

    Raises:
        UserError: `model.head_dim` does not divide `model.d_model` (it need not where `model` has no attention).
    """
    if model.d_model % model.head_dim:
        raise UserError(
            f"model.head_dim: {model.head_dim} does not divide model.d_model {model.d_model}, which the Transformer++ "
            "needs; set another head_dim"
        )
    narrowest = TransformerConfig(
        d_model=model.d_model,
        n_layers=model.n_layers,
        head_dim=model.head_dim,
        ff_width=UNIT_MULTIPLE,
        vocab_size=model.vocab_size,
        rope_base=model.rope_base,
        eps=model.eps,
        init_std=model.init_std,
    )
    missing = parameter_counts(model).total - transformer_parameters(narrowest).total
    step = model.n_layers * 3 * model.d_model * UNIT_MULTIPLE
    multiples = max(1, 1 + math.floor(missing / step + 0.5))
    return TransformerConfig(**{**vars(narrowest), "ff_width": UNIT_MULTIPLE * multiples})


def transformer_parameters(config: TransformerConfig) -> ParameterCounts:
    """Parameters by part."""
    d, layers = config.d_model, config.n_layers
    return ParameterCounts(
        embedding=config.vocab_size * d,
        mixer=0,
        attention=layers * 4 * d * d,
        feed_forward=layers * 3 * d * config.ff_width,
        norms=(2 * layers + 1) * d,
    )


def transformer_flops(config: TransformerConfig, *, sequence_length: int) -> TokenFlops:
    """Floating-point operations a token, counted as `flops_per_token` counts ours: the keys that are seen alone."""
    counts = transformer_parameters(config)
    return TokenFlops(
        projections=2 * (counts.attention + counts.feed_forward),
        head=2 * counts.embedding,
        scan=0,
        attention=config.n_layers * 4 * config.d_model * (sequence_length + 1) // 2,
    )


class Attention(nn.Module):
    """u_BTD -> y_BTD, multi-head, through PyTorch's scaled_dot_product_attention; `mask` None is causal."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, u_BTD: Tensor, table: tuple[Tensor, Tensor], mask_B1TT: Tensor | None) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(u_BTD).chunk(3, dim=-1))
        q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (rotate(q, *table), rotate(k, *table), v))
        out_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_B1TT, is_causal=mask_B1TT is None
        )
        y_BTD: Tensor = self.out_proj(out_BHTD.transpose(1, 2).flatten(-2))
        return y_BTD


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate u) * up u)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.d_model, 2 * config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.d_model, bias=False)

    def forward(self, u_BTD: Tensor) -> Tensor:
        gate_BTN, up_BTN = self.gate_up(u_BTD).chunk(2, dim=-1)
        units_BTN = F.silu(gate_BTN) * up_BTN
        y_BTD: Tensor = self.down(units_BTN)
        return y_BTD


class TransformerBlock(nn.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x)): the unit that torch.compile takes."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.attention = Attention(config)
        self.ff_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor, table: tuple[Tensor, Tensor], mask_B1TT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), table, mask_B1TT)
        return x_BTD + self.feed_forward(self.ff_norm(x_BTD))


class Transformer(nn.Module):
    """The Transformer++ language model. On the meta device it allocates and draws nothing."""

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.partition = Whole()
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.d_model), freeze=False)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        if self.device.type != "meta":
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise every weight; those that write to the residual stream are smaller, by sqrt(2 L)."""
        config = self.config
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                    continue
                writes = name.endswith(("out_proj.weight", "down.weight"))
                std = config.init_std / math.sqrt(2 * config.n_layers) if writes else config.init_std
                parameter.normal_(0.0, std, generator=generator)

    @property
    def head_weight(self) -> Tensor:
        """The output head [V, D]: the embedding, tied."""
        return self.embedding.weight

    def product_weights(self) -> list[nn.Parameter]:
        """The weights that go through the engine's own products: the head's."""
        return [self.embedding.weight]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embedding.weight.device

    def rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Table of the first `length` positions: fp32, or fp64 in an fp64 model."""
        dtype = torch.float64 if self.embedding.weight.dtype == torch.float64 else torch.float32
        return rotary_table(
            torch.arange(length, device=self.device), self.config.head_dim, self.config.rope_base, dtype
        )

    def hidden(
        self,
        tokens_BT: Tensor,
        capacity: Capacity | None = None,
        *,
        documents_BT: Tensor | None = None,
        gradient_scale: GradientScale | None = None,
        square_sums_LN: None = None,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm, of whole sequences.

        Args:
            tokens_BT: int64 token ids.
            capacity: None; there is no smaller one in this model.
            documents_BT: int64 document of each position; attention stays within it, through a [B, 1, T, T] mask.
            gradient_scale: None or factors of one.
            square_sums_LN: None; nothing orders this model's units.

        Raises:
            UserError: a capacity or a gradient scale was given.
        """
        assert square_sums_LN is None, "a Transformer++ keeps no statistics of units"
        if capacity is not None:
            raise UserError(f"capacity {capacity}: a Transformer++ has one capacity; leave it out")
        if gradient_scale not in (None, GradientScale()):
            raise UserError(f"gradient_scale {gradient_scale}: a Transformer++ has no reduced capacity to scale")
        table = self.rotary(tokens_BT.shape[1])
        mask_B1TT = None
        if documents_BT is not None:
            mask_B1TT = (documents_BT[:, None, :, None] == documents_BT[:, None, None, :]).tril()
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, table, mask_B1TT)
        normed_BTD: Tensor = self.final_norm(x_BTD)
        return normed_BTD
