"""Which device a command runs on, what it is called, and what it computes at most."""

from __future__ import annotations

import platform
from functools import cache
from typing import Literal

import torch

from megatron_essh.errors import UserError

PEAK_TFLOPS = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 836.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
}
"""Dense bf16 TFLOP/s of the makers' data sheets, by a part of the device's name; the first that fits counts."""


def pick_device(name: Literal["auto", "cpu", "cuda"], setting: str = "--device") -> torch.device:
    """The device that `name` means; auto takes a GPU where there is one. `setting` names its origin in errors.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(f"{setting} cuda: no CUDA device here; give cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    """How tables call the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; one where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def peak_tflops(name: str, precision: str) -> float | None:
    """The most that the device of this name computes in `precision`; None where that is not known."""
    if precision != "bf16":
        return None
    return next((peak for part, peak in PEAK_TFLOPS.items() if part.lower() in name.lower()), None)
