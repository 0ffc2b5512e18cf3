"""A run's data: the training loader, the validation batches, and what both must agree on with the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_essh.config import RunConfig
from megatron_essh.data.loader import StatefulLoader
from megatron_essh.data.packing import PackedDataset, validation_batches
from megatron_essh.data.sidecar import read_sidecar, sidecar_path
from megatron_essh.data.tokenizers import build_tokenizer
from megatron_essh.errors import UserError
from megatron_essh.training.engine import Stage


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    loader: StatefulLoader
    """Training batches, int64 [global_batch, sequence_length + 1]."""
    validation: list[npt.NDArray[np.int64]]
    """Batches of up to micro_batch samples; none without data.validation."""
    eod: int | None
    """The end-of-document token, where the config or the data tell it."""


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer's figures, and where they were read."""

    source: str
    fingerprint: str
    size: int
    eod: int


def open_run_data(config: RunConfig, stage: Stage) -> RunData:
    """Open the training pair and, where one is given, the validation pair.

    Refinement draws an order of its own, so that it does not repeat pretraining's first batches.

    Raises:
        UserError: data.train is missing; a pair cannot be read, is too short or holds a token outside the
            model's vocabulary; a tokenizer is larger than that, or is not the one that made the data.
    """
    data, training, refinement = config.data, config.training, config.refinement
    if data.train is None:
        raise UserError(
            "data.train: not set; give the prefix of a token pair made by tools/preprocess_data.py, "
            "for instance --set data.train=out/data/corpus_text_document"
        )
    vocabulary = _check_tokenizers(config, [data.train] + ([data.validation] if data.validation else []))
    if stage == "refine":
        seed, steps, global_batch = (training.seed + 1) % 2**32, refinement.steps, refinement.global_batch
    else:
        seed, steps, global_batch = training.seed, training.steps, training.global_batch
    length, entries = data.sequence_length, config.model.vocab_size
    dataset = PackedDataset(data.train, length, seed, samples=steps * global_batch, vocab_size=entries)
    validation = []
    if data.validation is not None:
        validation = validation_batches(
            data.validation, length, training.micro_batch, training.validation_batches, vocab_size=entries
        )
    return RunData(StatefulLoader(dataset, global_batch), validation, None if vocabulary is None else vocabulary.eod)


def _check_tokenizers(config: RunConfig, prefixes: list[str]) -> _Vocabulary | None:
    """The one tokenizer of config and pairs; None where neither names any."""
    known = []
    if config.data.tokenizer is not None:
        built = build_tokenizer(config.data.tokenizer)
        known.append(_Vocabulary("data.tokenizer", built.fingerprint, built.vocab_size, built.eod))
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is not None:
            source = str(sidecar_path(prefix))
            known.append(_Vocabulary(source, sidecar["fingerprint"], sidecar["vocab_size"], sidecar["eod"]))
    for vocabulary in known:
        if vocabulary.size > config.model.vocab_size:
            raise UserError(
                f"{vocabulary.source}: the tokenizer has {vocabulary.size} ids and model.vocab_size is "
                f"{config.model.vocab_size}; set model.vocab_size to at least {vocabulary.size}"
            )
        if vocabulary.fingerprint != known[0].fingerprint:
            raise UserError(
                f"{vocabulary.source}: made by another tokenizer ({vocabulary.fingerprint[:12]}) than "
                f"{known[0].source} tells ({known[0].fingerprint[:12]}); prepare both with one tokenizer"
            )
    return known[0] if known else None
