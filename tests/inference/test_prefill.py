"""Prompts filled up with pads leave what they leave without: in the model's state, in slots, and recorded on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_essh.elastic.capacity import Capacity
from megatron_essh.inference import Engine, SamplingConfig
from megatron_essh.inference.prefill import LONGEST, SHORTEST, Prefill, length_class
from megatron_essh.inference.recordings import Recordings, send

WINDOW = 8
SAMPLED = SamplingConfig(temperature=0.9, top_k=40, repetition_penalty=1.2)
CLASSES = [32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096]


def tokens_of(*shape, seed=0):
    return torch.randint(264, shape, generator=torch.Generator().manual_seed(seed))


def prompt_of(length):
    return tokens_of(length, seed=length).tolist()


def parts_of(state):
    return [*state.spectral, *state.keys, *state.values]


def assert_same_state(actual, expected, tolerance=1e-5):
    for one, other in zip(parts_of(actual), parts_of(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert torch.equal(actual.key_position_BW, expected.key_position_BW)
    assert torch.equal(actual.position_B, expected.position_B)


def counts_of(length, window):
    """None, one, all, all but one, and those at which a ring fills and turns."""
    edges = {0, 1, length - 1, length}
    for turn in (window, 2 * window, 5 * window):
        edges |= {turn - 1, turn, turn + 1}
    return sorted(count for count in edges if 0 <= count <= length)


@pytest.mark.parametrize("capacity", [None, Capacity(3, 64)], ids=str)
@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({}, 5),
        ({}, WINDOW),
        ({}, WINDOW + 1),
        ({}, 45),
        ({}, 300),  # more than one frame of the scan
        ({"window": 1}, 20),
        ({"window": 64}, 45),
        ({"window": None}, 45),
        ({"window": 20, "attention_layers": (0, 1, 2)}, 45),
        ({"attention_layers": ()}, 45),
        ({"clock": "constant"}, 45),
        ({"gates": "neutral"}, 45),
    ],
    ids=str,
)
def test_pads_behind_a_prompt_leave_its_state_alone(tiny_config, random_model, device, settings, length, capacity):
    model = random_model(dataclasses.replace(tiny_config.model, **settings)).to(device)
    window = model.config.window or 50
    for count in counts_of(length, window):
        tokens = tokens_of(1, length, seed=count).to(device)
        expected = model.take_in(tokens[:, :count], capacity, max_length=50)
        counted = torch.tensor([count], device=device)
        actual = model.take_in(tokens, capacity, count_B=counted, max_length=50)
        assert_same_state(actual, expected)
        garbage = tokens.clone()
        garbage[:, count:] = tokens_of(1, length - count, seed=99).to(device)
        again = model.take_in(garbage, capacity, count_B=counted, max_length=50)
        assert all(torch.equal(one, other) for one, other in zip(parts_of(actual), parts_of(again), strict=True))
        assert counted.tolist() == [count]


def test_each_of_several_padded_prompts_has_its_own_length(tiny_config, random_model, device):
    model = random_model(tiny_config.model).to(device)
    counts = [0, 1, WINDOW, 17, 30]
    tokens = tokens_of(len(counts), 30).to(device)
    actual = model.take_in(tokens, count_B=torch.tensor(counts, device=device))
    for row, count in enumerate(counts):
        expected = model.take_in(tokens[row : row + 1, :count])
        assert_same_state(actual.select(torch.tensor([row], device=device)), expected)


def test_a_length_class_is_the_least_that_holds_the_prompt():
    assert sorted({length_class(tokens) for tokens in range(1, LONGEST + 1)}) == CLASSES
    for tokens in range(1, LONGEST + 1):
        assert length_class(tokens) == min(size for size in CLASSES if size >= tokens)
    assert (CLASSES[0], CLASSES[-1]) == (SHORTEST, LONGEST)


class AsIs(Recordings):
    """Takes all work for recordable, and does it as it is, on any device."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.enabled = True
        self.keys = []

    def run(self, key, work):
        self.keys.append(key)
        work()


def filling_up(engine):
    """The engine's `Prefill` with pads, and what it asks to be recorded."""
    recordings = AsIs()
    prefill = Prefill(
        engine.model,
        engine.capacity,
        engine.weights,
        engine.state,
        engine._sampling,
        recordings,
        dtype=engine.dtype,
        max_length=50,
    )
    return prefill, recordings.keys


