"""Global batches in order, read ahead by threads, with a position that goes into the checkpoint.

A batch is a function of the dataset and of the samples consumed before it: it does not depend on how many processes
or threads there are, and resuming costs nothing however far the run has come.

Threads and not processes: a batch is one C++ call that copies out of the files' memory maps without the
interpreter's lock, page faults included, so that threads overlap the disk's latency with the training step, and no
batch is pickled between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_essh.data.batch_schedule import BatchSchedule
from megatron_essh.data.packing import OTHER_RUN
from megatron_essh.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Batch: TypeAlias = "npt.NDArray[np.int64] | Tensor"
Rows: TypeAlias = Callable[[int], Sequence[int]]
"""Which rows of a step's global batch a process takes, by the step's number."""


class SampleSource(Protocol):
    """What a loader serves: a `PackedDataset` or a `BlendedDataset`."""

    sequence_length: int

    @property
    def prefix(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, indices: npt.NDArray[np.int64], out_NT: npt.NDArray[np.int64]) -> None: ...

    def state_values(self, consumed: int) -> dict[str, Any]: ...

    def check_state(self, values: dict[str, Any], where: str) -> None: ...


class StatefulLoader:
    """Serves `dataset` in the global batches of `schedule` from a position on.

    Args:
        dataset: the samples.
        schedule: the batch of each step; a number for the same at every step.
        workers: threads that read ahead; 0 reads in the thread that asks. Changes no batch.
        pinned: give PyTorch tensors in page-locked memory, which a GPU copies from while the host goes on.
        rows: the rows that this process takes of each step's batch; None: all. The position counts whole batches.
    """

    def __init__(
        self,
        dataset: SampleSource,
        schedule: BatchSchedule | int,
        *,
        workers: int = 0,
        pinned: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.dataset = dataset
        self.schedule = BatchSchedule.constant(schedule) if isinstance(schedule, int) else schedule
        self.pinned = pinned
        self.rows = rows
        self._consumed = 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader") if workers else None
        self._depth = 2 * workers
        self._ahead: deque[Future[Batch]] = deque()
        self._requested = 0
        """Samples that batches were asked for, served or still ahead."""

    @property
    def consumed_samples(self) -> int:
        """Samples served so far, over all processes."""
        return self._consumed

    @consumed_samples.setter
    def consumed_samples(self, samples: int) -> None:
        self._forget()
        self._consumed = samples

    def next_batch(self) -> Batch:
        """The next int64 [batch, sequence_length + 1], of the rows that this process takes.

        IndexError past the dataset's end; the position then stays.

        Raises:
            UserError: a token in it lies outside the dataset's vocabulary.
        """
        size = self._size(self._consumed)
        if self._consumed + size > len(self.dataset):
            raise IndexError(f"a batch of {size} after sample {self._consumed} of {len(self.dataset)}")
        if self._pool is None:
            batch = self._read(self._consumed)
        else:
            self._ask_ahead(self._pool)
            try:
                batch = self._ahead.popleft().result()
            except BaseException:
                self._forget()
                raise
        self._consumed += size
        if self._pool is not None:
            self._ask_ahead(self._pool)
        return batch

    def close(self) -> None:
        """End the threads; the loader serves no more."""
        self._forget()
        if self._pool is not None:
            self._pool.shutdown()

    def state_values(self) -> dict[str, Any]:
        """Position and everything that the order depends on, ready for JSON."""
        return {"consumed_samples": self._consumed, **self.dataset.state_values(self._consumed)}

    def load_state(self, values: dict[str, Any]) -> None:
        """Go on where `state_values` was taken.

        Raises:
            UserError: the values are not a loader's, this dataset's content or order is another than theirs, or no
                step of this schedule begins there.
        """
        where = f"{self.dataset.prefix}: the checkpoint's data position"
        if "consumed_samples" not in values:
            raise UserError(f"{where} lacks consumed_samples; name a checkpoint of this program")
        self.dataset.check_state(values, where)
        consumed = values["consumed_samples"]
        if not isinstance(consumed, int) or not 0 <= consumed <= len(self.dataset):
            raise UserError(f"{where}: consumed_samples {consumed!r}, expected 0 to {len(self.dataset)}; {OTHER_RUN}")
        try:
            self.schedule.step_at(consumed)
        except ValueError as error:
            raise UserError(
                f"{where}: consumed_samples {consumed}: {error}: training.global_batch or data.batch_ramp changed; "
                f"{OTHER_RUN}"
            ) from None
        self.consumed_samples = consumed

    def _size(self, consumed: int) -> int:
        return self.schedule.batch_after(consumed)

    def _read(self, consumed: int) -> Batch:
        indices = np.arange(consumed, consumed + self._size(consumed), dtype=np.int64)
        if self.rows is not None:
            indices = indices[np.asarray(self.rows(self.schedule.step_at(consumed)), np.int64)]
        shape = (len(indices), self.dataset.sequence_length + 1)
        if self.pinned:
            import torch  # the data package works without PyTorch

            tensor = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            self.dataset.read(indices, tensor.numpy())
            return tensor
        batch = np.empty(shape, np.int64)
        self.dataset.read(indices, batch)
        return batch

    def _ask_ahead(self, pool: ThreadPoolExecutor) -> None:
        self._requested = max(self._requested, self._consumed)
        while len(self._ahead) < self._depth:
            size = self._size(self._requested)
            if self._requested + size > len(self.dataset):
                return
            self._ahead.append(pool.submit(self._read, self._requested))
            self._requested += size

    def _forget(self) -> None:
        """Drop what was read ahead."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._requested = 0
