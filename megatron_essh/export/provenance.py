"""Where a model's tensors came from, as plain records: in export.json and in every tool's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_essh.data.tokenizer_reference import TokenizerReference


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
