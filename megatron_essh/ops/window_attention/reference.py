"""Causal attention over a sliding window of keys, in plain PyTorch (specification, section 3).

Shape suffixes: B sequences, T queries, S keys, H heads, D head width. Nothing here knows of rotary positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 128
"""Queries worked on at a time: no mask or score matrix is wider than these and the window before them."""


def _attend(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Softmax attention, scores scaled by D^{-1/2}; mask True where a query [.., T] sees a key [.., S]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSHD, v_BSHD))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal).transpose(1, 2)


def causal_window(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, window: int | None, documents_BT: Tensor | None
) -> Tensor:
    """Each position sees its last `window` positions, itself included, of its own document."""
    length = q_BTHD.shape[1]
    reach = length if window is None else min(window, length)
    if reach == length and (documents_BT is None or length == 0):
        return _attend(q_BTHD, k_BTHD, v_BTHD, None, is_causal=True)
    # Split once and joined for each block of queries: a slice's gradient would be as long as the sequence.
    k_blocks, v_blocks = k_BTHD.split(BLOCK_ROWS, dim=1), v_BTHD.split(BLOCK_ROWS, dim=1)
    outputs = []
    for number, q_block in enumerate(q_BTHD.split(BLOCK_ROWS, dim=1)):
        start = number * BLOCK_ROWS
        first = max(0, start - reach + 1) // BLOCK_ROWS
        keys, values = (torch.cat(x[first : number + 1], dim=1) for x in (k_blocks, v_blocks))
        query_position = torch.arange(start, start + q_block.shape[1], device=q_BTHD.device)
        key_position = torch.arange(first * BLOCK_ROWS, start + q_block.shape[1], device=q_BTHD.device)
        lag = query_position[:, None] - key_position
        mask = (lag >= 0) & (lag < reach)
        if documents_BT is not None:
            own, theirs = documents_BT[:, query_position, None], documents_BT[:, None, key_position]
            mask = (mask & (own == theirs))[:, None]
        outputs.append(_attend(q_block, keys, values, mask))
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
