"""Generation is prefill and steps and draws, nothing else; its text comes in whole characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_essh.config import TokenizerConfig
from megatron_essh.data.tokenizers import build_tokenizer
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.inference import (
    Engine,
    Request,
    SamplingConfig,
    StopStrings,
    TextStream,
    generate,
    generate_many,
    real_tokens,
)

GREEDY = SamplingConfig(temperature=0.0)
PROMPT = [5, 250, 17, 17, 90]


@pytest.fixture
def model(tiny_config, random_model):
    return random_model(tiny_config.model)


@pytest.mark.parametrize("capacity", [None, Capacity(3, 64)], ids=str)
def test_greedy_text_is_the_argmax_of_whole_forward_passes(model, capacity):
    model = model.double()  # so that no near-tie falls differently
    ids = list(PROMPT)
    for _ in range(20):  # beyond the attention window of 8
        logits = model(torch.tensor([ids]), capacity)[0, -1]
        ids.append(int(logits.argmax()))
    assert len(set(ids[len(PROMPT) :])) > 3
    assert list(generate(model, PROMPT, GREEDY, max_new_tokens=20, capacity=capacity)) == ids[len(PROMPT) :]


def test_window_over_the_whole_input_works(tiny_config, random_model):
    import dataclasses

    model = random_model(dataclasses.replace(tiny_config.model, window=None)).double()
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(generate(model, PROMPT, GREEDY, max_new_tokens=12)) == ids[len(PROMPT) :]


def test_same_seed_same_text_and_other_seeds_other_texts(model):
    config = SamplingConfig(temperature=0.9, top_k=50, top_p=0.9)
    texts = [tuple(generate(model, PROMPT, config, max_new_tokens=24, seed=s)) for s in (3, 3, 4, 5)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_the_draws_do_not_touch_the_global_random_state(model):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(generate(model, PROMPT, SamplingConfig(), max_new_tokens=4, seed=9))
    assert torch.equal(torch.get_rng_state(), before)


def test_only_real_tokens_are_drawn(model):
    real = torch.zeros(264, dtype=torch.bool)
    real[[7, 100, 263]] = True
    drawn = list(generate(model, PROMPT, SamplingConfig(temperature=5.0), max_new_tokens=60, real_V=real))
    assert set(drawn) == {7, 100, 263}


def test_the_stop_token_ends_the_text_and_comes_last(model):
    free = list(generate(model, PROMPT, SamplingConfig(), max_new_tokens=40, seed=2))
    stop = free[10]
    stopped = list(generate(model, PROMPT, SamplingConfig(), max_new_tokens=40, seed=2, stop_token=stop))
    assert stopped == free[: free.index(stop) + 1]


def test_tokens_come_as_they_are_drawn_and_modes_do_not_leak(model):
    stream = generate(model, PROMPT, SamplingConfig(), max_new_tokens=1_000_000)
    assert isinstance(next(stream), int)
    assert not torch.is_inference_mode_enabled()
    next(stream)
    stream.close()


@pytest.mark.parametrize(
    ("prompt", "settings_", "message"),
    [
        ([], {}, "prompt: no tokens"),
        ([3, 264], {}, "token 264 lies outside.*264"),
        ([-1], {}, "token -1 lies outside"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens: 0"),
        ([1], {"seed": -1}, "seed: -1"),
        ([1], {"seed": 2**63}, "seed: 9223372036854775808"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(model, prompt, settings_, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompt, GREEDY, **{"max_new_tokens": 4, **settings_})


REQUESTS = [
    Request(prompt=prompt, sampling=config, seed=seed, max_new_tokens=count, stop_token=stop)
    for prompt, config, seed, count, stop in [
        ((5, 250, 17), SamplingConfig(), 1, 9, None),
        ((5, 250, 17), SamplingConfig(), 2, 14, None),
        ((4,), SamplingConfig(temperature=0.7, top_k=9), 3, 1, None),
        ((5, 250, 17), GREEDY, 4, 20, None),
        (tuple(range(30)), SamplingConfig(top_p=0.9, repetition_penalty=1.3), 5, 12, None),
        ((90, 91), SamplingConfig(temperature=2.0), 6, 60, 82),
    ]
]


def alone(model, request):
    return list(
        generate(
            model,
            request.prompt,
            request.sampling,
            seed=request.seed,
            max_new_tokens=request.max_new_tokens,
            stop_token=request.stop_token,
        )
    )


@pytest.mark.parametrize("slots", [1, 2, 4, 6, 9])
def test_texts_made_together_are_those_made_alone(model, device, slots):
    model = model.to(device)
    engine = Engine(model, slots=slots, dtype=torch.float32)
    texts = [[] for _ in REQUESTS]
    for number, token in generate_many(engine, REQUESTS):
        texts[number].append(token)
    assert texts == [alone(model, request) for request in REQUESTS]
    assert len(texts[5]) < 60
    assert texts[5][-1] == 82
    assert engine.free == slots


def test_a_text_that_the_caller_ends_gets_no_more_tokens_and_frees_its_slot(model):
    engine = Engine(model, slots=2, dtype=torch.float32)
    expected = [alone(model, request) for request in REQUESTS]
    texts, ended = [[] for _ in REQUESTS], set()
    for number, token in generate_many(engine, REQUESTS, ended):
        assert number not in ended
        texts[number].append(token)
        if number in (1, 3) and len(texts[number]) == 4:
            ended.add(number)
            ended.add(4)  # which has not begun
    assert texts[1] == expected[1][:4]
    assert texts[3] == expected[3][:4]
    assert texts[4] == []
    assert [texts[number] for number in (0, 2, 5)] == [expected[number] for number in (0, 2, 5)]
    assert engine.free == 2


def test_whoever_stops_taking_tokens_leaves_the_engine_empty(model):
    engine = Engine(model, slots=3, dtype=torch.float32)
    tokens = generate_many(engine, REQUESTS)
    next(tokens)
    assert engine.free == 0
    tokens.close()
    assert engine.free == 3


def test_one_bad_request_is_refused_before_any_runs(model):
    engine = Engine(model, slots=3, dtype=torch.float32)
    bad = Request(prompt=(), sampling=GREEDY, max_new_tokens=3)
    with pytest.raises(UserError, match="prompt: no tokens"):
        generate_many(engine, [REQUESTS[0], bad])
    assert engine.free == 3


@given(
    text=st.text(alphabet="ab\n", max_size=14),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 14), max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_a_text_ends_before_the_first_stop_string_however_it_comes(text, stops, cuts):
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stream, given_out = StopStrings(stops), ""
    for begin, end in pairwise(edges):
        given_out += stream.push(text[begin:end])
        # Nothing is held back that cannot be the beginning of a stop string.
        held = text[len(given_out) : end]
        assert stream.found or held == "" or any(stop.startswith(held) for stop in stops)
    assert stream.found == bool(ends)
    given_out += stream.finish()
    if not ends:
        assert given_out == text
        return
    longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
    assert given_out == text[: ends[0] - longest]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="stop: an empty string"):
        StopStrings(["a", ""])


def stream_text(tokenizer, prompt_ids, ids):
    stream = TextStream(tokenizer, prompt_ids)
    pieces = [stream.push(token) for token in ids]
    return pieces, stream.finish()


@given(text=st.text(alphabet="aé漢😀 \n", min_size=1, max_size=12), prompt=st.text(alphabet="bü字 ", max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_streamed_pieces_are_whole_characters_and_make_the_text(tokenizer, text, prompt):
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    pieces, rest = stream_text(tokenizer, prompt_ids, ids)
    assert rest == ""
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    whole, before = tokenizer.decode(prompt_ids + ids), tokenizer.decode(prompt_ids)
    assert "".join(pieces) == whole[len(before) :]


@given(ids=st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them(ids):
    tokenizer = build_tokenizer(TokenizerConfig(type="byte"))
    pieces, rest = stream_text(tokenizer, [], ids)
    assert "".join(pieces) + rest == bytes(ids).decode(errors="replace")


def test_a_character_waits_for_its_last_byte_and_no_longer():
    tokenizer = build_tokenizer(TokenizerConfig(type="byte"))
    pieces, rest = stream_text(tokenizer, [], list("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert rest == ""
    pieces, rest = stream_text(tokenizer, [], [*b"a", 0xF0, 0x9F])
    assert pieces == ["a", "", ""]
    assert rest == "\N{REPLACEMENT CHARACTER}"


def test_real_tokens_leaves_out_padding_and_gaps(tokenizer):
    real = real_tokens(tokenizer, 1000)
    assert real.nonzero().flatten().tolist() == list(range(tokenizer.vocab_size))


def test_real_tokens_leaves_out_gaps_in_the_ids():
    class Gapped:
        def has(self, token):
            return token < 9 and token not in (4, 7)

    assert real_tokens(Gapped(), 12).nonzero().flatten().tolist() == [0, 1, 2, 3, 5, 6, 8]


def test_requests_that_can_get_no_slot_are_an_error(tiny_config, random_model):
    engine = Engine(random_model(tiny_config.model), slots=1, dtype=torch.float32)
    engine.add([1])
    tokens = generate_many(engine, [Request(prompt=(1,), sampling=SamplingConfig(), max_new_tokens=3)])
    with pytest.raises(UserError, match="slots: all 1 hold sequences of others"):
        next(tokens)
