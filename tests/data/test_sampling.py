"""Sample, blend and shuffle orders: the C++ against NumPy, both against Megatron's values and procedure."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_essh import _index
from megatron_essh.data import sampling
from megatron_essh.data.sampling import (
    blending_index_reference,
    deal_by_size,
    draw_all,
    draw_blend,
    draw_order,
    exhaustive_index_reference,
    sample_index_reference,
    shuffle,
    split_documents,
)
from megatron_essh.errors import UserError

SIZES = np.array([5, 3, 7, 0, 4], np.int32)
DOCUMENTS = np.array([2, 0, 3, 4, 1], np.int32)


def test_the_sample_index_has_megatrons_golden_values() -> None:
    golden = [[0, 0], [0, 4], [1, 1], [3, 0], [4, 0]]
    for build in (_index.build_sample_idx, _index.build_sample_idx_int64, sample_index_reference):
        assert build(SIZES, DOCUMENTS, 4, 1, 19).tolist() == golden


def test_the_blend_has_megatrons_golden_values() -> None:
    golden = [0, 1, 0, 2, 0, 0, 1, 0, 0, 0]
    dataset, position = np.empty(10, np.int16), np.empty(10, np.int64)
    _index.build_blending_indices(dataset, position, np.array([0.7, 0.2, 0.1]), 3, 10)
    assert dataset.tolist() == golden
    assert blending_index_reference(np.array([0.7, 0.2, 0.1]), 10)[0].tolist() == golden
    assert position.tolist() == [golden[:i].count(d) for i, d in enumerate(golden)]


def test_the_sample_index_takes_32_bits_where_they_do_and_64_on_request() -> None:
    narrow, wide = (f(SIZES, DOCUMENTS, 4, 1, 19) for f in (_index.build_sample_idx, _index.build_sample_idx_int64))
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any),
    seq_length=st.integers(1, 25),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_cpp_sample_index_is_its_numpy_definition(
    sizes: list[int], seq_length: int, epochs: int, seed: int
) -> None:
    lengths = np.array(sizes, np.int32)
    documents = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    np.random.default_rng(seed).shuffle(documents)
    expected = sample_index_reference(lengths, documents, seq_length, epochs, sum(sizes))
    for build in (_index.build_sample_idx, _index.build_sample_idx_int64):
        np.testing.assert_array_equal(build(lengths, documents, seq_length, epochs, sum(sizes)), expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_sample_index_does_not_depend_on_threads_or_blocks(threads: int) -> None:
    """Over more documents than one round of blocks holds, with empty and long ones across the borders."""
    rng = np.random.default_rng(threads)
    sizes = rng.integers(0, 40, 300_000).astype(np.int32)
    sizes[rng.integers(0, len(sizes), 30)] = 100_000
    sizes[131_072 - 50 : 131_072 + 50] = 0
    documents = np.arange(len(sizes), dtype=np.int32)
    documents[200_000:] = rng.permutation(documents[200_000:])
    tokens = int(sizes.sum())
    for seq_length in (1, 64, 4097, 3 * 10**6):
        found = _index.build_sample_idx(sizes, documents, seq_length, 1, tokens, threads)
        np.testing.assert_array_equal(found, sample_index_reference(sizes, documents, seq_length, 1, tokens))


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.25, 0.5, 1.0]) | st.floats(0.01, 1.0), min_size=1, max_size=40),
    size=st.integers(0, 90),
)
def test_the_cpp_blend_is_its_numpy_definition(weights: list[float], size: int) -> None:
    shares = np.array(weights) / sum(weights)
    dataset, position = np.empty(size, np.int16), np.empty(size, np.int64)
    _index.build_blending_indices(dataset, position, shares, len(weights), size)
    expected_dataset, expected_position = blending_index_reference(shares, size)
    np.testing.assert_array_equal(dataset, expected_dataset)
    np.testing.assert_array_equal(position, expected_position)
    for d, share in enumerate(shares):
        assert abs(int((dataset == d).sum()) - share * size) <= len(weights)  # greedy: never far from its share


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=24))
def test_the_cpp_exhaustive_blend_is_its_numpy_definition(sizes: list[int]) -> None:
    dataset, position = draw_all(sizes)
    expected_dataset, expected_position = exhaustive_index_reference(sizes)
    np.testing.assert_array_equal(dataset, expected_dataset)
    np.testing.assert_array_equal(position, expected_position)
    for d, size in enumerate(sizes):  # every sample of every dataset exactly once, in order
        assert position[dataset == d].tolist() == list(range(size))


def test_the_exhaustive_blend_has_megatrons_values() -> None:
    """Worked by hand from Megatron's loop: sizes 3, 1, 2 are weights 1/2, 1/6, 1/3."""
    assert draw_all([3, 1, 2])[0].tolist() == [0, 2, 1, 0, 2, 0]


