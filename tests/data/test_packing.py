"""Packed samples hold the documents' tokens, all of them, in order, whatever the borders."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import (
    IndexedDataset,
    IndexedDatasetWriter,
    PackedDataset,
    document_ids,
    index_format,
    indexed_dataset,
    validation_batches,
)
from megatron_essh.data.packing import IGNORED, DatasetPart, next_token_task
from megatron_essh.data.sampling import split_documents
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


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=14),
    shares=st.tuples(st.floats(0.1, 1), st.floats(0, 1), st.floats(0, 1)),
    sequence_length=st.integers(1, 12),
    seed=st.integers(0, 50),
)
def test_a_split_serves_every_token_of_its_documents_once_an_epoch_in_order_and_no_other(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    shares: tuple[float, float, float],
    sequence_length: int,
    seed: int,
) -> None:
    prefix = tmp_path_factory.mktemp("split") / "p"
    token, documents = 0, []
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        for document in lengths:
            pieces = [
                list(range(token + sum(document[:i]), token + sum(document[: i + 1]))) for i in range(len(document))
            ]
            token += sum(document)
            writer.add_document(*pieces)
            documents.append([t for piece in pieces for t in piece])
    pair = IndexedDataset(prefix)
    parts = [DatasetPart(pair, part) for part in split_documents(len(documents), shares)]
    assert [t for part in parts for t in part.flat.tolist()] == list(range(token))
    for part in parts:
        own = [t for document in documents[slice(*part.documents)] for t in document]
        assert part.flat.tolist() == own
        if len(own) <= sequence_length:
            with pytest.raises(UserError, match=f"{len(own)} tokens"):
                PackedDataset(part, sequence_length, seed)
            continue
        packed = PackedDataset(part, sequence_length, seed)
        of_slot = {int(slot): i for i, slot in enumerate(packed.order.shuffle)}
        samples = [packed[of_slot[slot]].tolist() for slot in range(len(packed))]
        stream = [t for sample in samples for t in sample[:-1]] + samples[-1][-1:]
        held = [t for number in packed.order.documents for t in pair[int(number)].tolist()]
        assert sorted(held) == own  # every sequence of the part once, each whole and in order
        assert stream == held[: len(stream)]
        assert len(held) - len(stream) < sequence_length  # what is too short for a sample, at an epoch's end
        windows = [w.tolist() for batch in validation_batches(part, sequence_length, 2, 100) for w in batch]
        assert [t for w in windows for t in w[:-1]] == own[: len(windows) * sequence_length]


@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<u2", "<i2", "<i4", "<i8"])
def test_read_gives_what_the_definition_gives(write_pair: Callable[..., Path], dtype: str) -> None:
    documents = [[t % 120 for t in document] for document in corpus(4)]
    packed = PackedDataset(write_pair(documents, dtype=dtype), 32, 5, samples=200)
    indices = np.random.default_rng(0).integers(0, len(packed), 64)
    found = np.full((64, 33), -1, np.int64)
    packed.read(indices, found)
    np.testing.assert_array_equal(found, np.stack([packed[i] for i in indices]))
    for wrong in (-1, len(packed)):
        with pytest.raises(IndexError):
            packed.read(np.array([0, wrong]), found[:2])
    packed.read(indices[:0], found[:0])


def test_a_wide_order_is_read_as_a_narrow_one(write_pair: Callable[..., Path]) -> None:
    """What an order over more than 2**31 documents holds: rows of int64, a shuffle of int64."""
    packed = PackedDataset(write_pair(corpus(4)), 32, 5, samples=200)
    order = packed.order
    expected = np.stack([packed[i] for i in range(200)])
    packed.order = replace(order, samples=order.samples.astype(np.int64), shuffle=order.shuffle.astype(np.int64))
    found = np.empty((200, 33), np.int64)
    packed.read(np.arange(200), found)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [-4, 7])
def test_a_length_that_opening_did_not_look_at_is_found_when_the_order_is_drawn(
    write_pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, value: int
) -> None:
    monkeypatch.setattr(indexed_dataset, "WHOLLY_CHECKED", 0)
    monkeypatch.setattr(index_format, "_CHECKED_BLOCKS", 2)
    monkeypatch.setattr(index_format, "_CHECKED_BLOCK", 4)
    prefix = write_pair([[1] * 5] * 100)
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(34 + 4 * 50)
        file.write(np.array([value], "<i4").tobytes())
    dataset = IndexedDataset(prefix)
    assert dataset.tokens == 500
    with pytest.raises(UserError, match=r"pair\.idx: (lengths: sequence 50 has -4|offsets: sequence 51)"):
        PackedDataset(DatasetPart(dataset), 32, 5)


def test_samples_come_out_of_a_terabyte_at_once_and_from_its_very_end(tmp_path: Path) -> None:
    documents, length = 500, 2**30
    prefix, size = tmp_path / "terabyte", 500 * 2**30 * 2
    lengths = np.full(documents, length, "<i4")
    offsets = np.arange(documents, dtype="<i8") * length * 2
    boundaries = np.arange(documents + 1, dtype="<i8")
    head = index_format.pack_header(np.dtype("<u2"), documents, documents)
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + boundaries.tobytes())
    last = np.arange(1, 1000, dtype="<u2")
    with Path(f"{prefix}.bin").open("wb") as file:  # a hole, except for the last tokens
        file.truncate(size)
        file.seek(size - last.nbytes)
        file.write(last.tobytes())

    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packed = PackedDataset(prefix, 2**20, 3)
    assert time.monotonic() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    assert len(packed) == documents * 2**10 - 1
    # The file's end lies in the stream where its last document is read to its end.
    position = packed.order.documents.tolist().index(documents - 1)
    slot = position * 2**10 + 2**10 - 1
    assert position < documents - 1, "the seed puts another document last, whose end no sample holds"
    sample = np.empty((1, 2**20 + 1), np.int64)
    packed.read(np.flatnonzero(packed.order.shuffle == slot)[:1], sample)
    np.testing.assert_array_equal(sample[0, -1000:-1], last)


def test_a_damaged_index_is_named_and_nothing_beyond_the_file_is_read(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair(corpus(4))
    packed = PackedDataset(prefix, 32, 5, samples=200)
    with Path(f"{prefix}.idx").open("r+b") as file:  # under the open map, as a failing disk would
        file.seek(34 + 4 * len(packed.dataset))
        file.write(np.full(len(packed.dataset), 1 << 40, "<i8").tobytes())
    with pytest.raises(UserError, match=r"pair\.idx: .*(damaged|offsets)"):
        packed.read(np.arange(8), np.empty((8, 33), np.int64))


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
