"""What keeps a GPU from waiting for its host: work that comes again as CUDA graphs, numbers sent without waiting.

Knows nothing of what the work is, nor of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


def send(numbers: Sequence[int], target: Tensor) -> None:
    """Write whole numbers to an int tensor [n], by one copy; a device is not waited for."""
    target.copy_(torch.tensor(numbers, dtype=target.dtype, pin_memory=target.is_cuda), non_blocking=True)


class Recordings:
    """Runs work that is known by a key: the first time as it is, so that kernels are compiled and work that never comes
    again costs no recording; the second time it is recorded, and from then on replayed."""

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        """Where `enabled` is False, and on a CPU, all work runs as it is."""
        self.enabled = enabled and device.type == "cuda"
        if self.enabled:
            self._stream = torch.cuda.Stream(device)
            # One pool for all: recordings run one after another, and leave what they give outside of it.
            self._pool = torch.cuda.graph_pool_handle()
        self._met: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, object]] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._recorded)

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Do the work on the current stream.

        Args:
            key: names the kernels that `work` launches and the addresses that they are given, the same every time.
            work: reads and writes what stays where it is, and reads nothing on the host. What it returns is kept with
                the recording, which holds addresses alone.
        """
        if not self.enabled or key not in self._met:
            work()
            self._met.add(key)
            return
        if key not in self._recorded:
            graph = torch.cuda.CUDAGraph()
            # What another thread calls meanwhile, a loader's say, is not held against this one.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                kept = work()
            self._recorded[key] = graph, kept
        self._recorded[key][0].replay()
