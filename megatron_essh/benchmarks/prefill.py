"""Taking in a long prompt: our model at a tier, and a Transformer++ beside it.

Nothing is trained. Under bf16 all weights are bf16, without autocast; the modal tables, the per-channel biases and the
spectral states stay fp32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_essh.baselines.transformer import (
    Transformer,
    matched_config,
    transformer_flops,
    transformer_parameters,
)
from megatron_essh.benchmarks.room import check_room, within_memory
from megatron_essh.benchmarks.timing import free_memory, timed, wait
from megatron_essh.benchmarks.training import ModelName
from megatron_essh.config import RunConfig
from megatron_essh.device import device_name, peak_tflops
from megatron_essh.elastic.capacity import Capacity, full_capacity, parse_capacity
from megatron_essh.inference import Engine, Request, SamplingConfig, generate_many
from megatron_essh.model.accounting import flops_per_token, parameter_counts
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.selective_scan import ModalTables

GENERATED = 128
"""Tokens of each text that is generated."""
TOKEN_BYTES = 24
"""Of a prompt's token on the host at least: in a tensor, in a list, and in a request."""


@dataclass(frozen=True)
class Prompt:
    """What is taken in, and how often it is timed."""

    batch: int
    length: int
    warmup: int
    """Untimed calls before the timed ones."""
    repeats: int


def measure_prefill(
    config: RunConfig, model: ModelName, tier: str, prompt: Prompt, device: torch.device, *, compiled: bool
) -> dict[str, Any]:
    """Time the prompt's prefill, and the time to its first token.

    Args:
        model: ours, or the Transformer++ of its full size, which has no tier. Its prefill is one forward pass; the
            keys and values that it would have to keep are not kept.
        tier: `full`, a tier (T4), or K,n.
        compiled: torch.compile the Transformer++'s blocks.

    Raises:
        UserError: no such tier, or more tokens than there is memory for.
    """
    count = prompt.batch * prompt.length
    what = f"{prompt.batch:,} x {prompt.length:,} tokens"
    check_room(what, TOKEN_BYTES * count, torch.device("cpu"))
    with within_memory(what, device):
        torch.manual_seed(config.training.seed)
        tokens = torch.randint(0, config.model.vocab_size, (prompt.batch, prompt.length))
        if model == "transformer_pp":
            found = _transformer(config, tokens, prompt, device, compiled=compiled)
        else:
            found = _essh(config, tier, tokens, prompt, device)
    free_memory(device)
    flops = count * found.pop("flops_per_token") + prompt.batch * found.pop("head_flops")
    rate = flops / (found["median_ms"] / 1e3) / 1e12
    peak = peak_tflops(device_name(device), config.training.precision)
    return {
        "model": model,
        "capacity": tier if model == "essh" else "full",
        "compiled": compiled and model == "transformer_pp",
        "precision": config.training.precision,
        "batch": prompt.batch,
        "length": prompt.length,
        **found,
        "ktok_per_s": count / found["median_ms"],
        "tflops": rate,
        "peak_tflops": peak,
        "mfu": None if peak is None else rate / peak,
    }


def _essh(config: RunConfig, tier: str, tokens: Tensor, prompt: Prompt, device: torch.device) -> dict[str, Any]:
    shape = config.model
    capacity: Capacity = full_capacity(shape) if tier == "full" else parse_capacity(tier, shape, config.elastic)
    engine = _engine(config, capacity, tokens.tolist(), prompt, device)
    free_memory(device)
    with device:
        model = LanguageModel(shape)
    set_precision(model, config.training.precision)
    given = tokens.to(device)

    def prefill(tokens_BT: Tensor) -> Tensor:
        state = model.init_state(prompt.batch, capacity, max_length=prompt.length)
        return model.prefill(tokens_BT, state, capacity)[0]

    work = flops_per_token(shape, capacity, sequence_length=prompt.length)
    state = model.init_state(1, capacity, max_length=prompt.length)
    return {
        "parameters": parameter_counts(shape, capacity).total,
        **_times(prefill, tokens, given, prompt, device),
        **engine,
        "state_mib": sum(state.nbytes()) / 2**20,
        "flops_per_token": work.projections + work.scan + work.attention,
        "head_flops": work.head,
    }


