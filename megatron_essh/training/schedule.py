"""The learning rate: linear warm-up, then cosine (section 5)."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, steps: int, warmup_fraction: float, final_fraction: float) -> float:
    """The rate of update `step` (from 0) of `steps`.

    Rises linearly to `peak` over the first `warmup_fraction` of the steps (update 0 already moves), then falls along a
    half cosine to `final_fraction` of the peak at the last update.
    """
    warmup = math.ceil(warmup_fraction * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak * (final_fraction + (1.0 - final_fraction) * cosine)
