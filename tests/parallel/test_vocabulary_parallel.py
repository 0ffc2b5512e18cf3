"""The losses of a vocabulary that is dealt out over ranks are the losses of the whole one, on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_essh.ops.linear_loss import IGNORED, VocabularyShard, cross_entropy, distillation, refinement
from megatron_essh.parallel.interleave import Sharding


@dataclass(frozen=True)
class Case:
    """A loss at random inputs."""

    loss: str
    positions: int = 23
    width: int = 5
    vocabulary: int = 30
    chunk: int | None = 6
    ignored: float = 0.3
    grad_scale: float | None = None
    main_grad: bool = False
    bf16: bool = False
    dtype: torch.dtype = torch.float64
    spread: float = 1.0
    seed: int = 0

    def inputs(self, device: str) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """(hidden states of the loss's inputs, whole weight, what its gradient is added to, labels)."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(device, self.dtype)

        hidden = [self.spread * normal(self.positions, self.width) for _ in range(2)]
        weight, kept = normal(self.vocabulary, self.width), normal(self.vocabulary, self.width)
        labels = torch.randint(0, self.vocabulary, (self.positions,), generator=generator)
        labels[torch.rand(self.positions, generator=generator) < self.ignored] = IGNORED
        return hidden[: 1 if self.loss == "cross_entropy" else 2], weight, kept, labels.to(device)


@dataclass(frozen=True)
class Found:
    """What a loss gave: values; the gradients of hidden states and weight; what was added to the weight's main_grad."""

    values: Tensor
    hidden: list[Tensor]
    weight: Tensor


def compute(case: Case, device: str, rank: int = 0, tp: int = 1, vocabulary: VocabularyShard | None = None) -> Found:
    """The loss with this rank's part of the weight, and all that backward gives."""
    hidden, weight, kept, labels = case.inputs(device)
    sharding = Sharding(case.vocabulary)
    weight, kept = sharding.take(weight, rank, tp).clone(), sharding.take(kept, rank, tp).clone()
    for x in (*hidden, weight):
        x.requires_grad_()
    if case.main_grad:
        weight.main_grad = kept
    scale = None if case.grad_scale is None else torch.tensor(case.grad_scale, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=case.bf16):
        found = call(case.loss)(
            *hidden, weight, labels, chunk=case.chunk, grad_scale=scale, vocabulary=vocabulary
        )  # fmt: skip
    values = torch.stack([found] if isinstance(found, Tensor) else list(found))
    values[0].backward()
    if case.main_grad:
        assert weight.grad is None
    return Found(
        values.detach().cpu(),
        [x.grad.cpu() for x in hidden if x.grad is not None],
        (kept if case.main_grad else weight.grad).cpu(),
    )


def call(loss: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    if loss == "cross_entropy":
        return cross_entropy
    if loss == "distillation":
        return lambda *inputs, **options: distillation(*inputs, ce_weight=0.7, kl_weight=0.3, **options)
    return lambda *inputs, **options: refinement(*inputs, tv_weight=5.0, **options)


def own_shard() -> VocabularyShard:
    return VocabularyShard(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def found_on_a_rank(cases: list[Case], device: str = "cpu") -> list[Found]:
    shard = own_shard()
    return [compute(case, device, shard.rank, shard.tp, shard) for case in cases]


def assert_as_one_process(cases: list[Case], by_rank: list[list[Found]], tolerance: float) -> None:
    for case, *parts in zip(cases, *by_rank, strict=True):
        exact = dataclasses.replace(case, dtype=torch.float64, bf16=False, chunk=None)
        whole = compute(exact, "cpu")
        for part in parts[1:]:
            assert torch.equal(part.values, parts[0].values), case
        joined = Sharding(case.vocabulary).join([part.weight for part in parts])
        hidden = [sum(shares) for shares in zip(*(part.hidden for part in parts), strict=True)]
        assert len(hidden) == len(whole.hidden)
        for one, other in zip(
            [parts[0].values, joined, *hidden], [whole.values, whole.weight, *whole.hidden], strict=True
        ):
            error = torch.linalg.vector_norm(one.double() - other)
            assert error <= tolerance * torch.linalg.vector_norm(other), (case, float(error))


LOSSES = ("cross_entropy", "distillation", "refinement")
VARIANTS = [
    {},
    {"chunk": None, "vocabulary": 29, "seed": 1},  # no number of ranks here divides it
    {"chunk": 1, "vocabulary": 7, "seed": 2},
    {"grad_scale": 1 / 250_000, "seed": 3},
    {"main_grad": True, "seed": 4},
    {"main_grad": True, "grad_scale": 0.25, "vocabulary": 31, "seed": 5},
    {"ignored": 1.0, "seed": 6},
    {"positions": 0, "seed": 7},
    {"spread": 300.0, "vocabulary": 41, "seed": 8},  # exponentials that overflow without the largest logit
]


@pytest.mark.parametrize("world", [2, 4])
def test_values_and_gradients_are_those_of_the_whole_vocabulary(run_ranks, world):
    cases = [Case(loss, **variant) for loss in LOSSES for variant in VARIANTS]
    assert_as_one_process(cases, run_ranks(world, found_on_a_rank, cases), 1e-12)


def test_in_fp32_and_under_autocast_they_are_so_within_rounding(run_ranks):
    sizes = {"positions": 60, "width": 16, "vocabulary": 203, "chunk": 25, "grad_scale": 0.5, "dtype": torch.float32}
    for bf16, tolerance in ((False, 1e-5), (True, 0.01)):
        cases = [Case(loss, bf16=bf16, main_grad=kept, **sizes) for loss in LOSSES for kept in (False, True)]
        assert_as_one_process(cases, run_ranks(2, found_on_a_rank, cases), tolerance)


def exchanges_on_a_rank(loss: str) -> list[tuple[str, int]]:
    """(kind, numbers handed over) of every exchange of a loss over four chunks."""
    seen = []

    class Counting(VocabularyShard):
        def gather(self, own: Tensor) -> Tensor:
            seen.append(("gather", own.numel()))
            return super().gather(own)

        def sum_(self, own: Tensor) -> Tensor:
            seen.append(("sum", own.numel()))
            return super().sum_(own)

    shard = own_shard()
    case = Case(loss, positions=40, chunk=10)
    compute(case, "cpu", shard.rank, shard.tp, Counting(shard.group, shard.rank, shard.tp))
    return seen


@pytest.mark.parametrize(
    ("loss", "numbers", "rounds", "parts"),
    [("cross_entropy", 2, 1, 1), ("distillation", 4, 1, 3), ("refinement", 4, 2, 4)],
)
def test_what_is_exchanged_is_a_few_numbers_a_position(run_ranks, loss, numbers, rounds, parts):
    """The CPU's gather has one more number a position, by which all ranks know of a label that is none."""
    chunk = [("gather", (numbers + 1) * 10), ("sum", 10)][:rounds]
    assert run_ranks(2, exchanges_on_a_rank, loss) == 2 * [[*(4 * chunk), ("sum", parts)]]


def error_on_a_rank(loss: str, label: int) -> str:
    shard = own_shard()
    hidden, weight, _, labels = Case(loss, ignored=0.0).inputs("cpu")
    labels[3] = label
    with pytest.raises(IndexError) as caught:
        call(loss)(*hidden, Sharding(30).take(weight, shard.rank, shard.tp), labels, vocabulary=shard)
    return str(caught.value)


@pytest.mark.parametrize("label", [30, 31, 4000, -1, -101])
def test_a_label_outside_the_vocabulary_is_the_same_error_on_every_rank(run_ranks, label):
    errors = run_ranks(2, error_on_a_rank, "refinement", label)
    assert errors == 2 * [f"label {label} is out of the vocabulary"]


def without_gradients_on_a_rank(case: Case) -> Tensor:
    shard = own_shard()
    hidden, weight, _, labels = case.inputs("cpu")
    weight = Sharding(case.vocabulary).take(weight, shard.rank, shard.tp).requires_grad_()
    with torch.inference_mode():
        return cross_entropy(hidden[0], weight, labels, chunk=case.chunk, vocabulary=shard).clone()


def test_evaluation_has_the_cross_entropy_on_every_rank(run_ranks):
    case = Case("cross_entropy", vocabulary=33)
    for value in run_ranks(4, without_gradients_on_a_rank, case):
        torch.testing.assert_close(value, compute(case, "cpu").values[0], rtol=1e-13, atol=0)


# -- on two GPUs -----------------------------------------------------------------------------------------------------


def found_on_a_gpu(cases: list[Case]) -> list[Found]:
    return found_on_a_rank(cases, "cuda")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_on_gpus_they_are_so_within_rounding(run_ranks, bf16):
    cases = [
        Case(
            loss, positions=300, width=64, vocabulary=columns, chunk=128, grad_scale=0.5, main_grad=kept, bf16=bf16,
            dtype=torch.float32, spread=0.3,
        )
        for loss in LOSSES
        for kept in (False, True)
        for columns in (1001, 5000)
    ]  # fmt: skip
    assert_as_one_process(cases, run_ranks(2, found_on_a_gpu, cases, backend="nccl"), 0.015 if bf16 else 1e-5)


def recorded_on_a_gpu(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """(values, hidden states' and weight's gradients) of a plain pass, and of a CUDA graph's second replay."""
    shard = own_shard()
    hidden, whole, _, labels = case.inputs("cuda")
    weight = Sharding(case.vocabulary).take(whole, shard.rank, shard.tp).clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    hidden = [x.requires_grad_() for x in hidden]
    scale = torch.tensor(0.5, device="cuda")

    def run() -> Tensor:
        for x in hidden:
            x.grad = None
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            found = call(case.loss)(
                *hidden, weight, labels, chunk=case.chunk, grad_scale=scale, vocabulary=shard
            )  # fmt: skip
        values = torch.stack([found] if isinstance(found, Tensor) else list(found))
        (found if isinstance(found, Tensor) else found[0]).backward()
        return values.detach()

    def state(values: Tensor) -> list[Tensor]:
        gradients = [x.grad for x in hidden if x.grad is not None]
        return [x.clone().cpu() for x in (values, *gradients, weight.main_grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        weight.main_grad.zero_()
        plain = state(run())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = run()
    graph.replay()
    weight.main_grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    recorded = state(values)
    graph.reset()  # before the process group that it speaks through
    return plain, recorded


@pytest.mark.multi_gpu
@pytest.mark.parametrize("loss", LOSSES)
def test_a_recorded_pass_is_the_plain_one(run_ranks, loss):
    case = Case(loss, positions=256, width=64, vocabulary=3000, chunk=100, dtype=torch.float32, spread=0.3)
    for plain, recorded in run_ranks(2, recorded_on_a_gpu, case, backend="nccl"):
        for one, other in zip(recorded, plain, strict=True):
            assert torch.equal(one, other)
