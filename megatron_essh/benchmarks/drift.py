"""Decode steps beside the training forward, position by position: how far their logits are off, and whether it grows.

The truth is the fp32 forward over the whole sequence, as in training: window attention, chunked scan. The bf16 forward
(autocast, as in training) differs from it by what bf16 rounds: that is the noise which bf16 steps are held to. Steps
begin after a short prefill and are given the sequence's own tokens.

An error is the root mean square of the logits' difference over that of the true logits, over sequences and vocabulary.
No more than a block of positions' logits is there at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.benchmarks.decoding import QUANTIZED, Weights, activation_dtype
from megatron_essh.benchmarks.room import check_room, within_memory
from megatron_essh.benchmarks.timing import Recorded, free_memory
from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity, parse_capacity
from megatron_essh.errors import UserError
from megatron_essh.inference.packing import new_decode_state, pack_model, put
from megatron_essh.inference.step import StepBuffers, run
from megatron_essh.model.attention import WindowAttention
from megatron_essh.model.block import Block
from megatron_essh.model.language_model import LanguageModel

FORWARD = "bf16 forward"
"""The line of the noise; the others are named after the weights of the steps."""
PROMPT = 64
"""Tokens that prefill takes in, if the window is more than that."""
AFTER = 4096
"""Tokens past the window."""
LEAST_AFTER = 32
"""Fewer than these say nothing of a drift."""
FORWARD_TOKENS = 32_768
"""Tokens of whole sequences in one forward pass; one sequence at least."""
BLOCK_ELEMENTS = 1 << 26
"""Logits that are compared at a time; one position of every sequence at least."""
BINS = 96
"""Points of a line in the figures and the plot."""
MOST_GROWTH = 1.25
"""Growth of the error from the first to the last quarter past the window that is called a drift."""
MOST_NOISE = 1.5
"""Times the bf16 forward's error that the error of bf16 steps may be."""
FP32_ERROR = 1e-4
"""The largest error of a position in fp32."""

CLOCK_BIAS = (-3.0, -9.0)
"""Clock biases of a channel's first and last mode: memories of 20 to 8,000 tokens, the spectral bank permitting."""
MIXER_SCALE = 1 / 8
"""On the output of spectral layers, which the bank's readouts make that much larger than their input."""
ATTENTION_SCALE = 1.6
"""On queries, keys and values: scores of deviation 2.5, so that a query sees a few keys and not a mean of all."""


@dataclass(frozen=True)
class DriftCase:
    """One panel of the plot."""

    tier: str
    """`full`, a tier (T4), or K,n."""
    batch: int
    length: int
    """Tokens of each sequence."""
    prompt: int
    """Of these, how many prefill takes in; steps take the rest."""


@dataclass(frozen=True)
class Verdict:
    """What a line does past the window."""

    error: float
    """Over all of its positions past the window."""
    highest: float
    """Of one position, the prompt's end and after."""
    last_to_first: float
    """Error over the last quarter of the positions past the window, over that of the first."""
    slope: float
    """Of the error's logarithm, a thousand positions; by least squares."""
    slope_deviation: float
    """Standard deviation of the slope, from the residuals."""
    over_noise: float | None
    """Error over the bf16 forward's; None for that itself, and for fp32."""
    growth: float
    """`last_to_first`; of steps in bf16 or fewer bits, over that of the bf16 forward."""
    drifts: bool
    """Whether `growth` is more than `MOST_GROWTH`."""
    near: bool | None
    """bf16 within `MOST_NOISE` of the forward's error, fp32 within `FP32_ERROR`; None for all others."""


