"""One function, three ways to run it: whole sequences, prefill, token by token; at any capacity; over pads and
documents; and a reduced capacity really computes the smaller tensors."""

from dataclasses import replace

import pytest
import torch

from megatron_essh.config import ModelConfig
from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.prefix import GradientScale
from megatron_essh.ops.linear import keep_gradients
from megatron_essh.ops.prefix import scale_gradient

CONFIG = ModelConfig(
    d_model=32,
    n_layers=4,
    channels=5,
    modes=4,
    value_width=7,
    ff_width=64,
    vocab_size=41,
    attention_layers=(1, 3),
    window=6,
    head_dim=8,
    bank_length=64,
)
SMALL = Capacity(3, 17)


def build(config=CONFIG, seed=0, dtype=torch.float64):
    """A model whose every parameter is random, so that no term vanishes as it does at initialisation."""
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config, generator=generator).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = (
                0.3
                if name.endswith(("_bias", "rho_raw", "theta", "kc", "ks", "zero_lag", "beta", "norm.weight"))
                else 0.2
            )
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def tokens(batch, length, seed=1):
    return torch.randint(0, CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("capacity", [None, SMALL, Capacity(1, 1), Capacity(5, 3)], ids=str)
@pytest.mark.parametrize("window", [6, None, 64])
def test_forward_equals_prefill_equals_steps(capacity, window):
    model = build(replace(CONFIG, window=window))
    x = tokens(2, 29)
    whole = model(x, capacity)

    hidden, _ = model.prefill_hidden(x, model.init_state(2, capacity, max_length=29), capacity)
    torch.testing.assert_close(hidden @ model.head_weight.T, whole, rtol=1e-10, atol=1e-11)

    state = model.init_state(2, capacity, max_length=29)
    for t in range(29):
        logits, state = model.step(x[:, t], state, capacity)
        torch.testing.assert_close(logits, whole[:, t], rtol=1e-10, atol=1e-11)


def test_prefill_leaves_the_state_that_steps_leave():
    model = build()
    x = tokens(3, 23)
    prefilled, stepped = model.init_state(3), model.init_state(3)
    model.prefill(x[:, :20], prefilled)
    model.prefill(x[:, 20:], prefilled)  # a second prompt continues the first
    for t in range(23):
        model.step(x[:, t], stepped)
    for a, b in zip(prefilled.spectral + prefilled.keys, stepped.spectral + stepped.keys, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    assert torch.equal(prefilled.key_position_BW, stepped.key_position_BW)
    assert prefilled.position_B.tolist() == [23, 23, 23]


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_prompts_of_different_lengths_get_what_each_gets_alone(side):
    model = build()
    lengths, width = [9, 1, 14], 16
    padded, valid = torch.full((3, width), 3), torch.zeros(3, width, dtype=torch.bool)
    prompts = [tokens(1, n, seed=n) for n in lengths]
    for row, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        places = {"left": range(width - n, width), "right": range(n), "between": range(0, width, width // n)}[side]
        index = torch.tensor(list(places)[:n])
        padded[row, index], valid[row, index] = prompt[0], True
    logits, state = model.prefill(padded, model.init_state(3), valid_BT=valid)
    follow = tokens(3, 8, seed=99)
    after = [model.step(follow[:, t], state)[0] for t in range(8)]
    for row, prompt in enumerate(prompts):
        alone, own = model.prefill(prompt, model.init_state(1))
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-10, atol=1e-11)
        for t in range(8):
            torch.testing.assert_close(
                after[t][row], model.step(follow[row : row + 1, t], own)[0][0], rtol=1e-10, atol=1e-11
            )


def test_a_forked_state_continues_as_the_original():
    model = build()
    _, state = model.prefill(tokens(2, 11), model.init_state(2))
    fork, row = state.clone(), state.select(torch.tensor([1]))
    x = tokens(2, 5, seed=4)
    for t in range(5):
        original, _ = model.step(x[:, t], state)
        assert torch.equal(original, model.step(x[:, t], fork)[0])
        torch.testing.assert_close(original[1:], model.step(x[1:, t], row)[0])


def test_packed_documents_equal_separate_ones():
    model = build()
    x = tokens(1, 21)
    documents = torch.tensor([[0] * 8 + [1] * 1 + [2] * 12])
    packed = model.hidden(x, documents_BT=documents)
    for start, stop in ((0, 8), (8, 9), (9, 21)):
        torch.testing.assert_close(packed[:, start:stop], model.hidden(x[:, start:stop]), rtol=1e-10, atol=1e-11)


def test_a_capacity_runs_prefix_views_and_touches_nothing_beyond_them():
    model = build()
    x = tokens(2, 13)
    before = model(x, SMALL)
    with torch.no_grad():
        for block in model.blocks:
            block.feed_forward.gate_up[SMALL.ff_width :] = torch.nan
            block.feed_forward.down[SMALL.ff_width :] = torch.nan
            if block.mixer is not None:
                block.mixer.out_proj[SMALL.channels * CONFIG.value_width :] = torch.nan
                for name in (
                    "in_proj",
                    "write_bias",
                    "clock_bias",
                    "rho_raw",
                    "theta",
                    "kc",
                    "zero_lag",
                    "beta",
                ):
                    getattr(block.mixer, name)[SMALL.channels :] = torch.nan
    assert torch.equal(model(x, SMALL), before)
    assert torch.isnan(model(x)).any()


def test_gradients_of_a_reduced_pass_stay_within_the_prefix():
    model = build()
    model(tokens(2, 9), SMALL).square().sum().backward()
    mixer, feed_forward = model.blocks[0].mixer, model.blocks[0].feed_forward
    for grad, kept in ((mixer.in_proj.grad, 3), (mixer.out_proj.grad, 21), (feed_forward.gate_up.grad, 17)):
        assert grad[:kept].abs().amin(tuple(range(1, grad.ndim))).min() > 0
        assert grad[kept:].abs().max() == 0


def test_gradient_scale_halves_feed_forward_gradients_and_nothing_else():
    model = build()
    x = tokens(2, 9)
    model.hidden(x, SMALL).square().sum().backward()
    plain = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    scaled = model.hidden(x, SMALL, gradient_scale=GradientScale(feed_forward=0.5, mixer=0.25))
    assert torch.equal(scaled, model.hidden(x, SMALL))
    scaled.square().sum().backward()
    for name, parameter in model.named_parameters():
        factor = 0.5 if "feed_forward" in name else 0.25 if ".mixer." in name else 1.0
        torch.testing.assert_close(parameter.grad, factor * plain[name])


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
@pytest.mark.parametrize("capacity", [None, SMALL], ids=str)
def test_kept_gradients_are_autograds_added_up(capacity, recompute):
    plain, kept = build(), build()
    kept.recompute = recompute
    keep_gradients(kept.product_weights())
    for seed in range(2):
        for model in (plain, kept):
            hidden = model.hidden(tokens(2, 9, seed), capacity, gradient_scale=GradientScale(0.5, 0.25))
            (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), kept.named_parameters(), strict=True):
        expected = torch.zeros_like(one) if one.grad is None else one.grad
        torch.testing.assert_close(other.grad, expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_scaled_gradient_keeps_every_bit_of_the_weight():
    weight = torch.randn(1000, requires_grad=True)
    assert torch.equal(scale_gradient(weight, 0.3), weight)
    assert scale_gradient(weight, 1.0) is weight


def test_the_scale_of_the_output_is_the_retained_channels():
    config = replace(CONFIG, attention_layers=(), n_layers=1)
    model = build(config)
    mixer = model.blocks[0].mixer
    u = torch.randn(1, 4, 32, dtype=torch.float64)
    two, _ = mixer(u, 2)
    with torch.no_grad():
        mixer.out_proj[14:] = 0
    all_five, _ = mixer(u, 5)
    torch.testing.assert_close(two * 2**0.5, all_five * 5**0.5)


@pytest.mark.parametrize(
    ("arm", "rows"), [({"clock": "constant"}, slice(15, 19)), ({"gates": "neutral"}, slice(7, 15))]
)
def test_frozen_controls_get_no_gradient(arm, rows):
    model = build(replace(CONFIG, **arm))
    model(tokens(2, 9)).square().sum().backward()
    grad = model.blocks[0].mixer.in_proj.grad
    assert grad[:, rows].abs().max() == 0
    assert grad[:, :7].abs().min() > 0
    assert model.blocks[0].mixer.clock_bias.grad.abs().min() > 0


def test_initialisation_is_the_specifications():
    config = replace(CONFIG, d_model=64, ff_width=512, vocab_size=500, channels=4, value_width=32)
    model = LanguageModel(config, generator=torch.Generator().manual_seed(3)).requires_grad_(False)
    mixer, feed_forward = model.blocks[0].mixer, model.blocks[0].feed_forward
    assert float(model.embedding.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(feed_forward.gate_up.std()) == pytest.approx(0.02, rel=0.02)
    assert float(feed_forward.down.std()) == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert float(mixer.in_proj[:, :32].std()) == pytest.approx(0.02, rel=0.05)
    assert mixer.in_proj[:, 32:].abs().max() == 0
    assert float(mixer.out_proj.std()) == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert set(mixer.clock_bias.flatten().tolist()) == {-3.0}
    assert set(mixer.zero_lag.flatten().tolist()) == {0.5}
    assert mixer.beta.abs().max() == mixer.write_bias.abs().max() == mixer.read_bias.abs().max() == 0
    rho = torch.exp(-torch.nn.functional.softplus(mixer.rho_raw.double()))
    assert (rho > 0.0099).all()
    assert (rho < 1).all()
    again = LanguageModel(config, generator=torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_meta_device_builds_without_allocating():
    with torch.device("meta"):
        model = LanguageModel(replace(CONFIG, d_model=2048, ff_width=1 << 20, bank_length=1 << 20))
    assert all(p.is_meta for p in model.parameters())


def test_mistakes_are_said():
    model = build()
    with pytest.raises(UserError, match="this model holds 5,64"):
        model(tokens(1, 4), Capacity(6, 64))
    with pytest.raises(UserError, match="at least one"):
        model.prefill(tokens(1, 0), model.init_state(1))
    with pytest.raises(UserError, match="at least one"):
        model.prefill(tokens(2, 2), model.init_state(2), valid_BT=torch.tensor([[True, True], [False, False]]))
    with pytest.raises(UserError, match="made for 3 channels"):
        model.step(tokens(1, 1)[:, 0], model.init_state(1, SMALL), full_capacity(CONFIG))
    unbounded = build(replace(CONFIG, window=None))
    with pytest.raises(UserError, match="max_length"):
        unbounded.init_state(1)
    with pytest.raises(UserError, match="outgrows"):
        unbounded.prefill(tokens(1, 9), unbounded.init_state(1, max_length=8))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_tables_stay_fp32_under_autocast(precision):
    model = build(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        hidden = model.hidden(tokens(2, 17))
        hidden.float().square().sum().backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    exact = build(dtype=torch.float64).hidden(tokens(2, 17))
    error = (hidden.double() - exact).norm() / exact.norm()
    assert error < (1e-5 if precision is torch.float32 else 3e-2)


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("capacity", [None, SMALL])
def test_a_block_is_called_done_when_its_gradients_are(capacity, kept, recompute):
    model = build()
    model.recompute = recompute
    if kept:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        keep_gradients(model.product_weights())
    order, seen = [], {}

    def done(layer):
        order.append(layer)
        for later in range(layer, CONFIG.n_layers):
            for name, parameter in model.blocks[later].named_parameters():
                seen[layer, later, name] = None if parameter.grad is None else parameter.grad.clone()

    model.after_block_backward = done
    scale = GradientScale(mixer=0.5, feed_forward=0.25)
    hidden = model.hidden(tokens(2, 9), capacity, gradient_scale=scale)
    with torch.no_grad():
        model.hidden(tokens(2, 9), capacity)
    hidden.square().sum().backward()
    assert order == [3, 2, 1, 0]
    for (_, later, name), early in seen.items():
        final = model.blocks[later].get_parameter(name).grad
        assert (early is None and final is None) or torch.equal(early, final), (later, name)