def test_a_longer_blend_by_weights_begins_with_the_shorter() -> None:
    weights = np.array([3.0, 1.0, 0.5, 7.0])
    for short, long in zip(draw_blend(weights, 100), draw_blend(weights, 1000), strict=True):
        np.testing.assert_array_equal(short, long[:100])


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(1, 10**13), min_size=1, max_size=8), samples=st.integers(1, 10**6))
def test_shares_by_size_add_up_and_are_never_a_sample_off(tokens: list[int], samples: int) -> None:
    dealt = deal_by_size(tokens, samples)
    assert sum(dealt) == samples
    for share, held in zip(dealt, tokens, strict=True):
        assert abs(share * sum(tokens) - samples * held) < sum(tokens)


@settings(max_examples=200, deadline=None)
@given(
    documents=st.integers(0, 10**9),
    shares=st.lists(st.floats(0, 1000), min_size=1, max_size=4).filter(lambda s: sum(s) > 1e-3),
)
def test_a_split_puts_every_document_into_one_part(documents: int, shares: list[float]) -> None:
    parts = split_documents(documents, shares)
    assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])]
    assert parts[-1][1] == documents
    for (first, end), share in zip(parts[:-1], shares, strict=False):
        assert abs((end - first) - documents * share / sum(shares)) <= 1.001
    assert split_documents(1000, [969, 30, 1]) == [(0, 969), (969, 999), (999, 1000)]  # as Megatron's --split


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.int32, np.uint32, np.int64]),
)
def test_the_cpp_shuffle_is_numpys_and_leaves_its_generator_where_numpy_does(
    counts: list[int], seed: int, dtype: type[np.integer[Any]]
) -> None:
    ours, numpys = np.random.RandomState(seed), np.random.RandomState(seed)
    for count in counts:
        mine, theirs = np.arange(count, dtype=dtype), np.arange(count, dtype=dtype)
        shuffle(mine, ours)
        numpys.shuffle(theirs)
        np.testing.assert_array_equal(mine, theirs)
    assert ours.randint(2**31) == numpys.randint(2**31)


