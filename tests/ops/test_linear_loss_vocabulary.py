"""The Triton losses of a vocabulary dealt out over ranks against those of the whole: pretend-ranks of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from megatron_essh.ops import tuning  # noqa: E402
from megatron_essh.ops.linear_loss import (  # noqa: E402
    IGNORED,
    VocabularyShard,
    cross_entropy,
    distillation,
    reference,
    refinement,
    triton,
)
from megatron_essh.ops.linear_loss.chunked import chunked_loss  # noqa: E402
from megatron_essh.parallel.interleave import Sharding  # noqa: E402

# The interpreter takes a loop's end from a NumPy array of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

LOSSES = ("cross_entropy", "distillation", "refinement")
WEIGHTS = {"cross_entropy": (), "distillation": (1.5, 0.3), "refinement": (5.0,)}
PARTS = {"cross_entropy": 1, "distillation": 3, "refinement": 4}
INPUTS = {"cross_entropy": 1, "distillation": 2, "refinement": 2}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.006}
SMALL_BLOCKS = {f"linear_loss.{name}": {"BLOCK": 1024, "num_warps": 4, "num_stages": 1} for name in LOSSES}


# -- ranks of one process --------------------------------------------------------------------------------------------

Result = TypeVar("Result")


class Meeting:
    """Threads that run in turn, each until it needs the others: neither interpreter nor stream sees two at once."""

    def __init__(self, tp: int) -> None:
        self.turn = threading.Lock()
        self._all = threading.Barrier(tp)
        self._given: list[Tensor] = [torch.empty(0)] * tp

    def exchange(self, rank: int, own: Tensor) -> Tensor:
        """[tp, ..]"""
        self._given[rank] = own.clone()
        self._wait()
        found = torch.stack(self._given)
        self._wait()
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._all.wait(60)
        finally:
            self.turn.acquire()

    def give_up(self) -> None:
        self._all.abort()


@dataclass(frozen=True)
class PretendShard(VocabularyShard):
    meeting: Meeting = field(kw_only=True)

    def gather(self, own: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, own)

    def sum_(self, own: Tensor) -> Tensor:
        return own.copy_(self.meeting.exchange(self.rank, own).sum(0))


def together(tp: int, function: Callable[[PretendShard], Result]) -> list[Result]:
    """What `function` returns on each of tp ranks."""
    meeting = Meeting(tp)

    def one(rank: int) -> Result:
        with meeting.turn:
            try:
                return function(PretendShard(None, rank, tp, meeting=meeting))  # type: ignore[arg-type]
            except BaseException:
                meeting.give_up()
                raise

    with ThreadPoolExecutor(tp) as pool:
        waiting = [pool.submit(one, rank) for rank in range(tp)]
    failures = [error for error in (one.exception() for one in waiting) if error is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [one.result() for one in waiting]


# -- logits ----------------------------------------------------------------------------------------------------------


def random_logits(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Two distributions' logits, unlike in level, and labels: the first and the last entry, and one in four ignored."""
    generator = torch.Generator().manual_seed(columns)
    logits = [3 * torch.randn((rows, columns), generator=generator) + level for level in (2.0, -5.0)]
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[0], labels[-1] = 0, columns - 1
    labels[1::4] = IGNORED
    return [z.to(DEVICE, dtype) for z in logits], labels.to(DEVICE)


def of_whole(
    module, name: str, logits: list[Tensor], labels: Tensor, scale: float | None
) -> tuple[Tensor, list[Tensor]]:
    """(sums [1 + parts], gradients) by the module's loss of copies of the logits."""
    own = [z.clone() for z in logits[: INPUTS[name]]]
    exact = torch.float64 if own[0].dtype == torch.float64 else torch.float32
    sums = torch.zeros(PARTS[name], dtype=exact, device=labels.device)
    factor = None if scale is None else torch.tensor(scale, dtype=exact, device=DEVICE)
    return sums, list(getattr(module, name)(*WEIGHTS[name])(own, labels, sums, factor, True))


