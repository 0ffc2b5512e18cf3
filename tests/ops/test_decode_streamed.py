"""Products whose weights stream through shared memory: built for every GPU that is claimed, held to plain products."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_essh.ops import cuda_module
from megatron_essh.ops.decode_step import streamed
from megatron_essh.ops.decode_step.weights import PackedWeight

EPS = 1e-5
has_nvcc = pytest.mark.skipif(cuda_module.nvcc() is None, reason="needs nvcc")


@has_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("inputs", [32, 896, 2048, streamed.MOST_INPUTS])
def test_the_kernels_are_built_for_every_gpu_without_spilling(tmp_path, capability, inputs):
    code = cuda_module.build(cuda_module.source("decode_products.cu"), capability, {"INPUTS": inputs})
    (tmp_path / "kernels.cubin").write_bytes(code)
    triton = pytest.importorskip("triton", reason="brings cuobjdump")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    used = subprocess.run(
        [tool, "-res-usage", tmp_path / "kernels.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert used.count("STACK:0") == 3
    for name in ("units_bf16", "product_bf16", "product_fp32"):
        assert f"Function {name}" in used


def test_what_the_kernels_cannot_take_is_left_to_others(device):
    def fits(batch=16, rows=64, inputs=64, dtype=torch.bfloat16, **other) -> bool:
        x_BI = torch.zeros(batch, inputs, dtype=other.get("x", dtype), device=device)
        return streamed.fits(x_BI, PackedWeight(torch.zeros(rows, inputs, dtype=dtype, device=device)))

    assert fits() == (device == "cuda")
    assert not fits(batch=17)
    assert not fits(rows=68)
    assert not fits(inputs=80)
    assert not fits(inputs=streamed.MOST_INPUTS + 32)
    assert not fits(dtype=torch.float32)
    assert not fits(dtype=torch.int8, x=torch.bfloat16)
    x_BI, values_RI = (torch.zeros(8 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(8, 64) for _ in range(2))
    assert not streamed.fits(x_BI, PackedWeight(torch.zeros_like(values_RI)))
    assert not streamed.fits(torch.zeros_like(x_BI), PackedWeight(values_RI))
    assert not streamed.worthwhile(torch.zeros_like(x_BI), PackedWeight(torch.zeros_like(values_RI)))


def rows_of(x_BI: Tensor, weight: PackedWeight, units: bool, squares_TB: Tensor | None) -> Tensor:
    """The product in fp64."""
    y_BR = x_BI.double() @ weight.values_RI.double().T
    if squares_TB is not None:
        y_BR = y_BR * torch.rsqrt(squares_TB.double().sum(0) / weight.inputs + EPS)[:, None]
    if units:
        gate_BN, up_BN = y_BR.unflatten(1, (-1, 2)).unbind(2)
        y_BR = torch.nn.functional.silu(gate_BN) * up_BN
    return y_BR


@has_nvcc
@pytest.mark.gpu
@pytest.mark.parametrize("form", ["units", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("rows", "inputs"),
    [(8, 32), (16, 96), (1064, 64), (4864, 896), (11264, 2048), (1408, 2048), (2112, 1984), (40000, 256), (1056, 3072)],
)
def test_products_are_those_of_the_weights(rows, inputs, form):
    generator = torch.Generator("cuda").manual_seed(rows + inputs)

    def normal(*shape) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    weight = PackedWeight((normal(rows, inputs) * inputs**-0.5).bfloat16())
    for batch, tiles in ((16, 33), (1, None), (3, 1), (8, None), (9, 132), (15, 32), (16, None)):
        x_BI = normal(batch, inputs).bfloat16()
        squares_TB = None if tiles is None else normal(tiles, batch).square() * 100
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        width = rows // 2 if form == "units" else rows
        # Rows that are not of the batch stay as they are.
        whole = torch.full((batch + 1, width), torch.nan, dtype=dtype, device="cuda")
        found = []
        for _ in range(2):
            whole[:batch] = torch.nan
            streamed.product(x_BI, weight, whole[:batch], units=form == "units", squares_TB=squares_TB, eps=EPS)
            found.append(whole[:batch].clone())
        assert torch.equal(found[0], found[1])
        assert whole[batch].isnan().all()
        expected = rows_of(x_BI, weight, form == "units", squares_TB)
        error = (found[0].double() - expected).norm() / expected.norm()
        assert error < (1e-5 if form == "fp32" else 3e-3), (batch, tiles, error)


@has_nvcc
@pytest.mark.gpu
def test_a_chain_of_products_waits_for_what_it_reads():
    """Each product reads what the one before has written; recorded, with weights that take much longer than inputs."""
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = 1024
    weights = [
        PackedWeight((torch.randn(inputs, inputs, generator=generator, device="cuda") * inputs**-0.5).bfloat16())
        for _ in range(60)
    ]
    first_BI = torch.randn(16, inputs, generator=generator, device="cuda").bfloat16()
    buffers = [torch.empty_like(first_BI) for _ in range(2)]

    def chain(call: Callable[..., None]) -> Tensor:
        x_BI = first_BI
        for index, weight in enumerate(weights):
            call(x_BI, weight, buffers[index % 2])
            x_BI = buffers[index % 2]
        return x_BI

    def patient(x_BI: Tensor, weight: PackedWeight, y_BR: Tensor) -> None:
        streamed.product(x_BI, weight, y_BR)
        torch.cuda.synchronize()

    expected = chain(patient).clone()
    assert expected.isfinite().all()
    assert torch.equal(chain(streamed.product), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = chain(streamed.product)
    for _ in range(20):
        for buffer in buffers:
            buffer.fill_(torch.nan)
        graph.replay()
        assert torch.equal(last, expected)


@pytest.mark.gpu
def test_large_products_of_few_rows_are_streamed_and_others_are_not(monkeypatch):
    pytest.importorskip("triton")
    from megatron_essh.ops.decode_step import matrix, reference

    taken = []
    product = streamed.product
    monkeypatch.setattr(
        streamed, "product", lambda x_BI, *args, **kw: (taken.append(len(x_BI)), product(x_BI, *args, **kw))
    )
    weight = PackedWeight((torch.randn(8192, 2048, device="cuda") * 2048**-0.5).bfloat16())
    small = PackedWeight(weight.values_RI[:64].contiguous())
    norm_D = torch.rand(2048, device="cuda")
    for batch in (3, 16, 17, 64):
        x_BD = torch.randn(batch, 2048, device="cuda")
        for one in (weight, small):
            actual, expected = (torch.empty(batch, one.rows, device="cuda") for _ in range(2))
            matrix.normed_product(x_BD, norm_D, EPS, one, actual)
            reference.normed_product(x_BD, norm_D, EPS, one, expected)
            assert (actual - expected).norm() < 3e-3 * expected.norm()
    able = cuda_module.nvcc() is not None and torch.cuda.get_device_capability()[0] >= 9
    assert taken == ([3, 16] if able else [])
    monkeypatch.setattr(streamed, "_module", lambda *_: None)  # as without nvcc
    x_BD = torch.randn(3, 2048, device="cuda")
    actual, expected = (torch.empty(3, weight.rows, device="cuda") for _ in range(2))
    matrix.normed_product(x_BD, norm_D, EPS, weight, actual)
    reference.normed_product(x_BD, norm_D, EPS, weight, expected)
    assert (actual - expected).norm() < 3e-3 * expected.norm()
    assert len(taken) == (2 if able else 0)
