"""Causal attention over a sliding window of keys, in plain PyTorch (specification, section 3).

Shape suffixes: B sequences, T queries, S keys, H heads, D head width. Nothing here knows of rotary positions.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_essh.ops.selective_scan.reference import document_segments

BLOCK_ROWS = 128
"""Queries worked on at a time: no mask or score matrix is wider than these and the window before them."""
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""What may compute masked attention with gradients on a GPU."""


def _attend(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Softmax attention, scores scaled by D^{-1/2}; mask True where a query [.., T] sees a key [.., S]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSHD, v_BSHD))
    # Under a mask, cuDNN's backward (PyTorch 2.11) gives NaN gradients at some lengths, such as 64 above a multiple
    # of 128.
    masked_training = mask is not None and q.is_cuda and torch.is_grad_enabled()
    with sdpa_kernel(MASKED_BACKENDS) if masked_training else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal).transpose(1, 2)


def causal_window(
    q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, window: int | None, documents_BT: Tensor | None
) -> Tensor:
    """Each position sees its last `window` positions, itself included, of its own document.

    The T queries are the last of the S positions; documents, which end where their number changes, need S = T.
    """
    length, keys = q_BTHD.shape[1], k_BSHD.shape[1]
    reach = keys if window is None else min(window, keys)
    if reach == keys == length and (documents_BT is None or length == 0):
        return _attend(q_BTHD, k_BSHD, v_BSHD, None, is_causal=True)
    segments_BT = None if documents_BT is None else document_segments(documents_BT, None)
    # Split once and joined for each block of queries: a slice's gradient would be as long as the sequence.
    k_blocks, v_blocks = k_BSHD.split(BLOCK_ROWS, dim=1), v_BSHD.split(BLOCK_ROWS, dim=1)
    outputs = []
    start = keys - length
    for q_block in q_BTHD.split(BLOCK_ROWS, dim=1):
        end = start + q_block.shape[1]
        near = slice(max(0, start - reach + 1) // BLOCK_ROWS, -(-end // BLOCK_ROWS))
        near_keys, near_values = (torch.cat(x[near], dim=1) for x in (k_blocks, v_blocks))
        query_position = torch.arange(start, end, device=q_BTHD.device)
        key_position = near.start * BLOCK_ROWS + torch.arange(near_keys.shape[1], device=q_BTHD.device)
        lag = query_position[:, None] - key_position
        mask = (lag >= 0) & (lag < reach)
        if segments_BT is not None:
            own, theirs = segments_BT[:, query_position, None], segments_BT[:, None, key_position]
            mask = (mask & (own == theirs))[:, None]
        outputs.append(_attend(q_block, near_keys, near_values, mask))
        start = end
    return torch.cat(outputs, dim=1)


def cached_window(
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    window: int | None,
    q_position_BT: Tensor,
    k_position_BS: Tensor,
) -> Tensor:
    """A query sees the keys with 0 <= q_position - k_position < window; those at -1 are empty. None seen gives 0."""
    outputs = []
    for q_block, position in zip(q_BTHD.split(BLOCK_ROWS, dim=1), q_position_BT.split(BLOCK_ROWS, dim=1), strict=True):
        lag = position[:, :, None] - k_position_BS[:, None, :]
        mask = (lag >= 0) & (k_position_BS[:, None, :] >= 0)
        if window is not None:
            mask &= lag < window
        keys, values = k_BSHD, v_BSHD
        if q_BTHD.shape[1] > BLOCK_ROWS:  # a long prompt: leave out the keys that nobody in the block sees
            seen = mask.any(dim=(0, 1)).nonzero()
            near = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
            keys, values, mask = keys[:, near], values[:, near], mask[:, :, near]
        blind = ~mask.any(-1)  # [B, T]
        # A row that sees nothing has no softmax: let it see everything, and drop what it saw.
        out = _attend(q_block, keys, values, (mask | blind[..., None])[:, None])
        outputs.append(out.masked_fill(blind[..., None, None], 0))
    return torch.cat(outputs, dim=1)