def test_the_shuffle_of_a_large_array_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2**16 masks and blocks change; beyond LARGEST_SHUFFLE NumPy itself is asked."""
    expected = np.arange(300_001, dtype=np.int32)
    np.random.RandomState(197).shuffle(expected)
    for largest in (2**32, 300_000):
        monkeypatch.setattr(sampling, "LARGEST_SHUFFLE", largest)
        found = np.arange(300_001, dtype=np.int32)
        shuffle(found, np.random.RandomState(197))
        np.testing.assert_array_equal(found, expected)


def test_bad_shuffle_input_raises() -> None:
    words = np.array(np.random.RandomState(0).get_state()[1])
    for array, state, used, error in (
        (np.zeros(5), words, 0, TypeError),
        (np.zeros((5, 1), np.int32), words, 0, ValueError),
        (np.zeros(5, np.int32), words[:600], 0, ValueError),
        (np.zeros(5, np.int32), words, 625, ValueError),
        (np.zeros(5, np.int32), words, -1, ValueError),
    ):
        with pytest.raises(error):
            _index.shuffle(array, state, used)


def _unaligned() -> npt.NDArray[np.int32]:
    return np.ndarray((5,), np.int32, bytearray(22), 2)


@pytest.mark.parametrize(
    ("sizes", "documents", "numbers", "error"),
    [
        (SIZES.astype(np.int64), DOCUMENTS, (4, 1, 19), TypeError),
        (SIZES, DOCUMENTS.astype(np.int64), (4, 1, 19), TypeError),
        (SIZES[::2], DOCUMENTS, (4, 1, 19), TypeError),
        (SIZES[None], DOCUMENTS, (4, 1, 19), ValueError),
        (_unaligned(), DOCUMENTS, (4, 1, 19), ValueError),
        (SIZES, DOCUMENTS + 1, (4, 1, 19), IndexError),
        (SIZES, DOCUMENTS - 1, (4, 1, 19), IndexError),
        (-SIZES, DOCUMENTS, (4, 1, 19), ValueError),
        (SIZES, DOCUMENTS, (4, 1, 24), ValueError),
        (SIZES, DOCUMENTS, (4, 2, 19), ValueError),
        (SIZES, DOCUMENTS, (0, 1, 19), ValueError),
        (SIZES, DOCUMENTS, (4, 0, 19), ValueError),
        (SIZES, DOCUMENTS, (4, 1, 0), ValueError),
        (SIZES, DOCUMENTS, (4, 4, 2**62), OverflowError),
    ],
)
def test_bad_sample_index_input_raises_and_never_reads_astray(
    sizes: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    numbers: tuple[int, int, int],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        _index.build_sample_idx(sizes, documents, *numbers)


def test_bad_blend_input_raises_and_never_writes_astray() -> None:
    dataset, position, weights = np.zeros(5, np.int16), np.zeros(5, np.int64), np.array([0.5, 0.5])
    frozen = dataset.copy()
    frozen.setflags(write=False)
    for arguments in (
        (dataset, position, weights, 2, 6),
        (dataset, position[:4], weights, 2, 5),
        (dataset, position, weights, 3, 5),
        (dataset, position, weights, 0, 5),
        (dataset, position, weights, 2, -1),
        (dataset, position, np.array([0.5, np.nan]), 2, 5),
        (frozen, position, weights, 2, 5),
    ):
        with pytest.raises(ValueError, match=r".+"):
            _index.build_blending_indices(*arguments)
    for arguments in (
        (dataset.astype(np.int32), position, weights, 2, 5),
        (dataset, position.astype(np.int32), weights, 2, 5),
        (dataset, position, weights.astype(np.float32), 2, 5),
    ):
        with pytest.raises(TypeError):
            _index.build_blending_indices(*arguments)


def test_bad_exhaustive_blend_input_raises() -> None:
    dataset, position = np.zeros(5, np.int16), np.zeros(5, np.int64)
    for sizes, number, error in (
        ([3, 3], 2, ValueError),
        ([3, -1], 2, ValueError),
        ([3], 2, ValueError),
        ([2**62, 2**62], 2, OverflowError),
    ):
        with pytest.raises(error):
            _index.build_exhaustive_blending_indices(dataset, position, np.array(sizes, np.int64), number)


def test_other_threads_run_while_an_index_is_built() -> None:
    size, weights = 4_000_000, np.full(40, 1 / 40)
    dataset, position = np.empty(size, np.int16), np.empty(size, np.int64)
    builder = threading.Thread(target=_index.build_blending_indices, args=(dataset, position, weights, 40, size))
    builder.start()
    turns = 0
    while builder.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns >= 5  # with the lock held the first sleep would end when the build does


def megatron_order(
    sizes: list[int], sequence_length: int, samples: int, seed: int
) -> tuple[list[int], list[list[int]], list[int], bool]:
    """GPTDataset's procedure, step by step: one token at a time, one epoch at a time."""
    tokens = sum(sizes)
    epochs = 1
    while epochs * tokens < samples * sequence_length + 1:
        epochs += 1
    apart = False
    before = ((epochs - 1) * tokens - 1) // sequence_length
    if epochs > 1:
        apart = samples - before < int(0.80 * ((tokens - 1) // sequence_length))
    state = np.random.RandomState(seed)
    documents: list[int] = []
    for copies in [epochs - 1, 1] if apart else [epochs]:
        part = np.mgrid[0:copies, 0 : len(sizes)][1].reshape(-1).astype(np.int32)
        state.shuffle(part)
        documents += part.tolist()
    stream = [(p, offset) for p, d in enumerate(documents) for offset in range(sizes[d])]
    slots = (epochs * tokens - 1) // sequence_length
    rows = [[0, 0]] + [list(stream[slot * sequence_length]) for slot in range(1, slots + 1)]
    shuffle: list[int] = []
    for begin, end in [(0, before), (before, slots)] if apart else [(0, slots)]:
        part = np.arange(begin, end, dtype=np.uint32)
        state.shuffle(part)
        shuffle += part.tolist()
    return documents, rows, shuffle, apart


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=15).filter(any),
    sequence_length=st.integers(1, 20),
    samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_order_is_megatrons(sizes: list[int], sequence_length: int, samples: int, seed: int) -> None:
    assume(sum(sizes) > sequence_length)
    order = draw_order(np.array(sizes, np.int32), sequence_length, samples, seed)
    documents, rows, shuffle, apart = megatron_order(sizes, sequence_length, samples, seed)
    assert order.documents.tolist() == documents
    assert order.samples.tolist() == rows
    assert order.shuffle.tolist() == shuffle
    assert order.last_epoch_apart == apart
    assert order.epochs * len(sizes) == len(documents)
    assert len(order.shuffle) >= samples
    assert (order.documents.dtype, order.shuffle.dtype) == (np.int32, np.uint32)


def test_a_last_epoch_that_is_hardly_begun_is_shuffled_apart() -> None:
    sizes = np.full(100, 10, np.int32)
    per_epoch = 999 // 5
    hardly, mostly = (draw_order(sizes, 5, per_epoch + extra, 1) for extra in (20, 170))
    assert (hardly.last_epoch_apart, mostly.last_epoch_apart) == (True, False)
    assert sorted(hardly.documents[:100]) == list(range(100))
    assert sorted(mostly.documents[:100]) != list(range(100))
    assert hardly.shuffle[:per_epoch].max() < per_epoch <= hardly.shuffle[per_epoch:].min()


def test_within_one_epoch_the_order_does_not_depend_on_the_number_of_samples() -> None:
    sizes = np.random.default_rng(3).integers(1, 50, 200).astype(np.int32)
    whole = draw_order(sizes, 16, (int(sizes.sum()) - 1) // 16, 7)
    few = draw_order(sizes, 16, 10, 7)
    for name in ("documents", "samples", "shuffle"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(few, name))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_named(seed: int) -> None:
    with pytest.raises(UserError, match=f"seed: {seed}"):
        draw_order(SIZES, 4, 1, seed)
