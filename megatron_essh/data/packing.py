"""Samples of fixed length out of a token pair, and the document number of each of their positions.

Documents are joined end to end (their end-of-document tokens are in the data) and cut into samples of T + 1
tokens; neighbouring samples share one token, the label of one and the first input of the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_essh.data.indexed_dataset import IndexedDataset, check_ids, check_token_ids
from megatron_essh.data.sampling import draw_order
from megatron_essh.errors import UserError

IGNORED = -100
"""Label that takes part in no loss."""

Tokens = TypeVar("Tokens", bound=Any)
"""A NumPy array or a PyTorch tensor."""


class PackedDataset:
    """Shuffled samples of a pair; sample i is int64 [sequence_length + 1].

    Sample i is a function of the pair's content, `sequence_length`, `seed` and i; where `samples` reaches
    beyond one epoch it also depends on the number of epochs (see `sampling.draw_order`).

    Args:
        prefix: the pair.
        sequence_length: tokens T in a sample, its last label not counted.
        seed: of the order, 0 to 2**32 - 1.
        samples: how many samples must be there; as many epochs as they take. None: one epoch.
        vocab_size: the model's vocabulary, which the pair is held to, as far as its sidecar describes it; whoever
            serves the samples checks them (`StatefulLoader`). None: not checked.

    Raises:
        UserError: the pair cannot be read (`IndexedDataset`), is too short for one sample, or holds a token
            outside the vocabulary.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        seed: int,
        *,
        samples: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.dataset = IndexedDataset(prefix)
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = vocab_size
        _check_length(self.dataset, sequence_length)
        if vocab_size is not None:
            check_token_ids(self.dataset, vocab_size, trust_sidecar=True)
        if samples is None:
            samples = (self.dataset.tokens - 1) // sequence_length
        self.order = draw_order(self.dataset.sizes, sequence_length, samples, seed)

    def __len__(self) -> int:
        """Samples there are: at least as many as were asked for."""
        return len(self.order.shuffle)

    @property
    def fingerprint(self) -> str:
        """Of the pair's content (`IndexedDataset.fingerprint`)."""
        return self.dataset.fingerprint

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`, int64 [sequence_length + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.dataset.prefix}")
        slot = int(self.order.shuffle[index])
        (document, offset), (last, end) = self.order.samples[slot : slot + 2].tolist()
        sample = np.empty(self.sequence_length + 1, np.int64)
        filled = 0
        for position in range(document, last + 1):
            tokens = self.dataset[int(self.order.documents[position])]
            piece = tokens[offset : end + 1 if position == last else None]
            sample[filled : filled + len(piece)] = piece
            filled += len(piece)
            offset = 0
        assert filled == len(sample), f"sample {index}: {filled} tokens"
        return sample


def document_ids(tokens_BT: Tokens, eod: int) -> Tokens:
    """Document number of each position, int64 [B, T], from 0: one more at the position after each `eod`.

    Takes a NumPy array or a PyTorch tensor and returns the same kind, on the same device.
    """
    ends_BT = tokens_BT == eod
    return ends_BT.cumsum(-1) - ends_BT * 1


def next_token_task(tokens_BT: Tokens, cut_at: int | None) -> tuple[Tokens, Tokens, Tokens | None]:
    """What samples [B, T + 1] ask of a model: inputs [B, T], labels [B, T] and documents [B, T].

    `cut_at` is the end-of-document token where documents are cut apart (data.document_mask): the label that follows
    one is `IGNORED`. None: nothing is cut, and documents are None. NumPy arrays or PyTorch tensors, as given.
    """
    inputs_BT, labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if cut_at is None:
        return inputs_BT, labels_BT, None
    labels_BT = labels_BT * 1  # a copy: labels and inputs share memory
    labels_BT[inputs_BT == cut_at] = IGNORED
    return inputs_BT, labels_BT, document_ids(inputs_BT, cut_at)


def validation_batches(
    prefix: str | Path, sequence_length: int, batch: int, count: int, *, vocab_size: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """The first `count` batches of a pair's windows in the file's order, each int64 [batch, sequence_length +
    1].

    Window i begins at token i * sequence_length. A pair that holds fewer windows gives fewer batches, the
    last of them smaller. Every token in them is held to `vocab_size`; None: not checked.

    Raises:
        UserError: as for `PackedDataset`.
    """
    dataset = IndexedDataset(prefix)
    _check_length(dataset, sequence_length)
    windows = min(batch * count, (dataset.tokens - 1) // sequence_length)
    starts = [i * sequence_length for i in range(windows)]
    samples = [dataset.flat[start : start + sequence_length + 1].astype(np.int64) for start in starts]
    batches = [np.stack(samples[i : i + batch]) for i in range(0, windows, batch)]
    if vocab_size is not None:
        for tokens in batches:
            check_ids(dataset, tokens, vocab_size)
    return batches


def _check_length(dataset: IndexedDataset, sequence_length: int) -> None:
    if dataset.tokens < sequence_length + 1:
        raise UserError(
            f"{dataset.prefix}.bin: {dataset.tokens} tokens, and one sample takes data.sequence_length + 1 = "
            f"{sequence_length + 1}; use more data or a shorter sequence"
        )
