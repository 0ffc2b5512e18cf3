"""From hidden states and the output head to a loss, in chunks of positions (specification, section 5).

The logits [N, V] of a long micro-batch are the peak of memory, so they are never there at once: a chunk's logits,
the loss of them and its share of the gradients are done before the next chunk begins. The gradients are taken on the
way forward, which spares the backward pass a second product with the head, and wait there as a [N, D] and a [V, D]
tensor; the latter is spared too where the weight has a `main_grad` and the gradient's factor is known on the way
forward. What the loss of a chunk of logits is, and who computes it, is not known here.

Shape suffixes: N positions, D residual width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_essh.ops.linear import accumulate, compute_weight, main_grad
from megatron_essh.ops.linear_loss.vocabulary import VocabularyShard

IGNORED = -100
"""Label of a position that is not to be predicted."""

ChunkLoss = Callable[[list[Tensor], Tensor, Tensor, "Tensor | None", bool], Sequence[Tensor]]
"""A loss of a chunk's logits: (logits [N, V] of every head input, which it may overwrite and drop; labels_N, with
`IGNORED`; sums; grad_scale; differentiate) -> gradients.

It adds the objective and the parts to report, each summed over the positions not ignored, to sums [1 + parts]. Where
`differentiate` is set, it returns the objective's gradients, times grad_scale if there is one, with respect to the
logits of the first inputs, in the logits' dtype; inputs behind those are teachers. Of a vocabulary dealt out over
ranks, logits and gradients are of this rank's entries, and what is added is this rank's share."""


class _ChunkedLoss(torch.autograd.Function):
    """The objective, which carries the gradient, and the parts to report, which do not."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: ChunkLoss,
        parts: int,
        chunk: int | None,
        recording: bool,
        vocabulary: VocabularyShard | None,
        labels_N: Tensor,
        grad_scale: Tensor | None,
        weight_VD: Tensor,
        *hidden_ND: Tensor,
    ) -> tuple[Tensor, ...]:
        device = weight_VD.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight_VD.dtype
        exact = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        # needs_input_grad says what the inputs require, under no_grad too.
        wants_weight, *wants_hidden = (recording and needed for needed in ctx.needs_input_grad[7:])
        kept = main_grad(weight_VD) if wants_weight else None
        grad_weight = None
        if wants_weight:
            direct = kept is not None and grad_scale is not None
            grad_weight = kept if direct else torch.zeros_like(weight_VD, dtype=exact)
        grad_hidden = [
            torch.empty_like(h) if wanted else None for h, wanted in zip(hidden_ND, wants_hidden, strict=True)
        ]
        sums = weight_VD.new_zeros(1 + parts, dtype=exact)
        differentiate = wants_weight or any(wants_hidden)

        with torch.autocast(device.type, enabled=False):
            head_VD = compute_weight(weight_VD, dtype)

            def one_chunk(rows: slice) -> None:
                """A function of its own, so that nothing of one chunk lives on into the next."""
                inputs = [h[rows].to(dtype) for h in hidden_ND]
                logits = [F.linear(x, head_VD) for x in inputs]
                gradients = loss(logits, labels_N[rows], sums, grad_scale, differentiate)
                for x, gradient, out in zip(inputs, gradients, grad_hidden, strict=False):
                    if out is not None:
                        out[rows] = gradient @ head_VD
                    if grad_weight is not None:
                        _add_product(grad_weight, gradient, x)

            step = chunk or len(labels_N) or 1
            for start in range(0, len(labels_N), step):
                one_chunk(slice(start, start + step))
        if vocabulary is not None:
            vocabulary.sum_(sums)

        ctx.scaled = grad_scale is not None
        ctx.main_grad = kept
        ctx.gradients = (None if grad_weight is kept else grad_weight, *grad_hidden)
        ctx.weight_dtype = weight_VD.dtype
        objective, *reported = sums.unbind()
        ctx.mark_non_differentiable(*reported)
        return objective, *reported

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outgoing: Tensor) -> tuple[Tensor | None, ...]:
        grad_weight, *grad_hidden = ctx.gradients
        if not ctx.scaled:
            scale = outgoing[0]
            grad_hidden = [None if g is None else g * scale.to(g.dtype) for g in grad_hidden]
            if ctx.main_grad is not None:
                ctx.main_grad.addcmul_(grad_weight, scale.to(grad_weight.dtype))
                grad_weight = None
            elif grad_weight is not None:
                grad_weight = grad_weight * scale.to(grad_weight.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return None, None, None, None, None, None, None, grad_weight, *grad_hidden


def _add_product(grad_VD: Tensor, gradient_NV: Tensor, x_ND: Tensor) -> None:
    """Add the weight's gradient of a chunk to an fp32 (fp64) tensor."""
    if grad_VD.is_cuda or gradient_NV.dtype == grad_VD.dtype:
        accumulate(grad_VD, gradient_NV, x_ND)
    else:  # a bf16 product is quicker on a CPU than one of its operands in fp32
        grad_VD += gradient_NV.T @ x_ND


def chunked_loss(
    loss: ChunkLoss,
    parts: int,
    chunk: int | None,
    labels_N: Tensor,
    grad_scale: Tensor | None,
    weight_VD: Tensor,
    *hidden_ND: Tensor,
    vocabulary: VocabularyShard | None = None,
) -> tuple[Tensor, ...]:
    """`loss` of the head's logits at the given hidden states, summed over the positions not ignored, 0-d each.

    Logits are computed in the autocast dtype where autocast is on, else in the weight's; log-softmax, sums and the
    weight's accumulated gradient in fp32 (fp64 stays fp64). `chunk` is the number of positions at a time; None takes
    all at once. Only the first of the 1 + parts results, the objective, carries a gradient.

    vocabulary: which entries weight_VD holds, as `loss` was told; None for all of them.
    """
    assert chunk is None or chunk > 0, f"chunk must be positive or None, got {chunk}"
    if grad_scale is not None:
        assert grad_scale.shape == (), f"grad_scale must be 0-d, got {tuple(grad_scale.shape)}"
        assert grad_scale.device == weight_VD.device, f"grad_scale is on {grad_scale.device}, not {weight_VD.device}"
    results: tuple[Tensor, ...] = _ChunkedLoss.apply(
        loss, parts, chunk, torch.is_grad_enabled(), vocabulary, labels_N, grad_scale, weight_VD, *hidden_ND
    )
    return results
