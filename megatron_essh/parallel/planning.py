"""What a layout needs and how fast it should be: memory by part, bytes exchanged by kind, step time.

Closed forms over a config: nothing is allocated and no GPU is needed. Memory follows what each operator keeps for its
backward pass (`activations`), so that it changes when an operator does; a test counts what passes really keep. Times
come from `rates`, measured on one kind of GPU or scaled from it by data sheets.

Two sums of bytes are told apart: what tensors take at their most, and what the device must have, which adds the memory
that recorded CUDA graphs hold while another capacity's first pass runs as it is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from megatron_essh.config import ModelConfig, RunConfig
from megatron_essh.config.components import Recompute
from megatron_essh.elastic.capacity import Capacity, budget_capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.parallel.dealing import check_slots
from megatron_essh.parallel.interleave import local_count

GIB = 2**30
SCAN_CHUNK = 64
"""Positions between two states that the scan keeps."""
CUBLAS_WORKSPACES = 64 * 2**20
"""Two streams' workspaces, allocated among the tensors."""
OUTSIDE_BYTES = int(1.5 * GIB)
"""Allowance for what is no tensor: the CUDA context, loaded kernels, NCCL's buffers. Not measured."""
ZERO_BUCKET = 64 * 2**20
"""Elements of DeepSpeed's reduction bucket, as configs/deepspeed sets it."""
RECOMPUTE_LEVELS: tuple[Recompute, ...] = ("none", "selective", "block")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is spread out. Micro-batch, recomputation and precision are the config's."""

    nodes: int = 1
    gpus_per_node: int = 1
    tp: int = 1
    """Ranks that share a replica, all on one node."""
    sequence_parallel: bool = False
    zero_stage: int = 0
    """0: the native engine, everything on every replica. 1 to 3: DeepSpeed deals out optimizer state, gradients too,
    weights too."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "tp"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)}: at least 1")
        if self.zero_stage not in (0, 1, 2, 3):
            raise UserError(f"zero stage {self.zero_stage}: expected 0, 1, 2 or 3")
        if self.gpus_per_node % self.tp:
            fitting = [n for n in range(1, self.gpus_per_node + 1) if self.gpus_per_node % n == 0]
            raise UserError(
                f"tp {self.tp} does not divide the {self.gpus_per_node} GPUs of a node, and the ranks of a replica "
                f"stay on one; use one of {fitting}"
            )
        if self.sequence_parallel and self.tp == 1:
            raise UserError("sequence parallelism shares positions between tp ranks; with tp 1 leave it off")

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.gpus // self.tp


def check_layout(config: RunConfig, layout: Layout) -> None:
    """Refuse what could not run whatever the memory.

    Raises:
        UserError: the step's slots cannot be dealt out evenly, or a sequence not over tp ranks.
    """
    length = config.data.sequence_length
    check_slots(config.training.global_batch, config.elastic.slot_sequences, layout.dp, "training.global_batch")
    if layout.sequence_parallel and length % layout.tp:
        raise UserError(
            f"data.sequence_length {length} cannot be dealt out over tp {layout.tp} ranks; "
            f"use a length that {layout.tp} divides, or no sequence parallelism"
        )


def training_capacities(config: RunConfig) -> list[Capacity]:
    """The full capacity, then the reduced ones that pretraining draws, without repeats."""
    found = [full_capacity(config.model)]
    if config.elastic.enabled:
        drawn = (budget_capacity(config.model, config.elastic, b) for b in config.elastic.training_budgets)
        found += [c for c in drawn if c not in found]
    return found


# -- parameters of one rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalSizes:
    """What tensor-parallel rank 0, which holds the most, has of a capacity."""

    channels: int
    units: int
    heads: int
    vocabulary: int

    @classmethod
    def of(cls, model: ModelConfig, capacity: Capacity, tp: int) -> LocalSizes:
        """The first rank's share of `capacity`."""
        sizes = (capacity.channels, capacity.ff_width, model.n_heads, model.vocab_size)
        return cls(*(local_count(size, 0, tp) for size in sizes))


def product_weights(model: ModelConfig, own: LocalSizes) -> dict[str, int]:
    """Weights of matrix products on a rank, by part, over all layers."""
    d, spectral, attending = model.d_model, len(model.spectral_layers), len(model.attention_layers)
    return {
        "head": own.vocabulary * d,
        "mixer": spectral * own.channels * (2 * model.value_width + 3 * model.modes) * d,
        "attention": attending * 4 * own.heads * model.head_dim * d,
        "feed_forward": model.n_layers * 3 * d * own.units,
    }


