"""Decode steps give the training forward's logits far past a full window, for prompts of any length, alone or not.

On a GPU with the window of the published models, on a CPU with a small one. Weights are such that every term shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_essh.benchmarks.drift import DriftCase, measure_drift, strengthen
from megatron_essh.config import RunConfig
from megatron_essh.inference import Engine, Request, SamplingConfig, generate_many
from megatron_essh.model.language_model import LanguageModel

WINDOW = {"cpu": 16, "cuda": 2048}
PAST_WINDOW = {"cpu": 64, "cuda": 4096}
LONGEST = {"cpu": 5000, "cuda": 100_000}
"""Tokens of the longest prompt."""
MOST_NOISE = 1.5
"""Times the error of the bf16 forward that bf16 steps may be off."""
CASES = [("T10", 1), ("T10", 3), ("T10", 16), ("T10", 128), ("T5", 3), ("T5", 128), ("T1", 1), ("T1", 16)]
CASES += [(f"T{tier}", (1, 3)[tier % 2]) for tier in (2, 3, 4, 6, 7, 8, 9)]

Build = Callable[[int], tuple[LanguageModel, RunConfig]]


@pytest.fixture
def build(tiny_config: RunConfig, device: str) -> Build:
    """A model of two spectral and two attention layers with a window of so many keys, and its config."""

    def build(window: int) -> tuple[LanguageModel, RunConfig]:
        shape = dataclasses.replace(
            tiny_config.model,
            d_model=128,
            n_layers=4,
            channels=10,
            modes=4,
            value_width=12,
            ff_width=512,
            attention_layers=(1, 3),
            head_dim=64,
            window=window,
        )
        with torch.device(device):
            model = LanguageModel(shape).requires_grad_(False)
        strengthen(model, seed=1)
        return model, dataclasses.replace(tiny_config, model=shape)

    return build


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(264, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def forced_logits(engine: Engine, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits [B, T, V] after each of the tokens; the first is the one that the slots' sequences end with."""
    logits = []
    for tokens in zip(*texts, strict=True):
        for slot, token in zip(slots, tokens, strict=True):
            engine.force(slot, token)
        engine.step(slots)
        logits.append(engine.logits_BV.clone())
    return torch.stack(logits, dim=1)


