"""Eight bits a weight: the nearest value that there is, row by row."""

from __future__ import annotations

import pytest
import torch

from megatron_essh.errors import UserError
from megatron_essh.inference.quantization import KINDS, ROWS_AT_A_TIME, dequantized, quantize


def random_weight(rows=37, inputs=51):
    generator = torch.Generator().manual_seed(rows)
    # Rows of very different sizes: one scale for all would lose the small ones.
    return torch.randn(rows, inputs, generator=generator) * torch.logspace(-4, 3, rows)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step(dtype):
    weight = random_weight().to(dtype)
    packed = quantize(weight, "int8")
    assert packed.values_RI.dtype == torch.int8
    assert packed.values_RI.abs().amax(1).eq(127).all()
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((dequantized(packed) - weight.float()).abs() <= 0.5001 * step).all()


def test_fp8_keeps_three_bits_of_mantissa():
    weight = random_weight()
    packed = quantize(weight, "fp8")
    assert packed.values_RI.dtype == torch.float8_e4m3fn
    error = (dequantized(packed) - weight).abs()
    smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-9  # distance of the subnormals
    assert (error <= torch.maximum(weight.abs() / 16, smallest / 2) * 1.0001).all()
    assert (error > 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_fit_are_kept_exactly(kind):
    values = torch.tensor([[-1.0, 0.0, 0.5, 1.0]]) * KINDS[kind][1]
    values[0, 2] = 64.0
    assert torch.equal(dequantized(quantize(values, kind)), values)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite(kind):
    weight = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [3e38, -3e38]])
    back = dequantized(quantize(weight, kind))
    assert back.isfinite().all()
    assert back[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(back[2], weight[2])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_scaled_by_themselves(kind):
    weight = random_weight(ROWS_AT_A_TIME + 3, 2)
    packed = quantize(weight, kind)
    for row in (0, 5, ROWS_AT_A_TIME - 1, ROWS_AT_A_TIME, ROWS_AT_A_TIME + 2):
        alone = quantize(weight[row : row + 1], kind)
        assert torch.equal(alone.values_RI.view(torch.uint8), packed.values_RI[row : row + 1].view(torch.uint8))
        assert alone.scale_R == packed.scale_R[row]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(poison):
    weight = random_weight()
    weight[3, 4] = poison
    with pytest.raises(UserError, match="not all are finite"):
        quantize(weight, "int8")
