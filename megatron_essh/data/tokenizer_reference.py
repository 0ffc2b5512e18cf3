"""Which tokenizer stands behind token ids: what pairs, checkpoints and exports record of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_essh.config import TokenizerConfig, config_from_mapping
from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.sidecar import read_sidecar, sidecar_path
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TokenizerReference:
    """Which tokenizer made the ids that a model was trained on."""

    config: TokenizerConfig
    """Type and file; the path is absolute."""
    fingerprint: str
    """SHA-256 over what the tokenizer does, as `data.tokenizers` computes it."""
    vocab_size: int
    """Entries; a model's vocabulary may be padded beyond it."""
    eod: int
    """Id of the end-of-document token."""


def recorded_tokenizer(prefix: str | Path) -> TokenizerReference | None:
    """The tokenizer that made the token pair `prefix`, as its sidecar records it; None where there is none.

    Raises:
        UserError: the sidecar cannot be read.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is None:
        return None
    return TokenizerReference(
        config=config_from_mapping(TokenizerConfig, sidecar["tokenizer"], str(sidecar_path(prefix))),
        fingerprint=sidecar["fingerprint"],
        vocab_size=sidecar["vocab_size"],
        eod=sidecar["eod"],
    )


def tokenizer_of(pair: IndexedDataset) -> TokenizerReference | None:
    """The same of an open pair, whose sidecar is held to describe it and no other.

    Raises:
        UserError: the sidecar cannot be read or is another pair's.
    """
    sidecar = read_sidecar(pair.prefix)
    if sidecar is not None and sidecar["data_fingerprint"] != pair.fingerprint:
        raise UserError(
            f"{sidecar_path(pair.prefix)}: describes another pair than {pair.prefix}.bin; remove it, or make the pair "
            "again"
        )
    return recorded_tokenizer(pair.prefix)


def reference_to(config: TokenizerConfig) -> TokenizerReference:
    """The reference to a tokenizer that can be built here.

    Raises:
        UserError: it cannot.
    """
    tokenizer = build_tokenizer(config)
    place = None if config.model is None else str(Path(config.model).resolve())
    return TokenizerReference(
        config=replace(config, model=place),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
    )


def build_recorded(reference: TokenizerReference) -> Tokenizer:
    """The tokenizer that `reference` records, held to be still the same.

    Raises:
        UserError: its file is missing or cannot be read, or it changed since.
    """
    tokenizer = build_tokenizer(reference.config)
    if tokenizer.fingerprint != reference.fingerprint:
        raise UserError(
            f"{reference.config.model or reference.config.type}: changed since the ids were made (fingerprint "
            f"{tokenizer.fingerprint[:12]}, recorded {reference.fingerprint[:12]}); name the file that made them"
        )
    return tokenizer
