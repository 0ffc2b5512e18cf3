"""The global batch as a function of the step: constant, or a ramp; loader, plan and token counts all follow it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.config import RunConfig, load_config
from megatron_essh.data.batch_schedule import BatchSchedule
from megatron_essh.elastic.plan import FULL, pretraining_plan, trains_full_only
from megatron_essh.errors import UserError

BASE = Path(__file__).parents[2] / "configs" / "models" / "370m.yaml"


def config(*overrides: str) -> RunConfig:
    return load_config(BASE, overrides)


@settings(max_examples=300, deadline=None)
@given(start=st.integers(1, 20), increment=st.integers(1, 20), steps=st.integers(1, 8), samples=st.integers(1, 3000))
def test_a_ramp_is_megatrons_step_by_step(start: int, increment: int, steps: int, samples: int) -> None:
    batch = start + steps * increment
    schedule = BatchSchedule.ramp(start, increment, samples, batch)
    consumed = 0
    for step in range(300):
        # Megatron: start + increment * int(consumed / (samples / increments)), in whole numbers here.
        expected = batch if consumed >= samples else start + increment * (consumed * steps // samples)
        assert schedule.batch(step) == schedule.batch_after(consumed) == expected
        assert schedule.samples_before(step) == consumed
        assert schedule.step_at(consumed) == step
        if expected > 1:
            with pytest.raises(ValueError, match=f"no step begins after {consumed + 1} samples"):
                schedule.step_at(consumed + 1)
        consumed += expected


def test_a_constant_batch_is_one() -> None:
    schedule = BatchSchedule.constant(32)
    assert [schedule.batch(0), schedule.batch(10**9), schedule.samples_before(10**9)] == [32, 32, 32 * 10**9]


def test_the_plan_has_a_slot_for_every_eight_sequences_of_the_step() -> None:
    run = config("data.batch_ramp={start: 32, increment: 16, samples: 3000}", "elastic.full_only_tokens=0")
    schedule = BatchSchedule.of_pretraining(run)
    sizes = set()
    for step in range(60):
        plan = pretraining_plan(run, step)
        assert len(plan) * run.elastic.slot_sequences == schedule.batch(step)
        assert sum(budget == FULL for budget in plan) >= int(0.75 * len(plan))
        sizes.add(schedule.batch(step))
    assert sizes == {32, 48, 64, 80, 96, 112, 128}


def test_after_the_ramp_the_plan_is_the_plan_without_one() -> None:
    ramped = config("data.batch_ramp={start: 32, increment: 32, samples: 300}", "elastic.full_only_tokens=0")
    plain = config("elastic.full_only_tokens=0")
    assert [pretraining_plan(ramped, step) for step in range(20, 40)] == [
        pretraining_plan(plain, step) for step in range(20, 40)
    ]


def test_the_full_capacity_warm_up_counts_the_tokens_that_a_ramp_really_takes() -> None:
    tokens = 100 * 2048
    run = config("data.batch_ramp={start: 8, increment: 8, samples: 1000}", f"elastic.full_only_tokens={tokens}")
    schedule = BatchSchedule.of_pretraining(run)
    first = next(step for step in range(100) if not trains_full_only(run, step))
    assert schedule.samples_before(first - 1) < 100 <= schedule.samples_before(first)
    assert first > 5  # a constant batch of 128 would end it after one step


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ("{start: 12, increment: 8, samples: 100}", r"batch_ramp\.start 12 is not a multiple of .* 8: .*; try 16"),
        ("{start: 8, increment: 4, samples: 100}", r"batch_ramp\.increment 4 is not a multiple of .* 8: .*; try 8"),
        ("{start: 8, increment: 16, samples: 100}", r"from 8 by 16 never is training\.global_batch 128"),
        ("{start: 128, increment: 8, samples: 100}", r"from 128 by 8 never is training\.global_batch 128"),
        ("{start: 8, increment: 8, samples: 0}", r"batch_ramp\.samples must be at least 1, got 0"),
        ("{start: 8, increment: 8}", r"missing key data\.batch_ramp\.samples"),
    ],
)
def test_a_ramp_that_does_not_fit_is_refused_with_what_would(ramp: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(f"data.batch_ramp={ramp}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train=a", "data.blend=[b]"], "train is a and blend names 1 pairs; give one of them"),
        (["data.blend=[a, b]", "data.blend_weights=[1]"], "blend_weights has 1 entries and blend 2"),
        (["data.blend=[a]", "data.blend_weights=[0]"], r"blend_weights must be positive, got 0\.0"),
        (["data.split=[1, 1]"], "split has 2 shares; give three"),
        (["data.split=[0, 1, 1]"], "split must give training documents"),
        (["data.split=[1, -1, 1]"], "no negative share"),
        (["data.split=[8, 1, 1]", "data.validation=v"], r"split gives validation a share of 1\.0 and validation is v"),
        (["data.index_cache=''"], "index_cache is empty"),
        (["data.workers=-1"], "workers must lie in 0 to 64, got -1"),
    ],
)
def test_data_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(*overrides)
