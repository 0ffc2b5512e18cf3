"""Decode stages for any number of rows, held to the reference's; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_essh.ops.decode_step import reference
from megatron_essh.ops.decode_step.weights import TABLES, FeedForwardWeights, PackedWeight, SpectralWeights

# The interpreter's NumPy tells of the overflow that makes a very negative gate's sigmoid 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative RMS. Triton's interpreter cuts to bf16 where a GPU rounds, inputs of products too. On a GPU a product's
# inputs are rounded at another place than the reference's, and gates and ups once more.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 0.005 if DEVICE == "cuda" else 0.02}
EPS = 1e-6
# fp32 weights go through cuBLAS; bf16 ones of small products do from 33 rows on.
KINDS = [torch.float32, torch.bfloat16, "int8", "fp8"]


@pytest.fixture(scope="module")
def matrix():
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    from megatron_essh.ops.decode_step import matrix

    return matrix


@pytest.fixture(autouse=True)
def bf16_products(matrix, monkeypatch):
    """Triton's interpreter multiplies bf16 matrices as the integers of their bits: give it their values."""
    from triton.language import float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def values(handle: TensorHandle) -> TensorHandle:
        if str(handle.dtype.scalar) != "bf16":
            return handle
        return TensorHandle((handle.data.astype("uint32") << 16).view("float32"), float32)

    def create_dot(self, a, b, *others):
        return plain(self, values(a), values(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


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

    def slots(self, batch: int) -> Tensor:
        """Slots of `batch` rows among batch + 2, every third row idle."""
        slot_B = torch.randperm(batch + 2, generator=self.generator)[:batch].to(DEVICE, torch.int32)
        slot_B[1::3] = -1
        return slot_B


def activations(kind: str | torch.dtype) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else torch.bfloat16


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == expected.dtype
    error = torch.linalg.vector_norm(actual.double() - expected.double()) / torch.linalg.vector_norm(expected.double())
    assert error <= TOLERANCE[dtype], f"relative RMS {error:.2e}"


def assert_normed_product(matrix, batch: int, d: int, rows: int, kind: str | torch.dtype, result: torch.dtype) -> None:
    draw = Draw()
    x_BD, norm_D, weight = draw.normal(batch, d) * 5, draw.normal(d), draw.weight(rows, d, kind)
    actual, expected = (torch.full((batch, rows), torch.nan, dtype=result, device=DEVICE) for _ in range(2))
    matrix.normed_product(x_BD, norm_D, EPS, weight, actual)
    reference.normed_product(x_BD, norm_D, EPS, weight, expected)
    assert_close(actual, expected, activations(kind))


def assert_units(matrix, batch: int, d: int, n: int, kind: str | torch.dtype) -> None:
    draw = Draw()
    x_BD, dtype = draw.normal(batch, d), activations(kind)
    weights = FeedForwardWeights(draw.normal(d), draw.weight(2 * n, d, kind), draw.weight(d, n, kind))
    actual, expected = (torch.full((batch, n), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    matrix.units(x_BD, weights, EPS, actual)
    reference.units(x_BD, weights, EPS, expected)
    assert_close(actual, expected, dtype)


def assert_add_product(matrix, batch: int, inputs: int, rows: int, kind: str | torch.dtype) -> None:
    draw = Draw()
    h_BI, weight = draw.normal(batch, inputs, dtype=activations(kind)), draw.weight(rows, inputs, kind)
    x_BD = draw.normal(batch, rows)
    actual, expected = x_BD.clone(), x_BD.clone()
    matrix.add_product(h_BI, weight, 0.3, actual)
    reference.add_product(h_BI, weight, 0.3, expected)
    assert_close(actual - x_BD, expected - x_BD, activations(kind))


def assert_spectral(
    matrix, batch: int, d: int, k: int, p: int, m: int, kind: str | torch.dtype, neutral: bool = False
) -> None:
    draw = Draw()
    weights, dtype = draw.spectral(d, k, p, m, kind, neutral), activations(kind)
    slot_B, state = draw.slots(batch), draw.normal(batch + 2, k, m, 2, p)
    ours, theirs = state.clone(), state.clone()
    actual, expected = (torch.full((batch, k * p), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    live_B = slot_B >= 0
    for _ in range(2):
        x_BD = draw.normal(batch, d)
        matrix.spectral(x_BD, weights, EPS, ours, slot_B, actual)
        reference.spectral(x_BD, weights, EPS, theirs, slot_B, expected)
        assert_close(actual[live_B], expected[live_B], dtype)
        assert_close(ours, theirs, dtype)
    idle = [slot for slot in range(batch + 2) if slot not in slot_B.tolist()]
    assert torch.equal(ours[idle], state[idle])


BATCHES = [1, 9, 17, 40]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "rows"), [(32, 48), (72, 50), (300, 23)])
def test_the_product_of_normed_rows(matrix, batch, d, rows, kind):
    if kind == torch.bfloat16 and batch > 32 and DEVICE == "cpu":
        pytest.skip("cuBLAS alone sums 16-bit products into fp32")
    assert_normed_product(matrix, batch, d, rows, kind, activations(kind))
    assert_normed_product(matrix, batch, d, rows, kind, torch.float32)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "n"), [(32, 64), (72, 19)])
def test_units(matrix, batch, d, n, kind):
    assert_units(matrix, batch, d, n, kind)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "rows"), [(64, 32), (300, 23)])