def of_ranks(
    name: str, logits: list[Tensor], labels: Tensor, tp: int, scale: float | None = None, differentiate: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """(sums, gradients) that the ranks' shares and columns make, each from its columns of the logits."""
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)

    def one(shard: PretendShard) -> tuple[Tensor, list[Tensor]]:
        own = [z[:, shard.rank :: tp].clone() for z in logits[: INPUTS[name]]]
        sums = torch.zeros(PARTS[name], device=DEVICE)
        found = getattr(triton, name)(*WEIGHTS[name], shard)(own, labels, sums, factor, differentiate)
        assert differentiate or not found
        return sums, list(own)  # a loss leaves gradients where logits were

    by_rank = together(tp, one)
    sums = torch.stack([sums for sums, _ in by_rank]).sum(0)
    joined = []
    for parts in zip(*(own for _, own in by_rank), strict=True):
        whole = torch.empty_like(logits[0])
        for rank, part in enumerate(parts):
            whole[:, rank::tp] = part
        joined.append(whole)
    given = {"cross_entropy": 1, "distillation": 1, "refinement": 2}[name] if differentiate else len(joined)
    return sums, joined[:given]


def relative_error(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other.double()))


def assert_as_the_whole(name: str, logits: list[Tensor], labels: Tensor, tp: int, scale: float | None = None) -> None:
    """Within rounding of the single launch; and within the same tolerance as that of the definition in fp64."""
    dtype = logits[0].dtype
    sums, gradients = of_ranks(name, logits, labels, tp, scale)
    exact_sums, exact = of_whole(reference, name, [z.double() for z in logits], labels, scale)
    for expected_sums, expected, tolerance in (
        (*of_whole(triton, name, logits, labels, scale), 1e-6 if dtype == torch.float32 else 0.001),
        (exact_sums, exact, TOLERANCE[dtype]),
    ):
        assert ((sums - expected_sums).abs() <= 1e-5 * expected_sums.abs()).all()
        for one, other in zip(gradients, expected, strict=False):
            assert one.dtype == dtype
            assert (one[labels == IGNORED] == 0).all()
            assert relative_error(one, other) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "tp"), [(7, 4), (50, 2), (2051, 2), (4097, 3)])
@pytest.mark.parametrize("name", LOSSES)
def test_the_ranks_columns_make_what_the_single_launch_makes(name, columns, tp, dtype):
    with tuning.overriding(SMALL_BLOCKS):
        assert_as_the_whole(name, *random_logits(6, columns, dtype), tp)


