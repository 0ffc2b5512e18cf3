"""Sliding-window attention: one function for callers, whatever computes it."""

from __future__ import annotations

from torch import Tensor

from megatron_essh.ops.window_attention.reference import cached_window, causal_window

__all__ = ["window_attention"]


def window_attention(
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    *,
    window: int | None,
    q_position_BT: Tensor | None = None,
    k_position_BS: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """Causal multi-head attention over the last `window` keys, the query's own included (specification, section 3).

    Two forms. Without positions, S = T and the keys lie in the queries' order; `documents_BT` (integers) keeps each
    position to the keys of its own document. With int64 positions, keys come from a cache in any order: -1 marks a
    slot that is empty or a pad, and a key is seen where 0 <= q_position - k_position < window; a query that sees no
    key gets 0. `window` None: every earlier key. Neither form holds a T x T matrix beyond the window.

    Returns out_BTHD in q's dtype.
    """
    if q_position_BT is None or k_position_BS is None:
        assert q_position_BT is k_position_BS, "positions of queries and keys come together"
        assert q_BTHD.shape[1] == k_BSHD.shape[1], f"{q_BTHD.shape[1]} queries but {k_BSHD.shape[1]} keys, no positions"
        return causal_window(q_BTHD, k_BSHD, v_BSHD, window, documents_BT)
    assert documents_BT is None, "documents are cut by positions in the cached form"
    return cached_window(q_BTHD, k_BSHD, v_BSHD, window, q_position_BT, k_position_BS)
