"""What a full-capacity step is made of: each part run alone, forward and backward, on a micro-batch's shapes.

A part runs over all layers of the model in turn, so that every layer's weights are read from memory as in training.
What the parts leave of the step (gaps between kernels, moving tokens, reading the loss) is called the rest; it is
negative where torch.compile fuses across parts. All of it runs after the timed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_essh.baselines.transformer import Transformer
from megatron_essh.benchmarks.timing import timed
from megatron_essh.model.attention import rotary_table
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.ops.linear_loss import cross_entropy
from megatron_essh.ops.selective_scan import selective_scan
from megatron_essh.training.engine import NativeEngine

WARMUP, REPEATS = 2, 5

Call = Callable[[], Tensor]


def measure_parts(engine: NativeEngine, step_ms: float, *, compiled: bool) -> list[dict[str, Any]]:
    """Milliseconds of each part in one step of `step_ms`, and its share; the engine is used up."""
    training, device = engine.config.training, engine.device
    if compiled and isinstance(engine.model, Transformer):  # whose blocks are compiled whole
        for block in engine.model.blocks:
            for part in block.children():
                part.compile()
    micro_batches = training.global_batch // training.micro_batch
    found: dict[str, float] = {}
    for name, run in _once_a_micro_batch(engine).items():
        found[name] = micro_batches * timed(name, run, 1, device, WARMUP, REPEATS)["median_ms"]
    if "mixer projections" in found:  # timed with the scan in it
        found["mixer projections"] -= found["scan"]
    found["clip and optimizer"] = timed("", _update(engine), 1, device, WARMUP, REPEATS)["median_ms"]
    found["rest"] = step_ms - sum(found.values())
    return [{"part": name, "ms": ms, "share": ms / step_ms} for name, ms in found.items()]


def _calls(engine: NativeEngine) -> tuple[dict[str, list[Call]], list[Tensor]]:
    """The forward passes of each part, a layer each, and the activations that they take."""
    config, model, device = engine.config, engine.model, engine.device
    batch, length = config.training.micro_batch, config.data.sequence_length
    x_BTD = torch.randn(batch, length, config.model.d_model, device=device, requires_grad=True)
    tokens = torch.randint(0, config.model.vocab_size, (2, batch, length), device=device)

    def loss() -> Tensor:
        hidden_BTD = model.final_norm(model.embedding(tokens[0]))
        return cross_entropy(
            hidden_BTD.flatten(0, 1), model.head_weight, tokens[1].flatten(), chunk=config.training.loss_chunk
        )

    calls: dict[str, list[Call]] = {"embedding, head, loss": [loss]}
    inputs = [x_BTD]
    blocks: Sequence[Any] = list(model.blocks)
    if isinstance(model, Transformer):
        table = model.rotary(length)
        calls["attention"] = [partial(b.attention, x_BTD, table, None) for b in blocks]
        calls["feed-forward"] = [partial(b.feed_forward, x_BTD) for b in blocks]
    else:
        shape = config.model
        channels, p, m = shape.channels, shape.value_width, shape.modes
        table = rotary_table(torch.arange(length, device=device), shape.head_dim, shape.rope_base, torch.float32)
        dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
        raw_BTKX = torch.randn(batch, length, channels, p + 3 * m, device=device, dtype=dtype, requires_grad=True)
        inputs.append(raw_BTKX)
        neutral = shape.gates == "neutral"

        def mixer(part: SpectralMixer) -> Tensor:
            return part(x_BTD, channels)[0]

        def scan(part: SpectralMixer) -> Tensor:
            return selective_scan(raw_BTKX, part.tables(channels), eps=shape.eps, neutral_gates=neutral)[0]

        mixers = [b.mixer for b in blocks if b.mixer is not None]
        calls["mixer projections"] = [partial(mixer, part) for part in mixers]
        calls["scan"] = [partial(scan, part) for part in mixers]
        calls["attention"] = [partial(b.attention, x_BTD, table) for b in blocks if b.attention is not None]
        calls["feed-forward"] = [partial(b.feed_forward, x_BTD, shape.ff_width) for b in blocks]

    def norm(part: nn.Module) -> Tensor:
        return x_BTD + part(x_BTD)

    norms = [part for b in blocks for part in b.children() if isinstance(part, nn.RMSNorm)]
    calls["norms, residuals"] = [partial(norm, part) for part in norms]
    return {name: found for name, found in calls.items() if found}, inputs


def _once_a_micro_batch(engine: NativeEngine) -> dict[str, Callable[[], None]]:
    calls, inputs = _calls(engine)
    runs = {name: _forward_backward(passes, inputs, engine) for name, passes in calls.items()}
    if not isinstance(engine.model, Transformer):
        config = engine.config
        shape = (config.training.micro_batch, config.data.sequence_length, config.model.ff_width)
        dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
        units_BTN = torch.randn(shape, device=engine.device, dtype=dtype)

        def observe() -> None:
            for layer in range(config.model.n_layers):
                engine.statistics.observe(layer, units_BTN)

        runs["unit statistics"] = observe
    return runs


def _forward_backward(calls: list[Call], inputs: list[Tensor], engine: NativeEngine) -> Callable[[], None]:
    autocast = partial(
        torch.autocast, engine.device.type, torch.bfloat16, enabled=engine.config.training.precision == "bf16"
    )
    with autocast():
        grad = torch.randn_like(calls[0]())

    def run() -> None:
        for call in calls:
            for activations in inputs:  # their gradient moves on to the layer below; weights' gradients add up
                activations.grad = None
            with autocast():
                out = call()
            out.backward(grad)

    return run


def _update(engine: NativeEngine) -> Callable[[], None]:
    parameters = list(engine.model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, engine.config.optimizer.clip_norm)
        engine.optimizer.step()

    return run
