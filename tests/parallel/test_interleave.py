"""Units dealt out in turn: nothing is lost, every tier is a prefix of every part, and the parts are fair."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_essh.parallel.interleave import Sharding, local_count

RANKS = st.integers(1, 9)
UNITS = st.integers(0, 40)


@given(UNITS, RANKS)
def test_counts_sum_and_differ_by_at_most_one(units, tp):
    counts = [local_count(units, rank, tp) for rank in range(tp)]
    assert sum(counts) == units
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)  # rank 0 holds the most


@given(UNITS, st.integers(1, 4), st.lists(st.integers(1, 3), max_size=2), RANKS)
def test_the_parts_join_to_the_whole(units, rows, behind, tp):
    whole = torch.randn(units * rows, *behind, dtype=torch.float64)
    sharding = Sharding(units, rows)
    parts = [sharding.take(whole, rank, tp) for rank in range(tp)]
    assert [len(part) for part in parts] == [sharding.local_rows(rank, tp) for rank in range(tp)]
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(sharding.join(parts), whole)


@given(st.integers(1, 40), st.data(), st.integers(1, 4), RANKS)
def test_a_prefix_of_the_whole_is_a_prefix_of_every_part(units, data, rows, tp):
    tier = data.draw(st.integers(0, units))
    whole = torch.arange(units * rows * 2.0).view(-1, 2)
    sharding, smaller = Sharding(units, rows), Sharding(tier, rows)
    prefixes = [sharding.take(whole, rank, tp)[: smaller.local_rows(rank, tp)] for rank in range(tp)]
    assert torch.equal(smaller.join(prefixes), whole[: tier * rows])


@given(st.integers(1, 40), st.integers(2, 9))
def test_unit_u_is_unit_u_div_tp_of_rank_u_mod_tp(units, tp):
    parts = [Sharding(units).take(torch.arange(units), rank, tp) for rank in range(tp)]
    assert all(parts[u % tp][u // tp] == u for u in range(units))


def test_a_part_keeps_no_memory_of_the_whole():
    whole = torch.randn(8, 3)
    part = Sharding(8).take(whole, 0, 4)
    assert part.untyped_storage().nbytes() == part.nbytes
