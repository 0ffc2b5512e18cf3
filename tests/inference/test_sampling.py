"""The distribution of the next token against brute force over every filter, and the draws against it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_essh.errors import UserError
from megatron_essh.inference import SamplingConfig, draw, token_probabilities


def brute_force(logits: list[float], config: SamplingConfig, real: list[bool], seen: list[bool]) -> list[float]:
    """The definition, one token at a time, in Python numbers."""
    penalty = config.repetition_penalty
    logits = [(x / penalty if x > 0 else x * penalty) if s else x for x, s in zip(logits, seen, strict=True)]
    ids = [i for i in range(len(logits)) if real[i]]
    best = max(ids, key=lambda i: (logits[i], -i))
    if config.temperature == 0:
        return [float(i == best) for i in range(len(logits))]
    weight = {i: math.exp((logits[i] - logits[best]) / config.temperature) for i in ids}
    order = sorted(ids, key=lambda i: (-weight[i], i))
    if config.top_k is not None:
        order = order[: config.top_k]
    mass = math.fsum(weight[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        if kept and reached >= config.top_p:
            break
        kept.append(i)
        reached += weight[i] / mass
    kept = [i for i in kept if weight[i] >= config.min_p * weight[best]]
    total = math.fsum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))]


@given(
    # Few distinct values, so that ties are common; the false entries would win if they were not kept out.
    logits=st.lists(
        st.tuples(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), st.booleans(), st.booleans()), min_size=1, max_size=14
    ),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.one_of(st.none(), st.integers(1, 20)),
    # Off the sums that those values make, where rounding would decide.
    top_p=st.one_of(st.just(1.0), st.floats(0.011, 0.989).map(lambda p: round(p, 2) + 0.000371)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.98).map(lambda p: round(p, 2) + 0.000371)),
    penalty=st.sampled_from([1.0, 2.0, 0.5]),
)
@settings(max_examples=300, deadline=None)
def test_distribution_equals_brute_force(logits, temperature, top_k, top_p, min_p, penalty):
    real, seen = [flag for _, flag, _ in logits], [flag for _, _, flag in logits]
    assume(any(real))
    values = [value if flag else 9.0 for value, flag, _ in logits]
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    expected = torch.tensor(brute_force(values, config, real, seen), dtype=torch.float64)
    actual = token_probabilities(
        torch.tensor([values]), config, real_V=torch.tensor(real), seen_BV=torch.tensor([seen])
    )
    torch.testing.assert_close(actual[0], expected, rtol=1e-12, atol=1e-15)


def test_rows_are_filtered_independently():
    logits = torch.randn(5, 17, generator=torch.Generator().manual_seed(1))
    config = SamplingConfig(temperature=0.7, top_k=6, top_p=0.8)
    together = token_probabilities(logits, config)
    for row, expected in zip(logits, together, strict=True):
        assert torch.equal(token_probabilities(row[None], config)[0], expected)


def test_top_p_one_keeps_the_faintest_token():
    logits = torch.tensor([[0.0, -600.0, -30.0]], dtype=torch.float64)
    probabilities = token_probabilities(logits, SamplingConfig(top_p=1.0, top_k=3))
    assert (probabilities > 0).all()


def test_top_p_boundary_is_reached_exactly():
    quarters = torch.zeros(1, 4)  # each token holds 1/4 exactly
    kept = token_probabilities(quarters, SamplingConfig(top_p=0.5))
    assert kept.tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert token_probabilities(quarters, SamplingConfig(top_p=0.5000001))[0].count_nonzero() == 3
    assert token_probabilities(quarters, SamplingConfig(top_p=1e-9)).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_tiny_temperature_sharpens_to_the_greedy_choice_without_overflow():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 100
    greedy = token_probabilities(logits, SamplingConfig(temperature=0.0))
    torch.testing.assert_close(token_probabilities(logits, SamplingConfig(temperature=1e-300)), greedy)


def test_padding_is_never_sampled_even_when_nothing_else_is_likely():
    real = torch.arange(8) < 6
    logits = torch.full((1, 8), -100.0)
    logits[0, 6:] = 100.0
    for temperature in (0.0, 1.0, 50.0):
        probabilities = token_probabilities(logits, SamplingConfig(temperature=temperature), real_V=real)
        assert probabilities[0, 6:].tolist() == [0.0, 0.0]
        assert int(draw(probabilities, torch.tensor([1 - 2**-53], dtype=torch.float64))) < 6


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(poison):
    logits = torch.zeros(2, 5)
    logits[1, 3] = poison
    with pytest.raises(UserError, match="not finite"):
        token_probabilities(logits, SamplingConfig())
    token_probabilities(logits, SamplingConfig(), real_V=torch.arange(5) < 3)  # in the padding it does not matter


def test_draws_follow_the_distribution():
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(3)) * 2
    probabilities = token_probabilities(logits, SamplingConfig(temperature=1.3, top_k=15, top_p=0.95))[0]
    draws = 200_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    counts = torch.bincount(draw(probabilities.expand(draws, -1), uniform), minlength=24)
    live = probabilities > 0
    assert counts[~live].sum() == 0
    expected = probabilities[live] * draws
    chi_square = float(((counts[live] - expected) ** 2 / expected).sum())
    freedom = int(live.sum()) - 1
    assert freedom >= 5
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations above the mean


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=1, max_size=10).filter(any),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
@settings(max_examples=300, deadline=None)
def test_no_uniform_number_draws_an_impossible_token(weights, uniform):
    probabilities = torch.tensor([weights], dtype=torch.float64)
    probabilities /= probabilities.sum()
    token = int(draw(probabilities, torch.tensor([uniform], dtype=torch.float64)))
    assert probabilities[0, token] > 0


def test_a_target_that_rounding_puts_past_the_end_draws_the_last_possible_token():
    probabilities = torch.tensor([[0.25, 0.75, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    assert draw(probabilities, torch.ones(2, dtype=torch.float64)).tolist() == [1, 2]


def test_of_many_equals_the_lower_ids_stay():
    kept = token_probabilities(torch.zeros(1, 20_000), SamplingConfig(top_k=7))
    assert kept[0].nonzero().flatten().tolist() == list(range(7))


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": math.inf}, "temperature: inf"),
        ({"temperature": math.nan}, "temperature: nan"),
        ({"top_k": 0}, "top_k: 0"),
        ({"top_p": 0.0}, "top_p: 0.0"),
        ({"top_p": 1.01}, "top_p: 1.01"),
        ({"top_p": math.nan}, "top_p: nan"),
        ({"min_p": 1.01}, "min_p: 1.01"),
        ({"min_p": math.nan}, "min_p: nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty: inf"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings_, message):
    with pytest.raises(UserError, match=message):
        SamplingConfig(**settings_)
