"""Micro-batches as CUDA graphs: each capacity's forward and backward pass is recorded once and replayed.

A replay is one call, so that the device never waits for Python however small the model or the capacity. Nothing is
compiled for it: a capacity costs one ordinary pass, in which kernels are loaded, and one recording.

What is recorded are addresses. Parameters, their gradients, low-precision copies and statistics must stay where they
are and be written in place; tokens and labels are copied to where the graphs read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from megatron_essh.elastic.distillation import MicroLoss

Pass = Callable[[Tensor, Tensor, int], MicroLoss]
"""(inputs_BT, labels_BT, budget) -> the losses, the gradients being added up where they are kept."""


class CapturedPasses:
    """Runs `run` on micro-batches of one shape, on a CUDA device: each budget's first time as it is, then replayed."""

    def __init__(self, run: Pass, batch: int, length: int, device: torch.device) -> None:
        self._run = run
        self._inputs_BT, self._labels_BT = torch.zeros(2, batch, length, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, MicroLoss]] = {}
        self._loaded: set[int] = set()

    def __call__(self, inputs_BT: Tensor, labels_BT: Tensor, budget: int) -> MicroLoss:
        """The losses of one micro-batch, as tensors of their own."""
        self._inputs_BT.copy_(inputs_BT, non_blocking=True)
        self._labels_BT.copy_(labels_BT, non_blocking=True)
        if budget not in self._loaded:
            self._loaded.add(budget)
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # where it is recorded: libraries keep a workspace a stream
                losses = self._run(self._inputs_BT, self._labels_BT, budget)
            current.wait_stream(self._stream)
            return losses
        if budget not in self._graphs:
            self._graphs[budget] = self._record(budget)
        graph, losses = self._graphs[budget]
        graph.replay()
        return _of_each(losses, Tensor.clone)

    def _record(self, budget: int) -> tuple[torch.cuda.CUDAGraph, MicroLoss]:
        """Graphs run one at a time, so they share their memory: as much as the largest needs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the loader's, may call the driver meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            losses = _of_each(self._run(self._inputs_BT, self._labels_BT, budget), Tensor.detach)
        return graph, losses


def _of_each(losses: MicroLoss, function: Callable[[Tensor], Tensor]) -> MicroLoss:
    values = {field.name: getattr(losses, field.name) for field in fields(losses)}
    return replace(losses, **{name: function(value) for name, value in values.items() if value is not None})