def other_weights(model: ModelConfig, own: LocalSizes) -> int:
    """Norms, modal tables, biases: the parameters that no product reads, fp32 in every mode."""
    tables = len(model.spectral_layers) * own.channels * (8 * model.modes + 1)
    return tables + (2 * model.n_layers + 1) * model.d_model


# -- activations -----------------------------------------------------------------------------------------------------


def _item(config: RunConfig) -> int:
    """Bytes of an activation in the dtype of the products."""
    return 2 if config.training.precision == "bf16" else 4


def _layer_bytes(config: RunConfig, own: LocalSizes, shared: int, attends: bool) -> dict[str, float]:
    """Bytes a token that a layer keeps for its backward pass, by kind. `shared`: ranks that share its positions."""
    model, item, length = config.model, _item(config), config.data.sequence_length
    d, p, m = model.d_model, model.value_width, model.modes
    kept = {
        "residual stream": 2 * (4 * d + 4) / shared,  # the sum that each norm makes, and its scale, fp32
        "normed inputs": 2 * item * d / shared,
        "gate and up": 2.0 * item * own.units,
        "units": 1.0 * item * own.units,
    }
    if attends:
        width = own.heads * model.head_dim
        # the kernel keeps the rows' log-sum-exp in fp32; its output is what the output projection keeps
        kept["attention"] = 4 * item * width + 4 * own.heads
    else:
        chunks = math.ceil(length / SCAN_CHUNK) / length
        kept["mixer projection"] = item * own.channels * (p + 3 * m)
        # fp32 states, decays and a flag at every chunk
        kept["scan states"] = 4 * own.channels * (2 * m * p + m + 1) * chunks
        kept["scan output"] = item * own.channels * p
    return kept


def _feed_forward(kinds: dict[str, float]) -> float:
    """Of a layer's bytes, those of its feed-forward half."""
    return (kinds["residual stream"] + kinds["normed inputs"]) / 2 + kinds["gate and up"] + kinds["units"]


def activations(config: RunConfig, layout: Layout, capacity: Capacity) -> dict[str, int]:
    """Bytes that a micro-batch's forward pass at `capacity` keeps for its backward pass on a rank, by kind."""
    model, item = config.model, _item(config)
    own = LocalSizes.of(model, capacity, layout.tp)
    shared = layout.tp if layout.sequence_parallel else 1
    tokens = config.training.micro_batch * config.data.sequence_length
    kept: dict[str, float] = {}
    for layer in range(model.n_layers):
        kinds = _layer_bytes(config, own, shared, layer in model.attention_layers)
        if config.training.recompute == "block":  # the stream and the branch that enter
            kinds = {"residual stream": 4 * model.d_model / shared, "entering branches": item * model.d_model / shared}
        elif config.training.recompute == "selective":  # the mixer's half, and what enters the feed-forward half
            for kind in ("residual stream", "normed inputs"):
                kinds[kind] /= 2
            del kinds["gate and up"], kinds["units"]
            kinds["entering branches"] = item * model.d_model / shared
        for kind, size in kinds.items():
            kept[kind] = kept.get(kind, 0.0) + size
    kept["residual stream"] += (4 * model.d_model + 4) / shared  # the final norm's
    if "entering branches" in kept and config.training.recompute == "block":
        kept["entering branches"] -= item * model.d_model / shared  # nothing is to be added before the first block
    kept["tokens"] = 8.0
    return {kind: math.ceil(size * tokens) for kind, size in kept.items()} | _table_bytes(config, own)


def _table_bytes(config: RunConfig, own: LocalSizes) -> dict[str, int]:
    """Tables that a pass makes and keeps, whatever the micro-batch: a chunk's phases, decays, rotary angles, fp32."""
    model = config.model
    padded = max(8, 1 << (model.modes - 1).bit_length())
    phases = 4 * own.channels * ((SCAN_CHUNK + 1) * 2 * padded + model.modes)
    layers = 0 if config.training.recompute == "block" else len(model.spectral_layers)
    angles = 4 * config.data.sequence_length * model.head_dim if model.attention_layers else 0
    return {"tables of phases": layers * phases + (angles if layers else 0)}


