"""What a full-capacity step is made of: each part run alone, forward and backward, on a micro-batch's shapes.

A part runs over all layers of the model in turn, so that every layer's weights are read from memory as in training; on
a GPU it is recorded and replayed, as training's passes are. What the parts leave of the step (gaps between kernels,
moving tokens, reading the loss) is called the rest; it is negative where torch.compile fuses across parts. All of it
runs after the timed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_essh.baselines.transformer import Transformer
from megatron_essh.benchmarks.timing import Recorded, timed
from megatron_essh.model.attention import rotary_table
from megatron_essh.model.block import normed
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.ops.linear_loss import cross_entropy
from megatron_essh.ops.selective_scan import selective_scan
from megatron_essh.training.engine import NativeEngine

WARMUP, REPEATS = 2, 5

Call = Callable[[], Tensor | tuple[Tensor, ...]]


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
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    x_BTD = torch.randn(batch, length, config.model.d_model, device=device, requires_grad=True)
    branch_BTD = torch.randn_like(x_BTD, dtype=dtype).requires_grad_()
    u_BTD = torch.randn_like(branch_BTD).requires_grad_()
    tokens = torch.randint(0, config.model.vocab_size, (2, batch, length), device=device)

    factor = torch.ones((), device=device) if device.type == "cuda" else None

    def loss() -> Tensor:
        hidden_BTD = model.final_norm(model.embedding(tokens[0]))
        labels_N, chunk = tokens[1].flatten(), config.training.loss_chunk
        return cross_entropy(hidden_BTD.flatten(0, 1), model.head_weight, labels_N, chunk=chunk, grad_scale=factor)

    calls: dict[str, list[Call]] = {"embedding, head, loss": [loss]}
    inputs = [x_BTD, branch_BTD, u_BTD]
    blocks: Sequence[Any] = list(model.blocks)
    if isinstance(model, Transformer):
        table = model.rotary(length)
        calls["attention"] = [partial(b.attention, u_BTD, table, None) for b in blocks]
        calls["feed-forward"] = [partial(b.feed_forward, u_BTD) for b in blocks]
    else:
        shape = config.model
        channels, p, m = shape.channels, shape.value_width, shape.modes
        table = rotary_table(torch.arange(length, device=device), shape.head_dim, shape.rope_base, torch.float32)
        raw_BTKX = torch.randn(batch, length, channels, p + 3 * m, device=device, dtype=dtype, requires_grad=True)
        inputs.append(raw_BTKX)
        neutral = shape.gates == "neutral"

        def mixer(part: SpectralMixer) -> Tensor:
            return part(u_BTD, channels)[0]

        def scan(part: SpectralMixer) -> Tensor:
            return selective_scan(raw_BTKX, part.tables(channels), eps=shape.eps, neutral_gates=neutral)[0]

        mixers = [b.mixer for b in blocks if b.mixer is not None]
        calls["mixer projections"] = [partial(mixer, part) for part in mixers]
        calls["scan"] = [partial(scan, part) for part in mixers]
        calls["attention"] = [partial(b.attention, u_BTD, table) for b in blocks if b.attention is not None]
        sums_LN = engine.statistics.square_sums_LN
        calls["feed-forward"] = [
            partial(b.feed_forward, u_BTD, shape.ff_width, square_sum_N=sums_N)
            for b, sums_N in zip(blocks, sums_LN, strict=True)
        ]

    def norm(part: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        return normed(x_BTD, branch_BTD, part)

    def norm_apart(part: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        stream_BTD = x_BTD + branch_BTD
        return stream_BTD, part(stream_BTD)

    norms = [part for b in blocks for part in b.children() if isinstance(part, nn.RMSNorm)]
    calls["norms, residuals"] = [
        partial(norm_apart if isinstance(model, Transformer) else norm, part) for part in norms
    ]
    return {name: found for name, found in calls.items() if found}, inputs


def _once_a_micro_batch(engine: NativeEngine) -> dict[str, Callable[[], None]]:
    calls, inputs = _calls(engine)
    runs = {name: _forward_backward(passes, inputs, engine) for name, passes in calls.items()}
    if engine.device.type != "cuda":
        return runs
    return {name: Recorded(run, engine.device) for name, run in runs.items()}


def _forward_backward(calls: list[Call], inputs: list[Tensor], engine: NativeEngine) -> Callable[[], None]:
    autocast = partial(
        torch.autocast, engine.device.type, torch.bfloat16, enabled=engine.config.training.precision == "bf16"
    )
    with autocast():
        grads = [torch.randn_like(out) for out in _tuple(calls[0]())]

    def run() -> None:
        for call in calls:
            for activations in inputs:  # their gradient moves on to the layer below; weights' gradients add up
                activations.grad = None
            with autocast():
                outs = _tuple(call())
            torch.autograd.backward(outs, grads)

    return run


def _tuple(outs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outs if isinstance(outs, tuple) else (outs,)


def _update(engine: NativeEngine) -> Callable[[], None]:
    parameters = list(engine.model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.normal_()

    def run() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, engine.config.optimizer.clip_norm)
        engine.optimizer.step()

    return run
