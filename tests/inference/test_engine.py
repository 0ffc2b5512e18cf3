"""Decoding through slots is the model itself: every sequence gets what whole forward passes give it, alone or not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_essh.elastic.capacity import Capacity, full_capacity
from megatron_essh.errors import UserError
from megatron_essh.inference import Engine, SamplingConfig
from megatron_essh.inference.packing import pack_model, reading
from megatron_essh.ops.decode_step.weights import SpectralWeights

WINDOW = 8
LENGTH = 2 * WINDOW + 7
CAPACITIES = [None, Capacity(3, 64), Capacity(1, 128)]
SAMPLED = SamplingConfig(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2)


@pytest.fixture
def model(tiny_config, random_model, device):
    return random_model(tiny_config.model).to(device)


def random_tokens(rows, length, seed=0):
    return torch.randint(264, (rows, length), generator=torch.Generator().manual_seed(seed))


def engine_of(model, **settings):
    return Engine(model, **{"slots": 4, "dtype": torch.float32, **settings})


def forced_logits(engine, slots, tokens_BT):
    """Logits [B, T, V] after each of the tokens, the first of which the slots' sequences end with."""
    logits = []
    for step in range(tokens_BT.shape[1]):
        for slot, token in zip(slots, tokens_BT[:, step].tolist(), strict=True):
            engine.force(slot, token)
        engine.step(slots)
        logits.append(engine.logits_BV.clone())
    return torch.stack(logits, dim=1)


def text_of(engine, slot, count):
    return [engine.step([slot]).tokens()[0] for _ in range(count)]


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
def test_steps_give_the_logits_of_whole_passes(model, device, capacity, batch):
    tokens = random_tokens(batch, LENGTH)
    engine = engine_of(model, capacity=capacity, slots=batch)
    slots = [engine.add([row[0]]) for row in tokens.tolist()]
    actual = forced_logits(engine, slots, tokens)
    torch.testing.assert_close(actual, model(tokens.to(device), capacity), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"clock": "constant"}, {"gates": "neutral"}, {"attention_layers": ()}], ids=str)
def test_every_kind_of_model_is_packed(tiny_config, random_model, device, settings):
    model = random_model(dataclasses.replace(tiny_config.model, **settings)).to(device)
    tokens = random_tokens(2, LENGTH)
    engine = engine_of(model)
    slots = [engine.add([row[0]]) for row in tokens.tolist()]
    actual = forced_logits(engine, slots, tokens)
    torch.testing.assert_close(actual, model(tokens.to(device)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, WINDOW, WINDOW + 1, WINDOW + 2, 5 * WINDOW + 3])
@pytest.mark.parametrize("capacity", CAPACITIES[:2], ids=str)
def test_a_prompt_of_any_length_is_continued(model, device, capacity, length):
    tokens = random_tokens(1, length + LENGTH, seed=length)
    engine = engine_of(model, capacity=capacity)
    slot = engine.add(tokens[0, :length].tolist())
    assert engine.taken(slot) == length - 1
    actual = forced_logits(engine, [slot], tokens[:, length - 1 :])
    expected = model(tokens.to(device), capacity)[:, length - 1 :]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert engine.taken(slot) == length + LENGTH


def test_a_window_over_the_whole_input_ends_at_max_length(tiny_config, random_model, device):
    model = random_model(dataclasses.replace(tiny_config.model, window=None)).to(device)
    tokens = random_tokens(1, 12)
    engine = engine_of(model, max_length=12)
    slot = engine.add(tokens[0, :5].tolist())
    actual = forced_logits(engine, [slot], tokens[:, 4:])
    torch.testing.assert_close(actual, model(tokens.to(device))[:, 4:], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="max_length of 12"):
        engine.step([slot])
    with pytest.raises(UserError, match="max_length of 12"):
        engine.add([1] * 13)
    with pytest.raises(UserError, match="give max_length"):
        engine_of(model)


def test_a_slot_is_as_new_after_sequences_of_any_length(model):
    prompt = random_tokens(1, 6, seed=5)[0].tolist()
    fresh = engine_of(model, slots=1)
    slot = fresh.add(prompt, SAMPLED, seed=3)
    expected = [(text_of(fresh, slot, 1), fresh.logits_BV.clone()) for _ in range(LENGTH)]
    engine = engine_of(model, slots=1)
    for before in (1, 3, WINDOW, 4 * WINDOW + 1):
        slot = engine.add(random_tokens(1, before, seed=before)[0].tolist())
        text_of(engine, slot, 5)
        engine.remove(slot)
        slot = engine.add(prompt, SAMPLED, seed=3)
        for token, logits in expected:
            assert text_of(engine, slot, 1) == token
            torch.testing.assert_close(engine.logits_BV, logits, rtol=0, atol=0)
        engine.remove(slot)


