"""Which data-parallel rank runs which slots of a step, so that all ranks are done at about the same time (section 5).

A pure function of the step's plan and the config: every rank knows every rank's slots without a word exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.elastic.plan import FULL
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import flops_per_token


def deal(costs: Sequence[float], dp: int) -> list[list[int]]:
    """The slots of each of `dp` ranks, ascending: the costliest slot first, each to the rank with the least so far.

    Every slot is dealt once; no rank gets more than the mean and the cost of one slot. Of equal slots the first goes
    first, of equal ranks the first gets it.
    """
    slots: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for slot in sorted(range(len(costs)), key=lambda s: (-costs[s], s)):
        rank = min(range(dp), key=lambda r: (loads[r], len(slots[r]), r))
        slots[rank].append(slot)
        loads[rank] += costs[slot]
    return [sorted(own) for own in slots]


def deal_in_step(costs: Sequence[float], dp: int) -> list[list[int]]:
    """The slots of each of `dp` ranks, as many on each, in the order to run them.

    At every place the ranks' slots are as alike as can be, so that those that meet after every slot wait little: slots
    go by cost, `dp` to a place, there the costliest to the rank with the least so far. `dp` divides the slots.
    """
    order = sorted(range(len(costs)), key=lambda s: (-costs[s], s))
    slots: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    for start in range(0, len(order), dp):
        ranks = sorted(range(dp), key=lambda r: (loads[r], r))
        for rank, slot in zip(ranks, order[start : start + dp], strict=True):
            slots[rank].append(slot)
            loads[rank] += costs[slot]
    return slots


def slot_costs(config: RunConfig, refine: bool, plan: Sequence[int], capacities: Mapping[int, Capacity]) -> list[float]:
    """What each slot of `plan` costs: floating-point operations a token, forward and backward, the teacher's included.

    Args:
        refine: the plan is of shared refinement, in which the full capacity trains beside every slot's own.
        capacities: of each budget in the plan, and of the full one.
    """
    length = config.data.sequence_length
    flops = {b: flops_per_token(config.model, capacities[b], sequence_length=length) for b in {FULL, *plan}}
    teacher = flops[FULL].forward if config.elastic.kl_weight > 0 else 0

    def cost(budget: int) -> float:
        if refine:
            return float(flops[FULL].training + flops[budget].training)
        return float(flops[budget].training + (0 if budget == FULL else teacher))

    return [cost(budget) for budget in plan]


def check_slots(global_batch: int, slot_sequences: int, dp: int, setting: str) -> None:
    """Refuse a batch whose slots `dp` replicas cannot share evenly.

    Raises:
        UserError: naming `setting` and values of it that fit.
    """
    slots = global_batch // slot_sequences
    if slots % dp:
        step = slot_sequences * dp
        fitting = " or ".join(str(n * step) for n in (global_batch // step, global_batch // step + 1) if n)
        raise UserError(
            f"{setting} {global_batch}: {slots} slots of elastic.slot_sequences {slot_sequences} do not divide among "
            f"{dp} replicas; set it to {fitting}, or change elastic.slot_sequences, parallel.tensor or the ranks"
        )


def check_batches(config: RunConfig, refine: bool, dp: int) -> None:
    """Refuse batches that `dp` replicas cannot share evenly.

    Raises:
        UserError: as `check_slots`, for any batch of the stage.
    """
    slot = config.elastic.slot_sequences
    if refine:
        check_slots(config.refinement.global_batch, slot, dp, "refinement.global_batch")
        return
    check_slots(config.training.global_batch, slot, dp, "training.global_batch")
    ramp = config.data.batch_ramp
    if ramp is not None:
        check_slots(ramp.start, slot, dp, "data.batch_ramp.start")
        check_slots(ramp.increment, slot, dp, "data.batch_ramp.increment")
