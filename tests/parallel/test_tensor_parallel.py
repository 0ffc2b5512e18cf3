"""A model dealt out over ranks is the model: hidden states, losses and every gradient are those of one process, at any
capacity, where ranks hold no channel and where nothing divides. Real processes, fp64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_essh.config import ElasticConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.elastic.distillation import full_loss, reduced_loss, refinement_loss
from megatron_essh.errors import UserError
from megatron_essh.evaluation.perplexity import score
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.prefix import GradientScale
from megatron_essh.ops import linear as products
from megatron_essh.ops.linear import keep_gradients
from megatron_essh.ops.selective_scan import ModalTables, selective_scan
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.tensor_parallel import shard_model, sharding_of

CONFIG = ModelConfig(
    d_model=32,
    n_layers=3,
    channels=5,
    modes=3,
    value_width=5,
    ff_width=64,
    vocab_size=43,
    attention_layers=(1,),
    window=6,
    head_dim=8,
    bank_length=64,
)
THREE_HEADS = replace(CONFIG, d_model=24)
FOURTEEN_HEADS = replace(CONFIG, d_model=28, head_dim=2, ff_width=128)
ONE_HEAD = replace(CONFIG, head_dim=32)
ONE_CHANNEL, UNEVEN, ONE_UNIT = Capacity(1, 64), Capacity(3, 17), Capacity(2, 1)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def build(config, seed=0, dtype=torch.float64):
    """A model whose every parameter is random, so that no term vanishes as it does at initialisation."""
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config, generator=generator).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batch(config, length=24, sequences=2):
    generator = torch.Generator().manual_seed(5)
    inputs, labels = torch.randint(0, config.vocab_size, (2, sequences, length), generator=generator)
    labels[0, 3] = labels[1, -1] = -100
    documents = torch.tensor([[0] * 5 + [1] * (length - 5), [0] * 11 + [1] * (length - 11)])
    return inputs, labels, documents


def same_on_all(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    assert all(torch.equal(part, tensor) for part in parts)


def whole_gradients(model, mesh):
    """Gradients of the whole parameters; under sequence parallelism the engine sums the replicated ones."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if model.partition.vocabulary is not None:
            if getattr(parameter, "tensor_model_parallel", False):
                gradient = model.partition.gather_parameter(name, gradient)
            elif model.partition.sequence_parallel:
                dist.all_reduce(gradient, group=mesh.tp_group)
        found[name] = gradient
    return found


def agree(config, tp, sequence_parallel, run, tolerance=EXACT, dtype=torch.float64, prepare=None):
    """`run(model)` gives tensors, and leaves gradients, that are those of the whole model, on every rank."""
    mesh = Mesh.build(tp, torch.device("cpu"))
    whole, sharded = build(config, dtype=dtype), build(config, dtype=dtype)
    shard_model(sharded, mesh, sequence_parallel=sequence_parallel)
    for model in (whole, sharded):
        if prepare is not None:
            prepare(model)
    expected, found = run(whole), run(sharded)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
        same_on_all(ours.detach().contiguous())
    theirs, ours = whole_gradients(whole, mesh), whole_gradients(sharded, mesh)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# -- hidden states -----------------------------------------------------------------------------------------------------


def hidden_agrees(config, tp, sequence_parallel, capacities, recompute="none", documents=False, scale=None):
    inputs, _, documents_BT = batch(config)
    for capacity in capacities:

        def run(model, capacity=capacity):
            model.recompute = recompute
            cut = documents_BT if documents else None
            hidden = model.hidden(inputs, capacity, documents_BT=cut, gradient_scale=scale)
            weight = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
            # A head gives each rank a share of the gradient of the hidden states.
            share = 1 if model.partition.vocabulary is None else 1 / tp
            (share * hidden * weight).sum().backward()
            return (hidden,)

        agree(config, tp, sequence_parallel, run)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
@pytest.mark.parametrize("tp", [2, 4])
def test_hidden_states_and_gradients_are_those_of_one_process(run_ranks, tp, sequence_parallel):
    run_ranks(tp, hidden_agrees, CONFIG, tp, sequence_parallel, [None, ONE_CHANNEL, UNEVEN, ONE_UNIT])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
