"""Every bank by name is what section 2 says of it, at every size a config can ask for."""

from __future__ import annotations

import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.config.model import BankName
from megatron_essh.errors import UserError
from megatron_essh.spectral.banks import Bank, build_bank
from megatron_essh.spectral.hankel import hankel_eigenpairs, resolved_channels
from megatron_essh.spectral.matrix_pencil import response

NAMES = typing.get_args(BankName)
TABLES = ("rho", "theta", "kc", "ks")


def assert_equal(a: Bank, b: Bank) -> None:
    for table in TABLES:
        np.testing.assert_array_equal(getattr(a, table), getattr(b, table))


@pytest.mark.parametrize(
    ("channels", "errors"),
    [(8, [0.0000, 0.0001, 0.0001, 0.0002, 0.0007, 0.0007, 0.0036, 0.0356]), (32, [])],
)
def test_the_hankel_bank_fits_the_hankel_channels(channels: int, errors: list[float]) -> None:
    bank = build_bank("hankel", channels, 8)
    _, phi = hankel_eigenpairs(2048, channels)
    found = [np.linalg.norm(response(bank[k], 2048) - phi[k]) for k in range(channels)]
    np.testing.assert_allclose(found[: len(errors)], errors, atol=0.6e-4)
    # what the modes leave of the higher channels weighs little: the paper's bound on both errors
    sigma, _ = hankel_eigenpairs(2048, 48)
    n = 2.0 * np.arange(1, 2049)
    trace = np.sum(2 / ((n - 1) * n * (n + 1)))
    assert sigma[channels:].sum() + sigma[:channels] @ np.square(found) < 4e-6 * trace


@pytest.mark.parametrize("modes", [4, 16])
def test_a_smaller_hankel_bank_is_a_prefix_of_a_larger_one(modes: int) -> None:
    small, large = build_bank("hankel", 3, modes), build_bank("hankel", 5, modes)
    for table in TABLES:
        assert getattr(large, table).shape == (5, modes)
        np.testing.assert_array_equal(getattr(small, table), getattr(large, table)[:3])


def test_sixty_four_channels_repeat_the_last_one_that_float64_resolves() -> None:
    bank, first = build_bank("hankel", 64, 8), build_bank("hankel", 32, 8)
    resolved = resolved_channels(2048)
    assert 36 <= resolved < 64
    for table in TABLES:
        values = getattr(bank, table)
        assert np.all(np.isfinite(values))
        np.testing.assert_array_equal(values[:32], getattr(first, table))
        np.testing.assert_array_equal(values[resolved:], np.repeat(values[resolved - 1 : resolved], 64 - resolved, 0))
    assert not np.array_equal(bank.rho[resolved - 2], bank.rho[resolved - 1])


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    channels=st.integers(1, 64),
    modes=st.sampled_from([1, 3, 4, 8, 16]),
    extra=st.integers(0, 70),
    seed=st.integers(0, 2**40),
)
def test_any_bank_of_any_size_is_finite_stable_and_the_same_every_time(
    name: str, channels: int, modes: int, extra: int, seed: int
) -> None:
    length = 4 * modes + extra
    bank = build_bank(name, channels, modes, length, seed)
    for table in TABLES:
        values = getattr(bank, table)
        assert values.shape == (channels, modes)
        assert values.dtype == np.float64
        assert np.all(np.isfinite(values))
    assert np.all((bank.rho > 0) & (bank.rho < 1))
    assert_equal(bank, build_bank(name, channels, modes, length, seed))


def test_non_oscillatory_modes_decay_by_a_hundredth_and_read_nothing() -> None:
    bank = build_bank("non_oscillatory", 5, 4)
    assert np.all(bank.rho == math.exp(-0.01))
    assert not np.any(bank.theta)
    assert not np.any(bank.kc)
    assert not np.any(bank.ks)


