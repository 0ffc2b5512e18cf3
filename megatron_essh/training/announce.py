"""What a training command tells its user before the first step, at a validation and at the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.elastic.plan import FULL, budget_label
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.training.engine import NativeEngine
from megatron_essh.training.metrics import perplexity, table
from megatron_essh.training.run_data import RunData
from megatron_essh.training.run_folder import RunFolder


def announce_start(config: RunConfig, engine: NativeEngine, data: RunData, folder: RunFolder, begin: str) -> None:
    """Print the model, its capacities, layout, data, steps, and in `begin`'s words where the run begins."""
    model, training = config.model, config.training
    dataset, schedule, length = data.loader.dataset, data.loader.schedule, config.data.sequence_length
    all_tokens = schedule.samples_before(engine.steps) * length
    sizes = [stage.batch for stage in schedule.stages if stage.first_step < engine.steps]
    if len(sizes) == 1:
        steps = f"{sizes[0]} x {length} = {sizes[0] * length:,} tokens"
    else:
        steps = f"{sizes[0]} to {sizes[-1]} x {length} tokens"
    if data.validation:
        count = sum(batch.size - len(batch) for batch in data.validation)
        validation = f"validation: {data.validation_name}, {count:,} tokens"
    else:
        validation = "no validation (data.validation is not set)"
    lines = [
        f"{engine.stage}: {parameter_counts(model).total:,} parameters, width {model.d_model}, "
        f"{len(model.spectral_layers)} spectral and {len(model.attention_layers)} attention layers, "
        f"vocabulary {model.vocab_size:,}",
        "capacities in training:",
        capacity_table(config, training_capacities(config, engine)),
        f"layout: {_layout(engine)}, {training.precision}",
        f"data: {dataset.prefix}, {dataset.tokens:,} tokens, {all_tokens / dataset.tokens:.2f} epochs; {validation}",
        f"steps: {engine.steps:,} of {steps} in micro-batches of {training.micro_batch}, {all_tokens:,} tokens in all",
        f"output: {folder.path}",
        begin,
    ]
    print("\n".join(lines), flush=True)


def announce_end(folder: RunFolder, headline: str) -> None:
    """Print how the run ended and where its outputs lie."""
    lines = [
        headline,
        f"  checkpoints  {folder.checkpoints}",
        f"  config       {folder.config}",
        f"  metrics      {folder.metrics}",
        f"  TensorBoard  {folder.tensorboard}",
    ]
    print("\n".join(lines), flush=True)


def training_capacities(config: RunConfig, engine: NativeEngine) -> dict[str, Capacity]:
    """The capacities that the engine's plans draw from, by label, the full one first."""
    budgets = [b for b in engine.capacities if FULL < b < config.elastic.budget_denominator]
    if engine.stage == "pretrain" and not config.elastic.enabled:
        budgets = []
    return {budget_label(b, config.elastic): engine.capacities[b] for b in [FULL, *sorted(budgets, reverse=True)]}


def capacity_table(config: RunConfig, capacities: Mapping[str, Capacity]) -> str:
    """Channels, feed-forward width and parameters of each capacity."""
    rows = [[label, *_shape(config, capacity)] for label, capacity in capacities.items()]
    return table(["capacity", "channels", "ff width", "parameters"], rows)


def validation_table(config: RunConfig, capacities: Mapping[str, Capacity], loss_by_tier: Mapping[str, float]) -> str:
    """Loss and perplexity of each tier beside its size."""
    rows = [
        [tier, *_shape(config, capacities[tier]), f"{loss:.4f}", perplexity(loss)]
        for tier, loss in loss_by_tier.items()
    ]
    return table(["tier", "channels", "ff width", "parameters", "loss", "perplexity"], rows)


def _shape(config: RunConfig, capacity: Capacity) -> list[str]:
    total = parameter_counts(config.model, capacity).total
    return [str(capacity.channels), str(capacity.ff_width), f"{total:,}"]


def _layout(engine: NativeEngine) -> str:
    mesh = engine.mesh
    if mesh.world == 1:
        return f"1 process on {_device_name(engine.device)}"
    split = " with positions shared" if engine.config.parallel.sequence_parallel else ""
    parallel = engine.config.parallel
    dealt = f" under DeepSpeed, ZeRO {parallel.zero_stage}," if parallel.engine == "deepspeed" else ","
    return (
        f"{mesh.world} processes, tensor {mesh.tp}{split} x data {mesh.dp}{dealt} each on {_device_name(engine.device)}"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    return f"the CPU, threads: {torch.get_num_threads()}"
