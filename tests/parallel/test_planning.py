"""Memory, exchanges, times and imbalance of layouts, as predicted before a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_essh.config import RunConfig, load_config
from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.ops.linear import keep_gradients
from megatron_essh.parallel.dealing import deal
from megatron_essh.parallel.imbalance import deal_in_turn, lost, simulate
from megatron_essh.parallel.planning import (
    GIB,
    Layout,
    LocalSizes,
    activations,
    check_layout,
    check_memory,
    memory,
    other_weights,
    pass_bytes,
    product_weights,
    state_bytes,
)
from megatron_essh.parallel.prediction import (
    OPTIMIZER_BYTES,
    Exchange,
    compute_seconds,
    exchange_seconds,
    exchanges,
    predict,
    scale_out,
)
from megatron_essh.parallel.rates import known_gpus, load_rates

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", list(overrides))


def with_training(given: RunConfig, **values: Any) -> RunConfig:
    return replace(given, training=replace(given.training, **values))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_measured_peak_of_370m_is_that_of_its_first_pass() -> None:
    """19.1 GiB on an H200, micro-batch 8: torch.cuda.max_memory_allocated after a few steps whose passes, but for the
    first, were replays. The optimizer had no moments yet in that one."""
    assert memory(config("370m"), Layout()).before_moments / GIB == pytest.approx(19.1, rel=0.03)


def test_the_measured_peak_of_1p5b_is_that_of_its_first_pass() -> None:
    """30.6 GiB, micro-batch 4, in a process of its own."""
    assert memory(config("1p5b"), Layout()).before_moments / GIB == pytest.approx(30.6, rel=0.03)


class Nothing:
    """A kernel that computes nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: None


@pytest.fixture
def hollow_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's operators on CPU tensors, with kernels that write nothing: what they keep is what a GPU keeps."""
    pytest.importorskip("triton")
    from megatron_essh.model import attention, feed_forward
    from megatron_essh.ops import rms_norm, selective_scan
    from megatron_essh.ops.rms_norm import triton as norm_kernels
    from megatron_essh.ops.rotary import triton as rotary_kernels
    from megatron_essh.ops.selective_scan import triton_backward, triton_forward
    from megatron_essh.ops.swiglu import triton as swiglu_kernels

    for module in (norm_kernels, rotary_kernels, swiglu_kernels, triton_forward, triton_backward):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Nothing())
    monkeypatch.setattr(norm_kernels, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(rms_norm, "_kernels_take", lambda x: True)
    monkeypatch.setattr(selective_scan, "_kernels_take", lambda raw, modes: True)
    monkeypatch.setattr(feed_forward, "swiglu", swiglu_kernels.triton_swiglu)
    monkeypatch.setattr(attention, "rotate_qkv", rotary_kernels.triton_rotate_qkv)


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
@pytest.mark.parametrize(
    ("name", "overrides", "capacity"),
    [
        ("quickstart", ["data.sequence_length=128", "training.micro_batch=2"], None),
        (
            "quickstart",
            ["data.sequence_length=96", "training.micro_batch=1", "model.modes=5", "model.bank_length=64"],
            Capacity(5, 192),
        ),
        ("dna", ["data.sequence_length=70", "training.micro_batch=4"], None),
    ],
)
def test_planned_activations_are_what_a_pass_keeps(
    name: str, overrides: list[str], capacity: Capacity | None, recompute: str
) -> None:
    run = config(name, *overrides, f"training.recompute={recompute}")
    batch, length = run.training.micro_batch, run.data.sequence_length
    model = LanguageModel(run.model)
    model.recompute = run.training.recompute
    keep_gradients(model.product_weights())
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, run.model.vocab_size, (batch, length))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ):
        hidden = model.hidden(tokens, capacity)
    assert hidden.requires_grad
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in parameters)
    planned = activations(run, Layout(), capacity or full_capacity(run.model))
    assert sum(planned.values()) == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize("name", ["370m", "1p5b", "dna"])
def test_weights_of_one_rank_are_the_models_and_shares_add_up(name: str) -> None:
    model = config(name).model
    own = LocalSizes.of(model, full_capacity(model), 1)
    assert sum(product_weights(model, own).values()) + other_weights(model, own) == parameter_counts(model).total
    for tp in (2, 4):
        share = product_weights(model, LocalSizes.of(model, full_capacity(model), tp))
        for part, size in product_weights(model, own).items():
            assert size / tp <= share[part] <= size / tp * 1.15  # 14 heads on 4 ranks: 4 on the first


def test_a_native_replica_keeps_18_bytes_a_weight() -> None:
    parts = state_bytes(config("1p5b"), Layout())
    total = parameter_counts(config("1p5b").model).total
    of_weights = sum(parts[p] for p in ("fp32 master weights", "fp32 gradients", "optimizer moments", "bf16 copies"))
    assert of_weights == pytest.approx(18 * total, rel=1e-3)