def test_slot_shuffle_is_a_seeded_permutation_of_the_hankel_channels() -> None:
    hankel = build_bank("hankel", 24, 4, 256)
    shuffled = build_bank("slot_shuffle", 24, 4, 256, seed=7)
    order = [int(np.flatnonzero((hankel.rho == row).all(axis=1))[0]) for row in shuffled.rho]
    assert sorted(order) == list(range(24))
    assert order != sorted(order)
    for table in TABLES:
        np.testing.assert_array_equal(getattr(shuffled, table), getattr(hankel, table)[order])
    assert not np.array_equal(build_bank("slot_shuffle", 24, 4, 256, seed=8).rho, shuffled.rho)


def test_uniform_decay_changes_nothing_but_the_decay() -> None:
    hankel, uniform = build_bank("hankel", 9, 4, 128), build_bank("uniform_decay", 9, 4, 128)
    assert np.all(uniform.rho == math.exp(-0.01))
    for table in ("theta", "kc", "ks"):
        np.testing.assert_array_equal(getattr(uniform, table), getattr(hankel, table))


def test_random_damped_draws_over_the_fitted_range_and_keeps_the_readout_scale() -> None:
    hankel, drawn = build_bank("hankel", 32, 8), build_bank("random_damped", 32, 8, seed=5)
    for values, fitted in (
        (-np.log(drawn.rho), -np.log(hankel.rho)),
        (drawn.theta, np.abs(hankel.theta[hankel.theta != 0])),
    ):
        low, high = np.log(fitted.min()), np.log(fitted.max())
        uniform = (np.log(values.ravel()) - low) / (high - low)
        assert uniform.min() >= -1e-9
        assert uniform.max() <= 1 + 1e-9
        # Kolmogorov-Smirnov distance of 256 draws; above 0.13 for one seed in 10,000
        distance = np.abs(np.sort(uniform) - (np.arange(256) + 0.5) / 256).max()
        assert distance < 0.13
    np.testing.assert_allclose(
        np.mean(drawn.kc**2 + drawn.ks**2, axis=1), np.mean(hankel.kc**2 + hankel.ks**2, axis=1), rtol=1e-12
    )
    assert not np.array_equal(build_bank("random_damped", 32, 8, seed=6).rho, drawn.rho)


def test_random_damped_without_any_fitted_rotation_does_not_rotate() -> None:
    assert not np.any(build_bank("hankel", 1, 4, 256).theta)
    assert not np.any(build_bank("random_damped", 1, 4, 256).theta)


@pytest.mark.parametrize("channels", [1, 2, 17])
def test_s4d_lin_is_the_linear_grid_of_frequencies_at_log_spaced_steps(channels: int) -> None:
    bank = build_bank("s4d_lin", channels, 6, 512)
    step = -2 * np.log(bank.rho[:, 0])
    assert step[0] == pytest.approx(1e-3)
    if channels > 1:
        assert step[-1] == pytest.approx(0.1)
        np.testing.assert_allclose(np.diff(np.log(step)), np.log(100) / (channels - 1), rtol=1e-9)
    np.testing.assert_allclose(bank.rho, np.exp(-step / 2)[:, None] * np.ones(6), rtol=1e-12)
    np.testing.assert_allclose(bank.theta, np.pi * np.outer(step, range(6)), rtol=1e-12)
    assert not np.any(bank.ks)
    for k in range(channels):
        assert np.linalg.norm(response(bank[k], 512)) == pytest.approx(1)
        assert np.all(bank.kc[k] == bank.kc[k, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hankle", 4, 4), "'hankle' is none of hankel, random_damped"),
        (("hankel", 0, 4), "0 channels"),
        (("s4d_lin", 4, 0), "0 modes"),
        (("hankel", 4, 8, 31), "length 31"),
        (("random_damped", 4, 8, 64, -1), "seed -1"),
    ],
)
def test_impossible_banks_are_refused(arguments: tuple[typing.Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_bank(*arguments)
