"""A run's data: the training loader, the validation batches, and what both must agree on with the model."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_essh.config import RunConfig
from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.loader import StatefulLoader
from megatron_essh.data.packing import PackedDataset, validation_batches
from megatron_essh.data.sidecar import sidecar_path
from megatron_essh.data.tokenizer_reference import TokenizerReference, reference_to, tokenizer_of
from megatron_essh.errors import UserError
from megatron_essh.training.engine import Stage

FIRST_DOCUMENTS = 1000
"""Documents that a run with data.document_mask looks at for end-of-document tokens."""


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    loader: StatefulLoader
    """Training batches, int64 [global_batch, sequence_length + 1]."""
    validation: list[npt.NDArray[np.int64]]
    """Batches of up to micro_batch samples; none without data.validation."""
    tokenizer: TokenizerReference | None
    """What made the ids, where the config or the data tell it."""

    @property
    def eod(self) -> int | None:
        """The end-of-document token, where the tokenizer is known."""
        return None if self.tokenizer is None else self.tokenizer.eod


def open_run_data(config: RunConfig, stage: Stage) -> RunData:
    """Open the training pair and, where one is given, the validation pair.

    Refinement draws an order of its own, so that it does not repeat pretraining's first batches.

    Raises:
        UserError: data.train is missing; a pair cannot be read, is too short or holds a token outside the
            model's vocabulary; a tokenizer is larger than that, or is not the one that made the data; a sidecar is
            another pair's; data.document_mask has nothing to cut at; the run is too long for its order to fit
            into memory.
    """
    data, training, refinement = config.data, config.training, config.refinement
    if data.train is None:
        raise UserError(
            "data.train: not set; give the prefix of a token pair made by tools/preprocess_data.py, "
            "for instance --set data.train=out/data/corpus_text_document"
        )
    pair = IndexedDataset(data.train)
    pairs = [pair] if data.validation is None else [pair, IndexedDataset(data.validation)]
    tokenizer = _check_tokenizers(config, pairs)
    if data.document_mask and tokenizer is not None:
        _check_document_ends(pair, tokenizer.eod)
    if stage == "refine":
        seed, steps, global_batch = (training.seed + 1) % 2**32, refinement.steps, refinement.global_batch
    else:
        seed, steps, global_batch = training.seed, training.steps, training.global_batch
    length, entries = data.sequence_length, config.model.vocab_size
    samples = steps * global_batch
    needed = _order_bytes(pair, samples, length)
    try:
        if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError
        dataset = PackedDataset(data.train, length, seed, samples=samples, vocab_size=entries)
    except MemoryError:
        section = "refinement" if stage == "refine" else "training"
        raise UserError(
            f"{section}.steps: {steps:,} steps of {global_batch} samples: the order of {samples:,} samples needs "
            f"{needed / 2**30:,.1f} GiB of memory, more than there is; take fewer steps"
        ) from None
    validation = []
    if data.validation is not None:
        validation = validation_batches(
            data.validation, length, training.micro_batch, training.validation_batches, vocab_size=entries
        )
    return RunData(StatefulLoader(dataset, global_batch), validation, tokenizer)


def _order_bytes(pair: IndexedDataset, samples: int, length: int) -> int:
    """Memory that drawing the order takes at its peak: 4 bytes a document read, 20 a sample."""
    epochs = -(-samples * length // max(length, pair.tokens))  # a shorter pair is refused when it is packed
    return 4 * epochs * len(pair) + 20 * samples


def _check_document_ends(pair: IndexedDataset, eod: int) -> None:
    """Refuse a pair made without end-of-document tokens, in which a document mask would cut nothing."""
    first = range(min(pair.documents, FIRST_DOCUMENTS))
    if not any(eod in pair.document(i)[-1:] for i in first):
        raise UserError(
            f"data.document_mask: true, and none of the first {len(first)} documents of {pair.prefix}.bin ends with "
            f"the end-of-document token {eod}; make the pair again with tools/preprocess_data.py --append-eod, or set "
            "data.document_mask: false"
        )


def _check_tokenizers(config: RunConfig, pairs: list[IndexedDataset]) -> TokenizerReference | None:
    """The one tokenizer of config and pairs; None where neither names any."""
    known: list[tuple[str, TokenizerReference]] = []
    if config.data.tokenizer is not None:
        known.append(("data.tokenizer", reference_to(config.data.tokenizer)))
    for pair in pairs:
        recorded = tokenizer_of(pair)
        if recorded is not None:
            known.append((str(sidecar_path(pair.prefix)), recorded))
    for source, tokenizer in known:
        if tokenizer.vocab_size > config.model.vocab_size:
            raise UserError(
                f"{source}: the tokenizer has {tokenizer.vocab_size} ids and model.vocab_size is "
                f"{config.model.vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size}"
            )
        first_source, first = known[0]
        if tokenizer.fingerprint != first.fingerprint:
            raise UserError(
                f"{source}: made by another tokenizer ({tokenizer.fingerprint[:12]}) than "
                f"{first_source} tells ({first.fingerprint[:12]}); prepare both with one tokenizer"
            )
    return known[0][1] if known else None
