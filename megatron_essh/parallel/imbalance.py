"""What the elastic plan costs data-parallel ranks that wait for the slowest: dealing simulated, nothing trained.

A reduced slot costs less or more than a full one (its teacher's forward pass comes on top), so ranks with the same
number of slots are not done at the same time. The dealing is the engine's own (`dealing.deal`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import budget_capacity, full_capacity
from megatron_essh.elastic.plan import FULL, pretraining_plan
from megatron_essh.parallel.dealing import deal, slot_costs

Dealing = Callable[[Sequence[float], int], list[list[int]]]
"""(costs, dp) -> the slots of each rank."""


def deal_in_turn(costs: Sequence[float], dp: int) -> list[list[int]]:
    """The naive dealing: slot r to rank r mod dp, whatever it costs."""
    return [list(range(rank, len(costs), dp)) for rank in range(dp)]


@dataclass(frozen=True)
class Imbalance:
    """Of the simulated steps, by how much the slowest rank is longer at work than the mean rank."""

    dp: int
    slots_per_rank: int
    steps: int
    balanced: float
    """Mean over the steps of slowest / mean - 1, as the engine deals."""
    balanced_worst: float
    """The largest of them."""
    naive: float
    """The mean for `deal_in_turn`."""


def elastic_config(config: RunConfig, slots: int, steps: int) -> RunConfig:
    """`config` with steps of `slots` slots, past the warm-up from its first step."""
    batch = slots * config.elastic.slot_sequences
    return replace(
        config,
        data=replace(config.data, batch_ramp=None),
        elastic=replace(config.elastic, full_only_fraction=0.0),
        training=replace(config.training, global_batch=batch, steps=steps),
    )


def plan_costs(config: RunConfig, steps: int) -> list[list[float]]:
    """The costs of every slot of the first `steps` steps: FLOPs a token, a teacher's forward pass included."""
    capacities = {b: budget_capacity(config.model, config.elastic, b) for b in config.elastic.training_budgets}
    capacities[FULL] = full_capacity(config.model)
    return [slot_costs(config, False, pretraining_plan(config, step), capacities) for step in range(steps)]


def lost(costs: Sequence[float], dp: int, dealing: Dealing) -> float:
    """slowest / mean - 1 of one step's ranks."""
    loads = [sum(costs[slot] for slot in own) for own in dealing(costs, dp)]
    return max(loads) / (sum(loads) / dp) - 1.0


def simulate(config: RunConfig, dp: int, slots_per_rank: int, steps: int) -> Imbalance:
    """Deal `steps` elastic steps of dp x slots_per_rank slots out over dp ranks."""
    costs = plan_costs(elastic_config(config, dp * slots_per_rank, steps), steps)
    balanced = [lost(step, dp, deal) for step in costs]
    naive = [lost(step, dp, deal_in_turn) for step in costs]
    return Imbalance(dp, slots_per_rank, steps, statistics.fmean(balanced), max(balanced), statistics.fmean(naive))
