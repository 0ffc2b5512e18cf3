"""What a layout exchanges in a step, and how long a step should take: from shapes and `rates`, without a GPU.

A micro-batch's time is the sum of its products, scans, attention and bytes moved, times what the whole took over that
sum where it was measured. Tensor-parallel exchanges run between the products, on the way back beside the product of
the weight's gradient. Replicas exchange when passes are done, and are waited for: the native engine and ZeRO 1 after
the last micro-batch, ZeRO 2 and 3 after each, and ZeRO 3 waits for each module's weights. Where tp is 1 the native
engine begins its sums beside the last backward pass; that is not taken off, so its steps are shorter than said here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity, budget_capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import flops_per_token
from megatron_essh.parallel.gradients import BUCKET_BYTES
from megatron_essh.parallel.imbalance import simulate
from megatron_essh.parallel.planning import (
    ZERO_BUCKET,
    Layout,
    LocalSizes,
    Memory,
    check_layout,
    memory,
    other_weights,
    product_weights,
)
from megatron_essh.parallel.rates import NETWORK_HOP, Rates

OPTIMIZER_BYTES = 50
"""Bytes a parameter that a step moves: clip 12, AdamW 28, copies 6, zeroing 4."""
SIMULATED_SLOTS = 4096
"""Slots that the simulation of the imbalance deals out, over as many steps as that makes."""


# -- one micro-batch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One rank's part of a pass, in units that the rates know."""

    product_flops: float
    attention_flops: float
    scan_tokens: float
    """Tokens x channels x modes / 8, over all layers, forward and backward counting 1."""
    bytes: float


def _work(config: RunConfig, layout: Layout, capacity: Capacity, rates: Rates, *, forward_only: bool) -> Work:
    """A pass over one micro-batch, its loss apart; `forward_only` for a teacher's."""
    model = config.model
    own = LocalSizes.of(model, capacity, layout.tp)
    weights = product_weights(model, own)
    body = sum(size for part, size in weights.items() if part != "head")
    tokens = config.training.micro_batch * config.data.sequence_length
    shared = layout.tp if layout.sequence_parallel else 1
    level = "none" if forward_only else config.training.recompute
    # Forward passes of the mixers' halves of blocks, and of their feed-forward halves; a backward pass counts as two.
    mixers, feeds = {"none": (1, 1), "selective": (1, 2), "block": (2, 2)}[level]
    backward = 0 if forward_only else 1
    feed_weights = weights["feed_forward"]
    # Bytes of a norm that adds a branch: 12 a value forward, 16 backward; of a SwiGLU: 6 a unit, 10 backward.
    norms = (model.n_layers * (mixers + feeds) + 1) * 12 + backward * (2 * model.n_layers + 1) * 16
    moved = tokens * (norms * model.d_model / shared + model.n_layers * own.units * (6 * feeds + 10 * backward))
    flops = flops_per_token(model, capacity, sequence_length=config.data.sequence_length)
    share = own.heads / model.n_heads if model.n_heads else 0.0
    scans = tokens * own.channels * len(model.spectral_layers) * model.modes / 8
    forward_share = rates["scan_forward_share"]
    return Work(
        product_flops=2.0
        * tokens
        * ((mixers + 2 * backward) * (body - feed_weights) + (feeds + 2 * backward) * feed_weights),
        attention_flops=tokens * flops.attention * share * (mixers + 2 * backward),
        scan_tokens=scans * (mixers * forward_share + backward * (1 - forward_share)),
        bytes=moved + backward * 8 * body,  # gradients are added in fp32: read and written
    )


def _head_work(config: RunConfig, layout: Layout, inputs: int) -> Work:
    """The head and its loss of one micro-batch; `inputs` 2 with a teacher."""
    model = config.model
    own = LocalSizes.of(model, full_capacity(model), layout.tp)
    tokens = config.training.micro_batch * config.data.sequence_length
    products = 2.0 * tokens * own.vocabulary * model.d_model * (3 + inputs - 1)
    chunks = math.ceil(tokens / (config.training.loss_chunk or tokens))
    # Logits of every input are read for their statistics and once more for the gradient, which is written over one's;
    # the head's gradient is read and written in every chunk.
    moved = tokens * own.vocabulary * 2 * (2 * inputs + 1) + chunks * 8 * own.vocabulary * model.d_model
    return Work(products, 0.0, 0.0, moved)


