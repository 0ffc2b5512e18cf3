"""The reference of a decode step's stages, held to the operators that the model itself is made of."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.model.attention import rotary_table
from megatron_essh.ops import decode_step
from megatron_essh.ops.decode_step import reference
from megatron_essh.ops.decode_step.weights import AttentionWeights, FeedForwardWeights, PackedWeight, SpectralWeights
from megatron_essh.ops.rms_norm import rms_norm
from megatron_essh.ops.rotary import rotate_qkv
from megatron_essh.ops.selective_scan import ModalTables, scan_step, selective_scan
from megatron_essh.ops.swiglu import swiglu
from megatron_essh.ops.window_attention import window_attention

EPS = 1e-6
BASE = 10_000.0
NOTHING = PackedWeight(torch.empty(0, 0))


class Draw:
    """Random fp32 tensors, one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# -- the scan --------------------------------------------------------------------------------------------------------

K, M, P, D = 5, 3, 7, 24


def spectral_layer(draw: Draw, neutral: bool) -> tuple[SpectralWeights, ModalTables]:
    """One layer as a decode step and as the model's operator takes it."""
    tables = ModalTables(*(draw(K, M) for _ in ModalTables._fields[:-1]), beta=draw(K))
    rows = (
        tables.write_bias,
        tables.read_bias,
        tables.clock_bias,
        F.softplus(tables.rho_raw),
        tables.theta.cos(),
        tables.theta.sin(),
        tables.kc,
        tables.ks,
        tables.zero_lag * tables.kc,
    )
    in_proj = PackedWeight(draw(K * (P + 3 * M), D) * D**-0.5)
    packed = SpectralWeights(draw(D), in_proj, NOTHING, K**-0.5, torch.stack(rows, dim=1), tables.beta, neutral)
    return packed, tables


@pytest.mark.parametrize("neutral", [False, True])
def test_steps_of_the_scan_are_the_models(neutral):
    draw = Draw()
    weights, tables = spectral_layer(draw, neutral)
    slot_B = torch.tensor([4, -1, 0, 2], dtype=torch.int32)
    state_SKM2P = draw(6, K, M, 2, P)
    before, expected_SKM2P = state_SKM2P.clone(), state_SKM2P.clone()
    live = slot_B >= 0
    slots = slot_B[live].long()
    for _ in range(12):
        raw_BR, z_BR = draw(4, K * (P + 3 * M)), torch.empty(4, K * P)
        reference.scan_step(raw_BR, weights, EPS, state_SKM2P, slot_B, z_BR)
        raw_BKX = raw_BR[live].unflatten(-1, (K, -1))
        z_BKP, moved = scan_step(raw_BKX, tables, expected_SKM2P[slots], eps=EPS, neutral_gates=neutral)
        expected_SKM2P[slots] = moved
        assert_close(z_BR[live], z_BKP.flatten(1))
        assert_close(state_SKM2P, expected_SKM2P)
    assert torch.equal(state_SKM2P[[1, 3, 5]], before[[1, 3, 5]])


def test_steps_of_a_spectral_layer_are_the_scan_of_its_whole_input():
    draw = Draw()
    weights, tables = spectral_layer(draw, neutral=False)
    x_BTD = draw(2, 40, D)
    u_BTD = rms_norm(x_BTD, weights.norm_D, EPS)
    raw_BTKX = F.linear(u_BTD, weights.in_proj.values_RI).unflatten(-1, (K, -1))
    expected_BTKP, expected_state = selective_scan(raw_BTKX, tables, eps=EPS)
    state_SKM2P = torch.zeros(2, K, M, 2, P)
    slot_B = torch.tensor([1, 0], dtype=torch.int32)
    for t in range(40):
        z_BR = torch.empty(2, K * P)
        reference.spectral(x_BTD[:, t], weights, EPS, state_SKM2P, slot_B, z_BR)
        assert_close(z_BR, expected_BTKP[:, t].flatten(1))
    assert_close(state_SKM2P, expected_state.flip(0))


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4, 11])
def test_steps_of_attention_are_the_window_attention_of_the_whole_input(window):
    """24 tokens: before the window is full, as it wraps, and after it has."""
    draw = Draw()
    heads, head_dim, length = 3, 6, 24
    weights = AttentionWeights(torch.empty(0), NOTHING, NOTHING, heads)
    qkv_BTR = draw(2, length, heads * 3 * head_dim)
    table = rotary_table(torch.arange(length), head_dim, BASE, torch.float32)
    q, k, v = rotate_qkv(qkv_BTR.unflatten(-1, (heads, 3, head_dim)), *table)
    expected_BTHE = window_attention(q, k, v, window=window)
    # What the slots held before is not seen.
    keys, values = (torch.full((4, heads, window, head_dim), 1e6) for _ in range(2))
    position_S, slot_B = torch.zeros(4, dtype=torch.int64), torch.tensor([3, -1, 1], dtype=torch.int32)
    for t in range(length):
        y_BR = torch.empty(3, heads * head_dim)
        qkv_BR = torch.stack([qkv_BTR[0, t], qkv_BTR[1, t], qkv_BTR[1, t]])
        reference.attend(qkv_BR, weights, BASE, keys, values, position_S, slot_B, y_BR)
        reference.advance(position_S, slot_B)
        assert_close(y_BR[[0, 2]], expected_BTHE[:, t].flatten(1))
    assert position_S.tolist() == [0, length, 0, length]
    for slot, row in ((3, 0), (1, 1)):
        places = torch.arange(length - window, length)
        assert_close(keys[slot][:, places % window], k[row, places].transpose(0, 1))
        assert torch.equal(values[slot][:, places % window], v[row, places].transpose(0, 1))
    assert keys[[0, 2]].eq(1e6).all()


