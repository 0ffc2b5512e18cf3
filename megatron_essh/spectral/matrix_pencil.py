"""The matrix-pencil fit: damped rotation modes from a signal (section 2; paper, equation 4, appendix C.1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RHO_MIN = 0.01
"""Smallest decay per position. A floor of 0.05 would already spoil the fits of the low channels."""
RHO_MAX = 1 - 1e-5
"""Largest decay per position: every mode is stable."""


class Modes(NamedTuple):
    """m damped rotation modes, each array [m] float64."""

    rho: NDArray[np.float64]
    """Decay per position, in [RHO_MIN, RHO_MAX]."""
    theta: NDArray[np.float64]
    """Rotation per position, in (-pi, pi]."""
    kc: NDArray[np.float64]
    """Cosine readout."""
    ks: NDArray[np.float64]
    """Sine readout."""


def response(modes: Modes, length: int) -> NDArray[np.float64]:
    """Impulse response [length]: the sum over modes of rho^tau (kc cos(theta tau) - ks sin(theta tau))."""
    readout = modes.kc + 1j * modes.ks
    return (_powers(modes.rho, modes.theta, length) @ readout).real


def fit_modes(signal: NDArray[np.float64], modes: int) -> Modes:
    """Fit `modes` damped modes to `signal` [L].

    The poles are the eigenvalues of pinv(V1) V2, V1 and V2 being the leading right singular vectors of the
    signal's Hankel data matrix without their last and first row; the pencil parameter is L // 4 (512 at the
    default length). Pole magnitudes are clipped to [RHO_MIN, RHO_MAX], then complex readouts c follow by
    least squares, kc = Re c and ks = Im c. Each pole is one mode, so that a conjugate pair fills two; a
    negative real pole has theta = pi.

    The order is fixed: slowest decay first, equal decays by |theta|, and of a pair the positive theta first.
    A pair's magnitudes are equal to the last bit, so its two modes always stand side by side.

    Raises:
        ValueError: the signal is shorter than four positions a mode.
    """
    length = len(signal)
    if modes < 1 or length < 4 * modes:
        raise ValueError(f"a fit of {modes} modes needs at least 1 mode and {4 * modes} positions, got {length}")
    data = np.lib.stride_tricks.sliding_window_view(signal, length // 4 + 1)
    _, _, right = np.linalg.svd(data, full_matrices=False)
    v = right[:modes].T
    poles = np.linalg.eigvals(np.linalg.pinv(v[:-1]) @ v[1:])

    rho = np.clip(np.abs(poles), RHO_MIN, RHO_MAX)
    theta = np.angle(poles)
    theta[theta == -np.pi] = np.pi  # the angle of a negative real number with a negative zero beside it
    order = np.lexsort((theta < 0, np.abs(theta), -rho))
    rho, theta = rho[order], theta[order]
    readout, *_ = np.linalg.lstsq(_powers(rho, theta, length), signal.astype(np.complex128), rcond=None)
    return Modes(rho, theta, np.ascontiguousarray(readout.real), np.ascontiguousarray(readout.imag))


def _powers(rho: NDArray[np.float64], theta: NDArray[np.float64], length: int) -> NDArray[np.complex128]:
    """(rho e^(j theta))^tau for tau = 0 .. length - 1, [length, m]."""
    tau = np.arange(length)[:, None]
    return rho**tau * np.exp(1j * theta * tau)