def test_a_product_joins_the_residual_stream(matrix, batch, inputs, rows, kind):
    if kind == torch.bfloat16 and batch > 32 and DEVICE == "cpu":
        pytest.skip("cuBLAS alone sums 16-bit products into fp32")
    assert_add_product(matrix, batch, inputs, rows, kind)


FORMS = {
    "loop": {},
    "loop over shares": {"splits": 3},
    "held": {"columns": 128, "held": True},
    "held shares": {"splits": 2, "held": True},
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.bfloat16, "int8"])
def test_every_form_of_a_product(matrix, monkeypatch, form, turned, kind):
    launch = matrix.Launch(rows=16, batch=16, columns=64)._replace(turned=turned, **FORMS[form])
    monkeypatch.setattr(matrix, "product_launch", lambda *_: launch)
    assert_normed_product(matrix, 2, 300, 23, kind, torch.float32)
    assert_units(matrix, 17, 320, 19, kind)
    assert_add_product(matrix, 20, 320, 32, kind)


@pytest.mark.parametrize("batch", [2, 16, 20, 32])
@pytest.mark.parametrize("kind", ["int8", torch.bfloat16])
def test_a_norm_is_made_up_for_by_the_products_on_both_sides_of_it(matrix, batch, kind):
    draw, n, d = Draw(), 300, 200
    feed_forward = FeedForwardWeights(draw.normal(d), draw.weight(2 * n, d, kind), draw.weight(d, n, kind))
    spectral = draw.spectral(d, 5, 28, 8, kind)
    head, final_D = draw.weight(77, d, kind), draw.normal(d)
    h_BN, state, slot_B = (
        draw.normal(batch, n, dtype=torch.bfloat16),
        draw.normal(batch + 2, 5, 8, 2, 28),
        draw.slots(batch),
    )
    live_B = slot_B >= 0

    def outcome(stages) -> list[Tensor]:
        x_BD, ours = Draw(1).normal(batch, d) * 5, state.clone()
        new_h_BN, z_BR = torch.empty_like(h_BN), h_BN.new_empty(batch, 5 * 28)
        logits_BV = torch.empty(batch, 77, device=DEVICE)
        scaled = stages.add_product(h_BN, feed_forward.down, 0.3, x_BD, feed_forward.norm_D)
        assert (scaled is None) == (stages is reference)
        stages.units(x_BD, feed_forward, EPS, new_h_BN, scaled)
        scaled = stages.add_product(new_h_BN, feed_forward.down, 0.5, x_BD, spectral.norm_D)
        stages.spectral(x_BD, spectral, EPS, ours, slot_B, z_BR, scaled)
        scaled = stages.add_product(z_BR, spectral.out_proj, spectral.output_scale, x_BD, final_D)
        stages.normed_product(x_BD, final_D, EPS, head, logits_BV, scaled)
        return [new_h_BN[live_B], z_BR[live_B], ours, x_BD[live_B], logits_BV[live_B]]

    for actual, expected in zip(outcome(matrix), outcome(reference), strict=True):
        assert_close(actual, expected, torch.bfloat16)


def test_shares_are_joined_alike_and_leave_their_counters_as_they_were(matrix, monkeypatch):
    launch = matrix.Launch(rows=16, batch=16, columns=32, splits=4)
    monkeypatch.setattr(matrix, "product_launch", lambda *_: launch)
    monkeypatch.setattr(matrix, "_counters", {})
    draw = Draw()
    h_BI, weight, x_BD = draw.normal(20, 128, dtype=torch.bfloat16), draw.weight(50, 128, "int8"), draw.normal(20, 50)
    results = [x_BD.clone() for _ in range(3)]
    for result in results:
        matrix.add_product(h_BI, weight, 0.3, result)
        assert torch.equal(result, results[0])
    assert matrix._counters
    assert not any(counter.any() for counter in matrix._counters.values())


