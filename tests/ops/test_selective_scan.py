"""The selective scan: three forms of one recurrence (specification, section 1)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_essh.ops.selective_scan import ModalTables, scan_step, selective_scan
from megatron_essh.ops.selective_scan.reference import (
    chunked_scan,
    controls,
    explicit_scan,
    recurrent_scan,
)

FORMS = [recurrent_scan, explicit_scan, chunked_scan]
HUGE = 80.0  # a clock that empties the state
SHAPES = [  # B, T, K, M, P
    (1, 1, 1, 1, 1),
    (2, 2, 3, 2, 5),
    (2, 15, 2, 8, 3),
    (1, 16, 3, 3, 4),
    (3, 17, 2, 3, 28),
    (2, 37, 4, 8, 12),
    (1, 300, 2, 2, 3),
    (2, 33, 0, 2, 2),
    (2, 0, 2, 2, 2),
]


def random_case(
    shape: tuple[int, int, int, int, int], *, huge: float = 0.0, seed: int = 0
) -> tuple[Tensor, ModalTables, Tensor]:
    """raw, tables and an entering state in fp64; a share `huge` of the clocks is drawn up to 80, half of them 80."""
    b, t, k, m, p = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    raw = normal(b, t, k, p + 3 * m)
    clock = (160 * torch.rand((b, t, k, m), generator=generator, dtype=torch.float64)).clamp(max=HUGE)
    chosen = torch.rand((b, t, k, m), generator=generator) < huge
    raw[..., p + 2 * m :] = torch.where(chosen, clock, raw[..., p + 2 * m :])
    bias = [normal(k, m), normal(k, m), normal(k, m) / 10]
    tables = ModalTables(*bias, 2 * normal(k, m) - 2, 3 * normal(k, m), *(normal(k, m) for _ in range(3)), normal(k))
    return raw, tables, normal(b, k, m, 2, p)


def random_layout(batch: int, length: int, *, documents: bool, pads: bool, seed: int = 0) -> tuple[Tensor | None, ...]:
    """Document numbers and valid positions, or None where not asked for."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.rand((batch, length), generator=generator) < 0.15).long().cumsum(1)
    valid = torch.rand((batch, length), generator=generator) < 0.7
    return numbers if documents else None, valid if pads else None


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest expected entry."""
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual.to(expected.dtype) - expected).abs().max().item()
        assert error <= tolerance * max(expected.abs().max().item(), 1e-30), error


def all_gradients(
    raw: Tensor, tables: ModalTables, state: Tensor, device: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """z, the leaving state and the gradients of a random functional of both, in the order of the arguments."""
    inputs = [x.to(device, dtype).requires_grad_() for x in (raw, *tables, state)]
    z, leaving = selective_scan(inputs[0], ModalTables(*inputs[1:-1]), state_BKM2P=inputs[-1])
    generator = torch.Generator().manual_seed(5)
    outgoing = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device, dtype) for x in (z, leaving)]
    return z.detach(), leaving.detach(), *torch.autograd.grad((z, leaving), inputs, outgoing)


# -- the definition --------------------------------------------------------------------------------------------------


def test_controls_are_the_formulas_of_section_1():
    raw, tables, _ = random_case((2, 5, 3, 4, 7))
    value0, write0, read0, clock0 = raw[..., :7], raw[..., 7:11], raw[..., 11:15], raw[..., 15:]
    eps = 1e-2
    value, write, read, decay = controls(raw, tables, eps)
    normalised = value0 / torch.sqrt((value0**2).mean(-1, keepdim=True) + eps)
    beta = tables.beta[:, None]
    torch.testing.assert_close(value, (1 - beta) * value0 + beta * normalised, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(write, 2 / (1 + torch.exp(-write0 - tables.write_bias)), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(read, 2 / (1 + torch.exp(-read0 - tables.read_bias)), rtol=1e-13, atol=1e-13)
    clock = torch.log1p(torch.exp(clock0 + tables.clock_bias))
    torch.testing.assert_close(decay, clock + torch.log1p(torch.exp(tables.rho_raw)), rtol=1e-13, atol=1e-13)


def test_with_still_clocks_and_neutral_gates_the_impulse_response_is_the_fitted_filter():
    _, tables, _ = random_case((1, 1, 3, 4, 1))
    tables = tables._replace(zero_lag=torch.zeros(3, 4, dtype=torch.float64), beta=torch.zeros(3, dtype=torch.float64))
    raw = torch.zeros(1, 40, 3, 13, dtype=torch.float64)
    raw[:, 0, :, 0] = 1
    raw[..., 9:] = -1000  # softplus is 0 there
    z, _ = selective_scan(raw, tables, neutral_gates=True)
    lag = torch.arange(40, dtype=torch.float64)[:, None, None]
    rho = torch.exp(-torch.log1p(torch.exp(tables.rho_raw)))
    angle = tables.theta * lag
    filters = (rho**lag * (tables.kc * angle.cos() - tables.ks * angle.sin())).sum(-1)
    assert_close(z[0, :, :, 0], filters, 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("huge", [0.0, 0.02, 0.5])
@pytest.mark.parametrize(("documents", "pads"), [(False, False), (True, False), (False, True), (True, True)])
def test_recurrence_matrix_and_chunks_agree(shape, huge, documents, pads):
    raw, tables, state = random_case(shape, huge=huge)
    layout = random_layout(*shape[:2], documents=documents, pads=pads)
    expected = recurrent_scan(controls(raw, tables), tables, state, *layout)
    for scan in (explicit_scan, chunked_scan):
        for actual, wanted in zip(scan(controls(raw, tables), tables, state, *layout), expected, strict=True):
            assert_close(actual, wanted, 1e-12)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (2, 50, 3, 3, 4))),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    huge=st.sampled_from([0.0, 0.1, 1.0]),
    documents=st.booleans(),
    pads=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_chunks_of_any_size_follow_the_recurrence(shape, chunk, huge, documents, pads, seed):
    raw, tables, state = random_case(shape, huge=huge, seed=seed)
    layout = random_layout(*shape[:2], documents=documents, pads=pads, seed=seed)
    expected = recurrent_scan(controls(raw, tables), tables, state, *layout)
    actual = selective_scan(raw, tables, state_BKM2P=state, documents_BT=layout[0], valid_BT=layout[1], chunk=chunk)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, 1e-12)


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", FORMS)
@pytest.mark.parametrize(("huge", "documents", "pads"), [(0.0, False, False), (0.08, False, False), (0.08, True, True)])
def test_gradients_are_the_centred_differences(scan, huge, documents, pads):
    shape = (1, 19, 2, 2, 1)
    raw, tables, state = random_case(shape, huge=huge)
    layout = random_layout(*shape[:2], documents=documents, pads=pads)

    def function(raw: Tensor, state: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        named = ModalTables(*tables)
        return scan(controls(raw, named), named, state, *layout)

    inputs = [x.requires_grad_() for x in (raw, state, *tables)]
    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(("huge", "pads"), [(0.0, False), (0.3, True)])
def test_gradients_of_the_three_forms_agree(huge, pads):
    shape = (2, 45, 3, 4, 5)
    raw, tables, state = random_case(shape, huge=huge)
    layout = random_layout(*shape[:2], documents=True, pads=pads)
    inputs = [x.requires_grad_() for x in (raw, *tables, state)]
    results = []
    for scan in FORMS:
        z, leaving = scan(controls(raw, tables), tables, state, *layout)
        results.append(torch.autograd.grad((z.sin().sum() + leaving.sin().sum()), inputs))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_close(actual, expected, 1e-12)


# -- huge clocks and fp32 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", FORMS)
@pytest.mark.parametrize("at", [3, 15, 16, 21])
def test_what_is_written_under_a_huge_clock_reaches_the_next_token_at_full_strength(scan, at):
    raw, tables, state = random_case((1, 24, 1, 1, 2))
    raw[0, at, 0, -1] = HUGE
    given = controls(raw, tables)
    z, _ = scan(given, tables, state)
    value, write, read, decay = (part[0, :, 0] for part in given)
    assert decay[at] > HUGE - 1
    response = tables.kc * tables.theta.cos() - tables.ks * tables.theta.sin()
    carried = read[at + 1] * write[at] * torch.exp(-decay[at + 1]) * response[0] * value[at]
    own = (1 - tables.zero_lag[0]) * tables.kc[0] * read[at + 1] * write[at + 1] * value[at + 1]
    assert_close(z[0, at + 1, 0], carried + own, 1e-12)


def device_cases(shape: tuple[int, int, int, int, int]) -> dict[str, tuple[Tensor, ModalTables, Tensor]]:
    one_huge = random_case(shape)
    one_huge[0][:, 7, :, -1] = HUGE
    # Decay spread evenly over a chunk, to just below what one anchor spans: above the diagonal e^{99} overflows fp32.
    steep = random_case(shape)
    steep[0][..., -shape[3] :] = 0
    steep = (
        steep[0],
        steep[1]._replace(rho_raw=torch.full(shape[2:4], 5.5), clock_bias=steep[1].clock_bias * 0),
        steep[2],
    )
    return {
        "calm": random_case(shape),
        "one huge clock": one_huge,
        "many huge clocks": random_case(shape, huge=0.3),
        "steep": steep,
    }


@pytest.mark.parametrize("case", ["calm", "one huge clock", "many huge clocks", "steep"])
@pytest.mark.parametrize("shape", [(2, 130, 3, 8, 28), (1, 63, 2, 4, 14)])
def test_fp32_values_and_gradients_match_fp64(case, shape, device):
    inputs = device_cases(shape)[case]
    inputs = (inputs[0].float(), ModalTables(*(t.float() for t in inputs[1])), inputs[2].float())
    expected = all_gradients(*inputs, "cpu", torch.float64)
    actual = all_gradients(*inputs, device, torch.float32)
    # Where all modes are steep, decays and angles hardly matter: their gradients are small differences.
    tolerances = dict.fromkeys(("clock_bias", "rho_raw", "theta"), 5e-3) if case == "steep" else {}
    names = ("z", "state", "raw", *ModalTables._fields, "entering state")
    for name, one, other in zip(names, actual, expected, strict=True):
        assert torch.isfinite(one).all(), name
        error = torch.linalg.vector_norm(one.cpu().double() - other) / torch.linalg.vector_norm(other)
        assert error < tolerances.get(name, 2e-5), name


def test_phases_do_not_drift_over_a_long_sequence():
    raw, tables, _ = random_case((1, 9000, 1, 3, 1))
    raw[..., -3:] = -1000
    tables = tables._replace(
        rho_raw=torch.full((1, 3), -11.0), theta=torch.tensor([[3.1, 1.7, 0.3]]), write_bias=torch.zeros(1, 3)
    )
    inputs = raw.float(), ModalTables(*(t.float() for t in tables))
    z, state = selective_scan(*inputs)
    z64, state64 = selective_scan(inputs[0].double(), inputs[1])
    for one, other in ((z, z64), (state, state64)):
        assert torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other) < 1e-5


# -- documents, pads, states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[5, 11], [16, 1, 1, 15], [20, 13, 30], [40]])
def test_packed_documents_equal_separate_documents(lengths):
    raw, tables, state = random_case((2, sum(lengths), 3, 4, 5))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    z, leaving = selective_scan(raw, tables, state_BKM2P=state, documents_BT=documents)
    entering: Tensor | None = state  # the first document continues the entering state
    alone = None
    for part, z_part in zip(raw.split(lengths, dim=1), z.split(lengths, dim=1), strict=True):
        expected, alone = selective_scan(part, tables, state_BKM2P=entering)
        assert_close(z_part, expected, 1e-12)
        entering = None
    assert_close(leaving, alone, 1e-12)


def test_a_document_number_matters_only_where_it_changes():
    raw, tables, state = random_case((2, 40, 2, 3, 4))
    constant = torch.full((2, 40), 7)
    for one, other in zip(
        selective_scan(raw, tables, state_BKM2P=state, documents_BT=constant),
        selective_scan(raw, tables, state_BKM2P=state),
        strict=True,
    ):
        assert_close(one, other, 1e-14)


@pytest.mark.parametrize("documents", [False, True])
def test_pads_are_as_if_they_were_not_there(documents):
    raw, tables, state = random_case((1, 50, 3, 4, 5), huge=0.02)
    numbers, valid = random_layout(1, 50, documents=documents, pads=True)
    z, leaving = selective_scan(raw, tables, state_BKM2P=state, documents_BT=numbers, valid_BT=valid)
    kept = valid[0]
    expected, expected_leaving = selective_scan(
        raw[:, kept], tables, state_BKM2P=state, documents_BT=None if numbers is None else numbers[:, kept]
    )
    assert_close(z[:, kept], expected, 1e-12)
    assert_close(leaving, expected_leaving, 1e-12)
    assert (z[:, ~kept] == 0).all()


@pytest.mark.parametrize("scan", FORMS)
def test_a_call_of_pads_alone_leaves_the_state_bitwise(scan):
    raw, tables, state = random_case((2, 21, 3, 4, 5))
    none_valid = torch.zeros(2, 21, dtype=torch.bool)
    documents = torch.arange(21).expand(2, -1)  # a pad's number is ignored
    z, leaving = scan(controls(raw, tables), tables, state, documents, none_valid)
    assert torch.equal(leaving, state)
    assert (z == 0).all()


@pytest.mark.parametrize("scan", FORMS)
def test_what_stands_in_a_pad_reaches_no_value_and_no_gradient(scan):
    raw, tables, state = random_case((1, 20, 2, 3, 4))
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[0, [0, 4, 5, 19]] = False
    results = []
    for filling in (0.0, float("nan")):
        filled = torch.where(valid[..., None, None], raw, filling).requires_grad_()
        z, leaving = scan(controls(filled, tables), tables, state, None, valid)
        assert torch.isfinite(z).all()
        results.append((z, leaving, torch.autograd.grad(z.sum() + leaving.sum(), filled)[0][valid]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 70), max_size=3),
    huge=st.sampled_from([0.0, 0.1]),
    documents=st.booleans(),
    pads=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_cut_anywhere_and_carried_on_the_sequence_is_the_same(length, cuts, huge, documents, pads, seed):
    raw, tables, state = random_case((2, length, 2, 3, 2), huge=huge, seed=seed)
    numbers, valid = random_layout(2, length, documents=documents, pads=pads, seed=seed)
    z, leaving = selective_scan(raw, tables, state_BKM2P=state, documents_BT=numbers, valid_BT=valid)
    bounds = sorted({0, length, *(min(cut, length) for cut in cuts)})
    for start, end in pairwise(bounds):
        if numbers is not None and start:
            # A call does not know the document before it: carry the state on where it goes on, else start anew.
            latest = torch.ones(2, start, dtype=torch.bool) if valid is None else valid[:, :start]
            upcoming = torch.ones(2, end - start, dtype=torch.bool) if valid is None else valid[:, start:end]
            for row in range(2):
                if latest[row].any() and upcoming[row].any():
                    before = numbers[row, :start][latest[row]][-1]
                    after = numbers[row, start:end][upcoming[row]][0]
                    state = state.clone()
                    state[row] *= before == after
        part = [None if x is None else x[:, start:end] for x in (numbers, valid)]
        z_part, state = selective_scan(
            raw[:, start:end], tables, state_BKM2P=state, documents_BT=part[0], valid_BT=part[1]
        )
        assert_close(z_part, z[:, start:end], 1e-11)
    assert_close(state, leaving, 1e-11)


@pytest.mark.parametrize("neutral_gates", [False, True])
def test_a_chain_of_single_steps_is_the_scan(neutral_gates):
    raw, tables, state = random_case((2, 40, 3, 4, 5), huge=0.05)
    z, leaving = selective_scan(raw, tables, state_BKM2P=state, neutral_gates=neutral_gates)
    for t in range(40):
        z_step, state = scan_step(raw[:, t], tables, state, neutral_gates=neutral_gates)
        assert_close(z_step, z[:, t], 1e-11)
    assert_close(state, leaving, 1e-12)


def test_neutral_gates_ignore_their_weights_and_biases():
    raw, tables, state = random_case((2, 20, 2, 3, 4))
    z, leaving = selective_scan(raw, tables, state_BKM2P=state, neutral_gates=True)
    other = raw.clone()
    other[..., 4:10] = 0  # gates of 2 sigmoid(0) = 1
    zero = torch.zeros_like(tables.write_bias)
    expected = selective_scan(other, tables._replace(write_bias=zero, read_bias=zero), state_BKM2P=state)
    assert_close(z, expected[0], 1e-13)
    assert_close(leaving, expected[1], 1e-13)


# -- tiers and precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [0, 1, 3, 7])
def test_a_prefix_view_computes_bitwise_what_its_copy_computes(kept, dtype):
    raw, tables, state = random_case((2, 37, 7, 8, 12), huge=0.01)
    raw = raw.to(dtype)
    tables = ModalTables(*(t.float() for t in tables))
    state = state.float()
    views = raw[:, :, :kept], ModalTables(*(t[:kept] for t in tables)), state[:, :kept]
    copies = views[0].clone(), ModalTables(*(t.clone() for t in views[1])), views[2].clone()
    for one, other in zip(
        selective_scan(views[0], views[1], state_BKM2P=views[2]),
        selective_scan(copies[0], copies[1], state_BKM2P=copies[2]),
        strict=True,
    ):
        assert torch.equal(one, other)
    for one, other in zip(
        scan_step(views[0][:, 3], views[1], views[2]), scan_step(copies[0][:, 3], copies[1], copies[2]), strict=True
    ):
        assert torch.equal(one, other)


def test_bf16_input_is_worked_on_in_fp32_and_rounded_once():
    raw, tables, state = random_case((2, 100, 3, 8, 5))
    raw, tables, state = raw.bfloat16(), ModalTables(*(t.float() for t in tables)), state.float()
    z, leaving = selective_scan(raw, tables, state_BKM2P=state)
    expected, expected_leaving = selective_scan(raw.float(), tables, state_BKM2P=state)
    assert z.dtype == torch.bfloat16
    assert leaving.dtype == torch.float32
    assert torch.equal(z, expected.bfloat16())
    assert torch.equal(leaving, expected_leaving)
    z_step, stepped = scan_step(raw[:, 0], tables, state)
    assert (z_step.dtype, stepped.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_changes_nothing():
    raw, tables, state = random_case((2, 40, 3, 8, 5))
    raw, tables, state = raw.float(), ModalTables(*(t.float() for t in tables)), state.float()
    expected = selective_scan(raw, tables, state_BKM2P=state), scan_step(raw[:, 0], tables, state)
    with torch.autocast("cpu", torch.bfloat16):
        actual = selective_scan(raw, tables, state_BKM2P=state), scan_step(raw[:, 0], tables, state)
    for pair in zip(actual, expected, strict=True):
        for one, other in zip(*pair, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, other)


def test_the_state_starts_at_zero():
    raw, tables, state = random_case((2, 20, 2, 3, 4))
    for one, other in zip(
        selective_scan(raw, tables), selective_scan(raw, tables, state_BKM2P=torch.zeros_like(state)), strict=True
    ):
        assert torch.equal(one, other)


def test_decays_of_the_spectral_floor_stay_on_matrix_products(monkeypatch):
    """A pole at the floor of 0.01 (decay 4.6 a token) with the starting clock is no case for the elementwise form."""
    from megatron_essh.ops.selective_scan import reference

    raw, tables, state = random_case((1, 64, 2, 3, 4))
    raw[..., -3:] = 0
    floor = torch.full((2, 3), math.log(math.expm1(-math.log(0.01))), dtype=torch.float64)
    tables = tables._replace(rho_raw=floor, clock_bias=torch.full((2, 3), -3.0, dtype=torch.float64))
    expected = recurrent_scan(controls(raw, tables), tables, state)
    monkeypatch.setattr(reference, "causal_matrix", None)
    for one, other in zip(chunked_scan(controls(raw, tables), tables, state), expected, strict=True):
        assert_close(one, other, 1e-12)
    assert F.softplus(floor).min() > 4.6
