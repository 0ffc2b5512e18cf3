"""One optimizer step is the recipe: plan, objective, gradient scales, clip, groups, statistics, ordering, resume."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from megatron_essh.config import RunConfig, config_from_mapping
from megatron_essh.elastic.capacity import budget_capacity
from megatron_essh.elastic.plan import FULL, pretraining_plan, refinement_plan
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.training.engine import NativeEngine
from megatron_essh.training.optimizer import decay_groups
from megatron_essh.training.schedule import learning_rate

MODEL = {
    "d_model": 32, "n_layers": 3, "channels": 4, "modes": 4, "value_width": 8, "ff_width": 192, "vocab_size": 50,
    "attention_layers": [1], "window": 16, "head_dim": 16, "bank_length": 64,
}  # fmt: skip


def make_config(elastic=None, training=None, **sections):
    mapping = {
        "model": MODEL,
        "elastic": {"slot_sequences": 2, "full_only_tokens": 0, "full_share": 0.5, "ordering_interval": 0}
        | (elastic or {}),
        "data": {"sequence_length": 12},
        "training": {"steps": 20, "global_batch": 8, "micro_batch": 2, "precision": "fp32", "loss_chunk": 16}
        | (training or {}),
        "refinement": {"steps": 10, "global_batch": 4},
    }
    return config_from_mapping(RunConfig, {**mapping, **sections}, "test")


def make_engine(config, stage="pretrain", dtype=torch.float64, **kwargs):
    model = LanguageModel(config.model, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return NativeEngine(model, config, stage, torch.device("cpu"), **kwargs)


def batch(step, rows=8, length=13):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(100 + step))


def gradients(engine):
    return {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}


def step_with_reduced_slots(config):
    return next(s for s in range(50) if len(set(pretraining_plan(config, s))) > 1)


def test_a_pretraining_step_minimises_the_specifications_objective():
    config = make_config()
    step = step_with_reduced_slots(config)
    plan, x = pretraining_plan(config, step), batch(step)
    engine = make_engine(config)
    sums, valid = engine.forward_backward(x, plan)
    measured = gradients(engine)

    model = make_engine(config).model
    total = 0.0
    for slot, budget in enumerate(plan):
        rows = x[2 * slot : 2 * slot + 2]
        inputs, labels = rows[:, :-1], rows[:, 1:].flatten()
        if budget == FULL:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels, reduction="sum")
            loss.backward()
        else:
            capacity = budget_capacity(config.model, config.elastic, budget)
            before = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and "feed_forward" in n
            }
            log_p = F.log_softmax(model(inputs, capacity).flatten(0, 1), -1)
            teacher = F.log_softmax(model(inputs).flatten(0, 1).detach(), -1)
            loss = F.nll_loss(log_p, labels, reduction="sum") + 0.5 * (teacher.exp() * (teacher - log_p)).sum()
            loss.backward()
            for name, parameter in model.named_parameters():
                if "feed_forward" in name:  # half of what this slot added
                    old = before.get(name, torch.zeros_like(parameter))
                    parameter.grad = old + 0.5 * (parameter.grad - old)
        total += loss.item()
    assert valid == 8 * 12
    assert sums.objective == pytest.approx(total, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(measured[name], parameter.grad / valid, rtol=1e-9, atol=1e-12, msg=name)


def test_a_refinement_step_minimises_the_specifications_objective():
    config = make_config()
    plan, x = refinement_plan(config, 0), batch(0, rows=4)
    engine = make_engine(config, "refine")
    sums, valid = engine.forward_backward(x, plan)

    model = make_engine(config).model
    capacity = budget_capacity(config.model, config.elastic, plan[0])
    inputs, labels = x[:, :-1], x[:, 1:].flatten()
    full, tier = model(inputs).flatten(0, 1), model(inputs, capacity).flatten(0, 1)
    tv = 0.5 * (full.softmax(-1).detach() - tier.softmax(-1)).abs().sum()
    full_ce, tier_ce = (F.cross_entropy(logits, labels, reduction="sum") for logits in (full, tier))
    assert sums.objective == pytest.approx((full_ce + tier_ce + 5 * tv).item(), rel=1e-12)
    (full_ce / valid).backward()
    from_full = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    tier = model(inputs, capacity).flatten(0, 1)
    tv = 0.5 * (full.softmax(-1).detach() - tier.softmax(-1)).abs().sum()
    ((F.cross_entropy(tier, labels, reduction="sum") + 5 * tv) / valid).backward()
    for name, parameter in model.named_parameters():
        expected = from_full[name] + parameter.grad * (0.5 if "feed_forward" in name else 1.0)
        torch.testing.assert_close(engine.model.get_parameter(name).grad, expected, rtol=1e-9, atol=1e-12, msg=name)


def test_micro_batches_subdivide_slots_without_changing_the_step():
    config, fine = make_config(), make_config(training={"micro_batch": 1})
    step = step_with_reduced_slots(config)
    a, b = make_engine(config), make_engine(fine)
    report_a, report_b = (engine.train_step(step, batch(step)) for engine in (a, b))
    assert report_a.loss == pytest.approx(report_b.loss, rel=1e-12)
    assert report_a.loss_by_capacity == pytest.approx(report_b.loss_by_capacity, rel=1e-12)
    for (name, p), q in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=name)
    torch.testing.assert_close(a.statistics.mean_square_LN, b.statistics.mean_square_LN)


def test_the_report_tells_what_the_step_did():
    config = make_config()
    step = step_with_reduced_slots(config)
    plan = pretraining_plan(config, step)
    report = make_engine(config).train_step(step, batch(step))
    labels = {"full" if b == FULL else f"{b}/32" for b in plan}
    assert set(report.loss_by_capacity) == labels
    assert (report.full_slots, report.slots, report.tokens) == (sum(b == FULL for b in plan), 4, 96)
    assert report.divergence is not None
    assert report.divergence > 0
    assert report.grad_norm > 0


def test_only_full_capacity_micro_batches_are_counted_in_the_statistics():
    config = make_config(elastic={"full_share": 0.0, "training_budgets": [2], "ordering_interval": 5})
    engine = make_engine(config)
    engine.train_step(0, batch(0))  # reduced slots and their full teachers only
    assert engine.statistics.mean_square_LN.abs().max() == 0
    full = make_engine(make_config(elastic={"full_only_tokens": 1 << 40, "ordering_interval": 5}))
    full.train_step(0, batch(0))
    assert full.statistics.mean_square_LN.min() > 0


def test_ordering_changes_neither_the_function_nor_the_steps_that_follow():
    dense = {"full_only_tokens": 1 << 40}
    plain = make_engine(make_config(elastic=dense | {"ordering_interval": 1000}))
    ordered = make_engine(make_config(elastic=dense | {"ordering_interval": 3}))
    x = batch(1)[:, :-1]
    orderings = 0
    for step in range(10):
        a, b = plain.train_step(step, batch(step)), ordered.train_step(step, batch(step))
        orderings += b.ordered
        assert a.loss == pytest.approx(b.loss, rel=1e-12)
        torch.testing.assert_close(plain.model(x), ordered.model(x), rtol=1e-9, atol=1e-11)
    assert orderings == 3
    for layer in range(3):
        down = [e.model.get_parameter(f"blocks.{layer}.feed_forward.down") for e in (plain, ordered)]
        assert not torch.allclose(*down)  # the units did move ...
        match = torch.cdist(*down).argmin(1)
        assert sorted(match.tolist()) == list(range(192))  # ... as a permutation ...
        for part in ("gate_up", "down"):
            p, q = (e.model.get_parameter(f"blocks.{layer}.feed_forward.{part}") for e in (plain, ordered))
            for moment in ("exp_avg", "exp_avg_sq"):  # ... with their moments and statistic
                torch.testing.assert_close(plain.optimizer.state[p][moment], ordered.optimizer.state[q][moment][match])
        torch.testing.assert_close(
            plain.statistics.mean_square_LN[layer], ordered.statistics.mean_square_LN[layer, match]
        )


def test_after_ordering_the_first_units_matter_most():
    engine = make_engine(make_config(elastic={"full_only_tokens": 1 << 40, "ordering_interval": 2}))
    for step in range(2):
        engine.train_step(step, batch(step))
    for layer in range(3):
        down = engine.model.get_parameter(f"blocks.{layer}.feed_forward.down")
        score = engine.statistics.mean_square_LN[layer].double() * down.square().sum(1)
        assert (score.diff() <= 0).all()


def test_a_resumed_engine_continues_bitwise():
    config = make_config(elastic={"ordering_interval": 2})
    straight = make_engine(config, dtype=torch.float32)
    for step in range(6):
        straight.train_step(step, batch(step))
    stopped = make_engine(config, dtype=torch.float32)
    for step in range(3):
        stopped.train_step(step, batch(step))
    tensors, values = copy.deepcopy((stopped.state_tensors(), stopped.state_values()))
    resumed = make_engine(config, dtype=torch.float32)
    torch.rand(5)  # the random state must come from the checkpoint
    resumed.load_state(tensors, values)
    for step in range(3, 6):
        resumed.train_step(step, batch(step))
    for name, tensor in straight.state_tensors().items():
        if not name.startswith("rng."):
            assert torch.equal(tensor, resumed.state_tensors()[name]), name
    assert straight.state_values() == resumed.state_values() == {"updates": 6, "skipped_in_a_row": 0}


def test_state_of_another_model_is_refused():
    engine = make_engine(make_config())
    tensors, values = engine.state_tensors(), engine.state_values()
    with pytest.raises(UserError, match="missing"):
        engine.load_state({n: t for n, t in tensors.items() if n != "model.final_norm.weight"}, values)
    with pytest.raises(UserError, match="unknown"):
        engine.load_state(tensors | {"model.extra": torch.zeros(1)}, values)
    with pytest.raises(UserError, match="shape"):
        engine.load_state(tensors | {"model.final_norm.weight": torch.zeros(3)}, values)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_loss_that_is_not_finite_updates_nothing_and_ends_a_run_past_the_limit(limit):
    engine = make_engine(make_config(training={"skip_limit": limit}, elastic={"ordering_interval": 50}))
    engine.train_step(3, batch(3))
    with torch.no_grad():
        engine.model.final_norm.weight[0] = math.inf
    before = {n: t.clone() for n, t in engine.state_tensors().items()}
    for step in range(4, 4 + limit):
        report = engine.train_step(step, batch(step))
        assert report.skipped is not None
        assert report.skipped.micro_batch == 0
    with pytest.raises(UserError, match=rf"step {5 + limit}: loss nan.*first in micro-batch 0, sequences 0 to 1"):
        engine.train_step(4 + limit, batch(4 + limit))
    assert all(torch.equal(t, before[n]) for n, t in engine.state_tensors().items())


def test_a_skip_names_the_capacity_and_the_sequences_that_broke_and_the_next_step_counts_anew():
    config = make_config(training={"skip_limit": 1})
    step = step_with_reduced_slots(config)
    slot = next(s for s, b in enumerate(pretraining_plan(config, step)) if b != FULL)
    engine = make_engine(config)
    honest = engine._loss
    engine._loss = lambda *a: dataclasses.replace(m := honest(*a), objective=m.objective * (math.nan if a[3] else 1))
    for _ in range(2):  # a step in between that counts begins the row anew
        skipped = engine.train_step(step, batch(step)).skipped
        assert (skipped.micro_batch, skipped.rows) == (slot, (2 * slot, 2 * slot + 2))
        assert skipped.capacity.endswith("/32")
        engine._loss, broken = honest, engine._loss
        assert engine.train_step(step, batch(step)).skipped is None
        engine._loss = broken


def test_a_gradient_that_is_not_finite_is_named():
    engine = make_engine(make_config())
    engine.model.get_parameter("blocks.1.attention.qkv").register_hook(lambda g: g * math.inf)
    skipped = engine.train_step(0, batch(0)).skipped
    assert (skipped.micro_batch, skipped.parameters) == (None, ("blocks.1.attention.qkv",))


def test_gradient_norms_of_the_parts_make_the_whole():
    report = make_engine(make_config()).train_step(0, batch(0))
    assert set(report.grad_norm_by_part) == {"embedding", "mixer", "attention", "feed_forward", "norms"}
    assert math.hypot(*report.grad_norm_by_part.values()) == pytest.approx(report.grad_norm, rel=1e-12)


def test_document_mask_cuts_documents_and_ignores_the_label_after_their_end():
    config = make_config(data={"sequence_length": 12, "document_mask": True}, elastic={"enabled": False})
    with pytest.raises(UserError, match="end-of-document"):
        make_engine(config)
    engine = make_engine(config, eod=7)
    x = batch(3)
    x[:, 5] = 7
    x[:, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]] %= 7
    report = engine.train_step(0, x)
    assert report.tokens == 8 * 11
    model = make_engine(config, eod=7).model
    total = 0.0
    for part in (
        x[:, :7],
        x[:, 6:],
    ):  # two documents: positions 0 to 5 predict 1 to 5, positions 6 to 11 predict 7 to 12
        inputs, labels = part[:, :-1], part[:, 1:]
        keep = inputs != 7
        total += F.cross_entropy(model(inputs)[keep], labels[keep], reduction="sum").item()
    assert report.loss == pytest.approx(total / (8 * 11), rel=1e-10)


def test_evaluation_is_the_mean_over_tokens_of_all_batches():
    engine = make_engine(make_config())
    batches = [batch(0).numpy(), batch(1, rows=3).numpy()]
    capacity = engine.capacities[2]
    total = sum(
        F.cross_entropy(engine.model(b[:, :-1], capacity).flatten(0, 1), b[:, 1:].flatten(), reduction="sum").item()
        for b in map(torch.from_numpy, batches)
    )
    assert engine.evaluate(batches, capacity) == pytest.approx(total / (11 * 12), rel=1e-12)


def test_groups_go_by_name_in_pretraining_and_by_rank_in_refinement():
    model = make_engine(make_config()).model
    decayed, free = decay_groups(model, "pretrain")
    assert {n.split(".")[-1] for n in decayed} == {
        "in_proj",
        "out_proj",
        "zero_lag",
        "qkv",
        "gate_up",
        "down",
    }
    assert {n.split(".")[-1] for n in free} == {
        "weight", "rho_raw", "theta", "kc", "ks", "beta", "write_bias", "read_bias", "clock_bias",
    }  # fmt: skip
    decayed, free = decay_groups(model, "refine")
    assert all(model.get_parameter(n).ndim >= 2 for n in decayed)
    assert all(model.get_parameter(n).ndim == 1 for n in free)


def test_learning_rate_warms_up_linearly_and_falls_along_a_cosine():
    rates = [learning_rate(s, peak=1.0, steps=100, warmup_fraction=0.1, final_fraction=0.1) for s in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(0, peak=2.0, steps=1, warmup_fraction=0.0, final_fraction=0.0) == 0.0


@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_recomputation_changes_no_bit_of_a_step_and_observes_nothing_twice(recompute):
    elastic = {"full_share": 0.5, "ordering_interval": 2}
    kept, anew = (make_engine(make_config(elastic, {"recompute": how})) for how in ("none", recompute))
    for step in range(3):
        assert kept.train_step(step, batch(step)) == anew.train_step(step, batch(step))
    for name, tensor in kept.state_tensors().items():
        assert torch.equal(tensor, anew.state_tensors()[name]), name


@pytest.mark.parametrize(("recompute", "kept"), [("none", True), ("selective", False), ("block", False)])
def test_recomputation_keeps_no_activation_of_the_units(recompute, kept):
    engine = make_engine(make_config({"enabled": False}, {"recompute": recompute, "micro_batch": 2}))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape[-1]), t)[1], lambda t: t):
        engine.model.hidden(batch(0)[:2, :-1])
    assert (192 in saved) == kept  # the width of a feed-forward layer


def test_a_step_of_fewer_sequences_than_its_plan_is_refused():
    with pytest.raises(AssertionError, match="6 sequences for 4 slots of 2"):
        make_engine(make_config()).train_step(0, batch(0, rows=6))
