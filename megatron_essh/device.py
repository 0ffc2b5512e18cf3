"""Which device a command runs on."""

from __future__ import annotations

from typing import Literal

import torch

from megatron_essh.errors import UserError


def pick_device(name: Literal["auto", "cpu", "cuda"], setting: str = "--device") -> torch.device:
    """The device that `name` means; auto takes a GPU where there is one. `setting` names its origin in errors.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(f"{setting} cuda: no CUDA device here; give cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
