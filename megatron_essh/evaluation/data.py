"""Opening a token pair for the evaluation of a model, and holding the two to each other."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_essh.config import DataConfig
from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.tokenizer_reference import TokenizerReference, tokenizer_of
from megatron_essh.errors import UserError
from megatron_essh.export.provenance import Provenance


@dataclass(frozen=True)
class EvaluationData:
    """A pair that fits a model."""

    dataset: IndexedDataset
    tokenizer: TokenizerReference | None
    """What made the ids, where the model or the data tell it."""
    cut_at: int | None
    """The end-of-document token, for a model trained with data.document_mask; None for any other."""


def open_evaluation_data(prefix: str, provenance: Provenance, trained_on: DataConfig) -> EvaluationData:
    """Open the pair `prefix` for a model.

    Args:
        prefix: of the token pair.
        provenance: of the model.
        trained_on: the data section of the model's config.

    Raises:
        UserError: the pair cannot be read, its sidecar is another pair's, it was made by another tokenizer than
            the model was trained with, or a document mask cannot be drawn for want of a tokenizer.
    """
    dataset = IndexedDataset(prefix)
    made_with = tokenizer_of(dataset)
    known = provenance.tokenizer
    if made_with is not None and known is not None and made_with.fingerprint != known.fingerprint:
        raise UserError(
            f"{prefix}: made by another tokenizer (fingerprint {made_with.fingerprint[:12]}) than the one that "
            f"{provenance.path} was trained with ({known.fingerprint[:12]}); prepare the text with that one"
        )
    tokenizer = known or made_with
    if not trained_on.document_mask:
        return EvaluationData(dataset, tokenizer, None)
    if tokenizer is None:
        raise UserError(
            f"{provenance.path}: trained with data.document_mask, but neither it nor {prefix} tells the "
            "end-of-document token; prepare the data with tools/preprocess_data.py"
        )
    return EvaluationData(dataset, tokenizer, tokenizer.eod)