def test_what_a_slot_held_does_not_matter_even_if_it_was_not_finite(model):
    engine = engine_of(model, slots=1)
    slot = engine.add([3, 4])
    expected = text_of(engine, slot, 6)
    engine.remove(slot)
    engine.state.spectral_LSKM2P.fill_(torch.nan)
    engine.state.keys_LSHWE.fill_(torch.nan)
    engine.state.values_LSHWE.fill_(torch.nan)
    assert text_of(engine, engine.add([3, 4]), 6) == expected


def test_sequences_in_a_batch_get_what_they_get_alone(model):
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (1, 5, 20, 9, 13)]
    configs = [
        SamplingConfig(temperature=0.0),
        SAMPLED,
        SamplingConfig(temperature=1.4),
        SamplingConfig(temperature=0.8, top_p=0.7),
        SamplingConfig(temperature=0.0, repetition_penalty=1.5),
    ]
    alone = []
    for seed, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        engine = engine_of(model, slots=1)
        alone.append(text_of(engine, engine.add(prompt, config, seed), 30))
    # They enter one after another, leave one after another, and stand in another order each time.
    engine = engine_of(model, slots=4)
    texts: list[list[int]] = [[] for _ in prompts]
    slot_of: dict[int, int] = {}
    for step in range(200):
        for number, prompt in enumerate(prompts):
            if number not in slot_of and not texts[number] and engine.free and step >= 3 * number:
                slot_of[number] = engine.add(prompt, configs[number], number)
        numbers = sorted(slot_of, key=lambda number: hash((step, number)))
        if not numbers:
            break
        for number, token in zip(numbers, engine.step([slot_of[n] for n in numbers]).tokens(), strict=True):
            texts[number].append(token)
            if len(texts[number]) == 30:
                engine.remove(slot_of.pop(number))
    assert texts == alone
    assert len({tuple(text) for text in texts}) == 5


def test_sequences_that_a_step_leaves_out_stay_as_they_are(model):
    engine = engine_of(model)
    first, second = engine.add([1, 2, 3], SAMPLED, 1), engine.add([4, 5], SAMPLED, 2)
    before = engine.save(second)
    text_of(engine, first, 12)
    after = engine.save(second)
    for name in ("spectral", "keys", "values"):
        for a, b in zip(getattr(before.state, name), getattr(after.state, name), strict=True):
            assert torch.equal(a, b)
    assert (before.token, int(before.state.position_B)) == (after.token, int(after.state.position_B))


@pytest.mark.parametrize("steps", [0, 3, 2 * WINDOW])
def test_a_fork_goes_on_as_the_original(model, steps):
    engine = engine_of(model)
    slot = engine.add([9, 8, 7], SAMPLED, 11)
    text_of(engine, slot, steps) if steps else None
    twin, other = engine.fork(slot), engine.fork(slot, seed=12)
    texts = [engine.step([slot, twin, other]).tokens() for _ in range(LENGTH)]
    first, second, third = map(list, zip(*texts, strict=True))
    assert first == second
    assert first != third
    engine.remove(slot)
    assert text_of(engine, twin, 5) != text_of(engine, other, 5)


@pytest.mark.parametrize("steps", [1, 3, 2 * WINDOW + 1])
def test_a_saved_sequence_is_restored_in_another_engine(model, steps):
    engine = engine_of(model)
    engine.add([100])
    slot = engine.add([9, 8, 7, 6], SAMPLED, 11)
    text_of(engine, slot, steps)
    saved = engine.save(slot)
    assert saved.state.spectral[0].device.type == "cpu"
    expected = text_of(engine, slot, LENGTH)
    engine.remove(slot)
    assert text_of(engine, engine.restore(saved), LENGTH) == expected
    elsewhere = engine_of(model, slots=2)
    assert text_of(elsewhere, elsewhere.restore(saved), LENGTH) == expected
    small = engine_of(model, capacity=Capacity(3, 64))
    with pytest.raises(UserError, match="saved sequence: its spectral are of sizes"):
        small.restore(saved)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"token": 264}, "saved sequence: damaged, with token 264 at position 1; save it again"),
        ({"token": -1}, "saved sequence: damaged, with token -1"),
        ({"seed": -1}, "seed: -1 must be a whole number of 0 to"),
        ({"position": -5}, "saved sequence: damaged, with token 8 at position -5"),
    ],
    ids=str,
)
def test_a_damaged_saved_sequence_is_refused(model, damage, complaint):
    engine = engine_of(model)
    saved = engine.save(engine.add([9, 8]))
    if "position" in damage:
        damage = {"state": dataclasses.replace(saved.state, position_B=torch.tensor([damage["position"]]))}
    with pytest.raises(UserError, match=complaint):
        engine.restore(dataclasses.replace(saved, **damage))
    assert engine.live == [0]


