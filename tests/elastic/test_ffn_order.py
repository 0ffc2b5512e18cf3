"""Unit statistics do not depend on how a step is cut; the order is by importance, stable."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_essh.config import load_config
from megatron_essh.elastic.ffn_order import UnitStatistics, orders_after, unit_order, unit_scores

MODEL = replace(
    load_config(Path(__file__).parents[2] / "configs" / "models" / "dna.yaml").model, n_layers=2, ff_width=64
)


def test_statistics_are_one_mean_a_step_however_the_step_is_cut():
    units = torch.randn(2, 6, 5, 64)  # layers, sequences, positions, units
    whole, parts = (UnitStatistics(MODEL, 0.9, torch.device("cpu")) for _ in range(2))
    whole.square_sums_LN += units.square().sum((1, 2))
    whole.count(30)
    for piece in (slice(0, 1), slice(1, 6)):
        parts.square_sums_LN += units[:, piece].square().sum((1, 2))
        parts.count(units[0, piece, :, 0].numel())
    whole.end_step()
    parts.end_step()
    torch.testing.assert_close(whole.mean_square_LN, 0.1 * units.square().mean((1, 2)))
    torch.testing.assert_close(whole.mean_square_LN, parts.mean_square_LN)
    before = whole.mean_square_LN.clone()
    whole.end_step()  # a step without a full-capacity token
    assert torch.equal(before, whole.mean_square_LN)


def test_order_is_by_activation_times_column_norm_and_keeps_ties():
    mean_square = torch.tensor([1.0, 4.0, 1.0, 0.0, 2.0])
    down = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 2.0], [9.0, 9.0], [1.0, 1.0]])  # scores 4 4 4 0 4
    assert unit_order(unit_scores(mean_square, down)).tolist() == [0, 1, 2, 4, 3]
    assert unit_order(unit_scores(torch.tensor([1.0, 3.0, 2.0]), torch.ones(3, 2))).tolist() == [1, 2, 0]


def test_ordering_comes_every_interval_but_not_at_the_start_nor_late():
    assert [s for s in range(2000) if orders_after(s, 2000, 500, 0.8)] == [500, 1000, 1500]
    assert [s for s in range(2001) if orders_after(s, 2000, 400, 0.8)] == [
        400,
        800,
        1200,
    ]  # 1600 is 80%: no more
    assert not any(orders_after(s, 2000, 0, 0.8) for s in range(2001))
