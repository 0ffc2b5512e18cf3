"""The two-rate map gives the specification's tables, and names mean the family's sizes wherever they are read."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_essh.config import ElasticConfig, load_config
from megatron_essh.elastic.capacity import Capacity, budget_capacity, parse_capacity, tier_capacities
from megatron_essh.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
CHANNELS = [8, 11, 15, 18, 20, 23, 25, 28, 30, 32]
WIDTHS = {
    "370m": [448, 832, 1344, 1792, 2240, 2752, 3136, 3648, 4096, 4608],
    "1p5b": [576, 1024, 1664, 2176, 2688, 3392, 3840, 4416, 5056, 5632],
}


@pytest.mark.parametrize("name", WIDTHS)
def test_deployment_tiers_are_the_specifications(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    tiers = tier_capacities(config.model, config.elastic)
    assert list(tiers) == [f"T{i}" for i in range(1, 11)]
    assert [c.channels for c in tiers.values()] == CHANNELS
    assert [c.ff_width for c in tiers.values()] == WIDTHS[name]


def test_channel_sweep_caps_the_budget_at_one():
    model = replace(load_config(CONFIGS / "370m.yaml").model, channels=64, value_width=14)
    elastic = ElasticConfig(budget_denominator=64)
    assert budget_capacity(model, elastic, 32).channels == 45  # xi = 1/2
    narrow = replace(model, channels=8, value_width=112)
    assert budget_capacity(narrow, ElasticConfig(budget_denominator=8), 32) == Capacity(8, 4608)


def test_zero_exponent_nests_the_mixer_only():
    config = load_config(CONFIGS / "370m.yaml", ["elastic.ff_exponent=0"])
    assert {c.ff_width for c in tier_capacities(config.model, config.elastic).values()} == {4608}


@given(st.integers(1, 32), st.integers(1, 32), st.integers(1, 64), st.integers(1, 100))
def test_more_budget_never_means_less(low, high, channels, blocks):
    model = replace(load_config(CONFIGS / "370m.yaml").model, channels=channels, ff_width=64 * blocks)
    a, b = (budget_capacity(model, ElasticConfig(), x) for x in sorted((low, high)))
    assert a.channels <= b.channels <= channels
    assert a.ff_width <= b.ff_width <= 64 * blocks
    assert a.ff_width % 64 == 0


def test_names_resolve_against_the_family_in_an_export():
    config = load_config(CONFIGS / "370m.yaml")
    export = replace(config.model, channels=18, ff_width=1792, family_channels=32, family_ff_width=4608)
    assert parse_capacity("T1", export, config.elastic) == Capacity(8, 448)
    assert parse_capacity("T4", export, config.elastic) == parse_capacity("full", export, config.elastic)
    with pytest.raises(UserError, match="25 channels"):
        parse_capacity("T7", export, config.elastic)


@pytest.mark.parametrize(
    "text", ["T0", "T11", "t1", "", "8", "8,", "8,448,1", "-1,64", "0,64", "33,64", "8,4609", "a,b"]
)
def test_what_is_no_capacity_of_the_model_is_refused(text):
    config = load_config(CONFIGS / "370m.yaml")
    with pytest.raises(UserError, match="capacity"):
        parse_capacity(text, config.model, config.elastic)


def test_any_pair_within_the_model_is_a_capacity():
    config = load_config(CONFIGS / "370m.yaml")
    assert parse_capacity("12,641", config.model, config.elastic) == Capacity(12, 641)