@pytest.mark.parametrize(("config", "tp"), [(THREE_HEADS, 2), (FOURTEEN_HEADS, 4), (ONE_HEAD, 2)])
def test_heads_need_not_divide(run_ranks, config, tp, sequence_parallel):
    run_ranks(tp, hidden_agrees, config, tp, sequence_parallel, [None, Capacity(1, 64)])


@pytest.mark.parametrize("arm", [{"clock": "constant"}, {"gates": "neutral"}], ids=str)
def test_arms_of_the_mixer(run_ranks, arm):
    run_ranks(2, hidden_agrees, replace(CONFIG, **arm), 2, False, [None, ONE_CHANNEL])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
def test_documents_recomputation_and_scaled_gradients(run_ranks, recompute, sequence_parallel):
    scale = GradientScale(feed_forward=0.5, mixer=0.25)
    run_ranks(2, hidden_agrees, CONFIG, 2, sequence_parallel, [None, ONE_CHANNEL, UNEVEN], recompute, True, scale)


@pytest.mark.layouts
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
@pytest.mark.parametrize("config", [CONFIG, THREE_HEADS, FOURTEEN_HEADS, ONE_HEAD], ids=lambda c: f"{c.n_heads} heads")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_layout_capacity_and_recomputation(run_ranks, tp, config, sequence_parallel):
    capacities = [None, Capacity(1, 2), Capacity(2, 64), Capacity(3, 33), Capacity(4, 17), Capacity(5, 50)]
    for recompute in ("none", "selective", "block"):
        for documents in (False, True):
            run_ranks(tp, hidden_agrees, config, tp, sequence_parallel, capacities, recompute, documents)


def test_two_replicas_exchange_within_themselves_alone(run_ranks):
    run_ranks(4, hidden_agrees, CONFIG, 2, True, [None, ONE_CHANNEL])


# -- losses ------------------------------------------------------------------------------------------------------------


def losses_agree(config, tp, sequence_parallel, kept):
    inputs, labels, documents = batch(config)
    run_config = RunConfig(
        model=config,
        elastic=ElasticConfig(slot_sequences=2, kl_weight=0.5, mixer_gradient_scale=0.75),
        training=TrainingConfig(global_batch=2, micro_batch=2, loss_chunk=7, precision="fp32"),
    )
    without_teacher = replace(run_config, elastic=replace(run_config.elastic, kl_weight=0.0, reduced_ce_weight=1.5))
    scale = torch.tensor(1 / 29) if kept else None
    losses = [lambda model: full_loss(model, run_config, inputs, labels, documents, None, grad_scale=scale)]
    for capacity in (ONE_CHANNEL, UNEVEN):
        for function, given in (
            (reduced_loss, run_config),
            (reduced_loss, without_teacher),
            (refinement_loss, run_config),
        ):
            losses.append(
                lambda model, function=function, given=given, capacity=capacity: function(
                    model, given, inputs, labels, documents, capacity, grad_scale=scale
                )
            )
    for loss in losses:

        def run(model, loss=loss):
            found = loss(model)
            found.objective.backward()
            return [
                value
                for value in (found.objective, found.cross_entropy, found.full_cross_entropy, found.divergence)
                if value is not None
            ]

        agree(
            config,
            tp,
            sequence_parallel,
            run,
            prepare=(lambda model: keep_gradients(model.product_weights())) if kept else None,
        )


