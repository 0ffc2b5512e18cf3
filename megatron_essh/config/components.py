"""Every component's settings other than the model's, and the run that holds them all.

A field's docstring is its documentation. Checks that need one component stand in its `__post_init__`; checks
across components stand in `RunConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_essh.config.model import LARGEST_SEED, ModelConfig

Recompute = Literal["none", "selective", "block"]
TokenizerType = Literal["byte", "dna", "tiktoken", "sentencepiece", "huggingface"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """How capacity is cut and trained (sections 4 and 5)."""

    channel_exponent: float = 0.5
    """Exponent of the budget in the channel count."""
    ff_exponent: float = 0.8
    """Exponent of the budget in the feed-forward width; 0 nests the mixer only."""
    budget_denominator: int = 32
    """Budgets are given in units of 1 / budget_denominator and capped at one."""
    tiers: tuple[int, ...] = (2, 4, 7, 10, 13, 17, 20, 24, 28, 32)
    """Budgets of the deployment tiers T1, T2, ..."""
    training_budgets: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
    """Budgets that training draws from."""
    enabled: bool = True
    """False trains the full capacity only (the dense control)."""
    full_share: float = 0.75
    """Share of each step's slots that is reserved for the full capacity."""
    slot_sequences: int = 8
    """Sequences in a slot, the plan's unit: all of a slot's sequences train at one capacity."""
    full_only_tokens: int = 250_000_000
    """Tokens at the start of the run that train at full capacity only."""
    full_only_fraction: float | None = None
    """The same as a fraction of the run's steps, for small runs; takes the place of full_only_tokens."""
    reduced_ce_weight: float = 1.0
    """Weight of a reduced slot's cross-entropy."""
    kl_weight: float = 0.5
    """Weight of KL(stopgrad p_full || p_tier) in a reduced slot; 0 runs no teacher."""
    ff_gradient_scale: float = 0.5
    """Factor on the gradient of retained feed-forward weights in a reduced slot."""
    mixer_gradient_scale: float = 1.0
    """The same for the spectral mixer's weights."""
    ordering_interval: int = 500
    """Steps between two orderings of the feed-forward units; 0 never orders."""
    ordering_until: float = 0.8
    """Fraction of the run from which on no ordering happens."""
    statistics_decay: float = 0.99
    """Decay, a step, of the running mean of squared unit activations."""

    def __post_init__(self) -> None:
        _require(
            self.budget_denominator >= 1,
            f"budget_denominator must be at least 1, got {self.budget_denominator}",
        )
        for name in ("tiers", "training_budgets"):
            budgets = getattr(self, name)
            _require(len(budgets) > 0, f"{name} must name at least one budget")
            _require(
                all(b >= 1 for b in budgets) and list(budgets) == sorted(set(budgets)),
                f"{name} must be distinct, ascending and at least 1, got {list(budgets)}",
            )
        for name in ("channel_exponent", "ff_exponent", "reduced_ce_weight", "kl_weight"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("full_share", "ff_gradient_scale", "mixer_gradient_scale", "ordering_until"):
            _require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")
        _require(
            0 <= self.statistics_decay < 1,
            f"statistics_decay must lie in [0, 1), got {self.statistics_decay}",
        )
        _require(self.slot_sequences >= 1, f"slot_sequences must be at least 1, got {self.slot_sequences}")
        _require(self.full_only_tokens >= 0, f"full_only_tokens must not be negative, got {self.full_only_tokens}")
        _require(
            self.full_only_fraction is None or 0 <= self.full_only_fraction <= 1,
            f"full_only_fraction must lie in [0, 1], got {self.full_only_fraction}",
        )
        _require(
            self.ordering_interval >= 0,
            f"ordering_interval must not be negative, got {self.ordering_interval}",
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the ids."""

    type: TokenizerType
    """byte, dna (characters), tiktoken (rank file), sentencepiece (.model file) or huggingface (tokenizer.json)."""
    model: str | None = None
    """Path of the tokenizer's file; none for `byte` and `dna`."""
    pattern: Literal["gpt2", "cl100k", "o200k", "llama3"] = "gpt2"
    """Splitting pattern and special tokens of a tiktoken rank file."""

    def __post_init__(self) -> None:
        if self.type in ("byte", "dna"):
            _require(self.model is None, f"the {self.type} tokenizer takes no model file, got {self.model}")
        else:
            _require(self.model is not None, f"tokenizer type {self.type} needs `model`, the path of its file")
        _require(
            self.pattern == "gpt2" or self.type == "tiktoken",
            f"pattern {self.pattern} is of tiktoken rank files; leave it out for type {self.type}",
        )


@dataclass(frozen=True, kw_only=True)
class BatchRampConfig:
    """A global batch that grows from `start` to training.global_batch in equal increments (pretraining only)."""

    start: int
    """Sequences of the first step; a multiple of elastic.slot_sequences, as every size is."""
    increment: int
    """Sequences by which the batch grows at a time; divides training.global_batch - start."""
    samples: int
    """Samples after which the batch is training.global_batch. Each size lasts for the same number of samples."""

    def __post_init__(self) -> None:
        for name in ("start", "increment", "samples"):
            _require(getattr(self, name) >= 1, f"batch_ramp.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token streams. A prefix P names the pair P.bin and P.idx."""

    train: str | None = None
    """Prefix of the training pair."""
    blend: tuple[str, ...] = ()
    """Prefixes of several training pairs, in the place of `train`."""
    blend_weights: tuple[float, ...] = ()
    """Shares of the samples that each pair of `blend` gives, in any unit, in its order; empty: by tokens, so that every
    pair is read through equally often."""
    validation: str | None = None
    """Prefix of the validation pair."""
    split: tuple[float, ...] = ()
    """Shares of every training pair's documents for training, validation and test, in any unit and in the file's order
    ([0.98, 0.01, 0.01]); validation is then the second part, in the place of `validation`, and nothing reads the third.
    Empty: all documents train."""
    index_cache: str | None = None
    """Folder that keeps the order of samples on disk: drawn once, by one process of all that share the folder, then
    mapped into memory. null: every process draws its own."""
    workers: int = 2
    """Threads that read batches ahead; 0 reads each when it is asked for. Changes no batch."""
    batch_ramp: BatchRampConfig | None = None
    """How the global batch grows at the start; null: it is training.global_batch from the first step."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer; None takes the one recorded beside the training pair by tools/preprocess_data.py."""
    sequence_length: int = 2048
    """Tokens T in a packed sequence."""
    document_mask: bool = False
    """Cut scan and attention at document starts, and ignore the label that follows an end-of-document token."""

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, f"sequence_length must be at least 2, got {self.sequence_length}")
        _require(
            self.train is None or not self.blend,
            f"train is {self.train} and blend names {len(self.blend)} pairs; give one of them, and set the other to "
            "null or []",
        )
        _require(len(self.blend) <= 32_767, f"blend names {len(self.blend)} pairs; at most 32767 can be blended")
        _require(
            len(self.blend_weights) in (0, len(self.blend)),
            f"blend_weights has {len(self.blend_weights)} entries and blend {len(self.blend)}; give one weight a pair, "
            "or none",
        )
        for weight in self.blend_weights:
            _require(weight > 0, f"blend_weights must be positive, got {weight}; leave the pair out of blend instead")
        _require(
            len(self.split) in (0, 3),
            f"split has {len(self.split)} shares; give three, of training, validation and test, or none",
        )
        if self.split:
            _require(
                min(self.split) >= 0 and self.split[0] > 0,
                f"split must give training documents and no negative share, got {list(self.split)}",
            )
            _require(
                self.validation is None or self.split[1] == 0,
                f"split gives validation a share of {self.split[1]} and validation is {self.validation}; give one of "
                "them",
            )
        _require(self.index_cache != "", "index_cache is empty; name a folder, or null for none")
        _require(0 <= self.workers <= 64, f"workers must lie in 0 to 64, got {self.workers}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the decayed group."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    warmup_fraction: float = 0.02
    """Fraction of the steps that warms the rate up linearly."""
    final_fraction: float = 0.1
    """Rate at the cosine's end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        _require(self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("warmup_fraction", "final_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int = 28_229
    """Optimizer steps of the run (the default processes 7.4 billion tokens at 128 x 2048)."""
    global_batch: int = 128
    """Sequences a step, over all ranks."""
    micro_batch: int = 8
    """Sequences in one forward pass; divides the slot."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16 is autocast over fp32 parameters; modal tables and scan stay fp32 in both."""
    seed: int = 197
    """Seed of initialisation, data order and plan."""
    loss_chunk: int | None = 4096
    """Positions whose logits exist at one time; None evaluates all at once."""
    recompute: Recompute = "none"
    """What the backward pass computes anew to save memory: feed-forward layers (`selective`) or whole blocks."""
    capture: bool = True
    """On a GPU, record each capacity's pass once as a CUDA graph and replay it: the device never waits for Python. Not
    done where passes are cut at documents (data.document_mask), nor under DeepSpeed's ZeRO."""
    validate_every: int = 500
    """Steps between validations; 0 never validates."""
    validation_batches: int = 16
    """Batches of micro_batch sequences in a validation."""
    validation_tiers: tuple[str, ...] = ("T1", "T4", "T7", "T10")
    """Tiers that a validation reports."""
    log_every: int = 10
    """Steps between progress lines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    skip_limit: int = 5
    """Steps in a row whose update may be skipped because the loss or the gradient is not finite; one more ends the run.
    0: the first one does."""
    compare_every: int = 500
    """Steps between two comparisons of the parameters that several ranks hold; 0 never compares."""
    threads: int | None = None
    """CPU threads; None leaves PyTorch's choice. Sums depend on it: a run repeats bitwise at a fixed number."""
    output: str = "out/run"
    """Folder of the run: checkpoints, TensorBoard events, the resolved config."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "micro_batch", "validation_batches", "log_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("validate_every", "skip_limit", "compare_every"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(0 <= self.seed <= LARGEST_SEED, f"seed must lie in [0, {LARGEST_SEED}], got {self.seed}")
        _require(self.output != "", "output is empty; name a folder")
        for name in ("loss_chunk", "threads"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be at least 1 or null, got {value}")


@dataclass(frozen=True, kw_only=True)
class RefinementConfig:
    """Shared refinement after pretraining (section 5)."""

    steps: int = 2060
    """Optimizer steps."""
    global_batch: int = 64
    """Sequences a step."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    warmup_fraction: float = 0.05
    """Fraction of the steps that warms the rate up linearly; then cosine to zero."""
    weight_decay: float = 0.1
    """Decay of every tensor with two or more dimensions."""
    tv_weight: float = 5.0
    """Weight of the total variation between the full and the tier's prediction."""
    draw: Literal["one_per_step", "cycle_tiers"] = "one_per_step"
    """one_per_step: one budget for the whole step. cycle_tiers: each step shuffles the budgets over its slots."""
    budgets: tuple[int, ...] = (2, 4, 8, 16, 24)
    """Budgets drawn from, in units of 1 / elastic.budget_denominator."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(self.learning_rate > 0, f"learning_rate must be positive, got {self.learning_rate}")
        _require(0 <= self.warmup_fraction <= 1, f"warmup_fraction must lie in [0, 1], got {self.warmup_fraction}")
        for name in ("weight_decay", "tv_weight"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _require(
            len(self.budgets) > 0 and all(b >= 1 for b in self.budgets) and len(set(self.budgets)) == len(self.budgets),
            f"budgets must be distinct and at least 1, got {list(self.budgets)}",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    save_every: int = 1000
    """Steps between two checkpoints; 0 saves at the end (and when stopped) only."""
    keep_last: int = 3
    """Newest checkpoints that stay on disk."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this stay for good; 0: none."""

    def __post_init__(self) -> None:
        _require(self.save_every >= 0, f"save_every must not be negative, got {self.save_every}")
        _require(self.keep_last >= 1, f"keep_last must be at least 1, got {self.keep_last}")
        _require(self.keep_every >= 0, f"keep_every must not be negative, got {self.keep_every}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a run is laid out over its processes (section 7), as many as the launcher starts, one a GPU. Neither the plan
    nor, but for rounding, the trained weights depend on it."""

    tensor: int = 1
    """Ranks that share one replica of the model; divides the number of processes. The rest is data parallel."""
    sequence_parallel: bool = False
    """Norms and the residual stream hold only their share of a sequence's positions on each of the `tensor` ranks."""
    timeout_seconds: int = 600
    """Longest wait for another rank in an exchange; more than the longest save. A dead rank is noticed at once."""
    engine: Literal["native", "deepspeed"] = "native"
    """native: every replica holds all of optimizer and gradients. deepspeed: DeepSpeed's ZeRO deals them out."""
    zero_stage: int = 1
    """What DeepSpeed deals out over the replicas: 1 the optimizer, 2 gradients too, 3 the weights too, 0 nothing. Means
    nothing to the native engine."""
    deepspeed_config: str | None = None
    """JSON file of DeepSpeed's settings; null takes configs/deepspeed/zero<zero_stage>.json."""

    def __post_init__(self) -> None:
        for name in ("tensor", "timeout_seconds"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(0 <= self.zero_stage <= 3, f"zero_stage must lie in 0 to 3, got {self.zero_stage}")
        _require(
            self.engine == "deepspeed" or self.deepspeed_config is None,
            f"deepspeed_config is {self.deepspeed_config}, and engine is native; set engine: deepspeed",
        )
        _require(
            not self.sequence_parallel or self.tensor > 1,
            "sequence_parallel is true, and tensor is 1: there are no ranks to share the positions; set "
            "sequence_parallel: false, or tensor to 2 or more",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run's settings."""

    model: ModelConfig
    """The model."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """Capacities and how they train."""
    data: DataConfig = field(default_factory=DataConfig)
    """Token streams."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule in pretraining."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The loop."""
    refinement: RefinementConfig = field(default_factory=RefinementConfig)
    """Shared refinement."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout over processes."""

    def __post_init__(self) -> None:
        slot, micro = self.elastic.slot_sequences, self.training.micro_batch
        _require(slot % micro == 0, f"training.micro_batch {micro} does not divide elastic.slot_sequences {slot}")
        for name, batch in (
            ("training", self.training.global_batch),
            ("refinement", self.refinement.global_batch),
        ):
            _require(
                batch % slot == 0,
                f"{name}.global_batch {batch} is not a multiple of elastic.slot_sequences {slot}; try "
                + " or ".join(str(slots * slot) for slots in (batch // slot, batch // slot + 1) if slots),
            )
        ramp, batch = self.data.batch_ramp, self.training.global_batch
        if ramp is not None:
            for name in ("start", "increment"):
                size = getattr(ramp, name)
                _require(
                    size % slot == 0,
                    f"data.batch_ramp.{name} {size} is not a multiple of elastic.slot_sequences {slot}: every step is "
                    f"whole slots; try {max(1, round(size / slot)) * slot}",
                )
            _require(
                ramp.start < batch and (batch - ramp.start) % ramp.increment == 0,
                f"data.batch_ramp from {ramp.start} by {ramp.increment} never is training.global_batch {batch}; "
                f"choose a start below it and an increment that divides the difference",
            )
        tensor, length = self.parallel.tensor, self.data.sequence_length
        for name in ("ff_width", "vocab_size"):
            units = getattr(self.model, name)
            _require(
                tensor <= units,
                f"parallel.tensor {tensor} is more than model.{name} {units}: a rank would hold nothing; use at most "
                f"{units}",
            )
        _require(
            not self.parallel.sequence_parallel or length % tensor == 0,
            f"data.sequence_length {length} is not a multiple of parallel.tensor {tensor}, which "
            f"parallel.sequence_parallel needs; use {max(1, length // tensor) * tensor} or set "
            "parallel.sequence_parallel: false",
        )
        tiers = {f"T{i + 1}" for i in range(len(self.elastic.tiers))}
        for tier in self.training.validation_tiers:
            _require(tier in tiers, f"training.validation_tiers: {tier!r} is none of T1 to T{len(tiers)}")
        if self.model.ff_width % 64 and self.elastic.enabled and self.model.family_ff_width is None:
            raise ValueError(
                f"model.ff_width {self.model.ff_width} is not a multiple of 64, which elastic training needs; "
                f"use {max(64, self.model.ff_width // 64 * 64)} or set elastic.enabled: false"
            )
