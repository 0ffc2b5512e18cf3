"""Perplexity against its definition, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_essh.config import DataConfig, TokenizerConfig
from megatron_essh.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_essh.data.packing import validation_batches
from megatron_essh.data.sidecar import sidecar_path
from megatron_essh.data.tokenizer_reference import TokenizerReference
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.evaluation.data import open_evaluation_data
from megatron_essh.evaluation.perplexity import Score, Windows, score, scored_bytes
from megatron_essh.export.provenance import Provenance


@pytest.fixture
def model(tiny_config, random_model):
    return random_model(tiny_config.model).double()


def by_definition(model, ids, length, capacity=None):
    """-log p of each token but the first, from what its window of `length` holds before it."""
    losses = []
    for target in range(1, len(ids)):
        begin = (target - 1) // length * length
        logits = model(torch.tensor([ids[begin:target]]), capacity)[0, -1]
        losses.append(-float(logits.log_softmax(-1)[ids[target]]))
    return losses


@pytest.mark.parametrize("capacity", [None, Capacity(3, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_score_is_the_mean_over_every_token_but_the_first(model, write_byte_pair, capacity, batch):
    pair = write_byte_pair(["Zwölf ", "an 😀"])
    expected = by_definition(model, pair.ids, 4, capacity)
    assert (len(pair.ids) - 1) % 4 != 0  # a rest comes into it
    result = score(model, Windows(IndexedDataset(pair.prefix), 4, batch), capacity)
    assert result.tokens == len(expected) == len(pair.ids) - 1
    assert result.nll == pytest.approx(math.fsum(expected) / len(expected), rel=1e-10)
    assert result.perplexity == pytest.approx(math.exp(result.nll), rel=1e-12)


def test_bits_a_byte_do_not_know_of_tokens(model, write_byte_pair):
    pair = write_byte_pair(["Zwölf ", "jagen 😀"])
    windows = Windows(IndexedDataset(pair.prefix), 9, 2)
    result = score(model, windows)
    size = scored_bytes(windows, pair.tokenizer)
    assert size == len("wölf jagen 😀".encode())  # the first token of all is not predicted
    assert result.bits_per_byte(size) == pytest.approx(result.total / math.log(2) / size)


def test_text_bytes_count_characters_across_windows_once(byte_pair):
    windows = Windows(IndexedDataset(byte_pair.prefix), 7, 3)  # cuts many a character
    assert scored_bytes(windows, byte_pair.tokenizer) == len("".join(byte_pair.texts).encode()) - 1


def test_the_same_figures_twice(model, byte_pair):
    windows = Windows(IndexedDataset(byte_pair.prefix), 16, 4)
    assert score(model, windows) == score(model, windows)


def test_chunked_loss_changes_nothing_but_rounding(model, byte_pair):
    windows = Windows(IndexedDataset(byte_pair.prefix), 16, 4, 3)
    whole = score(model, windows, chunk=None)
    assert score(model, windows, chunk=13).nll == pytest.approx(whole.nll, rel=1e-12)


def test_bf16_is_close_to_fp32_and_is_not_it(tiny_config, random_model, byte_pair):
    model = random_model(tiny_config.model)
    windows = Windows(IndexedDataset(byte_pair.prefix), 16, 4, 3)
    exact, rough = score(model, windows), score(model, windows, precision="bf16")
    assert rough.nll != exact.nll
    assert rough.nll == pytest.approx(exact.nll, rel=0.02)


def test_a_document_mask_cuts_context_and_skips_the_first_tokens_of_documents(model, write_byte_pair):
    texts = ["erste", "zwei", "drittes"]
    pair = write_byte_pair(texts)
    eod = pair.tokenizer.eod
    losses, size = [], 0
    for text in texts:
        ids = [*pair.tokenizer.encode(text), eod]
        losses += by_definition(model, ids, 1000)  # each document alone, without its first token
        size += len(text.encode()) - 1
    windows = Windows(IndexedDataset(pair.prefix), 500, 2)  # one window holds all
    result = score(model, windows, cut_at=eod)
    assert result.tokens == len(losses)
    assert result.nll == pytest.approx(math.fsum(losses) / len(losses), rel=1e-10)
    assert scored_bytes(windows, pair.tokenizer, cut_at=eod) == size
    assert score(model, windows).nll != pytest.approx(result.nll, rel=1e-3)


@given(
    tokens=st.integers(2, 60),
    length=st.integers(1, 20),
    batch=st.integers(1, 5),
    batches=st.one_of(st.none(), st.integers(1, 6)),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_cover_the_data_in_order_and_predict_each_token_once(tmp_path, tokens, length, batch, batches):
    with IndexedDatasetWriter(tmp_path / "pair", "<u2") as writer:
        writer.add_document(np.arange(tokens))
    dataset = IndexedDataset(tmp_path / "pair")
    if batches is not None and tokens < length + 1:
        with pytest.raises(UserError, match=f"{tokens} tokens, and the evaluation takes at least {length + 1}"):
            Windows(dataset, length, batch, batches)
        return
    windows = Windows(dataset, length, batch, batches)
    got = list(windows)
    assert len(got) == len(windows)
    assert all(w.dtype == np.int64 and len(w) <= batch and w.shape[1] <= length + 1 for w in got)
    labels = [int(label) for w in got for label in w[:, 1:].reshape(-1)]
    if batches is None:
        assert labels == list(range(1, tokens))
    else:
        assert len(got) <= batches
        assert labels == list(range(1, min(batches * batch, (tokens - 1) // length) * length + 1))


def test_limited_windows_are_the_validation_batches_of_training(byte_pair):
    expected = validation_batches(byte_pair.prefix, 16, 4, 5)
    got = list(Windows(IndexedDataset(byte_pair.prefix), 16, 4, 5))
    assert len(expected) == 5
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 200}, "256.*outside the model's vocabulary of 200"),
        ({"length": 0}, "sequence length: 0"),
        ({"batch": 0}, "batch size: 0"),
        ({"batches": 0}, "batches: 0"),
    ],
)
def test_impossible_windows_are_refused(arguments, message, byte_pair):
    given_ = {"length": 8, "batch": 2, "batches": None, "vocab_size": None, **arguments}
    with pytest.raises(UserError, match=message):
        Windows(
            IndexedDataset(byte_pair.prefix),
            given_["length"],
            given_["batch"],
            given_["batches"],
            vocab_size=given_["vocab_size"],
        )


def test_a_model_that_blew_up_is_told(model, byte_pair):
    model.final_norm.weight.fill_(math.nan)
    with pytest.raises(UserError, match="batch 0: the model's likelihood is not finite"):
        score(model, Windows(IndexedDataset(byte_pair.prefix), 16, 4))


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert Score(total=7090.0, tokens=10).perplexity == pytest.approx(math.exp(709))
    assert Score(total=7100.0, tokens=10).perplexity == math.inf
    assert Score(total=1e12, tokens=10).nll == 1e11


def provenance(tokenizer):
    return Provenance(
        kind="checkpoint",
        path="/runs/a",
        sha256="0",
        origin="/runs/a",
        origin_sha256="0",
        tier="full",
        step=1,
        stage="pretrain",
        tokenizer=tokenizer,
    )


def reference(fingerprint):
    return TokenizerReference(config=TokenizerConfig(type="byte"), fingerprint=fingerprint, vocab_size=257, eod=256)


def test_data_of_another_tokenizer_is_refused(byte_pair):
    same = provenance(reference(byte_pair.tokenizer.fingerprint))
    data = open_evaluation_data(str(byte_pair.prefix), same, DataConfig())
    assert (data.tokenizer, data.cut_at) == (same.tokenizer, None)
    with pytest.raises(UserError, match="made by another tokenizer"):
        open_evaluation_data(str(byte_pair.prefix), provenance(reference("f" * 64)), DataConfig())


def test_data_without_a_sidecar_is_taken_on_trust_unless_a_mask_needs_it(byte_pair):
    masked = DataConfig(document_mask=True)
    assert open_evaluation_data(str(byte_pair.prefix), provenance(None), masked).cut_at == 256
    sidecar_path(byte_pair.prefix).unlink()
    assert open_evaluation_data(str(byte_pair.prefix), provenance(None), DataConfig()).tokenizer is None
    with pytest.raises(UserError, match="tells the end-of-document token"):
        open_evaluation_data(str(byte_pair.prefix), provenance(None), masked)
    assert open_evaluation_data(str(byte_pair.prefix), provenance(reference("f" * 64)), masked).cut_at == 256


def test_a_sidecar_of_other_data_is_refused(byte_pair, write_byte_pair):
    sidecar = sidecar_path(byte_pair.prefix).read_bytes()
    other = write_byte_pair(["something else"], "other")
    sidecar_path(other.prefix).write_bytes(sidecar)
    with pytest.raises(UserError, match="describes another pair"):
        open_evaluation_data(str(other.prefix), provenance(None), DataConfig())
