"""SwiGLU over interleaved gates and ups, and the sums of its squares, held to the equation in fp64.

The kernels run on a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.ops.swiglu import swiglu
from megatron_essh.ops.swiglu.reference import reference_swiglu

# The interpreter's NumPy tells of the overflow that makes a very negative gate's sigmoid 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.004 if DEVICE == "cuda" else 0.007}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def equation(gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    return gate / (1 + torch.exp(-gate)) * up


def kernel(gate_up: Tensor, square_sum: Tensor | None = None) -> Tensor:
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.swiglu.triton import triton_swiglu

    return triton_swiglu(gate_up, square_sum)


def value_and_gradient(function: Callable[[Tensor], Tensor], gate_up: Tensor, outgoing: Tensor) -> list[Tensor]:
    gate_up = gate_up.detach().requires_grad_()
    units = function(gate_up)
    return [units.detach(), *torch.autograd.grad(units, gate_up, outgoing.to(units.dtype))]


def test_the_reference_is_the_equation_and_its_gradient():
    gate_up, outgoing = normal(3, 7, 10, dtype=torch.float64), normal(3, 7, 5, seed=1).double()
    actual = value_and_gradient(reference_swiglu, gate_up, outgoing)
    for one, other in zip(actual, value_and_gradient(equation, gate_up, outgoing), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_bits_are_those_of_separate_operations(dtype):
    gate_up, outgoing = normal(2, 9, 24, dtype=dtype, device="cpu"), normal(2, 9, 12, seed=1, device="cpu")
    sums = normal(12, seed=2, device="cpu")

    def apart(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unflatten(-1, (12, 2)).unbind(-1)
        return F.silu(gate) * up

    expected_sums = sums + apart(gate_up).flatten(0, -2).float().square().sum(0)
    actual = value_and_gradient(lambda x: swiglu(x, sums), gate_up, outgoing)
    for one, other in zip(actual, value_and_gradient(apart, gate_up, outgoing), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(sums, expected_sums)


def test_no_row_adds_nothing(device):
    sums = torch.ones(5, device=device)
    assert swiglu(normal(0, 10, device=device), sums).shape == (0, 5)
    assert torch.equal(sums, torch.ones(5, device=device))


# -- the kernels -----------------------------------------------------------------------------------------------------


def assert_kernels_follow_the_equation(rows: int, n: int, dtype: torch.dtype) -> None:
    gate_up, outgoing = normal(rows, 2 * n, dtype=dtype), normal(rows, n, seed=1, dtype=dtype)
    sums = normal(n, seed=2).abs()
    before = sums.clone()
    actual = value_and_gradient(lambda x: kernel(x, sums), gate_up, outgoing)
    expected = value_and_gradient(equation, gate_up.double(), outgoing.double())
    for name, one, other in zip(("units", "d_gate_up"), actual, expected, strict=True):
        assert one.dtype == dtype
        error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
        assert error <= TOLERANCE[dtype], f"{name}: relative RMS {error:.2e}"
    # The sums are of the units as they were rounded.
    torch.testing.assert_close(sums.double(), before + actual[0].double().square().sum(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(kernel(gate_up), actual[0])


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("n", [5, 64, 192, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_at_odd_shapes(rows, n, dtype):
    assert_kernels_follow_the_equation(rows, n, dtype)


def test_large_gates_stay_finite():
    gate_up = torch.tensor([[-200.0, 3.0, 200.0, 3.0, -88.0, 1.0, 0.0, 2.0]], device=DEVICE)
    units, gradient = value_and_gradient(kernel, gate_up, torch.ones(1, 4, device=DEVICE))
    expected = value_and_gradient(equation, gate_up.double(), torch.ones(1, 4, device=DEVICE).double())
    torch.testing.assert_close(units.double(), expected[0], rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-30)


def test_rows_that_do_not_lie_side_by_side():
    gate_up, outgoing = normal(6, 3, 24)[:, :, :20], normal(3, 6, 10, seed=1).transpose(0, 1)
    actual = value_and_gradient(kernel, gate_up, outgoing)
    for one, other in zip(actual, value_and_gradient(kernel, gate_up.contiguous(), outgoing.contiguous()), strict=True):
        assert torch.equal(one, other)


def test_sums_are_the_same_bits_every_time_and_take_no_part_in_differentiation():
    gate_up = normal(130, 600, dtype=torch.bfloat16).requires_grad_()
    sums = [torch.zeros(300, device=DEVICE) for _ in range(2)]
    for each in sums:
        assert kernel(gate_up, each).requires_grad
        assert not each.requires_grad
    assert torch.equal(*sums)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n"), [(16384, 4608), (16384, 448), (8192, 5632), (4097, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_at_the_sizes_of_training(rows, n, dtype):
    assert_kernels_follow_the_equation(rows, n, dtype)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    rows, n = 400_000, 2752
    gate_up = torch.randn(rows, 2 * n, device=DEVICE, dtype=torch.bfloat16)
    assert gate_up.numel() > 2**31
    units, gradient = value_and_gradient(kernel, gate_up, gate_up[:, :n])
    last = value_and_gradient(kernel, gate_up[-5:], gate_up[-5:, :n])
    assert torch.equal(units[-5:], last[0])
    assert torch.equal(gradient[-5:], last[1])


@pytest.mark.gpu
def test_another_capacity_or_number_of_rows_compiles_nothing_new(monkeypatch):
    import triton

    compiled: list[str] = []
    hook = lambda **what: compiled.append(what["repr"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    for rows, n in ((64, 448), (63, 448), (64, 4608), (1, 64), (1, 16)):
        value_and_gradient(kernel, normal(rows, 2 * n, dtype=torch.float16), normal(rows, n))
    assert len(compiled) == 2, compiled  # forward and backward, in a dtype of this test alone


COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.swiglu.triton import swiglu_backward_kernel, swiglu_forward_kernel

SIZES = dict.fromkeys(("rows", "aligned_units", "aligned_total"), "i32")
FORWARD = {"ROWS": 4, "STEPS": 4, "UNITS": 256}
for element in ("*bf16", "*fp32"):
    for align in (1, 16):
        for kernel, chosen in (
            (swiglu_forward_kernel, FORWARD),
            (swiglu_forward_kernel, FORWARD | {"partials": None}),
            (swiglu_backward_kernel, {"UNITS": 1024}),
        ):
            constants = chosen | {"ALIGN": align}
            types = SIZES | {"partials": "*fp32"}
            signature = {x: "constexpr" if x in constants else types.get(x, element) for x in kernel.arg_names}
            target = GPUTarget("cuda", int(sys.argv[1]), 32)
            options = {"num_warps": 4, "num_stages": 1}
            compiled = triton.compile(ASTSource(kernel, signature, constants, {}), target=target, options=options)
            print(kernel.__name__, len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 12
