"""The grid of ranks: tensor-parallel ranks are neighbours, and each group holds exactly its line of the grid."""

import pytest
import torch
import torch.distributed as dist

from megatron_essh.parallel.mesh import Mesh


def lines(tp):
    mesh = Mesh.build(tp, torch.device("cpu"))
    assert mesh.rank == dist.get_rank()
    assert mesh.world == dist.get_world_size() == mesh.tp * mesh.dp
    assert mesh.is_first == (dist.get_rank() == 0)
    groups = (mesh.tp_group, mesh.dp_group, mesh.world_group)
    return [None if group is None else dist.get_process_group_ranks(group) for group in groups]


@pytest.mark.parametrize(
    ("tp", "tp_lines", "dp_lines"),
    [
        (1, [None] * 4, [[0, 1, 2, 3]] * 4),
        (2, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (4, [[0, 1, 2, 3]] * 4, [None] * 4),
    ],
)
def test_groups_are_the_lines_of_the_grid(run_ranks, tp, tp_lines, dp_lines):
    found = run_ranks(4, lines, tp)
    assert [f[0] for f in found] == tp_lines
    assert [f[1] for f in found] == dp_lines
    assert [f[2] for f in found] == [[0, 1, 2, 3]] * 4


def test_a_single_process_has_no_groups():
    mesh = Mesh.single(torch.device("cpu"))
    assert (mesh.world, mesh.rank, mesh.is_first) == (1, 0, True)
    assert mesh.tp_group is mesh.dp_group is mesh.world_group is None
