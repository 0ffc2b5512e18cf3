"""Which tokens make sample i: the order of documents, samples and blended datasets, as Megatron draws it.

The C++ helpers (`megatron_essh._index`) do the walking; `sample_index_reference` and
`blending_index_reference` are their definitions in NumPy. Knows nothing of files: an order is a function of
lengths, a sample length and a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_essh import _index
from megatron_essh.errors import UserError

Integers: TypeAlias = npt.NDArray[np.integer[Any]]

# An epoch that is hardly begun is shuffled apart, so that its few samples do not mix into the ones before it.
_WHOLE_EPOCH = 0.80


@dataclass(frozen=True)
class SampleOrder:
    """Where every sample lies.

    Sample i is the slot j = `shuffle[i]`; it runs from row j of `samples`, (position in `documents`, token
    offset), to row j + 1, that token included: one token more than the sample length, the last label.
    """

    documents: npt.NDArray[np.int32]
    """Sequence numbers in the order they are read, `epochs` times each."""
    samples: Integers
    """[slots + 1, 2], where each slot begins; int32, or int64 where `documents` is too long for it."""
    shuffle: Integers
    """[slots], the order in which slots are served; uint32, or int64 from 2**32 - 2 slots on."""
    epochs: int
    """Times that every document is read."""
    last_epoch_apart: bool
    """Whether the last epoch is shuffled by itself."""


def draw_order(sizes: npt.NDArray[np.int32], sequence_length: int, samples: int, seed: int) -> SampleOrder:
    """The order of at least `samples` samples.

    Uses the smallest number of epochs E with E * tokens >= samples * sequence_length + 1. One generator,
    seeded once, shuffles first the documents of all E epochs together, then the samples; the last epoch is
    shuffled apart, in both, if its samples are fewer than 0.8 of an epoch's. Within one epoch the order
    depends on the sizes, the sample length and the seed alone; over several it depends on `samples` too,
    through E and `last_epoch_apart`.

    Args:
        sizes: tokens in each sequence.
        sequence_length: tokens T in a sample, its last label not counted.
        samples: how many will be asked for.
        seed: 0 to 2**32 - 1.

    Raises:
        UserError: the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"training.seed: {seed}; the data order takes seeds from 0 to {2**32 - 1}")
    tokens = int(sizes.sum(dtype=np.int64))
    assert tokens > sequence_length >= 1, f"{tokens} tokens hold no sample of {sequence_length}"
    assert samples >= 1, f"an order of {samples} samples"
    epochs = -(-(samples * sequence_length + 1) // tokens)
    before_last = ((epochs - 1) * tokens - 1) // sequence_length
    from_last = samples - before_last
    apart = epochs > 1 and from_last < int(_WHOLE_EPOCH * ((tokens - 1) // sequence_length))

    generator = np.random.RandomState(seed)  # the legacy generator is part of the format
    documents = _shuffled_documents(len(sizes), [epochs - 1, 1] if apart else [epochs], generator)
    aligned = np.require(sizes, np.int32, ["C", "A"])
    rows = _index.build_sample_idx(aligned, documents, sequence_length, epochs, tokens)
    slots = len(rows) - 1
    shuffle = _shuffled_slots([0, before_last, slots] if apart else [0, slots], generator)
    return SampleOrder(documents, rows, shuffle, epochs, apart)


def _shuffled_documents(count: int, groups: list[int], generator: np.random.RandomState) -> npt.NDArray[np.int32]:
    parts = [np.tile(np.arange(count, dtype=np.int32), epochs) for epochs in groups]
    for part in parts:
        generator.shuffle(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _shuffled_slots(bounds: list[int], generator: np.random.RandomState) -> Integers:
    dtype = np.uint32 if bounds[-1] < 2**32 - 2 else np.int64
    parts: list[Integers] = [np.arange(begin, end).astype(dtype) for begin, end in pairwise(bounds)]
    for part in parts:
        generator.shuffle(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sample_index_reference(
    sizes: npt.NDArray[Any],
    document_idx: npt.NDArray[Any],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> npt.NDArray[np.int64]:
    """Definition of `build_sample_idx`: row k is where token k * seq_length of the joined documents lies.

    A token on a border belongs to the document that begins there, empty documents passed over; row 0 is
    always (0, 0). Returns [samples + 1, 2] with samples = (num_epochs * tokens_per_epoch - 1) // seq_length.
    """
    lengths = sizes[document_idx].astype(np.int64)
    ends = np.cumsum(lengths)
    first = np.arange((num_epochs * tokens_per_epoch - 1) // seq_length + 1, dtype=np.int64) * seq_length
    document = np.searchsorted(ends, first, side="right")
    rows = np.stack([document, first - (ends - lengths)[document]], axis=1)
    rows[0] = 0
    return rows


def blending_index_reference(
    weights: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Definition of `build_blending_indices`: draw i takes the dataset with the largest weight * max(i, 1) -
    count.

    A tie goes to the lowest dataset. Returns which dataset each draw takes, and its position in that dataset,
    [size].
    """
    counts = np.zeros(len(weights), np.int64)
    chosen, position = np.empty(size, np.int16), np.empty(size, np.int64)
    for i in range(size):
        best = int(np.argmax(weights * max(i, 1) - counts))
        chosen[i], position[i] = best, counts[best]
        counts[best] += 1
    return chosen, position
