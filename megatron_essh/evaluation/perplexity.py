"""Perplexity on a token pair: mean negative log-likelihood a token, and bits a byte of the text.

The data is cut into windows of T + 1 tokens in the file's order, neighbours sharing one token, so that every
token but the first is predicted once, from what its window holds before it. Nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_essh.data.indexed_dataset import IndexedDataset, check_ids, check_token_ids
from megatron_essh.data.packing import IGNORED, next_token_task
from megatron_essh.data.tokenizers import Tokenizer
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.linear_loss import cross_entropy

Batches = Iterable[npt.NDArray[np.int64]]
"""Token ids [B, T + 1]; neighbouring windows share one token."""


@dataclass(frozen=True)
class Score:
    """A sum over the scored tokens."""

    total: float
    """Negative log-likelihood in nats."""
    tokens: int

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood a token, in nats."""
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nll); infinity where that is more than a float holds (nll above 709.78)."""
        try:
            return math.exp(self.nll)
        except OverflowError:
            return math.inf

    def bits_per_byte(self, text_bytes: int) -> float:
        """Bits for each byte of the scored text, whatever tokenizer cut it."""
        return self.total / math.log(2) / text_bytes


class Windows:
    """Data in order, as batches [batch, sequence_length + 1] of int64; the last of them may be smaller.

    Args:
        dataset: the token pair.
        sequence_length: tokens T that a window predicts.
        batch: windows in a batch.
        batches: how many batches at most. None: all of the data; what is left after the last whole window comes
            as a shorter one, in a batch of its own.
        vocab_size: what every token is held to. None: not checked.

    Raises:
        UserError: the data holds no window, or a token outside the vocabulary.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequence_length: int,
        batch: int,
        batches: int | None = None,
        *,
        vocab_size: int | None = None,
    ) -> None:
        for name, value in (
            ("sequence length", sequence_length),
            ("batch size", batch),
            ("batches", batches),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name}: {value} must be at least 1")
        needed = 2 if batches is None else sequence_length + 1
        if dataset.tokens < needed:
            raise UserError(
                f"{dataset.prefix}.bin: {dataset.tokens} tokens, and the evaluation takes at least {needed}; "
                "use more data or a shorter --sequence-length"
            )
        if vocab_size is not None:
            check_token_ids(dataset, vocab_size, trust_sidecar=True)  # the rest as it is served
        self._dataset = dataset
        self._vocab_size = vocab_size
        self._length = sequence_length
        self._batch = batch
        whole = (dataset.tokens - 1) // sequence_length
        self._whole = whole if batches is None else min(whole, batch * batches)
        self._rest = batches is None and whole * sequence_length + 1 < dataset.tokens

    def __len__(self) -> int:
        """Batches."""
        return math.ceil(self._whole / self._batch) + self._rest

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        length = self._length
        for first in range(0, self._whole, self._batch):
            starts = range(first * length, min(first + self._batch, self._whole) * length, length)
            yield self._checked(np.stack([self._dataset.flat[start : start + length + 1] for start in starts]))
        if self._rest:
            yield self._checked(self._dataset.flat[None, self._whole * length :])

    def _checked(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if self._vocab_size is not None:
            check_ids(self._dataset, tokens, self._vocab_size)
        return tokens.astype(np.int64)


def score(
    model: LanguageModel,
    batches: Batches,
    capacity: Capacity | None = None,
    *,
    cut_at: int | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    chunk: int | None = 4096,
    head_VD: Tensor | None = None,
) -> Score:
    """Negative log-likelihood of every token in `batches` that is predicted.

    Args:
        model: where it is, the batches go; of one that is dealt out over ranks, every rank scores the same batches.
        batches: as `Windows` gives them.
        capacity: the prefix of the model to run; None runs all.
        cut_at: for a model trained with data.document_mask, the end-of-document token: scan and attention are
            cut after it, and the token that follows it is not scored.
        precision: bf16 is autocast, as in training.
        chunk: positions whose logits exist at one time.
        head_VD: an output head in place of the model's own, which is its embedding.

    Raises:
        UserError: no token to score, or a likelihood that is not finite.
    """
    total, tokens = 0.0, 0
    with (
        torch.inference_mode(),
        torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16"),
    ):
        for index, batch in enumerate(batches):
            inputs_BT, labels_BT, documents_BT = next_token_task(torch.from_numpy(batch).to(model.device), cut_at)
            hidden_BTD = model.hidden(inputs_BT, capacity, documents_BT=documents_BT)
            loss = cross_entropy(
                hidden_BTD.flatten(0, 1),
                model.head_weight if head_VD is None else head_VD,
                labels_BT.flatten(),
                chunk=chunk,
                vocabulary=model.partition.vocabulary,
            )
            total += float(loss)
            tokens += int((labels_BT != IGNORED).sum())
            if not math.isfinite(total):
                raise UserError(f"batch {index}: the model's likelihood is not finite; its weights are damaged")
    if tokens == 0:
        raise UserError("no token to score in the given data")
    return Score(total, tokens)


def scored_bytes(batches: Batches, tokenizer: Tokenizer, *, cut_at: int | None = None) -> int:
    """UTF-8 bytes of the text of the tokens that `score` counts.

    End-of-document tokens are scored but have no text. A document is decoded at once, so that characters of
    several tokens count right; one that the end of the data cuts off counts as the three bytes of U+FFFD.
    """
    total = 0
    document: list[int] = []
    for batch in batches:
        labels = next_token_task(batch, cut_at)[1].reshape(-1)
        for token in labels[labels != IGNORED].tolist():
            if token == tokenizer.eod:
                total += len(tokenizer.decode(document).encode())
                document = []
            else:
                document.append(token)
    return total + len(tokenizer.decode(document).encode())
