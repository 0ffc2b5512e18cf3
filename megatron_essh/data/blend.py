"""Several pairs served as one: a blend by weights or by tokens, each pair read on from a position of its own.

Which pair draw i takes is drawn first, for the whole run; each pair's order is then drawn for exactly the samples that
the blend takes of it. A pair is therefore never short of samples, however far its share lies above its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_essh.data.index_cache import Arrays, cached_arrays
from megatron_essh.data.packing import (
    ORDER_FORMAT,
    OTHER_RUN,
    DatasetPart,
    PackedDataset,
    batches_of_windows,
    check_length,
    whole_windows,
)
from megatron_essh.data.sampling import deal_by_size, draw_all, draw_blend
from megatron_essh.errors import UserError

_PIECE = 1 << 22


class BlendedDataset:
    """Samples of several pairs, each shuffled as a `PackedDataset` of its own.

    Sample i is sample `position[i]` of pair `chosen[i]`.

    Args:
        parts: the pairs, or parts of them.
        weights: their shares of the samples, in any unit; None: by tokens, every pair read through equally often.
        sequence_length: tokens T in a sample.
        seed: of every pair's order.
        samples: how many there are.
        vocab_size: as for `PackedDataset`.
        cache: as for `PackedDataset`.

    Raises:
        UserError: as for `PackedDataset`.
    """

    def __init__(
        self,
        parts: Sequence[DatasetPart],
        weights: Sequence[float] | None,
        sequence_length: int,
        seed: int,
        samples: int,
        *,
        vocab_size: int | None = None,
        cache: Path | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.seed = seed
        self.weights = weights
        for part in parts:
            check_length(part, sequence_length)
        if weights is None:
            sizes = deal_by_size([whole_windows(part, sequence_length) for part in parts], samples)
            key: dict[str, Any] = {"format": ORDER_FORMAT, "sizes": sizes}
            drawn = cached_arrays(cache, key, lambda: _arrays(*draw_all(sizes)))
        else:
            shares = np.array(weights, np.float64)
            key = {"format": ORDER_FORMAT, "weights": list(map(float.hex, map(float, weights))), "samples": samples}
            drawn = cached_arrays(cache, key, lambda: _arrays(*draw_blend(shares, samples)))
        self.chosen: npt.NDArray[np.int16] = drawn["chosen"]
        self.position: npt.NDArray[np.int64] = drawn["position"]
        counts = _counts(self.chosen, len(parts))
        self.datasets = [
            PackedDataset(part, sequence_length, seed, samples=max(1, count), vocab_size=vocab_size, cache=cache)
            for part, count in zip(parts, counts, strict=True)
        ]

    def __len__(self) -> int:
        """Samples there are: as many as were asked for."""
        return len(self.chosen)

    @property
    def prefix(self) -> str:
        """The pairs', for errors."""
        return ", ".join(dataset.prefix for dataset in self.datasets)

    @property
    def tokens(self) -> int:
        """Tokens of all pairs."""
        return sum(dataset.tokens for dataset in self.datasets)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`, int64 [sequence_length + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.prefix}")
        return self.datasets[int(self.chosen[index])][int(self.position[index])]

    def read(self, indices: npt.NDArray[np.int64], out_NT: npt.NDArray[np.int64]) -> None:
        """Samples `indices` into `out_NT`, int64 [N, sequence_length + 1]; as `PackedDataset.read`."""
        if len(indices) == 0:
            return
        if not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {len(self)} in {self.prefix}")
        chosen, position = self.chosen[indices], self.position[indices]
        for number in np.unique(chosen).tolist():
            rows = np.flatnonzero(chosen == number)
            samples = np.empty((len(rows), self.sequence_length + 1), np.int64)
            self.datasets[number].read(position[rows], samples)
            out_NT[rows] = samples

    def state_values(self, consumed: int) -> dict[str, Any]:
        """What the order depends on, and how many of the first `consumed` samples each pair gave; ready for JSON."""
        counts = _counts(self.chosen[:consumed], len(self.datasets))
        return {
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "blend_weights": None if self.weights is None else list(self.weights),
            "blend_samples": len(self) if self.weights is None else None,  # a longer blend by weights begins the same
            "pairs": [
                {"consumed_samples": count, **dataset.state_values(count)}
                for dataset, count in zip(self.datasets, counts, strict=True)
            ],
        }

    def check_state(self, values: dict[str, Any], where: str) -> None:
        """Hold `values`, as `state_values` gave them, to this blend; as `PackedDataset.check_state`."""
        own = self.state_values(0)
        missing = own.keys() - values.keys()
        if missing:
            raise UserError(f"{where} lacks {', '.join(sorted(missing))}; name a checkpoint of a blend")
        for key in ("sequence_length", "seed", "blend_weights"):
            if values[key] != own[key]:
                raise UserError(f"{where}: {key} {values[key]}, and the run has {own[key]}; {OTHER_RUN}")
        if values["blend_samples"] != own["blend_samples"]:
            raise UserError(
                f"{where}: a blend by tokens over {values['blend_samples']} samples, and this run's length takes one "
                f"over {own['blend_samples']}; keep training.steps and training.global_batch, or start a new run"
            )
        if len(values["pairs"]) != len(self.datasets):
            raise UserError(
                f"{where}: a blend of {len(values['pairs'])} pairs, and the run has {len(self.datasets)}; {OTHER_RUN}"
            )
        for dataset, saved in zip(self.datasets, values["pairs"], strict=True):
            dataset.check_state(saved, f"{where}: {dataset.prefix}")


def blended_validation(
    parts: Sequence[DatasetPart],
    weights: Sequence[float] | None,
    sequence_length: int,
    batch: int,
    count: int,
    *,
    vocab_size: int | None = None,
) -> list[npt.NDArray[np.int64]]:
    """`validation_batches` of several pairs, in a blend's proportion; a pair whose windows are spent gives no more.

    Raises:
        UserError: no pair holds a window, or a token lies outside the vocabulary.
    """
    held = [whole_windows(part, sequence_length) for part in parts]
    if not any(held):
        check_length(parts[0], sequence_length)
    wanted = batch * count
    if weights is None:
        chosen, position = draw_all(deal_by_size(held, wanted))
    else:
        chosen, position = draw_blend(np.array(weights, np.float64), wanted)
    draws = zip(chosen.tolist(), position.tolist(), strict=True)
    windows = [(parts[number], i) for number, i in draws if i < held[number]]
    return batches_of_windows(windows, sequence_length, batch, vocab_size)


def _counts(chosen: npt.NDArray[np.int16], datasets: int) -> list[int]:
    """How often each dataset was chosen; in pieces, because NumPy counts in eight times the memory."""
    pieces = (chosen[begin : begin + _PIECE] for begin in range(0, len(chosen), _PIECE))
    zero = np.zeros(datasets, np.int64)
    return sum((np.bincount(piece, minlength=datasets) for piece in pieces), zero).tolist()


def _arrays(chosen: npt.NDArray[np.int16], position: npt.NDArray[np.int64]) -> Arrays:
    return {"chosen": chosen, "position": position}
