"""The SwiGLU activation, between the two matrix products of a feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.swiglu.reference import reference_swiglu

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor, square_sum_N: Tensor | None = None) -> Tensor:
    """Units silu(gate) * up, [..., n], in gate_up's dtype (specification, section 3).

    gate_up: [..., 2n], bf16, fp32 or fp64, unit-major: gate_0, up_0, gate_1, up_1, ...
    square_sum_N: fp32 [n]; the sum over all rows of the units' squares, as rounded, is added to it in place. It takes
        no part in differentiation. The order of summation is fixed.

    On a GPU arithmetic is fp32 and rounded once; the reference rounds silu(gate) too.
    """
    assert gate_up.shape[-1] % 2 == 0, f"{gate_up.shape[-1]} columns are no pairs of gate and up"
    if square_sum_N is not None:
        assert square_sum_N.shape == (gate_up.shape[-1] // 2,), f"sums {tuple(square_sum_N.shape)}"
        assert square_sum_N.dtype == torch.float32, f"sums are {square_sum_N.dtype}; they are kept in fp32"
    if HAS_TRITON and gate_up.is_cuda and gate_up.dtype in (torch.bfloat16, torch.float32) and gate_up.numel() > 0:
        from megatron_essh.ops.swiglu.triton import triton_swiglu

        return triton_swiglu(gate_up, square_sum_N)
    return reference_swiglu(gate_up, square_sum_N)
