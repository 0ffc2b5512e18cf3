"""Decode stages for few rows, each held to the reference's; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_essh.ops.decode_step import reference
from megatron_essh.ops.decode_step.weights import TABLES, FeedForwardWeights, PackedWeight, SpectralWeights

# The interpreter's NumPy tells of the overflow that makes a very negative gate's sigmoid 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative RMS. Triton's interpreter cuts to bf16 where a GPU rounds, inputs of products too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.004 if DEVICE == "cuda" else 0.02}
EPS = 1e-6


@pytest.fixture(scope="module")
def vector():
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.decode_step import vector

    return vector


@pytest.fixture
def large_tiles(vector, monkeypatch):
    """The interpreter takes one program after the other: let it have few."""
    if DEVICE == "cpu":
        monkeypatch.setattr(vector, "_PROGRAMS", 8)


class Draw:
    """Random tensors, one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype)

    def weight(self, rows: int, inputs: int, kind: str | torch.dtype) -> PackedWeight:
        if isinstance(kind, torch.dtype):
            return PackedWeight((self.normal(rows, inputs) * inputs**-0.5).to(kind))
        scale_R = (0.5 + torch.rand(rows, generator=self.generator)).to(DEVICE) * inputs**-0.5
        if kind == "int8":
            values = torch.randint(-128, 128, (rows, inputs), generator=self.generator).to(DEVICE, torch.int8)
            return PackedWeight(values, scale_R / 74)
        return PackedWeight((self.normal(rows, inputs) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scale_R / 100)

    def spectral(
        self, d: int, k: int, p: int, m: int, kind: str | torch.dtype, neutral: bool = False
    ) -> SpectralWeights:
        tables_KTM = self.normal(k, len(TABLES), m)
        tables_KTM[:, TABLES.index("gamma")] = tables_KTM[:, TABLES.index("gamma")].abs() * 0.1
        theta_KM = self.normal(k, m)
        tables_KTM[:, TABLES.index("cos")], tables_KTM[:, TABLES.index("sin")] = theta_KM.cos(), theta_KM.sin()
        return SpectralWeights(
            self.normal(d),
            self.weight(k * (p + 3 * m), d, kind),
            self.weight(d, k * p, kind),
            k**-0.5,
            tables_KTM,
            self.normal(k),
            neutral,
        )


def result_dtype(kind: str | torch.dtype) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else torch.bfloat16


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == expected.dtype
    error = torch.linalg.vector_norm(actual.double() - expected.double()) / torch.linalg.vector_norm(expected.double())
    assert error <= TOLERANCE[dtype], f"relative RMS {error:.2e}"


KINDS = [torch.float32, torch.bfloat16, "int8", "fp8"]
BATCHES = [1, 2]


def assert_normed_product(vector, batch: int, d: int, rows: int, kind: str | torch.dtype, out: torch.dtype) -> None:
    draw = Draw()
    x, norm, weight = 3 * draw.normal(batch, d), draw.normal(d), draw.weight(rows, d, kind)
    expected, actual = (torch.full((batch, rows), torch.nan, dtype=out, device=DEVICE) for _ in range(2))
    reference.normed_product(x, norm, EPS, weight, expected)
    vector.normed_product(x, norm, EPS, weight, actual)
    assert_close(actual, expected, result_dtype(kind))


def assert_units(vector, batch: int, d: int, n: int, kind: str | torch.dtype) -> None:
    draw, dtype = Draw(), result_dtype(kind)
    x, weights = draw.normal(batch, d), FeedForwardWeights(draw.normal(d), draw.weight(2 * n, d, kind), None)  # type: ignore[arg-type]
    expected, actual = (torch.full((batch, n), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    reference.units(x, weights, EPS, expected)
    vector.units(x, weights, EPS, actual)
    assert_close(actual, expected, dtype)


def assert_add_product(vector, batch: int, inputs: int, d: int, kind: str | torch.dtype) -> None:
    draw, dtype = Draw(), result_dtype(kind)
    h, weight, x = draw.normal(batch, inputs, dtype=dtype), draw.weight(d, inputs, kind), draw.normal(batch, d)
    expected, actual = x.clone(), x.clone()
    reference.add_product(h, weight, 0.3, expected)
    vector.add_product(h, weight, 0.3, actual)
    # h is given: there is nothing to round.
    assert_close(actual - x, expected - x, torch.float32)


def assert_spectral(
    vector, batch: int, sizes: tuple[int, int, int, int], kind: str | torch.dtype, neutral: bool = False, steps: int = 3
) -> None:
    """Several tokens in a row, each from the state that the one before left; a row in three is idle."""
    d, k, p, m = sizes
    draw, dtype = Draw(), result_dtype(kind)
    weights = draw.spectral(d, k, p, m, kind, neutral)
    states = [draw.normal(batch + 2, k, m, 2, p)]
    states.append(states[0].clone())
    before = states[0].clone()
    slot = torch.randperm(batch + 2, generator=draw.generator)[:batch].to(DEVICE, torch.int32)
    slot[1::3] = -1
    for _ in range(steps):
        x = draw.normal(batch, d)
        expected, actual = (torch.full((batch, k * p), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
        reference.spectral(x, weights, EPS, states[0], slot, expected)
        vector.spectral(x, weights, EPS, states[1], slot, actual)
        assert_close(actual[slot >= 0], expected[slot >= 0], dtype)
        used = slot[slot >= 0].long()
        assert_close(states[1][used], states[0][used], dtype)
        untouched = torch.ones(batch + 2, dtype=torch.bool, device=DEVICE)
        untouched[used] = False
        assert torch.equal(states[1][untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [5, 896, 2048])
def test_embed_copies_rows(vector, dtype, d):
    table, token = Draw().normal(7, d, dtype=dtype), torch.tensor([6, 0, 3, 3], device=DEVICE)
    x = torch.full((4, d), torch.nan, device=DEVICE)
    vector.embed(table, token, x)
    assert torch.equal(x, table[token].float())


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_normed_product(vector, batch, kind, out):
    if kind == torch.float32 and out == torch.bfloat16:
        pytest.skip("results of fp32 weights are fp32")
    assert_normed_product(vector, batch, 112, 53, kind, out)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("d", "rows"), [(1, 1), (33, 7), (64, 600), (257, 31), (896, 12)])
def test_normed_product_at_odd_sizes(vector, d, rows):
    assert_normed_product(vector, 2, d, rows, torch.float32, torch.float32)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_units(vector, batch, kind):
    assert_units(vector, batch, 112, 192, kind)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("d", "n"), [(16, 1), (40, 65), (64, 300)])
def test_units_at_odd_sizes(vector, d, n):
    assert_units(vector, 2, d, n, torch.float32)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_add_product(vector, batch, kind):
    assert_add_product(vector, batch, 308, 112, kind)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(("inputs", "d"), [(1, 3), (192, 33), (1344, 64), (4608, 8), (5632, 70)])
def test_add_product_at_odd_sizes(vector, inputs, d):
    assert_add_product(vector, 2, inputs, d, torch.float32)
    assert_add_product(vector, 1, inputs, d, torch.bfloat16)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_spectral(vector, batch, kind):
    assert_spectral(vector, batch, (56, 11, 28, 8), kind)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("sizes", [(32, 6, 5, 3), (8, 1, 1, 1), (40, 3, 64, 16), (16, 8, 24, 8)])
@pytest.mark.parametrize("neutral", [False, True])
def test_spectral_at_odd_sizes(vector, sizes, neutral):
    assert_spectral(vector, 2, sizes, torch.float32, neutral)


def test_clocks_and_gates_of_any_size_stay_finite(vector):
    d, k, p, m = 8, 2, 4, 2
    weights = Draw().spectral(d, k, p, m, torch.float32)
    huge = PackedWeight(weights.in_proj.values_RI * 300)
    weights = dataclasses.replace(weights, in_proj=huge)
    states = [Draw(1).normal(2, k, m, 2, p) for _ in range(2)]
    slot = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    results = [torch.empty(2, k * p, device=DEVICE) for _ in range(2)]
    for function, state, z in zip((reference.spectral, vector.spectral), states, results, strict=True):
        function(Draw(2).normal(2, d), weights, EPS, state, slot, z)
        assert state.isfinite().all()
    assert_close(results[1], results[0], torch.float32)
    assert_close(states[1], states[0], torch.float32)


def test_layers_that_are_parts_of_one_state_and_states_of_other_sizes_do_not_mix(vector):
    """They take turns: each finds the counters as the one before left them."""
    draw, sizes = Draw(), (16, 5, 6, 2)
    d, k, p, m = sizes
    weights = [draw.spectral(d, k, p, m, torch.float32) for _ in range(2)]
    small = draw.spectral(d, 3, p, m, torch.float32)
    states = [draw.normal(2, 4, k, m, 2, p)]
    states.append(states[0].clone())
    small_states = [draw.normal(4, 3, m, 2, p)]
    small_states.append(small_states[0].clone())
    slot = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        x = draw.normal(2, d)
        for layer in range(2):
            expected, actual = (torch.empty(2, k * p, device=DEVICE) for _ in range(2))
            reference.spectral(x, weights[layer], EPS, states[0][layer], slot, expected)
            vector.spectral(x, weights[layer], EPS, states[1][layer], slot, actual)
            assert_close(actual, expected, torch.float32)
            expected, actual = (torch.empty(2, 3 * p, device=DEVICE) for _ in range(2))
            reference.spectral(x, small, EPS, small_states[0], slot, expected)
            vector.spectral(x, small, EPS, small_states[1], slot, actual)
            assert_close(actual, expected, torch.float32)
    assert_close(states[1], states[0], torch.float32)
    assert_close(small_states[1], small_states[0], torch.float32)


@pytest.mark.parametrize("rows", [1, 100, 2048, 128256])
@pytest.mark.parametrize("inputs", [1, 308, 896, 5632, 14336])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_tiles_fit_registers_and_leave_no_processor_idle(vector, rows, inputs, itemsize):
    for tile in (vector.whole_rows(rows, inputs, itemsize, least=2), vector.blocks_of_rows(rows, inputs, itemsize)):
        registers = tile.rows * -(-inputs // tile.width) * tile.width * itemsize / (tile.warps * 32) / 4
        assert registers <= 160
        assert tile.rows <= 2 or rows / tile.rows >= 264


# -- on a GPU --------------------------------------------------------------------------------------------------------

REAL = {"1.53B": (2048, 32, 64, 8, 5632), "370M": (896, 32, 28, 8, 4608), "370M T2": (896, 11, 28, 8, 832)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", REAL)
def test_stages_at_the_sizes_of_models(vector, model, batch, kind):
    d, k, p, m, n = REAL[model]
    assert_normed_product(vector, batch, d, 3 * d, kind, result_dtype(kind))
    assert_normed_product(vector, batch, d, 50304, kind, torch.float32)
    assert_units(vector, batch, d, n, kind)
    assert_add_product(vector, batch, n, d, kind)
    assert_add_product(vector, batch, k * p, d, kind)
    assert_spectral(vector, batch, (d, k, p, m), kind)


def chain(vector, draw: Draw, batch: int, layers: int) -> tuple[Callable[[], None], list[Tensor]]:
    """A step of a small model without attention, and all that it changes."""
    d, k, p, m, n, vocabulary = 896, 32, 28, 8, 1344, 1000
    spectral = [draw.spectral(d, k, p, m, torch.bfloat16) for _ in range(layers)]
    forward = [
        FeedForwardWeights(
            draw.normal(d), draw.weight(2 * n, d, torch.bfloat16), draw.weight(d, n, torch.bfloat16)
        )
        for _ in range(layers)
    ]  # fmt: skip
    final, head = draw.normal(d), draw.weight(vocabulary, d, torch.bfloat16)
    token = torch.arange(batch, device=DEVICE)
    slot = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    state = torch.zeros(layers, batch, k, m, 2, p, device=DEVICE)
    x, logits = torch.empty(batch, d, device=DEVICE), torch.empty(batch, vocabulary, device=DEVICE)
    z, h = (torch.empty(batch, columns, device=DEVICE, dtype=torch.bfloat16) for columns in (k * p, n))

    def step() -> None:
        vector.embed(head.values_RI, token, x)
        for layer in range(layers):
            vector.spectral(x, spectral[layer], EPS, state[layer], slot, z)
            vector.add_product(z, spectral[layer].out_proj, spectral[layer].output_scale, x)
            vector.units(x, forward[layer], EPS, h)
            vector.add_product(h, forward[layer].down, 1.0, x)
        vector.normed_product(x, final, EPS, head, logits)
        token.copy_(logits.argmax(-1))

    return step, [token, state, x, logits]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
def test_a_recorded_chain_gives_the_bits_of_a_patient_one(vector, batch):
    """Kernels that start early must not read early: a step that waits after every kernel is the judge."""
    step, results = chain(vector, Draw(), batch, layers=6)
    fresh = [tensor.clone().zero_() for tensor in results]

    def reset() -> None:
        for tensor, zero in zip(results, fresh, strict=True):
            tensor.copy_(zero)
        torch.cuda.synchronize()

    names = ("embed", "spectral", "add_product", "units", "normed_product")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            plain = getattr(vector, name)

            def patient(*given, plain=plain):
                plain(*given)
                torch.cuda.synchronize()

            patch.setattr(vector, name, patient)
        reset()
        for _ in range(20):
            step()
        expected = [tensor.clone() for tensor in results]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for repetition in range(20):
        reset()
        for _ in range(20):
            graph.replay()
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other), f"repetition {repetition}"


@pytest.mark.gpu
def test_a_state_must_have_been_stepped_before_it_is_recorded(vector):
    draw = Draw()
    weights, state = draw.spectral(64, 3, 8, 2, torch.bfloat16), draw.normal(1, 3, 2, 2, 8)
    x, z = draw.normal(1, 64), torch.empty(1, 24, dtype=torch.bfloat16, device=DEVICE)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    vector._workspaces.clear()
    with pytest.raises(RuntimeError, match="must have run once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        vector.spectral(x, weights, EPS, state, slot, z)


COMPILE_ALL = """
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.decode_step import vector

capability = int(sys.argv[1])
TYPES = {
    "token": "*i64", "slot": "*i32", "counter": "*i32", "rows": "i32", "eps": "fp32", "factor": "fp32",
    "y": "*bf16", "z": "*bf16", "h": "*bf16", "embedding": "*bf16",
}


def compile_one(kernel, warps, constants, types):
    constants = {**constants, "DEPENDENT": capability >= 90}
    if types["values"] in ("*bf16", "*fp32"):
        constants["scale"] = None
    signature = {
        name: "constexpr" if name in constants else types.get(name, TYPES.get(name, "*fp32"))
        for name in kernel.arg_names
    }
    constants = {name: value for name, value in constants.items() if name in signature}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    options = {"num_warps": warps, "num_stages": 1}
    if capability >= 90:
        options["launch_pdl"] = True
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    waits = compiled.asm["ptx"].count("griddepcontrol.wait")
    assert waits == (1 if capability >= 90 else 0), (kernel.__name__, waits)
    print(kernel.__name__, types["values"], constants.get("B"), warps, len(compiled.asm["cubin"]))


compile_one(vector.embed_kernel, 4, {"D": 896, "WIDTH": 1024}, {"values": "*bf16"})
for stored, size in (("*bf16", 2), ("*fp32", 4), ("*i8", 1), ("*u8", 1)):
    types = {"values": stored}
    for b in (1, 2) if stored == "*bf16" else (2,):
        sizes = {"B": b, "D": 2048, "INPUTS": 5632, "ACTIVATION": tl.bfloat16}
        for units in (False, True):
            tile = vector.whole_rows(11264, 2048, size, 2)
            constants = {**sizes, "ROWS": tile.rows, "WIDTH": tile.width, "UNITS": units}
            compile_one(vector.normed_product_kernel, tile.warps, constants, types)
        tile = vector.blocks_of_rows(2048, 5632, size)
        compile_one(vector.add_product_kernel, tile.warps, {**sizes, "ROWS": tile.rows, "WIDTH": tile.width}, types)
        tile = vector.whole_rows(1664, 896, size)
        constants = {
            **sizes, "D": 896, "ROWS": tile.rows, "WIDTH": tile.width, "K": 32, "M": 8, "P": 28, "MODES": 8,
            "VALUES": 32, "STEP": b, "NEUTRAL": False,
        }
        compile_one(vector.spectral_kernel, tile.warps, constants, types)
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 21