def transient_bytes(config: RunConfig, layout: Layout, capacity: Capacity, inputs: int = 1) -> dict[str, int]:
    """The most that a pass takes beside what it keeps: at the head, or in the backward pass of its last layer.

    inputs: hidden states that the loss takes (a teacher's are one more).
    """
    model, item, training = config.model, _item(config), config.training
    own = LocalSizes.of(model, capacity, layout.tp)
    shared = layout.tp if layout.sequence_parallel else 1
    tokens = training.micro_batch * config.data.sequence_length
    chunk = min(training.loss_chunk or tokens, tokens)
    logits = inputs * item * chunk * own.vocabulary
    # hidden states of every input, one gradient, and a chunk's gradient before it is put there
    hidden = (inputs + 1) * item * tokens * model.d_model + item * chunk * model.d_model
    layer = max(
        sum(_layer_bytes(config, own, shared, attends).values()) for attends in {bool(model.attention_layers), False}
    )
    again = {
        "none": 0.0,
        "selective": _feed_forward(_layer_bytes(config, own, shared, False)),
        "block": layer,
    }[training.recompute]
    # gradients of the stream (fp32, before and after) and of the branch, of gate and up
    backward = math.ceil(tokens * (again + (8 + item) * model.d_model / shared + 2 * item * own.units))
    return {
        "logits chunk": logits,
        "hidden states at the head": hidden,
        "backward beyond the head": max(0, backward - logits - hidden),
    }


def pass_bytes(config: RunConfig, layout: Layout, capacity: Capacity) -> int:
    """The most that one micro-batch's forward and backward pass takes; a reduced one's teacher included."""
    full = full_capacity(config.model)
    taught = capacity != full and config.elastic.kl_weight > 0
    kept = sum(activations(config, layout, capacity).values())
    if not taught:
        return kept + sum(transient_bytes(config, layout, capacity).values())
    at_head = sum(transient_bytes(config, layout, capacity, inputs=2).values())
    return kept + max(at_head, forward_bytes(config, layout))


def forward_bytes(config: RunConfig, layout: Layout) -> int:
    """The most that a full-capacity forward pass takes that keeps nothing: a teacher's, or validation's."""
    model, item = config.model, _item(config)
    own = LocalSizes.of(model, full_capacity(model), layout.tp)
    shared = layout.tp if layout.sequence_parallel else 1
    tokens = config.training.micro_batch * config.data.sequence_length
    return math.ceil(tokens * ((8 + 2 * item) * model.d_model / shared + 3 * item * own.units))


# -- memory of a GPU -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, the fullest."""

    states: dict[str, int]
    """What stays from step to step, by part."""
    activations: dict[str, int]
    """What a full-capacity micro-batch keeps, by kind."""
    transient: dict[str, int]
    """The most that it takes beside that."""
    graphs: int
    """What recorded graphs hold while another pass, which is not recorded yet or never, runs: that pass's bytes."""
    outside: int
    """What is no tensor."""
    before_moments: int
    """The peak of the first pass, at which the optimizer has no moments yet: where all later passes are replays, this
    is what torch.cuda.max_memory_allocated sees, for a replay allocates nothing. From ZeRO 1 on moments are there from
    the start and nothing is replayed: the same as `tensors`."""

    @property
    def tensors(self) -> int:
        """All states and the largest pass."""
        return sum((*self.states.values(), *self.activations.values(), *self.transient.values()))

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.tensors + self.graphs + self.outside


def state_bytes(config: RunConfig, layout: Layout) -> dict[str, int]:
    """Bytes that stay on the fullest rank from step to step, by part."""
    model, dp, stage = config.model, layout.dp, layout.zero_stage
    own = LocalSizes.of(model, full_capacity(model), layout.tp)
    products, others = product_weights(model, own), other_weights(model, own)
    weights = sum(products.values()) + others
    low_precision = 2 * sum(products.values()) if config.training.precision == "bf16" else 0

    def dealt(size: int, from_stage: int) -> int:
        return math.ceil(size / dp) if stage >= from_stage else size

    parts = {
        "fp32 master weights": dealt(4 * weights, 3),
        "fp32 gradients": dealt(4 * weights, 2),
        "optimizer moments": dealt(8 * weights, 1),
        "bf16 copies": low_precision if stage < 3 else 0,
        "reduction bucket": 4 * min(ZERO_BUCKET, weights) if stage and dp > 1 else 0,
        "unit statistics": 8 * model.n_layers * own.units if config.elastic.enabled else 0,
        "cuBLAS workspaces": CUBLAS_WORKSPACES,
    }
    return {name: size for name, size in parts.items() if size}


