"""The Transformer++ baseline: right to an fp64 attention written out, causal, and as large as the model it meets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_essh.baselines.transformer import (
    Transformer,
    TransformerConfig,
    matched_config,
    transformer_flops,
    transformer_parameters,
)
from megatron_essh.config import ModelConfig, load_config
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.model import attention as our_attention
from megatron_essh.model.accounting import flops_per_token, parameter_counts
from megatron_essh.model.prefix import GradientScale
from megatron_essh.ops.linear_loss import cross_entropy
from megatron_essh.training.optimizer import decay_groups

CONFIGS = Path(__file__).resolve().parents[2] / "configs/models"


@pytest.fixture
def transformer() -> Callable[..., Transformer]:
    """Builds an fp64 Transformer++ of random weights, norms included."""

    def build(seed: int = 0, **sizes: int) -> Transformer:
        config = TransformerConfig(
            **{"d_model": 24, "n_layers": 2, "head_dim": 6, "ff_width": 20, "vocab_size": 31, **sizes}
        )
        model = Transformer(config).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        return model

    return build


def naive_hidden(model: Transformer, tokens_T: Tensor, documents_T: Tensor | None = None) -> Tensor:
    """One sequence's hidden states, a query, a head and a key at a time, rotated as complex numbers."""
    config, weights = model.config, dict(model.named_parameters())
    frequency = [config.rope_base ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        half = config.head_dim // 2
        pairs = torch.complex(x[:half], x[half:]) * torch.tensor([complex(math.cos(a), math.sin(a)) for a in [
            position * f for f in frequency]], dtype=torch.complex128)  # fmt: skip
        return torch.cat([pairs.real, pairs.imag])

    x = weights["embedding.weight"][tokens_T]
    for layer in range(config.n_layers):
        name = f"blocks.{layer}"
        qkv = norm(x, f"{name}.attention_norm") @ weights[f"{name}.attention.qkv.weight"].T
        q, k, v = qkv.view(len(x), 3, config.n_heads, config.head_dim).unbind(1)
        mixed = torch.zeros(len(x), config.n_heads, config.head_dim, dtype=x.dtype)
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if documents_T is None or documents_T[s] == documents_T[t]]
            for h in range(config.n_heads):
                scores = torch.stack([turned(q[t, h], t) @ turned(k[s, h], s) for s in seen]) / config.head_dim**0.5
                mixed[t, h] = scores.softmax(0) @ v[seen, h]
        x = x + mixed.flatten(1) @ weights[f"{name}.attention.out_proj.weight"].T
        u = norm(x, f"{name}.ff_norm")
        gate, up = (u @ weights[f"{name}.feed_forward.gate_up.weight"].T).split(config.ff_width, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{name}.feed_forward.down.weight"].T
    return norm(x, "final_norm")


@pytest.mark.parametrize("length", [1, 2, 9])
def test_hidden_states_are_those_of_attention_written_out(transformer, length: int) -> None:
    model = transformer(seed=length)
    tokens = torch.randint(0, 31, (2, length))
    with torch.no_grad():
        hidden = model.hidden(tokens)
        for row in range(2):
            torch.testing.assert_close(hidden[row], naive_hidden(model, tokens[row]), rtol=1e-9, atol=1e-9)


def test_documents_do_not_see_each_other(transformer) -> None:
    model = transformer()
    tokens = torch.randint(0, 31, (2, 8))
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 2]])
    with torch.no_grad():
        hidden = model.hidden(tokens, documents_BT=documents)
        assert not torch.allclose(hidden, model.hidden(tokens))
        for row in range(2):
            reference = naive_hidden(model, tokens[row], documents[row])
            torch.testing.assert_close(hidden[row], reference, rtol=1e-9, atol=1e-9)