def _engine(
    config: RunConfig, capacity: Capacity, prompts: list[list[int]], prompt: Prompt, device: torch.device
) -> dict[str, Any]:
    """From prompts on the host to their first drawn tokens there, through an engine that is warm; then generating.

    The model is as `tools/generate.py` opens it: its weights are fp32, prompts run in autocast where steps are bf16.
    """
    with device:
        model = LanguageModel(config.model).requires_grad_(False)
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    most = prompt.length + GENERATED
    engine = Engine(model, capacity, slots=prompt.batch, dtype=dtype, max_length=most)
    sampling = SamplingConfig()

    def first_tokens() -> tuple[float, float]:
        """Milliseconds until the prompts are handed to the device, and until the tokens are here."""
        wait(device)
        begin = time.perf_counter()
        slots = [engine.add(tokens, sampling) for tokens in prompts]
        added = time.perf_counter()
        engine.step(slots).tokens()
        end = time.perf_counter()
        for slot in slots:
            engine.remove(slot)
        return 1e3 * (added - begin), 1e3 * (end - begin)

    def generate() -> float:
        """Milliseconds from the first step's tokens to the last one's."""
        requests = [Request(prompt=tuple(p), sampling=sampling, max_new_tokens=GENERATED) for p in prompts]
        given = generate_many(engine, requests)
        next(given)
        begin = time.perf_counter()
        for _ in given:
            pass
        return 1e3 * (time.perf_counter() - begin)

    # Warm: kernels are compiled, memory is there, prompts, steps and draws are recorded, which the second call does.
    warmup = max(2, prompt.warmup)
    added, first = zip(*[first_tokens() for _ in range(warmup + prompt.repeats)][warmup:], strict=True)
    texts = [generate() for _ in range(warmup + prompt.repeats)][warmup:]
    return {
        "engine_first_token_ms": statistics.median(first),
        "engine_first_token_all_ms": first,
        "engine_add_ms": statistics.median(added),
        "engine_recordings": engine.recordings,
        "generated": GENERATED,
        "generate_all_ms": texts,
        "generate_tokens_per_second": 1e3 * prompt.batch * (GENERATED - 1) / statistics.median(texts),
    }


def _transformer(
    config: RunConfig, tokens: Tensor, prompt: Prompt, device: torch.device, *, compiled: bool
) -> dict[str, Any]:
    shape = matched_config(config.model)
    with device:
        model = Transformer(shape)
    set_precision(model, config.training.precision)
    if compiled:
        for block in model.blocks:
            block.compile()
    given = tokens.to(device)

    def prefill(tokens_BT: Tensor) -> Tensor:
        return nn.functional.linear(model.hidden(tokens_BT)[:, -1], model.head_weight)

    work = transformer_flops(shape, sequence_length=prompt.length)
    element = model.head_weight.element_size()
    return {
        "parameters": transformer_parameters(shape).total,
        **_times(prefill, tokens, given, prompt, device),
        "state_mib": 2 * shape.n_layers * prompt.length * shape.d_model * element / 2**20,
        "flops_per_token": work.projections + work.attention,
        "head_flops": work.head,
    }


def set_precision(model: nn.Module, precision: str) -> None:
    """Weights in bf16 where the precision is that, all but the per-channel tables of spectral mixers."""
    model.requires_grad_(False)
    if precision == "bf16":
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] not in ModalTables._fields:
                parameter.data = parameter.data.bfloat16()


def _times(
    prefill: Callable[[Tensor], Tensor], tokens: Tensor, given: Tensor, prompt: Prompt, device: torch.device
) -> dict[str, Any]:
    """The prefill alone, on tokens that lie on the device; then from tokens on the host to the first token there."""

    def first_token() -> None:
        prefill(tokens.to(device)).argmax(-1).tolist()

    def alone() -> None:
        prefill(given)

    with torch.inference_mode():
        whole = timed("prefill", alone, tokens.numel(), device, prompt.warmup, prompt.repeats)
        first = timed("first token", first_token, tokens.numel(), device, prompt.warmup, prompt.repeats)
    kept = ("median_ms", "min_ms", "max_ms", "all_ms", "peak_mib")
    return {**{name: whole[name] for name in kept}, "first_token_ms": first["median_ms"]}
