"""The export folder: model.safetensors, config.yaml, export.json; written whole or not at all.

Written under a temporary name beside its place, synced and renamed. export.json holds the hashes of the other
two, so that a folder which was damaged or edited afterwards is not taken for whole. The same source and tier
give the same bytes, export.json included. Knows nothing of how a tier is cut.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import yaml
from torch import Tensor

from megatron_essh.config import RunConfig, config_from_mapping, config_to_mapping, load_config
from megatron_essh.data.tokenizer_reference import TokenizerReference
from megatron_essh.errors import UserError
from megatron_essh.export.provenance import Provenance
from megatron_essh.files import DISK_FULL, sync_folder
from megatron_essh.training.checkpoint.files import (
    file_sha256,
    read_tensors,
    write_synced,
    write_tensors,
)
from megatron_essh.version import __version__

MODEL_FILE, CONFIG_FILE, RECORD_FILE = "model.safetensors", "config.yaml", "export.json"
FORMAT, VERSION = "megatron_essh export", 1


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """The model that an export was cut from; fields as in `Provenance`."""

    kind: Literal["checkpoint", "export"]
    path: str
    sha256: str
    tier: str
    origin: str
    origin_sha256: str


@dataclass(frozen=True, kw_only=True)
class ExportRecord:
    """What export.json says of the folder it lies in."""

    format: str
    version: int
    tier: str
    """What was asked for: a tier's name, `full` or `K,n`."""
    channels: int
    ff_width: int
    parameters: int
    bytes: int
    """Size of model.safetensors."""
    sha256: str
    """Of model.safetensors."""
    config_sha256: str
    """Of config.yaml."""
    source: ExportSource
    """The model that this one was cut from."""
    step: int
    """Optimizer steps of `stage` behind the tensors."""
    stage: str
    package_version: str
    """Of the package that wrote the export."""
    tokenizer: TokenizerReference | None

    def provenance(self, folder: Path) -> Provenance:
        """This export's own provenance, to whoever opens it."""
        return Provenance(
            kind="export",
            path=str(folder.resolve()),
            sha256=self.sha256,
            origin=self.source.origin,
            origin_sha256=self.source.origin_sha256,
            tier=self.tier,
            step=self.step,
            stage=self.stage,
            tokenizer=self.tokenizer,
        )


def write_export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: RunConfig,
    tier: str,
    source: Provenance,
    *,
    check: Callable[[Path], None],
    overwrite: bool = False,
) -> tuple[ExportRecord, bool]:
    """Write a standalone model as `folder`.

    Args:
        folder: the export's place; its parent is made when missing.
        tensors: the model's parameters by their plain names.
        config: its run's config, whose `model` is the standalone model.
        tier: what was asked for.
        source: the model that the tensors were cut from.
        check: is given the finished temporary folder and raises when it is not right.
        overwrite: let another export, and all else in its folder, make way; what is no export never does.

    Returns:
        The record, and whether the folder was written; it is not where it already holds these very bytes.

    Raises:
        UserError: the place is taken, or the disk is too full; nothing is left behind.
    """
    _check_place(folder)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        size, digest = write_tensors(temporary / MODEL_FILE, tensors)
        text = yaml.safe_dump(config_to_mapping(config), sort_keys=False, allow_unicode=True)
        _, config_digest = write_synced(temporary / CONFIG_FILE, [text.encode()])
        record = ExportRecord(
            format=FORMAT,
            version=VERSION,
            tier=tier,
            channels=config.model.channels,
            ff_width=config.model.ff_width,
            parameters=sum(t.numel() for t in tensors.values()),
            bytes=size,
            sha256=digest,
            config_sha256=config_digest,
            source=ExportSource(**{f.name: getattr(source, f.name) for f in fields(ExportSource)}),
            step=source.step,
            stage=source.stage,
            package_version=__version__,
            tokenizer=source.tokenizer,
        )
        document = json.dumps(config_to_mapping(record), indent=1, ensure_ascii=False) + "\n"
        write_synced(temporary / RECORD_FILE, [document.encode()])
        sync_folder(temporary)
        check(temporary)
        written = _publish(temporary, folder, overwrite)
    except OSError as error:
        if error.errno in DISK_FULL:
            needed = sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6
            raise UserError(
                f"{folder}: the disk is too full for an export of {needed:.2f} MB ({error.strerror})"
            ) from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record, written


def _check_place(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file():
        raise UserError(f"{folder}: holds something that is no export; give another folder")


def _publish(temporary: Path, folder: Path, overwrite: bool) -> bool:
    if folder.is_dir() and any(folder.iterdir()):
        if _same_files(temporary, folder):
            return False
        if not overwrite:
            raise UserError(f"{folder}: another export is already there; give --overwrite or another folder")
        # Renamed before it is deleted, so that a crash leaves no half of it under an export's name.
        doomed = temporary.with_name(f"{temporary.name}-removed")
        os.replace(folder, doomed)
        os.replace(temporary, folder)
        shutil.rmtree(doomed)
    else:
        os.replace(temporary, folder)
    sync_folder(folder.parent)
    return True


def _same_files(first: Path, second: Path) -> bool:
    return all(
        (second / name).is_file() and file_sha256(first / name) == file_sha256(second / name)
        for name in (MODEL_FILE, CONFIG_FILE, RECORD_FILE)
    )


def read_record(folder: Path) -> ExportRecord:
    """An export's record, of a folder whose other files may still be damaged (see `find_damage`).

    Raises:
        UserError: the folder or its export.json is missing, unreadable or of another format.
    """
    file = folder / RECORD_FILE
    if not folder.is_dir():
        raise UserError(f"{folder}: no such export folder")
    try:
        mapping = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder}: not an export, or an unfinished one: it has no {RECORD_FILE}") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(mapping, dict) or mapping.get("format") != FORMAT:
        raise UserError(f"{file}: not the record of a megatron_essh export")
    if mapping.get("version") != VERSION:
        raise UserError(f"{file}: version {mapping.get('version')!r}; this package reads version {VERSION}")
    return config_from_mapping(ExportRecord, mapping, str(file))


def find_damage(folder: Path, record: ExportRecord) -> str | None:
    """What is wrong with the files that `record` describes, in words, or None when they are as recorded."""
    for name, digest in ((MODEL_FILE, record.sha256), (CONFIG_FILE, record.config_sha256)):
        file = folder / name
        if not file.is_file():
            return f"{file}: missing"
        if name == MODEL_FILE and file.stat().st_size != record.bytes:
            return f"{file}: {file.stat().st_size} bytes where {RECORD_FILE} records {record.bytes}"
        if file_sha256(file) != digest:
            return f"{file}: changed since the export (its SHA-256 is not the one in {RECORD_FILE})"
    return None


def read_export(folder: Path, *, verify: bool = True) -> tuple[dict[str, Tensor], RunConfig, ExportRecord]:
    """An export's tensors (on the CPU), config and record.

    `verify` False skips sizes and hashes, for a caller that reports on them itself.

    Raises:
        UserError: anything is missing, foreign, truncated, changed or in disagreement.
    """
    record = read_record(folder)
    damage = find_damage(folder, record) if verify else None
    if damage is not None:
        raise UserError(damage)
    config = load_config(folder / CONFIG_FILE)
    recorded, actual = (record.channels, record.ff_width), (config.model.channels, config.model.ff_width)
    if recorded != actual:
        raise UserError(
            f"{folder / CONFIG_FILE}: {actual[0]} channels and {actual[1]} feed-forward units; {RECORD_FILE} "
            f"records {recorded[0]} and {recorded[1]}"
        )
    return read_tensors(folder / MODEL_FILE), config, record