def test_rows_stand_at_positions_of_their_own():
    draw = Draw()
    heads, head_dim, window = 2, 4, 5
    weights = AttentionWeights(torch.empty(0), NOTHING, NOTHING, heads)
    position_S = torch.tensor([0, 3, 5, 17])
    keys_SHWE, values_SHWE = draw(4, heads, window, head_dim), draw(4, heads, window, head_dim)
    before = (keys_SHWE.clone(), values_SHWE.clone())
    slot_B = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    qkv_BR, y_BR = draw(4, heads * 3 * head_dim), torch.empty(4, heads * head_dim)
    reference.attend(qkv_BR, weights, BASE, keys_SHWE, values_SHWE, position_S, slot_B, y_BR)
    position_B1 = position_S[slot_B.long()][:, None]
    table = rotary_table(position_B1, head_dim, BASE, torch.float32)
    q, k, v = rotate_qkv(qkv_BR.unflatten(-1, (heads, 3, head_dim))[:, None], *table)
    # The last position up to the token before that falls on each place.
    last = position_B1 - 1
    ring_position_BW = (last - (last - torch.arange(window)) % window).clamp_min(-1)
    rings = [torch.cat([ring[slot_B.long()].transpose(1, 2), new], 1) for ring, new in zip(before, (k, v), strict=True)]
    expected_BTHE = window_attention(
        q,
        *rings,
        window=window,
        q_position_BT=position_B1,
        k_position_BS=torch.cat([ring_position_BW, position_B1], 1),
    )
    assert_close(y_BR, expected_BTHE.flatten(1))


# -- everything else -------------------------------------------------------------------------------------------------


def test_the_feed_forward_layer_and_the_residual_stream():
    draw = Draw()
    n = 10
    weights = FeedForwardWeights(draw(D), PackedWeight(draw(2 * n, D) * 0.2), PackedWeight(draw(D, n)))
    x_BD, h_BN = draw(3, D), torch.empty(3, n)
    expected_BN = swiglu(F.linear(rms_norm(x_BD, weights.norm_D, EPS), weights.gate_up.values_RI))
    reference.units(x_BD, weights, EPS, h_BN)
    assert_close(h_BN, expected_BN)
    expected_BD = x_BD + 0.5 * F.linear(expected_BN, weights.down.values_RI)
    reference.add_product(h_BN, weights.down, 0.5, x_BD)
    assert_close(x_BD, expected_BD)


def test_tokens_become_rows_and_rows_become_logits():
    draw = Draw()
    embedding_VD, norm_D = draw(19, D), draw(D)
    token_B, x_BD = torch.tensor([18, 0, 7]), torch.empty(3, D)
    reference.embed(embedding_VD, token_B, x_BD)
    assert torch.equal(x_BD, embedding_VD[token_B])
    logits_BV = torch.empty(3, 19)
    reference.normed_product(x_BD, norm_D, EPS, PackedWeight(embedding_VD), logits_BV)
    assert_close(logits_BV, F.linear(rms_norm(x_BD, norm_D, EPS), embedding_VD))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_weight_is_its_values_times_its_rows_scales(kind):
    draw = Draw()
    values_RI, scale_R = (draw(9, D) * 40).clamp(-127, 127).to(kind), draw(9).abs()
    x_BD, h_BI = torch.zeros(3, 9), draw(3, D)
    reference.add_product(h_BI, PackedWeight(values_RI, scale_R), 1.0, x_BD)
    assert_close(x_BD, F.linear(h_BI, values_RI.float() * scale_R[:, None]))


