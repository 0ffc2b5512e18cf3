"""Spectral banks by name: the starting values of the modal tables, each an arm of an ablation (section 2).

`hankel` is the default; the others change one thing about it at a time. A bank depends on nothing but the
arguments of `build_bank`, up to the last bits, in which linear-algebra libraries differ: runs that must agree
bitwise across machines share a cache directory or a checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from megatron_essh.errors import UserError
from megatron_essh.spectral.cache import Arrays, cached_arrays
from megatron_essh.spectral.hankel import hankel_eigenpairs, resolved_channels
from megatron_essh.spectral.matrix_pencil import Modes, fit_modes, response

ALGORITHM_VERSION = 1
"""Part of the cache key. Raise it with every change that changes a bank."""
SLOW_DECAY = math.exp(-0.01)
"""Decay of every mode in `non_oscillatory` and `uniform_decay`."""
S4D_STEPS = (1e-3, 0.1)
"""Range of the step over the channels of `s4d_lin`."""


@dataclass(frozen=True)
class Bank:
    """Initial modal tables, each [K, m] float64."""

    rho: NDArray[np.float64]
    """Decay per position, in (0, 1)."""
    theta: NDArray[np.float64]
    """Rotation per position."""
    kc: NDArray[np.float64]
    """Cosine readout."""
    ks: NDArray[np.float64]
    """Sine readout."""

    def __getitem__(self, channel: int) -> Modes:
        """The modes of one channel."""
        return Modes(self.rho[channel], self.theta[channel], self.kc[channel], self.ks[channel])


def build_bank(name: str, channels: int, modes: int, length: int = 2048, seed: int = 0) -> Bank:
    """The bank `name`, read from the disk cache where it has been built before.

    A first build takes about 7 s on one core for `hankel` and the banks made from it.

    - `hankel`: matrix-pencil fits of the Hankel channels. Channels beyond the `resolved_channels` of this
      length repeat the last resolved one: their true vectors are out of float64's reach, and what stands
      there instead (rounding noise) would differ from machine to machine.
    - `random_damped`: decays -log rho and rotations drawn log-uniformly over the range of the fitted ones;
      normal readouts, scaled so that each channel's root mean square is that of its fit.
    - `non_oscillatory`: rho = e^-0.01, theta = 0, readouts 0.
    - `slot_shuffle`: the `hankel` channels in random order.
    - `uniform_decay`: `hankel` with every rho = e^-0.01.
    - `s4d_lin`: rho = e^(-dt / 2), theta = pi i dt for mode i = 0 .. m - 1, dt log-spaced over the channels;
      equal cosine readouts that give each channel's response unit norm over `length`, a Hankel channel's.

    Args:
        channels: K.
        modes: m.
        length: size of the Hankel matrix, at least 4 x modes.
        seed: of the banks that draw (`random_damped`, `slot_shuffle`); no other depends on it.

    Raises:
        UserError: no such bank, or an impossible size.
    """
    if name not in _BUILDERS:
        raise UserError(f"bank: {name!r} is none of {', '.join(_BUILDERS)}")
    if channels < 1 or modes < 1 or length < 4 * modes or seed < 0:
        raise UserError(
            f"bank {name}: {channels} channels of {modes} modes at length {length}, seed {seed}; it takes at "
            f"least 1 channel, 1 mode, a length of 4 x modes and a seed of 0"
        )
    key: dict[str, str | int] = {
        "table": "bank",
        "version": ALGORITHM_VERSION,
        "name": name,
        "channels": channels,
        "modes": modes,
        "length": length,
        "seed": seed if name in _DRAWN else 0,
    }

    def build() -> Arrays:
        bank = _BUILDERS[name](channels, modes, length, seed)
        return {f.name: getattr(bank, f.name) for f in fields(bank)}

    return Bank(**cached_arrays(key, build))


def _hankel(channels: int, modes: int, length: int, seed: int) -> Bank:
    last = resolved_channels(length) - 1
    fits = [_fitted_channel(min(k, last), modes, length) for k in range(channels)]
    return Bank(*(np.stack(tables) for tables in zip(*fits, strict=True)))


@functools.lru_cache(maxsize=512)
def _fitted_channel(channel: int, modes: int, length: int) -> Modes:
    _, phi = hankel_eigenpairs(length, channel + 1)
    return fit_modes(phi[channel], modes)


def _random_damped(channels: int, modes: int, length: int, seed: int) -> Bank:
    fitted = build_bank("hankel", channels, modes, length)
    rng = np.random.default_rng(seed)
    rho = np.exp(-_log_uniform(rng, -np.log(fitted.rho)))
    theta = _log_uniform(rng, np.abs(fitted.theta))
    kc, ks = rng.standard_normal((2, channels, modes))
    scale = _readout_rms(fitted.kc, fitted.ks) / _readout_rms(kc, ks)
    return Bank(rho, theta, kc * scale, ks * scale)


def _log_uniform(rng: np.random.Generator, fitted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Draws of `fitted`'s shape, log-uniform over the range of its positive entries (0 where none is)."""
    positive = fitted[fitted > 0]
    if positive.size == 0:
        return np.zeros_like(fitted)
    return np.exp(rng.uniform(np.log(positive.min()), np.log(positive.max()), fitted.shape))


def _readout_rms(kc: NDArray[np.float64], ks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root mean square readout of each channel, [K, 1]."""
    return np.sqrt(np.mean(kc**2 + ks**2, axis=1, keepdims=True))


def _non_oscillatory(channels: int, modes: int, length: int, seed: int) -> Bank:
    zero = np.zeros((channels, modes))
    return Bank(np.full_like(zero, SLOW_DECAY), zero, zero.copy(), zero.copy())


def _slot_shuffle(channels: int, modes: int, length: int, seed: int) -> Bank:
    fitted = build_bank("hankel", channels, modes, length)
    order = np.random.default_rng(seed).permutation(channels)
    return Bank(fitted.rho[order], fitted.theta[order], fitted.kc[order], fitted.ks[order])


def _uniform_decay(channels: int, modes: int, length: int, seed: int) -> Bank:
    fitted = build_bank("hankel", channels, modes, length)
    return Bank(np.full_like(fitted.rho, SLOW_DECAY), fitted.theta, fitted.kc, fitted.ks)


def _s4d_lin(channels: int, modes: int, length: int, seed: int) -> Bank:
    step = np.geomspace(*S4D_STEPS, channels)[:, None]
    rho = np.repeat(np.exp(-step / 2), modes, axis=1)
    theta = math.pi * step * np.arange(modes)
    bank = Bank(rho, theta, kc=np.ones_like(rho), ks=np.zeros_like(rho))
    norm = np.array([np.linalg.norm(response(bank[k], length)) for k in range(channels)])
    return replace(bank, kc=bank.kc / norm[:, None])


_DRAWN = ("random_damped", "slot_shuffle")
_BUILDERS: dict[str, Callable[[int, int, int, int], Bank]] = {
    "hankel": _hankel,
    "random_damped": _random_damped,
    "non_oscillatory": _non_oscillatory,
    "slot_shuffle": _slot_shuffle,
    "uniform_decay": _uniform_decay,
    "s4d_lin": _s4d_lin,
}
