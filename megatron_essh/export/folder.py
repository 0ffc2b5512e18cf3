"""The export folder: model.safetensors, config.yaml, export.json and, where it carries one, its tokenizer's file.

Written in a staging folder beside its place, synced and renamed: whole or not at all. export.json holds the hashes
of the other files, so that a folder which was damaged or edited afterwards is not taken for whole. The same source
and tier give the same bytes, export.json included. Knows nothing of how a tier is cut.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import yaml
from torch import Tensor

from megatron_essh.config import RunConfig, config_from_mapping, config_to_mapping, load_config
from megatron_essh.data.tokenizer_reference import TokenizerReference
from megatron_essh.errors import UserError
from megatron_essh.export.provenance import Provenance
from megatron_essh.export.staging import staging_folder
from megatron_essh.files import DISK_FULL, sync_folder
from megatron_essh.training.checkpoint.files import (
    file_sha256,
    read_tensors,
    write_synced,
    write_tensors,
)
from megatron_essh.version import __version__

MODEL_FILE, CONFIG_FILE, RECORD_FILE = "model.safetensors", "config.yaml", "export.json"
TOKENIZER_FILES = {"tiktoken": "ranks.tiktoken", "sentencepiece": "tokenizer.model", "huggingface": "tokenizer.json"}
"""What an export's copy of its tokenizer's file is called, by the tokenizer's type."""
FORMAT, VERSION = "megatron_essh export", 1


class DamagedExport(UserError):
    """What was an export once, and is not whole or not as recorded any more; the message says what is wrong and what
    to do.
    """

    def __init__(self, damage: str) -> None:
        super().__init__(f"{damage}; export it again")


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
    """With the path that the tokenizer's file had when the export was made."""
    tokenizer_sha256: str | None = None
    """Of the copy of that file in this folder; None: the export carries none."""

    def __post_init__(self) -> None:
        if self.tokenizer_sha256 is not None and self.tokenizer_file is None:
            raise ValueError("tokenizer_sha256: given, but tokenizer names none that has a file")

    @property
    def tokenizer_file(self) -> str | None:
        """Name of the tokenizer's file in the folder; None where there is nothing to carry or it is left out."""
        if self.tokenizer is None or self.tokenizer_sha256 is None:
            return None
        return TOKENIZER_FILES.get(self.tokenizer.config.type)

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of every file of the folder but export.json, by name."""
        result = {MODEL_FILE: self.sha256, CONFIG_FILE: self.config_sha256}
        if self.tokenizer_file is not None and self.tokenizer_sha256 is not None:
            result[self.tokenizer_file] = self.tokenizer_sha256
        return result

    def provenance(self, folder: Path) -> Provenance:
        """This export's own provenance, to whoever opens it; its tokenizer is the copy in the folder, if any."""
        tokenizer = self.tokenizer
        if tokenizer is not None and self.tokenizer_file is not None:
            copy = str(folder.resolve() / self.tokenizer_file)
            tokenizer = replace(tokenizer, config=replace(tokenizer.config, model=copy))
        return Provenance(
            kind="export",
            path=str(folder.resolve()),
            sha256=self.sha256,
            origin=self.source.origin,
            origin_sha256=self.source.origin_sha256,
            tier=self.tier,
            step=self.step,
            stage=self.stage,
            tokenizer=tokenizer,
        )


