"""The same run on any number of ranks: losses, parameters, moments, statistics and reports of the one-process run."""

import dataclasses
import functools
import itertools
import json
import math
import re

import pytest
import torch
from whole import whole_state

from megatron_essh.config import RunConfig, config_from_mapping
from megatron_essh.elastic.plan import FULL, pretraining_plan
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.engine import build_engine

MODEL = {
    "d_model": 32, "n_layers": 3, "channels": 5, "modes": 3, "value_width": 6, "ff_width": 192, "vocab_size": 50,
    "attention_layers": [1], "window": 16, "head_dim": 8, "bank_length": 64,
}  # fmt: skip
STEPS = 30
EOD = 7


def make_config(tp=1, **sections):
    mapping = {
        "model": MODEL,
        "elastic": {"slot_sequences": 2, "full_only_tokens": 200, "full_share": 0.5, "ordering_interval": 12},
        "data": {"sequence_length": 12},
        "optimizer": {"learning_rate": 2e-3},
        "training": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "precision": "fp32", "loss_chunk": 16},
        "refinement": {"steps": STEPS, "global_batch": 8},
    }
    for section, values in sections.items():
        mapping[section] = mapping.get(section, {}) | values
    mapping["parallel"] = mapping.get("parallel", {}) | {"tensor": tp}
    return config_from_mapping(RunConfig, mapping, "test")


def make_engine(config, stage="pretrain", mesh=None):
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    eod = EOD if config.data.document_mask else None
    return build_engine(model, config, stage, mesh or torch.device("cpu"), eod=eod)


def batch(step, config):
    generator = torch.Generator().manual_seed(100 + step)
    shape = (config.training.global_batch, config.data.sequence_length + 1)
    tokens = torch.randint(0, 50, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, tokens % 9, tokens)  # something to learn


def steps(config, stage="pretrain", mesh=None, count=STEPS):
    """Reports, the whole state on the first rank, and a validation."""
    engine = make_engine(config, stage, mesh)
    reports = []
    for step in range(count):
        reports.append(engine.train_step(step, batch(step, config)[engine.rows(step)]))
    engine.compare_replicas()
    validation = [batch(1000 + i, config).numpy() for i in range(3)]
    smallest = engine.capacities[min(budget for budget in engine.capacities if budget != FULL)]
    losses = [engine.evaluate(validation, capacity) for capacity in (None, smallest)]
    state = whole_state(engine)
    engine.close()
    return reports, state, losses


def steps_on(tp, stage, sections, count):
    config = make_config(tp, **sections)
    mesh = Mesh.build(tp, torch.device("cpu"))
    reports, tensors, losses = steps(config, stage, mesh, count)
    return reports, {name: tensor.clone() for name, tensor in tensors.items()}, losses


@functools.cache
def one_process(stage, sections, count):
    return steps(make_config(**json.loads(sections)), stage, count=count)


def check_same(run_ranks, tp, dp, stage="pretrain", sections=None, count=STEPS, **layout):
    """`layout`: settings of parallel that the run on one process does without."""
    sections = sections or {}
    expected, state, losses = one_process(stage, json.dumps(sections), count)
    sections = sections | {"parallel": layout}
    ranks = run_ranks(tp * dp, steps_on, tp, stage, sections, count, timeout=120)
    reports, found = ranks[0][0], ranks[0][1]
    assert all(rank[0] == reports and rank[2] == ranks[0][2] for rank in ranks), "all ranks report the same"
    assert ranks[0][2] == pytest.approx(losses, rel=1e-5)
    for a, b in zip(expected, reports, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5), a.step
        assert b.loss_by_capacity == pytest.approx(a.loss_by_capacity, rel=1e-5), a.step
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4), a.step
        assert b.grad_norm_by_part == pytest.approx(a.grad_norm_by_part, rel=1e-4), a.step
        assert (b.tokens, b.full_slots, b.slots, b.ordered) == (a.tokens, a.full_slots, a.slots, a.ordered)
        assert b.divergence == (None if a.divergence is None else pytest.approx(a.divergence, rel=1e-3))
    assert set(found) == set(state)
    for name, tensor in state.items():
        if not name.startswith("rng."):
            error = (found[name] - tensor).norm()
            assert error <= (1e-5 if name.startswith("model.") else 1e-4) * tensor.norm(), f"{name}: {error:.1e}"
    return expected


def test_the_reference_run_has_reduced_slots_and_orders_once():
    config = make_config()
    plans = [pretraining_plan(config, step) for step in range(STEPS)]
    assert sum(budget != FULL for plan in plans for budget in plan) > 20
    assert plans[0] == (FULL,) * 4
    reports, _, _ = one_process("pretrain", "{}", STEPS)
    assert sum(report.ordered for report in reports) == 1
    assert reports[-1].loss < reports[0].loss - 0.3