# -- the choice between forms ----------------------------------------------------------------------------------------


def test_every_form_of_a_stage_is_called_in_the_same_way():
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.decode_step import matrix, vector

    stages = [name for name, _ in inspect.getmembers(reference, inspect.isfunction) if not name.startswith("_")]
    assert sorted(decode_step.__all__) == sorted(set(stages)) == sorted(matrix.__all__)
    for name in stages:
        forms = [form for form in (decode_step, matrix, vector) if hasattr(form, name)]
        assert len(forms) == (2 if name in {"scan_step", "attend", "advance"} else 3), name
        for form in forms:
            assert inspect.signature(getattr(form, name)) == inspect.signature(getattr(reference, name)), name


def layer(stages, dtype: torch.dtype, device: str, batch: int) -> list[Tensor]:
    """What two tokens of every row leave behind, after all stages, each fed by the one before."""
    draw = Draw()
    weights, _ = spectral_layer(draw, neutral=False)
    heads, head_dim, window, n = 2, 8, 6, 16

    def packed(rows: int, inputs: int) -> PackedWeight:
        return PackedWeight((draw(rows, inputs) * inputs**-0.5).to(device, dtype))

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    spectral = SpectralWeights(
        moved(weights.norm_D), packed(K * (P + 3 * M), D), packed(D, K * P), K**-0.5, moved(weights.tables_KTM),
        moved(weights.beta_K), False,
    )  # fmt: skip
    attention = AttentionWeights(moved(draw(D)), packed(heads * 3 * head_dim, D), packed(D, heads * head_dim), heads)
    feed_forward = FeedForwardWeights(moved(draw(D)), packed(2 * n, D), packed(D, n))
    embedding_VD = (draw(40, D)).to(device, dtype)
    slots = batch + 1
    state_SKM2P = moved(draw(slots, K, M, 2, P))
    keys, values = (draw(slots, heads, window, head_dim).to(device, dtype) for _ in range(2))
    position_S = moved(torch.arange(slots))
    slot_B = moved(torch.arange(batch, dtype=torch.int32).flip(0))
    x_BD, logits_BV = torch.empty(batch, D, device=device), torch.empty(batch, 40, device=device)
    z_BR, qkv_BR, y_BR, h_BN = (
        torch.empty(batch, width, device=device, dtype=dtype)
        for width in (K * P, heads * 3 * head_dim, heads * head_dim, n)
    )
    for step in range(2):
        stages.embed(embedding_VD, moved((torch.arange(batch) * 7 + step) % 40), x_BD)
        stages.spectral(x_BD, spectral, EPS, state_SKM2P, slot_B, z_BR)
        stages.add_product(z_BR, spectral.out_proj, spectral.output_scale, x_BD)
        stages.normed_product(x_BD, attention.norm_D, EPS, attention.qkv, qkv_BR)
        stages.attend(qkv_BR, attention, BASE, keys, values, position_S, slot_B, y_BR)
        stages.add_product(y_BR, attention.out_proj, 1.0, x_BD)
        stages.units(x_BD, feed_forward, EPS, h_BN)
        stages.add_product(h_BN, feed_forward.down, 1.0, x_BD)
        stages.normed_product(x_BD, attention.norm_D, EPS, PackedWeight(embedding_VD), logits_BV)
        stages.advance(position_S, slot_B)
    return [logits_BV, state_SKM2P, keys, values, position_S]


def test_on_a_cpu_the_stages_are_the_reference():
    for one, other in zip(
        layer(decode_step, torch.bfloat16, "cpu", 3), layer(reference, torch.bfloat16, "cpu", 3), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8, 9, 16, 33, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_stages_follow_the_reference_at_every_batch(batch, dtype):
    actual, expected = (layer(stages, dtype, "cuda", batch) for stages in (decode_step, reference))
    assert torch.equal(actual.pop(), expected.pop())
    for one, other in zip(actual, expected, strict=True):
        error = torch.linalg.vector_norm((one - other).double()) / torch.linalg.vector_norm(other.double())
        assert error <= (1e-5 if dtype == torch.float32 else 0.01), f"relative RMS {error:.2e}"
