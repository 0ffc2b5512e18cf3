"""The matrix-pencil fit: exact on what it can represent, as specified on the Hankel channels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.spectral import matrix_pencil
from megatron_essh.spectral.hankel import hankel_eigenpairs
from megatron_essh.spectral.matrix_pencil import RHO_MAX, RHO_MIN, Modes, fit_modes, response


def relative_error(signal: np.ndarray, modes: Modes) -> float:
    return float(np.linalg.norm(signal - response(modes, len(signal))) / np.linalg.norm(signal))


def modes_of(*rows: tuple[float, float, float, float]) -> Modes:
    return Modes(*(np.array(column) for column in zip(*rows, strict=True)))


def test_a_response_is_the_impulse_response_of_the_recurrence() -> None:
    rng = np.random.default_rng(3)
    m = 5
    modes = Modes(rng.uniform(0.3, 0.99, m), rng.uniform(-np.pi, np.pi, m), rng.normal(size=m), rng.normal(size=m))
    state = np.zeros((m, 2))
    state[:, 0] = 1.0
    c, s = np.cos(modes.theta), np.sin(modes.theta)
    expected = []
    for _ in range(50):
        expected.append(float(np.sum(modes.kc * state[:, 0] - modes.ks * state[:, 1])))
        rotated = np.stack([c * state[:, 0] - s * state[:, 1], s * state[:, 0] + c * state[:, 1]], axis=1)
        state = modes.rho[:, None] * rotated
    np.testing.assert_allclose(response(modes, 50), expected, atol=1e-12)


def test_the_fits_of_the_low_channels_err_as_specified() -> None:
    _, phi = hankel_eigenpairs(2048, 8)
    errors = [relative_error(channel, fit_modes(channel, 8)) for channel in phi]
    # channel 2 has a pole of 7e-4; the floor of 0.01 costs it 1e-4
    specified = [0.0000, 0.0001, 0.0001, 0.0002, 0.0007, 0.0007, 0.0036, 0.0356]
    np.testing.assert_allclose(errors, specified, atol=0.6e-4)
    assert max(errors) < 0.036


def test_without_the_floor_the_fits_err_as_the_paper_says_and_with_a_higher_one_far_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, phi = hankel_eigenpairs(2048, 7)
    monkeypatch.setattr(matrix_pencil, "RHO_MIN", 1e-9)
    fits = [fit_modes(channel, 8) for channel in phi]
    errors = [relative_error(channel, fit) for channel, fit in zip(phi, fits, strict=True)]
    np.testing.assert_allclose(errors, [0.0000, 0.0000, 0.0001, 0.0002, 0.0007, 0.0007, 0.0036], atol=0.6e-4)
    assert min(fit.rho.min() for fit in fits) == pytest.approx(7e-4, rel=0.1)
    monkeypatch.setattr(matrix_pencil, "RHO_MIN", 0.05)
    spoilt = [relative_error(channel, fit_modes(channel, 8)) for channel in phi]
    assert max(s / e for s, e in zip(spoilt, errors, strict=True)) > 10


def test_more_modes_fit_better() -> None:
    _, phi = hankel_eigenpairs(2048, 8)
    for channel in phi[3:]:
        errors = [relative_error(channel, fit_modes(channel, m)) for m in (4, 8, 16)]
        assert errors[0] > 3 * errors[1] > 9 * errors[2]


@pytest.mark.parametrize("length", [64, 101, 512])
def test_a_conjugate_pair_fills_two_modes_side_by_side_and_a_negative_pole_rotates_by_pi(length: int) -> None:
    signal = response(modes_of((0.9, 0.5, 1.0, -0.7), (0.8, np.pi, 0.6, 0.0), (0.95, 0.0, 0.3, 0.0)), length)
    fit = fit_modes(signal, 4)
    np.testing.assert_allclose(fit.rho, [0.95, 0.9, 0.9, 0.8], atol=1e-7)
    np.testing.assert_allclose(fit.theta, [0.0, 0.5, -0.5, np.pi], atol=1e-7)
    assert fit.theta[3] == np.pi
    assert fit.rho[1] == fit.rho[2]
    assert fit.theta[1] == -fit.theta[2]
    # the pair shares the mode's readout evenly, as conjugates
    np.testing.assert_allclose(fit.kc, [0.3, 0.5, 0.5, 0.6], atol=1e-6)
    np.testing.assert_allclose(fit.ks[1:3], [-0.35, 0.35], atol=1e-6)
    assert relative_error(signal, fit) < 1e-7


def test_poles_are_clipped_to_stable_decays() -> None:
    tau = np.arange(256)
    growing = fit_modes(1.01**tau, 1)
    assert growing.rho.tolist() == [RHO_MAX] == [1 - 1e-5]
    instant = fit_modes(np.where(tau == 0, 1.0, 0.9**tau), 2)
    assert instant.rho.max() <= RHO_MAX
    vanishing = fit_modes(1.0 * (tau == 0), 1)
    assert vanishing.rho.tolist() == [RHO_MIN] == [0.01]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_sum_of_separate_damped_modes_is_recovered(data: st.DataObject) -> None:
    pairs = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(64, 200))
    # one pair to each third of the half-circle, so that no two poles are close
    rows = []
    for i in range(pairs):
        theta = np.pi * (i + data.draw(st.floats(0.3, 0.7))) / 3
        readout = data.draw(st.floats(0.3, 2.0)), data.draw(st.floats(-2.0, 2.0))
        rows.append((data.draw(st.floats(0.8, 0.99)), theta, *readout))
    signal = response(modes_of(*rows), length)
    fit = fit_modes(signal, 2 * pairs)
    assert relative_error(signal, fit) < 1e-8
    found = sorted(zip(fit.theta[fit.theta > 0], fit.rho[fit.theta > 0], strict=True))
    np.testing.assert_allclose(found, sorted((theta, rho) for rho, theta, _, _ in rows), atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), modes=st.integers(1, 9), extra=st.integers(0, 40))
def test_any_signal_gives_finite_stable_ordered_modes(seed: int, modes: int, extra: int) -> None:
    signal = np.random.default_rng(seed).normal(size=4 * modes + extra)
    fit = fit_modes(signal, modes)
    assert all(table.shape == (modes,) and np.all(np.isfinite(table)) for table in fit)
    assert np.all((fit.rho >= RHO_MIN) & (fit.rho <= RHO_MAX) & (fit.theta > -np.pi) & (fit.theta <= np.pi))
    assert np.all(np.diff(fit.rho) <= 0)
    i = 0
    while i < modes:
        if fit.theta[i] in (0, np.pi):
            i += 1
            continue
        assert fit.theta[i] > 0
        assert fit.theta[i + 1] == -fit.theta[i]
        assert fit.rho[i + 1] == fit.rho[i]
        i += 2
    # least squares: no other readouts on these poles do better
    error = np.linalg.norm(signal - response(fit, len(signal)))
    for kc, ks in np.random.default_rng(seed).normal(size=(4, 2, modes)):
        worse = fit._replace(kc=fit.kc + 1e-3 * kc, ks=fit.ks + 1e-3 * ks)
        assert np.linalg.norm(signal - response(worse, len(signal))) >= error * (1 - 1e-12)


@pytest.mark.parametrize(("length", "modes"), [(3, 1), (31, 8), (16, 0)])
def test_a_fit_without_the_positions_or_modes_it_needs_is_refused(length: int, modes: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        fit_modes(np.ones(length), modes)
