"""Continuing a prompt token by token, and turning the tokens into text as they come.

`generate` prefills the prompt and steps the model; `TextStream` decodes tokens to text and never gives out
half a character. Neither knows where the model came from or where the text goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_essh.data.tokenizers import Tokenizer
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.inference.sampling import SamplingConfig, draw, token_probabilities
from megatron_essh.model.language_model import LanguageModel

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PARTIAL_CHARACTER = 3
"""Most bytes of a UTF-8 character that can have come while it is still incomplete."""


def real_tokens(tokenizer: Tokenizer, entries: int) -> Tensor:
    """Which entries of a vocabulary are tokens: bool [entries], False for padding and for gaps in the ids."""
    return torch.tensor([tokenizer.has(token) for token in range(entries)])


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
) -> Iterator[int]:
    """Continue `prompt`: yields each new token as soon as it is drawn.

    The draws are a pure function of the seed and the logits: a random generator of their own, on the CPU,
    makes one uniform number a token. A stop token ends the text and is the last one yielded.

    Args:
        model: any capacity of it may run.
        prompt: token ids, at least one.
        config: temperature and filters.
        max_new_tokens: tokens to draw at most.
        seed: of the draws.
        capacity: the prefix of the model to run; None runs all.
        real_V: bool [V], False for entries that are never drawn (see `real_tokens`). None: all may be.
        stop_token: ends the text when drawn; None runs on to `max_new_tokens`.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, no token to draw, an impossible seed, logits
            that are not finite.
    """
    entries = model.config.vocab_size
    if not prompt:
        raise UserError("prompt: no tokens; give at least one")
    outside = [token for token in prompt if not 0 <= token < entries]
    if outside:
        raise UserError(f"prompt: token {outside[0]} lies outside the model's vocabulary of {entries} entries")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {max_new_tokens} asks for no token; give 1 or more")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed: {seed} must lie in 0 to 2^63 - 1")
    return _generate(model, prompt, config, max_new_tokens, seed, capacity, real_V, stop_token)


def _generate(
    model: LanguageModel,
    prompt: Sequence[int],
    config: SamplingConfig,
    max_new_tokens: int,
    seed: int,
    capacity: Capacity | None,
    real_V: Tensor | None,
    stop_token: int | None,
) -> Iterator[int]:
    uniforms = torch.Generator().manual_seed(seed)
    # Inference mode is entered around each call, not around the loop: a suspended loop would leave it on.
    with torch.inference_mode():
        state = model.init_state(1, capacity, max_length=len(prompt) + max_new_tokens)
        logits_BV, state = model.prefill(torch.tensor([prompt], device=model.device), state, capacity)
    for count in range(1, max_new_tokens + 1):
        with torch.inference_mode():
            probabilities_BV = token_probabilities(logits_BV, config, real_V=real_V)
            token_B = draw(probabilities_BV, torch.rand(1, dtype=torch.float64, generator=uniforms))
        token = int(token_B)
        yield token
        if token == stop_token or count == max_new_tokens:
            return
        with torch.inference_mode():
            logits_BV, state = model.step(token_B, state, capacity)


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
