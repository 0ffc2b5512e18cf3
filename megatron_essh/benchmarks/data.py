"""Speed of the data path: drawing orders, and serving batches. Random lengths and tokens; needs no model.

Drawing is told per document and per second of processor time, so that a busy machine does not change it; the sample
index alone is also timed on all cores. Serving reads a pair that lies in the page cache: what the code costs, not the
disk.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_essh import _index
from megatron_essh.data import IndexedDatasetWriter, PackedDataset, StatefulLoader
from megatron_essh.data.sampling import deal_by_size, draw_all, draw_blend, draw_order, shuffle

MEAN_LENGTH = 600
"""Tokens in a document: web text by a GPT-2 tokenizer has 500 to 1000."""
BLENDS = (3, 30)
"""Datasets in the blends that are drawn."""


@dataclass(frozen=True)
class DataCase:
    """What is measured."""

    documents: int = 10_000_000
    """Documents (and draws of a blend) of the orders."""
    sequence_length: int = 2048
    """Tokens T in a sample."""
    batch: int = 128
    """Sequences in a batch that is served."""
    pair_tokens: int = 50_000_000
    """Tokens of the pair that batches are read from."""
    workers: int = 2
    """Threads of the loader."""


def measure_drawing(case: DataCase, repeats: int) -> list[dict[str, Any]]:
    """Median processor seconds, items a second and bytes held a document of each part of an order."""
    rng = np.random.default_rng(0)
    count = case.documents
    sizes = rng.integers(1, 2 * MEAN_LENGTH, count, dtype=np.int32)
    tokens = int(sizes.sum(dtype=np.int64))
    documents = np.arange(count, dtype=np.int32)
    threads = len(os.sched_getaffinity(0))

    def sample_index(used: int) -> Any:
        return _index.build_sample_idx(sizes, documents, case.sequence_length, 1, tokens, used)

    def order() -> Any:
        found = draw_order(sizes, case.sequence_length, (tokens - 1) // case.sequence_length, 197)
        return found.documents, found.samples, found.shuffle

    rows = [
        _drawn("document shuffle, as NumPy's", count, 1, lambda: shuffle(documents, np.random.RandomState(197))),
        _drawn("document shuffle by NumPy", count, 1, lambda: np.random.RandomState(197).shuffle(documents)),
        _drawn("sample index", count, repeats, lambda: sample_index(1)),
        _drawn(
            f"sample index, wall clock, {threads} threads", count, repeats, lambda: sample_index(threads), wall=True
        ),
        _drawn("whole order of an epoch", count, repeats, order),
    ]
    for datasets in BLENDS:
        weights = rng.random(datasets) + 0.1
        shares = deal_by_size((weights * 1e6).astype(int).tolist(), count)
        rows.append(_drawn(f"blend of {datasets} by weights", count, repeats, partial(draw_blend, weights, count)))
        rows.append(_drawn(f"blend of {datasets} by tokens", count, repeats, partial(draw_all, shares)))
    return rows


def measure_serving(case: DataCase, repeats: int) -> list[dict[str, Any]]:
    """Tokens a second of batches out of the page cache: by one core, and by a loader's threads in wall-clock time."""
    with tempfile.TemporaryDirectory(prefix="essh-data-") as folder:
        prefix = Path(folder) / "pair"
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 2 * MEAN_LENGTH, case.pair_tokens // MEAN_LENGTH)
        with IndexedDatasetWriter(prefix, "<u2") as writer:
            tokens = rng.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16)
            writer.add_documents(tokens, lengths, np.ones(len(lengths), np.int64))
        del tokens
        dataset = PackedDataset(prefix, case.sequence_length, 197, vocab_size=50_257)
        batches = min(40, len(dataset) // case.batch)
        assert batches >= 1, f"{len(dataset)} samples for batches of {case.batch}"
        rows = []
        for what, workers in (("batches, one core", 0), (f"batches, {case.workers} threads ahead", case.workers)):
            cpu, wall = [], []
            for _ in range(1 + repeats):
                loader = StatefulLoader(dataset, case.batch, workers=workers)
                begin, used = time.perf_counter(), time.process_time()
                for _ in range(batches):
                    loader.next_batch()
                wall.append(time.perf_counter() - begin)
                cpu.append(time.process_time() - used)
                loader.close()
            seconds = statistics.median((wall if workers else cpu)[1:])  # the first run fills the page cache
            rows.append(
                {
                    "what": what,
                    "seconds": seconds / batches,
                    "per_second": batches * case.batch * case.sequence_length / seconds,
                    "unit": "tokens",
                    "bytes_each": None,
                }
            )
        return rows


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _drawn(what: str, items: int, repeats: int, draw: Callable[[], Any], *, wall: bool = False) -> dict[str, Any]:
    clock = time.perf_counter if wall else time.process_time
    seconds, held = [], None
    for _ in range(repeats):
        begin = clock()
        arrays = draw()
        seconds.append(clock() - begin)
        if arrays is not None:
            arrays = arrays if isinstance(arrays, tuple) else (arrays,)
            held = sum(array.nbytes for array in arrays) / items
        del arrays
    median = statistics.median(seconds)
    return {"what": what, "seconds": median, "per_second": items / median, "unit": "documents", "bytes_each": held}