QUICK = [(1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize(("tp", "dp"), QUICK)
def test_thirty_steps_are_the_one_process_runs(run_ranks, tp, dp):
    check_same(run_ranks, tp, dp)


@pytest.mark.layouts
@pytest.mark.parametrize("stage", ["pretrain", "refine"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tp", "dp"), list(itertools.product((1, 2, 4), (1, 2))))
def test_every_layout_takes_the_one_process_runs_steps(run_ranks, tp, dp, shared, stage):
    if tp * dp == 1 or (shared and tp == 1):
        pytest.skip("nothing to share")
    check_same(run_ranks, tp, dp, stage, sequence_parallel=shared)


@pytest.mark.layouts
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_without_a_channel_take_part(run_ranks, tp, dp):
    reports = check_same(run_ranks, tp, dp, sections={"elastic": {"training_budgets": [1]}}, count=12)
    assert make_engine(make_config(elastic={"training_budgets": [1]})).capacities[1].channels == 1
    assert any("1/32" in report.loss_by_capacity for report in reports)


@pytest.mark.layouts
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("how", ["cut documents", "recomputed", "a growing batch"])
def test_what_changes_the_passes_changes_no_layout(run_ranks, tp, dp, how):
    sections = {
        "cut documents": {"data": {"document_mask": True}},
        "recomputed": {"training": {"recompute": "block", "micro_batch": 1}},
        "a growing batch": {"data": {"batch_ramp": {"start": 4, "increment": 4, "samples": 30}}},
    }[how]
    reports = check_same(run_ranks, tp, dp, sections=sections, count=14)
    if how == "cut documents":
        assert len({report.tokens for report in reports}) > 1, "a rank must know how many labels count on the others"
    if how == "a growing batch":
        assert {report.slots for report in reports} == {2, 4}


def drift(rank, name):
    engine = make_engine(make_config(2), mesh=Mesh.build(2, torch.device("cpu")))
    engine.compare_replicas()
    if engine.mesh.rank == rank:
        engine.model.get_parameter(name).data.view(-1)[1] *= 1 + 1e-6
    try:
        engine.compare_replicas()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("rank", "name", "ranks"),
    [(1, "final_norm.weight", "ranks 1"), (3, "blocks.0.mixer.theta", "ranks [13]")],
)
def test_parameters_that_drift_apart_are_named_on_all_ranks(run_ranks, rank, name, ranks):
    """Of four ranks, two to a replica: norms are on all four, tables on one of each replica."""
    for message in run_ranks(4, drift, rank, name):
        assert re.match(rf"1 parameters are no longer .*: {name} \({ranks}\);", message)


def spoiled(what):
    config = make_config(training={"skip_limit": 1})
    engine = make_engine(config, mesh=Mesh.build(1, torch.device("cpu")))
    engine.train_step(0, batch(0, config)[engine.rows(0)])
    before = engine.model.embedding.weight.clone()
    honest = engine._loss
    if engine.mesh.rank == 1 and what == "loss":
        engine._loss = lambda *a: dataclasses.replace(m := honest(*a), objective=m.objective * math.nan)
    if engine.mesh.rank == 1 and what == "gradient":
        engine.model.get_parameter("blocks.1.attention.qkv").register_hook(lambda g: g * math.inf)
    skipped = engine.train_step(1, batch(1, config)[engine.rows(1)], stop=lambda: engine.mesh.rank == 1)
    unchanged = torch.equal(before, engine.model.embedding.weight)
    try:
        engine.train_step(2, batch(2, config)[engine.rows(2)])
    except UserError as error:
        return skipped, unchanged, str(error), engine.rows(1)
    return skipped, unchanged, "", engine.rows(1)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_breaks_on_one_rank_is_skipped_on_all_and_ends_all_past_the_limit(run_ranks, what):
    (report, *first), (other, *second) = run_ranks(2, spoiled, what)
    assert str(report) == str(other)  # NaN is not equal to itself
    assert report.stop, "one rank was asked to stop"
    assert first[0]
    assert second[0]
    assert "step 3: loss" in first[1] == second[1]
    if what == "loss":
        assert range(*report.skipped.rows)[0] in second[2], "the sequences are the spoiled rank's"
    else:
        assert report.skipped.micro_batch is None
        assert report.skipped.parameters == ("blocks.1.attention.qkv",)


def test_the_ranks_read_each_sequence_once():
    config = make_config()
    for step in range(STEPS):
        rows = []
        for rank in range(2):
            engine = make_engine(config)
            engine.mesh = Mesh(1, 2, 0, rank, torch.device("cpu"))
            rows += engine.rows(step)
        assert sorted(rows) == list(range(8))


def test_replicas_that_cannot_share_the_slots_are_refused():
    with pytest.raises(UserError, match=r"training.global_batch 8: 4 slots .* do not divide among 3 replicas"):
        make_engine(make_config(), mesh=Mesh(1, 3, 0, 0, torch.device("cpu")))
