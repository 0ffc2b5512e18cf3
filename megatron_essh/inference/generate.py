"""Continuing prompts token by token, and turning the tokens into text as they come.

`generate_many` runs requests through an engine's slots; `TextStream` decodes tokens to text and never gives out half
a character, `StopStrings` ends a text before a given string. None knows where the model came from or where the text
goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_essh.data.tokenizers import Tokenizer
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.inference.engine import Drawn, Engine, check_prompt, check_seed
from megatron_essh.inference.sampling import SamplingConfig
from megatron_essh.model.language_model import LanguageModel

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PARTIAL_CHARACTER = 3
"""Most bytes of a UTF-8 character that can have come while it is still incomplete."""


def real_tokens(tokenizer: Tokenizer, entries: int) -> Tensor:
    """Which entries of a vocabulary are tokens: bool [entries], False for padding and for gaps in the ids."""
    return torch.tensor([tokenizer.has(token) for token in range(entries)])


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text to be made."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingConfig
    """How its tokens are drawn."""
    seed: int = 0
    """Of the draws: the text is a function of it, the logits and nothing else."""
    max_new_tokens: int
    """Tokens to draw at most."""
    stop_token: int | None = None
    """Ends the text when drawn, as its last token; None runs on to `max_new_tokens`."""

    def check(self, entries: int) -> None:
        """Refuse a request that a model of a vocabulary of `entries` cannot answer, with a `UserError`."""
        check_prompt(self.prompt, entries)
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {self.max_new_tokens} asks for no token; give 1 or more")
        check_seed(self.seed)


def generate_many(
    engine: Engine, requests: Sequence[Request], ended: Collection[int] = ()
) -> Iterator[tuple[int, int]]:
    """Continue many prompts: yields (number of the request, new token) as tokens are drawn.

    Requests wait for a slot in their order. Those of one prompt that enter together are prefilled once. The device
    works on a step while the tokens of the step before it are given out.

    Args:
        ended: numbers of requests that get no more tokens; the caller adds to it between tokens.

    Raises:
        UserError: a request that cannot be answered (before anything runs), no slot but those that others hold, logits
            that are not finite.
    """
    for request in requests:
        request.check(engine.model.config.vocab_size)
    return _generate_many(engine, requests, ended)


def _generate_many(engine: Engine, requests: Sequence[Request], ended: Collection[int]) -> Iterator[tuple[int, int]]:
    waiting = deque(range(len(requests)))
    slot_of: dict[int, int] = {}
    begun, given = [0] * len(requests), [0] * len(requests)
    under_way: tuple[list[int], Drawn] | None = None

    def done(number: int) -> bool:
        return number in ended or number not in slot_of

    try:
        while waiting or slot_of:
            entered: dict[tuple[int, ...], int] = {}
            while waiting and engine.free:
                number = waiting.popleft()
                if number in ended:
                    continue
                request = requests[number]
                twin = entered.get(request.prompt)
                if twin is None:
                    slot_of[number] = engine.add(request.prompt, request.sampling, request.seed)
                    entered[request.prompt] = slot_of[number]
                else:
                    slot_of[number] = engine.fork(twin, sampling=request.sampling, seed=request.seed)
            if waiting and not slot_of:
                raise UserError(f"slots: all {engine.slots} hold sequences of others; remove one, or give more")
            numbers = [n for n in slot_of if begun[n] < requests[n].max_new_tokens and n not in ended]
            before, under_way = under_way, None
            if numbers:
                under_way = numbers, engine.step([slot_of[number] for number in numbers])
                for number in numbers:
                    begun[number] += 1
            if before is not None:
                for number, token in zip(before[0], before[1].tokens(), strict=True):
                    if done(number):
                        continue
                    given[number] += 1
                    if token == requests[number].stop_token or given[number] == requests[number].max_new_tokens:
                        engine.remove(slot_of.pop(number))
                    yield number, token
            for number in [n for n in slot_of if n in ended]:
                engine.remove(slot_of.pop(number))
    finally:  # whoever stops taking tokens leaves the engine as it was
        for slot in slot_of.values():
            engine.remove(slot)


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    *,
    max_new_tokens: int,
    seed: int = 0,
    capacity: Capacity | None = None,
    real_V: Tensor | None = None,
    stop_token: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[int]:
    """Continue one prompt: yields each new token. `generate_many` with an engine for this one text.

    Args:
        model: any capacity of it may run.
        config: temperature and filters.
        capacity: the prefix of the model to run; None runs all.
        real_V: bool [V], False for entries that are never drawn (see `real_tokens`). None: all may be.
        dtype: of the decode steps' weights and activations, fp32 or bf16.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, no token to draw, an impossible seed, logits
            that are not finite.
    """
    request = Request(
        prompt=tuple(prompt), sampling=config, seed=seed, max_new_tokens=max_new_tokens, stop_token=stop_token
    )
    request.check(model.config.vocab_size)
    engine = Engine(model, capacity, dtype=dtype, max_length=len(prompt) + max_new_tokens, real_V=real_V)
    return (token for _, token in generate_many(engine, [request]))


class TextStream:
    """Tokens in, whole characters out.

    A byte-level token may end inside a character, and a tokenizer decodes the start of one to U+FFFD. The
    last U+FFFD's are held back until more tokens make a character of them or `finish` gives them out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt` is the context of the first token: some tokenizers drop the space that begins a text."""
        self._tokenizer = tokenizer
        self._ids = list(prompt[-1:])
        self._given = len(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """Take in one token; the characters that are now certain."""
        self._ids.append(token)
        text = self._text()
        certain = len(text)
        while certain > max(self._given, len(text) - PARTIAL_CHARACTER) and text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = text[self._given : certain]
        if certain == len(text):  # nothing is held back: the last token is all the context that the next one needs
            self._ids = self._ids[-1:]
            certain = len(self._text())
        self._given = certain
        return piece

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        text = self._text()
        piece, self._given = text[self._given :], len(text)
        return piece


class StopStrings:
    """Text in, text out, up to the string that is complete first (of several, the longest), which is not given out.

    An end of the text that may be the beginning of one of them is held back until it is or is not.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise UserError("stop: an empty string is in every text; give at least one character")
        self._strings = tuple(strings)
        self._held = ""
        self.found = False
        """Whether the text has ended."""

    def push(self, piece: str) -> str:
        """Take in more text; what of it is certain to belong to the text."""
        if self.found:
            return ""
        text = self._held + piece
        found = [(place + len(string), place) for string in self._strings if (place := text.find(string)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        longest = max((len(string) for string in self._strings), default=1) - 1
        certain = next(
            (at for at in range(max(0, len(text) - longest), len(text)) if self._may_begin(text[at:])), len(text)
        )
        self._held = text[certain:]
        return text[:certain]

    def _may_begin(self, end: str) -> bool:
        return any(string.startswith(end) for string in self._strings)

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