def write_export(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: RunConfig,
    tier: str,
    source: Provenance,
    *,
    tokenizer: bytes | None,
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
        tokenizer: content of the file of `source`'s tokenizer, for the export to carry; None carries none.
        check: is given the finished staging folder and raises when it is not right.
        overwrite: let another export, and all else in its folder, make way; what is no export never does.

    Returns:
        The record, and whether the folder was written; it is not where it already holds these very bytes.

    Raises:
        UserError: the place is taken, another process is writing there, or the disk is too full; nothing is left
            behind.
    """
    _check_place(folder)
    try:
        with staging_folder(folder) as staging:
            record = _write_files(staging / "new", tensors, config, tier, source, tokenizer)
            check(staging / "new")
            written = _publish(staging, folder, record, overwrite)
    except OSError as error:
        if error.errno in DISK_FULL:
            needed = (sum(t.numel() * t.element_size() for t in tensors.values()) + len(tokenizer or b"")) / 1e6
            raise UserError(
                f"{folder}: the disk is too full for an export of {needed:.2f} MB ({error.strerror}); make room, or "
                "give another folder"
            ) from None
        raise
    return record, written


def _write_files(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: RunConfig,
    tier: str,
    source: Provenance,
    tokenizer: bytes | None,
) -> ExportRecord:
    folder.mkdir()
    size, digest = write_tensors(folder / MODEL_FILE, tensors)
    text = yaml.safe_dump(config_to_mapping(config), sort_keys=False, allow_unicode=True)
    _, config_digest = write_synced(folder / CONFIG_FILE, [text.encode()])
    tokenizer_digest = None
    if tokenizer is not None:
        assert source.tokenizer is not None, "the file of a tokenizer that the source does not name"
        _, tokenizer_digest = write_synced(folder / TOKENIZER_FILES[source.tokenizer.config.type], [tokenizer])
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
        tokenizer_sha256=tokenizer_digest,
    )
    document = json.dumps(config_to_mapping(record), indent=1, ensure_ascii=False) + "\n"
    write_synced(folder / RECORD_FILE, [document.encode()])
    sync_folder(folder)
    return record


def _check_place(folder: Path) -> None:
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"{place}: is a file; give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file():
        raise UserError(f"{folder}: holds something that is no export; give another folder")


def _publish(staging: Path, folder: Path, record: ExportRecord, overwrite: bool) -> bool:
    if folder.is_dir() and any(folder.iterdir()):
        if _same_files(staging / "new", folder, (RECORD_FILE, *record.hashes)):
            return False
        if not overwrite:
            raise UserError(f"{folder}: another export is already there; give --overwrite or another folder")
        # Renamed before it is deleted, so that a crash leaves no half of it under an export's name.
        os.replace(folder, staging / "removed")
    os.replace(staging / "new", folder)
    sync_folder(folder.parent)
    return True


def _same_files(first: Path, second: Path, names: Iterable[str]) -> bool:
    return all((second / name).is_file() and file_sha256(first / name) == file_sha256(second / name) for name in names)


def read_record(folder: Path) -> ExportRecord:
    """An export's record, of a folder whose other files may still be damaged (see `find_damage`).

    Raises:
        DamagedExport: export.json is no whole record.
        UserError: the folder is no export, or one of another format.
    """
    file = folder / RECORD_FILE
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give the folder of an export")
    try:
        mapping = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder}: not an export, or an unfinished one: it has no {RECORD_FILE}; export it again, or give "
            "the folder of an export"
        ) from None
    except OSError as error:
        raise DamagedExport(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DamagedExport(f"{file}: not valid JSON ({error})") from None
    if not isinstance(mapping, dict) or mapping.get("format") != FORMAT:
        raise UserError(f"{file}: not the record of a megatron_essh export; give the folder of an export")
    if mapping.get("version") != VERSION:
        raise UserError(
            f"{file}: version {mapping.get('version')!r}, and this package reads version {VERSION}; update the "
            "package, or export again with this one"
        )
    try:
        return config_from_mapping(ExportRecord, mapping, str(file))
    except UserError as error:
        raise DamagedExport(str(error)) from None


def find_damage(folder: Path, record: ExportRecord, *, tokenizer: bool = True) -> DamagedExport | None:
    """What is wrong with the files that `record` describes, or None when they are as recorded.

    `tokenizer` False leaves out the copy of the tokenizer's file.
    """
    for name, digest in record.hashes.items():
        if name == record.tokenizer_file and not tokenizer:
            continue
        file = folder / name
        if not file.is_file():
            return DamagedExport(f"{file}: missing")
        try:
            if name == MODEL_FILE and file.stat().st_size != record.bytes:
                return DamagedExport(f"{file}: {file.stat().st_size} bytes where {RECORD_FILE} records {record.bytes}")
            if file_sha256(file) != digest:
                return DamagedExport(f"{file}: changed since the export (its SHA-256 is not the one in {RECORD_FILE})")
        except OSError as error:
            return DamagedExport(f"{file}: cannot be read ({error.strerror})")
    return None


def read_export(
    folder: Path, *, verify: bool = True, tokenizer: bool = True
) -> tuple[dict[str, Tensor], RunConfig, ExportRecord]:
    """An export's tensors (on the CPU), config and record.

    Args:
        verify: False skips sizes and hashes, for a caller that reports on them itself.
        tokenizer: False lets the copy of the tokenizer's file be missing or changed, for a caller that does not read
            it.

    Raises:
        DamagedExport: anything is missing, truncated, changed or in disagreement.
        UserError: the folder is no export, or one of another format.
    """
    record = read_record(folder)
    damage = find_damage(folder, record, tokenizer=tokenizer) if verify else None
    if damage is not None:
        raise damage
    try:
        config, tensors = load_config(folder / CONFIG_FILE), read_tensors(folder / MODEL_FILE)
    except OSError as error:
        raise DamagedExport(f"{folder}: cannot be read ({error.strerror or error})") from None
    except UserError as error:
        raise DamagedExport(str(error)) from None
    recorded, actual = (record.channels, record.ff_width), (config.model.channels, config.model.ff_width)
    if recorded != actual:
        raise DamagedExport(
            f"{folder / CONFIG_FILE}: {actual[0]} channels and {actual[1]} feed-forward units; {RECORD_FILE} "
            f"records {recorded[0]} and {recorded[1]}"
        )
    return tensors, config, record
