"""Weights in eight bits, for decoding: symmetric, one scale for each output row. Activations keep their dtype.

    values = round(weight / scale),  scale = max |row| / largest value of the kind

int8 rounds to the nearest of 255 even steps; float8_e4m3fn keeps three bits of mantissa, down to 2^-9 of its own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_essh.errors import UserError
from megatron_essh.ops.decode_step.weights import PackedWeight

Quantization = Literal["int8", "fp8"]

KINDS: dict[Quantization, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""dtype and largest value of each kind."""

ROWS_AT_A_TIME = 8192
"""Rows that are fp32 at a time."""


def quantize(weight_RI: Tensor, kind: Quantization) -> PackedWeight:
    """The weight in eight bits; a row of zeros keeps the scale 1.

    Raises:
        UserError: no such kind, or a weight is not finite.
    """
    if kind not in KINDS:
        raise UserError(f"quantization: {kind!r}; expected one of {', '.join(KINDS)}")
    dtype, largest = KINDS[kind]
    rows, inputs = weight_RI.shape
    values_RI = torch.empty(rows, inputs, dtype=dtype, device=weight_RI.device)
    scale_R = torch.empty(rows, dtype=torch.float32, device=weight_RI.device)
    for start in range(0, rows, ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        weight_rI = weight_RI[part].float()
        most_r = weight_rI.abs().amax(1)
        if not bool(most_r.isfinite().all()):
            raise UserError("weights: not all are finite, so they cannot be quantised")
        # A row of the smallest numbers would have a scale of zero.
        scale_r = torch.where(most_r > 0, (most_r / largest).clamp_min(torch.finfo(torch.float32).tiny), 1.0)
        scaled_rI = (weight_rI / scale_r[:, None]).clamp(-largest, largest)
        values_RI[part] = (scaled_rI.round() if dtype == torch.int8 else scaled_rI).to(dtype)
        scale_R[part] = scale_r
    return PackedWeight(values_RI, scale_R)


def dequantized(weight: PackedWeight) -> Tensor:
    """fp32 [R, I]: what the values and scales stand for."""
    values_RI = weight.values_RI.float()
    return values_RI if weight.scale_R is None else values_RI * weight.scale_R[:, None]