@pytest.mark.parametrize(
    "around", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode], ids=["autocast", "inference mode"]
)
def test_what_the_caller_has_set_changes_nothing(tiny_config, random_model, around):
    model = random_model(tiny_config.model)
    given = random_tokens(1, LENGTH)
    engine = engine_of(model)
    expected = forced_logits(engine, [engine.add(given[0, :1].tolist())], given)
    with around():
        engine = engine_of(model)
        slot = engine.add(given[0, :1].tolist())
        found = forced_logits(engine, [slot], given)
    assert torch.equal(found, expected)
    engine.step([slot])  # outside of it too


def test_a_saved_state_is_one_that_the_model_steps(model, device):
    engine = engine_of(model)
    slot = engine.add(random_tokens(1, 30)[0].tolist())
    text_of(engine, slot, 4)
    saved = engine.save(slot)
    state = engine.model.init_state(1)
    for name in ("spectral", "keys", "values"):
        setattr(state, name, [t.to(device) for t in getattr(saved.state, name)])
    state.key_position_BW = saved.state.key_position_BW.to(device)
    state.position_B = saved.state.position_B.to(device)
    logits, _ = model.step(torch.tensor([saved.token], device=device), state)
    engine.step([slot])
    torch.testing.assert_close(engine.logits_BV, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", [1, 3, WINDOW, WINDOW + 1, 3 * WINDOW - 1])
def test_the_positions_of_a_taken_state_are_those_of_its_keys(model, position):
    prompt = random_tokens(1, position + 1)[0].tolist()
    engine = engine_of(model)
    state = engine.model.init_state(1)
    engine.model.prefill(torch.tensor([prompt[:-1]], device=model.device), state)
    saved = engine.save(engine.add(prompt)).state
    assert torch.equal(saved.key_position_BW, state.key_position_BW.cpu())


def test_bf16_steps_are_as_near_the_exact_logits_as_autocast(model, device):
    tokens = random_tokens(3, LENGTH)
    exact = model(tokens.to(device))
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        noise = (model(tokens.to(device)).float() - exact).square().mean().sqrt()
    engine = engine_of(model, dtype=torch.bfloat16)
    slots = [engine.add(row[:5]) for row in tokens.tolist()]
    error = (forced_logits(engine, slots, tokens[:, 4:]) - exact[:, 4:]).square().mean().sqrt()
    assert 0 < error < 1.5 * noise


def other_model(config, random_model, what):
    """A model that differs from `random_model(config)` in nothing that sizes would tell."""
    if what in ("rope_base", "eps"):
        return random_model(dataclasses.replace(config, **{what: 1e-3}))
    if what == "gates":
        return random_model(dataclasses.replace(config, gates="neutral"))
    model = random_model(config, seed=1 if what == "seed" else 0)
    if what == "norm":
        model.blocks[2].ff_norm.weight[3] += 1e-6
    return model


@pytest.mark.parametrize("what", ["seed", "norm", "rope_base", "eps", "gates", "ff_width"])
def test_a_sequence_of_another_model_is_refused(tiny_config, random_model, what):
    config = tiny_config.model
    engine = engine_of(random_model(config))
    saved = engine.save(engine.add([9, 8, 7]))
    capacity = Capacity(config.channels, 64) if what == "ff_width" else None
    with pytest.raises(UserError, match="saved sequence: of another model than this engine's, or of another capacity"):
        engine_of(other_model(config, random_model, what), capacity=capacity).restore(saved)


@pytest.mark.parametrize(
    "settings", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "quantization": "int8"}], ids=str
)
def test_a_sequence_may_go_on_in_another_precision_and_on_another_device(tiny_config, random_model, device, settings):
    engine = engine_of(random_model(tiny_config.model))
    slot = engine.add([9, 8, 7])
    saved = engine.save(slot)
    elsewhere = engine_of(random_model(tiny_config.model).to(device), **settings)
    elsewhere.step([elsewhere.restore(saved)])
    engine.step([slot])
    error = elsewhere.logits_BV.cpu() - engine.logits_BV
    assert error.norm() < (0.05 if settings else 1e-4) * engine.logits_BV.norm()