def _seconds(work: Work, config: RunConfig, rates: Rates) -> float:
    width = max(16, 1 << (config.model.value_width - 1).bit_length())
    scan = rates["scan_fixed"] + rates["scan_per_value"] * width
    return rates["overhead"] * (
        work.product_flops / rates["product_flops"]
        + work.attention_flops / rates["attention_flops"]
        + work.scan_tokens * scan
        + work.bytes / (rates["memory_bytes"] * rates["elementwise_share"])
    )


def compute_seconds(config: RunConfig, layout: Layout, capacity: Capacity, rates: Rates) -> float:
    """One rank's kernels for a micro-batch at `capacity`, forward and backward, a reduced one's teacher included."""
    full = full_capacity(config.model)
    taught = capacity != full and config.elastic.kl_weight > 0
    parts = [_work(config, layout, capacity, rates, forward_only=False), _head_work(config, layout, 2 if taught else 1)]
    if taught:
        parts.append(_work(config, layout, full, rates, forward_only=True))
    return sum(_seconds(work, config, rates) for work in parts)


# -- exchanges -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange in a step, of one rank."""

    kind: str
    calls: int
    bytes_each: int
    """Of the tensor that is exchanged, whole."""
    rounds: int
    """2: all-reduce; 1: reduce-scatter or all-gather, half of one."""
    between: str
    """"tp" or "dp"."""
    beside: str = ""
    """What it runs beside, if anything."""

    def sent(self, ranks: int) -> int:
        """Bytes that a rank sends in a step, in a ring."""
        return round(self.calls * self.rounds * self.bytes_each * (ranks - 1) / ranks)