@given(length=st.integers(2, 12), changed=st.integers(0, 11), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_token_changes_its_own_and_later_positions_alone(length: int, changed: int, seed: int) -> None:
    changed %= length
    model = Transformer(TransformerConfig(d_model=24, n_layers=2, head_dim=6, ff_width=20, vocab_size=31)).double()
    tokens = torch.randint(0, 31, (1, length), generator=torch.Generator().manual_seed(seed))
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 31
    with torch.no_grad():
        moved = (model.hidden(tokens) - model.hidden(other)).abs().amax(-1)[0]
    assert bool((moved[:changed] == 0).all())
    assert bool((moved[changed:] > 0).all())


def test_rotary_positions_are_our_attentions_own(transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    cos, sin = model.rotary(7)
    expected_cos, expected_sin = our_attention.rotary_table(torch.arange(7), 6, 10_000.0, cos.dtype)
    assert torch.equal(cos, expected_cos)
    assert torch.equal(sin, expected_sin)
    # attention depends on the distance alone: turning every position by the same angle changes nothing
    tokens = torch.randint(0, 31, (1, 7))
    with torch.no_grad():
        hidden = model.hidden(tokens)
        shifted = our_attention.rotary_table(torch.arange(100, 107), 6, 10_000.0, cos.dtype)
        monkeypatch.setattr(model, "rotary", lambda length: shifted)
        torch.testing.assert_close(model.hidden(tokens), hidden, rtol=1e-9, atol=1e-9)
        monkeypatch.setattr(model, "rotary", lambda length: (torch.ones_like(cos), torch.zeros_like(sin)))
        assert not torch.allclose(model.hidden(tokens), hidden)


def test_the_loss_reaches_every_parameter_with_the_right_gradient(transformer) -> None:
    model = transformer()
    tokens, labels = torch.randint(0, 31, (2, 5)), torch.randint(0, 31, (10,))

    def loss() -> Tensor:
        return cross_entropy(model.hidden(tokens).flatten(0, 1), model.head_weight, labels)

    loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        direction = torch.randn_like(parameter)
        step = 1e-5
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = loss()
            parameter.add_(direction, alpha=-2 * step)
            below = loss()
            parameter.add_(direction, alpha=step)
        slope = (above - below) / (2 * step)
        torch.testing.assert_close((parameter.grad * direction).sum(), slope, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["370m", "1p5b", "quickstart"])
def test_the_closed_form_counts_the_models_parameters(name: str) -> None:
    config = matched_config(load_config(CONFIGS / f"{name}.yaml").model)
    with torch.device("meta"):
        model = Transformer(config)
    counts = transformer_parameters(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.norms == sum(p.numel() for p in model.parameters() if p.ndim == 1)


@pytest.mark.parametrize(("name", "width", "parameters"), [("370m", 4288, 369_335_680), ("1p5b", 4672, 1_536_280_576)])
def test_published_sizes_get_their_match(name: str, width: int, parameters: int) -> None:
    config = matched_config(load_config(CONFIGS / f"{name}.yaml").model)
    assert (config.ff_width, transformer_parameters(config).total) == (width, parameters)


@given(d=st.sampled_from([32, 64, 96]), layers=st.integers(1, 5), ff=st.integers(1, 900), channels=st.integers(1, 9))
def test_no_other_multiple_of_64_is_nearer(d: int, layers: int, ff: int, channels: int) -> None:
    model = ModelConfig(
        d_model=d, n_layers=layers, channels=channels, value_width=5, ff_width=ff, vocab_size=100, head_dim=8
    )
    config, target = matched_config(model), parameter_counts(model).total
    assert config.ff_width % 64 == 0

    def distance(width: int) -> int:
        return abs(transformer_parameters(TransformerConfig(**{**vars(config), "ff_width": width})).total - target)

    assert distance(config.ff_width) <= distance(config.ff_width + 64)
    assert config.ff_width == 64 or distance(config.ff_width) <= distance(config.ff_width - 64)


def test_operations_are_counted_as_ours_are() -> None:
    """A hybrid whose every layer attends to the whole input is a Transformer++: both counts must agree."""
    ours = ModelConfig(
        d_model=64, n_layers=3, channels=4, value_width=16, ff_width=192, vocab_size=100,
        attention_layers=(0, 1, 2), window=None, head_dim=16,
    )  # fmt: skip
    config = matched_config(ours)
    assert config.ff_width == ours.ff_width
    for length in (1, 2, 63):
        assert transformer_flops(config, sequence_length=length) == flops_per_token(ours, sequence_length=length)


def test_norms_and_embedding_do_not_decay(transformer) -> None:
    decayed, free = decay_groups(transformer(), "pretrain")
    assert all(".attention." in n or ".feed_forward." in n for n in decayed)
    assert len(decayed) == 2 * 4
    assert len(free) == 2 * 2 + 2


def test_what_it_does_not_have_is_an_error(transformer) -> None:
    model, tokens = transformer(), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(UserError, match="one capacity"):
        model.hidden(tokens, Capacity(1, 64))
    with pytest.raises(UserError, match="gradient_scale"):
        model.hidden(tokens, gradient_scale=GradientScale(0.5, 1.0))
    with pytest.raises(UserError, match=r"model\.head_dim: 64 does not divide model\.d_model 96"):
        matched_config(ModelConfig(d_model=96, n_layers=1, channels=4, value_width=8, ff_width=64, vocab_size=10))
    with pytest.raises(ValueError, match="head_dim must be even and divide d_model 24, got 7"):
        TransformerConfig(d_model=24, n_layers=1, head_dim=7, ff_width=4, vocab_size=4)


@pytest.mark.gpu
def test_compiled_blocks_give_the_eager_results() -> None:
    config = TransformerConfig(d_model=128, n_layers=2, head_dim=64, ff_width=192, vocab_size=256)
    with torch.device("cuda"):
        model = Transformer(config)
    tokens, labels = torch.randint(0, 256, (2, 130), device="cuda"), torch.randint(0, 256, (260,), device="cuda")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            cross_entropy(model.hidden(tokens).flatten(0, 1), model.head_weight, labels).backward()
        return [p.grad.clone() for p in model.parameters()]

    eager = gradients()
    for block in model.blocks:
        block.compile(dynamic=False)
    for expected, actual in zip(eager, gradients(), strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 0.02
