"""Draws of many rows without sorting are those of the definition, row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_essh.inference import device_sampling
from megatron_essh.inference.device_sampling import (
    NOT_FINITE,
    Needs,
    RowSettings,
    SlotSampling,
    draw_rows,
    uniform,
)
from megatron_essh.inference.sampling import SamplingConfig, draw, token_probabilities


def rows_of(configs, device="cpu", entries=1 << 20):
    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    return RowSettings(
        column([c.temperature for c in configs], torch.float64),
        column([c.top_k or entries for c in configs], torch.int64),
        column([c.top_p for c in configs], torch.float64),
        column([c.min_p for c in configs], torch.float64),
        column([c.repetition_penalty for c in configs], torch.float32),
    )


def defined(logits, config, uniform_number, real, seen):
    """The definition, one row alone."""
    probabilities = token_probabilities(logits[None], config, real_V=real, seen_BV=seen[None])
    return int(draw(probabilities, uniform_number[None]))


CONFIGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.one_of(st.none(), st.integers(1, 20)),
    # Off the sums and shares that the values below make, where rounding would decide.
    top_p=st.one_of(st.just(1.0), st.floats(0.011, 0.989).map(lambda p: round(p, 2) + 0.000371)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.98).map(lambda p: round(p, 2) + 0.000371)),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
)


@given(
    # Few distinct values, so that ties are common, of both signs of zero; entries that are no tokens would win.
    logits=st.lists(
        st.tuples(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, -math.inf]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=14,
    ),
    config=CONFIGS,
    other=CONFIGS,
    uniform_number=st.one_of(st.floats(0.0, 1 - 2**-53), st.sampled_from([0.0, 1 - 2**-53])),
)
@settings(max_examples=400, deadline=None)
def test_draws_are_those_of_the_definition(logits, config, other, uniform_number):
    values = torch.tensor([value if real else 9.0 for value, real, _ in logits])
    real = torch.tensor([flag for _, flag, _ in logits])
    seen = torch.tensor([flag for _, _, flag in logits])
    assume(bool(values[real].isfinite().any()))
    uniform_1 = torch.tensor(uniform_number, dtype=torch.float64)
    expected = defined(values, config, uniform_1, real, seen)
    # Beside a row of other settings, and with no less than what both need.
    actual = draw_rows(
        torch.stack([values.flip(0), values]),
        rows_of([other, config]),
        torch.stack([1 - uniform_1 - 2**-53, uniform_1]),
        Needs.of([other, config]),
        real_V=real,
        seen_BV=torch.stack([seen, seen]),
    )[1]
    if int(actual) == expected:
        return
    # Rounding may put a number that falls on the edge of two tokens to either side, and nothing else may.
    probabilities = token_probabilities(values[None], config, real_V=real, seen_BV=seen[None])
    assert probabilities[0, actual] > 0
    edges = probabilities[0].cumsum(0)
    assert (edges - uniform_1).abs().min() < 1e-14


@pytest.mark.parametrize("entries", [1, 2, 31, 1000, 50_304])
def test_draws_of_many_settings_over_large_vocabularies(entries, device):
    generator = torch.Generator().manual_seed(entries)
    configs = [
        SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
        for temperature, top_k, top_p, min_p, penalty in [
            (0.0, None, 1.0, 0.0, 1.0),
            (0.0, None, 1.0, 0.0, 1.3),
            (1.0, None, 1.0, 0.0, 1.0),
            (0.7, 50, 1.0, 0.0, 1.0),
            (1.3, None, 0.95, 0.0, 1.1),
            (1.0, 1, 0.5, 0.0, 1.0),
            (2.0, 5000, 0.99, 0.02, 1.0),
            (1.0, None, 1.0, 0.1, 1.2),
            (1e-300, 7, 0.3, 0.0, 1.0),
            (50.0, 300, 1e-9, 0.0, 1.0),
        ]
    ]
    logits = torch.randn(len(configs), entries, generator=generator) * 3
    logits = logits.bfloat16().float()  # many are equal
    seen = torch.rand(len(configs), entries, generator=generator) < 0.1
    real = torch.rand(entries, generator=generator) < 0.98
    real[0] = True
    for _ in range(5):
        numbers = torch.rand(len(configs), dtype=torch.float64, generator=generator)
        actual = draw_rows(
            logits.to(device),
            rows_of(configs, device),
            numbers.to(device),
            Needs.of(configs),
            real_V=real.to(device),
            seen_BV=seen.to(device),
        )
        expected = [defined(*row, real, s) for *row, s in zip(logits, configs, numbers, seen, strict=True)]
        assert actual.tolist() == expected


def test_what_is_not_needed_changes_nothing():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    numbers = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    plain = [SamplingConfig(), SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.4)]
    least = draw_rows(logits, rows_of(plain), numbers, Needs.of(plain))
    seen = torch.ones(3, 200, dtype=torch.bool)
    assert Needs.of(plain) == (True, False, False)
    assert Needs.of(plain[1:2]) == (False, False, False)
    assert torch.equal(least, draw_rows(logits, rows_of(plain), numbers, Needs(True, True, True), seen_BV=seen))


@pytest.mark.parametrize("needs", [Needs(False, False, False), Needs(True, False, False), Needs(True, True, False)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_without_finite_logits_draw_nothing_and_the_others_do(needs, poison):
    logits = torch.zeros(3, 6)
    logits[1, 3] = poison
    logits[2] = -math.inf
    config = SamplingConfig(temperature=0.5, top_k=3, top_p=0.9)
    drawn = draw_rows(logits, rows_of([config] * 3), torch.full((3,), 0.01, dtype=torch.float64), needs)
    assert drawn.tolist() == [0, NOT_FINITE, NOT_FINITE]


MASK = 2**64 - 1


def splitmix64(state):
    """The published generator, in Python's integers."""
    x = (state + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_uniform_numbers_are_splitmix64s(device):
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first number of seed 0, as published
    cases = [(seed, position) for seed in (0, 1, 7, 2**40 + 3, 2**63 - 1) for position in (0, 1, 2, 4096, 10**6)]
    seeds, positions = (torch.tensor(column, device=device) for column in zip(*cases, strict=True))
    expected = [
        (splitmix64((splitmix64(seed) + position * 0x9E3779B97F4A7C15) & MASK) >> 11) * 2.0**-53
        for seed, position in cases
    ]
    assert uniform(seeds, positions).tolist() == expected


def test_uniform_numbers_are_even_and_of_neighbouring_seeds_and_positions_unrelated():
    grid = torch.arange(400)
    numbers = uniform(grid[:, None].expand(-1, 400).flatten(), grid.repeat(400)).view(400, 400)
    counts = torch.histc(numbers.float(), 100, 0, 1)
    assert ((counts - 1600) ** 2 / 1600).sum() < 99 + 5 * math.sqrt(2 * 99)
    centred = numbers - 0.5
    for shifted in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll((1, 1), (0, 1)),
        centred.roll((1, -1), (0, 1)),
    ):
        assert (centred * shifted).mean().abs() < 5 / 12 / 400  # five standard deviations
    assert numbers.flatten().unique().numel() == 160_000


