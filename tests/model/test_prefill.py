"""A prompt taken in by segments of any size, in order or over pads, is the prompt taken in token by token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_essh.config import ModelConfig
from megatron_essh.errors import UserError
from megatron_essh.model.language_model import PREFILL_SEGMENT, LanguageModel
from megatron_essh.model.state import ModelState, advance, advance_together
from megatron_essh.ops.selective_scan import ModalTables

LENGTH, WINDOW = 40, 8

Build = Callable[..., LanguageModel]


def config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "d_model": 32,
        "n_layers": 4,
        "channels": 5,
        "modes": 4,
        "value_width": 7,
        "ff_width": 64,
        "vocab_size": 41,
        "attention_layers": (1, 3),
        "window": WINDOW,
        "head_dim": 8,
        "bank_length": 64,
    }
    return ModelConfig(**{**sizes, **changes})


@pytest.fixture
def build(random_model: Build) -> Build:
    """A random fp64 model of `config(...)`."""
    return lambda **changes: random_model(config(**changes)).double()


def tokens(batch: int, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(0, 41, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def assert_same_state(actual: ModelState, expected: ModelState) -> None:
    for one, other in zip(
        [*actual.spectral, *actual.keys, *actual.values],
        [*expected.spectral, *expected.keys, *expected.values],
        strict=True,
    ):
        assert_same(one, other)
    assert torch.equal(actual.key_position_BW, expected.key_position_BW)
    assert torch.equal(actual.position_B, expected.position_B)


@pytest.mark.parametrize("segment", [1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 29, LENGTH, 1000])
@pytest.mark.parametrize("window", [WINDOW, 1, None, 64])
def test_a_segment_of_any_size_equals_the_whole_and_the_steps(build, segment, window):
    model = build(window=window)
    x = tokens(2)
    whole = model(x)
    stepped = model.init_state(2, max_length=LENGTH)
    for t in range(LENGTH):
        assert_same(model.step(x[:, t], stepped)[0], whole[:, t])
    hidden, state = model.prefill_hidden(x, model.init_state(2, max_length=LENGTH), segment=segment)
    assert_same(hidden @ model.head_weight.T, whole)
    assert_same_state(state, stepped)
    logits, state = model.prefill(x, model.init_state(2, max_length=LENGTH), segment=segment)
    assert_same(logits, whole[:, -1])
    assert_same_state(state, stepped)


@pytest.mark.parametrize("cut", [1, 5, WINDOW, 21])
@pytest.mark.parametrize("segment", [None, 6, 30])
def test_a_second_prompt_and_steps_continue_the_first(build, cut, segment):
    model = build()
    x = tokens(3)
    whole = model(x)
    _, state = model.prefill(x[:, :cut], model.init_state(3), segment=segment)
    logits, state = model.prefill(x[:, cut:33], state, segment=segment)
    assert_same(logits, whole[:, 32])
    for t in range(33, LENGTH):
        assert_same(model.step(x[:, t], state)[0], whole[:, t])


def test_a_fork_is_untouched_by_what_the_original_takes_in(build):
    model = build()
    _, state = model.prefill(tokens(2), model.init_state(2), segment=LENGTH)
    fork, kept = state.clone(), state.clone()
    follow = tokens(2, 25, seed=4)
    original, state = model.prefill(follow, state, segment=10)
    assert_same_state(fork, kept)
    again, fork = model.prefill(follow, fork, segment=10)
    assert torch.equal(original, again)
    assert_same_state(fork, state)


@pytest.mark.parametrize("segment", [None, 3, 2 * WINDOW, 1000])
@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_pads_touch_nothing_in_segments_of_any_size(build, segment, side):
    model = build()
    lengths = [25, 3, LENGTH, 2 * WINDOW + 1]
    padded, valid = torch.full((4, LENGTH), 3), torch.zeros(4, LENGTH, dtype=torch.bool)
    prompts = [tokens(1, n, seed=n) for n in lengths]
    for row, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        places = {"left": range(LENGTH - n, LENGTH), "right": range(n), "between": range(0, LENGTH, LENGTH // n)}[side]
        index = torch.tensor(list(places)[:n])
        padded[row, index], valid[row, index] = prompt[0], True
    logits, state = model.prefill(padded, model.init_state(4), valid_BT=valid, segment=segment)
    follow = tokens(4, 2, seed=99)
    after = [model.step(follow[:, t], state)[0] for t in range(2)]
    for row, prompt in enumerate(prompts):
        own = model.init_state(1)
        for t in range(prompt.shape[1]):
            alone, own = model.step(prompt[:, t], own)
        assert_same(logits[row], alone[0])
        for t in range(2):
            assert_same(after[t][row], model.step(follow[row : row + 1, t], own)[0][0])


def test_sequences_at_different_positions_continue_each_from_its_own(build):
    model = build()
    prompts = [tokens(1, n, seed=n) for n in (5, 19)]
    states = [model.prefill(prompt, model.init_state(1))[1] for prompt in prompts]
    joined = ModelState(
        *(
            [torch.cat(pair) for pair in zip(*(getattr(s, name) for s in states), strict=True)]
            for name in ("spectral", "keys", "values")
        ),
        *(torch.cat([getattr(s, name) for s in states]) for name in ("key_position_BW", "position_B")),
    )
    follow = tokens(2, 30, seed=7)
    logits, _ = model.prefill(follow, joined, segment=2 * WINDOW)
    for row, prompt in enumerate(prompts):
        assert_same(logits[row], model(torch.cat([prompt, follow[row : row + 1]], dim=1))[0, -1])


def test_a_mask_without_pads_is_no_mask(build):
    model = build()
    x = tokens(2)
    plain, _ = model.prefill_hidden(x, model.init_state(2), segment=11)
    masked, _ = model.prefill_hidden(x, model.init_state(2), valid_BT=torch.ones_like(x, dtype=torch.bool), segment=11)
    assert torch.equal(plain, masked)


@pytest.mark.parametrize("start", [0, 3, WINDOW - 1, WINDOW, WINDOW + 3, 3 * WINDOW])
@pytest.mark.parametrize("length", [1, 5, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
def test_the_ring_gives_the_window_in_order_and_keeps_the_last_positions(build, start, length):
    state = build().init_state(2)
    before = advance_together(state, 0, start) if start else None
    assert before is None or before.start == 0
    ring_BW = state.key_position_BW.clone()
    update = advance_together(state, start, length)
    seen_BS = update.seen(ring_BW, update.position.expand(2, -1))
    assert seen_BS.tolist() == [list(range(max(0, start - WINDOW + 1), start + length))] * 2
    kept = range(max(0, start + length - WINDOW), start + length)
    expected = [next((p for p in kept if p % WINDOW == slot), -1) for slot in range(WINDOW)]
    assert state.key_position_BW.tolist() == [expected] * 2


def test_no_two_tokens_of_a_call_are_written_to_one_slot(build):
    state = build().init_state(2)
    valid = torch.rand(2, 5 * WINDOW, generator=torch.Generator().manual_seed(0)) < 0.6
    advance(state, valid[:, :3])
    update = advance(state, valid[:, 3:])
    places = list(zip(update.batch_N.tolist(), update.slot_N.tolist(), strict=True))
    assert len(set(places)) == len(places) == 2 * WINDOW
    taken = valid.sum(1).tolist()
    assert [sorted(row) for row in state.key_position_BW.tolist()] == [list(range(n - WINDOW, n)) for n in taken]


def test_memory_is_a_segments_and_not_the_prompts(build, largest_tensor):
    model = build()
    x = tokens(1, 1500)
    with largest_tensor() as largest:
        model.prefill(x, model.init_state(1), segment=16)
    assert largest.elements < x.numel() * 32 // 4


def test_no_segment_is_a_mistake(build):
    model = build()
    with pytest.raises(UserError, match="segment 0"):
        model.prefill(tokens(1), model.init_state(1), segment=0)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_on_a_gpu_prompts_in_order_equal_the_same_prompts_over_pads(random_model, batch):
    model = random_model(config(d_model=128, head_dim=64, window=128)).to("cuda")
    exact = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in ModalTables._fields:
            parameter.data = parameter.bfloat16()
    length = 2 * PREFILL_SEGMENT + 64
    x = tokens(batch, length).cuda()
    padded = torch.cat([x[:, :5], torch.zeros_like(x[:, :1]), x[:, 5:]], dim=1)
    valid = torch.ones_like(padded, dtype=torch.bool)
    valid[:, 5] = False
    first, ordered = model.prefill_hidden(x[:, :1000], model.init_state(batch))
    second, ordered = model.prefill_hidden(x[:, 1000:], ordered)
    hidden = torch.cat([first, second], dim=1)
    scattered, positional = model.prefill_hidden(padded, model.init_state(batch), valid_BT=valid)
    scattered = scattered[:, valid[0]]
    # bf16 is coarse for a random network: neither way may be further from the exact values than the other is.
    wanted, reached = exact.prefill_hidden(x, exact.init_state(batch))
    assert (scattered.double() - wanted).norm() < 0.2 * wanted.double().norm()
    assert torch.equal(ordered.key_position_BW, positional.key_position_BW)
    pairs = zip(
        (hidden, *ordered.keys, *ordered.values), (scattered, *positional.keys, *positional.values), strict=True
    )
    for (in_order, over_pads), truth in zip(pairs, (wanted, *reached.keys, *reached.values), strict=True):
        assert (in_order.double() - truth).norm() < 1.2 * (over_pads.double() - truth).norm()