@pytest.mark.parametrize("kept", [False, True], ids=["autograd", "kept gradients"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
def test_losses_and_their_gradients_are_those_of_one_process(run_ranks, sequence_parallel, kept):
    run_ranks(2, losses_agree, CONFIG, 2, sequence_parallel, kept)


def test_losses_on_four_ranks(run_ranks):
    run_ranks(4, losses_agree, CONFIG, 4, True, True)


@pytest.mark.layouts
@pytest.mark.parametrize("kept", [False, True], ids=["autograd", "kept gradients"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_losses_on_every_layout(run_ranks, tp, sequence_parallel, kept):
    run_ranks(tp, losses_agree, CONFIG, tp, sequence_parallel, kept)


def low_precision_agrees(sequence_parallel):
    inputs, labels, _ = batch(CONFIG)
    config = RunConfig(
        model=CONFIG,
        elastic=ElasticConfig(slot_sequences=2),
        training=TrainingConfig(global_batch=2, micro_batch=2),
    )
    sharded, whole = build(CONFIG, dtype=torch.float32), build(CONFIG, dtype=torch.float32)
    shard_model(sharded, Mesh.build(2, torch.device("cpu")), sequence_parallel=sequence_parallel)
    found = []
    for model in (whole, sharded):
        with torch.autocast("cpu", torch.bfloat16):
            loss = reduced_loss(model, config, inputs, labels, None, UNEVEN)
        loss.objective.backward()
        found.append((float(loss.objective), model.blocks[2].mixer_norm.weight.grad.clone()))
    if sequence_parallel:
        dist.all_reduce(found[1][1])
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-2)
    assert (found[1][1] - found[0][1]).norm() < 0.05 * found[0][1].norm()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in sharded.parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
def test_under_autocast_to_bf16_the_loss_is_near(run_ranks, sequence_parallel):
    run_ranks(2, low_precision_agrees, sequence_parallel)


# -- statistics, evaluation, parameters --------------------------------------------------------------------------------


def statistics_agree(tp, sequence_parallel):
    mesh = Mesh.build(tp, torch.device("cpu"))
    inputs, _, _ = batch(CONFIG)
    whole, sharded = build(CONFIG), build(CONFIG)
    shard_model(sharded, mesh, sequence_parallel=sequence_parallel)
    sums = []
    for model in (whole, sharded):
        model.recompute = "block"
        units = model.blocks[0].feed_forward.down.shape[0]
        sums.append(torch.zeros(CONFIG.n_layers, units))
        model.hidden(inputs, square_sums_LN=sums[-1]).sum().backward()
    for layer in range(CONFIG.n_layers):
        name = f"blocks.{layer}.feed_forward.down"
        ours = sharded.partition.gather_parameter(name, sums[1][layer])
        torch.testing.assert_close(ours, sums[0][layer], rtol=1e-6, atol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
def test_each_rank_sums_the_squares_of_its_own_units(run_ranks, sequence_parallel):
    run_ranks(4, statistics_agree, 4, sequence_parallel)


def scores(tp, sequence_parallel):
    batches = [np.random.default_rng(i).integers(0, CONFIG.vocab_size, (2, 17)) for i in range(3)]
    whole, sharded = build(CONFIG), build(CONFIG)
    shard_model(sharded, Mesh.build(tp, torch.device("cpu")), sequence_parallel=sequence_parallel)
    return [
        [score(model, batches, capacity, cut_at=3).total for model in (whole, sharded)]
        for capacity in (None, ONE_CHANNEL)
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slabs"])
def test_evaluation_gives_every_rank_the_value_of_one_process(run_ranks, sequence_parallel):
    first, second = run_ranks(2, scores, 2, sequence_parallel)
    for (expected, ours), (_, theirs) in zip(first, second, strict=True):
        assert ours == theirs
        assert ours == pytest.approx(expected, rel=1e-12)


def parameters(tp):
    model = LanguageModel(CONFIG, generator=torch.Generator().manual_seed(4))
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    mesh = Mesh.build(tp, torch.device("cpu"))
    shard_model(model, mesh)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        dealt = sharding_of(name, CONFIG) is not None
        assert getattr(parameter, "tensor_model_parallel", False) == dealt
        assert dealt != name.endswith("norm.weight")
        gathered = model.partition.gather_parameter(name, parameter)
        assert torch.equal(gathered, before[name][1])
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for _, p in before.values())


def test_parts_are_cut_from_the_same_initial_model_and_gather_to_it(run_ranks):
    counts = run_ranks(4, parameters, 4)
    norms = (2 * CONFIG.n_layers + 1) * CONFIG.d_model
    assert sum(held for held, _ in counts) == counts[0][1] + 3 * norms


def refusals():
    mesh = Mesh.build(2, torch.device("cpu"))
    model = build(CONFIG)
    shard_model(model, mesh, sequence_parallel=True)
    inputs, _, _ = batch(CONFIG, length=15)
    with pytest.raises(UserError, match=r"15 tokens cannot be dealt out over parallel\.tensor 2 ranks"):
        model.hidden(inputs)
    for call in (lambda: model(inputs), lambda: model.init_state(1)):
        with pytest.raises(UserError, match="dealt out over ranks"):
            call()
    with pytest.raises(UserError, match="vocabulary of 1 leaves a rank without an entry; use at most 1"):
        shard_model(build(replace(CONFIG, vocab_size=1)), mesh)
    with pytest.raises(UserError, match=r"parallel.tensor 3 does not divide the 2 ranks; use one of \[1, 2\]"):
        Mesh.build(3, torch.device("cpu"))


def test_mistakes_are_said(run_ranks):
    run_ranks(2, refusals)


def test_one_rank_leaves_the_model_as_it_is():
    model, same = build(CONFIG), build(CONFIG)
    shard_model(model, Mesh.single(torch.device("cpu")))
    inputs, _, _ = batch(CONFIG)
    assert torch.equal(model.hidden(inputs, UNEVEN), same.hidden(inputs, UNEVEN))


def test_no_name_is_dealt_out_by_guess():
    with pytest.raises(KeyError, match=r"blocks.0.mixer.novelty"):
        sharding_of("blocks.0.mixer.novelty", CONFIG)


# -- overlap -----------------------------------------------------------------------------------------------------------


class Recorded:
    """An exchange with a second process that has the same rows as this one; it writes down when it is asked."""

    def __init__(self, events):
        self.events = events

    def gather(self, x_NI):
        self.events.append("gather")
        return lambda: self._done("gathered", torch.cat([x_NI, x_NI]))

    def reduce(self, d_x_NI):
        self.events.append("reduce")
        return lambda: self._done("reduced", 2 * d_x_NI[: len(d_x_NI) // 2])

    def _done(self, event, result):
        self.events.append(event)
        return result


@pytest.mark.parametrize("rows", [4, 3, 0])
def test_the_inputs_gradient_is_reduced_while_the_weights_is_computed(monkeypatch, device, rows):
    events = []
    plain_accumulate = products.accumulate

    def accumulate(*arguments):
        events.append("weight")
        plain_accumulate(*arguments)

    monkeypatch.setattr(products, "accumulate", accumulate)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 2, 6, dtype=torch.float64, generator=generator).to(device).requires_grad_()
    x_BTD = torch.randn(2, 5, 6, dtype=torch.float64, generator=generator).to(device).requires_grad_()
    weight.exchange = Recorded(events)
    y = products.linear(x_BTD, weight, rows)
    assert y.shape == (2, 10, 2 * rows)
    y.square().sum().backward()
    during = ["weight"] if rows else []
    assert events == ["gather", "gathered", "gather", "reduce", "gathered", *during, "reduced"]

    twice = torch.cat([x_BTD.detach().flatten(0, 1)] * 2).requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    (twice @ plain[:rows].flatten(0, 1).T).square().sum().backward()
    torch.testing.assert_close(weight.grad, torch.zeros_like(weight) if plain.grad is None else plain.grad)
    torch.testing.assert_close(x_BTD.grad.flatten(0, 1), 2 * twice.grad[:10])


# -- a share of nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 1, 19])
def test_a_scan_of_no_channels_is_empty_and_gives_every_input_a_gradient(device, length, dtype):
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    raw_BTKX = torch.empty(2, length, 0, 14, dtype=dtype, device=device, requires_grad=True)
    tables = [torch.empty(0, 3, dtype=exact, device=device, requires_grad=True) for _ in ModalTables._fields]
    tables[ModalTables._fields.index("beta")] = torch.empty(0, dtype=exact, device=device, requires_grad=True)
    z_BTKP, state_BKM2P = selective_scan(raw_BTKX, ModalTables(*tables))
    assert (z_BTKP.shape, z_BTKP.dtype) == ((2, length, 0, 5), dtype)
    assert (state_BKM2P.shape, state_BKM2P.dtype) == ((2, 0, 3, 2, 5), exact)
    z_BTKP.sum().backward()
    assert all(tensor.grad is not None for tensor in (raw_BTKX, *tables))


@pytest.mark.parametrize("kept", [False, True])
def test_products_of_no_rows_are_zero_and_touch_no_gradient(device, kept):
    output_major, input_major = (torch.ones(n, 6, device=device, requires_grad=True) for n in (3, 12))
    if kept:
        keep_gradients([output_major, input_major])
    x = torch.randn(2, 5, 6, device=device, requires_grad=True)
    nothing = products.linear(x, output_major, 0)
    y = products.linear_input_major(nothing, input_major, output_scale=0.5, gradient_scale=0.5)
    assert (nothing.shape, y.shape) == ((2, 5, 0), x.shape)
    assert not y.any()
    y.sum().backward()
    for tensor in (x, output_major, input_major):
        assert not tensor.grad.any()
