"""The language model (sections 3, 4 and 8): embedding, blocks, tied head.

Two ways through it: `hidden` runs whole sequences (training, evaluation), `prefill` and `step` run tokens that
continue a `ModelState`. Both take a `Capacity` and run the smaller tensors, as prefix views; None is the full one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_essh.config import ModelConfig
from megatron_essh.config.components import Recompute
from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.model.attention import rotary_table
from megatron_essh.model.block import Block, WholePass, normed
from megatron_essh.model.partition import Whole
from megatron_essh.model.prefix import GradientScale
from megatron_essh.model.state import (
    ModelState,
    OrderedUpdate,
    PaddedStart,
    RingUpdate,
    advance,
    advance_together,
    common_start,
    start_padded,
)
from megatron_essh.ops.window_attention import document_spans

PREFILL_SEGMENT = 2048
"""Tokens a segment of a long prompt, where the window does not ask for fewer."""
PREFILL_TOKENS = 32_768
"""Tokens that a GPU takes at a time, of all sequences, where they stand at one position and have no pads."""


class LanguageModel(nn.Module):
    """An Elastic Selective Spectral Hybrid language model. On the meta device it allocates and draws nothing."""

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.recompute: Recompute = "none"
        """What `hidden` computes anew in the backward pass instead of keeping it; the engine sets it."""
        self.after_block_backward: Callable[[int], object] | None = None
        """Called with a block's number when a backward pass of `hidden` is through it: its gradients are done."""
        self.partition = Whole()
        """Where the weights are; `parallel.tensor_parallel.shard_model` deals them out and sets another."""
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.d_model), freeze=False)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        if self.embedding.weight.device.type != "meta":
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise every tensor, in a fixed order, from `generator` (None: PyTorch's own)."""
        with torch.no_grad():
            self.embedding.weight.normal_(0.0, self.config.init_std, generator=generator)
        for block in self._blocks():
            for part in (block.mixer, block.attention, block.feed_forward):
                if part is not None:
                    part.reset_parameters(generator)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def head_weight(self) -> Tensor:
        """The output head [V, D]: the embedding, tied. Of the vocabulary, `partition.vocabulary` is here."""
        return self.embedding.weight

    def product_weights(self) -> list[nn.Parameter]:
        """The weights of matrix products, the head's among them."""
        names = {"in_proj", "out_proj", "qkv", "gate_up", "down", "embedding.weight"}
        return [p for name, p in self.named_parameters() if name in names or name.rpartition(".")[2] in names]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.embedding.weight.device

    @property
    def table_dtype(self) -> torch.dtype:
        """dtype of rotary tables and spectral states: fp32, or fp64 in an fp64 model."""
        return torch.float64 if self.embedding.weight.dtype == torch.float64 else torch.float32

    def _checked(self, capacity: Capacity | None) -> Capacity:
        if capacity is None:
            return full_capacity(self.config)
        if not capacity.fits(self.config):
            raise UserError(f"capacity {capacity}: this model holds {full_capacity(self.config)} (channels, units)")
        return capacity

    def _needs_all(self, what: str) -> None:
        if self.partition.vocabulary is not None:
            raise UserError(f"{what}: this model is dealt out over ranks; export it, and open the export")

    def hidden(
        self,
        tokens_BT: Tensor,
        capacity: Capacity | None = None,
        *,
        documents_BT: Tensor | None = None,
        gradient_scale: GradientScale | None = None,
        square_sums_LN: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm, of whole sequences.

        Args:
            tokens_BT: int64 token ids.
            capacity: the prefix to run; None runs all.
            documents_BT: int64 document of each position; scan and attention are cut where it changes.
            gradient_scale: factors on this pass's weight gradients.
            square_sums_LN: fp32 [L, n] to which each layer's sums of squared feed-forward activations are added, at
                full capacity; n of the units that are here.

        Raises:
            UserError: the capacity is not within this model.
        """
        rotary = self._rotary(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        spans = None
        if documents_BT is not None and documents_BT.is_cuda and self.config.attention_layers:
            spans = document_spans(documents_BT)  # it reads from the device, so once a pass
        capacity, partition = self._checked(capacity), self.partition
        scale = gradient_scale or GradientScale()
        given = WholePass(capacity, partition.share(capacity), partition, rotary, documents_BT, spans, scale)
        x_BTD, branch_BTD = partition.embed(self.embedding.weight, tokens_BT), None
        for layer, block in enumerate(self._blocks()):
            sums_N = None if square_sums_LN is None else square_sums_LN[layer]
            if self.after_block_backward is not None:
                _call_on_gradient(x_BTD if branch_BTD is None else branch_BTD, self.after_block_backward, layer)
            x_BTD, branch_BTD = block(x_BTD, branch_BTD, given, sums_N, self.recompute)
        return partition.enter_head(normed(x_BTD, branch_BTD, self.final_norm)[1])

    def forward(
        self, tokens_BT: Tensor, capacity: Capacity | None = None, *, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, V] of whole sequences."""
        self._needs_all("logits")
        return F.linear(self.hidden(tokens_BT, capacity, documents_BT=documents_BT), self.head_weight)

    def init_state(
        self,
        batch: int,
        capacity: Capacity | None = None,
        *,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> ModelState:
        """The state of `batch` sequences that have taken in nothing.

        Args:
            max_length: tokens a sequence may reach; needed where the window is the whole input, else ignored.
            dtype: of keys and values; None takes the weights'.
        """
        self._needs_all("prefill and step")
        config, capacity = self.config, self._checked(capacity)
        window = config.window if config.window is not None else max_length
        if window is None and config.attention_layers:
            raise UserError("model.window is null (the whole input): init_state needs max_length")
        ring = window if window is not None and config.attention_layers else 0
        dtype = dtype or self.embedding.weight.dtype
        shape = (batch, capacity.channels, config.modes, 2, config.value_width)
        kv_shape = (batch, ring, config.n_heads, config.head_dim)
        return ModelState(
            [torch.zeros(shape, dtype=self.table_dtype, device=self.device) for _ in config.spectral_layers],
            [torch.zeros(kv_shape, dtype=dtype, device=self.device) for _ in config.attention_layers],
            [torch.zeros(kv_shape, dtype=dtype, device=self.device) for _ in config.attention_layers],
            torch.full((batch, ring), -1, dtype=torch.int64, device=self.device),
            torch.zeros(batch, dtype=torch.int64, device=self.device),
        )

    def prefill_hidden(
        self,
        tokens_BT: Tensor,
        state: ModelState,
        capacity: Capacity | None = None,
        *,
        valid_BT: Tensor | None = None,
        segment: int | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Hidden states [B, T, D] of tokens that continue `state`, which is updated in place and returned.

        Pads (`valid_BT` False) may stand anywhere; they touch no state and their hidden states mean nothing. Long
        prompts run in segments, so that no more than a window's keys and a segment's are seen at a time. Sequences
        that stand at one position and have no pads see their keys in order, which a GPU is fastest with.

        Args:
            segment: tokens a sequence takes in at a time, any number. None: as many as are quick on a GPU; elsewhere,
                and where positions differ or there are pads, at most a window and `PREFILL_SEGMENT`.
        """
        parts = list(self._segments(tokens_BT, state, self._continuing(state, capacity), valid_BT, segment))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), state

    def prefill(
        self,
        tokens_BT: Tensor,
        state: ModelState,
        capacity: Capacity | None = None,
        *,
        valid_BT: Tensor | None = None,
        segment: int | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Take in prompts: logits [B, V] after each sequence's last token that is no pad, and the state.

        Keeps one segment's hidden states at a time; the arguments are `prefill_hidden`'s.

        Raises:
            UserError: a sequence has no token.
        """
        if tokens_BT.shape[1] == 0 or (valid_BT is not None and not bool(valid_BT.any(1).all())):
            raise UserError("prefill: a sequence has no token; give each prompt at least one")
        last_BD = self.embedding.weight.new_empty(0)
        row_B = torch.arange(len(tokens_BT), device=tokens_BT.device)
        start = 0
        for hidden_BTD in self._segments(tokens_BT, state, self._continuing(state, capacity), valid_BT, segment):
            end = start + hidden_BTD.shape[1]
            if valid_BT is None:
                last_BD = hidden_BTD[:, -1]
            else:
                place_T = torch.arange(end - start, device=tokens_BT.device)
                place_B = torch.where(valid_BT[:, start:end], place_T, -1).amax(1)
                found_BD = hidden_BTD[row_B, place_B]
                last_BD = found_BD if start == 0 else torch.where(place_B[:, None] >= 0, found_BD, last_BD)
            start = end
        return F.linear(last_BD, self.head_weight), state

    def take_in(
        self,
        tokens_BT: Tensor,
        capacity: Capacity | None = None,
        *,
        count_B: Tensor | None = None,
        max_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> ModelState:
        """The state after prompts that begin their sequences: `init_state` and `prefill` without logits.

        On a GPU nothing waits for the device. The other arguments are `init_state`'s.

        Args:
            count_B: int64 [B] tokens of each prompt, from none to all; what stands behind them are pads, which touch no
                state. The whole runs as one segment, and nothing is read on the host: one CUDA graph serves all counts,
                and nobody checks them against `max_length`. None: there are no pads.
        """
        state = self.init_state(len(tokens_BT), capacity, max_length=max_length, dtype=dtype)
        capacity = self._continuing(state, capacity)
        if count_B is not None:
            ring, valid_BT = start_padded(state, count_B, tokens_BT.shape[1])
            self._through(tokens_BT, state, capacity, valid_BT, ring)
            return state
        position = 0 if tokens_BT.is_cuda else None
        for _ in self._segments(tokens_BT, state, capacity, None, None, position):
            pass
        return state

    def step(self, tokens_B: Tensor, state: ModelState, capacity: Capacity | None = None) -> tuple[Tensor, ModelState]:
        """Take in one token a sequence: logits [B, V] for the next, and the state, updated in place."""
        hidden_BTD, state = self.prefill_hidden(tokens_B[:, None], state, capacity)
        return F.linear(hidden_BTD[:, 0], self.head_weight), state

    def _rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(position, self.config.head_dim, self.config.rope_base, self.table_dtype)

    def _continuing(self, state: ModelState, capacity: Capacity | None) -> Capacity:
        capacity = self._checked(capacity)
        if state.spectral and state.spectral[0].shape[1] != capacity.channels:
            raise UserError(
                f"capacity {capacity}: the state was made for {state.spectral[0].shape[1]} channels; "
                "make one with init_state at this capacity"
            )
        return capacity

    def _segments(
        self,
        tokens_BT: Tensor,
        state: ModelState,
        capacity: Capacity,
        valid_BT: Tensor | None,
        segment: int | None,
        position: int | None = None,
    ) -> Iterator[Tensor]:
        """The hidden states of one segment of the tokens after another; `state` moves on with them.

        `position` is where all sequences stand, if the caller knows and there are no pads.
        """
        if segment is not None and segment < 1:
            raise UserError(f"segment {segment}: at least 1 token")
        batch, length = tokens_BT.shape
        ring = state.key_position_BW.shape[1]
        if self.config.window is None and ring:
            taken = length if valid_BT is None else int(valid_BT.sum(1).max())
            if (int(state.position_B.max()) if position is None else position) + taken > ring:
                raise UserError(f"the sequence outgrows the state's max_length of {ring} tokens")
        if position is None and length > 1 and (segment is not None or tokens_BT.is_cuda):
            position = common_start(state, valid_BT)
        if position is not None:
            valid_BT = None
            segment = segment or max(PREFILL_SEGMENT, PREFILL_TOKENS // batch)
        segment = segment or min(ring or PREFILL_SEGMENT, PREFILL_SEGMENT)
        for start in range(0, length, segment):
            piece = slice(start, start + segment)
            valid = None if valid_BT is None else valid_BT[:, piece]
            yield self._continue(
                tokens_BT[:, piece], state, capacity, valid, None if position is None else position + start
            )

    def _continue(
        self, tokens_BT: Tensor, state: ModelState, capacity: Capacity, valid_BT: Tensor | None, position: int | None
    ) -> Tensor:
        """Hidden states of tokens that continue `state`; `position` is the first one's, if all sequences share it."""
        if position is not None:
            ring: RingUpdate | OrderedUpdate = advance_together(state, position, tokens_BT.shape[1])
        else:
            ring = advance(state, torch.ones_like(tokens_BT, dtype=torch.bool) if valid_BT is None else valid_BT)
        return self._through(tokens_BT, state, capacity, valid_BT, ring)

    def _through(
        self,
        tokens_BT: Tensor,
        state: ModelState,
        capacity: Capacity,
        valid_BT: Tensor | None,
        ring: RingUpdate | OrderedUpdate | PaddedStart,
    ) -> Tensor:
        """Hidden states of tokens that stand where `ring` says; the spectral states and the rings move on with them."""
        table = self._rotary(ring.position)
        x_BTD, branch_BTD = self.embedding(tokens_BT), None
        spectral = attending = 0
        for block in self._blocks():
            x_BTD, u_BTD = normed(x_BTD, branch_BTD, block.mixer_norm)
            if block.mixer is not None:
                branch_BTD, state.spectral[spectral] = block.mixer(
                    u_BTD, capacity.channels, valid_BT=valid_BT, state_BKM2P=state.spectral[spectral]
                )
                spectral += 1
            else:
                assert block.attention is not None
                keys, values = state.keys[attending], state.values[attending]
                branch_BTD = block.attention.forward_cached(u_BTD, table, keys, values, ring)
                attending += 1
            x_BTD, u_BTD = normed(x_BTD, branch_BTD, block.ff_norm)
            branch_BTD = block.feed_forward(u_BTD, capacity.ff_width)
        return normed(x_BTD, branch_BTD, self.final_norm)[1]


def _call_on_gradient(x: Tensor, function: Callable[[int], object], layer: int) -> None:
    """Call `function(layer)` once the gradient of x is there, if there will be one.

    All that was computed from x and after it has then been gone through: autograd takes what was computed last first,
    and adds up a parameter's gradient as soon as it has it.
    """
    if not x.requires_grad:
        return

    def called(_: Tensor) -> None:
        function(layer)

    x.register_hook(called)