def test_zero_stages_deal_out_what_they_are_named_for() -> None:
    run = config("1p5b")
    stages = [state_bytes(run, Layout(gpus_per_node=8, zero_stage=stage)) for stage in range(4)]
    for part, first_stage in (
        ("optimizer moments", 1),
        ("fp32 gradients", 2),
        ("fp32 master weights", 3),
    ):
        for stage in range(4):
            expected = stages[0][part] / (8 if stage >= first_stage else 1)
            assert stages[stage][part] == pytest.approx(expected, abs=1), (part, stage)
    assert stages[0]["bf16 copies"] == stages[1]["bf16 copies"] == stages[2]["bf16 copies"]
    assert "bf16 copies" not in stages[3]
    assert [parts.get("reduction bucket", 0) for parts in stages] == [0, 2**28, 2**28, 2**28]
    needed = [memory(run, Layout(gpus_per_node=8, zero_stage=stage)) for stage in range(4)]
    totals = [one.total for one in needed[1:]]
    assert totals == sorted(totals, reverse=True)
    assert [one.graphs > 0 for one in needed] == [True, False, False, False]  # no stage records its passes


def test_the_measured_peak_of_1p5b_under_zero_2_is_that_of_its_head() -> None:
    """35,401 MiB on each of two H200s, micro-batch 4, four micro-batches each: activations and the head's gradient."""
    needed = memory(config("1p5b"), Layout(gpus_per_node=2, zero_stage=2))
    assert needed.tensors / 2**20 == pytest.approx(35_401, rel=0.02)
    assert needed.before_moments == needed.tensors  # moments are there from the start


@pytest.mark.parametrize("dp", [2, 8])
def test_passes_that_keep_little_leave_the_peak_to_the_gradients_after_them(dp: int) -> None:
    run = config("1p5b", "training.micro_batch=1", "data.sequence_length=64", "training.recompute=block")
    weights = parameter_counts(run.model).total
    after = {1: 4 / dp * weights, 2: 4 * weights, 3: 4 * weights}
    for stage, expected in after.items():
        needed = memory(run, Layout(gpus_per_node=dp, zero_stage=stage))
        moment = needed.tensors - sum(needed.states.values()) - needed.transient.get("gathered weights", 0)
        least = sum(needed.activations.values()) + needed.transient.get("head's gradient", 0)
        assert least < expected
        assert moment == pytest.approx(expected, rel=1e-6), stage
    head = run.model.vocab_size * run.model.d_model
    assert memory(run, Layout(gpus_per_node=dp, zero_stage=3)).transient["gathered weights"] == 6 * head


def test_tp_and_sequence_parallelism_share_activations() -> None:
    run = config("1p5b")
    full = full_capacity(run.model)
    one, two = activations(run, Layout(), full), activations(run, Layout(gpus_per_node=2, tp=2), full)
    slabs = activations(run, Layout(gpus_per_node=2, tp=2, sequence_parallel=True), full)
    for kind in ("gate and up", "units", "mixer projection", "scan states", "scan output", "attention"):
        assert two[kind] == slabs[kind] == pytest.approx(one[kind] / 2, rel=1e-6)
    for kind in ("residual stream", "normed inputs"):
        assert two[kind] == one[kind] == pytest.approx(2 * slabs[kind], rel=1e-6)


def test_recomputation_and_smaller_micro_batches_save_memory_in_that_order() -> None:
    run = config("370m")
    full = full_capacity(run.model)
    sizes = [
        pass_bytes(with_training(run, recompute=level), Layout(), full) for level in ("none", "selective", "block")
    ]
    assert sizes == sorted(sizes, reverse=True)
    halves = [pass_bytes(with_training(run, micro_batch=size), Layout(), full) for size in (8, 4)]
    assert 0.5 * halves[0] <= halves[1] < 0.6 * halves[0]


def test_a_teacher_brings_its_logits_and_hidden_states_to_the_head() -> None:
    run = config("1p5b")
    alone = replace(run, elastic=replace(run.elastic, kl_weight=0.0))
    small = Capacity(28, 4416)
    more = pass_bytes(run, Layout(), small) - pass_bytes(alone, Layout(), small)
    assert more == 2 * 4096 * 128_256 + 2 * 8192 * 2048


def test_graphs_are_held_only_where_passes_are_recorded() -> None:
    run = config("370m")
    assert memory(run, Layout()).graphs > 10 * GIB  # the pass of a reduced capacity, not yet recorded
    assert memory(with_training(run, capture=False), Layout()).graphs == 0
    dense = replace(run, elastic=replace(run.elastic, enabled=False))
    assert 0 < memory(dense, Layout()).graphs < 2 * GIB  # validation


