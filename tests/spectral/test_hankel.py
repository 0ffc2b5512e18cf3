"""The Hankel channels against the specification's figures and against exact arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from megatron_essh.errors import UserError
from megatron_essh.spectral.hankel import hankel_eigenpairs, hankel_factor, resolved_channels


def hankel_matrix(length: int) -> np.ndarray:
    n = np.add.outer(np.arange(1, length + 1), np.arange(1, length + 1)).astype(float)
    return 2 / ((n - 1) * n * (n + 1))


def sign_changes(vector: np.ndarray) -> int:
    signs = np.sign(vector[vector != 0])
    return int(np.count_nonzero(signs[1:] != signs[:-1]))


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 301])
def test_the_factor_is_a_square_root_of_the_hankel_matrix_to_rounding(length: int) -> None:
    factor = hankel_factor(length)
    assert factor.shape == (length, length + 1)
    np.testing.assert_allclose(factor @ factor.T, hankel_matrix(length), rtol=1e-13 * length)


def test_the_spectrum_falls_as_specified() -> None:
    sigma, _ = hankel_eigenpairs(2048, 32)
    n = 2.0 * np.arange(1, 2049)
    trace = np.sum(2 / ((n - 1) * n * (n + 1)))
    assert sigma[8] / sigma[0] == pytest.approx(2.2888e-6, rel=3e-5)
    assert (trace - sigma[:8].sum()) / trace == pytest.approx(3.3093e-6, rel=3e-5)
    assert np.all(np.diff(sigma) < 0)


def test_every_resolved_channel_oscillates_once_more_than_the_one_before() -> None:
    count = resolved_channels(2048)
    assert count >= 36
    _, phi = hankel_eigenpairs(2048, count)
    assert [sign_changes(channel) for channel in phi] == list(range(count))


def test_channels_have_unit_norm_a_positive_first_entry_and_are_orthogonal() -> None:
    _, phi = hankel_eigenpairs(2048, 36)
    np.testing.assert_allclose(phi @ phi.T, np.eye(36), atol=1e-12)
    assert np.all(phi[:, 0] > 0)


def test_channels_are_eigenvectors_of_the_exact_matrix() -> None:
    sigma, phi = hankel_eigenpairs(2048, 32)
    residual = hankel_matrix(2048) @ phi.T - phi.T * sigma
    assert np.abs(residual).max() < 1e-14 * sigma[0] * 2048**0.5


def test_every_resolved_eigenpair_of_a_small_matrix_agrees_with_sixty_digit_arithmetic() -> None:
    length = 24
    with mpmath.workdps(60):
        exact = mpmath.matrix(length, length)
        for s in range(1, length + 1):
            for t in range(1, length + 1):
                n = mpmath.mpf(s + t)
                exact[s - 1, t - 1] = 2 / ((n - 1) * n * (n + 1))
        values, vectors = mpmath.eigsy(exact)  # ascending
        reference_sigma = np.array([float(v) for v in values])[::-1]
        reference_phi = np.array(vectors.tolist(), dtype=float).T[::-1]
    reference_phi *= np.sign(reference_phi[:, :1])

    count = resolved_channels(length)
    sigma, phi = hankel_eigenpairs(length, count)
    assert count >= 18
    relative_rounding = 1e-15 * np.sqrt(sigma[0] / sigma)  # of a singular value, in units of itself
    assert np.all(np.abs(sigma / reference_sigma[:count] - 1) < 50 * relative_rounding)
    distance = np.linalg.norm(phi - reference_phi[:count], axis=1)
    assert np.all(distance < 50 * relative_rounding)
    assert distance[-1] < 0.01


def test_channels_that_float64_cannot_resolve_are_refused() -> None:
    count = resolved_channels(32)
    assert count < 32
    hankel_eigenpairs(32, count)
    for impossible in (0, count + 1):
        with pytest.raises(UserError, match=f"1 to {count} Hankel channels at length 32"):
            hankel_eigenpairs(32, impossible)


def test_what_a_caller_does_to_its_arrays_reaches_no_other_caller() -> None:
    sigma, phi = hankel_eigenpairs(16, 3)
    expected = phi.copy(), sigma.copy()
    phi[:], sigma[:] = 0, 0
    again_sigma, again_phi = hankel_eigenpairs(16, 3)
    np.testing.assert_array_equal(again_phi, expected[0])
    np.testing.assert_array_equal(again_sigma, expected[1])
