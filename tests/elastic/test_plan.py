"""The plan is a pure function of settings, seed and step, with the specification's shares."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_essh.config import load_config
from megatron_essh.elastic.plan import FULL, pretraining_plan, refinement_plan

BASE = Path(__file__).parents[2] / "configs" / "models" / "370m.yaml"


def config(*overrides):
    return load_config(BASE, overrides)


def test_the_plan_is_the_same_every_time_and_differs_by_step_and_seed():
    run = config("elastic.full_only_tokens=0")
    plans = [pretraining_plan(run, step) for step in range(50)]
    assert plans == [pretraining_plan(run, step) for step in range(50)]
    assert len(set(plans)) > 40
    other = config("elastic.full_only_tokens=0", "training.seed=511")
    assert plans != [pretraining_plan(other, step) for step in range(50)]


def test_the_plan_is_pinned():
    """Held to fixed values, so that no dependency's update can silently change which capacities a seed trains."""
    run = config("elastic.full_only_tokens=0")
    assert pretraining_plan(run, 7) == (12, 0, 0, 0, 16, 0, 0, 0, 0, 0, 24, 0, 0, 0, 5, 0)


def test_three_quarters_are_reserved_and_the_rest_uniform():
    run = config("elastic.full_only_tokens=0")
    counts = Counter()
    for step in range(2000):
        plan = pretraining_plan(run, step)
        assert len(plan) == 16
        assert sum(b == FULL for b in plan) >= 12
        counts.update(plan)
    total = sum(counts.values())
    assert abs(counts[FULL] / total - 0.775) < 0.01  # reserved share plus the menu's own full capacity
    reduced = [b for b in run.elastic.training_budgets if b < 32]
    for budget in reduced:
        assert abs(counts[budget] / total - 0.025) < 0.004  # 5 standard deviations
    assert set(counts) == {FULL, *reduced}


def test_every_slot_is_reduced_equally_often():
    run = config("elastic.full_only_tokens=0")
    plans = np.array([pretraining_plan(run, step) for step in range(4000)])
    share = (plans != FULL).mean(0)
    assert np.abs(share - 0.225).max() < 0.033  # 5 standard deviations


def test_a_fraction_of_a_slot_is_rounded_by_a_fair_coin():
    run = config("elastic.full_only_tokens=0", "training.global_batch=48", "elastic.training_budgets=[2]")
    reserved = [sum(b == FULL for b in pretraining_plan(run, step)) for step in range(4000)]  # 0.75 x 6 = 4.5
    assert set(reserved) == {4, 5}
    assert abs(np.mean(reserved) - 4.5) < 0.04


def test_warm_up_trains_the_full_capacity_only():
    run = config()  # 250M tokens at 262,144 a step: steps 0 to 953
    assert set(pretraining_plan(run, 953)) == {FULL}
    assert any(set(pretraining_plan(run, step)) != {FULL} for step in range(954, 964))
    fraction = config("elastic.full_only_fraction=0.1", "training.steps=100")
    assert all(set(pretraining_plan(fraction, step)) == {FULL} for step in range(10))
    assert any(set(pretraining_plan(fraction, step)) != {FULL} for step in range(10, 20))


def test_dense_control_is_full_throughout():
    run = config("elastic.enabled=false", "elastic.full_only_tokens=0")
    assert all(set(pretraining_plan(run, step)) == {FULL} for step in range(100))


def test_refinement_draws_one_budget_a_step():
    run = config()
    plans = [refinement_plan(run, step) for step in range(3000)]
    assert all(len(plan) == 8 and len(set(plan)) == 1 for plan in plans)
    counts = Counter(plan[0] for plan in plans)
    assert set(counts) == {2, 4, 8, 16, 24}
    assert max(abs(c / 3000 - 0.2) for c in counts.values()) < 0.037  # 5 standard deviations


def test_refinement_cycles_through_the_shuffled_tiers():
    run = load_config(BASE.with_name("1p5b.yaml"))
    plans = [refinement_plan(run, step) for step in range(200)]
    budgets = set(run.refinement.budgets)
    for plan in plans:
        assert len(plan) == 16
        assert set(plan[:9]) == budgets
        assert plan[9:] == plan[:7]
    assert len({plan[:9] for plan in plans}) == 200


@pytest.mark.parametrize("batch", [8, 16, 40, 128, 256])
def test_any_batch_of_whole_slots_has_a_plan(batch):
    run = config("elastic.full_only_tokens=0", f"training.global_batch={batch}")
    assert {len(pretraining_plan(run, step)) for step in range(50)} == {batch // 8}
