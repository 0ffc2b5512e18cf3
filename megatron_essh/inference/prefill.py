"""Prompts enter slots: all of a prompt but its last token is taken in, which is left to the sequence's first step.

A prompt is some hundred kernels, which a host may need longer to launch than a GPU to run. So on a GPU it is filled up
to one of few lengths, and each of these lengths is recorded as a CUDA graph, which reads from the device how many
tokens are real. Longer prompts, which keep the GPU busy, and those of a CPU run at their own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from megatron_essh.elastic.capacity import Capacity
from megatron_essh.inference.device_sampling import SlotSampling
from megatron_essh.inference.packing import put, reading
from megatron_essh.inference.recordings import Recordings, send
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.decode_step.state import DecodeState
from megatron_essh.ops.decode_step.weights import DecodeWeights

SHORTEST, LONGEST = 32, 4096
"""Tokens of the least and the greatest length class."""
HALVED_FROM = 512
"""From this length on there is a class half-way to the next power of two."""


def length_class(tokens: int) -> int:
    """The least length class that holds so many tokens, 1 to `LONGEST`: 32, 64, ... 512, 768, 1,024, 1,536, ..."""
    power = max(SHORTEST, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power > HALVED_FROM and tokens <= power * 3 // 4 else power


class Prefill:
    """Takes prompts into the slots of one engine."""

    def __init__(
        self,
        model: LanguageModel,
        capacity: Capacity,
        weights: DecodeWeights,
        state: DecodeState,
        sampling: SlotSampling,
        recordings: Recordings,
        *,
        dtype: torch.dtype,
        max_length: int | None,
    ) -> None:
        """Prompts run through `model` at `capacity`, in autocast where `dtype` is bf16; on a GPU its products read the
        packed `weights`, unless those are quantised. The results go to `state` and `sampling`.

        Args:
            dtype: bf16 or fp32, as the weights were packed in.
            max_length: as the state was made with.
        """
        self._model, self._capacity, self._weights = model, capacity, weights
        self._state, self._sampling, self._recordings = state, sampling, recordings
        self._dtype, self._max_length = dtype, max_length
        self._given_X = torch.zeros(2 + LONGEST if recordings.enabled else 0, dtype=torch.int64, device=model.device)
        """What a recording reads: the slot, the tokens to take in, the prompt."""

    def __call__(self, slot: int, prompt: Sequence[int]) -> None:
        """Begin the slot's sequence with a prompt of at least one token; what the slot held is gone.

        Does not wait for the device, but where a recording is made.
        """
        length = len(prompt)
        recorded = self._recordings.enabled and length <= LONGEST
        if recorded:
            length = length_class(length)
            given_X = self._given_X[: 2 + length]
        else:
            given_X = self._given_X.new_empty(2 + length)
        send([slot, len(prompt) - 1, *prompt, *[prompt[-1]] * (length - len(prompt))], given_X)
        slot_1, taken_1, tokens_T = given_X.split([1, 1, length])
        if not recorded:
            self.take_in(slot_1, tokens_T)
            return

        def work() -> list[Tensor | None]:
            self.take_in(slot_1, tokens_T, taken_1)
            return self._read()

        self._recordings.run(("prompt", length), work)

    @torch.no_grad()
    def take_in(self, slot_1: Tensor, tokens_T: Tensor, taken_1: Tensor | None = None) -> None:
        """The same of what lies on the device; on a GPU nothing is read on the host.

        Args:
            slot_1: int64 [1].
            tokens_T: int64 [T], the prompt, and behind it, as pads, its last token any number of times.
            taken_1: int64 [1], the prompt's tokens but one. None: there are no pads.
        """
        device = self._model.device.type
        with (
            reading(self._model, self._weights) if device == "cuda" else nullcontext(),
            torch.autocast(device, torch.bfloat16, enabled=self._dtype == torch.bfloat16),
        ):
            given = self._model.take_in(
                (tokens_T[:-1] if taken_1 is None else tokens_T)[None],
                self._capacity,
                count_B=taken_1,
                max_length=self._max_length,
                dtype=self._dtype,
            )
        put(self._state, slot_1, given)
        self._sampling.begin(slot_1, tokens_T)

    def _read(self) -> list[Tensor | None]:
        """What `take_in` may read of the model, so that a recording of it can keep it."""
        return [t for p in self._model.parameters() for t in (p.detach(), getattr(p, "compute_copy", None))]
