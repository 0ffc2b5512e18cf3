"""RMS normalisation with and without the addition before it, held to its equation in fp64.

The kernels run on a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_essh.ops.rms_norm import add_rms_norm, rms_norm
from megatron_essh.ops.rms_norm.reference import reference_add_norm, reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
# Triton's interpreter cuts to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.004 if DEVICE == "cuda" else 0.007}
NAMES = ("sum", "normed", "d_x", "d_branch", "d_weight")


def equation(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def added(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + branch
    return total, equation(total, weight)


def results(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], outgoing: list[Tensor | None]
) -> list[Tensor]:
    """The sum, its norm, and the gradients of the inputs for those of the outputs that are given."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    used = [(y, g.to(y.dtype)) for y, g in zip(outputs, outgoing, strict=True) if g is not None]
    gradients = torch.autograd.grad([y for y, _ in used], inputs, [g for _, g in used], allow_unused=True)
    return [*(y.detach() for y in outputs), *(g for g in gradients if g is not None)]


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerances: list[float]) -> None:
    for name, one, other, tolerance in zip(NAMES, actual, expected, tolerances, strict=True):
        error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
        assert error <= tolerance, f"{name}: relative RMS {error:.2e}"


@pytest.mark.parametrize("shape", [(1, 24), (3, 5, 896)])
def test_the_reference_is_the_equation_and_its_gradients(shape):
    inputs = [normal(*shape, dtype=torch.float64), normal(*shape, seed=1).double(), normal(shape[-1], seed=2).double()]
    outgoing: list[Tensor | None] = [normal(*shape, seed=3).double(), normal(*shape, seed=4).double()]
    actual = results(lambda x, b, w: reference_add_norm(x, b, w, EPS, torch.float64), inputs, outgoing)
    for one, other in zip(actual, results(added, inputs, outgoing), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    alone = reference_norm(inputs[0], inputs[2], EPS, torch.float64)
    torch.testing.assert_close(alone, equation(inputs[0], inputs[2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_cpu_the_bits_are_those_of_the_module_and_a_separate_addition(autocast):
    norm = nn.RMSNorm(40, eps=EPS)
    with torch.no_grad():
        norm.weight.copy_(normal(40, device="cpu"))
    matrix = normal(16, 40, seed=1, device="cpu")
    branch_dtype = torch.bfloat16 if autocast else torch.float32

    def run(fused: bool) -> list[Tensor]:
        x = normal(6, 40, seed=2, device="cpu").requires_grad_()
        branch = normal(6, 40, seed=3, dtype=branch_dtype, device="cpu").requires_grad_()
        norm.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if fused:
                total, normed = add_rms_norm(x, branch, norm.weight, EPS)
                alone = rms_norm(x, norm.weight, EPS)
            else:
                total = x + branch
                normed, alone = norm(total), norm(x)
            out = F.linear(normed, matrix), F.linear(alone, matrix)
            (out[0].float().sin().sum() + out[1].float().sin().sum() + total.sin().sum()).backward()
        assert norm.weight.grad is not None
        return [total.detach(), *(y.detach() for y in out), x.grad, branch.grad, norm.weight.grad.clone()]

    for one, other in zip(run(True), run(False), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_one_dtype_gets_the_bits_of_the_module(dtype):
    x, weight = normal(6, 40, dtype=dtype, device="cpu"), normal(40, seed=1, dtype=dtype, device="cpu")
    assert torch.equal(rms_norm(x, weight, EPS), F.rms_norm(x, (40,), weight, EPS))


def test_the_normed_output_has_the_dtype_asked_for_else_autocasts_else_the_streams(device):
    for dtype in (torch.float32, torch.float64):
        x, weight = normal(2, 24, dtype=dtype, device=device), normal(24, dtype=dtype, device=device)
        assert rms_norm(x, weight, EPS).dtype == dtype
        with torch.autocast(device, torch.bfloat16):
            # Autocast leaves fp64 alone.
            assert rms_norm(x, weight, EPS).dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
            total, normed = add_rms_norm(x, x.bfloat16(), weight, EPS, torch.float32)
        assert (total.dtype, normed.dtype) == (dtype, torch.float32)


def test_no_row_is_no_row(device):
    x, weight = normal(0, 24, device=device), normal(24, device=device)
    assert rms_norm(x, weight, EPS).shape == (0, 24)
    assert [y.shape for y in add_rms_norm(x, x, weight, EPS)] == [(0, 24)] * 2


# -- the kernels -----------------------------------------------------------------------------------------------------


def kernel_results(inputs: list[Tensor], outgoing: list[Tensor | None], out_dtype: torch.dtype) -> list[Tensor]:
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.rms_norm.triton import triton_add_norm

    return results(lambda x, b, w: triton_add_norm(x, b, w, EPS, out_dtype), inputs, outgoing)


def assert_kernels_follow_the_equation(
    rows: int, width: int, stream: torch.dtype, branch: torch.dtype, out: torch.dtype, *, past: bool = True
) -> None:
    inputs = [normal(rows, width, dtype=stream), normal(rows, width, seed=1, dtype=branch), normal(width, seed=2)]
    outgoing: list[Tensor | None] = [normal(rows, width, seed=3, dtype=stream) if past else None]
    outgoing.append(normal(rows, width, seed=4, dtype=out))
    actual = kernel_results(inputs, outgoing, out)
    assert [y.dtype for y in actual] == [stream, out, stream, branch, torch.float32]
    doubles = [x.double() for x in inputs]
    expected = results(added, doubles, [None if g is None else g.double() for g in outgoing])
    # The scale is that of the sum as stored, so that a bf16 stream is felt in everything.
    least = TOLERANCE[stream]
    assert_near(actual, expected, [least, max(least, TOLERANCE[out]), least, max(least, TOLERANCE[branch]), least])


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("width", [24, 896])
def test_kernels_at_odd_shapes(rows, width):
    for out in (torch.float32, torch.bfloat16):
        for past in (False, True):
            assert_kernels_follow_the_equation(rows, width, torch.float32, torch.bfloat16, out, past=past)
    assert_kernels_follow_the_equation(rows, width, torch.float32, torch.float32, torch.float32)
    assert_kernels_follow_the_equation(rows, width, torch.bfloat16, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, 24), (2, 65, 40)])
def test_the_norm_alone_by_kernel(shape):
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.rms_norm.triton import triton_norm

    x, weight, outgoing = normal(*shape), normal(shape[-1], seed=1), normal(*shape, seed=2)

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        y = function(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, outgoing.to(y.dtype))]

    actual = run(lambda x, w: triton_norm(x, w, EPS, torch.float32), torch.float32)
    for one, other in zip(actual, run(equation, torch.float64), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_lie_side_by_side():
    wide = [normal(5, 3, 48, seed=seed)[:, :, :24] for seed in range(2)]
    weight, outgoing = normal(24, seed=2), [normal(3, 5, 24, seed=seed).transpose(0, 1) for seed in (3, 4)]
    actual = kernel_results([*wide, weight], list(outgoing), torch.float32)
    copies = [x.contiguous() for x in wide], [g.contiguous() for g in outgoing]
    for one, other in zip(actual, kernel_results([*copies[0], weight], list(copies[1]), torch.float32), strict=True):
        assert torch.equal(one, other)


def test_where_the_sum_alone_is_used_its_gradient_passes_through():
    inputs = [normal(4, 24), normal(4, 24, seed=1, dtype=torch.bfloat16), normal(24, seed=2)]
    outgoing = normal(4, 24, seed=3)
    *_, d_x, d_branch = kernel_results(inputs, [outgoing, None], torch.float32)
    assert torch.equal(d_x, outgoing)
    assert torch.equal(d_branch, outgoing.bfloat16())


def test_gradients_are_the_same_bits_every_time():
    inputs = [normal(130, 40), normal(130, 40, seed=1, dtype=torch.bfloat16), normal(40, seed=2)]
    outgoing: list[Tensor | None] = [normal(130, 40, seed=3), normal(130, 40, seed=4)]
    first, second = (kernel_results(inputs, outgoing, torch.bfloat16) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(16384, 896), (8192, 2048), (1, 8192), (4097, 2050), (333, 5000)])
def test_kernels_at_the_sizes_of_training(rows, width):
    for out in (torch.float32, torch.bfloat16):
        assert_kernels_follow_the_equation(rows, width, torch.float32, torch.bfloat16, out)
    assert_kernels_follow_the_equation(rows, width, torch.bfloat16, torch.bfloat16, torch.bfloat16, past=False)


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing_new(monkeypatch):
    import triton

    inputs = [normal(64, 112), normal(64, 112, seed=1, dtype=torch.bfloat16), normal(112, seed=2)]
    compiled: list[str] = []
    hook = lambda **what: compiled.append(what["repr"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    for rows in (64, 63, 48, 1):
        grads: list[Tensor | None] = [normal(rows, 112), normal(rows, 112)]
        kernel_results([inputs[0][:rows], inputs[1][:rows], inputs[2]], grads, torch.bfloat16)
    assert len(compiled) == 2, compiled  # forward and backward, at a width of this test alone


COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.rms_norm.triton import norm_backward_kernel, norm_forward_kernel

TYPES = dict.fromkeys(("branch", "normed", "d_normed", "d_branch"), "*bf16") | {"rows": "i32", "eps": "fp32"}
ALONE = dict.fromkeys(("branch", "total", "d_total", "d_branch"))
for kernel in (norm_forward_kernel, norm_backward_kernel):
    for width in (896, 2048, 8192):
        for absent in ({}, ALONE):
            constants = {"D": width, "WIDTH": triton.next_power_of_2(width)}
            constants |= {name: None for name in absent if name in kernel.arg_names}
            signature = {x: "constexpr" if x in constants else TYPES.get(x, "*fp32") for x in kernel.arg_names}
            target = GPUTarget("cuda", int(sys.argv[1]), 32)
            source = ASTSource(kernel, signature, constants, {})
            compiled = triton.compile(source, target=target, options={"num_warps": constants["WIDTH"] // 512})
            print(kernel.__name__, len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 12
