"""Factors on the weight gradients of a capacity's pass (section 5)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GradientScale:
    """Factors on the weight gradients of a reduced-capacity micro-batch."""

    feed_forward: float = 1.0
    mixer: float = 1.0