def test_a_layout_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    run = with_training(config("370m", "elastic.slot_sequences=64"), micro_batch=64)
    layout, available = Layout(gpus_per_node=8), 80e9
    needed = memory(run, layout).total
    with pytest.raises(UserError) as error:
        check_memory(run, layout, available, "H100")
    assert f"{(needed - available) / GIB:.1f} more than H100's 74.5" in str(error.value)
    remedies = re.findall(r"((?:--[a-z-]+ \S+ )+)\((\d+\.\d) GiB\)", str(error.value))
    assert remedies
    for options, size in remedies:
        words = options.split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        changed = with_training(
            run,
            micro_batch=int(given.get("--micro-batch", 64)),
            recompute=given.get("--recompute", "none"),
        )
        fitted = replace(layout, tp=int(given.get("--tp", 1)), zero_stage=int(given.get("--zero-stage", 0)))
        total = memory(changed, fitted).total
        assert total <= available
        assert total / GIB == pytest.approx(float(size), abs=0.06)
        check_memory(changed, fitted, available, "H100")
    with pytest.raises(UserError, match="take more or larger GPUs"):
        check_memory(run, layout, 1e9, "a small GPU")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpus_per_node": 8, "tp": 3}, r"tp 3 does not divide the 8 GPUs of a node.*\[1, 2, 4, 8\]"),
        ({"gpus_per_node": 8, "tp": 16}, "tp 16 does not divide the 8 GPUs"),
        ({"zero_stage": 4}, "zero stage 4"),
        ({"nodes": 0}, "nodes 0: at least 1"),
        ({"sequence_parallel": True}, "with tp 1 leave it off"),
    ],
)
def test_layouts_that_cannot_be_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Layout(**values)


def test_steps_that_replicas_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match="global_batch 128: 16 slots"):
        check_layout(config("370m"), Layout(gpus_per_node=6))
    run = config("370m", "data.sequence_length=2047")
    with pytest.raises(UserError, match="sequence_length 2047 cannot be dealt out over tp 2"):
        check_layout(run, Layout(gpus_per_node=2, tp=2, sequence_parallel=True))


# -- exchanges -------------------------------------------------------------------------------------------------------


def by_kind(run: RunConfig, layout: Layout) -> dict[str, Exchange]:
    return {e.kind: e for e in exchanges(run, layout)}


def test_a_micro_batch_of_1p5b_sums_33_megabytes_four_times_a_layer() -> None:
    run = with_training(config("1p5b"), global_batch=4)
    found = by_kind(run, Layout(gpus_per_node=2, tp=2))
    sums = [found["sum after a sub-layer, forward"], found["sum of dx, backward"]]
    assert sum(e.calls for e in sums) == 4 * 28
    assert {e.bytes_each for e in sums} == {33_554_432}
    assert found["loss: row maxima, sums and labels"].bytes_each * 3 * 2 < 100_000  # never logits
    assert "gradients' sum" not in found


def test_sequence_parallelism_sends_the_same_forward_and_half_as_much_again_backward() -> None:
    run = with_training(config("1p5b"), global_batch=4)
    whole = by_kind(run, Layout(gpus_per_node=2, tp=2))
    slabs = by_kind(run, Layout(gpus_per_node=2, tp=2, sequence_parallel=True))

    def sent(found: dict[str, Exchange], way: str) -> int:
        return sum(e.sent(2) for kind, e in found.items() if kind.endswith(way) and kind != "embedding, forward")

    assert sent(slabs, "forward") == sent(whole, "forward")
    assert sent(slabs, "backward") == 1.5 * sent(whole, "backward")


@pytest.mark.parametrize("dp", [2, 8])
def test_gradients_are_sent_once_a_step_and_zero_sends_what_it_gathers(dp: int) -> None:
    run = config("370m")
    weights = parameter_counts(run.model).total
    found = {stage: exchanges(run, Layout(gpus_per_node=dp, zero_stage=stage)) for stage in range(4)}
    sent = {stage: sum(e.sent(dp) for e in rows) for stage, rows in found.items()}
    share, micros = (dp - 1) / dp, 16 // dp
    assert sent[0] == pytest.approx(2 * 4 * weights * share, rel=1e-3)
    assert sent[1] == pytest.approx(12 * weights * share, rel=1e-6)
    assert sent[2] == pytest.approx((8 * micros + 4) * weights * share, rel=1e-6)
    assert sent[3] == pytest.approx((4 + 2 * 4) * micros * weights * share, rel=1e-6)
    assert all(not e.beside for rows in found.values() for e in rows)  # after the passes, not beside them
    assert exchanges(run, Layout()) == []


# -- times -----------------------------------------------------------------------------------------------------------


