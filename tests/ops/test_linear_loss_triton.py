"""The Triton losses of logits against fp64: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from megatron_essh.ops import tuning  # noqa: E402
from megatron_essh.ops.linear_loss import IGNORED, cross_entropy, reference, triton  # noqa: E402
from megatron_essh.ops.linear_loss.chunked import chunked_loss  # noqa: E402

# The interpreter takes a loop's end from a NumPy array of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

LOSSES = ("cross_entropy", "distillation", "refinement")
WEIGHTS = {"cross_entropy": (), "distillation": (1.5, 0.3), "refinement": (5.0,)}
PARTS = {"cross_entropy": 1, "distillation": 3, "refinement": 4}
GRADIENTS = {"cross_entropy": 1, "distillation": 1, "refinement": 2}
OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.004}
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.006}


def random_logits(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Two distributions' logits, unlike in level, and labels: the first and the last entry, and one in four ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = [3 * torch.randn((rows, columns), generator=generator) + level for level in (2.0, -5.0)]
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[0], labels[-1] = 0, columns - 1
    labels[1::4] = IGNORED
    return [z.to(DEVICE, dtype) for z in logits], labels.to(DEVICE)


def of_logits(module, name: str, logits: list[Tensor], labels: Tensor, scale: Tensor | None = None):
    """(sums [1 + parts], gradients) of copies of the logits; a loss of one distribution takes the first."""
    own = [z.clone() for z in logits[: 1 if name == "cross_entropy" else 2]]
    exact = torch.float64 if own[0].dtype == torch.float64 else torch.float32
    sums = torch.zeros(PARTS[name], dtype=exact, device=labels.device)
    gradients = getattr(module, name)(*WEIGHTS[name])(own, labels, sums, scale, True)
    assert len(gradients) >= GRADIENTS[name]
    return sums, gradients[: GRADIENTS[name]]


def relative_error(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other))


def assert_follows_the_reference(name: str, logits: list[Tensor], labels: Tensor, scale: float | None = None) -> None:
    dtype = logits[0].dtype
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    sums, gradients = of_logits(triton, name, logits, labels, factor)
    expected, expected_gradients = of_logits(reference, name, [z.double() for z in logits], labels)
    for number, (one, other) in enumerate(zip(sums, expected, strict=True)):
        assert relative_error(one, other) <= OUTPUT_TOLERANCE[dtype], (number, one, other)
    for number, (one, other) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert one.dtype == dtype
        assert (one[labels == IGNORED] == 0).all()
        error = relative_error(one, other * (scale or 1.0))
        assert error <= GRADIENT_TOLERANCE[dtype], (number, error)


# -- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [7, 50, 300, 4097])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_follow_the_reference(name, columns, dtype):
    with tuning.overriding({f"linear_loss.{name}": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}}):
        assert_follows_the_reference(name, *random_logits(6, columns, dtype, seed=columns))


@pytest.mark.parametrize("name", LOSSES)
def test_the_factor_is_on_the_gradients_and_not_on_the_values(name):
    """1 / 250,000 tokens, in bf16 whose exponents reach as far as those of fp32."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_follows_the_reference(name, *random_logits(5, 80, dtype), scale=4e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_large_logits_follow_the_reference(name):
    logits, labels = random_logits(5, 3000, torch.float32)
    logits = [300 * z for z in logits]
    logits[0][:, 2500] = 30_000.0  # the largest comes late, and what was summed before it counts for nothing
    assert_follows_the_reference(name, logits, labels)


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_positions_may_hold_anything(name):
    logits, labels = random_logits(6, 90, torch.float32)
    spoilt = [z.clone() for z in logits]
    for z in spoilt:
        z[labels == IGNORED] = float("nan")
    (sums, gradients), (other_sums, other_gradients) = (of_logits(triton, name, z, labels) for z in (logits, spoilt))
    for one, other in zip([sums, *gradients], [other_sums, *other_gradients], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("label", [90, -1, 2**32 + 3, 2**32 + IGNORED])
@pytest.mark.parametrize("name", LOSSES)
def test_a_label_outside_the_vocabulary_makes_the_objective_nan(name, label):
    logits, labels = random_logits(6, 90, torch.float32)
    labels[2] = label
    sums, gradients = of_logits(triton, name, logits, labels)
    assert sums[0].isnan()
    for gradient in gradients:
        assert gradient[2].isnan().all()
        assert gradient[[0, 1, 3, 4, 5]].isfinite().all()


def test_equal_distributions_are_at_no_distance():
    (logits, _), labels = random_logits(6, 1500, torch.float32)
    assert of_logits(triton, "distillation", [logits, logits], labels)[0][2].abs() < 1e-5
    sums, (full, tier) = of_logits(triton, "refinement", [logits, logits], labels)
    assert sums[3] == 0
    assert torch.equal(full, tier)


@pytest.mark.parametrize("name", LOSSES)
def test_without_gradients_the_values_are_the_same_and_the_logits_stay(name):
    logits, labels = random_logits(6, 1500, torch.float32)
    expected, _ = of_logits(triton, name, logits, labels)
    own = [z.clone() for z in logits[: 1 if name == "cross_entropy" else 2]]
    sums = torch.zeros_like(expected)
    assert len(getattr(triton, name)(*WEIGHTS[name])(own, labels, sums, None, False)) == 0
    assert torch.equal(sums, expected)
    assert all(torch.equal(one, other) for one, other in zip(own, logits, strict=False))


@pytest.mark.parametrize("name", LOSSES)
def test_results_are_the_same_bits_every_time(name):
    logits, labels = random_logits(9, 2100, torch.bfloat16)
    (sums, gradients), (other_sums, other_gradients) = (of_logits(triton, name, logits, labels) for _ in range(2))
    for one, other in zip([sums, *gradients], [other_sums, *other_gradients], strict=True):
        assert torch.equal(one, other)


# -- from hidden states ----------------------------------------------------------------------------------------------


def from_hidden(module, name: str, inputs: list[Tensor], labels: Tensor, chunk: int | None = None) -> list[Tensor]:
    """Values, and the objective's gradients with respect to hidden states and weight."""
    *hidden, weight = (x.clone().requires_grad_() for x in inputs)
    hidden = hidden[: 1 if name == "cross_entropy" else 2]
    if name == "distillation":
        hidden[1] = hidden[1].detach()
    loss = getattr(module, name)(*WEIGHTS[name])
    values = chunked_loss(loss, PARTS[name] - 1, chunk, labels, None, weight, *hidden)
    wanted = [x for x in (*hidden, weight) if x.requires_grad]
    return [*(x.detach() for x in values), *torch.autograd.grad(values[0], wanted)]


def random_hidden(positions: int, width: int, columns: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn((n, width), generator=generator) for n in (positions, positions, columns)]
    inputs[2] *= 2 / width**0.5
    labels = torch.randint(0, columns, (positions,), generator=generator)
    labels[1::4] = IGNORED
    return [x.to(DEVICE) for x in inputs], labels.to(DEVICE)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_in_chunks_from_hidden_states_they_follow_the_reference(name, chunk):
    inputs, labels = random_hidden(10, 6, 50)
    actual = from_hidden(triton, name, inputs, labels, chunk)
    expected = from_hidden(reference, name, [x.double() for x in inputs], labels)
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) <= 1e-5


