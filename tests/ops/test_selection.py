"""The cut of a row is that of the sorted row; the kernel's is the reference's."""

from __future__ import annotations

import pytest
import torch

from megatron_essh.ops.selection import lowest_needed
from megatron_essh.ops.selection.reference import reference_lowest_needed

SIZES = [(1, 1), (1, 700), (2, 512), (5, 1301)]


def amounts_in_order(rows, entries, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(-(2**31), 2**31, (rows, entries), generator=generator)
    order[:, ::3] = torch.randint(-5, 5, order[:, ::3].shape, generator=generator)  # many are equal
    order[0, 0], order[0, -1] = -(2**31), 2**31 - 1
    amount = torch.randint(0, 2**40, (rows, entries), generator=generator)
    amount[:, ::4] = 0
    needed = (amount.sum(1, keepdim=True) * torch.rand(rows, 1, dtype=torch.float64, generator=generator)).long()
    needed[0] = amount[0].sum()
    needed[-1].clamp_(max=1) if rows > 1 else None
    return order.int(), amount, needed


@pytest.mark.parametrize(("rows", "entries"), SIZES)
def test_the_lowest_value_that_is_needed_is_that_of_a_sorted_row(rows, entries, device):
    order, amount, needed = amounts_in_order(rows, entries, entries)
    ranked, index = order.sort(dim=1, descending=True)
    reached = amount.gather(1, index).cumsum(1)
    expected = ranked.gather(1, (reached < needed).sum(1, keepdim=True)).long()
    actual = lowest_needed(order.to(device), amount.to(device), needed.to(device))
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize(("rows", "entries"), SIZES)
def test_the_kernel_finds_the_lowest_value_that_is_needed(rows, entries, device, monkeypatch):
    kernel = pytest.importorskip("megatron_essh.ops.selection.triton")
    order, amount, needed = (t.to(device) for t in amounts_in_order(rows, entries, entries))
    expected = reference_lowest_needed(order, amount, needed)
    assert torch.equal(kernel.triton_lowest_needed(order, amount, needed), expected)
    monkeypatch.setattr(kernel, "PROGRAMS", 1)  # several blocks a program
    assert torch.equal(kernel.triton_lowest_needed(order, amount, needed), expected)
    one = torch.ones(1, 1, dtype=torch.int64, device=device).expand(rows, entries)
    count = torch.full((rows, 1), min(40, entries), device=device)
    expected = order.long().sort(descending=True).values[:, min(40, entries) - 1 :][:, :1]
    assert torch.equal(kernel.triton_lowest_needed(order, one, count), expected)


@pytest.mark.gpu
def test_the_kernel_over_a_large_vocabulary():
    given_ = [t.cuda() for t in amounts_in_order(512, 128_256, 0)]
    assert torch.equal(lowest_needed(*given_), reference_lowest_needed(*given_))


COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.selection.triton import BLOCK, ROUNDS, narrow_kernel

types = {"order": "*i32"} | dict.fromkeys(("amount", "needed", "sums", "lowest"), "*i64")
for round_ in range(ROUNDS + 1):
    constants = {"ROUND": round_, "BLOCK": BLOCK}
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in narrow_kernel.arg_names}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(
        ASTSource(narrow_kernel, signature, constants, {}), target=target, options={"num_warps": 8}
    )
    print(len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_the_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 9