@pytest.mark.gpu
def test_recorded_steps_are_those_launched_one_by_one(tiny_config, random_model):
    model = random_model(tiny_config.model).cuda()
    texts = []
    for graphs in (False, True):
        engine = engine_of(model, slots=6, graphs=graphs)
        slots = [engine.add([5, number], SAMPLED if number % 2 else SamplingConfig(), number) for number in range(5)]
        logits = []
        drawn = []
        for count in (1, 2, 3, 5, 5, 4, 1, 2, 3, 5, 1, 2):  # classes 1, 2, 4 and 6, each as it is, recorded, replayed
            drawn.append(engine.step(slots[:count]).tokens())
            logits.append(engine.logits_BV.clone())
        texts.append((drawn, logits))
    (drawn, logits), (recorded, recorded_logits) = texts
    # A class of more rows than there are sequences may sum in another order, as may a prompt with pads.
    for a, b in zip(logits, recorded_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert drawn == recorded


@pytest.mark.gpu
def test_sequences_come_and_go_without_a_new_recording(tiny_config, random_model):
    engine = engine_of(random_model(tiny_config.model).cuda())
    for number in range(12):
        slots = [engine.add([1, 2, number + row], SAMPLED, row) for row in range(3)]
        for _ in range(5):
            engine.step(slots).tokens()
        for slot in slots:
            engine.remove(slot)
    assert engine.recordings == 3  # the step and the draws of one class, and its prompts


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_steps_stay_near(model, device, kind):
    tokens = random_tokens(2, LENGTH)
    exact = model(tokens.to(device))
    engine = engine_of(model, dtype=torch.bfloat16, quantization=kind)
    slots = [engine.add(row[:1]) for row in tokens.tolist()]
    error = (forced_logits(engine, slots, tokens) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < {"int8": 0.05, "fp8": 0.15}[kind]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda e: e.add([]), "prompt: no tokens; give at least one"),
        (lambda e: e.add([3, 264]), "token 264 lies outside.*264"),
        (lambda e: e.add([3], seed=-1), "seed: -1"),
        (lambda e: e.fork(0, seed=2**63), "seed: 9223372036854775808"),
        (lambda e: e.force(0, 300), "token 300 lies outside"),
        (lambda e: e.step([1]), r"slot 1: holds no sequence; those that do are \[0\]"),
        (lambda e: e.remove(2), "slot 2: holds no sequence"),
        (lambda e: [e.add([1]) for _ in range(4)], "slots: all 4 hold a sequence"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(tiny_config, random_model, act, message):
    engine = engine_of(random_model(tiny_config.model))
    slot = engine.add([1, 2])
    with pytest.raises(UserError, match=message):
        act(engine)
    assert slot in engine.live
    assert engine.taken(slot) == 1


def test_bad_engines_are_refused(tiny_config, random_model):
    model = random_model(tiny_config.model)
    with pytest.raises(UserError, match="capacity 7,64: this model holds 6,192"):
        Engine(model, Capacity(7, 64))
    with pytest.raises(UserError, match="slots: 0"):
        Engine(model, slots=0)
    with pytest.raises(UserError, match="float16"):
        Engine(model, dtype=torch.float16)


def test_logits_that_are_not_finite_are_an_error(tiny_config, random_model):
    model = random_model(tiny_config.model)
    with torch.no_grad():
        model.final_norm.weight[0] = torch.nan
    engine = engine_of(model)
    drawn = engine.step([engine.add([1, 2])])
    with pytest.raises(UserError, match="logits: not finite"):
        drawn.tokens()


@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_read_what_is_packed_and_only_while_they_are_told_to(model, capacity, dtype):
    weights = pack_model(model, capacity, dtype)
    products = [weight for weight in model.product_weights() if weight is not model.head_weight]
    products[0].compute_copy = own = torch.empty(0)
    mixers = [
        weight
        for mixer in weights.mixers
        for weight in (mixer.in_proj if isinstance(mixer, SpectralWeights) else mixer.qkv, mixer.out_proj)
    ]
    units = [weight for part in weights.feed_forwards for weight in (part.gate_up, part.down)]
    packed = {weight.values_RI.untyped_storage().data_ptr() for weight in mixers + units}
    with reading(model, weights):
        for weight in products:
            copy = weight.compute_copy
            assert copy.dtype == dtype
            assert torch.equal(copy, weight[: len(copy)].to(dtype))
            assert copy.untyped_storage().data_ptr() in packed  # no memory of its own
        lengths = {len(weight.compute_copy) for weight in products if weight.dim() == 3 and weight.shape[1] == 2}
        assert lengths == {(capacity or full_capacity(model.config)).ff_width}
        assert not hasattr(model.head_weight, "compute_copy")
    assert products[0].compute_copy is own
    assert not any(hasattr(weight, "compute_copy") for weight in products[1:])
    with reading(model, pack_model(model, capacity, torch.bfloat16, "int8")):
        assert products[0].compute_copy is own
        assert not hasattr(products[1], "compute_copy")


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"clock": "constant"}], ids=str)
def test_prompts_leave_the_state_of_autocast_whatever_has_become_of_the_model(
    tiny_config, random_model, capacity, settings
):
    model = random_model(dataclasses.replace(tiny_config.model, **settings)).cuda()
    tokens = random_tokens(1, 3 * WINDOW)
    expected = model.init_state(1, capacity, dtype=torch.bfloat16)
    exact = model.init_state(1, capacity)
    with torch.autocast("cuda", torch.bfloat16):
        model.prefill(tokens[:, :-1].cuda(), expected, capacity)
    model.prefill(tokens[:, :-1].cuda(), exact, capacity)
    engine = engine_of(model, capacity=capacity, dtype=torch.bfloat16)
    for weight in model.product_weights():
        if weight is not model.head_weight:
            weight.mul_(-1.3)
    for _ in range(3):  # as it is, recorded, replayed
        given = engine.save(engine.add(tokens[0].tolist())).state
        for name in ("spectral", "keys", "values"):
            states = (getattr(state, name) for state in (given, expected, exact))
            for actual, bf16, fp32 in zip(*states, strict=True):
                noise = (bf16.float() - fp32).norm()
                assert (actual.cuda().float() - fp32).norm() < 1.2 * noise + 1e-6
    assert engine.recordings == 1
    changed = model(tokens.cuda())
    assert torch.equal(model(tokens.cuda()), changed)
    assert not any(hasattr(weight, "compute_copy") for weight in model.product_weights())


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"window": None}, {"attention_layers": ()}], ids=str)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_device_is_waited_for_only_where_tokens_are_read(tiny_config, random_model, settings, graphs):
    model = random_model(dataclasses.replace(tiny_config.model, **settings)).cuda()
    engine = engine_of(model, dtype=torch.bfloat16, max_length=200, graphs=graphs)
    lengths = (1, 2, 3, WINDOW, 5 * WINDOW + 1)

    def pass_through():
        for length in lengths:
            slot = engine.add(list(range(length)), SAMPLED, length)
            engine.step([slot])
            engine.force(slot, 5)
            twin = engine.fork(slot, seed=3)
            drawn = engine.step([slot, twin])
            engine.remove(slot)
            engine.remove(twin)
        return drawn

    for _ in range(2):  # compiles, then records
        pass_through().tokens()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = pass_through()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(drawn.tokens()) == 2