def test_rates_give_back_what_was_measured() -> None:
    rates = load_rates("h200")
    for name, micro, step in (("370m", 0.086, 0.005), ("1p5b", 0.144, 0.022)):
        run = config(name)
        assert compute_seconds(run, Layout(), full_capacity(run.model), rates) == pytest.approx(micro, rel=0.03)
        moved = OPTIMIZER_BYTES * parameter_counts(run.model).total
        assert moved / rates["optimizer_bytes"] == pytest.approx(step, rel=0.06)
    two = Layout(gpus_per_node=2)
    for size, seconds in ((512 * 2**20, 1.7e-3), (33_554_432, 137e-6)):
        assert exchange_seconds(Exchange("sum", 1, size, 2, "dp"), two, rates) == pytest.approx(seconds, rel=0.02)
    for tokens, width, seconds in ((16_384, 32, 829e-6), (8_192, 64, 607e-6)):
        scan = rates["scan_fixed"] + rates["scan_per_value"] * width
        assert tokens * 32 * scan == pytest.approx(seconds, rel=0.01)


def test_every_rate_says_where_it_is_from() -> None:
    for gpu in known_gpus():
        rates = load_rates(gpu)
        assert rates.measured == (gpu == "h200")
        for name, figure in rates.figures.items():
            expected = "measured: " if rates.measured else "scaled, not measured: "
            if name == "network_bytes":
                expected = "not measured: "
            elif name == "device_memory" and not rates.measured:
                expected = "data sheet, not measured"
            assert figure.source.startswith(expected), (gpu, name)
            assert figure.value > 0
    with pytest.raises(UserError, match=r"GPU 'tpu'.*h200"):
        load_rates("tpu")


def test_gpus_are_as_fast_as_their_data_sheets_say() -> None:
    run = config("1p5b")
    seconds = {gpu: predict(run, Layout(gpus_per_node=8), load_rates(gpu)).step for gpu in known_gpus()}
    assert seconds["b300"] < seconds["h200"] < seconds["h100"] < seconds["a100"]


def test_a_reduced_micro_batch_is_cheaper_without_its_teacher() -> None:
    run, rates = config("370m"), load_rates("h200")
    alone = replace(run, elastic=replace(run.elastic, kl_weight=0.0))
    small, full = Capacity(8, 448), full_capacity(run.model)
    taught = compute_seconds(run, Layout(), small, rates)
    untaught = compute_seconds(alone, Layout(), small, rates)
    assert untaught < taught < compute_seconds(run, Layout(), full, rates)
    assert compute_seconds(run, Layout(), Capacity(28, 3648), rates) > compute_seconds(run, Layout(), full, rates)


def test_more_gpus_are_faster_and_less_efficient() -> None:
    run, rates = config("1p5b"), load_rates("h200")
    rows = [p for p, _ in scale_out(run, Layout(gpus_per_node=8), rates, [1, 2, 8, 16, 64])]
    assert rows[0].efficiency == pytest.approx(1.0)
    for fewer, more in itertools.pairwise(rows):
        assert more.tokens_per_second > fewer.tokens_per_second
        assert more.efficiency < fewer.efficiency
    assert [p.global_batch for p in rows] == [256] * 5
    ((grown, _),) = scale_out(run, Layout(gpus_per_node=8), rates, [128])
    assert grown.global_batch == 512  # a slot of four sequences a replica
    assert grown.layout.nodes == 16


def test_recomputation_costs_time_and_fp32_has_no_rates() -> None:
    run, rates = config("370m"), load_rates("h200")
    steps = [predict(with_training(run, recompute=r), Layout(), rates).step for r in ("none", "selective", "block")]
    assert steps == sorted(steps)
    assert steps[2] < 4 / 3 * steps[0]
    with pytest.raises(UserError, match="bf16 training only"):
        predict(with_training(run, precision="fp32"), Layout(), rates)


# -- imbalance -------------------------------------------------------------------------------------------------------


def test_lost_time_is_the_slowest_ranks_over_the_means() -> None:
    costs = [3.0, 1.0, 3.0, 1.0]
    assert lost(costs, 2, deal_in_turn) == pytest.approx(6 / 4 - 1)
    assert lost(costs, 2, deal) == 0.0
    assert sorted(itertools.chain(*deal_in_turn([1.0] * 7, 3))) == list(range(7))


def test_balanced_dealing_loses_less_and_nothing_where_all_slots_are_alike() -> None:
    run = config("370m")
    found = simulate(run, 8, 8, 20)
    assert 0 < found.balanced <= found.balanced_worst
    assert found.balanced < 0.5 * found.naive
    assert found == simulate(run, 8, 8, 20)
    one = simulate(run, 8, 1, 20)
    assert one.balanced == one.naive  # a slot a rank: nothing to choose
    dense = replace(run, elastic=replace(run.elastic, enabled=False))
    assert simulate(dense, 8, 2, 5).naive == pytest.approx(0.0, abs=1e-12)
