"""The language model dealt out over tensor-parallel ranks (specification, section 7).

Spectral channels, attention heads, feed-forward units and vocabulary entries are dealt out in turn, so that a capacity
is a prefix of every rank's tensors. A sub-layer's products give each rank a share of the sum that is added to the
residual stream: one all-reduce a sub-layer on the way forward, of the output product, whose first half of the
positions is summed while the second is computed, and one on the way back, of the gradient of the input product's
input, while the gradient of its weight is computed.

With sequence parallelism the residual stream and the norms hold 1 / tp of the positions on each rank. The all-reduce
becomes a scattered sum, and a gather before the next input product: the same bytes, and norms and what they keep for
the backward pass are 1 / tp of what they were. Gradients of the norms are then of a rank's own positions, and are to
be summed over the tensor-parallel ranks before a step.

How each part of the model is dealt out stands in `sharding_of`, and nowhere else.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.partition import Whole
from megatron_essh.ops.linear_loss import VocabularyShard
from megatron_essh.parallel.collectives import (
    InputExchange,
    gather_slabs,
    same_on_ranks,
    scatter_sum,
    start_gather,
    start_sum,
    sum_over_ranks,
)
from megatron_essh.parallel.interleave import Sharding, local_count
from megatron_essh.parallel.mesh import Mesh

CHANNEL_TABLES = ("write_bias", "read_bias", "clock_bias", "rho_raw", "theta", "kc", "ks", "zero_lag", "beta")
INPUT_PRODUCTS = ("in_proj", "qkv", "gate_up")
"""Weights whose product's input is the same on every rank, so that its gradient is summed over them."""


OUTPUT_PRODUCTS = ("out_proj", "down")
"""Weights whose product's results are summed over the ranks."""


def sharding_of(name: str, config: ModelConfig) -> Sharding | None:
    """How the parameter `name` of a `LanguageModel` is dealt out; None: every rank holds all of it."""
    module, _, part = name.rpartition(".")
    if module.endswith("norm"):
        return None
    if name == "embedding.weight":
        return Sharding(config.vocab_size)
    layer = module.rpartition(".")[2]
    if layer == "mixer" and part in ("in_proj", *CHANNEL_TABLES):
        return Sharding(config.channels)
    if layer == "mixer" and part == "out_proj":
        return Sharding(config.channels, config.value_width)
    if layer == "attention" and part == "qkv":
        return Sharding(config.n_heads)
    if layer == "attention" and part == "out_proj":
        return Sharding(config.n_heads, config.head_dim)
    if layer == "feed_forward" and part in ("gate_up", "down"):
        return Sharding(config.ff_width)
    raise KeyError(f"{name} is no parameter of a LanguageModel")


def shard_model(model: LanguageModel, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
    """Keep this rank's part of every parameter of `model`, which is whole, and let its passes exchange the rest.

    The same model on every rank (the same seed) gives the same function on any number of ranks. Parameters stay the
    objects that they are; those dealt out get the attribute `tensor_model_parallel`, True. One rank leaves all as it
    is. Call it before an optimizer or gradients are made; `device` moves do it no harm.

    Raises:
        UserError: there are fewer vocabulary entries than ranks.
    """
    if mesh.tp == 1:
        return
    config = model.config
    if config.vocab_size < mesh.tp:
        raise UserError(
            f"parallel.tensor {mesh.tp}: a vocabulary of {config.vocab_size} leaves a rank without an entry; use at "
            f"most {config.vocab_size}"
        )
    partition = TensorParallel(config, mesh, sequence_parallel=sequence_parallel)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"{name} has a gradient already"
        sharding = sharding_of(name, config)
        if sharding is None:
            continue
        parameter.data = sharding.take(parameter.detach(), mesh.tp_rank, mesh.tp)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if name.rpartition(".")[2] in INPUT_PRODUCTS:
            parameter.exchange = partition.exchange  # type: ignore[attr-defined]
        if name.rpartition(".")[2] in OUTPUT_PRODUCTS and not sequence_parallel:
            parameter.output_sum = partial(start_sum, group=partition.group, beside=True)  # type: ignore[attr-defined]
    model.partition = partition


class TensorParallel(Whole):
    """One rank's part of a model on `mesh`'s tensor-parallel ranks. All of them run the same passes together."""

    def __init__(self, config: ModelConfig, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
        assert mesh.tp_group is not None, "a group of one needs no partition"
        self.config = config
        self.mesh = mesh
        self.group = mesh.tp_group
        self.sequence_parallel = sequence_parallel
        self.exchange = InputExchange(self.group, sequence_parallel)
        self.vocabulary = VocabularyShard(self.group, mesh.tp_rank, mesh.tp)

    def share(self, capacity: Capacity) -> Capacity:
        """This rank's channels and units of a capacity; 0 is possible."""
        rank, tp = self.mesh.tp_rank, self.mesh.tp
        return Capacity(local_count(capacity.channels, rank, tp), local_count(capacity.ff_width, rank, tp))

    def embed(self, weight_VD: Tensor, tokens_BT: Tensor) -> Tensor:
        """Rows of the tokens that are this rank's, zero for the others, summed over the ranks.

        Raises:
            UserError: with sequence parallelism, positions that tp does not divide.
        """
        rank, tp = self.mesh.tp_rank, self.mesh.tp
        if self.sequence_parallel and tokens_BT.shape[1] % tp:
            raise UserError(
                f"parallel.sequence_parallel: sequences of {tokens_BT.shape[1]} tokens cannot be dealt out over "
                f"parallel.tensor {tp} ranks; use a length that {tp} divides, or sequence_parallel: false"
            )
        # Tokens of other ranks read a row that is there, which spreads their zero gradients over the rows.
        row_BT = torch.div(tokens_BT, tp, rounding_mode="floor").clamp_max(weight_VD.shape[0] - 1)
        x_BTD = F.embedding(row_BT, weight_VD)
        own_BTD = x_BTD.masked_fill((tokens_BT % tp != rank)[..., None], 0.0)
        return scatter_sum(own_BTD, self.group) if self.sequence_parallel else sum_over_ranks(own_BTD, self.group)

    def leave(self, y_BTD: Tensor) -> Tensor:
        """The sum of all ranks' units: whole, as the output product gives it, or this rank's slab of it."""
        return scatter_sum(y_BTD, self.group) if self.sequence_parallel else y_BTD

    def enter_head(self, hidden_BTD: Tensor) -> Tensor:
        """Hidden states of all positions; each rank's head and loss give a share of their gradient."""
        return gather_slabs(hidden_BTD, self.group) if self.sequence_parallel else same_on_ranks(hidden_BTD, self.group)

    def gather_parameter(self, name: str, local: Tensor) -> Tensor:
        """The whole of `local`, which is shaped as this rank's part of the parameter `name`; the same on all ranks.

        All ranks call it together. `local` must be where the group's backend takes it.
        """
        sharding = sharding_of(name, self.config)
        if sharding is None:
            return local
        tp = self.mesh.tp
        counts = [sharding.local_rows(rank, tp) for rank in range(tp)]
        assert local.shape[0] == counts[self.mesh.tp_rank], f"{name}: {local.shape[0]} rows, not {counts}"
        padded = local.detach().new_zeros(counts[0], *local.shape[1:])  # rank 0 holds the most
        padded[: local.shape[0]] = local.detach()
        parts = start_gather(padded, self.group)().view(tp, *padded.shape)
        return sharding.join([part[:rows] for part, rows in zip(parts, counts, strict=True)])
