"""What a step's micro-batches lost, by micro-batch, and what the step reports of it.

A rank knows its own micro-batches; the table has a place for each of the step, so that the sum of all ranks' tables is
the table of one process, and every figure is summed in the same order on every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_essh.config import ElasticConfig
from megatron_essh.elastic.distillation import MicroLoss
from megatron_essh.elastic.plan import FULL, budget_label

_OBJECTIVE, _CROSS_ENTROPY, _FULL_CROSS_ENTROPY, _DIVERGENCE = range(4)


@dataclass(frozen=True)
class Skip:
    """Why a step updated nothing."""

    loss: float
    grad_norm: float
    micro_batch: int | None
    """The first whose loss is not finite, in the plan's order; None where only gradients are not."""
    rows: tuple[int, int] | None
    """Its sequences, from and to, among the step's."""
    capacity: str | None
    """Its label."""
    parameters: tuple[str, ...]
    """Parameters whose gradient is not finite."""

    def __str__(self) -> str:
        if self.micro_batch is not None:
            assert self.rows is not None
            where = (
                f"first in micro-batch {self.micro_batch}, sequences {self.rows[0]} to {self.rows[1] - 1} of the step, "
                f"capacity {self.capacity}"
            )
        else:
            named = ", ".join(self.parameters[:3]) or "none"
            where = f"every loss is finite, the gradients of {len(self.parameters)} parameters are not: {named}"
        return f"loss {self.loss}, gradient norm {self.grad_norm}: {where}"


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did; the same on every rank and, but for rounding, on every layout."""

    step: int
    loss: float
    """Mean objective a valid token."""
    loss_by_capacity: dict[str, float]
    """Mean cross-entropy a token by the plan's labels (`full`, `8/32`, ...)."""
    divergence: float | None
    """Mean KL (pretraining) or total variation (refinement) a token of the reduced slots."""
    tokens: int
    """Valid tokens."""
    learning_rate: float
    grad_norm: float
    full_slots: int
    slots: int
    ordered: bool
    """Whether the feed-forward units were ordered after the step."""
    grad_norm_by_part: dict[str, float] = field(default_factory=dict)
    """Norm of the gradient of each part of the model, before clipping."""
    slots_by_capacity: dict[str, int] = field(default_factory=dict)
    """The plan: how many of the step's slots run each capacity, by its label."""
    flops: float = 0.0
    """Floating-point operations of the model, forward and backward, teachers included; recomputation is not counted."""
    skipped: Skip | None = None
    """Why nothing was updated; None: it was."""
    stop: bool = False
    """Whether any rank was asked to stop before the step's exchange; only where there are several."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a step's exchange."""

    grad_norm: float
    """Of the whole model, before clipping."""
    squares: dict[str, float]
    """Squared norm of each parameter's gradient, of the whole parameter."""
    broken_ranks: int
    """Ranks whose gradients are not finite."""
    stop: bool

    @property
    def norm_by_part(self) -> dict[str, float]:
        """Gradient norm of each part of the model."""
        sums: dict[str, float] = {}
        for name, square in self.squares.items():
            sums[model_part(name)] = sums.get(model_part(name), 0.0) + float(square)
        return {part: total**0.5 for part, total in sums.items()}


def model_part(name: str) -> str:
    """The part of the model that a parameter belongs to, as metrics name it."""
    modules = name.split(".")[:-1]
    if any(module.endswith("norm") for module in modules):
        return "norms"
    return modules[-1] if modules else name


class StepSums:
    """The losses of a step's micro-batches.

    Args:
        plan: each slot's budget.
        per_slot: micro-batches in a slot.
        tokens: valid tokens of each micro-batch of the step.
    """

    def __init__(self, plan: Sequence[int], per_slot: int, tokens: Sequence[int]) -> None:
        self.budgets = [budget for budget in plan for _ in range(per_slot)]
        self.tokens = np.asarray(tokens, np.int64)
        self._own: dict[int, MicroLoss] = {}
        self._values: npt.NDArray[np.float64] | None = None

    def add(self, index: int, loss: MicroLoss) -> None:
        """Note micro-batch `index` of the step."""
        self._own[index] = loss

    def table(self, device: torch.device) -> Tensor:
        """fp64 [4, micro-batches of the step]: sums over valid tokens, zeros where this rank has none."""
        table = torch.zeros(4, len(self.budgets), dtype=torch.float64, device=device)
        if not self._own:
            return table
        losses = list(self._own.values())
        columns: list[list[Tensor | None]] = [
            [loss.objective.detach() for loss in losses],
            [loss.cross_entropy for loss in losses],
            [loss.full_cross_entropy for loss in losses],
            [loss.divergence for loss in losses],
        ]
        for row, column in zip(table, columns, strict=True):
            present = [(i, value) for i, value in zip(self._own, column, strict=True) if value is not None]
            if len(present) == len(self.budgets):
                row[:] = torch.stack([value for _, value in present])
            elif present:
                places = torch.tensor([i for i, _ in present], device=device)
                row[places] = torch.stack([value for _, value in present]).double()
        return table

    def settle(self, values: npt.NDArray[np.float64]) -> None:
        """Take the sum of all ranks' tables."""
        self._values = values

    @property
    def objective(self) -> float:
        """Sum of the objective."""
        return self._sum(_OBJECTIVE, None)

    @property
    def broken(self) -> int | None:
        """The first micro-batch whose losses are not finite."""
        finite = np.isfinite(self._settled()).all(0)
        return None if finite.all() else int(finite.argmin())

    def mean_cross_entropy(self, elastic: ElasticConfig, refine: bool) -> dict[str, float]:
        """Mean cross-entropy a token, by capacity label, the full one first.

        refine: the full capacity trains beside each micro-batch's own.
        """
        budgets = np.asarray(self.budgets)
        means = {}
        for budget in sorted({*self.budgets, *([FULL] if refine else [])}, key=lambda b: (b != FULL, -b)):
            if refine and budget == FULL:
                places, row = np.ones(len(budgets), bool), _FULL_CROSS_ENTROPY
            else:
                places, row = budgets == budget, _CROSS_ENTROPY
            tokens = int(self.tokens[places].sum())
            means[budget_label(budget, elastic)] = self._sum(row, places) / max(1, tokens)
        return means

    def mean_divergence(self, compared: bool) -> float | None:
        """Mean KL or total variation a token of the reduced slots; None where there was none.

        compared: whether reduced slots are compared with the full capacity at all.
        """
        places = np.asarray(self.budgets) != FULL
        if not compared or not places.any():
            return None
        return self._sum(_DIVERGENCE, places) / max(1, int(self.tokens[places].sum()))

    def _settled(self) -> npt.NDArray[np.float64]:
        if self._values is None:  # one process, outside a step
            device = next(iter(self._own.values())).objective.device
            self._values = self.table(device).cpu().numpy()
        return self._values

    def _sum(self, row: int, places: npt.NDArray[np.bool_] | None) -> float:
        values = self._settled()[row]
        return float(torch.from_numpy(values if places is None else values[places]).sum())


def is_finite(*values: float) -> bool:
    """Whether all of them are."""
    return all(math.isfinite(value) for value in values)
