"""Decoding many sequences at once: slots that prompts enter and leave, one step for all of them, CUDA graphs.

A sequence gets what it would get alone: its state and its settings lie in its slot, and its draws depend on its seed
and positions. Logits are alike in every batch but for rounding: in fp32 that hardly ever changes a text, in 16 and 8
bits it can where two tokens are close. What the sequences are for, and when they end, is the caller's business.

On a GPU a step is recorded once for each batch class (1, 2, 4, ... rows and the number of slots), its draws once for
each class and kind of draw, the taking in of a prompt once for each length class; sequences come and go in the tensors
that the recordings read. What comes but once is not recorded (see `recordings`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.inference.device_sampling import NOT_FINITE, Needs, SlotSampling
from megatron_essh.inference.packing import copy_slot, fingerprint, new_decode_state, pack_model, put, take
from megatron_essh.inference.prefill import Prefill
from megatron_essh.inference.quantization import Quantization
from megatron_essh.inference.recordings import Recordings, send
from megatron_essh.inference.sampling import SamplingConfig
from megatron_essh.inference.step import StepBuffers, run
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.state import ModelState

GREEDY = SamplingConfig(temperature=0.0)

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SavedSequence:
    """A sequence that has left its slot, on the CPU; an engine of the same model and capacity takes it in again."""

    state: ModelState
    token: int
    """Its last token, which no step has taken in yet."""
    seen_V: Tensor
    """bool, the tokens of its text and prompt."""
    sampling: SamplingConfig
    seed: int
    model: str
    """The `fingerprint` of what it was decoded with."""


class Drawn:
    """What a step drew, on its way to the host; later steps may run before it is read."""

    def __init__(self, token_B: Tensor) -> None:
        self._event = torch.cuda.Event() if token_B.is_cuda else None
        self._host_B = torch.empty(token_B.shape, dtype=token_B.dtype, pin_memory=token_B.is_cuda)
        self._host_B.copy_(token_B, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def tokens(self) -> list[int]:
        """The new token of each slot, in the order of the step's slots. Waits for that step.

        Raises:
            UserError: a sequence's logits are not finite, so that there was nothing to draw from.
        """
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._host_B.tolist()
        if NOT_FINITE in tokens:
            raise UserError("logits: not finite, so no token can be drawn; the model's weights or activations blew up")
        return tokens


@dataclass
class _Live:
    """What the host knows of a slot's sequence."""

    sampling: SamplingConfig
    seed: int
    taken: int
    """Tokens that it has taken in."""


def _on_its_device(
    method: Callable[Concatenate[Engine, Given], Result],
) -> Callable[Concatenate[Engine, Given], Result]:
    """A method that runs on the engine's device, whichever is current, without gradients and the caller's autocast."""

    @wraps(method)
    def called(self: Engine, *args: Given.args, **settings: Given.kwargs) -> Result:
        device = self.model.device
        # On a GPU nothing of a step listens to autocast.
        place = torch.cuda.device(device) if device.type == "cuda" else torch.autocast(device.type, enabled=False)
        with torch.no_grad(), place:
            return method(self, *args, **settings)

    return called