# -- on a GPU alone --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 7, 50, 300, 1023, 4096, 4097, 16_388, 50_304, 128_256])
@pytest.mark.parametrize("name", LOSSES)
def test_every_size_of_vocabulary(name, columns, dtype):
    if columns == 1:  # certain of its only entry: there is nothing to compare with but 0
        sums, gradients = of_logits(triton, name, *random_logits(64, 1, dtype))
        assert all((x.abs() < 1e-5).all() for x in (sums, *gradients))
        return
    for rows in (5, 200):
        assert_follows_the_reference(name, *random_logits(rows, columns, dtype, seed=rows))
    assert_follows_the_reference(name, *random_logits(64, columns, dtype), scale=4e-6)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    rows, columns = 17_000, 128_256
    assert rows * columns > 2**31
    logits = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (rows,), device=DEVICE)
    last = logits[-3:].clone()
    _, (gradient,) = of_logits(triton, "cross_entropy", [logits], labels)
    _, (expected,) = of_logits(triton, "cross_entropy", [last], labels[-3:])
    assert torch.equal(gradient[-3:], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
def test_under_autocast_from_hidden_states_they_follow_the_reference(name):
    """Against fp64 from inputs rounded as autocast rounds them; logits are rounded to bf16 too."""
    inputs, labels = random_hidden(1000, 64, 5000)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = from_hidden(triton, name, inputs, labels, 300)
    expected = from_hidden(reference, name, [x.bfloat16().double() for x in inputs], labels)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert relative_error(one, other) <= (0.004 if number < PARTS[name] else 0.01), number


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_a_recorded_pass_adds_to_main_grad_what_a_plain_one_returns(bf16):
    (hidden, _, weight), labels = random_hidden(500, 32, 3000)
    scale = torch.tensor(4e-6, device=DEVICE)

    def forward_and_backward(hidden: Tensor, weight: Tensor) -> Tensor:
        hidden.grad = None
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16, cache_enabled=False):
            objective = cross_entropy(hidden, weight, labels, chunk=200, grad_scale=scale)
        objective.backward()
        return objective

    plain = [x.clone().requires_grad_() for x in (hidden, weight)]
    expected = forward_and_backward(*plain)
    recorded = [x.clone().requires_grad_() for x in (hidden, weight)]
    recorded[1].main_grad = torch.zeros_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(*recorded)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        objective = forward_and_backward(*recorded)
    recorded[1].main_grad.zero_()
    for _ in range(2):
        graph.replay()
    assert torch.equal(objective, expected)
    assert torch.equal(recorded[0].grad, plain[0].grad)
    assert recorded[1].grad is None
    assert relative_error(recorded[1].main_grad, 2 * plain[1].grad.double()) <= 1e-6


# -- ahead of time ---------------------------------------------------------------------------------------------------

COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops import tuning
from megatron_essh.ops.linear_loss import triton as losses

TYPES = {"labels": "*i64", "terms": "*fp32", "scale": "*fp32", "units": "i32", "rows": "i32"}
TYPES |= dict.fromkeys(("ce_weight", "kl_weight", "tv_weight"), "fp32")
for name in ("cross_entropy", "distillation", "refinement"):
    kernel = getattr(losses, name + "_kernel")
    declared = tuning.declared()["linear_loss." + name]
    for logits, align, columns in (("*bf16", 8, 65536), ("*bf16", 8, 131072), ("*fp32", 1, 4096)):
        options = declared.default({"columns": columns}, None)
        constants = {"ALIGN": align, "HAS_SCALE": True, "DIFFERENTIATE": True, "BLOCK": options.pop("BLOCK")}
        signature = {n: "constexpr" if n in constants else TYPES.get(n, logits) for n in kernel.arg_names}
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        compiled = triton.compile(ASTSource(kernel, signature, constants, {}), target=target, options=options)
        print(name, len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 9
