"""Clocks and memory. Knows nothing of models."""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

BEFORE_RECORDING = 3
"""Untimed calls of what is recorded."""


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Begin to look for the peak anew; a CPU's peak is the whole process's and cannot begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory: the device's allocated tensors since the reset, or the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def free_memory(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Recorded:
    """A step as a CUDA graph, recorded after some untimed calls in which its kernels are compiled and loaded."""

    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        self._step = step  # a recording holds addresses: what it reads and writes may be kept by the step alone
        stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(BEFORE_RECORDING):
                step()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            step()

    def __call__(self) -> None:
        self._graph.replay()


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call, from an idle device until it is idle again."""
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return 1e3 * (time.perf_counter() - begin)


def timed(
    what: str, call: Callable[[], object], tokens: int, device: torch.device, warmup: int, repeats: int
) -> dict[str, Any]:
    """Time `repeats` calls, after `warmup` untimed ones, and describe them: milliseconds, tokens/s, peak MiB."""
    reset_peak_memory(device)
    times = [milliseconds(call, device) for _ in range(warmup + repeats)][warmup:]
    median = statistics.median(times)
    return {
        "what": what,
        "median_ms": median,
        "min_ms": min(times),
        "max_ms": max(times),
        "all_ms": times,
        "tokens_per_second": 1e3 * tokens / median,
        "peak_mib": peak_memory_mib(device),
    }
