"""The process groups of the tests: they really exchange, and a failing or hanging rank is named, never waited for."""

import os
import time

import pytest
import torch
import torch.distributed as dist


def rank_sum(offset):
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), int(value), os.getpid()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError(f"a defect of {rank}")
    dist.barrier()


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_exchange_and_answer_in_order(run_ranks, world):
    results = run_ranks(world, rank_sum, 10)
    assert [(rank, total) for rank, total, _ in results] == [(r, 10 * world + sum(range(world))) for r in range(world)]
    assert len({pid for _, _, pid in results} | {os.getpid()}) == world + 1


def test_a_failing_rank_is_named_with_its_traceback(run_ranks):
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed:.*fail_on.*KeyError: 'a defect of 1'"):
        run_ranks(2, fail_on, 1)
    assert time.monotonic() - started < 30


def test_a_hanging_rank_is_named_with_its_place_and_ended(run_ranks):
    with pytest.raises(AssertionError, match=r"(?s)had not ended after 3 s:.*sleep_on"):
        run_ranks(2, sleep_on, 0, timeout=3.0)
