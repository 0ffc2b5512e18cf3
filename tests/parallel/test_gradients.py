"""Gradients in buckets are ordinary gradients that one reduction serves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_essh.parallel.gradients import ALIGNMENT, GradientBuckets

SHAPES = [(3, 5), (64,), (0, 4), (200,), (7, 2, 3), (1,)]


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    made[0].tensor_model_parallel = made[3].tensor_model_parallel = True
    return made


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 1 << 20])
def test_autograd_adds_to_views_that_stay_where_they_are(bucket_bytes):
    bucketed, plain = parameters(), parameters()
    buckets = GradientBuckets(bucketed, bucket_bytes)
    addresses = [p.grad.data_ptr() for p in bucketed]
    for _ in range(2):
        for group in (bucketed, plain):
            sum((p.square().sum() * (i + 1) for i, p in enumerate(group)), torch.zeros(())).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(bucketed, plain, strict=True))
    assert [p.grad.data_ptr() for p in bucketed] == addresses
    for flat in buckets.flats:
        inside = [p.grad.data_ptr() - flat.data_ptr() for p in bucketed if _within(p.grad, flat)]
        assert all(offset % (4 * ALIGNMENT) == 0 for offset in inside)
    total = sum(flat.square().sum() for flat in buckets.flats)
    torch.testing.assert_close(total, sum(p.grad.square().sum() for p in plain))
    assert sum(flat.square().sum() for flat in buckets.sharded) < total
    if bucket_bytes == 1 << 20:
        assert (len(buckets.sharded), len(buckets.replicated)) == (1, 1), "few reductions serve many gradients"
    for flat in buckets.flats:
        held = [p for p in bucketed if _within(p.grad, flat)]
        assert flat.nbytes <= max(bucket_bytes, 4 * ALIGNMENT * -(-max(p.numel() for p in held) // ALIGNMENT))
    buckets.zero()
    assert all(not p.grad.any() for p in bucketed)


def _within(grad, flat):
    return grad.numel() > 0 and 0 <= grad.data_ptr() - flat.data_ptr() < flat.nbytes


def test_buckets_of_blocks_are_done_with_the_first_of_their_blocks():
    made = parameters()
    buckets = GradientBuckets(made, 1000, block_of={made[0]: 2, made[1]: 2, made[3]: 1, made[4]: 0})
    for flat in buckets.flats:
        blocks = {(2, 2, None, 1, 0, None)[i] for i, p in enumerate(made) if _within(p.grad, flat)}
        assert buckets._done_after.get(flat) == (None if None in blocks else min(blocks, default=None)), blocks
    assert len(buckets._done_after) >= 3


def reduced(over_tp):
    made = parameters()
    buckets = GradientBuckets(made, 1000)
    for place, parameter in enumerate(made):
        parameter.grad.fill_(10.0 ** dist.get_rank() * (place + 1))
    world = dist.group.WORLD
    buckets.reduce(None if over_tp else world, world if over_tp else None)
    return [p.grad.flatten()[:1].tolist() for p in made]


def test_a_reduction_sums_all_gradients_or_only_replicated_ones(run_ranks):
    expected = [[11.0 * (i + 1)] if torch.Size(s).numel() else [] for i, s in enumerate(SHAPES)]
    assert run_ranks(2, reduced, False) == [expected, expected]
    first, second = run_ranks(2, reduced, True)
    assert first == [[1.0 * (i + 1)] if i in (0, 3) else each for i, each in enumerate(expected)]
    assert second == [[10.0 * (i + 1)] if i in (0, 3) else each for i, each in enumerate(expected)]