def next_logits(engine, slot, count=WINDOW + 3):
    """fp32 [count, V], each after the most probable token before it."""
    logits = []
    for _ in range(count):
        engine.step([slot])
        logits.append(engine.logits_BV[0].clone())
    return torch.stack(logits)


@pytest.mark.parametrize("settings", [{}, {"window": 64}, {"window": None}, {"attention_layers": ()}], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, WINDOW, WINDOW + 1, WINDOW + 2, 31, 32, 33])
def test_a_padded_prompt_enters_its_slot_as_one_without_pads(tiny_config, random_model, device, settings, length):
    model = random_model(dataclasses.replace(tiny_config.model, **settings)).to(device)
    prompt, other = prompt_of(length), prompt_of(20)

    def engine_with_neighbours():
        engine = Engine(model, slots=3, dtype=torch.float32, max_length=50, graphs=False)
        slots = [engine.add(other, SAMPLED, seed) for seed in range(3)]
        engine.step(slots)
        engine.remove(1)
        # Whatever a slot held is gone, even if it was not finite.
        engine.state.spectral_LSKM2P[:, 1] = torch.nan
        engine.state.keys_LSHWE[:, 1] = engine.state.values_LSHWE[:, 1] = torch.nan
        engine._sampling.seen_SV[1] = True
        return engine

    expected, actual = engine_with_neighbours(), engine_with_neighbours()
    assert expected.add(prompt, SAMPLED, 5) == 1
    assert actual.add(prompt_of(40), SAMPLED, 5) == 1
    actual._live[1].taken = length - 1
    prefill, keys = filling_up(actual)
    prefill(2, prompt_of(40))
    prefill(1, prompt)
    prefill(2, other)
    actual.step([2])
    expected.remove(2)
    expected.add(other, SAMPLED, 2)
    expected.step([2])
    assert keys == [("prompt", 64), ("prompt", 32 if length <= 32 else 64), ("prompt", 32)]
    for slot in range(3):
        one, two = actual.save(slot), expected.save(slot)
        assert_same_state(one.state, two.state)
        assert one.token == two.token
        assert torch.equal(one.seen_V, two.seen_V)
    torch.testing.assert_close(next_logits(actual, 1), next_logits(expected, 1), rtol=1e-4, atol=1e-4)


def test_a_prompt_past_the_longest_class_takes_its_own_length(tiny_config, random_model):
    engine = Engine(random_model(tiny_config.model), dtype=torch.float32)
    prefill, keys = filling_up(engine)
    prefill(0, prompt_of(LONGEST + 1))
    assert keys == []
    assert engine.state.position_S.tolist() == [LONGEST]


def test_numbers_are_sent_as_they_are(device):
    target = torch.zeros(3, 4, dtype=torch.int64, device=device)
    send([2**62 + 1, -1, 0, 7], target[1])
    assert target.tolist() == [[0] * 4, [2**62 + 1, -1, 0, 7], [0] * 4]
    rows = torch.zeros(5, dtype=torch.int32, device=device)
    send((3, -1), rows[:2])
    assert rows.tolist() == [3, -1, 0, 0, 0]


@pytest.mark.parametrize("enabled", [True, False])
def test_work_is_done_every_time_and_recorded_the_second_time(device, enabled):
    recordings = Recordings(torch.device(device), enabled=enabled)
    counter, calls = torch.zeros(2, dtype=torch.int64, device=device), []

    def work(place):
        calls.append(place)
        held = torch.full((1,), place + 1, device=device)
        counter[place : place + 1] += held
        return held

    for _ in range(5):
        recordings.run("first", lambda: work(0))
    recordings.run("second", lambda: work(1))
    assert counter.tolist() == [5, 2]
    if enabled and device == "cuda":
        assert calls == [0, 0, 1]
        assert len(recordings) == 1
    else:
        assert calls == [0] * 5 + [1]
        assert len(recordings) == 0