class Engine:
    """Decodes sequences of one model at one capacity.

    For one thread: nothing here is locked, and while an engine makes a recording no other may use the GPU.
    """

    @torch.inference_mode(False)  # what is made here is written to outside of the caller's too
    def __init__(
        self,
        model: LanguageModel,
        capacity: Capacity | None = None,
        *,
        slots: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        quantization: Quantization | None = None,
        max_length: int | None = None,
        real_V: Tensor | None = None,
        graphs: bool = True,
    ) -> None:
        """Weights are packed for steps. Prompts run through `model` itself, in autocast where `dtype` is bf16; on a GPU
        its products then read what is packed. An engine is of the model as it is now: who changes it makes a new one.

        Args:
            capacity: the prefix to run; None runs all.
            slots: sequences at a time.
            dtype: bf16 or fp32, of weights, activations, keys and values.
            quantization: of the packed weights; prompts read the model's own.
            max_length: tokens a sequence may reach; needed where the window is the whole input, else ignored.
            real_V: bool [V], False for entries that are never drawn. None: all may be.
            graphs: record steps and prompts on a GPU; False launches every kernel by itself.

        Raises:
            UserError: as `pack_model` and `new_decode_state`; a `real_V` that is none.
        """
        entries = model.config.vocab_size
        if real_V is not None and (real_V.shape != (entries,) or real_V.dtype != torch.bool or not real_V.any()):
            raise UserError(f"real_V: expected {entries} truth values of which one at least is True")
        self.model = model
        self.capacity = full_capacity(model.config) if capacity is None else capacity
        self.dtype = dtype
        self.weights = pack_model(model, self.capacity, dtype, quantization)
        device = model.device
        self.state = new_decode_state(
            model.config, self.capacity, slots, dtype=dtype, device=device, max_length=max_length
        )
        self.slots = slots
        self._max_length = max_length
        self._sampling = SlotSampling(slots, model.config.vocab_size, device, real_V)
        self._live: dict[int, _Live] = {}
        self._buffers = StepBuffers.of(self.weights, slots)
        self._token_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._drawn_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._slot_B = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self._rows: tuple[int, ...] = ()
        """The slots that `_slot_B` names, idle rows included."""
        self._stepped = 0
        self._recordings = Recordings(device, enabled=graphs)
        self._prefill = Prefill(
            model,
            self.capacity,
            self.weights,
            self.state,
            self._sampling,
            self._recordings,
            dtype=dtype,
            max_length=max_length,
        )

    @property
    def live(self) -> list[int]:
        """The slots that hold a sequence."""
        return sorted(self._live)

    @property
    def free(self) -> int:
        """How many slots hold none."""
        return self.slots - len(self._live)

    @property
    def logits_BV(self) -> Tensor:
        """fp32, of the last step's slots in their order; the next step overwrites them."""
        return self._buffers.logits_BV[: self._stepped]

    def nbytes(self) -> int:
        """Bytes of states, tables and buffers, weights left out."""
        return sum(self.state.nbytes()) + self._sampling.nbytes() + self._buffers.nbytes()

    @property
    def recordings(self) -> int:
        """How many CUDA graphs there are: of steps, draws and prompts."""
        return len(self._recordings)

    def taken(self, slot: int) -> int:
        """Tokens that the slot's sequence has taken in."""
        return self._sequence(slot).taken

    @_on_its_device
    def add(self, prompt: Sequence[int], sampling: SamplingConfig = GREEDY, seed: int = 0) -> int:
        """Take in all of a prompt but its last token, which the first step does; the slot that it got.

        Does not wait for the device, but where a length class's second prompt is recorded.

        Raises:
            UserError: an empty prompt, one of more than `max_length` tokens, an id outside the vocabulary, an
                impossible seed, no free slot.
        """
        prompt = check_prompt(prompt, self.model.config.vocab_size)
        check_seed(seed)
        self._check_room(len(prompt))
        slot = self._free_slot()
        self._prefill(slot, prompt)
        self._settle(slot, _Live(sampling, seed, len(prompt) - 1))
        return slot

    def remove(self, slot: int) -> None:
        """The slot is free again."""
        self._sequence(slot)
        del self._live[slot]

    @_on_its_device
    def fork(self, slot: int, *, sampling: SamplingConfig | None = None, seed: int | None = None) -> int:
        """A second sequence that goes on from where this one is, in the slot returned; None keeps the setting.

        Raises:
            UserError: no free slot, an impossible seed.
        """
        source = self._sequence(slot)
        seed = source.seed if seed is None else seed
        check_seed(seed)
        target = self._free_slot()
        copy_slot(self.state, slot, target)
        self._sampling.copy(slot, target)
        self._settle(target, _Live(sampling or source.sampling, seed, source.taken))
        return target

    @_on_its_device
    def save(self, slot: int) -> SavedSequence:
        """A copy of the slot's sequence on the CPU; the slot keeps it."""
        sequence = self._sequence(slot)
        state = take(self.state, slot)
        return SavedSequence(
            ModelState(
                [t.cpu() for t in state.spectral],
                [t.cpu() for t in state.keys],
                [t.cpu() for t in state.values],
                state.key_position_BW.cpu(),
                state.position_B.cpu(),
            ),
            int(self._sampling.token_S[slot]),
            self._sampling.seen_SV[slot].clone().cpu(),
            sequence.sampling,
            sequence.seed,
            self._fingerprint,
        )

    @_on_its_device
    def restore(self, saved: SavedSequence) -> int:
        """Take in a saved sequence, which goes on as the one that was saved; the slot that it got.

        Raises:
            UserError: it was saved by an engine of other sizes, of another model or capacity, as far as `fingerprint`
                tells; it is damaged; there is no free slot.
        """
        own = self.model.init_state(1, self.capacity, max_length=self._max_length, dtype=self.dtype)
        for part in ("spectral", "keys", "values"):
            sizes, given = ([tuple(t.shape) for t in getattr(state, part)] for state in (own, saved.state))
            if sizes != given:
                raise UserError(f"saved sequence: its {part} are of sizes {given}; this engine's are of {sizes}")
        entries = self.model.config.vocab_size
        if len(saved.seen_V) != entries:
            raise UserError(
                f"saved sequence: of a vocabulary of {len(saved.seen_V)} entries; this model's has {entries}"
            )
        if saved.model != self._fingerprint:
            raise UserError("saved sequence: of another model than this engine's, or of another capacity of it")
        taken = int(saved.state.position_B)
        if not 0 <= saved.token < entries or taken < 0:
            raise UserError(f"saved sequence: damaged, with token {saved.token} at position {taken}; save it again")
        check_seed(saved.seed)
        self._check_room(taken)
        slot = self._free_slot()
        put(self.state, torch.tensor([slot], device=self.model.device), saved.state)
        self._sampling.seen_SV[slot].copy_(saved.seen_V)
        self._sampling.token_S[slot].fill_(saved.token)
        self._settle(slot, _Live(saved.sampling, saved.seed, taken))
        return slot

    @_on_its_device
    def force(self, slot: int, token: int) -> None:
        """Put `token` in the place of the slot's last one, which the next step takes in: for scoring given texts.

        The repetition penalty counts both.

        Raises:
            UserError: an id outside the vocabulary.
        """
        self._sequence(slot)
        check_prompt([token], self.model.config.vocab_size)
        self._sampling.force(slot, token)

    @_on_its_device
    def step(self, slots: Sequence[int]) -> Drawn:
        """Take in the last token of each slot's sequence and draw the next.

        Does not wait for the device, but where a batch class's second step or draw is recorded.

        Raises:
            UserError: no slot, one named twice or without a sequence, a sequence that would outgrow `max_length`.
        """
        if not slots or len(set(slots)) < len(slots):
            raise UserError(f"step of slots {list(slots)}: name at least one, and each once")
        sequences = [self._sequence(slot) for slot in slots]
        self._check_room(1 + max(sequence.taken for sequence in sequences))
        batch = self._class(len(slots)) if self._recordings.enabled else len(slots)
        needs = Needs.of([sequence.sampling for sequence in sequences])
        self._name(slots, batch)
        self._recordings.run(("step", batch), lambda: self._step(batch))
        self._recordings.run(("draw", batch, needs), lambda: self._draw(batch, needs))
        for sequence in sequences:
            sequence.taken += 1
        self._stepped = len(slots)
        return Drawn(self._drawn_B[: len(slots)])

    def _class(self, rows: int) -> int:
        return min(self.slots, 1 << (rows - 1).bit_length())

    def _name(self, slots: Sequence[int], batch: int) -> None:
        rows = (*slots, *[-1] * (batch - len(slots)))
        if rows != self._rows:
            send(rows, self._slot_B[:batch])
            self._rows = rows

    def _step(self, batch: int) -> None:
        slot_B, token_B = self._slot_B[:batch], self._token_B[:batch]
        token_B.copy_(self._sampling.tokens(slot_B))
        run(self.weights, self.state, token_B, slot_B, self._buffers.rows(batch))

    def _draw(self, batch: int, needs: Needs) -> None:
        drawn_B = self._sampling.draw(
            self._buffers.logits_BV[:batch], self._slot_B[:batch], self.state.position_S, needs
        )
        self._drawn_B[:batch].copy_(drawn_B)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.weights)

    def _sequence(self, slot: int) -> _Live:
        if slot not in self._live:
            raise UserError(f"slot {slot}: holds no sequence; those that do are {self.live}")
        return self._live[slot]

    def _free_slot(self) -> int:
        for slot in range(self.slots):
            if slot not in self._live:
                return slot
        raise UserError(f"slots: all {self.slots} hold a sequence; remove one, or make an engine of more")

    def _settle(self, slot: int, sequence: _Live) -> None:
        self._sampling.set(slot, sequence.sampling, sequence.seed)
        self._live[slot] = sequence

    def _check_room(self, length: int) -> None:
        config = self.model.config
        if config.window is None and config.attention_layers and length > (self._max_length or 0):
            raise UserError(f"the sequence outgrows the engine's max_length of {self._max_length} tokens")


def check_prompt(prompt: Sequence[int], entries: int) -> list[int]:
    """The prompt's ids; a prompt of none, or with one outside a vocabulary of `entries`, is a `UserError`."""
    try:
        prompt = [operator.index(token) for token in prompt]
    except TypeError:
        raise UserError("prompt: token ids must be whole numbers; a tokenizer makes them of text") from None
    if not prompt:
        raise UserError("prompt: no tokens; give at least one")
    outside = [token for token in prompt if not 0 <= token < entries]
    if outside:
        raise UserError(f"prompt: token {outside[0]} lies outside the model's vocabulary of {entries} entries")
    return prompt


def check_seed(seed: int) -> None:
    """Refuse what is no seed, with a `UserError`."""
    try:
        fits = 0 <= operator.index(seed) < 2**63
    except TypeError:
        fits = False
    if not fits:
        raise UserError(f"seed: {seed} must be a whole number of 0 to 2^63 - 1")
