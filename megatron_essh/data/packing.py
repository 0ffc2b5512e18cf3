"""Samples of fixed length out of a token pair, and the document number of each of their positions.

Documents are joined end to end (their end-of-document tokens are in the data) and cut into samples of T + 1
tokens; neighbouring samples share one token, the label of one and the first input of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron_essh import _index
from megatron_essh.data.index_cache import Arrays, cached_arrays
from megatron_essh.data.indexed_dataset import IndexedDataset, check_ids, check_token_ids
from megatron_essh.data.sampling import Epochs, SampleOrder, draw_order
from megatron_essh.errors import UserError

IGNORED = -100
"""Label that takes part in no loss."""

OTHER_RUN = "resume with the run's own data, or start a new run"
"""What helps where a saved position is not this run's."""

Tokens = TypeVar("Tokens", bound=Any)
"""A NumPy array or a PyTorch tensor."""


ORDER_FORMAT = 1
"""Counts up when the same pair, length and seed give another order: what a cache holds is then drawn anew."""


class DatasetPart:
    """Documents `first` to `end` of a pair, its tokens and nothing else of it.

    Attributes:
        dataset: the pair.
        documents: (first, end) of the documents.
        sequences: (first, end) of their sequences.
        flat: their tokens in the file's order, a view of the file.
    """

    def __init__(self, dataset: IndexedDataset, documents: tuple[int, int] | None = None) -> None:
        self.dataset = dataset
        self.documents = (0, dataset.documents) if documents is None else documents
        first, end = self.documents
        assert 0 <= first <= end <= dataset.documents, f"documents {first} to {end} of {dataset.documents}"
        self.sequences = (int(dataset.boundaries[first]), int(dataset.boundaries[end]))
        begin, stop = (dataset.tokens if s == len(dataset) else dataset.start(s) for s in self.sequences)
        self.flat: npt.NDArray[Any] = dataset.flat[begin:stop]

    @classmethod
    def of(cls, source: str | Path | DatasetPart) -> DatasetPart:
        """All of the pair of a prefix; a part as it is."""
        return source if isinstance(source, DatasetPart) else cls(IndexedDataset(source))

    @property
    def name(self) -> str:
        """How errors name it."""
        whole = self.documents == (0, self.dataset.documents)
        words = "" if whole else f", documents {self.documents[0]} to {self.documents[1]}"
        return f"{self.dataset.prefix}.bin{words}"

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return len(self.flat)