@pytest.mark.gpu
def test_work_that_fails_is_not_taken_for_done():
    recordings = Recordings(torch.device("cuda"))
    with pytest.raises(ZeroDivisionError):
        recordings.run("work", lambda: 1 // 0)
    target = torch.zeros(1, device="cuda")
    for _ in range(3):
        recordings.run("work", lambda: target.add_(1))
    assert target.item() == 3


LENGTHS = [1, 2, WINDOW, WINDOW + 1, 31, 32, 33, 64, 65, 512, 513, 768, 769, LONGEST, LONGEST + 1]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("settings", [{}, {"window": 600}, {"window": None}, {"attention_layers": ()}], ids=str)
def test_recorded_prompts_leave_what_prompts_launched_one_by_one_leave(
    tiny_config, random_model, settings, quantization
):
    model = random_model(dataclasses.replace(tiny_config.model, **settings)).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        if quantization is not None and dtype == torch.float32:
            continue
        options = {"dtype": dtype, "quantization": quantization, "max_length": LONGEST + 100}
        plain, recorded = (Engine(model, slots=1, graphs=graphs, **options) for graphs in (False, True))
        for length in LENGTHS:
            prompt = prompt_of(length)
            exact = model.take_in(torch.tensor([prompt[:-1]], dtype=torch.int64).cuda(), max_length=LONGEST + 100)
            slot = plain.add(prompt)
            expected = plain.save(slot)
            plain.remove(slot)
            found = []
            for _ in range(3):  # as it is, replayed, replayed; between them the longest of its class
                if length <= LONGEST:
                    recorded.remove(recorded.add(prompt_of(length_class(length))[::-1]))
                slot = recorded.add(prompt)
                found.append(recorded.save(slot))
                recorded.remove(slot)
            for saved in found:
                assert (saved.token, saved.state.position_B.tolist()) == (expected.token, [length - 1])
                assert torch.equal(saved.seen_V, expected.seen_V)
                assert torch.equal(saved.state.key_position_BW, expected.state.key_position_BW)
                states = (parts_of(state) for state in (saved.state, found[0].state, expected.state, exact))
                for actual, first, launched, truth in zip(*states, strict=True):
                    assert torch.equal(actual, first)  # bit by bit, recorded or not
                    if dtype == torch.float32:
                        torch.testing.assert_close(actual, launched, rtol=1e-4, atol=1e-4)
                    else:
                        # Another order of sums rounds otherwise; the shortest prompts are few numbers to average over.
                        truth = truth.cpu()
                        noise = (launched.float() - truth).norm()
                        assert (actual.float() - truth).norm() <= (
                            2.5 if length < 10 else 1.5
                        ) * noise + 1e-5 * truth.norm()
        assert recorded.recordings == len({length_class(length) for length in LENGTHS if length <= LONGEST})
        assert plain.recordings == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_prompts_enter_among_steps_and_forks(tiny_config, random_model, dtype):
    model = random_model(tiny_config.model).cuda()
    found = []
    for graphs in (False, True):
        engine = Engine(model, slots=4, dtype=dtype, graphs=graphs)
        logits = []
        for turn in range(6):
            first = engine.add(prompt_of(40 + turn))
            engine.step([first])
            logits.append(engine.logits_BV.clone())
            twin = engine.fork(first)
            second = engine.add(prompt_of(1 + 9 * turn), SAMPLED, turn)
            third = engine.add(prompt_of(64 - turn))
            for step in range(4):
                slots = [third, twin, first, second] if step % 2 else [second, first, twin, third]
                for slot in slots:  # the same texts with and without recordings, whatever rounding may draw
                    engine.force(slot, (7 * slot + 31 * step + turn) % 264)
                engine.step(slots)
                logits.append(engine.logits_BV.clone())
            for slot in (second, twin, third, first):
                engine.remove(slot)
        found.append(logits)
    for plain, recorded in zip(*found, strict=True):
        assert (recorded - plain).norm() < (1e-4 if dtype == torch.float32 else 0.05) * plain.norm()
    assert engine.recordings == 6  # steps of one row and of four, their draws, prompts of two classes


@pytest.mark.gpu
def test_a_recording_keeps_what_it_reads(tiny_config, random_model):
    model = random_model(tiny_config.model).cuda()
    engine = Engine(model, slots=1, dtype=torch.bfloat16, quantization="int8")
    prompt = prompt_of(30)
    slot = engine.add(prompt)
    expected = engine.save(slot).state
    engine.remove(slot)
    engine.remove(engine.add(prompt))
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 10,), torch.nan, device="cuda") for _ in range(1000)]
    actual = engine.save(engine.add(prompt)).state
    assert all(torch.equal(one, other) for one, other in zip(parts_of(actual), parts_of(expected), strict=True))
    assert len(taken) == 1000
