"""Chunked losses from hidden states against the same losses from whole logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_essh.ops.linear_loss import IGNORED, cross_entropy, distillation, refinement

Loss = Callable[..., tuple[Tensor, ...]]


def log_p(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    return torch.log_softmax(hidden_ND @ weight_VD.T, dim=-1)


def summed_ce(log_p_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.nll_loss(log_p_NV, labels_N, ignore_index=IGNORED, reduction="sum")


def plain_cross_entropy(hidden: Tensor, other: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (summed_ce(log_p(hidden, weight), labels),)


def plain_distillation(hidden: Tensor, teacher: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    student, teacher = log_p(hidden, weight), log_p(teacher, weight).detach()
    ce = summed_ce(student, labels)
    kl = (teacher.exp() * (teacher - student)).sum(-1)[labels != IGNORED].sum()
    return 1.5 * ce + 0.3 * kl, ce, kl


def plain_refinement(full: Tensor, tier: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    log_full, log_tier = log_p(full, weight), log_p(tier, weight)
    full_ce, tier_ce = summed_ce(log_full, labels), summed_ce(log_tier, labels)
    tv = 0.5 * (log_full.exp().detach() - log_tier.exp()).abs().sum(-1)[labels != IGNORED].sum()
    return full_ce + tier_ce + 5 * tv, full_ce, tier_ce, tv


def chunked_cross_entropy(hidden: Tensor, other: Tensor, weight: Tensor, labels: Tensor, chunk: int | None, **options):
    return (cross_entropy(hidden, weight, labels, chunk=chunk, **options),)


def chunked_distillation(hidden: Tensor, teacher: Tensor, weight: Tensor, labels: Tensor, chunk: int | None, **options):
    return distillation(hidden, teacher, weight, labels, ce_weight=1.5, kl_weight=0.3, chunk=chunk, **options)


def chunked_refinement(full: Tensor, tier: Tensor, weight: Tensor, labels: Tensor, chunk: int | None, **options):
    return refinement(full, tier, weight, labels, tv_weight=5.0, chunk=chunk, **options)


LOSSES = [
    pytest.param(chunked_cross_entropy, plain_cross_entropy, id="cross_entropy"),
    pytest.param(chunked_distillation, plain_distillation, id="distillation"),
    pytest.param(chunked_refinement, plain_refinement, id="refinement"),
]


def random_case(
    positions: int, width: int = 5, vocabulary: int = 11, ignored: float = 0.3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two hidden states, the head's weight and labels, of which a share is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, vocabulary, (positions,), generator=generator)
    labels[torch.rand(positions, generator=generator) < ignored] = IGNORED
    return normal(positions, width), normal(positions, width), normal(vocabulary, width), labels


def gradients(objective: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [
        torch.zeros_like(x) if g is None else g
        for x, g in zip(inputs, torch.autograd.grad(objective, inputs, allow_unused=True), strict=True)
    ]


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
@settings(max_examples=30, deadline=None)
@given(
    positions=st.integers(0, 30),
    chunk=st.one_of(st.none(), st.integers(1, 40)),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_in_chunks_values_and_gradients_are_those_of_whole_logits(loss, plain, positions, chunk, ignored, seed):
    *inputs, labels = random_case(positions, ignored=ignored, seed=seed)
    inputs = [x.requires_grad_() for x in inputs]
    expected, actual = plain(*inputs, labels), loss(*inputs, labels, chunk)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == ()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(2 * actual[0], *inputs), gradients(2 * expected[0], *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_only_the_objective_carries_a_gradient(loss, plain):
    *inputs, labels = random_case(9)
    objective, *parts = loss(*[x.requires_grad_() for x in inputs], labels, 4)
    assert objective.requires_grad
    assert not any(part.requires_grad for part in parts)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_gradient_of_cross_entropy_is_the_centred_difference(chunk):
    hidden, _, weight, labels = random_case(8)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: cross_entropy(h, w, labels, chunk=chunk), inputs, atol=1e-8)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_gradient_of_distillation_is_the_centred_difference_with_the_teacher_held(chunk):
    hidden, teacher, weight, labels = random_case(8)
    # The teacher's use of the weight is held too: a fixed distribution from a weight of its own.
    held = log_p(teacher, weight).exp().detach()

    def objective(h: Tensor, w: Tensor) -> Tensor:
        student = log_p(h, w)
        kl = (held * (held.log() - student)).sum(-1)[labels != IGNORED].sum()
        return 1.5 * summed_ce(student, labels) + 0.3 * kl

    inputs = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(objective, inputs, atol=1e-8)
    ours = chunked_distillation(hidden, teacher, weight, labels, chunk)[0]
    for one, other in zip(gradients(ours, *inputs), gradients(objective(*inputs), *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_refinement_is_the_centred_difference_with_the_full_prediction_held():
    full, tier, weight, labels = random_case(8)
    held = log_p(full, weight).exp().detach()

    def objective(f: Tensor, t: Tensor, w: Tensor) -> Tensor:
        log_tier = log_p(t, w)
        tv = 0.5 * (held - log_tier.exp()).abs().sum(-1)[labels != IGNORED].sum()
        return summed_ce(log_p(f, w), labels) + summed_ce(log_tier, labels) + 5 * tv

    inputs = full.requires_grad_(), tier.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(objective, inputs, atol=1e-7)
    ours = chunked_refinement(full, tier, weight, labels, 3)[0]
    for one, other in zip(gradients(ours, *inputs), gradients(objective(*inputs), *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_what_an_ignored_position_holds_does_not_matter(loss, plain):
    *inputs, labels = random_case(20)
    results = []
    for filling in (1.0, -3.0):
        first, second, weight = (x.clone() for x in inputs)
        for hidden in (first, second):
            hidden[labels == IGNORED] = filling
        values = loss(first.requires_grad_(), second.requires_grad_(), weight.requires_grad_(), labels, 6)
        results.append([*values, *gradients(values[0], first, second, weight)])
        assert (results[-1][-3][labels == IGNORED] == 0).all()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
@pytest.mark.parametrize("positions", [0, 7])
def test_nothing_to_predict_is_zero_with_zero_gradients(loss, plain, positions):
    *inputs, labels = random_case(positions, ignored=1.0)
    inputs = [x.requires_grad_() for x in inputs]
    values = loss(*inputs, labels, 4)
    assert all(value == 0 for value in values)
    for gradient in gradients(values[0], *inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_perfect_student_has_no_divergence():
    hidden, _, weight, labels = random_case(20)
    assert distillation(hidden, hidden, weight, labels, ce_weight=1, kl_weight=1)[2].abs() < 1e-14
    assert refinement(hidden, hidden, weight, labels, tv_weight=1)[3] == 0


def test_large_logits_give_finite_losses_and_gradients():
    *inputs, labels = random_case(12)
    inputs = [(100 * x).float().requires_grad_() for x in inputs]
    for loss in (chunked_cross_entropy, chunked_distillation, chunked_refinement):
        values = loss(*inputs, labels, 5)
        assert all(torch.isfinite(value) for value in values)
        assert all(torch.isfinite(gradient).all() for gradient in gradients(values[0], *inputs))


@pytest.mark.parametrize("label", [11, -1])
def test_a_label_outside_the_vocabulary_is_an_error(label):
    hidden, _, weight, labels = random_case(6)
    labels[2] = label
    with pytest.raises((IndexError, RuntimeError), match=r"index|out of"):
        cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_under_autocast_logits_are_bf16_and_the_softmax_fp32(loss, plain):
    *inputs, labels = random_case(40, width=16, vocabulary=50)
    inputs = [x.float().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        values = loss(*inputs, labels, 16)
    first, second, weight = (x.bfloat16() for x in inputs)
    rounded = [F.linear(x, weight).double() for x in (first, second)]  # bf16 logits, everything after exact
    identity = torch.eye(50, dtype=torch.float64)
    expected = plain(*rounded, identity, labels)
    for one, other in zip(values, expected, strict=True):
        assert one.dtype == torch.float32
        assert abs(one.item() - other.item()) < 1e-4 * abs(other.item())
    exact = gradients(plain(*(x.double() for x in inputs), labels)[0], *inputs)
    for one, other in zip(gradients(values[0], *inputs), exact, strict=True):
        assert one.dtype == torch.float32
        assert torch.linalg.vector_norm(one - other) <= 0.02 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_fp32_matches_fp64(loss, plain, device):
    *inputs, labels = random_case(300, width=32, vocabulary=101)
    results = []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        moved = [x.float().to(where, dtype).requires_grad_() for x in inputs]
        values = loss(*moved, labels.to(where), 128)
        results.append([*values, *gradients(values[0], *moved)])
    for expected, actual in zip(*results, strict=True):
        error = torch.linalg.vector_norm(actual.cpu().double() - expected)
        assert error <= 1e-5 * torch.linalg.vector_norm(expected)


# -- a factor known on the way forward, gradients and weights that are kept --------------------------------------------


def moved_case(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, labels = random_case(60, width=16, vocabulary=72)
    return *(x.to(device, dtype).requires_grad_() for x in inputs), labels.to(device)


def backward_of(loss: Loss, case: tuple[Tensor, ...], bf16: bool, **options: Tensor) -> list[Tensor]:
    """Values of the loss, having called backward."""
    *inputs, labels = case
    with torch.autocast(labels.device.type, torch.bfloat16, enabled=bf16):
        values = loss(*inputs, labels, 25, **options)
    values[0].backward()
    return [value.detach() for value in values]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_a_factor_on_the_way_forward_is_the_factor_on_the_objective(loss, plain, bf16, device):
    scale = torch.tensor(1 / 250_000, device=device)
    case, scaled = moved_case(device), moved_case(device)
    values, scaled_values = backward_of(loss, case, bf16), backward_of(loss, scaled, bf16, grad_scale=scale)
    for one, other in zip(scaled_values, values, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(scaled[:3], case[:3], strict=True):
        if other.grad is None:  # a teacher, or what a loss does not take
            assert one.grad is None
            continue
        error = torch.linalg.vector_norm(one.grad - other.grad * scale)
        assert error <= (0.006 if bf16 else 1e-6) * torch.linalg.vector_norm(other.grad * scale)


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_a_factor_of_two_in_fp64_is_exact(loss, plain):
    *inputs, labels = random_case(20)
    inputs = [x.requires_grad_() for x in inputs]
    expected = gradients(2 * loss(*inputs, labels, 6)[0], *inputs)
    scaled = loss(*inputs, labels, 6, grad_scale=torch.tensor(2.0))
    for one, other in zip(gradients(scaled[0], *inputs), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("factor", [None, 0.25])
@pytest.mark.parametrize(("loss", "plain"), LOSSES)
def test_the_gradient_that_would_be_returned_is_added_to_main_grad(loss, plain, factor, bf16, device):
    options = {} if factor is None else {"grad_scale": torch.tensor(factor, device=device)}
    case, kept = moved_case(device), moved_case(device)
    weight = kept[2]
    before = torch.randn(weight.shape, device=device)
    weight.main_grad = before.clone()
    for one in (case, kept):
        backward_of(loss, one, bf16, **options)
    assert weight.grad is None
    error = torch.linalg.vector_norm(weight.main_grad - before - case[2].grad)
    assert error <= 1e-6 * torch.linalg.vector_norm(before) + 1e-6 * torch.linalg.vector_norm(case[2].grad)
    for one, other in zip(kept[:2], case[:2], strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)


def test_the_head_is_the_weights_copy_where_it_has_one(device):
    hidden, _, weight, labels = moved_case(device)
    weight.compute_copy = -weight.detach().bfloat16()
    with torch.autocast(device, torch.bfloat16):
        copied = cross_entropy(hidden, weight, labels)
        expected = cross_entropy(hidden, -weight, labels)
    assert torch.equal(copied, expected)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_none_is_taken(off, device):
    hidden, _, weight, labels = moved_case(device)
    weight.main_grad = torch.zeros_like(weight)
    expected = cross_entropy(hidden.detach(), weight.detach(), labels)
    with off():
        assert torch.equal(cross_entropy(hidden, weight, labels, grad_scale=torch.tensor(1.0, device=device)), expected)
    assert not weight.main_grad.any()
