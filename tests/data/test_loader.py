"""The loader goes on exactly where it stood, or says why it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_essh.data import (
    IndexedDataset,
    PackedDataset,
    StatefulLoader,
    check_token_ids,
    index_format,
    indexed_dataset,
    validation_batches,
)
from megatron_essh.data.batch_schedule import BatchSchedule
from megatron_essh.data.sidecar import write_sidecar
from megatron_essh.errors import UserError


@pytest.fixture
def packed(write_pair: Callable[..., Path]) -> Callable[..., PackedDataset]:
    rng = np.random.default_rng(11)
    documents = [rng.integers(0, 1000, rng.integers(1, 80)).tolist() for _ in range(60)]
    prefix = write_pair(documents)

    def build(sequence_length: int = 16, seed: int = 3, samples: int = 400) -> PackedDataset:
        return PackedDataset(prefix, sequence_length, seed, samples=samples)

    return build


@pytest.mark.parametrize("stop", [0, 1, 7, 19])
def test_a_resumed_loader_serves_what_the_uninterrupted_one_does(
    packed: Callable[..., PackedDataset], stop: int
) -> None:
    whole = StatefulLoader(packed(), 20)
    expected = [whole.next_batch() for _ in range(20)]
    assert {(b.shape, b.dtype) for b in expected} == {((20, 17), np.dtype(np.int64))}
    first = StatefulLoader(packed(), 20)
    for _ in range(stop):
        first.next_batch()
    state = json.loads(json.dumps(first.state_values()))
    second = StatefulLoader(packed(), 20)
    second.next_batch()  # wherever it stood
    second.load_state(state)
    for batch in expected[stop:]:
        np.testing.assert_array_equal(second.next_batch(), batch)
    assert second.state_values() == whole.state_values()


def test_the_stream_of_samples_does_not_depend_on_the_batch(packed: Callable[..., PackedDataset]) -> None:
    dataset = packed()
    streams = []
    for size in (1, 8, 24):
        loader = StatefulLoader(packed(), size)
        streams.append(np.concatenate([loader.next_batch() for _ in range(48 // size)]))
    for stream in streams:
        np.testing.assert_array_equal(stream, np.stack([dataset[i] for i in range(48)]))


def test_resuming_reads_no_sample(packed: Callable[..., PackedDataset], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = StatefulLoader(packed(), 20)
    state = {**loader.state_values(), "consumed_samples": 380}
    asked: list[int] = []
    read = PackedDataset.read
    monkeypatch.setattr(
        PackedDataset, "read", lambda self, indices, out: (asked.extend(indices.tolist()), read(self, indices, out))[1]
    )
    loader.load_state(state)
    assert asked == []
    loader.next_batch()
    assert asked == list(range(380, 400))


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_that_read_ahead_change_no_batch(packed: Callable[..., PackedDataset], workers: int) -> None:
    schedule = BatchSchedule.ramp(5, 5, 60, 20)
    alone, ahead = StatefulLoader(packed(), schedule), StatefulLoader(packed(), schedule, workers=workers)
    for _ in range(12):
        np.testing.assert_array_equal(ahead.next_batch(), alone.next_batch())
        assert ahead.state_values() == alone.state_values()
    state = json.loads(json.dumps(ahead.state_values()))
    following = [ahead.next_batch() for _ in range(3)]
    ahead.load_state(state)  # what was read ahead is of another position now
    for batch in following:
        np.testing.assert_array_equal(ahead.next_batch(), batch)
    ahead.close()


def test_reading_ahead_ends_with_the_samples_and_an_error_comes_at_its_own_batch(
    write_pair: Callable[..., Path],
) -> None:
    prefix = write_pair([[1] * 16 * 40 + [2]])
    np.memmap(f"{prefix}.bin", "<u2", "r+")[:2] = 99
    dataset = PackedDataset(prefix, 16, 3, vocab_size=None)
    bad = next(i for i in range(len(dataset)) if 99 in dataset[i])
    dataset.vocab_size = 10
    loader = StatefulLoader(dataset, 4, workers=2)
    for _ in range(bad // 4):
        loader.next_batch()
    for _ in range(2):  # again and again, and nothing is passed over
        with pytest.raises(UserError, match="token id 99"):
            loader.next_batch()
    assert loader.consumed_samples == bad // 4 * 4
    dataset.vocab_size = 100
    assert [len(loader.next_batch()) for _ in range(10 - bad // 4)] == [4] * (10 - bad // 4)
    with pytest.raises(IndexError):
        loader.next_batch()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_order_of_samples_does_not_depend_on_the_number_of_ranks(
    packed: Callable[..., PackedDataset], ranks: int
) -> None:
    schedule = BatchSchedule.ramp(8, 8, 64, 24)

    def rows_of(rank: int) -> Callable[[int], list[int]]:
        # Slots of 2 sequences, dealt to the ranks in an order that changes from step to step.
        return lambda step: [
            2 * slot + k for slot in range(schedule.batch(step) // 2) if (slot + step) % ranks == rank for k in (0, 1)
        ]

    whole = StatefulLoader(packed(), schedule)
    loaders = [StatefulLoader(packed(), schedule, workers=rank % 2, rows=rows_of(rank)) for rank in range(ranks)]
    for step in range(14):
        batch = np.full((schedule.batch(step), 17), -1, np.int64)
        for rank, loader in enumerate(loaders):
            batch[rows_of(rank)(step)] = loader.next_batch()
        np.testing.assert_array_equal(batch, whole.next_batch())
        assert all(loader.state_values() == whole.state_values() for loader in loaders)


@pytest.mark.gpu
def test_pinned_batches_are_the_same_and_copied_from_at_once(packed: Callable[..., PackedDataset]) -> None:
    plain, pinned = StatefulLoader(packed(), 20), StatefulLoader(packed(), 20, workers=2, pinned=True)
    copies = []
    for _ in range(10):  # many copies under way: no batch's memory may be given to the next meanwhile
        batch = pinned.next_batch()
        assert isinstance(batch, torch.Tensor)
        assert batch.is_pinned()
        copies.append(batch.to("cuda", non_blocking=True))
        del batch
    for copy in copies:
        np.testing.assert_array_equal(copy.cpu().numpy(), plain.next_batch())


def test_past_its_samples_the_loader_stops(packed: Callable[..., PackedDataset]) -> None:
    loader = StatefulLoader(packed(), 20)
    loader.consumed_samples = len(loader.dataset) - 19
    with pytest.raises(IndexError):
        loader.next_batch()
    assert loader.consumed_samples == len(loader.dataset) - 19


def test_changed_data_is_refused(packed: Callable[..., PackedDataset], write_pair: Callable[..., Path]) -> None:
    state = StatefulLoader(packed(), 20).state_values()
    write_pair([list(range(2000))], "pair")
    with pytest.raises(UserError, match=r"pair: .* fingerprint .* the data changed"):
        StatefulLoader(packed(), 20).load_state(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed 4, and the run has 3"),
        ({"sequence_length": 32}, "sequence_length 32, and the run has 16"),
        ({"epochs": 2}, "keep training.steps"),
        ({"last_epoch_apart": None}, "keep training.steps"),
        ({"consumed_samples": -1}, "consumed_samples -1, expected 0 to"),
        ({"consumed_samples": 10**9}, "consumed_samples 1000000000"),
        ({"consumed_samples": 30}, "no step begins after 30 samples: training.global_batch or data.batch_ramp changed"),
        ({"documents": [0, 7]}, r"documents \[0, 7\], and the run has \[0, 60\]"),
        ({"consumed_samples": "7"}, "consumed_samples '7'"),
    ],
)
def test_a_position_of_another_run_is_refused(
    packed: Callable[..., PackedDataset], change: dict[str, object], message: str
) -> None:
    loader = StatefulLoader(packed(), 20)
    loader.next_batch()
    with pytest.raises(UserError, match=message):
        loader.load_state({**loader.state_values(), **change})
    assert loader.consumed_samples == 20
    with pytest.raises(UserError, match="lacks seed"):
        loader.load_state({k: v for k, v in loader.state_values().items() if k != "seed"})


def test_a_longer_run_goes_on_where_the_order_is_the_same_and_is_refused_where_not(
    packed: Callable[..., PackedDataset],
) -> None:
    one_epoch = StatefulLoader(packed(samples=40), 20)
    one_epoch.next_batch()
    longer = StatefulLoader(packed(samples=100), 20)
    longer.load_state(one_epoch.state_values())
    np.testing.assert_array_equal(longer.next_batch(), one_epoch.next_batch())
    with pytest.raises(UserError, match=r"drawn over 1 epochs .* another order over \d+; keep training\.steps"):
        StatefulLoader(packed(samples=1000), 20).load_state(one_epoch.state_values())


def test_an_id_that_neither_fingerprint_nor_sidecar_shows_is_found_where_it_is_served(
    write_pair: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (index_format, indexed_dataset):
        monkeypatch.setattr(module, "WHOLLY_HASHED", 1000)
    monkeypatch.setattr(index_format, "_HASHED_BLOCKS", 2)
    monkeypatch.setattr(index_format, "_HASHED_BLOCK", 64)
    prefix = write_pair([[7] * 1601])
    before = IndexedDataset(prefix).fingerprint
    content = {
        "tokenizer": {"type": "byte", "model": None, "pattern": "gpt2"},
        **{"fingerprint": "f", "vocab_size": 257, "padded_vocab_size": 257, "eod": 256},
        **{"documents": 1, "tokens": 1601, "largest_id": 7, "data_fingerprint": before},
    }
    write_sidecar(prefix, content)
    tokens = np.memmap(f"{prefix}.bin", "<u2", "r+")
    tokens[805] = 300
    tokens.flush()
    assert IndexedDataset(prefix).fingerprint == before

    message = r"pair\.bin: token id 300 lies outside the model's vocabulary of 257"
    loader = StatefulLoader(PackedDataset(prefix, 16, 3, samples=100, vocab_size=257), 10)
    bad = next(i for i in range(100) if 300 in loader.dataset[i])
    for _ in range(bad // 10):
        loader.next_batch()
    with pytest.raises(UserError, match=message):
        loader.next_batch()
    assert loader.consumed_samples == bad // 10 * 10
    assert len(validation_batches(prefix, 16, 5, 10, vocab_size=257)) == 10  # up to token 800
    with pytest.raises(UserError, match=message):
        validation_batches(prefix, 16, 5, 11, vocab_size=257)
    with pytest.raises(UserError, match=message):
        check_token_ids(IndexedDataset(prefix), 257)


def test_a_negative_id_is_found_where_it_is_served(write_pair: Callable[..., Path]) -> None:
    prefix = write_pair([[1] * 17], dtype="<i4")
    loader = StatefulLoader(PackedDataset(prefix, 16, 3, vocab_size=10), 1)
    np.memmap(f"{prefix}.bin", "<i4", "r+")[3] = -2
    with pytest.raises(UserError, match=r"pair\.bin: token id -2 is negative"):
        loader.next_batch()
