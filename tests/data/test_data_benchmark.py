"""The data benchmark counts what it says it counts."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_essh.benchmarks import data as benchmark
from megatron_essh.benchmarks.data import DataCase, measure_drawing, measure_serving
from megatron_essh.data import PackedDataset


def test_every_part_of_an_order_is_timed_on_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    blend = benchmark.draw_blend
    monkeypatch.setattr(benchmark, "draw_blend", lambda w, n: (drawn.append(n), blend(w, n))[1])
    rows = {row["what"]: row for row in measure_drawing(DataCase(documents=20_000, sequence_length=64), 2)}
    assert len(rows) == 9
    assert drawn == [20_000] * 4  # two blends, twice each
    for row in rows.values():
        assert row["per_second"] == pytest.approx(20_000 / row["seconds"])
    assert rows["blend of 3 by weights"]["bytes_each"] == 10  # int16 and int64 a draw
    per_sample = 8  # two int32 a row
    assert rows["sample index"]["bytes_each"] == pytest.approx(per_sample * benchmark.MEAN_LENGTH / 64, rel=0.05)


def test_serving_is_timed_on_real_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()
    read = PackedDataset.read

    def watched(self: PackedDataset, indices: np.ndarray, out: np.ndarray) -> None:
        shapes.add(out.shape)
        read(self, indices, out)

    monkeypatch.setattr(PackedDataset, "read", watched)
    rows = measure_serving(DataCase(sequence_length=64, batch=8, pair_tokens=200_000), 2)
    assert shapes == {(8, 65)}
    for row in rows:
        assert row["per_second"] == pytest.approx(8 * 64 / row["seconds"])
