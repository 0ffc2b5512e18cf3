"""Where a model's tensors came from, as plain records: in export.json and in every tool's report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_essh.config import TokenizerConfig, config_from_mapping
from megatron_essh.data.sidecar import read_sidecar, sidecar_path


@dataclass(frozen=True, kw_only=True)
class TokenizerReference:
    """Which tokenizer made the ids that a model was trained on. Its file stays where it is."""

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


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Which tensors these are."""

    kind: Literal["checkpoint", "export"]
    path: str
    """Absolute path of the folder."""
    sha256: str
    """Of its model.safetensors."""
    origin: str
    """Absolute path of the checkpoint that the tensors come from: the path itself, or what was cut."""
    origin_sha256: str
    """Of that checkpoint's model.safetensors: the same for all that was cut out of one model."""
    tier: str
    """`full` for a checkpoint; what an export was cut to."""
    step: int
    """Optimizer steps of `stage` behind the tensors."""
    stage: str
    """`pretrain` or `refine`."""
    tokenizer: TokenizerReference | None
    """None where neither the run's config nor its data names one."""