@pytest.mark.parametrize("name", LOSSES)
def test_the_factor_is_on_the_gradients_and_not_on_the_values(name):
    for dtype in (torch.float32, torch.bfloat16):
        assert_as_the_whole(name, *random_logits(5, 81, dtype), 2, scale=4e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_the_largest_logit_may_be_another_ranks(name):
    """By so much that all exponentials of the other ranks are nothing beside it."""
    logits, labels = random_logits(5, 90)
    logits = [300 * z for z in logits]
    logits[0][:, 41] = 30_000.0
    assert_as_the_whole(name, logits, labels, 3)


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_positions_may_hold_anything(name):
    logits, labels = random_logits(6, 90)
    spoilt = [z.clone() for z in logits]
    for z in spoilt:
        z[labels == IGNORED] = float("nan")
    (sums, gradients), (other_sums, other_gradients) = (of_ranks(name, z, labels, 2) for z in (logits, spoilt))
    for one, other in zip([sums, *gradients], [other_sums, *other_gradients], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("label", [90, 91, -1, -101, 2**33 + 3, 2**33 + IGNORED])
@pytest.mark.parametrize("name", LOSSES)
def test_a_label_outside_the_vocabulary_makes_its_position_nan_on_every_rank(name, label):
    logits, labels = random_logits(6, 90)
    labels[2] = label
    sums, gradients = of_ranks(name, logits, labels, 2)
    assert sums[0].isnan()
    for gradient in gradients:
        assert gradient[2].isnan().all()
        assert gradient[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_without_gradients_the_values_are_the_same_and_the_logits_stay(name):
    logits, labels = random_logits(6, 150)
    expected, _ = of_ranks(name, logits, labels, 2)
    sums, left = of_ranks(name, logits, labels, 2, differentiate=False)
    assert torch.equal(sums, expected)
    assert all(torch.equal(one, other) for one, other in zip(left, logits, strict=False))


@pytest.mark.parametrize("name", LOSSES)
def test_results_are_the_same_bits_every_time(name):
    logits, labels = random_logits(9, 210, torch.bfloat16)
    (sums, gradients), (other_sums, other_gradients) = (of_ranks(name, logits, labels, 2) for _ in range(2))
    for one, other in zip([sums, *gradients], [other_sums, *other_gradients], strict=True):
        assert torch.equal(one, other)


# -- from hidden states ----------------------------------------------------------------------------------------------


def random_hidden(positions: int, width: int, columns: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(columns)
    inputs = [torch.randn((n, width), generator=generator) for n in (positions, positions, columns)]
    inputs[2] *= 2 / width**0.5
    labels = torch.randint(0, columns, (positions,), generator=generator)
    labels[1::4] = IGNORED
    return [x.to(DEVICE) for x in inputs], labels.to(DEVICE)


def leaves(name: str, inputs: list[Tensor], shard: VocabularyShard | None) -> tuple[list[Tensor], Tensor]:
    """(hidden states, this rank's part of the weight)."""
    *hidden, weight = (x.clone() for x in inputs)
    if shard is not None:
        weight = Sharding(len(weight)).take(weight, shard.rank, shard.tp)
    hidden = [x.requires_grad_() for x in hidden[: INPUTS[name]]]
    if name == "distillation":
        hidden[1] = hidden[1].detach()
    return hidden, weight.requires_grad_()


def joined(by_rank: list[tuple[list[Tensor], list[Tensor], Tensor]]) -> list[Tensor]:
    """Values, hidden states' gradients and weight's gradient, from every rank's."""
    for values, _, _ in by_rank:
        assert all(torch.equal(one, other) for one, other in zip(values, by_rank[0][0], strict=True))
    hidden = [torch.stack(shares).sum(0) for shares in zip(*(shares for _, shares, _ in by_rank), strict=True)]
    parts = [part for _, _, part in by_rank]
    return [*by_rank[0][0], *hidden, Sharding(sum(len(part) for part in parts)).join(parts)]


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_in_chunks_from_hidden_states_they_follow_the_definition(name, chunk):
    inputs, labels = random_hidden(10, 6, 51)

    def one(module, inputs: list[Tensor], shard: VocabularyShard | None):
        hidden, weight = leaves(name, inputs, shard)
        loss = getattr(module, name)(*WEIGHTS[name], shard)
        values = chunked_loss(loss, PARTS[name] - 1, chunk, labels, None, weight, *hidden, vocabulary=shard)
        values[0].backward()
        return [x.detach() for x in values], [x.grad for x in hidden if x.requires_grad], weight.grad

    found = joined(together(2, lambda shard: one(triton, inputs, shard)))
    expected = joined([one(reference, [x.double() for x in inputs], None)])
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(ours, theirs) <= 1e-5, number


# -- on a GPU alone --------------------------------------------------------------------------------------------------

PUBLIC = {
    "cross_entropy": cross_entropy,
    "distillation": lambda *inputs, **options: distillation(*inputs, ce_weight=1.5, kl_weight=0.3, **options),
    "refinement": lambda *inputs, **options: refinement(*inputs, tv_weight=5.0, **options),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("columns", "tp"), [(1023, 2), (4097, 3), (50_304, 2), (50_304, 4), (128_256, 2), (128_256, 8)]
)
@pytest.mark.parametrize("name", LOSSES)
def test_every_size_of_vocabulary(name, columns, tp, dtype):
    assert_as_the_whole(name, *random_logits(70, columns, dtype), tp)
    assert_as_the_whole(name, *random_logits(9, columns, dtype), tp, scale=4e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_under_autocast_they_are_as_near_to_the_definition_as_the_whole_is(name, tp, kept):
    """Inputs rounded as autocast rounds them; logits are rounded to bf16, and the hidden states' gradients are."""
    inputs, labels = random_hidden(1000, 64, 5001)
    factor = 1 / 1000

    def one(shard: VocabularyShard | None):
        hidden, weight = leaves(name, inputs, shard)
        if kept:
            weight.main_grad = torch.zeros_like(weight)
        scale = torch.tensor(factor, device=DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            values = PUBLIC[name](*hidden, weight, labels, chunk=300, grad_scale=scale, vocabulary=shard)
        values = [values] if isinstance(values, Tensor) else values
        values[0].backward()
        gradient = weight.main_grad if kept else weight.grad
        return [x.detach() for x in values], [x.grad for x in hidden if x.requires_grad], gradient

    hidden, weight = leaves(name, [x.bfloat16().double() for x in inputs], None)
    exact = PUBLIC[name](*hidden, weight, labels, chunk=None)
    exact = [exact] if isinstance(exact, Tensor) else exact
    exact[0].backward()
    gradients = [factor * x.grad for x in (*hidden, weight) if x.requires_grad]
    found, whole = joined(together(tp, one)), joined([one(None)])
    for number, (ours, theirs, right) in enumerate(zip(found, whole, [*exact, *gradients], strict=True)):
        allowed = max(1.3 * relative_error(theirs, right), 1e-5)
        assert relative_error(ours, right.detach()) <= allowed, (number, allowed)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    rows, columns = 34_000, 64_128
    assert rows * columns > 2**31
    logits = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (rows,), device=DEVICE)

    def last(logits: Tensor, labels: Tensor) -> Tensor:
        """The last rows' gradients of the only rank."""

        def one(shard: PretendShard) -> Tensor:
            sums = torch.zeros(1, device=DEVICE)
            (gradient,) = triton.cross_entropy(shard)([logits], labels, sums, None, True)
            return gradient[-3:].clone()

        return together(1, one)[0]

    expected = last(logits[-3:].clone(), labels[-3:])
    assert torch.equal(last(logits, labels), expected)


# -- ahead of time ---------------------------------------------------------------------------------------------------

COMPILE_ALL = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_essh.ops import tuning
from megatron_essh.ops.linear_loss import triton as _, triton_vocabulary as losses

TYPES = {"labels": "*i64", "units": "i32", "rows": "i32", "rank": "i32"}
TYPES |= dict.fromkeys(("statistics", "terms", "pulls", "scale"), "*fp32")
TYPES |= dict.fromkeys(("ce_weight", "kl_weight", "tv_weight"), "fp32")
OPTIONS = {"distillation": "distillation", "variation": "refinement", "refinement": "refinement"}
for name in ("statistics", "local_cross_entropy", "local_distillation", "local_variation", "local_refinement"):
    kernel = getattr(losses, name + "_kernel")
    declared = tuning.declared()["linear_loss." + OPTIONS.get(name.removeprefix("local_"), "cross_entropy")]
    for logits, align, columns, tp in (("*bf16", 8, 65536, 2), ("*bf16", 8, 32768, 8), ("*fp32", 1, 4096, 3)):
        options = declared.default({"columns": columns}, None)
        known = {"ALIGN": align, "TP": tp, "HAS_SCALE": True, "DIFFERENTIATE": True, "BLOCK": options.pop("BLOCK")}
        constants = {n: value for n, value in known.items() if n in kernel.arg_names}
        signature = {n: "constexpr" if n in constants else TYPES.get(n, logits) for n in kernel.arg_names}
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        compiled = triton.compile(ASTSource(kernel, signature, constants, {}), target=target, options=options)
        print(name, len(compiled.asm["cubin"]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_ahead_of_time(compile_ahead):
    assert len(compile_ahead(COMPILE_ALL)) == 15
