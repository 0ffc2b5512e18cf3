"""Decoding: the fused step, as a CUDA graph and as it is, beside PyTorch's step of the same model, and what moves.

Sequences stand in a context of random states, keys and values; random tokens are taken in, none is drawn. What a step
must move at least (weights, states, keys and values) over the device's bandwidth is the floor that it is held to.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.benchmarks.prefill import set_precision
from megatron_essh.benchmarks.room import within_memory
from megatron_essh.benchmarks.timing import (
    BEFORE_RECORDING,
    Recorded,
    free_memory,
    milliseconds,
    peak_memory_mib,
    reset_peak_memory,
    wait,
)
from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity, full_capacity, parse_capacity, tier_capacities
from megatron_essh.errors import UserError
from megatron_essh.inference.packing import new_decode_state, pack_model
from megatron_essh.inference.quantization import Quantization
from megatron_essh.inference.step import StepBuffers, run
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.state import ModelState
from megatron_essh.ops.decode_step.state import DecodeState
from megatron_essh.ops.decode_step.weights import DecodeWeights

Weights = Literal["bf16", "fp32", "int8", "fp8"]
QUANTIZED: dict[Weights, Quantization] = {"int8": "int8", "fp8": "fp8"}

LARGER_BATCHES = (16, 128, 512)
SLOWER = 10
"""What is measured beside the graph gets a tenth of its steps: it is slower, and there to compare with."""
STATE_STD = 0.5
"""Standard deviation of the random states, keys and values."""


@dataclass(frozen=True)
class DecodeCase:
    """One row of the table."""

    tier: str
    """`full`, a tier (T4), or K,n."""
    batch: int
    context: int
    """Tokens that every sequence has taken in when the timing begins; it grows with every step."""
    weights: Weights = "bf16"


@dataclass(frozen=True)
class DecodeTiming:
    """How often a step is timed."""

    warmup: int
    """Untimed steps before the timed ones."""
    steps: int
    """Timed together, as one run."""
    repeats: int
    """Runs; the result is their median."""

    @property
    def most(self) -> int:
        """Tokens that a sequence takes in at most, whatever is measured."""
        return 1 + BEFORE_RECORDING + self.warmup + self.steps * self.repeats

    def fewer(self) -> DecodeTiming:
        """For what is measured beside the graph."""
        return DecodeTiming(-(-self.warmup // SLOWER), -(-self.steps // SLOWER), self.repeats)


@dataclass(frozen=True)
class Moved:
    """Bytes that one step cannot do without."""

    weights: int
    """Of all products and tables, once; of the embedding, one row a sequence."""
    spectral: int
    """The states, read and written."""
    keys_values: int
    """The ring's, read; the token's own, written."""

    @property
    def total(self) -> int:
        return self.weights + self.spectral + self.keys_values


def end_tiers(config: RunConfig) -> list[str]:
    """The largest and the smallest capacity that the model holds, by name."""
    named = tier_capacities(config.model, config.elastic)
    held = {name: capacity for name, capacity in named.items() if capacity.fits(config.model)}
    full = full_capacity(config.model)
    largest = next((name for name, capacity in held.items() if capacity == full), "full")
    smallest = min(held, key=lambda name: held[name], default=largest)
    return [largest] if smallest == largest else [largest, smallest]


def decode_cases(
    config: RunConfig,
    device: torch.device,
    *,
    tiers: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    weights: Sequence[Weights] | None = None,
) -> list[DecodeCase]:
    """All combinations of what is given.

    What is not given: both ends of the tiers, and of the largest on a GPU the batches of `LARGER_BATCHES` too where no
    batches and tiers are given; a full window; bf16.
    """
    larger = LARGER_BATCHES if device.type == "cuda" and not tiers and not batches else ()
    pairs = [
        (tier, batch)
        for place, tier in enumerate(tiers or end_tiers(config))
        for batch in batches or ((1, *larger) if place == 0 else (1,))
    ]
    kinds: Sequence[Weights] = weights or ("bf16",)
    contexts = contexts or [config.model.window or config.data.sequence_length]
    return [DecodeCase(tier, batch, context, kind) for kind in kinds for tier, batch in pairs for context in contexts]


def random_model(config: RunConfig, device: torch.device) -> LanguageModel:
    """A model of the config's shape as it is before training, for speed alone."""
    torch.manual_seed(config.training.seed)
    with device:
        model = LanguageModel(config.model)
    return model.requires_grad_(False).eval()


