"""Window attention on a GPU by the FlashAttention-2 kernels that PyTorch brings, in `varlen_attn`.

It takes sequences of different lengths, joined end to end: a packed document is a sequence of its own. No score matrix
is kept, forward or backward. The gradient of q is summed by atomic additions, so it may differ in its last bits from
run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_essh.ops.selective_scan.reference import document_segments

WIDEST_HEAD = 256
"""Head width up to which the kernels go; they take multiples of 8."""


@dataclass(frozen=True)
class DocumentSpans:
    """Where the documents of a packed batch lie, the batch's sequences joined end to end."""

    start_N1: Tensor
    """int32 [N + 1]: first position of each document, then the number of all positions."""
    longest: int
    """Positions of the longest document."""


def document_spans(documents_BT: Tensor) -> DocumentSpans:
    """The spans of `documents_BT` (integers, [B, T], T > 0), a document ending where the number changes.

    Reads two numbers from the device, which waits for it: a model does it once a pass, not once a layer.
    """
    length = documents_BT.shape[1]
    segments_BT = document_segments(documents_BT, None)
    place_T = torch.arange(length, device=documents_BT.device)
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    longest = (place_T - torch.where(starts_BT, place_T, 0).cummax(1).values).amax() + 1
    number = starts_BT.flatten().cumsum(0)  # from 1, rising over all the batch
    count, longest_document = torch.stack([number[-1], longest]).tolist()
    # The first position numbered n + 1 or more is where document n starts; past the last one, the end.
    wanted = torch.arange(1, count + 2, device=documents_BT.device)
    return DocumentSpans(torch.searchsorted(number, wanted, out_int32=True), longest_document)


def varlen_attn(*arguments: Any, **options: Any) -> Any:
    """PyTorch's `varlen_attn`, imported where it is first called: with it comes Triton, a second of imports."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn(*arguments, **options)


def flash_takes(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> bool:
    """Whether the kernels serve these inputs: in half precision, on a GPU of compute capability 8 or more."""
    head_dim = q_BTHD.shape[-1]
    return (
        q_BTHD.is_cuda
        and q_BTHD.dtype in (torch.bfloat16, torch.float16)
        and k_BSHD.dtype == v_BSHD.dtype == q_BTHD.dtype
        and q_BTHD.numel() > 0
        and head_dim % 8 == 0
        and head_dim <= WIDEST_HEAD
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(q_BTHD.device) >= (8, 0)
    )


def flash_window(
    q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, window: int | None, spans: DocumentSpans | None = None
) -> Tensor:
    """Queries see the last `window` keys of their document; without `spans`, they are the last T of the S positions."""
    batch, length, _, _ = q_BTHD.shape
    keys = k_BSHD.shape[1]
    if spans is None:
        q_start, k_start = (
            torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=q_BTHD.device) for n in (length, keys)
        )
        longest_q, longest_k = length, keys
    else:
        assert length == keys, f"{length} queries but {keys} keys in packed documents"
        q_start = k_start = spans.start_N1
        longest_q = longest_k = spans.longest
    # The kernel counts the keys before a query's own one; the plain causal one is the faster.
    before = -1 if window is None or window >= longest_k else window - 1
    out = varlen_attn(
        q_BTHD.flatten(0, 1),
        k_BSHD.flatten(0, 1),
        v_BSHD.flatten(0, 1),
        q_start,
        k_start,
        longest_q,
        longest_k,
        window_size=(before, 0),
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length))