@pytest.mark.parametrize("batch", [2, 40])
def test_eight_bit_weights_meet_fp32_inputs(matrix, batch):
    draw = Draw()
    weights = FeedForwardWeights(draw.normal(72), draw.weight(38, 72, "int8"), draw.weight(72, 19, "int8"))
    stream, outcomes = draw.normal(batch, 72), []
    for stages in (matrix, reference):
        h_BN, x_BD = torch.full((batch, 19), torch.nan, device=DEVICE), stream.clone()
        stages.units(x_BD, weights, EPS, h_BN)
        stages.add_product(h_BN, weights.down, 0.3, x_BD)
        outcomes.append((h_BN, x_BD))
    for actual, expected in zip(*outcomes, strict=True):
        assert_close(actual, expected, torch.float32)


def test_a_launch_that_leaves_a_program_nothing_is_refused(matrix, monkeypatch):
    launch = matrix.Launch(rows=16, batch=16, columns=64, splits=3)
    monkeypatch.setattr(matrix, "product_launch", lambda *_: launch)
    with pytest.raises(AssertionError, match="none of 128 inputs"):
        assert_add_product(matrix, 2, 128, 16, "int8")


SIZES = {  # rows, inputs, units: of the 1.53B model and of the 370M one
    "in": (2816, 2048, False),
    "out": (2048, 2048, False),
    "units": (11264, 2048, True),
    "down": (2048, 5632, False),
    "qkv": (6144, 2048, False),
    "head": (128_256, 2048, False),
    "370M in": (1664, 896, False),
    "370M units": (9216, 896, True),
    "370M down": (896, 4608, False),
    "370M head": (50_304, 896, False),
}


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("batch", [1, 9, 16, 17, 32, 33, 64, 65, 128, 512])
def test_launches_suit_every_size(matrix, batch, itemsize, units):
    for rows in (2, 24, 1024, 1664, 2816, 5632, 6144, 9216, 11264, 128_256):
        for inputs in (1, 33, 224, 256, 257, 300, 544, 896, 1100, 2048, 2049, 4608, 5632, 11264):
            launch = matrix.product_launch(rows, inputs, batch, itemsize, torch.bfloat16, units)
            if launch is None:
                assert itemsize == 2
                continue
            blocks = -(-inputs // (launch.columns * launch.splits))
            assert blocks * launch.columns * (launch.splits - 1) < inputs
            assert launch.splits <= matrix._MOST_SPLITS
            tiles = -(-rows // launch.rows) * -(-batch // launch.batch)
            assert launch.splits == 1 or tiles <= matrix._MOST_TILES
            assert min(launch.batch, launch.columns) >= 16
            assert not launch.held or launch.rows * launch.columns * blocks * itemsize <= 64 * 1024
            for size in (launch.rows, launch.batch, launch.columns):
                assert size & (size - 1) == 0


def test_launches_of_16_bit_weights_are_those_that_were_measured_best(matrix):
    def launch(name: str, batch: int) -> tuple[object, ...] | None:
        rows, inputs, units = SIZES[name]
        found = matrix.product_launch(rows, inputs, batch, 2, torch.bfloat16, units)
        return found and (found.rows, found.columns, found.splits, found.warps, "held" if found.held else found.stages)

    for batch in (2, 8, 16, 32):
        assert launch("in", batch) == launch("out", batch) == (64, 256, 4, 4, "held")
        assert launch("units", batch) == launch("head", batch) == (64, 128, 1, 4, 3)
        assert launch("down", batch) == (64, 128, 4, 4, 6 if batch <= 16 else 4)
        assert launch("qkv", batch) == ((128, 256, 8, 8, "held") if batch <= 16 else None)
    assert launch("units", 64) == (64, 64, 1, 4, 5)
    assert launch("units", 128) == (128, 64, 1, 8, 4)
    assert all(launch(name, batch) is None for name in SIZES for batch in (64, 128, 512) if "units" not in name)


@pytest.mark.parametrize("batch", [1, 9, 18])
@pytest.mark.parametrize(("k", "p", "m"), [(3, 5, 3), (2, 28, 8), (1, 64, 8)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, "int8"])
def test_channels(matrix, batch, k, p, m, kind):
    assert_spectral(matrix, batch, 40, k, p, m, kind)


def test_channels_with_neutral_gates(matrix):
    assert_spectral(matrix, 9, 40, 3, 5, 3, torch.float32, neutral=True)


def test_a_scan_step_takes_rounded_projections(matrix):
    draw = Draw()
    weights, slot_B = draw.spectral(8, 3, 5, 3, torch.bfloat16), draw.slots(11)
    raw_BR, state = draw.normal(11, 3 * 14, dtype=torch.bfloat16), draw.normal(13, 3, 3, 2, 5)
    ours, theirs = state.clone(), state.clone()
    actual, expected = (torch.empty(11, 15, device=DEVICE) for _ in range(2))
    matrix.scan_step(raw_BR, weights, EPS, ours, slot_B, actual)
    reference.scan_step(raw_BR, weights, EPS, theirs, slot_B, expected)
    live_B = slot_B >= 0
    assert_close(actual[live_B], expected[live_B], torch.float32)
    assert_close(ours, theirs, torch.float32)


def test_a_huge_clock_forgets_everything_and_nothing_overflows(matrix):
    draw = Draw()
    weights = draw.spectral(8, 2, 4, 2, torch.float32)
    raw_BR = draw.normal(3, 2 * 10)
    raw_BR.view(3, 2, 10)[:, :, 8:] = 500.0
    raw_BR.view(3, 2, 10)[:, :, 4:8] = -500.0  # and gates that are shut
    slot_B = torch.arange(3, dtype=torch.int32, device=DEVICE)
    state, z_BR = draw.normal(3, 2, 2, 2, 4), torch.empty(3, 8, device=DEVICE)
    matrix.scan_step(raw_BR, weights, EPS, state, slot_B, z_BR)
    assert torch.equal(state, torch.zeros_like(state))
    assert torch.equal(z_BR.abs(), torch.zeros_like(z_BR))


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_live_sequences_alone_advance(matrix, batch):
    draw = Draw()
    slot_B = draw.slots(batch)
    actual = torch.randint(0, 1 << 40, (batch + 2,), generator=draw.generator).to(DEVICE)
    expected = actual.clone()
    matrix.advance(actual, slot_B)
    reference.advance(expected, slot_B)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_become_their_rows(matrix, dtype):
    draw = Draw()
    embedding_VD, token_B = draw.normal(50, 40, dtype=dtype), torch.arange(0, 50, 3, device=DEVICE)
    x_BD = torch.empty(17, 40, device=DEVICE)
    matrix.embed(embedding_VD, token_B, x_BD)
    assert torch.equal(x_BD, embedding_VD[token_B].float())


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [9, 16, 32, 33, 128, 512])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "k", "p", "n"), [(2048, 32, 64, 5632), (896, 32, 28, 4608), (896, 8, 28, 1088)])
def test_the_sizes_of_decoding(matrix, batch, kind, d, k, p, n):
    assert_normed_product(matrix, batch, d, 3 * d, kind, activations(kind))
    assert_normed_product(matrix, batch, d, 5000, kind, torch.float32)
    assert_units(matrix, batch, d, n, kind)
    assert_add_product(matrix, batch, n, d, kind)
    assert_spectral(matrix, batch, d, k, p, 8, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", torch.bfloat16])
def test_logits_of_many_rows(matrix, kind):
    assert_normed_product(matrix, 32, 2048, 128_256, kind, torch.float32)
    assert_normed_product(matrix, 512, 2048, 128_256, kind, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_can_be_recorded(matrix, batch, kind):
    draw = Draw()
    d, k, p, m, n = 256, 4, 28, 8, 192
    spectral = draw.spectral(d, k, p, m, kind)
    feed_forward = FeedForwardWeights(draw.normal(d), draw.weight(2 * n, d, kind), draw.weight(d, n, kind))
    state, x_BD = draw.normal(batch + 2, k, m, 2, p), draw.normal(batch, d)
    slot_B, dtype = draw.slots(batch), activations(kind)
    position_S = torch.zeros(batch + 2, dtype=torch.int64, device=DEVICE)
    z_BR, h_BN = (torch.empty(batch, width, dtype=dtype, device=DEVICE) for width in (k * p, n))

    def layer() -> None:
        matrix.spectral(x_BD, spectral, EPS, state, slot_B, z_BR)
        scaled = matrix.add_product(z_BR, spectral.out_proj, spectral.output_scale, x_BD, feed_forward.norm_D)
        matrix.units(x_BD, feed_forward, EPS, h_BN, scaled)
        matrix.add_product(h_BN, feed_forward.down, 1.0, x_BD)
        matrix.advance(position_S, slot_B)

    kept = (state.clone(), x_BD.clone(), position_S.clone())

    def outcome(step: Callable[[], None]) -> list[Tensor]:
        for tensor, before in zip((state, x_BD, position_S), kept, strict=True):
            tensor.copy_(before)
        for _ in range(10):
            step()
        return [state.clone(), x_BD.clone(), position_S.clone()]

    expected = outcome(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for one, other in zip(outcome(graph.replay), expected, strict=True):
        assert torch.equal(one, other)


COMPILE_ALL = """
import sys

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops.decode_step import matrix, vector

TYPES = {
    "slot": "*i32", "position": "*i64", "counter": "*i32", "batch": "i32", "rows": "i32", "eps": "fp32",
    "factor": "fp32", "z": "*bf16", "u": "*bf16",
}
CAPABILITY = int(sys.argv[1])


def compile_one(kernel, constants, types, warps=4, stages=1):
    constants = {**constants, "DEPENDENT": True}
    signature = {
        name: "constexpr" if name in constants else types.get(name, TYPES.get(name, "*fp32"))
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    options = {"num_warps": warps, "num_stages": stages if CAPABILITY < 100 else 1, "launch_pdl": True}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    assert compiled.asm["ptx"].count("griddepcontrol.wait") == 1, kernel.__name__
    assert compiled.metadata.shared <= 227 * 1024, (kernel.__name__, constants, compiled.metadata.shared)
    print(kernel.__name__, constants, types, compiled.metadata.shared)
    return compiled


def compile_product(rows, inputs, form, stored, launch, activation=tl.bfloat16):
    constants = {
        "INPUTS": inputs, "COLUMNS": launch.columns, "ROWS": launch.rows, "BATCH": launch.batch,
        "SPLITS": launch.splits, "TILES": 0 if form == "add" else -(-inputs // 64), "HELD": launch.held,
        "TURNED": launch.turned,
        "ACTIVATION": activation, "UNITS": form == "units", "ADD": form == "add",
    }
    constants |= {"scale": None} if stored == "*bf16" else {}
    constants |= {"parts": None, "counter": None} if launch.splits == 1 else {}
    constants |= dict.fromkeys(("x_squares",) if form == "add" else ("norm", "u", "squares"))
    types = {"values": stored, "y": "*bf16" if form == "units" else "*fp32"}
    types["x"] = "*fp32" if activation == tl.float32 else "*bf16"
    ptx = compile_one(matrix.product_kernel, constants, types, launch.warps, launch.stages).asm["ptx"]
    if launch.held:  # all weights are asked for before the wait
        assert ptx.rindex("ld.global.L1::evict_first") < ptx.index("griddepcontrol.wait")


for stored, size in (("*bf16", 2), ("*i8", 1), ("*u8", 1)):
    for batch in (16, 32, 64, 128):
        for rows, inputs, form in (
            (2816, 2048, ""), (1664, 896, ""), (6144, 2048, ""), (11264, 2048, "units"), (2048, 5632, "add"),
        ):
            launch = matrix.product_launch(rows, inputs, batch, size, torch.bfloat16, form == "units")
            if launch is not None and (stored != "*u8" or form != ""):
                compile_product(rows, inputs, form, stored, launch)
launch = matrix.product_launch(2048, 5632, 128, 1, torch.float32)
compile_product(2048, 5632, "add", "*i8", launch, tl.float32)
compile_one(matrix.norm_kernel, {"D": 2048, "WIDTH": 2048}, {}, 8)
for p in (28, 64):
    sizes = {"B": 512, "K": 32, "M": 8, "P": p, "MODES": 8, "VALUES": 64 if p > 32 else 32}
    compile_one(matrix.scan_step_kernel, {**sizes, "NEUTRAL": False}, {}, 2)
compile_one(matrix.advance_kernel, {"BATCH": 256}, {})
# What states are read early for: no kernel of a step starts before all of the step before has ended.
ptx = compile_one(vector.embed_kernel, {"D": 2048, "WIDTH": 1024}, {"embedding": "*bf16", "token": "*i64"}).asm["ptx"]
assert ptx.count("griddepcontrol.launch_dependents") == 1
assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.global")
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 45