def measure_decoding(
    model: LanguageModel,
    config: RunConfig,
    cases: Sequence[DecodeCase],
    timing: DecodeTiming,
    *,
    bandwidth: float | None,
    control: bool = True,
    say: Callable[[str], object] = print,
) -> list[dict[str, Any]]:
    """Time every case's step on the model's device.

    Args:
        model: as trained, or random; weights are laid out from it for each capacity and kind of weights.
        bandwidth: bytes a second that the device moves; None leaves out the floor.
        control: also time `LanguageModel.step` of the same model, in bf16 (fp32 beside fp32 weights).
        say: told before a case begins.

    Raises:
        UserError: no such tier, more sequences than there is memory for, or logits that are not finite.
    """
    capacities = {case.tier: parse_capacity(case.tier, config.model, config.elastic) for case in cases}
    rows = []
    key: tuple[str, Weights] | None = None
    weights: DecodeWeights | None = None
    controls: dict[Weights, LanguageModel] = {}
    for case in cases:
        capacity = capacities[case.tier]
        what = f"{case.tier}, {case.weights} weights: {case.batch:,} x {case.context:,} tokens"
        say(what)
        if weights is None or key != (case.tier, case.weights):
            key, weights = (case.tier, case.weights), None  # the old ones go before there are new ones
            weights = pack_model(model, capacity, activation_dtype(case.weights), QUANTIZED.get(case.weights))
        with within_memory(what, model.device), torch.inference_mode():
            row = _fused(config, case, capacity, weights, timing, bandwidth)
        free_memory(model.device)
        logits_BV = row.pop("logits_BV")
        if control:
            precision: Weights = "fp32" if case.weights == "fp32" else "bf16"
            if precision not in controls:
                controls[precision] = copy.deepcopy(model)
                set_precision(controls[precision], precision)
            with within_memory(what, model.device), torch.inference_mode():
                row |= _control(controls[precision], config, case, capacity, weights, logits_BV, timing)
            free_memory(model.device)
        rows.append(row)
    return rows


def _fused(
    config: RunConfig,
    case: DecodeCase,
    capacity: Capacity,
    weights: DecodeWeights,
    timing: DecodeTiming,
    bandwidth: float | None,
) -> dict[str, Any]:
    device = weights.embedding_VD.device
    before = _allocated(device)
    reset_peak_memory(device)
    state, token_B = _inputs(config, case, capacity, weights, timing)
    slot_B = torch.arange(case.batch, dtype=torch.int32, device=device)
    buffers = StepBuffers.of(weights, case.batch)

    def step() -> None:
        run(weights, state, token_B, slot_B, buffers)

    def restart() -> None:
        state.position_S.fill_(case.context)

    step()
    logits_BV = buffers.logits_BV.clone()
    replay = Recorded(step, device) if device.type == "cuda" else None
    graph = None if replay is None else _timed(replay, restart, timing, device)
    eager = _timed(step, restart, timing if replay is None else timing.fewer(), device)
    if not bool(logits_BV.isfinite().all() & buffers.logits_BV.isfinite().all()):
        raise UserError(f"{case.tier}, {case.weights} weights: a step's logits are not finite")
    median = statistics.median(graph or eager)
    moved = moved_bytes(weights, state, case.batch, case.context)
    floor = None if bandwidth is None else 1e3 * moved.total / bandwidth
    spectral, keys_values = state.nbytes()
    weight_bytes = sum(map(_nbytes, _tensors(weights)))
    return {
        "capacity": case.tier,
        "channels": capacity.channels,
        "ff_width": capacity.ff_width,
        "parameters": parameter_counts(config.model, capacity).total,
        "weights": case.weights,
        "batch": case.batch,
        "context": case.context,
        "median_ms": median,
        "tokens_per_second": 1e3 * case.batch / median,
        "graph_ms": None if graph is None else statistics.median(graph),
        "graph_all_ms": graph,
        "eager_ms": statistics.median(eager),
        "eager_all_ms": eager,
        "kernels": _kernels(step, device) if device.type == "cuda" else None,
        "moved_bytes": asdict(moved),
        "bandwidth": bandwidth,
        "floor_ms": floor,
        "floor_share": None if floor is None else floor / median,
        "weights_mib": weight_bytes / 2**20,
        "spectral_mib": spectral / 2**20,
        "keys_values_mib": keys_values / 2**20,
        "buffers_mib": buffers.nbytes() / 2**20,
        "peak_mib": peak_memory_mib(device) - (before - weight_bytes if device.type == "cuda" else 0) / 2**20,
        "logits_BV": logits_BV,
    }


