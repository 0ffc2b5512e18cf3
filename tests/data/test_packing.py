"""Packed samples hold the documents' tokens, all of them, in order, whatever the borders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import IndexedDatasetWriter, PackedDataset, document_ids, validation_batches
from megatron_essh.data.packing import IGNORED, next_token_task
from megatron_essh.errors import UserError
from megatron_essh.ops import linear_loss


def corpus(seed: int, documents: int = 40, longest: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, rng.integers(0, longest)).tolist() for _ in range(documents)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=12),
    sequence_length=st.integers(1, 15),
    samples=st.none() | st.integers(1, 40),
    seed=st.integers(0, 50),
)
def test_slots_in_order_are_the_shuffled_documents_joined(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    sequence_length: int,
    samples: int | None,
    seed: int,
) -> None:
    prefix = tmp_path_factory.mktemp("slots") / "p"
    token = 0
    sequences: list[list[int]] = []
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for document in lengths:
            pieces = []
            for length in document:
                pieces.append(list(range(token, token + length)))  # every token is another one
                token += length
            writer.add_document(*pieces)
            sequences += pieces
    if token <= sequence_length:
        with pytest.raises(UserError, match=rf"{token} tokens, .* = {sequence_length + 1}"):
            PackedDataset(prefix, sequence_length, seed, samples=samples)
        return
    packed = PackedDataset(prefix, sequence_length, seed, samples=samples)
    stream = [t for number in packed.order.documents for t in sequences[number]]
    of_slot = {int(slot): i for i, slot in enumerate(packed.order.shuffle)}
    assert len(of_slot) == len(packed) >= (samples or 1)
    for slot in range(len(packed)):
        sample = packed[of_slot[slot]]
        assert sample.dtype == np.int64
        assert sample.tolist() == stream[slot * sequence_length : (slot + 1) * sequence_length + 1]
    assert sorted(Counter(stream).items()) == [(t, packed.order.epochs) for t in range(token)]


def test_samples_depend_on_the_seed_the_files_and_the_length_alone(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair(corpus(0))
    a, b = PackedDataset(prefix, 32, 5), PackedDataset(prefix, 32, 5, samples=3, vocab_size=50_000)
    assert all(np.array_equal(a[i], b[i]) for i in range(len(a)))
    other = PackedDataset(prefix, 32, 6)
    assert any(not np.array_equal(a[i], other[i]) for i in range(len(a)))
    copy = PackedDataset(write_pair(corpus(0), "copy"), 32, 5)
    assert all(np.array_equal(a[i], copy[i]) for i in range(len(a)))


def test_any_number_of_samples_is_served(write_pair: Callable[..., Path]) -> None:
    packed = PackedDataset(write_pair(corpus(1)), 32, 5, samples=1000)
    assert len(packed) >= 1000
    assert packed.order.epochs > 10
    assert {packed[i].shape for i in range(0, 1000, 37)} == {(33,)}
    for index in (len(packed), -1):
        with pytest.raises(IndexError, match=f"sample {index} of"):
            packed[index]


def test_data_that_does_not_fit_the_run_is_refused(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair([[1, 2, 3], [499]])
    for build in (
        lambda length, vocab: PackedDataset(prefix, length, 0, vocab_size=vocab),
        lambda length, vocab: validation_batches(prefix, length, 2, 1, vocab_size=vocab),
    ):
        with pytest.raises(UserError, match=r"pair\.bin: 4 tokens, .* data\.sequence_length \+ 1 = 5"):
            build(4, 500)
        with pytest.raises(UserError, match=r"pair\.bin: token id 499 .* vocabulary of 499"):
            build(3, 499)
        build(3, 500)


def test_validation_batches_are_the_first_windows_in_order(write_pair: Callable[..., Path]) -> None:
    documents = corpus(2)
    stream = np.array([t for d in documents for t in d])
    prefix = write_pair(documents)
    batches = validation_batches(prefix, 16, 4, 3)
    assert [(b.shape, b.dtype) for b in batches] == [((4, 17), np.int64)] * 3
    for i, window in enumerate(np.concatenate(batches)):
        np.testing.assert_array_equal(window, stream[16 * i : 16 * i + 17])


def test_a_short_validation_pair_gives_what_it_has(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair([list(range(16 * 6 + 1))])
    assert [len(b) for b in validation_batches(prefix, 16, 4, 100)] == [4, 2]
    assert [len(b) for b in validation_batches(prefix, 96, 4, 100)] == [1]
    one_token_less = write_pair([list(range(16 * 6))], "less")
    assert [len(b) for b in validation_batches(one_token_less, 16, 4, 100)] == [4, 1]


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=3))
def test_document_numbers_rise_right_after_an_end_of_document(tokens: list[list[int]]) -> None:
    expected = []
    for row in tokens:
        number, numbers = 0, []
        for token in row:
            numbers.append(number)
            number += token == 0
        expected.append(numbers)
    array = np.array(tokens)
    for kind, result in ((np.int64, document_ids(array, 0)), (torch.int64, document_ids(torch.tensor(tokens), 0))):
        assert result.dtype == kind
        assert result.tolist() == expected


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_the_label_after_a_document_end_is_ignored_only_where_documents_are_cut(kind) -> None:
    tokens = kind(np.array([[5, 9, 2, 9, 9], [1, 2, 3, 4, 9]]))
    inputs, labels, documents = next_token_task(tokens, cut_at=9)
    assert inputs.tolist() == [[5, 9, 2, 9], [1, 2, 3, 4]]
    assert labels.tolist() == [[9, IGNORED, 9, IGNORED], [2, 3, 4, 9]]
    assert documents.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert tokens.tolist() == [[5, 9, 2, 9, 9], [1, 2, 3, 4, 9]]
    inputs, labels, documents = next_token_task(tokens, cut_at=None)
    assert (labels.tolist(), documents) == ([[9, 2, 9, 9], [2, 3, 4, 9]], None)
    assert linear_loss.IGNORED == IGNORED