class PackedDataset:
    """Shuffled samples of a pair; sample i is int64 [sequence_length + 1].

    Sample i is a function of the pair's content, the part of it, `sequence_length`, `seed` and i; where `samples`
    reaches beyond one epoch it also depends on the number of epochs (see `sampling.draw_order`).

    Args:
        source: the pair's prefix, or a part of a pair.
        sequence_length: tokens T in a sample, its last label not counted.
        seed: of the order, 0 to 2**32 - 1.
        samples: how many samples must be there; as many epochs as they take. None: one epoch.
        vocab_size: the model's vocabulary, which the pair is held to, as far as its sidecar describes it; `read` then
            checks every token it gives. None: not checked.
        cache: folder to keep the order in, or take it from (`index_cache`); None: it is drawn into memory.

    Raises:
        UserError: the pair cannot be read (`IndexedDataset`), is too short for one sample, or holds a token
            outside the vocabulary; the cache cannot be written.
    """

    def __init__(
        self,
        source: str | Path | DatasetPart,
        sequence_length: int,
        seed: int,
        *,
        samples: int | None = None,
        vocab_size: int | None = None,
        cache: Path | None = None,
    ) -> None:
        self.part = DatasetPart.of(source)
        self.dataset = self.part.dataset
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = vocab_size
        check_length(self.part, sequence_length)
        if vocab_size is not None:
            check_token_ids(self.dataset, vocab_size, trust_sidecar=True)
        if samples is None:
            samples = (self.part.tokens - 1) // sequence_length
        self.order = self._order(samples, cache)

    def __len__(self) -> int:
        """Samples there are: at least as many as were asked for."""
        return len(self.order.shuffle)

    @property
    def prefix(self) -> str:
        """The pair's, for errors."""
        return str(self.dataset.prefix)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return self.part.tokens

    @property
    def fingerprint(self) -> str:
        """Of the pair's content (`IndexedDataset.fingerprint`)."""
        return self.dataset.fingerprint

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`, int64 [sequence_length + 1]: the definition that `read` is held to."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.dataset.prefix}")
        slot = int(self.order.shuffle[index])
        (document, offset), (last, end) = self.order.samples[slot : slot + 2].tolist()
        sample = np.empty(self.sequence_length + 1, np.int64)
        filled = 0
        for position in range(document, last + 1):
            tokens = self.dataset[int(self.order.documents[position])]
            piece = tokens[offset : end + 1 if position == last else None]
            sample[filled : filled + len(piece)] = piece
            filled += len(piece)
            offset = 0
        assert filled == len(sample), f"sample {index}: {filled} tokens"
        return sample

    def read(self, indices: npt.NDArray[np.int64], out_NT: npt.NDArray[np.int64]) -> None:
        """Samples `indices` into `out_NT`, int64 [N, sequence_length + 1]; other threads run meanwhile.

        Raises:
            IndexError: there is no such sample.
            UserError: a token lies outside the vocabulary, or the index is damaged.
        """
        if len(indices) == 0:
            return
        if not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of {len(self)} in {self.dataset.prefix}")
        order, pair = self.order, self.dataset
        slots = order.shuffle[indices].astype(np.int64)
        try:
            _index.copy_samples(pair.flat, pair.sizes, pair._offsets, order.documents, order.samples, slots, out_NT)
        except IndexError as error:
            pair.check_index()
            raise UserError(f"{pair.prefix}.idx: damaged: {error}; copy or make the pair again") from None
        if self.vocab_size is not None:
            check_ids(pair, out_NT, self.vocab_size)

    def state_values(self, consumed: int) -> dict[str, Any]:
        """Everything that the order depends on, ready for JSON; the first `consumed` samples change nothing here."""
        return {
            "fingerprint": self.fingerprint,
            "documents": list(self.part.documents),
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "epochs": self.order.epochs,
            "last_epoch_apart": self.order.last_epoch_apart,
        }

    def check_state(self, values: dict[str, Any], where: str) -> None:
        """Hold `values`, as `state_values` gave them, to this dataset; `where` names them in errors.

        Raises:
            UserError: the content or the order is another than theirs.
        """
        own = self.state_values(0)
        missing = own.keys() - values.keys()
        if missing:
            raise UserError(f"{where} lacks {', '.join(sorted(missing))}; name a checkpoint of this program")
        if values["fingerprint"] != own["fingerprint"]:
            raise UserError(
                f"{where}: fingerprint {values['fingerprint']}, and the files' is {own['fingerprint']}: "
                f"the data changed; {OTHER_RUN}"
            )
        for key in ("sequence_length", "seed", "documents"):
            if values[key] != own[key]:
                raise UserError(f"{where}: {key} {values[key]}, and the run has {own[key]}; {OTHER_RUN}")
        if (values["epochs"], values["last_epoch_apart"]) != (own["epochs"], own["last_epoch_apart"]):
            raise UserError(
                f"{where}: its order was drawn over {values['epochs']} epochs for the run's whole length, "
                f"and this length takes another order over {own['epochs']}; keep training.steps and "
                "training.global_batch, or start a new run"
            )

    def _order(self, samples: int, cache: Path | None) -> SampleOrder:
        first, end = self.part.sequences
        epochs = Epochs.of(self.part.tokens, self.sequence_length, samples)
        if cache is None:
            return self._draw(samples)
        key = {
            "format": ORDER_FORMAT,
            "pair": self.fingerprint,
            "sequences": [first, end],
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "epochs": epochs.count,
            "last_epoch_apart": epochs.last_apart,
        }
        arrays = cached_arrays(cache, key, lambda: _arrays(self._draw(samples)))
        return SampleOrder(arrays["documents"], arrays["samples"], arrays["shuffle"], epochs.count, epochs.last_apart)

    def _draw(self, samples: int) -> SampleOrder:
        first, end = self.part.sequences
        sizes = self.dataset.sizes[first:end]
        if int(sizes.min()) < 0 or int(sizes.sum(dtype=np.int64)) != self.part.tokens:
            self.dataset.check_index()  # names the entry, which opening a large index has not looked at
            raise UserError(f"{self.prefix}.idx: lengths: they do not add up; copy or make the pair again")
        return draw_order(sizes, self.sequence_length, samples, self.seed, first=first)


def _arrays(order: SampleOrder) -> Arrays:
    return {"documents": order.documents, "samples": order.samples, "shuffle": order.shuffle}


def document_ids(tokens_BT: Tokens, eod: int) -> Tokens:
    """Document number of each position, int64 [B, T], from 0: one more at the position after each `eod`.

    Takes a NumPy array or a PyTorch tensor and returns the same kind, on the same device.
    """
    ends_BT = tokens_BT == eod
    return ends_BT.cumsum(-1) - ends_BT * 1


def next_token_task(tokens_BT: Tokens, cut_at: int | None) -> tuple[Tokens, Tokens, Tokens | None]:
    """What samples [B, T + 1] ask of a model: inputs [B, T], labels [B, T] and documents [B, T].

    `cut_at` is the end-of-document token where documents are cut apart (data.document_mask): the label that follows
    one is `IGNORED`. None: nothing is cut, and documents are None. NumPy arrays or PyTorch tensors, as given.
    """
    inputs_BT, labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if cut_at is None:
        return inputs_BT, labels_BT, None
    labels_BT = labels_BT * 1  # a copy: labels and inputs share memory
    labels_BT[inputs_BT == cut_at] = IGNORED
    return inputs_BT, labels_BT, document_ids(inputs_BT, cut_at)


def validation_batches(
    source: str | Path | DatasetPart, sequence_length: int, batch: int, count: int, *, vocab_size: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """The first `count` batches of a pair's windows in the file's order, each int64 [batch, sequence_length +
    1].

    Window i begins at token i * sequence_length of the pair, or of the part of one. A pair that holds fewer windows
    gives fewer batches, the last of them smaller. Every token in them is held to `vocab_size`; None: not checked.

    Raises:
        UserError: as for `PackedDataset`.
    """
    part = DatasetPart.of(source)
    check_length(part, sequence_length)
    windows = [(part, i) for i in range(min(batch * count, whole_windows(part, sequence_length)))]
    return batches_of_windows(windows, sequence_length, batch, vocab_size)


def batches_of_windows(
    windows: Sequence[tuple[DatasetPart, int]], sequence_length: int, batch: int, vocab_size: int | None
) -> list[npt.NDArray[np.int64]]:
    """Windows, each (part, number), in batches as `validation_batches` gives them."""
    samples = []
    for part, i in windows:
        tokens = part.flat[i * sequence_length : (i + 1) * sequence_length + 1].astype(np.int64)
        if vocab_size is not None:
            check_ids(part.dataset, tokens, vocab_size)
        samples.append(tokens)
    return [np.stack(samples[i : i + batch]) for i in range(0, len(samples), batch)]


def whole_windows(part: DatasetPart, sequence_length: int) -> int:
    """Windows of sequence_length + 1 tokens, neighbours sharing one, that a part holds."""
    return max(0, part.tokens - 1) // sequence_length


def check_length(part: DatasetPart, sequence_length: int) -> None:
    """UserError where a part holds no sample of sequence_length + 1 tokens."""
    if part.tokens < sequence_length + 1:
        raise UserError(
            f"{part.name}: {part.tokens} tokens, and one sample takes data.sequence_length + 1 = "
            f"{sequence_length + 1}; use more data or a shorter sequence"
        )
