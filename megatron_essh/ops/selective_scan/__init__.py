"""The selective scan of a spectral mixer: one function for callers, whatever computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.selective_scan.reference import (
    Controls,
    ModalTables,
    chunked_scan,
    compute_dtype,
    controls,
    scan_step,
)

LONGEST_KERNEL_INPUT = 1 << 19
"""Positions a kernel launch takes; longer sequences go through the reference."""

__all__ = ["Controls", "ModalTables", "scan_step", "selective_scan"]


def selective_scan(
    raw_BTKX: Tensor,
    tables: ModalTables,
    *,
    eps: float = 1e-6,
    neutral_gates: bool = False,
    state_BKM2P: Tensor | None = None,
    documents_BT: Tensor | None = None,
    valid_BT: Tensor | None = None,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:
    """Channel outputs of a spectral mixer from its raw input projection (specification, section 1).

    raw_BTKX: X = P + 3M columns a channel: P values, then the pre-activations of write gate, read gate and clock, M
        each, without their biases; bf16, fp32 or fp64, any T >= 0.
    state_BKM2P: the state left by the tokens before; zero if not given.
    documents_BT: document number of each position (integers). The state is cut where it changes; the first position
        continues the entering state.
    valid_BT: False marks a pad, which leaves the state untouched and gives z = 0. A pad's document number is ignored.
    chunk: rows worked on as one matrix by the reference; the kernels have their own.

    K may be 0. Returns z_BTKP in raw's dtype and the state after the last position. Arithmetic and state are fp32
    (fp64 if raw is fp64) under autocast too.
    """
    batch, length, channels, columns = raw_BTKX.shape
    modes = tables.theta.shape[1]
    assert tables.theta.shape[0] == channels, f"raw has {channels} channels, the tables {tables.theta.shape[0]}"
    with torch.autocast(raw_BTKX.device.type, enabled=False):
        dtype = compute_dtype(raw_BTKX)
        if state_BKM2P is None:
            state_BKM2P = raw_BTKX.new_zeros(batch, channels, modes, 2, columns - 3 * modes, dtype=dtype)
        if channels == 0:
            # A share of a model without a channel: nothing to compute, and yet all inputs get their (zero) gradients.
            nothing = torch.cat([table.flatten() for table in tables])
            return (raw_BTKX[..., : columns - 3 * modes] + nothing[:, None]).to(raw_BTKX.dtype), state_BKM2P
        if length == 1 and valid_BT is None:
            z_BKP, state_BKM2P = scan_step(raw_BTKX[:, 0], tables, state_BKM2P, eps=eps, neutral_gates=neutral_gates)
            return z_BKP[:, None], state_BKM2P
        tables = ModalTables(*(table.to(dtype) for table in tables))
        if _kernels_take(raw_BTKX, modes):
            from megatron_essh.ops.selective_scan.triton import triton_scan

            return triton_scan(
                raw_BTKX,
                tables,
                eps=eps,
                neutral_gates=neutral_gates,
                state_BKM2P=state_BKM2P,
                documents_BT=documents_BT,
                valid_BT=valid_BT,
            )
        # Channels first in memory, so that a channel's chunks are contiguous matrices.
        raw_BKTX = raw_BTKX.transpose(1, 2).to(dtype).contiguous()
        given = controls(raw_BKTX.transpose(1, 2), tables, eps, neutral_gates)
        z_BTKP, state_BKM2P = chunked_scan(given, tables, state_BKM2P.to(dtype), documents_BT, valid_BT, chunk)
        return z_BTKP.to(raw_BTKX.dtype), state_BKM2P


def _kernels_take(raw_BTKX: Tensor, modes: int) -> bool:
    """Whether the Triton kernels serve this input: on a GPU, in a size and dtype that they are held to."""
    batch, length, channels, columns = raw_BTKX.shape
    return (
        raw_BTKX.is_cuda
        and raw_BTKX.dtype in (torch.bfloat16, torch.float32)
        and batch * channels > 0
        and 1 <= length <= LONGEST_KERNEL_INPUT
        and modes <= 16
        and columns - 3 * modes <= 128
        and raw_BTKX.stride(3) == 1
        and HAS_TRITON
    )
