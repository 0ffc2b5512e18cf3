"""The plan: which capacity each slot of a step trains at (section 5).

A slot is a fixed number of sequences, and slot r of a step always holds the same samples. The plan is a pure
function of the settings, the seed and the step: it can be tested without a model and is the same on every layout.
Budgets stand for capacities here, in units of 1 / elastic.budget_denominator; `FULL` is the full capacity.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_essh.config import ElasticConfig, RunConfig
from megatron_essh.data.batch_schedule import BatchSchedule

FULL = 0
"""The plan's mark for the full capacity (a budget is at least 1)."""


def budget_label(budget: int, elastic: ElasticConfig) -> str:
    """How logs name a budget: `full`, or such as `8/32`."""
    return "full" if budget == FULL else f"{budget}/{elastic.budget_denominator}"


def slots_per_step(global_batch: int, elastic: ElasticConfig) -> int:
    """Slots of a step of `global_batch` sequences."""
    return global_batch // elastic.slot_sequences


def trains_full_only(config: RunConfig, step: int) -> bool:
    """Whether `step` (from 0) lies in the full-capacity warm-up at the start of the run."""
    elastic = config.elastic
    if not elastic.enabled:
        return True
    if elastic.full_only_fraction is not None:
        return step < elastic.full_only_fraction * config.training.steps
    samples = BatchSchedule.of_pretraining(config).samples_before(step)
    return samples * config.data.sequence_length < elastic.full_only_tokens


def pretraining_plan(config: RunConfig, step: int) -> tuple[int, ...]:
    """Each slot's budget at `step` of pretraining.

    After the warm-up a share of the slots is reserved for the full capacity, its fraction of a slot by a seeded coin,
    at places drawn anew each step; every other slot draws uniformly from the training budgets.
    """
    elastic = config.elastic
    slots = slots_per_step(BatchSchedule.of_pretraining(config).batch(step), elastic)
    if trains_full_only(config, step):
        return (FULL,) * slots
    draws = _uniforms(config.training.seed, step, 1 + 2 * slots)
    share = elastic.full_share * slots
    reserved = math.floor(share + 1e-9)
    reserved += int(draws[0] < share - reserved)
    order = np.argsort(draws[1 : 1 + slots], kind="stable")
    menu = elastic.training_budgets
    plan = [menu[int(u * len(menu))] for u in draws[1 + slots :]]
    for slot in order[:reserved]:
        plan[slot] = FULL
    return tuple(FULL if budget >= elastic.budget_denominator else budget for budget in plan)


def refinement_plan(config: RunConfig, step: int) -> tuple[int, ...]:
    """Each slot's reduced budget at `step` of shared refinement (the full model trains beside it in every slot)."""
    refinement = config.refinement
    slots = slots_per_step(refinement.global_batch, config.elastic)
    draws = _uniforms(config.training.seed, step, len(refinement.budgets))
    if refinement.draw == "one_per_step":
        return (refinement.budgets[int(draws[0] * len(refinement.budgets))],) * slots
    order = np.argsort(draws, kind="stable")
    return tuple(refinement.budgets[order[slot % len(order)]] for slot in range(slots))


def _uniforms(seed: int, step: int, count: int) -> np.ndarray:
    """`count` draws from [0, 1), from Philox's raw words, which no NumPy version may change."""
    words = np.random.Philox(key=np.array([seed, step], dtype=np.uint64)).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53
