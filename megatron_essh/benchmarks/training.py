"""Whole optimizer steps, on random tokens, of our model and of a parameter-matched Transformer++.

Both run through the native engine with the same loss, optimizer and precision.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from megatron_essh.baselines.transformer import (
    Transformer,
    matched_config,
    transformer_flops,
    transformer_parameters,
)
from megatron_essh.benchmarks.parts import measure_parts
from megatron_essh.benchmarks.timing import (
    free_memory,
    milliseconds,
    peak_memory_mib,
    reset_peak_memory,
)
from megatron_essh.config import RunConfig
from megatron_essh.device import device_name, peak_tflops
from megatron_essh.elastic.capacity import budget_capacity, full_capacity
from megatron_essh.elastic.distillation import MicroLoss, full_loss
from megatron_essh.elastic.plan import FULL, pretraining_plan
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import flops_per_token, parameter_counts
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training import engine as engines
from megatron_essh.training.engine import NativeEngine

ModelName = Literal["essh", "transformer_pp"]


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    model: ModelName
    capacity: str
    """`full`, a tier's name, or `elastic`, the recipe's mix after its warm-up."""
    config: RunConfig
    """The run that measures it: every step of it is of this case."""
    compiled: bool
    """Whether the blocks go through torch.compile; ours need none."""

    @property
    def parameters(self) -> int:
        """Parameters at full capacity."""
        if self.model == "transformer_pp":
            return transformer_parameters(matched_config(self.config.model)).total
        return parameter_counts(self.config.model).total

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.config.training.global_batch * self.config.data.sequence_length


@dataclass(frozen=True)
class Schedule:
    """`repeats` runs of `steps` steps, of which `first` to `last`, counted from 1, are measured."""

    steps: int
    first: int
    last: int
    repeats: int


@dataclass(frozen=True)
class TokenWork:
    """Floating-point operations that training spends on one token, forward and backward; a teacher's included."""

    weights: float
    """6 N, N all parameters that the token meets; 2 N for a teacher."""
    attention: float
    """Scores and weighted values, over the keys that a token sees."""
    scan: float
    """The scan in its recurrent form."""

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.scan


def make_case(config: RunConfig, model: ModelName, capacity: str, *, compiled: bool) -> Case:
    """The case whose every step trains `capacity`.

    Raises:
        UserError: no such tier, a mix of a config that trains none, or batches that the mix's slots do not divide.
    """
    elastic, micro = config.elastic, config.training.micro_batch
    if model == "transformer_pp" or capacity == "full":
        elastic = replace(elastic, enabled=False, slot_sequences=micro)
    elif not elastic.enabled:
        raise UserError(f"capacity {capacity}: elastic.enabled is false in this config, which trains the full one only")
    elif capacity == "elastic":
        elastic = replace(elastic, full_only_fraction=0.0)
    else:
        tiers = {f"T{i + 1}": budget for i, budget in enumerate(elastic.tiers)}
        if capacity not in tiers:
            raise UserError(f"capacity {capacity!r}: expected full or a tier, T1 to T{len(tiers)}")
        elastic = replace(
            elastic,
            training_budgets=(tiers[capacity],),
            full_share=0.0,
            full_only_fraction=0.0,
            slot_sequences=micro,
        )
    try:
        config = replace(
            config, elastic=elastic, refinement=replace(config.refinement, global_batch=elastic.slot_sequences)
        )
    except ValueError as error:
        raise UserError(f"{capacity}: {error}") from None
    return Case(model, capacity, config, compiled)


