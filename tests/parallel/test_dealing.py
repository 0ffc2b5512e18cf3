"""Slots are dealt once each, about evenly in cost, the same way every time."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_essh.config import load_config
from megatron_essh.elastic.capacity import budget_capacity, full_capacity
from megatron_essh.elastic.plan import FULL, pretraining_plan
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import flops_per_token
from megatron_essh.parallel.dealing import check_slots, deal, deal_in_step, slot_costs

CONFIG = load_config(
    Path(__file__).parents[2] / "configs/runs/quickstart.yaml",
    ["elastic.full_only_fraction=0", "training.global_batch=128", "elastic.slot_sequences=8"],
)
costs_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=64)


@given(costs_lists, st.integers(1, 16))
def test_every_slot_is_dealt_once_and_no_rank_gets_more_than_the_mean_and_one_slot(costs, dp) -> None:
    dealt = deal(costs, dp)
    assert sorted(slot for own in dealt for slot in own) == list(range(len(costs)))
    assert all(own == sorted(own) for own in dealt)
    loads = [sum(costs[slot] for slot in own) for own in dealt]
    assert max(loads) <= sum(costs) / dp + max(costs) * (1 - 1 / dp) + 1e-9
    assert deal(list(costs), dp) == dealt


@given(st.data(), st.integers(1, 8), st.integers(1, 8))
def test_in_step_every_rank_runs_as_many_slots_and_those_of_a_place_are_neighbours_in_cost(data, places, dp) -> None:
    costs = data.draw(st.lists(st.floats(0.01, 100), min_size=places * dp, max_size=places * dp))
    dealt = deal_in_step(costs, dp)
    assert sorted(slot for own in dealt for slot in own) == list(range(len(costs)))
    assert [len(own) for own in dealt] == [places] * dp
    by_place = [sorted(costs[own[place]] for own in dealt) for place in range(places)]
    assert all(later[-1] <= earlier[0] for earlier, later in itertools.pairwise(by_place))
    loads = [sum(costs[slot] for slot in own) for own in dealt]
    assert max(loads) - min(loads) <= max(costs) - min(costs) + 1e-9
    assert deal_in_step(list(costs), dp) == dealt


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0.1, 9))
def test_equal_slots_are_dealt_in_turn(slots, dp, cost) -> None:
    assert deal([cost] * (slots * dp), dp) == [list(range(rank, slots * dp, dp)) for rank in range(dp)]


def test_a_slot_costs_its_passes_and_its_teachers() -> None:
    elastic, length = CONFIG.elastic, CONFIG.data.sequence_length
    capacities = {b: budget_capacity(CONFIG.model, elastic, b) for b in (2, 16)} | {FULL: full_capacity(CONFIG.model)}
    flops = {b: flops_per_token(CONFIG.model, c, sequence_length=length) for b, c in capacities.items()}
    full, small, middle = slot_costs(CONFIG, False, [FULL, 2, 16], capacities)
    assert full == 3 * flops[FULL].forward
    assert small == 3 * flops[2].forward + flops[FULL].forward
    assert small < middle
    assert slot_costs(CONFIG, True, [2], capacities) == [3 * flops[2].forward + full]


def test_the_recipes_plans_are_shared_within_a_few_percent() -> None:
    capacities = {b: budget_capacity(CONFIG.model, CONFIG.elastic, b) for b in CONFIG.elastic.training_budgets}
    capacities[FULL] = full_capacity(CONFIG.model)
    lost = []
    for step in range(300):
        plan = pretraining_plan(CONFIG, step)
        costs = slot_costs(CONFIG, False, plan, capacities)
        loads = [sum(costs[slot] for slot in own) for own in deal(costs, 2)]
        lost.append(1 - sum(loads) / (2 * max(loads)))
    assert len(set(pretraining_plan(CONFIG, 0))) > 1
    assert np.mean(lost) < 0.03, "16 slots on 2 ranks"


@pytest.mark.parametrize(("batch", "dp", "said"), [(128, 3, "set it to 120 or 144"), (16, 4, "set it to 32")])
def test_a_batch_that_replicas_cannot_share_is_refused_with_ones_that_fit(batch, dp, said) -> None:
    with pytest.raises(UserError, match=rf"training.global_batch {batch}: .* among {dp} replicas; {said}"):
        check_slots(batch, 8, dp, "training.global_batch")
    check_slots(128, 8, 16, "training.global_batch")
