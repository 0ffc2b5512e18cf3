"""Sliding-window attention: one function for callers, whatever computes it."""

from __future__ import annotations

from torch import Tensor

from megatron_essh.ops.window_attention.flash import DocumentSpans, document_spans, flash_takes, flash_window
from megatron_essh.ops.window_attention.reference import cached_window, causal_window

__all__ = ["DocumentSpans", "document_spans", "window_attention"]


def window_attention(
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    *,
    window: int | None,
    q_position_BT: Tensor | None = None,
    k_position_BS: Tensor | None = None,
    documents_BT: Tensor | None = None,
    spans: DocumentSpans | None = None,
) -> Tensor:
    """Causal multi-head attention over the last `window` keys, the query's own included (specification, section 3).

    Two forms. Without positions, the keys lie in order and the T queries are the last of the S >= T places; where
    S = T, `documents_BT` (integers) cuts the sequence where it changes, and `spans`, which are `document_spans` of
    the same numbers, spares a GPU a wait. With int64 positions, keys come from a cache in any order: -1 marks a
    slot that is empty or a pad, and a key is seen where 0 <= q_position - k_position < window; a query that sees no
    key gets 0. `window` None: every earlier key. Neither form holds a T x T matrix beyond the window.

    On a GPU in half precision the first form goes to PyTorch's fused kernels: its own choice where every earlier key
    is seen, FlashAttention-2 where not.

    Returns out_BTHD in q's dtype.
    """
    length, keys = q_BTHD.shape[1], k_BSHD.shape[1]
    if q_position_BT is not None or k_position_BS is not None:
        assert q_position_BT is not None, "positions of queries and keys come together"
        assert k_position_BS is not None, "positions of queries and keys come together"
        assert documents_BT is None, "documents are cut by positions in the cached form"
        return cached_window(q_BTHD, k_BSHD, v_BSHD, window, q_position_BT, k_position_BS)
    assert keys == length or (keys > length and documents_BT is None), f"{length} queries but {keys} keys, no positions"
    plain = documents_BT is None and keys == length and (window is None or window >= length)
    if not plain and flash_takes(q_BTHD, k_BSHD, v_BSHD):
        if documents_BT is not None and spans is None:
            spans = document_spans(documents_BT)
        return flash_window(q_BTHD, k_BSHD, v_BSHD, window, spans)
    return causal_window(q_BTHD, k_BSHD, v_BSHD, window, documents_BT)
