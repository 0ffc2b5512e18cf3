"""The stages of a decode step in plain PyTorch (specification, section 8): the definition that kernels are held to.

A step takes in one token of each of B sequences. The residual stream x_BD is fp32; products take their inputs in the
activations' dtype (that of the tensors given for results) and sum in fp32. `slot_B` says where a row's sequence is; a
row of slot -1 is idle: it changes no state, and what is computed for it means nothing.

Where a stage takes what the one before it returned (`Scaled`), it is so that a fast version need not norm anew; the
reference needs none and returns none.

Every stage writes where it is told to, reads nothing on the host, and so can be recorded as a CUDA graph in its fast
versions. Shape suffixes: as in weights.py; B rows, S slots, W window, E head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.ops.decode_step.state import Scaled
from megatron_essh.ops.decode_step.weights import AttentionWeights, FeedForwardWeights, PackedWeight, SpectralWeights


def embed(embedding_VD: Tensor, token_B: Tensor, x_BD: Tensor) -> None:
    """x = the tokens' rows."""
    x_BD.copy_(embedding_VD[token_B])


def normed_product(
    x_BD: Tensor, norm_D: Tensor, eps: float, weight: PackedWeight, y_BR: Tensor, scaled: Scaled | None = None
) -> None:
    """y = RMSNorm(x) W^T: the queries, keys and values of an attention layer, and the head's logits (fp32)."""
    y_BR.copy_(_product(_normed(x_BD, norm_D, eps, weight.input_dtype(y_BR)), weight))


def add_product(
    h_BI: Tensor, weight: PackedWeight, scale: float, x_BD: Tensor, norm_D: Tensor | None = None
) -> Scaled | None:
    """x += scale h W^T."""
    x_BD.add_(_product(h_BI, weight), alpha=scale)
    return None


def units(x_BD: Tensor, weights: FeedForwardWeights, eps: float, h_BN: Tensor, scaled: Scaled | None = None) -> None:
    """h = silu(gate) up of RMSNorm(x)."""
    gate_up_BR = _product(_normed(x_BD, weights.norm_D, eps, h_BN.dtype), weights.gate_up)
    gate_BN, up_BN = gate_up_BR.unflatten(-1, (-1, 2)).unbind(-1)
    h_BN.copy_(F.silu(gate_BN) * up_BN)


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
    raw_BR = _product(_normed(x_BD, weights.norm_D, eps, z_BR.dtype), weights.in_proj)
    scan_step(raw_BR, weights, eps, state_SKM2P, slot_B, z_BR)


def scan_step(
    raw_BR: Tensor, weights: SpectralWeights, eps: float, state_SKM2P: Tensor, slot_B: Tensor, z_BR: Tensor
) -> None:
    """One token of the selective scan, from the raw input projection [B, K X] (section 1)."""
    channels, _, modes = weights.tables_KTM.shape
    width = state_SKM2P.shape[-1]
    raw_BKX = raw_BR.float().unflatten(-1, (channels, width + 3 * modes))
    raw_BKP, write_BKM, read_BKM, clock_BKM = raw_BKX.split([width, modes, modes, modes], dim=-1)
    write_bias, read_bias, clock_bias, gamma, cos, sin, kc, ks, zero_lag = weights.tables_KTM.unbind(1)
    beta_K1 = weights.beta_K[:, None]
    root_mean_square = (raw_BKP.square().mean(-1, keepdim=True) + eps).rsqrt()
    value_BKP = raw_BKP * (1.0 - beta_K1 + beta_K1 * root_mean_square)
    if weights.neutral_gates:
        write_BKM, read_BKM = torch.ones_like(write_BKM), torch.ones_like(read_BKM)
    else:
        write_BKM = 2.0 * torch.sigmoid(write_BKM + write_bias)
        read_BKM = 2.0 * torch.sigmoid(read_BKM + read_bias)
    keep_BKM1 = torch.exp(-(gamma + F.softplus(clock_BKM + clock_bias)))[..., None]
    here_B = slot_B.clamp_min(0).long()
    first_BKMP, second_BKMP = state_SKM2P[here_B].unbind(-2)
    cos_KM1, sin_KM1 = cos[..., None], sin[..., None]
    written_BKMP = write_BKM[..., None] * value_BKP[:, :, None]
    turned_BKMP = keep_BKM1 * (cos_KM1 * first_BKMP - sin_KM1 * second_BKMP) + written_BKMP
    second_BKMP = keep_BKM1 * (sin_KM1 * first_BKMP + cos_KM1 * second_BKMP)
    core_BKP = (read_BKM[..., None] * (kc[..., None] * turned_BKMP - ks[..., None] * second_BKMP)).sum(2)
    lag_BK1 = (zero_lag * read_BKM * write_BKM).sum(-1, keepdim=True)
    z_BR.copy_((core_BKP - lag_BK1 * value_BKP).flatten(1))
    live_B = slot_B >= 0
    state_SKM2P[here_B[live_B]] = torch.stack([turned_BKMP, second_BKMP], dim=-2)[live_B]


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
    window, head_dim = keys_SHWE.shape[2:]
    q_BHE, k_BHE, v_BHE = qkv_BR.float().unflatten(-1, (weights.heads, 3, head_dim)).unbind(2)
    here_B, live_B = slot_B.clamp_min(0).long(), slot_B >= 0
    position_B = position_S[here_B]
    frequency = rope_base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=qkv_BR.device) / head_dim)
    angle_B1E = position_B.double()[:, None, None] * frequency
    q_BHE, k_BHE = (_rotated(part, angle_B1E.cos().float(), angle_B1E.sin().float()) for part in (q_BHE, k_BHE))
    for ring, new in ((keys_SHWE, k_BHE), (values_SHWE, v_BHE)):
        ring[here_B[live_B], :, (position_B % window)[live_B]] = new[live_B].to(ring.dtype)
    keys_BHWE, values_BHWE = keys_SHWE[here_B].float(), values_SHWE[here_B].float()
    score_BHW = torch.einsum("bhe,bhwe->bhw", q_BHE.to(keys_SHWE.dtype).float(), keys_BHWE) * head_dim**-0.5
    empty_BW = torch.arange(window, device=qkv_BR.device) > position_B[:, None]
    share_BHW = score_BHW.masked_fill(empty_BW[:, None], -torch.inf).softmax(-1)
    y_BR.copy_(torch.einsum("bhw,bhwe->bhe", share_BHW, values_BHWE).flatten(1))


def advance(position_S: Tensor, slot_B: Tensor) -> None:
    """The live rows' sequences have taken in one token more."""
    position_S[slot_B[slot_B >= 0].long()] += 1


def _normed(x_BD: Tensor, norm_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(x_BD, (x_BD.shape[-1],), norm_D, eps).to(dtype)


def _product(x_BI: Tensor, weight: PackedWeight) -> Tensor:
    """fp32 [B, R] of inputs and weights as they are rounded, summed in fp32."""
    y_BR = x_BI.float() @ weight.values_RI.float().T
    return y_BR if weight.scale_R is None else y_BR * weight.scale_R


def _rotated(x_BHE: Tensor, cos_B1E: Tensor, sin_B1E: Tensor) -> Tensor:
    first, second = x_BHE.chunk(2, dim=-1)
    return torch.cat([first * cos_B1E - second * sin_B1E, first * sin_B1E + second * cos_B1E], dim=-1)
