"""One token of many sequences: the stages of a decode step, fast where there is a GPU (specification, section 8).

`reference.py` defines the stages; the functions here have the same faces and choose the form by device and batch: on a
CPU the reference; on a GPU with Triton `vector` for few rows, which is bound by reading the weights, and `matrix` for
more. Both may be recorded as a CUDA graph once a step of the same batch has run outside of one.

Kernels take contiguous tensors, weights in bf16, fp16, fp32, int8 or float8_e4m3fn, and slots of which no two live
ones are alike.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from megatron_essh.ops import HAS_TRITON
from megatron_essh.ops.decode_step import reference
from megatron_essh.ops.decode_step.state import Scaled
from megatron_essh.ops.decode_step.weights import AttentionWeights, FeedForwardWeights, PackedWeight, SpectralWeights

__all__ = [
    "add_product",
    "advance",
    "attend",
    "embed",
    "normed_product",
    "scan_step",
    "spectral",
    "units",
]


def embed(embedding_VD: Tensor, token_B: Tensor, x_BD: Tensor) -> None:
    """x = the tokens' rows."""
    _weights_stages(x_BD).embed(embedding_VD, token_B, x_BD)


def normed_product(
    x_BD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, y_BR: Tensor, scaled: Scaled | None = None
) -> None:
    """y = RMSNorm(x) W^T: the queries, keys and values of an attention layer, and the head's logits (fp32)."""
    _weights_stages(x_BD).normed_product(x_BD, norm_D, eps, weight, y_BR, scaled)


def add_product(
    h_BI: Tensor, weight: PackedWeight, scale: float, x_BD: Tensor, norm_D: Tensor | None = None
) -> Scaled | None:
    """x += scale h W^T. What it returns may be given to the stage that reads x next, through the norm norm_D."""
    scaled: Scaled | None = _weights_stages(x_BD).add_product(h_BI, weight, scale, x_BD, norm_D)
    return scaled


def units(x_BD: Tensor, weights: FeedForwardWeights, eps: float, h_BN: Tensor, scaled: Scaled | None = None) -> None:
    """h = silu(gate) up of RMSNorm(x)."""
    _weights_stages(x_BD).units(x_BD, weights, eps, h_BN, scaled)


def spectral(
    x_BD: Tensor,
    weights: SpectralWeights,
    eps: float,
    state_SKM2P: Tensor,
    slot_B: Tensor,
    z_BR: Tensor,
    scaled: Scaled | None = None,
) -> None:
    """z [B, K P]: what the channels give for RMSNorm(x), their states moved on by one token."""
    _weights_stages(x_BD).spectral(x_BD, weights, eps, state_SKM2P, slot_B, z_BR, scaled)


def scan_step(
    raw_BR: Tensor, weights: SpectralWeights, eps: float, state_SKM2P: Tensor, slot_B: Tensor, z_BR: Tensor
) -> None:
    """One token of the selective scan, from the raw input projection [B, K X] (section 1)."""
    _state_stages(raw_BR).scan_step(raw_BR, weights, eps, state_SKM2P, slot_B, z_BR)


def attend(
    qkv_BR: Tensor,
    weights: AttentionWeights,
    rope_base: float,
    keys_SHWE: Tensor,
    values_SHWE: Tensor,
    position_S: Tensor,
    slot_B: Tensor,
    y_BR: Tensor,
) -> None:
    """y [B, H E]: attention of the token at its position to the window's keys, itself included, which it joins."""
    _state_stages(qkv_BR).attend(qkv_BR, weights, rope_base, keys_SHWE, values_SHWE, position_S, slot_B, y_BR)


def advance(position_S: Tensor, slot_B: Tensor) -> None:
    """The live rows' sequences have taken in one token more."""
    _state_stages(position_S).advance(position_S, slot_B)


def _weights_stages(x_BD: Tensor) -> ModuleType:
    """What computes the stages that read weights for these rows."""
    if not (HAS_TRITON and x_BD.is_cuda):
        return reference
    from megatron_essh.ops.decode_step import matrix, vector

    return vector if x_BD.shape[0] <= vector.MOST_ROWS else matrix


def _state_stages(tensor: Tensor) -> ModuleType:
    """What computes the stages that read and write states alone, for any number of rows."""
    if not (HAS_TRITON and tensor.is_cuda):
        return reference
    from megatron_essh.ops.decode_step import matrix

    return matrix
