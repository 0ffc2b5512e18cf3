"""Ranks find each other through a store, whatever a run before left there, or the first one names who is missing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_essh.errors import UserError
from megatron_essh.parallel import meeting

Meet = Callable[..., list[dist.Store]]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """`meet(ranks, world, seconds)`: the stores that they get, each a thread, at a store that stays, as torchrun's."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(ranks: list[int], world: int, seconds: int) -> list[dist.Store]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = [pool.submit(meeting.meet, rank, world, "127.0.0.1", host.port, seconds) for rank in ranks]
        return [future.result() for future in found]

    return run


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_ranks_get_one_store(meet: Meet, world: int) -> None:
    first, *others = meet([*range(world)], world, 20)
    first.set("said", "by the first")
    assert all(store.get("said") == b"by the first" for store in others)


def test_ranks_that_start_anew_find_nothing_of_the_run_before(meet: Meet) -> None:
    before, _ = meet([0, 1], 2, 20)
    before.set("address", "of a rank that is gone")
    for store in meet([0, 1], 2, 20):
        assert not store.check(["address"])


def test_a_rank_of_the_run_before_is_not_taken_for_one_that_came(meet: Meet) -> None:
    meet([0, 1, 2], 3, 20)
    with pytest.raises(UserError, match=r"rank 0 waited .* of 3 ranks \(WORLD_SIZE\) ranks 1, 2 did not come;"):
        meet([0], 3, 1)


@pytest.mark.parametrize(("world", "named"), [
    (2, "rank 1 did not"), (3, "ranks 1, 2 did not"), (9, "ranks 1, 2, 3, 4, 5, 6, 7, 8 did not"),
    (12, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not"),
])  # fmt: skip
def test_the_first_rank_names_who_is_missing(meet: Meet, world: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        meet([0], world, 1)


def test_a_rank_without_the_first_one_says_so(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.1)
    with pytest.raises(UserError, match=r"rank 1 could not reach the first rank at .* within parallel\.timeout"):
        meet([1], 2, 1)


def test_a_rank_that_came_says_that_others_did_not(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.5)
    with pytest.raises(UserError, match=r"rank 0 waited .* rank 2 did not come"):
        meet([0, 1], 3, 1)
    with pytest.raises(UserError, match=r"rank 1 reached .*, and not all 3 ranks \(WORLD_SIZE\) came"):
        meet([1, 0], 3, 1)