def with_batches(
    config: RunConfig, micro_batch: int | None, accumulation: int | None, replicas: int = 1
) -> RunConfig:  # fmt: skip
    """`config` with steps of `accumulation` micro-batches of `micro_batch` sequences on each of `replicas`; None leaves
    the config's."""
    training = config.training
    micro = micro_batch or training.micro_batch
    count = accumulation * replicas if accumulation else max(1, training.global_batch // micro)
    if (micro, micro * count) == (training.micro_batch, training.global_batch):
        return config
    slot = config.elastic.slot_sequences
    if slot % micro or micro * count % slot:  # too few sequences for the config's slots, or cut across them
        slot = micro
    return replace(
        config,
        training=replace(training, micro_batch=micro, global_batch=micro * count),
        data=replace(config.data, batch_ramp=None),
        elastic=replace(config.elastic, slot_sequences=slot),
        refinement=replace(config.refinement, global_batch=slot),
    )


def token_work(case: Case, schedule: Schedule) -> TokenWork:
    """A token's operations, averaged over the measured steps' plans."""
    config, length = case.config, case.config.data.sequence_length
    if case.model == "transformer_pp":
        matched = matched_config(config.model)
        flops = transformer_flops(matched, sequence_length=length)
        return TokenWork(6.0 * transformer_parameters(matched).total, 3.0 * flops.attention, 0.0)
    slots: list[TokenWork] = []
    for step in range(schedule.first - 1, schedule.last):
        for budget in pretraining_plan(config, step):
            full = full_capacity(config.model)
            passes = [(3, full if budget == FULL else budget_capacity(config.model, config.elastic, budget))]
            if budget != FULL and config.elastic.kl_weight:
                passes.append((1, full))  # the teacher's forward pass
            flops_of = [(n, flops_per_token(config.model, c, sequence_length=length)) for n, c in passes]
            slots.append(
                TokenWork(
                    sum(2.0 * n * parameter_counts(config.model, c).total for n, c in passes),
                    sum(float(n * f.attention) for n, f in flops_of),
                    sum(float(n * f.scan) for n, f in flops_of),
                )
            )
    return TokenWork(*(statistics.fmean(getattr(s, part) for s in slots) for part in ("weights", "attention", "scan")))


class PlainEngine(NativeEngine):
    """Trains a model that has one capacity: no statistics of feed-forward units, since nothing orders them."""

    def _loss(
        self, inputs: Tensor, labels: Tensor, documents: Tensor | None, budget: int, grad_scale: Tensor | None
    ) -> MicroLoss:
        return full_loss(self.model, self.config, inputs, labels, documents, None, grad_scale=grad_scale)


def build_engine(case: Case, place: Mesh | torch.device) -> NativeEngine:
    """The case's engine over a freshly drawn model, on one device or on a mesh.

    Raises:
        UserError: a Transformer++ on a mesh that would cut it.
    """
    mesh = place if isinstance(place, Mesh) else Mesh.single(place)
    if case.model == "transformer_pp" and mesh.tp > 1:
        raise UserError(f"parallel.tensor {mesh.tp}: the Transformer++ is not cut; set parallel.tensor=1")
    torch.manual_seed(case.config.training.seed)
    device = mesh.device
    with device:
        model: nn.Module
        if case.model == "transformer_pp":
            model = Transformer(matched_config(case.config.model))
        else:
            model = LanguageModel(case.config.model)
    if case.compiled:
        for block in cast(list[nn.Module], model.blocks):
            block.compile()
    # The engine and the loss ask of a model what both of them have: hidden, head_weight and named parameters.
    trained = cast(LanguageModel, model)
    if case.model == "transformer_pp":
        return PlainEngine(trained, case.config, "pretrain", mesh, eod=0)
    return engines.build_engine(trained, case.config, "pretrain", mesh, eod=0)


def measure_training(
    case: Case, place: Mesh | torch.device, schedule: Schedule, *, parts: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time the case's steps: the median over the runs of the mean over a run's measured steps.

    Args:
        place: a device, or a mesh, all of whose ranks call this.
        parts: also time the step's parts, after it (full capacity on one device only).
        say: is given progress lines.
    """
    config = case.config
    mesh = place if isinstance(place, Mesh) else Mesh.single(place)
    device = mesh.device
    engine = build_engine(case, mesh)
    reset_peak_memory(device)  # before passes are recorded: a replay allocates nothing
    meet_every_capacity(engine)
    runs: list[list[float]] = []
    for run in range(schedule.repeats):
        times = []
        for step in range(schedule.steps):
            shape = (len(engine.rows(step)), config.data.sequence_length + 1)
            tokens = torch.randint(0, config.model.vocab_size, shape)
            times.append(milliseconds(partial(engine.train_step, step, tokens), device))
        runs.append(times)
        mean = statistics.fmean(times[schedule.first - 1 : schedule.last])
        say(f"  run {run + 1} of {schedule.repeats}: {case.tokens / mean:,.1f} ktok/s, {sum(times) / 1e3:,.1f} s")
    means = [statistics.fmean(times[schedule.first - 1 : schedule.last]) for times in runs]
    step_ms = statistics.median(means)
    peak_mib = peak_memory_mib(device)
    work = token_work(case, schedule)
    rate = case.tokens / step_ms * 1e3 / 1e12  # tokens a second, per TFLOP
    peak = peak_tflops(device_name(device), config.training.precision)
    full = case.capacity == "full"
    figures = {
        "model": case.model,
        "capacity": case.capacity,
        "compiled": case.compiled,
        "parameters": case.parameters,
        "micro_batch": config.training.micro_batch,
        "accumulation": config.training.global_batch // config.training.micro_batch,
        "sequence_length": config.data.sequence_length,
        **asdict(schedule),
        "ms_per_step": step_ms,
        "run_ms_per_step": means,
        "all_ms": runs,
        "ktok_per_s": case.tokens / step_ms,
        "tflops_6n": work.weights * rate,
        "tflops_attention": work.attention * rate,
        "tflops_scan": work.scan * rate,
        "peak_tflops": peak,
        "mfu": None if peak is None else work.total * rate / (peak * mesh.world),
        "layout": {"tp": mesh.tp, "dp": mesh.dp, **asdict(config.parallel)},
        "peak_mib": peak_mib,
        "parts": measure_parts(engine, step_ms, compiled=case.compiled) if parts and full and mesh.world == 1 else [],
    }
    del engine
    free_memory(device)
    return figures


def meet_every_capacity(engine: NativeEngine) -> None:
    """Run every capacity's pass until it is recorded, as a long run has done after its first steps."""
    config = engine.config
    if engine.device.type != "cuda" or not config.elastic.enabled:
        return
    shape = (config.elastic.slot_sequences, config.data.sequence_length + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape)
    for budget in engine.capacities:
        if budget < config.elastic.budget_denominator:  # the plan calls the others full
            for _ in range(2):  # a slot may be one micro-batch, and the second pass is the one that is recorded
                engine.forward_backward(tokens, [budget] * engine.mesh.dp)
    engine.optimizer.zero_grad(set_to_none=False)


def ratios(figures: list[dict[str, Any]]) -> dict[str, float]:
    """Speed (tokens/s) of ours at full capacity over the Transformer++'s, and of every other case over our full one."""
    speed = {(f["model"], f["capacity"]): f["ktok_per_s"] for f in figures}
    found = {}
    ours, theirs = speed.get(("essh", "full")), speed.get(("transformer_pp", "full"))
    for (model, capacity), value in speed.items():
        if model == "essh" and theirs:
            found[f"essh {capacity} / transformer_pp"] = value / theirs
        if model == "essh" and capacity != "full" and ours:
            found[f"essh {capacity} / essh full"] = value / ours
    return found
