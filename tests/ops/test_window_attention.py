"""Sliding-window attention against a masked softmax that anyone can check."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from megatron_essh.ops.window_attention import document_spans, flash, window_attention
from megatron_essh.ops.window_attention.reference import BLOCK_ROWS, causal_window


def masked_softmax(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, seen_BTS: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the keys seen; 0 where none is."""
    scores = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD) / math.sqrt(q_BTHD.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * seen_BTS[:, None]
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshd->bthd", weights / total.where(total > 0, 1), v_BSHD)


def seen_in_order(length: int, window: int | None, documents_BT: Tensor | None) -> Tensor:
    lag = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((lag >= 0) & (lag < (window or length)))[None]
    return seen if documents_BT is None else seen & (documents_BT[:, :, None] == documents_BT[:, None, :])


def random_qkv(*shapes: tuple[int, int, int, int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def random_documents(batch: int, length: int, seed: int = 0) -> Tensor:
    return (torch.rand((batch, length), generator=torch.Generator().manual_seed(seed)) < 0.1).long().cumsum(1)


LENGTHS = [1, 7, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 45]
WINDOWS = [1, 5, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 300, None]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("cut", [False, True])
def test_whole_sequences_see_their_window(length, window, cut):
    q, k, v = random_qkv(*[(2, length, 2, 4)] * 3)
    documents = random_documents(2, length) if cut else None
    expected = masked_softmax(q, k, v, seen_in_order(length, window, documents))
    actual = window_attention(q, k, v, window=window, documents_BT=documents)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("length", "window", "cut"), [(2 * BLOCK_ROWS + 9, 100, True), (60, 20, False), (60, None, False)]
)
def test_gradients_are_those_of_the_masked_softmax(length, window, cut):
    inputs = [x.requires_grad_() for x in random_qkv(*[(2, length, 2, 4)] * 3)]
    documents = random_documents(2, length) if cut else None
    expected = masked_softmax(*inputs, seen_in_order(length, window, documents))
    actual = window_attention(*inputs, window=window, documents_BT=documents)
    for one, other in zip(
        torch.autograd.grad(actual.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_document_sees_nothing_of_another():
    q, k, v = random_qkv(*[(1, 300, 2, 4)] * 3)
    documents = torch.tensor([0] * 120 + [1] * 180)[None]
    out = window_attention(q, k, v, window=200, documents_BT=documents)
    alone = window_attention(q[:, 120:], k[:, 120:], v[:, 120:], window=200)
    torch.testing.assert_close(out[:, 120:], alone, rtol=1e-12, atol=1e-12)


def test_a_number_that_comes_again_is_another_document():
    q, k, v = random_qkv(*[(1, 300, 2, 4)] * 3)
    again = torch.tensor([0] * 120 + [1] * 100 + [0] * 80)[None]
    rising = torch.tensor([0] * 120 + [1] * 100 + [2] * 80)[None]
    out = window_attention(q, k, v, window=280, documents_BT=again)
    assert torch.equal(out, window_attention(q, k, v, window=280, documents_BT=rising))


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (7, 130), (BLOCK_ROWS, BLOCK_ROWS + 1), (300, 391)])
@pytest.mark.parametrize("window", [1, 5, BLOCK_ROWS, 200, None])
def test_without_positions_the_queries_are_the_last_of_the_keys(queries, keys, window):
    q, k, v = (x.requires_grad_() for x in random_qkv((2, queries, 2, 4), *[(2, keys, 2, 4)] * 2))
    expected = masked_softmax(q, k, v, seen_in_order(keys, window, None)[:, keys - queries :])
    actual = window_attention(q, k, v, window=window)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(actual.sin().sum(), (q, k, v)),
        torch.autograd.grad(expected.sin().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_spans_are_the_runs_of_equal_numbers(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    documents = torch.randint(0, 3, (batch, length), generator=generator).repeat_interleave(2, dim=1)[:, :length]
    starts = [
        row * length + place
        for row, numbers in enumerate(documents.tolist())
        for place in range(length)
        if place == 0 or numbers[place] != numbers[place - 1]
    ]
    ends = [*starts[1:], batch * length]
    spans = document_spans(documents)
    assert spans.start_N1.tolist() == [*starts, batch * length]
    assert spans.start_N1.dtype == torch.int32
    assert spans.longest == max(end - start for start, end in zip(starts, ends, strict=True))


def plain_varlen(*arguments: Any, **named: Any) -> Tensor:
    """What the library's `varlen_attn` is documented to compute, called as it is declared; checks what it trusts."""
    call = inspect.signature(LIBRARY_VARLEN).bind(*arguments, **named)
    call.apply_defaults()
    q, k, v, q_start, k_start, most_q, most_k = arguments
    before, after = call.arguments["window_size"]
    assert q_start.dtype == k_start.dtype == torch.int32
    assert after == 0, "not causal"
    sizes = [(start[1:] - start[:-1]).tolist() for start in (q_start, k_start)]
    assert [max(some) for some in sizes] == [most_q, most_k]
    assert [sum(some) for some in sizes] == [len(q), len(k)]
    outputs = []
    for q_part, k_part, v_part in zip(
        *(x.split(n) for x, n in ((q, sizes[0]), (k, sizes[1]), (v, sizes[1]))), strict=True
    ):
        keys = len(k_part)
        lag = torch.arange(keys)[keys - len(q_part) :, None] - torch.arange(keys)
        seen = (lag >= 0) & ((lag <= before) | (before < 0))
        outputs.append(masked_softmax(q_part[None], k_part[None], v_part[None], seen[None])[0])
    return torch.cat(outputs)


LIBRARY_VARLEN = varlen.varlen_attn


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [1, 20, 64, 99, 100, None])
@pytest.mark.parametrize("form", ["in order", "documents", "last queries"])
def test_the_kernels_are_asked_for_what_the_reference_computes(monkeypatch, batch, window, form):
    monkeypatch.setattr(flash, "varlen_attn", plain_varlen)
    queries = 37 if form == "last queries" else 100
    q, k, v = random_qkv((batch, queries, 2, 4), *[(batch, 100, 2, 4)] * 2)
    documents = random_documents(batch, 100) % 2 if form == "documents" else None
    spans = None if documents is None else document_spans(documents)
    actual = flash.flash_window(q, k, v, window, spans)
    torch.testing.assert_close(actual, causal_window(q, k, v, window, documents), rtol=1e-12, atol=1e-12)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(actual.double() - expected) / torch.linalg.vector_norm(expected))


GPU_CASES = [
    # B, T, S, window, documents
    (1, 2049, 2049, 2048, False),
    (2, 2048 + 64, 2048 + 64, 2048, False),
    (1, 5000, 5000, 2048, False),
    (3, 2049, 2049, 64, False),
    (1, 5000, 5000, 128, False),
    (2, 2048, 2048, 2048, True),
    (3, 2048 + 64, 2048 + 64, 128, True),
    (1, 5000, 5000, 2048, True),
    (2, 2048, 2048, None, True),
    (1, 3000, 5047, 2048, False),
    (2, 65, 128, 64, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "queries", "keys", "window", "cut"), GPU_CASES)
def test_the_kernels_match_fp64_forward_and_backward(batch, queries, keys, window, cut, dtype):
    shapes = (batch, queries, 2, 64), *[(batch, keys, 2, 64)] * 2
    inputs = [x.cuda().to(dtype).requires_grad_() for x in random_qkv(*shapes)]
    documents = (random_documents(batch, keys) // 40 % 2).cuda() if cut else None
    assert flash.flash_takes(*inputs)
    actual = window_attention(*inputs, window=window, documents_BT=documents)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = causal_window(*exact, window, documents)
    assert actual.dtype == dtype
    assert relative_rms(actual, expected) < 0.004
    grad = torch.randn(shapes[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64).cuda().to(dtype)
    for one, other in zip(
        torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        assert one.isfinite().all()
        assert relative_rms(one, other) < 0.006


@pytest.mark.gpu
def test_spans_made_once_serve_every_layer_and_wait_for_nothing():
    q, k, v = (x.cuda().bfloat16() for x in random_qkv(*[(2, 500, 2, 64)] * 3))
    documents = random_documents(2, 500).cuda()
    spans = document_spans(documents)
    expected = window_attention(q, k, v, window=300, documents_BT=documents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = window_attention(q, k, v, window=300, documents_BT=documents, spans=spans)
        window_attention(q, k, v, window=300)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["in order", "cached"])
@pytest.mark.parametrize("length", [BLOCK_ROWS + 64, 2 * BLOCK_ROWS + 64])
def test_masked_attention_has_finite_gradients_where_the_kernels_do_not_serve(form, length):
    shape = (2, length, 2, 12)  # a head width that is no multiple of 8, or keys in any order
    shape = (2, length, 2, 64) if form == "cached" else shape
    inputs = [x.cuda().bfloat16().requires_grad_() for x in random_qkv(*[shape] * 3)]
    place = torch.arange(length, device="cuda").expand(2, -1)
    positions = {"q_position_BT": place, "k_position_BS": place} if form == "cached" else {}
    assert form == "cached" or not flash.flash_takes(*inputs)
    out = window_attention(*inputs, window=100, **positions)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = causal_window(*exact, 100, None)
    for one, other in zip(
        torch.autograd.grad(out.float().sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), exact),
        strict=True,
    ):
        assert relative_rms(one, other) < 0.02


@settings(max_examples=50, deadline=None)
@given(
    queries=st.integers(1, 2 * BLOCK_ROWS + 20),
    keys=st.integers(1, 200),
    window=st.one_of(st.none(), st.integers(1, 80)),
    seed=st.integers(0, 2**31),
)
def test_cached_keys_lie_in_any_order_with_empty_slots_and_pads(queries, keys, window, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = random_qkv((2, queries, 2, 4), (2, keys, 2, 4), (2, keys, 2, 4), seed=seed)
    q_position = torch.randint(-1, 250, (2, queries), generator=generator)
    k_position = torch.stack([torch.randperm(keys, generator=generator) for _ in range(2)])
    k_position[torch.rand((2, keys), generator=generator) < 0.4] = -1
    lag = q_position[:, :, None] - k_position[:, None, :]
    seen = (lag >= 0) & (k_position[:, None, :] >= 0) & (lag < (window or 10**9))
    expected = masked_softmax(q, k, v, seen)
    actual = window_attention(q, k, v, window=window, q_position_BT=q_position, k_position_BS=k_position)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert (actual[~seen.any(-1)] == 0).all()


@pytest.mark.parametrize("window", [None, 7, 64])
def test_a_sequence_in_pieces_over_a_cache_equals_the_whole(window):
    q, k, v = random_qkv(*[(2, 50, 2, 4)] * 3)
    whole = window_attention(q, k, v, window=window)
    position = torch.arange(50).expand(2, -1)
    for start, end in ((0, 13), (13, 14), (14, 50)):
        piece = window_attention(
            q[:, start:end],
            k[:, :end],
            v[:, :end],
            window=window,
            q_position_BT=position[:, start:end],
            k_position_BS=position[:, :end],
        )
        torch.testing.assert_close(piece, whole[:, start:end], rtol=1e-12, atol=1e-12)


def test_queries_that_see_no_key_give_zero_and_no_gradient():
    q, k, v = (x.requires_grad_() for x in random_qkv((1, 3, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4)))
    out = window_attention(
        q, k, v, window=4, q_position_BT=torch.tensor([[-1, 9, 9]]), k_position_BS=torch.tensor([[-1, 5]])
    )
    assert torch.equal(out, torch.zeros_like(out))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("cached", [False, True])
def test_an_empty_input_gives_an_empty_output(cached):
    q, k, v = random_qkv((2, 0, 2, 4), (2, 3 * cached, 2, 4), (2, 3 * cached, 2, 4))
    none = torch.zeros(2, 0, dtype=torch.long)
    positions = {"q_position_BT": none, "k_position_BS": torch.zeros(2, 3, dtype=torch.long)} if cached else {}
    assert window_attention(q, k, v, window=5, **positions).shape == q.shape
    if not cached:
        assert window_attention(q, k, v, window=5, documents_BT=none).shape == q.shape


@pytest.mark.parametrize("form", ["training", "documents", "cached"])
def test_memory_grows_with_the_length_and_not_its_square(form, largest_tensor):
    length, window = 3000, 40
    q, k, v = (x.float().requires_grad_(form != "cached") for x in random_qkv(*[(1, length, 1, 4)] * 3))
    settings_of = {
        "training": {},
        "documents": {"documents_BT": random_documents(1, length)},
        "cached": {"q_position_BT": torch.arange(length)[None], "k_position_BS": torch.arange(length)[None]},
    }
    with largest_tensor() as largest:
        out = window_attention(q, k, v, window=window, **settings_of[form])
        if form != "cached":
            torch.autograd.grad(out.sum(), (q, k, v))
    # The mask of a cached block is over all keys, a score only over those near.
    limit = BLOCK_ROWS * length if form == "cached" else max(4 * length, 4 * BLOCK_ROWS**2)
    assert largest.elements <= limit < length**2 // 20


@pytest.mark.parametrize("form", ["causal", "banded", "documents", "cached"])
def test_fp32_matches_fp64(form, device):
    inputs = [x.float() for x in random_qkv(*[(2, 200, 3, 64)] * 3)]
    extra: dict[str, Tensor] = {}
    if form == "documents":
        extra = {"documents_BT": random_documents(2, 200)}
    if form == "cached":
        extra = {"q_position_BT": torch.arange(200).expand(2, -1), "k_position_BS": torch.arange(200).expand(2, -1)}
    window = 400 if form == "causal" else 30
    results = []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        moved = [x.to(where, dtype).requires_grad_() for x in inputs]
        out = window_attention(*moved, window=window, **{name: x.to(where) for name, x in extra.items()})
        results.append([out, *torch.autograd.grad(out.sin().sum(), moved)])
    for expected, actual in zip(*results, strict=True):
        error = torch.linalg.vector_norm(actual.cpu().double() - expected) / torch.linalg.vector_norm(expected)
        assert error < 5e-6
