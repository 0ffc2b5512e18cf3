"""Products with prefixes of weights: the plain product's values and gradients, with and without kept gradients."""

import pytest
import torch
from torch.nn import functional as F

from megatron_essh.ops.linear import (
    accumulate,
    compute_weight,
    keep_gradients,
    linear,
    linear_input_major,
    main_grad,
    refresh_copies,
)

SHAPES = [(7, 5, 3), (4, 4, 8), (6, 1, 5)]


def weights(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(("rows_all", "rows", "width"), SHAPES)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("gradient_scale", [1.0, 0.5])
def test_output_major_product_of_a_prefix(device, rows_all, rows, width, kept, gradient_scale):
    weight = weights(rows_all, 2, width).to(device).detach().requires_grad_()
    x = torch.randn(3, 4, width, dtype=torch.float64, device=device, requires_grad=True)
    dy = torch.randn(3, 4, rows * 2, dtype=torch.float64, device=device)
    expected = F.linear(x, weight[:rows].flatten(0, 1))
    d_x, d_weight = torch.autograd.grad(expected, (x, weight), dy)
    if kept:
        keep_gradients([weight])
        weight.grad.fill_(0.25)  # what earlier micro-batches left
    y = linear(x, weight, rows, gradient_scale=gradient_scale)
    y.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, d_x)
    torch.testing.assert_close(weight.grad, gradient_scale * d_weight + (0.25 if kept else 0.0))
    assert (main_grad(weight) is weight.grad) == kept


@pytest.mark.parametrize(("rows_all", "rows", "width"), SHAPES)
@pytest.mark.parametrize("kept", [False, True])
def test_input_major_product_of_a_prefix_is_scaled_both_ways(device, rows_all, rows, width, kept):
    weight = weights(rows_all, width).to(device).detach().requires_grad_()
    x = torch.randn(3, 4, rows, dtype=torch.float64, device=device, requires_grad=True)
    dy = torch.randn(3, 4, width, dtype=torch.float64, device=device)
    expected = 0.3 * (x @ weight[:rows])
    d_x, d_weight = torch.autograd.grad(expected, (x, weight), dy)
    if kept:
        keep_gradients([weight])
    y = linear_input_major(x, weight, gradient_scale=0.5, output_scale=0.3)
    y.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, d_x)
    torch.testing.assert_close(weight.grad, 0.5 * d_weight)


def test_kept_gradients_add_up_in_fp32_under_autocast_and_touch_the_prefix_alone(device):
    weight = weights(6, 3, 16, dtype=torch.float32).to(device).detach().requires_grad_()
    refresh_copies([weight], torch.bfloat16)
    keep_gradients([weight])
    expected = torch.zeros(12, 16, dtype=torch.float64, device=device)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 16, generator=generator).to(device)
        dy = torch.randn(32, 12, generator=generator).to(device, torch.bfloat16)
        with torch.autocast(device, torch.bfloat16):
            y = linear(x, weight, 4)
        assert y.dtype == torch.bfloat16
        y.backward(dy)
        expected += dy.double().T @ x.bfloat16().double()
    kept = weight.grad[:4].flatten(0, 1).double()
    # Sums in bf16 would be wrong by some 1e-2 after forty of them.
    assert torch.linalg.vector_norm(kept - expected) < 1e-5 * torch.linalg.vector_norm(expected)
    assert not weight.grad[4:].any()


def test_copies_follow_the_weight_when_refreshed(device):
    weight = weights(4, 8, dtype=torch.float32).to(device).detach().requires_grad_()
    assert torch.equal(compute_weight(weight, torch.bfloat16), weight.bfloat16())
    refresh_copies([weight], torch.bfloat16)
    copy = compute_weight(weight, torch.bfloat16)
    with torch.no_grad():
        weight.add_(1.0)
    refresh_copies([weight], torch.bfloat16)
    assert compute_weight(weight, torch.bfloat16) is copy  # in place: a recorded pass reads it there
    assert torch.equal(copy, weight.bfloat16())
    assert compute_weight(weight, torch.float32).data_ptr() == weight.data_ptr()


def test_accumulate_adds_the_scaled_product(device):
    total = torch.full((3, 2), 2.0, device=device)
    dy, x = torch.randn(5, 3, device=device), torch.randn(5, 2, device=device)
    accumulate(total, dy, x, 0.5)
    torch.testing.assert_close(total, 2.0 + 0.5 * dy.T @ x)
