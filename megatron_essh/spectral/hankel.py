"""The spectral channels: eigenvectors of the Hankel moment matrix (section 2; paper, appendix B).

Z[s, t] = 2 / ((n - 1) n (n + 1)) with n = s + t, one-based, is the second-moment matrix of the weighted
geometric sequences (1 - x) x^(t - 1), x uniform on [0, 1]. Its eigenvalues fall by fifteen orders of
magnitude over the first 26 channels, so an eigensolver applied to Z returns noise from there on. The square
root W of Z spans half as many orders, and its singular value decomposition reaches twice as far: see
`resolved_channels`.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from megatron_essh.errors import UserError

RESOLUTION = 8 * float(np.finfo(np.float64).eps)
"""Smallest singular value of W, relative to the largest, whose vector counts as resolved."""


def hankel_factor(length: int) -> NDArray[np.float64]:
    """The factor W [length, length + 1] with W W^T = Z.

    W[t, q] = sqrt(w_q) (1 - x_q) x_q^(t - 1) over the Gauss-Legendre nodes x_q and weights w_q of [0, 1]. The
    entries of Z integrate polynomials of degree at most 2 length, for which length + 1 nodes are exact.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    nodes, weights = np.polynomial.legendre.leggauss(length + 1)
    x = (nodes + 1) / 2
    return np.sqrt(weights / 2) * (1 - x) * x ** np.arange(length)[:, None]


@functools.lru_cache(maxsize=16)
def _resolved_eigenpairs(length: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every resolved eigenpair: sigma [R] descending, phi [R, length]. Read-only: callers share them."""
    left, singular, _ = np.linalg.svd(hankel_factor(length), full_matrices=False)
    resolved = int(np.count_nonzero(singular > RESOLUTION * singular[0]))
    sigma = singular[:resolved] ** 2
    phi = np.ascontiguousarray(left[:, :resolved].T)
    phi *= np.sign(phi[:, :1])
    sigma.flags.writeable = phi.flags.writeable = False
    return sigma, phi


def resolved_channels(length: int = 2048) -> int:
    """How many eigenvectors float64 resolves: 51 at length 2048, 24 at length 32.

    The last of them is good to about three digits; each one before gains a factor of two to eight. Beyond,
    singular values sink below rounding and the vectors are arbitrary, so they are not handed out.
    """
    return len(_resolved_eigenpairs(length)[0])


def hankel_eigenpairs(length: int = 2048, count: int = 32) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The leading `count` eigenpairs of Z, by singular value decomposition of its factor.

    Takes 3 s on one core at length 2048, growing with the cube of the length. A process remembers it for
    the last sixteen lengths.

    Returns:
        sigma [count], descending, and phi [count, length]: phi[k] has unit norm, a positive first entry (an
        eigenvector's sign is a convention; this is ours) and exactly k sign changes, k counted from zero.

    Raises:
        UserError: float64 does not resolve `count` eigenvectors at this length.
    """
    sigma, phi = _resolved_eigenpairs(length)
    if not 1 <= count <= len(sigma):
        raise UserError(f"count {count}: float64 resolves 1 to {len(sigma)} Hankel channels at length {length}")
    return sigma[:count].copy(), phi[:count].copy()
