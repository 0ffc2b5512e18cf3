"""What watches over a run: steps that are not finite, losses that jump, replicas that drift apart, ranks that lag.

Nothing here changes a step. All ranks see the same figures, so that what one of them concludes all conclude.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_essh.errors import UserError
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.step_sums import Skip


class SkipGuard:
    """Counts the skipped steps in a row, and ends a run that has more than `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def count(self, step: int, skipped: Skip | None) -> None:
        """Count `step` (from 0).

        Raises:
            UserError: it was skipped, and so were as many before it as may be.
        """
        self.in_a_row = 0 if skipped is None else self.in_a_row + 1
        if self.in_a_row > self.limit:
            raise UserError(
                f"step {step + 1}: {skipped}: nothing was updated, {self.in_a_row} times in a row, and "
                f"training.skip_limit is {self.limit}; start a new run with a lower optimizer.learning_rate or other "
                "data"
            )


@dataclass
class SpikeDetector:
    """Finds losses far above their running mean; its fields are part of the checkpoint."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0

    DECAY = 0.98
    WARMUP = 50
    """Steps that are learnt from before any is judged."""
    DEVIATIONS = 8.0
    """Standard deviations that make a spike; a loss that falls, or is of other capacities, stays well below."""
    SHARE = 0.05
    """A spike is also this share of the mean above it: the noise of a run that has settled is not news."""

    def add(self, loss: float) -> float | None:
        """Take in a finite loss; the running mean if the loss is a spike above it, which is then learnt from less."""
        if self.steps == 0:
            self.mean = loss
        above, deviation = loss - self.mean, math.sqrt(self.variance)
        spike = self.steps >= self.WARMUP and above > max(self.DEVIATIONS * deviation, self.SHARE * abs(self.mean))
        mean = self.mean
        if spike:
            above = self.DEVIATIONS * deviation  # a level that stays is learnt, a single loss hardly moves the mean
        decay = min(self.DECAY, self.steps / (self.steps + 1))
        self.mean += (1 - decay) * above
        self.variance = decay * (self.variance + (1 - decay) * above * above)
        self.steps += 1
        return mean if spike else None

    def state_values(self) -> dict[str, Any]:
        """What `load_state` takes; JSON-able."""
        return {"mean": self.mean, "variance": self.variance, "steps": self.steps}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Put back what `state_values` gave."""
        self.mean, self.variance, self.steps = values["mean"], values["variance"], values["steps"]


class StepClock:
    """A rank's time in a step: at work, and in the reduction of gradients, which begins with a wait for the others.

    On a GPU it is the device's time, read when the host has waited for the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = [None] * 3
        if self._cuda:
            self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]

    def begin(self) -> None:
        """The step's first micro-batch begins."""
        self._mark(0)

    def reduce(self) -> None:
        """The last one is done."""
        self._mark(1)

    def end(self) -> None:
        """The gradients are reduced."""
        self._mark(2)

    def read(self) -> tuple[float, float]:
        """Seconds at work, and in the reduction. On a GPU the caller has waited for `end`."""
        begin, reduce, end = self._marks
        if self._cuda:
            return begin.elapsed_time(reduce) / 1e3, reduce.elapsed_time(end) / 1e3
        return reduce - begin, end - reduce

    def _mark(self, place: int) -> None:
        if self._cuda:
            self._marks[place].record()
        else:
            self._marks[place] = time.perf_counter()


@dataclass
class RankTimes:
    """All ranks' step times, exchanged a step late along with the losses, and what they tell over some steps."""

    world: int
    _last: tuple[float, float] = (0.0, 0.0)
    _last_costs: Sequence[float] = ()
    _work: list[float] = field(default_factory=list)
    _wait: list[float] = field(default_factory=list)
    _costs: list[float] = field(default_factory=list)
    _steps: int = 0

    def note(self, times: tuple[float, float], costs: Sequence[float]) -> None:
        """This rank's seconds at work and in the reduction, in the step that just ended; every rank's share of work."""
        self._last, self._last_costs = times, costs

    def row(self, rank: int) -> list[float]:
        """What this rank adds to the exchange: two numbers a rank, zeros but for its own."""
        values = [0.0] * (2 * self.world)
        values[2 * rank : 2 * rank + 2] = self._last
        return values

    def add(self, values: Sequence[float]) -> None:
        """Take in the sum of all ranks' rows."""
        if not self._last_costs:
            return
        if self._steps == 0:
            self._work, self._wait, self._costs = ([0.0] * self.world for _ in range(3))
        for rank in range(self.world):
            self._work[rank] += values[2 * rank]
            self._wait[rank] += values[2 * rank + 1]
            self._costs[rank] += self._last_costs[rank]
        self._steps += 1

    def take(self) -> dict[str, Any] | None:
        """What the steps since the last call tell; None where there were none. Begins anew.

        communication_share: of the ranks' time, the least that any rank spent in the reduction of gradients: the last
        to come waits for nobody. Exchanges inside passes (tensor parallel) are not in it.
        waiting_share: what the ranks spent there beyond that, on average.
        slowest_rank, slowest_pace: the rank that took longest for a unit of work, and how many times the median's time.
        """
        if self._steps == 0:
            return None
        total = statistics.fmean(w + r for w, r in zip(self._work, self._wait, strict=True))
        paces = [w / cost if cost else 0.0 for w, cost in zip(self._work, self._costs, strict=True)]
        slowest = max(range(self.world), key=lambda rank: paces[rank])
        median = statistics.median(paces)
        result = {
            "communication_share": min(self._wait) / total,
            "waiting_share": (statistics.fmean(self._wait) - min(self._wait)) / total,
            "slowest_rank": slowest,
            "slowest_pace": paces[slowest] / median if median else 1.0,
        }
        self._steps = 0
        return result


def fingerprint(tensor: Tensor) -> Tensor:
    """int64 []: a hash of a tensor's bits, on its device; any single change, and any exchange of rows, changes it."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    rows = (tensor.detach().flatten(1) if tensor.ndim > 1 else tensor.detach()[:, None]).view(kind)
    weights = [torch.arange(n, device=tensor.device) * 2 + 1 for n in rows.shape]
    # An odd weight for rows and an even one for columns: their sum is odd, and no bit times it vanishes modulo 2^64.
    row_weights, column_weights = ((w * 0x5DEECE66D) ^ (w << 17) | 1 for w in weights)
    by_row, by_column = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    return (by_row * row_weights).sum() + (by_column * column_weights * 2).sum()


def compare_replicas(parameters: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Hold ranks that hold the same parameters to the same bits: replicas in all, a replica's ranks in undealt ones.

    Raises:
        UserError: on all ranks, naming parameters and ranks that differ.
    """
    if mesh.world_group is None:
        return
    own = torch.stack([fingerprint(p) for p in parameters.values()])
    all_ranks = [torch.empty_like(own) for _ in range(mesh.world)]
    dist.all_gather(all_ranks, own, group=mesh.world_group)
    found = torch.stack(all_ranks).cpu().view(mesh.dp, mesh.tp, -1)
    faults = []
    for index, (name, parameter) in enumerate(parameters.items()):
        hashes = found[:, :, index]
        dealt = bool(getattr(parameter, "tensor_model_parallel", False))
        expected = hashes.mode(0).values if dealt else hashes.flatten().mode().values
        ranks = [d * mesh.tp + t for d, t in (hashes != expected).nonzero().tolist()]
        if ranks:
            faults.append(f"{name} (ranks {', '.join(map(str, ranks[:8]))})")
    if faults:
        raise UserError(
            f"{len(faults)} parameters are no longer the same on all ranks that hold them: {', '.join(faults[:3])}; "
            "continue from a checkpoint of before it, and test the GPUs of those ranks"
        )