def drift_cases(
    config: RunConfig, tiers: Sequence[str], batches: Sequence[int], length: int | None, prompt: int | None
) -> list[DriftCase]:
    """Every tier with every batch.

    Args:
        length: None: `AFTER` tokens past the window.
        prompt: None: `PROMPT`, or half a window if that is less.

    Raises:
        UserError: too few tokens past the window, or no prompt before it.
    """
    window = _window(config)
    reach = config.data.sequence_length if window is None else window
    prompt = max(1, min(PROMPT, reach // 2)) if prompt is None else prompt
    begin = prompt if window is None else max(window, prompt)
    length = begin + AFTER if length is None else length
    if prompt < 1:
        raise UserError("--context 0: drift takes in at least 1 token before its steps")
    if length < begin + LEAST_AFTER:
        raise UserError(
            f"--length {length}: steps must go on for {LEAST_AFTER} tokens past the window and the prompt, "
            f"to {begin + LEAST_AFTER} or more"
        )
    return [DriftCase(tier, batch, length, prompt) for tier in tiers for batch in batches]


def _window(config: RunConfig) -> int | None:
    """Positions after which a ring is full; None where there is none that could be."""
    return config.model.window if config.model.attention_layers else None


@torch.no_grad()
def strengthen(model: LanguageModel, seed: int) -> None:
    """Random weights, in place, with which every term shows in the logits, unlike those that training starts from.

    Products have standard deviation inputs^-1/2, those of gates and clocks too, but for `MIXER_SCALE` and
    `ATTENTION_SCALE`: each branch then adds about as much to the residual stream as the embedding (deviation 1) is.
    Clocks run from fast to slow (`CLOCK_BIAS`), values are half normalised (beta 1/2). Decays, angles and readouts stay
    the bank's.
    """
    generator = torch.Generator(model.device).manual_seed(seed)

    def draw(weight: Tensor, deviation: float, mean: float = 0.0) -> None:
        weight.normal_(mean, deviation, generator=generator)

    config = model.config
    draw(model.embedding.weight, 1.0)
    draw(model.final_norm.weight, 0.1, 1.0)
    for block in model.blocks:
        assert isinstance(block, Block)
        draw(block.mixer_norm.weight, 0.1, 1.0)
        draw(block.ff_norm.weight, 0.1, 1.0)
        draw(block.feed_forward.gate_up, config.d_model**-0.5)
        draw(block.feed_forward.down, config.ff_width**-0.5)
        if block.mixer is not None:
            draw(block.mixer.in_proj, config.d_model**-0.5)
            # The output is scaled by K^-1/2 besides.
            draw(block.mixer.out_proj, MIXER_SCALE * config.value_width**-0.5)
            draw(block.mixer.write_bias, 0.5)
            draw(block.mixer.read_bias, 0.5)
            block.mixer.clock_bias.copy_(torch.linspace(*CLOCK_BIAS, config.modes).expand(config.channels, -1))
            block.mixer.beta.fill_(0.5)
        else:
            assert isinstance(block.attention, WindowAttention)
            draw(block.attention.qkv, ATTENTION_SCALE * config.d_model**-0.5)
            draw(block.attention.out_proj, config.d_model**-0.5)


@torch.no_grad()
def measure_drift(
    model: LanguageModel,
    config: RunConfig,
    cases: Sequence[DriftCase],
    weights: Sequence[Weights] = ("bf16", "fp32"),
    *,
    say: Callable[[str], object] = print,
) -> list[dict[str, Any]]:
    """Errors by position of the bf16 forward and of steps with each kind of weights, and what they come to.

    Args:
        model: fp32; trained, or strengthened.
        say: told before a case begins.

    Raises:
        UserError: no such tier, more tokens than there is memory for, or logits that are not finite.
    """
    for case in cases:
        check_room(_named(case), case.batch * case.length * _token_bytes(config), model.device)
    rows = []
    for case in cases:
        say(f"{_named(case)}, from {case.prompt:,} on by steps")
        capacity = parse_capacity(case.tier, config.model, config.elastic)
        with within_memory(_named(case), model.device):
            rows.append(_measure(model, config, case, capacity, weights))
        free_memory(model.device)
    return rows


def _named(case: DriftCase) -> str:
    return f"{case.tier}: {case.batch:,} x {case.length:,} tokens"


def _token_bytes(config: RunConfig) -> int:
    """Of a token at least: its id, its hidden state in fp32, and the one in bf16."""
    return 8 + (4 + 2) * config.model.d_model


def _measure(
    model: LanguageModel, config: RunConfig, case: DriftCase, capacity: Capacity, kinds: Sequence[Weights]
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(config.training.seed)
    tokens_BT = torch.randint(0, config.model.vocab_size, (case.batch, case.length), generator=generator)
    tokens_BT = tokens_BT.to(model.device)
    truth = _Truth(_hidden(model, tokens_BT, capacity, exact=True), model.head_weight.float(), case.prompt)
    forward = _hidden(model, tokens_BT, capacity, exact=False)
    errors = {FORWARD: truth.errors(_Logits(forward, model.head_weight.bfloat16().float()))}
    del forward
    for kind in kinds:
        errors[f"{kind} steps"] = truth.errors(_Steps(model, case, capacity, kind, tokens_BT))
    for line, error_T in errors.items():
        if not bool(error_T.isfinite().all()):
            raise UserError(f"{case.tier}, {line}: logits are not finite")
    squares = {line: error_T.square().cpu() for line, error_T in errors.items()}
    window = _window(config)
    past = 0 if window is None else max(0, window - case.prompt)
    edges = torch.linspace(0, case.length - case.prompt, min(BINS, case.length - case.prompt) + 1).long().tolist()
    return {
        "capacity": case.tier,
        "channels": capacity.channels,
        "ff_width": capacity.ff_width,
        "batch": case.batch,
        "length": case.length,
        "prompt": case.prompt,
        "window": window,
        "positions": [case.prompt + (a + b - 1) / 2 for a, b in pairwise(edges)],
        "errors": {line: _binned(square_T, edges) for line, square_T in squares.items()},
        "verdicts": {line: asdict(_verdict(line, squares, past)) for line in squares},
    }


class _Logits:
    """Logits of a forward pass from its hidden states."""

    def __init__(self, hidden_BTD: Tensor, head_VD: Tensor) -> None:
        self.hidden_BTD, self.head_VD = hidden_BTD, head_VD

    def next(self, start: int, stop: int) -> Tensor:
        """fp32 [N, B, V] of the positions start to stop - 1; products of what is given, summed in fp32."""
        return F.linear(self.hidden_BTD[:, start:stop].transpose(0, 1).float(), self.head_VD)


class _Steps:
    """Logits of decode steps, which are asked for in order from the prompt's end on."""

    def __init__(
        self, model: LanguageModel, case: DriftCase, capacity: Capacity, kind: Weights, tokens_BT: Tensor
    ) -> None:
        device, dtype, config = model.device, activation_dtype(kind), model.config
        weights = pack_model(model, capacity, dtype, QUANTIZED.get(kind))
        state = new_decode_state(config, capacity, case.batch, dtype=dtype, device=device, max_length=case.length)
        self._tokens_TB = tokens_BT.T.contiguous()
        self._token_B = self._tokens_TB[0].clone()
        self._buffers = StepBuffers.of(weights, case.batch)
        slot_B = torch.full((case.batch,), -1, dtype=torch.int32, device=device)

        def step() -> None:
            run(weights, state, self._token_B, slot_B, self._buffers)

        # Recorded on idle rows, which leave the states as they are.
        self._step = Recorded(step, device) if device.type == "cuda" else step
        own = model.init_state(case.batch, capacity, max_length=case.length, dtype=dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            model.prefill(tokens_BT[:, : case.prompt], own, capacity)
        put(state, torch.arange(case.batch, device=device), own)
        slot_B.copy_(torch.arange(case.batch, dtype=torch.int32))

    def next(self, start: int, stop: int) -> Tensor:
        """fp32 [N, B, V] after the tokens start to stop - 1, which are taken in."""
        logits_NBV = self._buffers.logits_BV.new_empty(stop - start, *self._buffers.logits_BV.shape)
        for place in range(start, stop):
            self._token_B.copy_(self._tokens_TB[place])
            self._step()
            logits_NBV[place - start] = self._buffers.logits_BV
        return logits_NBV


class _Truth:
    """The exact logits, and how far others are from them."""

    def __init__(self, hidden_BTD: Tensor, head_VD: Tensor, start: int) -> None:
        self._exact, self._start = _Logits(hidden_BTD, head_VD), start

    def errors(self, given: _Logits | _Steps) -> Tensor:
        """fp64 [T - start], of each position."""
        hidden_BTD, head_VD = self._exact.hidden_BTD, self._exact.head_VD
        batch, length, _ = hidden_BTD.shape
        block = max(1, BLOCK_ELEMENTS // (batch * len(head_VD)))
        parts = []
        for start in range(self._start, length, block):
            stop = min(start + block, length)
            exact_NBV, given_NBV = self._exact.next(start, stop), given.next(start, stop)
            off_N = (given_NBV - exact_NBV).square_().sum((1, 2), dtype=torch.float64)
            parts.append((off_N / exact_NBV.square_().sum((1, 2), dtype=torch.float64)).sqrt())
        return torch.cat(parts)


def _hidden(model: LanguageModel, tokens_BT: Tensor, capacity: Capacity, *, exact: bool) -> Tensor:
    """The forward's hidden states [B, T, D], some sequences at a time; exact in fp32, else as bf16 training's."""
    group = max(1, FORWARD_TOKENS // tokens_BT.shape[1])
    with torch.autocast(model.device.type, torch.bfloat16, enabled=not exact):
        return torch.cat([model.hidden(some, capacity) for some in tokens_BT.split(group)])


def _binned(square_T: Tensor, edges: Sequence[int]) -> list[float]:
    """Root mean square between the edges."""
    return [float(square_T[a:b].mean().sqrt()) for a, b in pairwise(edges)]


def _verdict(line: str, squares: dict[str, Tensor], past: int) -> Verdict:
    past_T = squares[line][past:]
    noise_T = squares[FORWARD][past:]
    error, last_to_first = float(past_T.mean().sqrt()), _last_to_first(past_T)
    exact = line.startswith("fp32")
    of_noise = line == FORWARD or exact
    growth = last_to_first if of_noise else last_to_first / _last_to_first(noise_T)
    over_noise = None if of_noise else error / float(noise_T.mean().sqrt())
    highest = float(squares[line].max().sqrt())
    near = highest <= FP32_ERROR if exact else None
    if line == "bf16 steps":
        assert over_noise is not None
        near = over_noise <= MOST_NOISE
    slope, deviation = _slope(past_T)
    return Verdict(
        error=error,
        highest=highest,
        last_to_first=last_to_first,
        slope=slope,
        slope_deviation=deviation,
        over_noise=over_noise,
        growth=growth,
        drifts=growth > MOST_GROWTH,
        near=near,
    )


def _last_to_first(square_T: Tensor) -> float:
    quarter = len(square_T) // 4
    return float((square_T[-quarter:].mean() / square_T[:quarter].mean()).sqrt())


def _slope(square_T: Tensor) -> tuple[float, float]:
    """Slope of the error's logarithm in a thousand positions, by least squares over bins, and its deviation."""
    bins = square_T.tensor_split(min(BINS // 2, len(square_T)))
    y_N = torch.stack([part.mean() for part in bins]).double().log() / 2
    width = len(square_T) / len(bins) / 1000
    x_N = (torch.arange(len(bins)).double() - (len(bins) - 1) / 2) * width
    spread = float(x_N.square().sum())
    slope = float((x_N * y_N).sum()) / spread
    left_N = y_N - y_N.mean() - slope * x_N
    return slope, math.sqrt(float(left_N.square().sum()) / (len(bins) - 2) / spread)
