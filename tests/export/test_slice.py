"""A tier is a prefix of rows, stored in memory of its own, and as large as the closed form says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_essh.elastic.capacity import Capacity, full_capacity, tier_capacities
from megatron_essh.errors import UserError
from megatron_essh.export.slice import kept_rows, slice_config, slice_tensors, tier_parameters
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.model.language_model import LanguageModel

CAPACITIES = st.builds(Capacity, st.integers(1, 6), st.integers(1, 192))


@pytest.fixture
def tensors(tiny_config, random_model):
    return dict(random_model(tiny_config.model).named_parameters())


@given(capacity=CAPACITIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_cut_has_exactly_the_shapes_of_the_standalone_model(capacity, tiny_config, tensors):
    cut = slice_tensors(tensors, tiny_config.model, capacity)
    with torch.device("meta"):
        standalone = LanguageModel(slice_config(tiny_config.model, capacity))
    assert {n: t.shape for n, t in cut.items()} == {n: p.shape for n, p in standalone.named_parameters()}
    count = sum(t.numel() for t in cut.values())
    assert count == tier_parameters(tensors, tiny_config.model, capacity)
    assert count == parameter_counts(tiny_config.model, capacity).total


def test_rows_are_the_first_rows_and_nothing_else_changes(tiny_config, tensors):
    capacity = Capacity(4, 70)
    rows = {"mixer.in_proj": 4, "mixer.beta": 4, "mixer.out_proj": 4 * 5, "gate_up": 70, "feed_forward.down": 70}
    for name, cut in slice_tensors(tensors, tiny_config.model, capacity).items():
        expected = tensors[name]
        for ending, count in rows.items():
            if name.endswith(ending):
                assert len(expected) > count
                expected = expected[:count]
        if "mixer." in name and not name.endswith("out_proj"):
            assert len(cut) == 4, name
            expected = expected[:4]
        assert torch.equal(cut, expected), name


def test_cut_keeps_only_its_own_storage(tiny_config, tensors):
    cut = slice_tensors(tensors, tiny_config.model, Capacity(2, 64))
    for name, tensor in cut.items():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
    memory = {t.untyped_storage().data_ptr() for t in [*cut.values(), *tensors.values()]}
    assert len(memory) == len(cut) + len(tensors)


def test_dtypes_are_kept(tiny_config, tensors):
    tensors = {n: t.to(torch.bfloat16 if "gate_up" in n else torch.float64) for n, t in tensors.items()}
    cut = slice_tensors(tensors, tiny_config.model, Capacity(1, 3))
    assert {n: t.dtype for n, t in cut.items()} == {n: t.dtype for n, t in tensors.items()}


def test_cutting_twice_is_cutting_once(tiny_config, tensors):
    middle, small = Capacity(5, 128), Capacity(3, 64)
    once = slice_tensors(tensors, tiny_config.model, small)
    step = slice_tensors(tensors, tiny_config.model, middle)
    twice = slice_tensors(step, slice_config(tiny_config.model, middle), small)
    assert all(torch.equal(once[n], twice[n]) for n in once)
    assert slice_config(slice_config(tiny_config.model, middle), small) == slice_config(tiny_config.model, small)


def test_tier_names_mean_the_same_in_an_export(tiny_config):
    model, elastic = tiny_config.model, tiny_config.elastic
    exported = slice_config(model, tier_capacities(model, elastic)["T7"])
    assert tier_capacities(exported, elastic) == tier_capacities(model, elastic)


def test_every_parameter_of_the_model_has_a_rule(tiny_config, tensors):
    full = full_capacity(tiny_config.model)
    for name, tensor in tensors.items():
        assert kept_rows(name, tiny_config.model, full) in (None, len(tensor)), name


@pytest.mark.parametrize("capacity", [Capacity(7, 64), Capacity(6, 193), Capacity(0, 64), Capacity(1, 0)], ids=str)
def test_more_than_the_source_holds_is_refused(capacity, tiny_config, tensors):
    with pytest.raises(UserError, match=r"more than the source holds.*6,192"):
        slice_tensors(tensors, tiny_config.model, capacity)
    with pytest.raises(UserError, match="more than the source holds"):
        slice_config(tiny_config.model, capacity)


@pytest.mark.parametrize(
    "name", ["blocks.0.mixer.gamma", "blocks.0.mixer.theta.extra", "module.embedding.weight", "theta"]
)
def test_a_tensor_without_a_rule_is_refused_by_name(name, tiny_config, tensors):
    with pytest.raises(UserError, match=f"tensor {name}"):
        slice_tensors({**tensors, name: torch.zeros(6)}, tiny_config.model, Capacity(1, 1))


def test_tensors_of_another_size_are_refused(tiny_config, tensors):
    other = dataclasses.replace(tiny_config.model, channels=8)
    with pytest.raises(UserError, match=r"blocks\.0\.mixer\.in_proj: 6 rows.*8"):
        slice_tensors(tensors, other, Capacity(2, 64))