def _control(
    model: LanguageModel,
    config: RunConfig,
    case: DecodeCase,
    capacity: Capacity,
    weights: DecodeWeights,
    logits_BV: Tensor,
    timing: DecodeTiming,
) -> dict[str, Any]:
    """`LanguageModel.step` from the same state; then recorded as a graph, which it can be at one position alone."""
    device = model.device
    decode_state, token_B = _inputs(config, case, capacity, weights, timing)
    state = _as_model_state(decode_state, case.context)
    del decode_state
    own_BV = model.step(token_B, state, capacity)[0].float()
    difference = (logits_BV - own_BV).square().mean().sqrt() / own_BV.square().mean().sqrt()

    def step() -> None:
        model.step(token_B, state, capacity)

    times = _timed(step, _nothing, timing.fewer(), device)
    spectral = list(state.spectral)

    def at_one_position() -> None:
        """As `step`, but from one state, and the host knows where it stands, so that nothing waits for the device."""
        state.spectral[:] = spectral
        hidden_BTD = model._continue(token_B[:, None], state, capacity, None, case.context)
        F.linear(hidden_BTD[:, 0], model.head_weight)

    graph, failed = None, None
    if device.type == "cuda":
        try:
            graph = _timed(Recorded(at_one_position, device), _nothing, timing.fewer(), device)
        except RuntimeError as error:
            failed = str(error).partition("\n")[0]
    return {
        "control_ms": statistics.median(times),
        "control_all_ms": times,
        "control_graph_ms": None if graph is None else statistics.median(graph),
        "control_graph_all_ms": graph,
        "control_graph_failed": failed,
        "logits_difference": float(difference),
    }


def moved_bytes(weights: DecodeWeights, state: DecodeState, batch: int, context: int) -> Moved:
    """What a step of `batch` sequences, that have taken in `context` tokens each, must move."""
    embedding_VD = weights.embedding_VD
    read = [t for t in _tensors(weights) if t is not embedding_VD or t is weights.head.values_RI]
    layers, slots, heads, window, head_dim = state.keys_LSHWE.shape
    key = layers * heads * head_dim * state.keys_LSHWE.element_size()
    # Of the keys that are seen, the token's own is written and not read; so for the values.
    seen = min(context + 1, window)
    return Moved(
        weights=sum(map(_nbytes, read)) + batch * embedding_VD.shape[1] * embedding_VD.element_size(),
        spectral=2 * batch * _nbytes(state.spectral_LSKM2P) // slots,
        keys_values=2 * batch * seen * key,
    )


def _inputs(
    config: RunConfig, case: DecodeCase, capacity: Capacity, weights: DecodeWeights, timing: DecodeTiming
) -> tuple[DecodeState, Tensor]:
    """Random states and tokens, the same whenever they are asked for."""
    device = weights.embedding_VD.device
    generator = torch.Generator(device).manual_seed(config.training.seed)
    state = new_decode_state(
        config.model,
        capacity,
        case.batch,
        dtype=weights.embedding_VD.dtype,
        device=device,
        max_length=case.context + timing.most,
    )
    for tensor in (state.spectral_LSKM2P, state.keys_LSHWE, state.values_LSHWE):
        tensor.normal_(0.0, STATE_STD, generator=generator)
    state.position_S.fill_(case.context)
    token_B = torch.randint(0, config.model.vocab_size, (case.batch,), device=device, generator=generator)
    return state, token_B


def _as_model_state(state: DecodeState, context: int) -> ModelState:
    """All slots as one batch; they have taken in `context` tokens each."""
    slots, window, device = state.slots, state.keys_LSHWE.shape[3], state.position_S.device
    key_position_BW = torch.full((slots, window), -1, dtype=torch.int64, device=device)
    if window:
        position = torch.arange(max(0, context - window), context, device=device)
        key_position_BW[:, position % window] = position
    return ModelState(
        list(state.spectral_LSKM2P.unbind()),
        [keys_SHWE.transpose(1, 2).contiguous() for keys_SHWE in state.keys_LSHWE],
        [values_SHWE.transpose(1, 2).contiguous() for values_SHWE in state.values_LSHWE],
        key_position_BW,
        state.position_S,
    )


def _timed(
    step: Callable[[], object], restart: Callable[[], object], timing: DecodeTiming, device: torch.device
) -> list[float]:
    """Milliseconds a step, of each run."""

    def steps(count: int) -> None:
        restart()
        for _ in range(count):
            step()

    steps(timing.warmup)
    return [milliseconds(lambda: steps(timing.steps), device) / timing.steps for _ in range(timing.repeats)]


def _nothing() -> None:
    """What is to be done before a run of steps that go on where the last one stopped."""


def _kernels(step: Callable[[], object], device: torch.device) -> int | None:
    """Kernels that a step launches; None where the profiler sees none."""
    wait(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        step()
        wait(device)
    names = [event.name for event in record.events() or () if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names) or None


def activation_dtype(weights: Weights) -> torch.dtype:
    """Of activations, and of weights that are not quantised."""
    return torch.float32 if weights == "fp32" else torch.bfloat16


def _tensors(part: Any) -> list[Tensor]:
    """All tensors of a dataclass of dataclasses; what stands there twice, once."""
    if isinstance(part, Tensor):
        return [part]
    inner: Sequence[Any] = ()
    if is_dataclass(part):
        inner = [getattr(part, field.name) for field in fields(part)]
    elif isinstance(part, tuple):
        inner = part
    return list({id(tensor): tensor for value in inner for tensor in _tensors(value)}.values())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
