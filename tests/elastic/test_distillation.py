"""Micro-batch losses: a factor given on the way forward against the same factor on the objective."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_essh.elastic.capacity import Capacity
from megatron_essh.elastic.distillation import full_loss, reduced_loss, refinement_loss

FACTOR = 1 / 37


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
@pytest.mark.parametrize("loss", [full_loss, reduced_loss, refinement_loss])
def test_gradients_have_the_factor_and_values_do_not(loss, kl_weight, tiny_config, random_model):
    elastic = dataclasses.replace(tiny_config.elastic, kl_weight=kl_weight, reduced_ce_weight=0.7)
    config = dataclasses.replace(tiny_config, elastic=elastic)
    model = random_model(config.model).requires_grad_(True)
    tokens = torch.randint(0, 256, (2, 25), generator=torch.Generator().manual_seed(3))
    last = None if loss is full_loss else Capacity(3, 64)
    case = (model, config, tokens[:, :-1], tokens[:, 1:], None, last)

    def run(grad_scale):
        model.zero_grad()
        found = loss(*case, grad_scale=grad_scale)
        (found.objective if grad_scale is not None else found.objective * FACTOR).backward()
        named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return found, named

    plain, expected = run(None)
    scaled, actual = run(torch.tensor(FACTOR))
    for field in dataclasses.fields(plain):
        one, other = getattr(scaled, field.name), getattr(plain, field.name)
        assert (one is None and other is None) or torch.equal(one, other), field.name
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        error = torch.linalg.vector_norm(actual[name] - gradient)
        assert error <= 1e-5 * torch.linalg.vector_norm(gradient), name
