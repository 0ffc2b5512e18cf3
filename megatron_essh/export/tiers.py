"""Exporting tiers of a trained model: cut, write, read back strictly, count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import parse_capacity
from megatron_essh.errors import UserError
from megatron_essh.export.folder import ExportRecord, read_export, write_export
from megatron_essh.export.loading import build_model, check_tensors, open_tokenizer
from megatron_essh.export.provenance import Provenance
from megatron_essh.export.slice import slice_config, slice_tensors
from megatron_essh.model.accounting import parameter_counts


def export_tier(
    tensors: Mapping[str, Tensor],
    config: RunConfig,
    source: Provenance,
    tier: str,
    folder: Path,
    *,
    tokenizer: bytes | None = None,
    overwrite: bool = False,
) -> tuple[ExportRecord, bool]:
    """Cut `tier` out of a trained model and write it to `folder` as a standalone model (section 6).

    What was written is read back before it gets its name: hashes, strict names and shapes, and the parameter
    count against the closed form.

    Args:
        tensors, config, source: as `model.loading.open_tensors` returns them; an export will do.
        tier: a tier's name, `full` or `K,n`; names resolve against the family's full sizes.
        folder: the export's place.
        tokenizer: what the export is to carry of its tokenizer, as `tokenizer_content` reads it; None: nothing.
        overwrite: let a different export there make way.

    Returns:
        The export's record, and whether the folder was written: not where it already holds these very bytes.

    Raises:
        UserError: the tier is unknown or more than the source holds, the tensors are not those of the config's
            model, the place is taken or another process is writing there, the disk is full.
    """
    try:
        capacity = parse_capacity(tier, config.model, config.elastic)
    except UserError as error:
        raise UserError(f"{source.path}: {error}") from None
    check_tensors(tensors, config.model, source.path)
    standalone = dataclasses.replace(config, model=slice_config(config.model, capacity))
    cut = slice_tensors(tensors, config.model, capacity)
    return write_export(folder, cut, standalone, tier, source, tokenizer=tokenizer, check=_check, overwrite=overwrite)


def tokenizer_content(source: Provenance, config: RunConfig) -> bytes | None:
    """The tokenizer's file of a trained model, for its exports to carry; None where none is known or it has no file.

    Args:
        source, config: as `model.loading.open_tensors` returns them.

    Raises:
        UserError: the file cannot be read, or is not the tokenizer that the model was trained with.
    """
    tokenizer = open_tokenizer(source.tokenizer, entries=config.model.vocab_size)
    if tokenizer is None or tokenizer.config.model is None:
        return None
    return Path(tokenizer.config.model).read_bytes()


def _check(folder: Path) -> None:
    tensors, config, record = read_export(folder)
    model = build_model(tensors, config.model, str(folder))
    counted = sum(parameter.numel() for parameter in model.parameters())
    expected = parameter_counts(config.model).total
    assert counted == record.parameters == expected, (counted, record.parameters, expected)
