"""Rotary positions of queries and keys, held to multiplication by e^{i angle} in fp64.

The kernels run on a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_essh.model.attention import rotary_table
from megatron_essh.ops.rotary import rotate_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.004 if DEVICE == "cuda" else 0.007}
NAMES = ("q", "k", "v", "d_qkv")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def tables(
    batch: int, length: int, head_dim: int, *, own: bool, dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> tuple[Tensor, Tensor]:
    """For positions that all sequences share, or for each sequence's own."""
    position = torch.arange(length, device=device)
    if own:
        position = position + 17 * torch.arange(batch, device=device)[:, None]
    return rotary_table(position, head_dim, 10_000.0, dtype)


def equation(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(-2)
    turn = torch.complex(cos.double(), sin.double())
    half = qkv.shape[-1] // 2
    turned = [torch.complex(x[..., :half], x[..., half:]) * turn for x in (q, k)]
    q, k = (torch.cat([z.real, z.imag], dim=-1) for z in turned)
    return q, k, v


def kernel(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.rotary.triton import triton_rotate_qkv

    return triton_rotate_qkv(qkv, cos, sin)


def values_and_gradient(
    function: Callable[..., tuple[Tensor, Tensor, Tensor]],
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    outgoing: list[Tensor],
) -> list[Tensor]:
    qkv = qkv.detach().requires_grad_()
    outputs = function(qkv, *angles)
    (gradient,) = torch.autograd.grad(outputs, qkv, [g.to(y.dtype) for g, y in zip(outgoing, outputs, strict=True)])
    return [*(y.detach() for y in outputs), gradient]


def random_gradients(qkv: Tensor) -> list[Tensor]:
    batch, length, heads, _, head_dim = qkv.shape
    return [normal(batch, length, heads, head_dim, seed=seed, dtype=qkv.dtype) for seed in (1, 2, 3)]


@pytest.mark.parametrize("own", [False, True])
def test_the_reference_multiplies_pairs_by_their_phases(own):
    qkv = normal(2, 9, 3, 3, 8, dtype=torch.float64, device="cpu")
    angles = tables(2, 9, 8, own=own, dtype=torch.float64, device="cpu")
    outgoing = [normal(2, 9, 3, 8, seed=seed, device="cpu").double() for seed in (1, 2, 3)]
    actual = values_and_gradient(rotate_qkv, qkv, angles, outgoing)
    for one, other in zip(actual, values_and_gradient(equation, qkv, angles, outgoing), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_results_are_contiguous_and_of_the_projections_dtype(device):
    qkv = normal(2, 5, 3, 3, 8, dtype=torch.bfloat16, device=device)
    for y in rotate_qkv(qkv, *tables(2, 5, 8, own=False, device=device)):
        assert y.is_contiguous()
        assert y.dtype == torch.bfloat16


def test_arithmetic_is_in_the_tables_dtype_and_rounded_once():
    qkv, angles = normal(1, 6, 2, 3, 8, dtype=torch.bfloat16, device="cpu"), tables(1, 6, 8, own=False, device="cpu")
    for one, other in zip(rotate_qkv(qkv, *angles), rotate_qkv(qkv.float(), *angles), strict=True):
        assert torch.equal(one, other.bfloat16())


def test_scores_depend_on_the_distance_alone():
    qkv = normal(1, 1, 2, 3, 16, dtype=torch.float64, device="cpu").expand(1, 12, 2, 3, 16)
    q, k, _ = rotate_qkv(qkv, *tables(1, 12, 16, own=False, dtype=torch.float64, device="cpu"))
    scores = torch.einsum("bthd,bshd->bhts", q, k)
    torch.testing.assert_close(scores[..., :-3, :-3], scores[..., 3:, 3:], rtol=1e-10, atol=1e-10)


def test_no_token_is_no_token(device):
    qkv = normal(2, 0, 3, 3, 8, device=device)
    for y in rotate_qkv(qkv, *tables(2, 0, 8, own=False, device=device)):
        assert y.shape == (2, 0, 3, 8)


# -- the kernels -----------------------------------------------------------------------------------------------------


def assert_kernels_follow_the_equation(shape: tuple[int, int, int, int], dtype: torch.dtype, *, own: bool) -> None:
    batch, length, heads, head_dim = shape
    qkv = normal(batch, length, heads, 3, head_dim, dtype=dtype)
    outgoing, angles = random_gradients(qkv), tables(batch, length, head_dim, own=own)
    actual = values_and_gradient(kernel, qkv, angles, outgoing)
    expected = values_and_gradient(equation, qkv.double(), angles, [g.double() for g in outgoing])
    assert torch.equal(actual[2], qkv[..., 2, :])
    for name, one, other in zip(NAMES, actual, expected, strict=True):
        assert one.dtype == dtype
        assert one.is_contiguous()
        error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
        assert error <= TOLERANCE[dtype], f"{name}: relative RMS {error:.2e}"


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 7, 3, 8), (2, 65, 5, 24), (1, 10, 14, 64), (3, 3, 2, 256)])
@pytest.mark.parametrize("own", [False, True])
def test_kernels_at_odd_shapes(shape, own):
    for dtype in (torch.float32, torch.bfloat16):
        assert_kernels_follow_the_equation(shape, dtype, own=own)


def test_one_token_of_each_sequence_at_its_own_position():
    assert_kernels_follow_the_equation((70, 1, 3, 16), torch.float32, own=True)


def test_inputs_and_gradients_that_do_not_lie_side_by_side():
    qkv, angles = normal(2, 9, 4, 3, 8)[:, :, 1:], tables(2, 9, 8, own=False)
    outgoing = [normal(2, 3, 9, 8, seed=seed).transpose(1, 2) for seed in (1, 2, 3)]
    actual = values_and_gradient(kernel, qkv, angles, outgoing)
    copies = values_and_gradient(kernel, qkv.contiguous(), angles, [g.contiguous() for g in outgoing])
    for one, other in zip(actual, copies, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 2048, 14, 64), (4, 2048, 16, 128), (2, 2049, 7, 96)])
@pytest.mark.parametrize("own", [False, True])
def test_kernels_at_the_sizes_of_training(shape, own):
    for dtype in (torch.float32, torch.bfloat16):
        assert_kernels_follow_the_equation(shape, dtype, own=own)


@pytest.mark.gpu
def test_another_length_or_batch_compiles_nothing_new(monkeypatch):
    import triton

    compiled: list[str] = []
    hook = lambda **what: compiled.append(what["repr"])  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    for batch, length, heads in ((2, 64, 3), (1, 1, 3), (3, 17, 16)):
        qkv = normal(batch, length, heads, 3, 48, dtype=torch.bfloat16)
        values_and_gradient(kernel, qkv, tables(batch, length, 48, own=False), random_gradients(qkv))
    assert len(compiled) == 2, compiled  # forward and backward, at a head width of this test alone


COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.rotary.triton import rotary_kernel

TYPES = dict.fromkeys(("cos", "sin"), "*fp32") | dict.fromkeys(("rows", "heads", "period"), "i32")
for element in ("*bf16", "*fp32"):
    for half, width in ((32, 32), (64, 64), (12, 16)):
        for backward in (False, True):
            constants = {"HALF": half, "WIDTH": width, "ROWS": 1024 // width, "BACKWARD": backward}
            names = rotary_kernel.arg_names
            signature = {x: "constexpr" if x in constants else TYPES.get(x, element) for x in names}
            target = GPUTarget("cuda", int(sys.argv[1]), 32)
            source = ASTSource(rotary_kernel, signature, constants, {})
            compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 1})
            print(len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 12