def whole_logits(model: LanguageModel, tokens: Sequence[int], last: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The forward's logits [last, V] at a text's last positions; in bf16, products summed in fp32 as a step's."""
    tokens_BT = torch.tensor([tokens], device=model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        hidden_TD = model.hidden(tokens_BT)[0, -last:]
    return hidden_TD.float() @ model.head_weight.to(dtype).float().T


def off(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize(("tier", "batch"), CASES)
def test_logits_stay_the_forwards_past_the_window(build: Build, device: str, tier: str, batch: int) -> None:
    window, past = WINDOW[device], PAST_WINDOW[device]
    model, config = build(window)
    case = DriftCase(tier, batch, window + past, prompt=window // 2)
    (row,) = measure_drift(model, config, [case], say=lambda line: None)
    bf16, fp32 = row["verdicts"]["bf16 steps"], row["verdicts"]["fp32 steps"]
    assert 0 < fp32["highest"] < 1e-4
    assert 0.1 < bf16["over_noise"] < MOST_NOISE
    if device == "cuda":  # on fewer positions it is chance
        assert bf16["growth"] < 1.1
        assert fp32["growth"] < 1.1


@pytest.mark.parametrize("length", [1, 2, 2047, 2048, 2049, "longest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_prompt_is_continued_as_the_forward_does(
    build: Build, device: str, length: int | str, dtype: torch.dtype
) -> None:
    length = length if isinstance(length, int) else LONGEST[device]
    model, _ = build(2048)
    count = 24
    text = random_tokens(length + count - 1, seed=length)
    engine = Engine(model, dtype=dtype)
    slot = engine.add(text[:length])
    assert engine.taken(slot) == length - 1
    (actual,) = forced_logits(engine, [slot], [text[length - 1 :]])
    exact = whole_logits(model, text, count)
    if dtype == torch.float32:
        assert off(actual, exact) < 1e-4
    else:
        assert off(actual, exact) < MOST_NOISE * off(whole_logits(model, text, count, dtype), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_slot_used_before_gives_what_a_fresh_one_gives(build: Build, device: str, dtype: torch.dtype) -> None:
    model, _ = build(WINDOW[device])
    window = WINDOW[device]
    follow, longest = random_tokens(8, seed=3), LONGEST[device]
    lengths = (1, window, window + 1, longest)
    prompts = {length: random_tokens(length, seed=length) for length in lengths}

    def continued(engine: Engine, length: int) -> Tensor:
        slot = engine.add(prompts[length])
        logits = forced_logits(engine, [slot], [[prompts[length][-1], *follow]])
        engine.remove(slot)
        return logits

    fresh = {length: continued(Engine(model, dtype=dtype), length) for length in lengths}
    used = Engine(model, dtype=dtype)
    for length in (longest, 1, window + 1, 1, longest, window, 1, window + 1, window):
        assert torch.equal(continued(used, length), fresh[length]), length


@pytest.mark.parametrize("batch", [3, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_batch_gives_each_sequence_what_it_gets_alone(
    build: Build, device: str, batch: int, dtype: torch.dtype
) -> None:
    window = WINDOW[device]
    model, _ = build(window)
    count = 24  # some of the sequences reach the window's end on the way
    # Positions of all kinds, so that rows of one step differ in what they see.
    lengths = [1, window - 5, window + 1, *(1 + 37 * row % (3 * window) for row in range(3, batch))]
    texts = [random_tokens(length + count - 1, seed=row) for row, length in enumerate(lengths)]
    engine = Engine(model, slots=batch, dtype=dtype)
    slots = [engine.add(text[:length]) for text, length in zip(texts, lengths, strict=True)]
    follow = [text[length - 1 :] for text, length in zip(texts, lengths, strict=True)]
    together = forced_logits(engine, slots, follow)
    for row in {0, 1, 2, batch // 2, batch - 1}:
        single = Engine(model, dtype=dtype)
        (alone,) = forced_logits(single, [single.add(texts[row][: lengths[row]])], [follow[row]])
        exact = whole_logits(model, texts[row], count)
        if dtype == torch.float32:
            assert off(together[row], alone) < 1e-4
            assert off(together[row], exact) < 1e-4
        else:
            noise = off(whole_logits(model, texts[row], count, dtype), exact)
            assert off(together[row], exact) < MOST_NOISE * noise
            assert off(together[row], alone) < MOST_NOISE * noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("before", [-3, 0, 1, 50])
def test_a_fork_has_the_logits_of_the_original(build: Build, device: str, before: int, dtype: torch.dtype) -> None:
    window = WINDOW[device]
    model, _ = build(window)
    length, count = window + before, 12
    text = random_tokens(length + count, seed=before + 3)
    engine = Engine(model, slots=4, dtype=dtype)
    other = engine.add(random_tokens(5))
    slot = engine.add(text[:length])
    engine.step([other])
    twin, follow = engine.fork(slot), text[length - 1 :]
    third = engine.fork(twin)
    (original,) = forced_logits(engine, [slot], [follow])
    (forked,) = forced_logits(engine, [third], [follow])
    assert torch.equal(original, forked)
    beside = forced_logits(engine, [other, twin], [random_tokens(count + 1), follow])[1]
    exact = whole_logits(model, text, count + 1)
    if dtype == torch.float32:
        assert off(beside, exact) < 1e-4
    else:
        assert off(beside, exact) < MOST_NOISE * off(whole_logits(model, text, count + 1, dtype), exact)
    # What becomes of the original does not matter to it, nor what comes to its place.
    kept = engine.save(twin)
    engine.remove(slot)
    engine.add(random_tokens(2 * window))
    for name in ("spectral", "keys", "values"):
        for now, then in zip(getattr(engine.save(twin).state, name), getattr(kept.state, name), strict=True):
            assert torch.equal(now, then)


def test_texts_of_prompts_around_the_window_are_those_of_engines_of_their_own(build: Build, device: str) -> None:
    window = WINDOW[device]
    model, _ = build(window)
    sampling = SamplingConfig(temperature=0.8, top_p=0.9)
    requests = [
        Request(prompt=tuple(random_tokens(length, seed=length)), sampling=sampling, seed=length, max_new_tokens=20)
        for length in (window + 1, 1, 3 * window, 2, window, window - 7)
    ]
    texts: list[list[int]] = [[] for _ in requests]
    for number, token in generate_many(Engine(model, slots=2, dtype=torch.float32), requests):
        texts[number].append(token)
    for request, text in zip(requests, texts, strict=True):
        single = Engine(model, dtype=torch.float32)
        assert [token for _, token in generate_many(single, [request])] == text
