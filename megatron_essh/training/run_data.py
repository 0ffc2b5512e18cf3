"""A run's data: the training loader, the validation batches, and what both must agree on with the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_essh.config import RunConfig
from megatron_essh.data.batch_schedule import BatchSchedule
from megatron_essh.data.blend import BlendedDataset, blended_validation
from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.loader import StatefulLoader
from megatron_essh.data.packing import DatasetPart, PackedDataset, validation_batches
from megatron_essh.data.sampling import split_documents
from megatron_essh.data.sidecar import sidecar_path
from megatron_essh.data.tokenizer_reference import TokenizerReference, reference_to, tokenizer_of
from megatron_essh.device import pick_device
from megatron_essh.errors import UserError
from megatron_essh.training.engine import Stage

FIRST_DOCUMENTS = 1000
"""Documents that a run with data.document_mask looks at for end-of-document tokens."""


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    loader: StatefulLoader
    """Training batches, int64 [batch of the step, sequence_length + 1]."""
    validation: list[npt.NDArray[np.int64]]
    """Batches of up to micro_batch samples; none without data.validation and data.split."""
    tokenizer: TokenizerReference | None
    """What made the ids, where the config or the data tell it."""
    validation_name: str
    """What the validation batches are of."""

    @property
    def eod(self) -> int | None:
        """The end-of-document token, where the tokenizer is known."""
        return None if self.tokenizer is None else self.tokenizer.eod


def open_run_data(config: RunConfig, stage: Stage) -> RunData:
    """Open the training pairs and, where there are any, the validation documents.

    Refinement draws an order of its own, so that it does not repeat pretraining's first batches.

    Raises:
        UserError: neither data.train nor data.blend is set; a pair cannot be read, is too short or holds a token
            outside the model's vocabulary; a tokenizer is larger than that, or is not the one that made the data; a
            sidecar is another pair's; data.document_mask has nothing to cut at; the run is too long for its order to
            fit into memory.
    """
    data, training, refinement = config.data, config.training, config.refinement
    prefixes = data.blend or ((data.train,) if data.train is not None else ())
    if not prefixes:
        raise UserError(
            "data.train: not set; give the prefix of a token pair made by tools/preprocess_data.py, "
            "for instance --set data.train=out/data/corpus_text_document"
        )
    pairs = [IndexedDataset(prefix) for prefix in prefixes]
    held_out = [] if data.validation is None else [IndexedDataset(data.validation)]
    tokenizer = _check_tokenizers(config, [*pairs, *held_out])
    if data.document_mask and tokenizer is not None:
        for pair in pairs:
            _check_document_ends(pair, tokenizer.eod)
    if stage == "refine":
        seed, steps = (training.seed + 1) % 2**32, refinement.steps
        schedule = BatchSchedule.constant(refinement.global_batch)
    else:
        seed, steps = training.seed, training.steps
        schedule = BatchSchedule.of_pretraining(config)
    parts = [_split(pair, data.split)[0] for pair in pairs]
    loader = StatefulLoader(
        _training_samples(config, stage, parts, seed, steps, schedule),
        schedule,
        workers=data.workers,
        pinned=pick_device(training.device, "training.device:").type == "cuda",
    )
    validation: list[npt.NDArray[np.int64]] = []
    name = str(data.validation)
    if held_out:
        parts = [DatasetPart(held_out[0])]
    elif data.split and data.split[1] > 0:
        parts = [_split(pair, data.split)[1] for pair in pairs]
        name = "the documents that data.split holds out"
    if held_out or (data.split and data.split[1] > 0):
        shape = (data.sequence_length, training.micro_batch, training.validation_batches)
        if len(parts) == 1:
            validation = validation_batches(parts[0], *shape, vocab_size=config.model.vocab_size)
        else:
            weights = data.blend_weights or None
            validation = blended_validation(parts, weights, *shape, vocab_size=config.model.vocab_size)
    return RunData(loader, validation, tokenizer, name)


def _split(pair: IndexedDataset, shares: Sequence[float]) -> list[DatasetPart]:
    """Training, validation and test documents of a pair; one part of all where no shares are given."""
    return [DatasetPart(pair, part) for part in split_documents(pair.documents, shares or (1.0,))]


def _training_samples(
    config: RunConfig, stage: Stage, parts: list[DatasetPart], seed: int, steps: int, schedule: BatchSchedule
) -> PackedDataset | BlendedDataset:
    data, length = config.data, config.data.sequence_length
    cache = None if data.index_cache is None else Path(data.index_cache)
    entries = config.model.vocab_size
    samples = schedule.samples_before(steps)
    needed = _order_bytes(parts, samples, length)
    try:
        if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError
        if not data.blend:
            return PackedDataset(parts[0], length, seed, samples=samples, vocab_size=entries, cache=cache)
        weights = data.blend_weights or None
        return BlendedDataset(parts, weights, length, seed, samples, vocab_size=entries, cache=cache)
    except MemoryError:
        section = "refinement" if stage == "refine" else "training"
        raise UserError(
            f"{section}.steps: {steps:,} steps of {schedule.stages[-1].batch} samples: the order of {samples:,} "
            f"samples needs {needed / 2**30:,.1f} GiB of memory, more than there is; take fewer steps"
        ) from None


def _order_bytes(parts: list[DatasetPart], samples: int, length: int) -> int:
    """Memory that drawing the order takes at its peak, roughly: 4 bytes a document read and 8 once, 20 a sample, and
    10 more a sample of a blend."""
    tokens = max(length, sum(part.tokens for part in parts))  # a shorter pair is refused when it is packed
    epochs = -(-samples * length // tokens)
    sequences = sum(part.sequences[1] - part.sequences[0] for part in parts)
    return (4 * epochs + 8) * sequences + (20 if len(parts) == 1 else 30) * samples


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
