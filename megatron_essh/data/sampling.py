"""Which tokens make sample i: the order of documents, samples and blended datasets, as Megatron draws it.

The C++ helpers (`megatron_essh._index`) do the walking and the shuffling; `sample_index_reference`,
`blending_index_reference`, `exhaustive_index_reference` and NumPy's own `RandomState.shuffle` are their definitions.
Knows nothing of files: an order is a function of lengths, a sample length and a seed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_essh import _index
from megatron_essh.errors import UserError

Integers: TypeAlias = npt.NDArray[np.integer[Any]]

# An epoch that is hardly begun is shuffled apart, so that its few samples do not mix into the ones before it.
_WHOLE_EPOCH = 0.80

LARGEST_SHUFFLE = 2**32
"""Entries up to which `shuffle` does NumPy's work in C++; NumPy draws other random numbers beyond."""


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


@dataclass(frozen=True)
class Epochs:
    """How often a token stream is read to give a number of samples."""

    count: int
    """Smallest E with E * tokens >= samples * sequence_length + 1."""
    before_last: int
    """Samples that the epochs before the last give."""
    last_apart: bool
    """Whether the last epoch is shuffled by itself: where its samples are fewer than 0.8 of an epoch's."""

    @classmethod
    def of(cls, tokens: int, sequence_length: int, samples: int) -> Epochs:
        """Of `samples` samples of `sequence_length` out of `tokens` tokens, which must hold at least one."""
        assert tokens > sequence_length >= 1, f"{tokens} tokens hold no sample of {sequence_length}"
        assert samples >= 1, f"an order of {samples} samples"
        count = -(-(samples * sequence_length + 1) // tokens)
        before_last = ((count - 1) * tokens - 1) // sequence_length
        hardly = samples - before_last < int(_WHOLE_EPOCH * ((tokens - 1) // sequence_length))
        return cls(count, before_last, count > 1 and hardly)


def draw_order(
    sizes: npt.NDArray[np.int32], sequence_length: int, samples: int, seed: int, *, first: int = 0
) -> SampleOrder:
    """The order of at least `samples` samples.

    One generator, seeded once, shuffles first the documents of all epochs (`Epochs`) together, then the samples; a
    last epoch that is hardly begun is shuffled apart, in both. Within one epoch the order depends on the sizes, the
    sample length and the seed alone; over several it depends on `samples` too, through `Epochs`.

    Args:
        sizes: tokens in each sequence.
        sequence_length: tokens T in a sample, its last label not counted.
        samples: how many will be asked for.
        seed: 0 to 2**32 - 1.
        first: number of the first sequence, where `sizes` are a part of a pair's.

    Raises:
        UserError: the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"training.seed: {seed}; the data order takes seeds from 0 to {2**32 - 1}")
    aligned = np.require(sizes, np.int32, ["C", "A"])
    tokens = int(aligned.sum(dtype=np.int64))
    epochs = Epochs.of(tokens, sequence_length, samples)
    apart = [1] if epochs.last_apart else []
    generator = np.random.RandomState(seed)  # the legacy generator is part of the format

    count = len(sizes)
    documents = np.arange(count, dtype=np.int32)
    if epochs.count > 1:
        documents = np.tile(documents, epochs.count)
    groups = [epochs.count - len(apart), *apart]
    for begin, end in pairwise([0, *accumulate(groups)]):
        shuffle(documents[begin * count : end * count], generator)
    rows = _index.build_sample_idx(aligned, documents, sequence_length, epochs.count, tokens, _threads())
    del aligned
    slots = len(rows) - 1
    order: Integers = np.arange(slots, dtype=np.uint32 if slots < 2**32 - 2 else np.int64)
    bounds = [0, epochs.before_last, slots] if epochs.last_apart else [0, slots]
    for begin, end in pairwise(bounds):
        shuffle(order[begin:end], generator)
    if first:
        documents += np.int32(first)
    return SampleOrder(documents, rows, order, epochs.count, epochs.last_apart)


def shuffle(array: npt.NDArray[Any], generator: np.random.RandomState) -> None:
    """`generator.shuffle(array)`, several times as fast: the same order, and the generator left in the same state.

    Args:
        array: int32, uint32 or int64 [N], shuffled in place.
        generator: a Mersenne twister, as `RandomState(seed)` is.
    """
    if len(array) > LARGEST_SHUFFLE:
        generator.shuffle(array)
        return
    name, words, used, *rest = generator.get_state(legacy=True)
    words = np.array(words, np.uint32)
    generator.set_state((name, words, _index.shuffle(array, words, int(used)), *rest))


def split_documents(documents: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Cut `documents` documents, in the file's order, into parts [first, end) in the proportion of `shares`.

    Each border is the rounded share of all that lie before it, so that every document lies in exactly one part.
    """
    total = sum(shares)
    borders = [round(documents * before / total) for before in accumulate(shares, initial=0.0)]
    return list(pairwise([*borders[:-1], documents]))


def draw_blend(weights: npt.NDArray[np.float64], samples: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Which dataset each of `samples` draws takes, in shares of `weights`, and its position in that dataset.

    A longer blend of the same weights begins with a shorter one.
    """
    shares = np.ascontiguousarray(weights, np.float64) / np.sum(weights)
    chosen, position = np.empty(samples, np.int16), np.empty(samples, np.int64)
    _index.build_blending_indices(chosen, position, shares, len(shares), samples)
    return chosen, position


def draw_all(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """A blend that draws exactly `sizes[d]` times from dataset d, spread evenly; as `draw_blend` gives it."""
    counts = np.array(sizes, np.int64)
    chosen, position = np.empty(sum(sizes), np.int16), np.empty(sum(sizes), np.int64)
    _index.build_exhaustive_blending_indices(chosen, position, counts, len(counts))
    return chosen, position


def deal_by_size(sizes: Sequence[int], samples: int) -> list[int]:
    """`samples` samples dealt to datasets that hold `sizes`, in that proportion and in whole numbers.

    By largest remainders: every dataset is read through equally often, to within one sample.
    """
    total = sum(sizes)
    dealt = [samples * held // total for held in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda d: (-(samples * sizes[d] % total), d))
    for d in by_remainder[: samples - sum(dealt)]:
        dealt[d] += 1
    return dealt


def _threads() -> int:
    return len(os.sched_getaffinity(0))


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


def exhaustive_index_reference(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Definition of `build_exhaustive_blending_indices`: `blending_index_reference` with the sizes as weights, except
    that a dataset whose sizes[d] are drawn takes part no more.
    """
    total = sum(sizes)
    weights, counts = np.array(sizes) / max(1, total), np.zeros(len(sizes), np.int64)
    chosen, position = np.empty(total, np.int16), np.empty(total, np.int64)
    for i in range(total):
        behind = np.where(counts < sizes, weights * max(i, 1) - counts, -np.inf)
        best = int(np.argmax(behind))
        chosen[i], position[i] = best, counts[best]
        counts[best] += 1
    return chosen, position
