"""A blend reads every pair from a position of its own, in the shares asked for, and never runs short of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_essh.data import IndexedDataset, IndexedDatasetWriter, PackedDataset, StatefulLoader
from megatron_essh.data.blend import BlendedDataset, blended_validation
from megatron_essh.data.packing import DatasetPart
from megatron_essh.errors import UserError

WEIGHTS = (0.7, 0.2, 0.1)


@pytest.fixture
def parts(write_pair: Callable[..., Path]) -> Callable[[], list[DatasetPart]]:
    """Three pairs of very different sizes; pair p holds the ids from 1000 p on."""
    rng = np.random.default_rng(5)
    prefixes = []
    for number, documents in enumerate((3, 60, 200)):
        texts = [(1000 * number + rng.integers(0, 1000, rng.integers(1, 40))).tolist() for _ in range(documents)]
        prefixes.append(write_pair([*texts, [1000 * number] * 17], f"pair{number}"))
    return lambda: [DatasetPart(IndexedDataset(prefix)) for prefix in prefixes]


@pytest.mark.parametrize("weights", [WEIGHTS, None, (5, 1, 1)])
def test_draw_i_is_the_next_sample_of_its_pair(
    parts: Callable[[], list[DatasetPart]], weights: tuple[float, ...] | None
) -> None:
    blend = BlendedDataset(parts(), weights, 16, 3, 500)
    counts = np.bincount(blend.chosen, minlength=3)
    alone = [PackedDataset(part, 16, 3, samples=int(n)) for part, n in zip(parts(), counts, strict=True)]
    position = [0, 0, 0]
    for i in range(len(blend)):
        number = int(blend.chosen[i])
        np.testing.assert_array_equal(blend[i], alone[number][position[number]])
        position[number] += 1
    found = np.empty((500, 17), np.int64)
    blend.read(np.arange(500), found)
    np.testing.assert_array_equal(found, np.stack([blend[i] for i in range(500)]))
    shuffled = np.random.default_rng(0).permutation(500)
    blend.read(shuffled, found)
    np.testing.assert_array_equal(found, np.stack([blend[i] for i in shuffled]))


def test_a_share_far_above_a_pairs_size_reads_it_again_and_again(parts: Callable[[], list[DatasetPart]]) -> None:
    blend = BlendedDataset(parts(), WEIGHTS, 16, 3, 2000)
    assert np.bincount(blend.chosen).tolist() == pytest.approx([1400, 400, 200], abs=3)
    assert blend.datasets[0].order.epochs > 200
    assert {int(blend[i][0]) // 1000 for i in range(2000)} == {0, 1, 2}


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=4),
    sequence_length=st.integers(1, 9),
    seed=st.integers(0, 20),
)
def test_by_tokens_an_epoch_of_the_blend_serves_every_sample_of_every_pair_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], sequence_length: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("blend")
    parts, token = [], 0
    for number, documents in enumerate(lengths):
        with IndexedDatasetWriter(folder / str(number), "<u2") as writer:
            for length in (*documents, sequence_length + 1):
                writer.add_document(np.arange(token, token + length))
                token += length
        parts.append(DatasetPart(IndexedDataset(folder / str(number))))
    held = [(part.tokens - 1) // sequence_length for part in parts]
    for epochs in (1, 3):
        blend = BlendedDataset(parts, None, sequence_length, seed, epochs * sum(held))
        assert np.bincount(blend.chosen).tolist() == [epochs * n for n in held]
        served = [np.flatnonzero(blend.chosen == number) for number in range(len(parts))]
        for number, dataset in enumerate(blend.datasets):
            position = blend.position[served[number]]
            assert position.tolist() == list(range(epochs * held[number]))
            if epochs == 1:  # its slots each once: with the order's own test, its tokens each once
                assert sorted(dataset.order.shuffle[position].tolist()) == list(range(held[number]))


@pytest.mark.parametrize("stop", [1, 6, 13])
def test_a_resumed_blend_goes_on_in_every_pair(parts: Callable[[], list[DatasetPart]], stop: int) -> None:
    whole = StatefulLoader(BlendedDataset(parts(), WEIGHTS, 16, 3, 400), 20, workers=2)
    expected = [whole.next_batch() for _ in range(20)]
    first = StatefulLoader(BlendedDataset(parts(), WEIGHTS, 16, 3, 400), 20)
    for _ in range(stop):
        first.next_batch()
    state = json.loads(json.dumps(first.state_values()))
    assert sum(pair["consumed_samples"] for pair in state["pairs"]) == 20 * stop
    second = StatefulLoader(BlendedDataset(parts(), WEIGHTS, 16, 3, 400), 20)
    second.load_state(state)
    for batch in expected[stop:]:
        np.testing.assert_array_equal(second.next_batch(), batch)


def test_a_position_of_another_blend_is_refused(
    parts: Callable[[], list[DatasetPart]], write_pair: Callable[..., Path]
) -> None:
    state = StatefulLoader(BlendedDataset(parts(), WEIGHTS, 16, 3, 400), 20).state_values()

    def resume(blend: BlendedDataset | PackedDataset) -> None:
        StatefulLoader(blend, 20).load_state(state)

    with pytest.raises(UserError, match=r"blend_weights \[0\.7, .* and the run has \[0\.6"):
        resume(BlendedDataset(parts(), (0.6, 0.3, 0.1), 16, 3, 400))
    with pytest.raises(UserError, match=r"blend_weights .* and the run has None"):
        resume(BlendedDataset(parts(), None, 16, 3, 400))
    with pytest.raises(UserError, match=r"lacks .*fingerprint"):
        resume(PackedDataset(parts()[0], 16, 3, samples=400))
    state["blend_weights"] = [0.7, 0.3]
    with pytest.raises(UserError, match="a blend of 3 pairs, and the run has 2"):
        resume(BlendedDataset(parts()[:2], (0.7, 0.3), 16, 3, 400))
    state["blend_weights"] = list(WEIGHTS)
    write_pair([list(range(3000))], "pair1")
    with pytest.raises(UserError, match=r"pair1: fingerprint .* the data changed"):
        resume(BlendedDataset(parts(), WEIGHTS, 16, 3, 400))


def test_a_longer_blend_by_tokens_is_another_and_is_refused(parts: Callable[[], list[DatasetPart]]) -> None:
    state = StatefulLoader(BlendedDataset(parts(), None, 16, 3, 100), 20).state_values()
    with pytest.raises(UserError, match=r"a blend by tokens over 100 samples, and .* 120; keep training\.steps"):
        StatefulLoader(BlendedDataset(parts(), None, 16, 3, 120), 20).load_state(state)


def test_validation_of_a_blend_takes_the_pairs_first_windows_in_its_shares(
    parts: Callable[[], list[DatasetPart]],
) -> None:
    batches = blended_validation(parts(), (1, 2, 2), 16, 4, 5)
    windows = np.concatenate(batches)
    assert windows.shape == (20, 17)
    for number, part in enumerate(parts()):
        own = windows[windows[:, 0] // 1000 == number]
        for i, window in enumerate(own):
            np.testing.assert_array_equal(window, part.flat[16 * i : 16 * i + 17])
        assert len(own) == [4, 8, 8][number] or number == 0  # the first pair is small
    held = [(part.tokens - 1) // 16 for part in parts()]
    everything = blended_validation(parts(), None, 16, 4, 1000)
    assert sum(map(len, everything)) == sum(held)
