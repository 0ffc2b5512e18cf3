"""Products of up to 16 rows with large weights, as a CUDA kernel that streams the weights: csrc/decode_products.cu.

Triton's pipelines begin with a kernel's first loads after it has waited for the kernel ahead, and leave a
multiprocessor no more than a few tiles under way. This kernel fills the shared memory before it waits, deals rows out
evenly, and keeps the batch in registers. Where nvcc is missing, the Triton kernels of `matrix` do the same work.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_essh.device import multiprocessors
from megatron_essh.ops import cuda_module
from megatron_essh.ops.cuda_module import CudaModule
from megatron_essh.ops.decode_step.weights import PackedWeight

MOST_BATCH = 16
MOST_INPUTS = 3072
"""A thread holds 8 inputs of two rows of the batch, in 8 registers, for each 256 of them."""
LEAST_BYTES = 16 * 2**20
"""Of weights: a multiprocessor's share of fewer is there as soon in any way, and not worth the wait for all of x."""
WIDE = 2048
"""Inputs from which on the other kernels do not have all of a product of units under way at once."""
# As in the source.
_TILE_ROWS, _GROUP, _THREADS, _MOST_STAGES = 8, 32, 288, 16


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_squares", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("x_tiles", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


def worthwhile(x_BI: Tensor, weight: PackedWeight, *, units: bool = False) -> bool:
    """Whether this is the fastest form of a product, as measured on an H200, and can be had.

    It takes compute capability 9 or more, and nvcc.
    """
    return (
        (weight.nbytes() >= LEAST_BYTES or (units and weight.inputs >= WIDE))
        and fits(x_BI, weight)
        and torch.cuda.get_device_capability(x_BI.device)[0] >= 9
        and _module(x_BI.device, weight.inputs) is not None
    )


def fits(x_BI: Tensor, weight: PackedWeight) -> bool:
    """Whether the kernel can take a product at all."""
    values_RI = weight.values_RI
    return (
        x_BI.is_cuda
        and x_BI.dtype == values_RI.dtype == torch.bfloat16
        and len(x_BI) <= MOST_BATCH
        and weight.inputs % _GROUP == 0
        and weight.inputs <= MOST_INPUTS
        and weight.rows % _TILE_ROWS == 0
        and values_RI.is_contiguous()
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x_BI, values_RI))
    )


def product(
    x_BI: Tensor,
    weight: PackedWeight,
    y_BR: Tensor,
    *,
    units: bool = False,
    squares_TB: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """y = x W^T, or with `units` y = silu(gate) up of it.

    Args:
        x_BI: bf16; see `fits`.
        y_BR: bf16 or fp32 [B, R]; with `units` bf16 [B, R / 2].
        squares_TB: fp32; rows of the product are scaled as a norm would that has such sums of squares, and `eps`.
    """
    assert all(tensor.is_contiguous() for tensor in (x_BI, y_BR))
    assert squares_TB is None or squares_TB.is_contiguous()
    module = _module(x_BI.device, weight.inputs)
    assert module is not None, "no nvcc; ask `worthwhile`"
    name = "units_bf16" if units else "product_fp32" if y_BR.dtype == torch.float32 else "product_bf16"
    tiles = weight.rows // _TILE_ROWS
    blocks = min(tiles, multiprocessors(x_BI.device))
    row_bytes = 2 * weight.inputs
    stage_bytes = _TILE_ROWS * (row_bytes if row_bytes % 128 else row_bytes + 64)
    stages = min(_MOST_STAGES, -(-tiles // blocks), module.shared_bytes(name) // stage_bytes)
    params = _Params(
        x_BI.data_ptr(),
        None if squares_TB is None else squares_TB.data_ptr(),
        weight.values_RI.data_ptr(),
        y_BR.data_ptr(),
        len(x_BI),
        weight.rows,
        0 if squares_TB is None else len(squares_TB),
        stages,
        eps,
    )
    module.launch(name, blocks, _THREADS, stages * stage_bytes, params, dependent=True)


def _module(device: torch.device, inputs: int) -> CudaModule | None:
    return cuda_module.module("decode_products.cu", device, INPUTS=inputs)