@given(config=CONFIGS, seed=st.integers(0, 2**63 - 1), number=st.floats(0.0, 5.0, exclude_min=True))
@settings(max_examples=100, deadline=None)
def test_a_slot_draws_by_the_very_settings_it_was_given(config, seed, number):
    config = replace(config, temperature=number)
    given = []

    def recording(logits_BV, settings, uniform_B, needs, **rest):
        given.append((settings, uniform_B))
        return torch.zeros(len(logits_BV), dtype=torch.int64)

    sampling = SlotSampling(2, 264, torch.device("cpu"))
    sampling.set(1, config, seed)
    sampling.set(0, SamplingConfig(temperature=9.0, top_k=2, top_p=0.5), 77)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "draw_rows", recording)
        slots, positions = torch.tensor([-1, 1, 0], dtype=torch.int32), torch.tensor([3, 8])
        sampling.draw(torch.zeros(3, 264), slots, positions, Needs(True, True, True))
    ((found, uniform_B),) = given
    expected = rows_of([SamplingConfig(temperature=0.0), config, SamplingConfig(temperature=9.0, top_k=2, top_p=0.5)])
    for name, actual, wanted in zip(RowSettings._fields, found, expected, strict=True):
        assert actual.dtype == wanted.dtype, name
        assert torch.equal(actual.clamp_max(264), wanted.clamp_max(264)), name
    assert uniform_B[1] == uniform(torch.tensor([seed]), torch.tensor([8]))
    assert uniform_B[2] == uniform(torch.tensor([77]), torch.tensor([3]))


def test_a_copied_slot_draws_as_its_source(device):
    sampling = SlotSampling(3, 20, torch.device(device))
    sampling.set(0, SamplingConfig(temperature=1.7, repetition_penalty=3.0), seed=5)
    sampling.begin(torch.tensor([0], device=device), torch.tensor([4, 9, 4], device=device))
    sampling.copy(0, 2)
    logits = torch.linspace(-1, 1, 20, device=device).expand(2, 20).contiguous()
    drawn = []
    for position in range(30):
        positions = torch.full((3,), position, device=device)
        slots = torch.tensor([0, 2], dtype=torch.int32, device=device)
        drawn.append(sampling.draw(logits, slots, positions, Needs(True, True, True)).tolist())
    assert all(first == second for first, second in drawn)
    assert torch.equal(sampling.seen_SV[0], sampling.seen_SV[2])
    assert {4, 9} <= set(sampling.seen_SV[2].nonzero().flatten().tolist())


def test_idle_rows_change_no_slot(device):
    sampling = SlotSampling(3, 20, torch.device(device))
    for slot in range(3):
        sampling.set(slot, SamplingConfig(temperature=0.8, top_k=5), seed=slot)
        sampling.begin(torch.tensor([slot], device=device), torch.tensor([slot + 1, slot + 2], device=device))
    before = sampling.token_S[:3].tolist(), sampling.seen_SV[:3].clone()
    slots = torch.tensor([-1, 1, -1, -1], dtype=torch.int32, device=device)
    logits = torch.full((4, 20), torch.nan, device=device)
    logits[1] = torch.arange(20.0)
    positions = torch.tensor([4, 5, 6], device=device)
    drawn = sampling.draw(logits, slots, positions, Needs(True, True, True))[1]
    assert sampling.token_S[:3].tolist() == [before[0][0], int(drawn), before[0][2]]
    changed = sampling.seen_SV[:3] != before[1]
    assert changed.nonzero().tolist() == [[1, int(drawn)]]
    assert sampling.tokens(slots)[1] == drawn
    assert ((sampling.tokens(slots) >= 0) & (sampling.tokens(slots) < 20)).all()