def exchanges(config: RunConfig, layout: Layout) -> list[Exchange]:
    """What a full-capacity step exchanges."""
    model, training, tp, dp, stage = config.model, config.training, layout.tp, layout.dp, layout.zero_stage
    item = 2 if training.precision == "bf16" else 4
    tokens = training.micro_batch * config.data.sequence_length
    micros = training.global_batch // dp // training.micro_batch
    layers, stream = 2 * model.n_layers, tokens * model.d_model
    found = []
    if tp > 1:
        # A block that is computed again does its forward exchanges again: all of a layer's, or its feed-forward half's.
        again = {"none": 0, "selective": layers // 2, "block": layers}[training.recompute]
        calls = micros * (layers + again)
        beside = "the weight's gradient"
        if layout.sequence_parallel:
            found += [
                Exchange("gather before a sub-layer, forward", calls, item * stream, 1, "tp"),
                Exchange("scattered sum after a sub-layer, forward", calls, item * stream, 1, "tp"),
                Exchange("gather after a sub-layer, backward", micros * layers, item * stream, 1, "tp"),
                Exchange(
                    "gather of its input, backward", micros * layers, item * stream, 1, "tp", "the input's gradient"
                ),
                Exchange("scattered sum of dx, backward", micros * layers, item * stream, 1, "tp", beside),
            ]
        else:
            found += [
                Exchange("sum after a sub-layer, forward", calls, item * stream, 2, "tp"),
                Exchange("sum of dx, backward", micros * layers, item * stream, 2, "tp", beside),
            ]
        rounds = 1 if layout.sequence_parallel else 2
        found.append(Exchange("embedding, forward", micros, 4 * stream, rounds, "tp"))
        found.append(Exchange("hidden states' gradient at the head", micros, item * stream, rounds, "tp"))
        chunks = math.ceil(tokens / (training.loss_chunk or tokens))
        rows = 4 * math.ceil(tokens / chunks)
        found.append(Exchange("loss: row maxima, sums and labels", 3 * micros * chunks, rows, 2, "tp"))
        if layout.sequence_parallel:
            found.append(Exchange("norms' gradients", 1, 4 * (layers + 1) * model.d_model, 2, "tp"))
    if dp > 1:
        own = LocalSizes.of(model, full_capacity(model), tp)
        size = 4 * (sum(product_weights(model, own).values()) + other_weights(model, own))
        buckets = math.ceil(size / (4 * ZERO_BUCKET if stage else BUCKET_BYTES))
        each = math.ceil(size / buckets)
        times = micros if stage >= 2 else 1
        if stage == 3:
            found.append(Exchange("gradients' scattered sum", times * buckets, each, 1, "dp"))
            gathers = 3 if training.recompute == "block" else 2
            found.append(Exchange("gather of weights, each pass", gathers * micros, size, 1, "dp"))
        else:
            found.append(Exchange("gradients' sum", times * buckets, each, 2, "dp"))
        if stage in (1, 2):
            found.append(Exchange("gather of updated weights", 1, size, 1, "dp"))
    return found


def exchange_seconds(exchange: Exchange, layout: Layout, rates: Rates) -> float:
    """One call, by itself: latency, and its bytes over a ring's slowest link."""
    ranks = layout.tp if exchange.between == "tp" else layout.dp
    bus, latency = rates["link_bytes"], rates["link_latency"]
    if exchange.between == "dp" and layout.nodes > 1:
        # A group's members on a node use a network card each, and as many rings.
        bus = min(bus, layout.gpus_per_node // layout.tp * rates["network_bytes"])
        latency += NETWORK_HOP * math.ceil(math.log2(layout.nodes))
    return latency + exchange.rounds * exchange.bytes_each * (ranks - 1) / ranks / bus


def _tp_seconds(config: RunConfig, layout: Layout, rates: Rates) -> float:
    """What a full-capacity micro-batch waits for tensor-parallel exchanges: those beside a product, less its time."""
    micros = config.training.global_batch // layout.dp // config.training.micro_batch
    model = config.model
    own = LocalSizes.of(model, full_capacity(model), layout.tp)
    tokens = config.training.micro_batch * config.data.sequence_length
    width = own.channels * (model.value_width + 3 * model.modes)
    widths = [2 * own.units] * model.n_layers  # of each sub-layer's input product
    widths += [3 * own.heads * model.head_dim if i in model.attention_layers else width for i in range(model.n_layers)]
    total = 0.0
    for exchange in exchanges(config, layout):
        if exchange.between != "tp":
            continue
        seconds = exchange_seconds(exchange, layout, rates)
        if exchange.beside:
            products = (2.0 * tokens * model.d_model * w / rates["product_flops"] for w in widths)
            total += sum(max(0.0, seconds - product) for product in products)
        else:
            total += seconds * exchange.calls / micros
    return total


# -- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mix:
    """A step of the recipe's mix of capacities, after its warm-up."""

    step: float
    """Seconds, the wait for the slowest replica included."""
    tokens_per_second: float
    imbalance: float
    """The slowest replica's slots over the mean's, less 1."""


@dataclass(frozen=True)
class Prediction:
    """A layout's step, in seconds unless said otherwise."""

    layout: Layout
    global_batch: int
    micro_batches: int
    """A rank's, in a step."""
    compute: float
    """Kernels of a full-capacity step's micro-batches."""
    tp_waiting: float
    dp_waiting: float
    optimizer: float
    step: float
    """Full capacity."""
    tokens_per_second: float
    efficiency: float
    """Tokens/s a GPU over those of one GPU with the same micro-batch and global batch, whether or not it has room."""
    mix: Mix | None
    """None where every slot is full."""


def _step_parts(config: RunConfig, layout: Layout, rates: Rates) -> tuple[float, float, float, float]:
    """(compute, tp waiting, dp waiting, optimizer) of a full-capacity step."""
    model = config.model
    micros = config.training.global_batch // layout.dp // config.training.micro_batch
    one = compute_seconds(config, layout, full_capacity(model), rates)
    tp_waiting = micros * _tp_seconds(config, layout, rates) if layout.tp > 1 else 0.0
    between = [exchange for exchange in exchanges(config, layout) if exchange.between == "dp"]
    waiting = sum((e.calls * exchange_seconds(e, layout, rates) for e in between), 0.0)
    own = LocalSizes.of(model, full_capacity(model), layout.tp)
    weights = sum(product_weights(model, own).values()) + other_weights(model, own)
    updated = weights / layout.dp if layout.zero_stage else weights
    return micros * one, tp_waiting, waiting, OPTIMIZER_BYTES * updated / rates["optimizer_bytes"]


def _mix(config: RunConfig, layout: Layout, rates: Rates, slots_seconds: float, rest: float) -> Mix | None:
    """The mix, from what a rank's slots and the rest of a step take at full capacity."""
    elastic, model = config.elastic, config.model
    if not elastic.enabled or elastic.full_share == 1.0:
        return None
    at_full = compute_seconds(config, layout, full_capacity(model), rates)
    capacities = [budget_capacity(model, elastic, budget) for budget in elastic.training_budgets]
    drawn = sum(compute_seconds(config, layout, c, rates) for c in capacities) / len(capacities)
    mean = elastic.full_share + (1 - elastic.full_share) * drawn / at_full
    slots = config.training.global_batch // elastic.slot_sequences
    uneven = 0.0
    if layout.dp > 1:
        uneven = simulate(config, layout.dp, slots // layout.dp, max(2, SIMULATED_SLOTS // slots)).balanced
    step = slots_seconds * mean * (1 + uneven) + rest
    return Mix(step, config.training.global_batch * config.data.sequence_length / step, uneven)


def predict(config: RunConfig, layout: Layout, rates: Rates) -> Prediction:
    """Step time and rate of a layout.

    Raises:
        UserError: the layout cannot run, whatever the memory, or trains in fp32.
    """
    check_layout(config, layout)
    if config.training.precision != "bf16":
        raise UserError(f"training.precision {config.training.precision}: there are rates of bf16 training only")
    training = config.training
    tokens = training.global_batch * config.data.sequence_length
    compute, tp_waiting, dp_waiting, optimizer = _step_parts(config, layout, rates)
    step = compute + tp_waiting + dp_waiting + optimizer
    plain = replace(config, training=replace(training, recompute="none"))
    alone = sum(_step_parts(plain, Layout(), rates))
    return Prediction(
        layout=layout,
        global_batch=training.global_batch,
        micro_batches=training.global_batch // layout.dp // training.micro_batch,
        compute=compute,
        tp_waiting=tp_waiting,
        dp_waiting=dp_waiting,
        optimizer=optimizer,
        step=step,
        tokens_per_second=tokens / step,
        efficiency=alone / step / layout.gpus,
        mix=_mix(config, layout, rates, compute + tp_waiting, dp_waiting + optimizer),
    )


def scale_out(
    config: RunConfig, layout: Layout, rates: Rates, counts: Sequence[int]
) -> list[tuple[Prediction, Memory]]:
    """The same layout on other numbers of GPUs, whole nodes of `layout.gpus_per_node` from there on.

    The global batch stays while every replica has a slot of it, and grows to the next multiple where it must.

    Raises:
        UserError: a number is not one of whole nodes, or the layout cannot run on it.
    """
    found = []
    for gpus in counts:
        per_node = min(gpus, layout.gpus_per_node)
        if gpus % per_node:
            raise UserError(f"{gpus} GPUs are not whole nodes of {per_node}")
        spread = replace(layout, nodes=gpus // per_node, gpus_per_node=per_node)
        least = config.elastic.slot_sequences * spread.dp
        batch = math.ceil(config.training.global_batch / least) * least
        scaled = replace(config, training=replace(config.training, global_batch=batch))
        found.append((predict(scaled, spread, rates), memory(scaled, spread)))
    return found
