"""The selective scan of one layer, alone."""

from __future__ import annotations

from typing import Any

import torch

from megatron_essh.benchmarks.timing import timed
from megatron_essh.config import RunConfig
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.ops.selective_scan import ModalTables, selective_scan


def measure_scan(config: RunConfig, device: torch.device, warmup: int, repeats: int) -> list[dict[str, Any]]:
    """One layer's selective scan on a micro-batch, from random projections and the real bank."""
    model = config.model
    mixer = SpectralMixer(model)
    mixer.reset_parameters(None)
    tables = ModalTables(*(table.detach().to(device).requires_grad_() for table in mixer.tables(model.channels)))
    batch, length = config.training.micro_batch, config.data.sequence_length
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    shape = (batch, length, model.channels, model.value_width + 3 * model.modes)
    raw = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], model.value_width, device=device, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            selective_scan(raw, tables)

    def forward_backward() -> None:
        z, _ = selective_scan(raw, tables)
        torch.autograd.grad(z, [raw, *tables], grad)

    tokens = batch * length
    return [
        timed("scan, forward", forward, tokens, device, warmup, repeats),
        timed("scan, forward + backward", forward_backward, tokens, device, warmup, repeats),
    ]
