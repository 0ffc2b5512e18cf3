"""Guards tell what is wrong and are silent about what is not."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_essh.errors import UserError
from megatron_essh.training.guard import RankTimes, SkipGuard, SpikeDetector, StepClock, fingerprint
from megatron_essh.training.step_sums import Skip

SKIP = Skip(math.nan, 1.0, 3, (6, 8), "8/32", ())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_skips_in_a_row_are_counted_to_the_limit(limit) -> None:
    guard = SkipGuard(limit)
    for _ in range(limit):
        guard.count(0, SKIP)
    guard.count(1, None)
    for _ in range(limit):
        guard.count(2, SKIP)
    with pytest.raises(UserError, match=rf"step 8: loss nan.*micro-batch 3.*8/32.* {limit + 1} times.*skip_limit is"):
        guard.count(7, SKIP)


def losses(seed: int, steps: int) -> np.ndarray:
    """A run's: falling fast and then slowly, noisy."""
    noise = np.random.default_rng(seed).normal(size=steps)
    return 3 + 7 * np.exp(-np.arange(steps) / 60) + 0.05 * noise


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_noisy_loss_has_no_spikes_and_a_jump_is_one(seed) -> None:
    detector = SpikeDetector()
    for step, loss in enumerate(losses(seed, 2000)):
        assert detector.add(loss) is None, step
    assert detector.add(4.5) == pytest.approx(3, abs=0.1)
    assert detector.add(3.0) is None, "the spike has not moved what is expected"
    later = [detector.add(4.0) for _ in range(300)]
    assert later[0] is not None
    assert later[-1] is None, "a level that stays becomes the expected one"


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=80), st.integers(0, 80))
def test_a_detector_continued_through_json_is_the_uninterrupted_one(values, cut) -> None:
    whole, first, second = SpikeDetector(), SpikeDetector(), SpikeDetector()
    expected = [whole.add(v) for v in values]
    found = [first.add(v) for v in values[:cut]]
    second.load_state(json.loads(json.dumps(first.state_values())))
    assert found + [second.add(v) for v in values[cut:]] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 2, 6)])
def test_a_fingerprint_sees_every_bit_and_the_place_of_rows(shape, dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = fingerprint(tensor)
    assert torch.equal(own, fingerprint(tensor.clone()))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for place in range(tensor.numel()):
        for bit in range(8 * tensor.element_size() - 1):
            other = tensor.clone()
            other.view(bits).view(-1)[place] ^= 1 << bit
            assert not torch.equal(own, fingerprint(other)), (place, bit)
    assert not torch.equal(own, fingerprint(tensor.flip(0)))
    assert fingerprint(tensor[:0]).item() == 0, "a part may be empty"


def test_rank_times_tell_communication_from_waiting_and_name_the_slowest() -> None:
    times = [RankTimes(2) for _ in range(2)]
    assert times[0].take() is None
    # Rank 1 needs 3 s for the work that rank 0 does in 2 s; the reduction itself takes 0.5 s.
    for _ in range(3):
        rows = np.sum([t.row(rank) for rank, t in enumerate(times)], 0).tolist()
        for rank, each in enumerate(times):
            each.add(rows)
            each.note((2.0, 1.5) if rank == 0 else (3.0, 0.5), [1.0, 1.0])
    told = times[0].take()
    assert told == times[1].take()
    assert told["communication_share"] == pytest.approx(0.5 / 3.5)
    assert told["waiting_share"] == pytest.approx(0.5 / 3.5)
    assert (told["slowest_rank"], told["slowest_pace"]) == (1, pytest.approx(3 / 2.5))


def test_a_rank_with_more_work_is_no_slower() -> None:
    times = RankTimes(2)
    times.note((2.0, 0.0), [2.0, 1.0])
    times.add([2.0, 0.0, 1.0, 1.0])
    assert times.take()["slowest_pace"] == pytest.approx(1)


def test_a_clock_tells_work_from_reduction() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    time.sleep(0.02)
    clock.reduce()
    time.sleep(0.01)
    clock.end()
    work, reduction = clock.read()
    assert 0.02 <= work < 0.5
    assert 0.01 <= reduction < 0.5
