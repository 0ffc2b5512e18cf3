"""Global batches in order, with a position that goes into the checkpoint.

A batch is a function of the dataset and of the samples consumed before it: it does not depend on how many
processes there are, and resuming costs nothing however far the run has come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_essh.data.indexed_dataset import check_ids
from megatron_essh.data.packing import PackedDataset
from megatron_essh.errors import UserError

_REMEDY = "resume with the run's own data, or start a new run"


class StatefulLoader:
    """Serves `dataset` in batches of `global_batch` samples from a position on.

    Attributes:
        consumed_samples: samples served so far.
    """

    def __init__(self, dataset: PackedDataset, global_batch: int) -> None:
        assert global_batch >= 1, f"a batch of {global_batch}"
        self.dataset = dataset
        self.global_batch = global_batch
        self.consumed_samples = 0

    def next_batch(self) -> npt.NDArray[np.int64]:
        """The next int64 [global_batch, sequence_length + 1]; IndexError past the dataset's end.

        Raises:
            UserError: a token in it lies outside the dataset's vocabulary.
        """
        first = self.consumed_samples
        batch = np.stack([self.dataset[first + i] for i in range(self.global_batch)])
        if self.dataset.vocab_size is not None:
            check_ids(self.dataset.dataset, batch, self.dataset.vocab_size)
        self.consumed_samples = first + self.global_batch
        return batch

    def state_values(self) -> dict[str, Any]:
        """Position and everything that the order depends on, ready for JSON."""
        order = self.dataset.order
        return {
            "consumed_samples": self.consumed_samples,
            "fingerprint": self.dataset.fingerprint,
            "sequence_length": self.dataset.sequence_length,
            "seed": self.dataset.seed,
            "epochs": order.epochs,
            "last_epoch_apart": order.last_epoch_apart,
        }

    def load_state(self, values: dict[str, Any]) -> None:
        """Go on where `state_values` was taken.

        Raises:
            UserError: the values are not a loader's, or this dataset's content or order is another than
                theirs.
        """
        own = self.state_values()
        where = f"{self.dataset.dataset.prefix}: the checkpoint's data position"
        missing = own.keys() - values.keys()
        if missing:
            raise UserError(f"{where} lacks {', '.join(sorted(missing))}; name a checkpoint of this program")
        if values["fingerprint"] != own["fingerprint"]:
            raise UserError(
                f"{where}: fingerprint {values['fingerprint']}, and the files' is {own['fingerprint']}: "
                f"the data changed; {_REMEDY}"
            )
        for key in ("sequence_length", "seed"):
            if values[key] != own[key]:
                raise UserError(f"{where}: {key} {values[key]}, and the run has {own[key]}; {_REMEDY}")
        if (values["epochs"], values["last_epoch_apart"]) != (own["epochs"], own["last_epoch_apart"]):
            raise UserError(
                f"{where}: its order was drawn over {values['epochs']} epochs for the run's whole length, "
                f"and this length takes another order over {own['epochs']}; keep training.steps and "
                "training.global_batch, or start a new run"
            )
        consumed = values["consumed_samples"]
        if not isinstance(consumed, int) or not 0 <= consumed <= len(self.dataset):
            raise UserError(f"{where}: consumed_samples {consumed!r}, expected 0 to {len(self.dataset)}; {_REMEDY}")
        self.consumed_samples = consumed
