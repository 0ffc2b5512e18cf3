"""Packed documents under a document mask train as the documents alone: the same losses, the same gradients.

At the level of the task: the packed sequence goes through `next_token_task`, as training samples do, with its labels
after document ends ignored; each document alone has its own labels and no mask.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_essh.config import ModelConfig
from megatron_essh.data.packing import next_token_task
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.linear_loss import cross_entropy

EOD = 40
BOTH = ModelConfig(
    d_model=32,
    n_layers=3,
    channels=5,
    modes=4,
    value_width=7,
    ff_width=64,
    vocab_size=41,
    attention_layers=(1,),
    window=12,
    head_dim=8,
    bank_length=64,
)
CONFIGS = {
    "scan": replace(BOTH, attention_layers=()),
    "attention": replace(BOTH, attention_layers=(0, 1, 2)),
    "scan and attention": BOTH,
}


def model_of(config: ModelConfig) -> LanguageModel:
    """A model in fp64 whose every parameter is random, so that no term vanishes as it does at initialisation."""
    generator = torch.Generator().manual_seed(0)
    model = LanguageModel(config, generator=generator).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def documents(seed: int) -> list[np.ndarray]:
    """Documents that end with EOD: some far longer than the window, some of one token, one of EOD alone."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation([1, 2, 2, 5, 13, 30, int(rng.integers(3, 9))])
    return [np.append(rng.integers(0, EOD, length - 1), EOD) for length in lengths]


def summed_loss(
    model: LanguageModel, tokens: np.ndarray, cut_at: int | None, capacity: Capacity | None
) -> torch.Tensor:
    inputs_BT, labels_BT, documents_BT = next_token_task(torch.as_tensor(tokens)[None], cut_at)
    hidden = model.hidden(inputs_BT, capacity, documents_BT=documents_BT)
    return cross_entropy(hidden.flatten(0, 1), model.head_weight, labels_BT.flatten(), chunk=None)


def gradients(model: LanguageModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("capacity", [None, Capacity(3, 17)], ids=["full", "reduced"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_packed_under_a_mask_is_the_documents_alone(config: ModelConfig, capacity: Capacity | None, seed: int) -> None:
    model, texts = model_of(config), documents(seed)
    packed = summed_loss(model, np.concatenate(texts), EOD, capacity)
    alone = sum(summed_loss(model, text, None, capacity) for text in texts if len(text) > 1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0.0)
    whole, parts = gradients(model, packed), gradients(model, alone)
    for name, gradient in parts.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            whole[name], gradient, rtol=1e-9, atol=1e-10 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert sum(float(g.abs().max()) > 1e-6 for g in parts.values()) > len(parts) // 2


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_the_mask_neighbours_are_seen(config: ModelConfig) -> None:
    """What the mask is for: the claim above would fail without it, through either kind of layer."""
    model, texts = model_of(config), documents(0)
    tokens = np.concatenate(texts)
    inputs_BT, labels_BT, _ = next_token_task(torch.as_tensor(tokens)[None], EOD)
    uncut = cross_entropy(model.hidden(inputs_BT).flatten(0, 1), model.head_weight, labels_BT.flatten(), chunk=None)
    assert abs(float(uncut.detach() - summed_loss(model, tokens, EOD, None).detach())) > 1e-3