def first_token(model, prompt):
    engine = engine_of(model)
    return engine.step([engine.add(prompt)]).tokens()


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda engine: engine.step([]), "name at least one, and each once"),
        (lambda engine: engine.step([0, 0]), "name at least one, and each once"),
        (lambda engine: engine.add([1.5]), "token ids must be whole numbers"),
        (lambda engine: engine.add("ab"), "token ids must be whole numbers"),
        (lambda engine: engine.add([1], seed=1.5), "seed: 1.5 must be a whole number of 0 to"),
    ],
)
def test_misuse_is_an_error_and_leaves_sequences_as_they_were(model, misuse, complaint):
    engine = engine_of(model)
    slot = engine.add([1, 2, 3])
    with pytest.raises(UserError, match=complaint):
        misuse(engine)
    assert engine.live == [slot]
    assert engine.step([slot]).tokens() == first_token(model, [1, 2, 3])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"quantization": "int4"}, "quantization: 'int4'; expected one of int8, fp8"),
        ({"real_V": torch.ones(3, dtype=torch.bool)}, "real_V: expected"),
        ({"real_V": torch.zeros(264, dtype=torch.bool)}, "real_V: expected"),
        ({"slots": 10**13}, r"GiB, more than (cpu|cuda:0) has"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(model, settings, complaint):
    with pytest.raises(UserError, match=complaint):
        Engine(model, **settings)


def test_prompts_are_whole_numbers_of_any_kind(model):
    engine = engine_of(model)
    slots = engine.add(torch.tensor([1, 2, 3])), engine.add([1, 2, 3])
    assert engine.step(slots).tokens() == 2 * first_token(model, [1, 2, 3])