def zero_moments(config: RunConfig, layout: Layout) -> tuple[dict[str, int], int]:
    """What a ZeRO stage takes for a moment: (beside a pass at its most, by part; when the pass is done, in all).

    Stages 2 and 3 keep no whole gradients: a pass makes them anew, the head's at the moment of most activations, and
    all of them are there when it is done and they are reduced.
    """
    model, dp, stage = config.model, layout.dp, layout.zero_stage
    own = LocalSizes.of(model, full_capacity(model), layout.tp)
    products = product_weights(model, own)
    weights = sum(products.values()) + other_weights(model, own)
    beside: dict[str, int] = {}
    if stage >= 2:
        beside["head's gradient"] = 4 * products["head"]
    if stage == 3:  # one module's at a time, in fp32 and cast: the head's or a layer's
        layer = (weights - products["head"]) // model.n_layers
        cast = 2 if config.training.precision == "bf16" else 0
        beside["gathered weights"] = (4 + cast) * max(products["head"], layer)
    share = math.ceil(4 * weights / dp)
    after = {0: 0, 1: share, 2: max(4 * weights, 2 * share), 3: 4 * weights + beside.get("gathered weights", 0)}
    return beside, after[stage]


def memory(config: RunConfig, layout: Layout) -> Memory:
    """Memory of the fullest GPU, in pretraining."""
    full = full_capacity(config.model)
    states = state_bytes(config, layout)
    kept, beside = activations(config, layout, full), transient_bytes(config, layout, full)
    passes = {capacity: pass_bytes(config, layout, capacity) for capacity in training_capacities(config)}
    largest = max(passes.values())
    if largest > passes[full]:
        beside["a reduced capacity's pass beyond the full one's"] = largest - passes[full]
    more, after = zero_moments(config, layout)
    beside |= more
    if (beyond := after - largest - sum(more.values())) > 0:
        beside["gradients after a pass beyond the pass"] = beyond
    recorded = config.training.capture and not config.data.document_mask and layout.zero_stage == 0
    others = [size for capacity, size in passes.items() if capacity != full]
    chunk = beside["logits chunk"] + beside["hidden states at the head"]
    graphs = max([forward_bytes(config, layout) + chunk, *others]) if recorded else 0
    before = sum(states.values()) - states["optimizer moments"] + passes[full]
    needed = Memory(states, kept, beside, graphs, OUTSIDE_BYTES, before)
    return replace(needed, before_moments=needed.tensors) if layout.zero_stage else needed


def check_memory(config: RunConfig, layout: Layout, available: float, gpu: str) -> None:
    """Refuse a layout that does not fit into `available` bytes a GPU.

    Raises:
        UserError: by how much it does not fit, and what would.
    """
    needed = memory(config, layout).total
    if needed <= available:
        return
    fitting = _that_fit(config, layout, available)
    remedy = "; or ".join(fitting[:4]) if fitting else "nothing that this plan knows does: take more or larger GPUs"
    raise UserError(
        f"the layout does not fit: {needed / GIB:.1f} GiB a GPU, {(needed - available) / GIB:.1f} more than "
        f"{gpu}'s {available / GIB:.1f}; what would fit: {remedy}"
    )


def _that_fit(config: RunConfig, layout: Layout, available: float) -> list[str]:
    """What to change so that `available` bytes are enough, the fewest changes first."""
    training = config.training
    tps = [n for n in range(layout.tp, layout.gpus_per_node + 1) if layout.gpus_per_node % n == 0 and n >= layout.tp]
    stages = range(layout.zero_stage, 4 if layout.dp > 1 else layout.zero_stage + 1)
    levels = RECOMPUTE_LEVELS[RECOMPUTE_LEVELS.index(training.recompute) :]
    micros = [n for n in range(training.micro_batch, 0, -1) if training.micro_batch % n == 0]
    found: dict[tuple[str, ...], tuple[str, int]] = {}
    for tp, stage, level, micro in itertools.product(tps, stages, levels, micros):
        changes: dict[str, int | str] = {}
        if tp != layout.tp:
            changes["--tp"] = tp
        if stage != layout.zero_stage:
            changes["--zero-stage"] = stage
        if level != training.recompute:
            changes["--recompute"] = level
        if micro != training.micro_batch:
            changes["--micro-batch"] = micro
        if not changes or (stage and layout.gpus // tp == 1):
            continue
        changed = replace(config, training=replace(training, micro_batch=micro, recompute=level))
        size = memory(changed, replace(layout, tp=tp, zero_stage=stage)).total
        words = " ".join(f"{option} {value}" for option, value in changes.items())
        knobs = tuple(changes)
        # Of several values of the same options, the one that asks least of those that fit.
        if size <= available and size > found.get(knobs, ("", 0))[1]:
            found[knobs] = f"{words} ({size / GIB:.1f} GiB)", size
    return [found[knobs][0] for knobs in sorted(found, key=len)]
