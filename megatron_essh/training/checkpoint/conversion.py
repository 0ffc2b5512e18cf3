"""Checkpoints from and to other forms: one safetensors file of plain names, and DeepSpeed's own folders.

A tensor at a time is in memory, whichever way. What a checkpoint becomes elsewhere and back is the very checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_essh.config import RunConfig, config_to_mapping
from megatron_essh.data.tokenizer_reference import recorded_tokenizer, reference_to
from megatron_essh.errors import UserError
from megatron_essh.files import sync_folder
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.training.checkpoint.deepspeed_folder import DeepSpeedState
from megatron_essh.training.checkpoint.files import Layout, file_chunks, map_tensors, write_synced
from megatron_essh.training.checkpoint.manifest import MODEL_PREFIX, STATE_FILE, read_manifest
from megatron_essh.training.checkpoint.pieces import Piece, Span, Want, copy_overlap
from megatron_essh.training.checkpoint.reading import check_file, read_parts
from megatron_essh.training.checkpoint.writer import save_checkpoint, save_parts
from megatron_essh.version import __version__

_SHOWN = 3
_THEIR_CONFIG = "give the config of the run that they are of"


def checkpoint_to_file(path: Path, file: Path, *, everything: bool = False) -> int:
    """Write the parameters of the checkpoint `path`, of any layout, as one safetensors file; returns its bytes.

    Args:
        everything: all other tensors too, and the checkpoint's values in the metadata, so that `file_to_checkpoint`
            gives the checkpoint back.

    Raises:
        UserError: the checkpoint is damaged, or the file is already there.
    """
    manifest = read_manifest(path)
    prefix = "" if everything else MODEL_PREFIX
    for name in (*([STATE_FILE] if everything else []), *manifest.files_with([prefix])):
        check_file(manifest, name)
    entries = [e for name in manifest.files_with([prefix]) for e in manifest.entries(name) if e.name.startswith(prefix)]
    specs = {e.name.removeprefix(MODEL_PREFIX): (e.dtype, e.shape) for e in entries}
    saved = {e.name.removeprefix(MODEL_PREFIX): e.name for e in entries}
    metadata = None
    if everything:
        others = sorted(plain for plain, name in saved.items() if plain == name)
        metadata = {"state": (path / STATE_FILE).read_text(), "others": json.dumps(others), "step": str(manifest.step)}

    def tensor(plain: str) -> Tensor:
        return read_parts(manifest, {saved[plain]: Want()})[saved[plain]]

    return _write_file(file, Layout(specs, metadata), tensor)


def deepspeed_to_file(state: DeepSpeedState, file: Path) -> int:
    """Write DeepSpeed's fp32 parameters as one safetensors file of plain names; returns its bytes."""
    pieces: dict[str, list[Piece]] = {}
    for part in state.parts:
        for name, piece in part.items():
            if name.startswith(MODEL_PREFIX):
                pieces.setdefault(name.removeprefix(MODEL_PREFIX), []).append(piece)
    layout = Layout({name: (found[0].tensor.dtype, found[0].shape) for name, found in pieces.items()})

    def tensor(name: str) -> Tensor:
        found = pieces[name]
        whole = torch.empty(found[0].shape, dtype=found[0].tensor.dtype)
        target = Span.of(found[0].shape)
        copied = sum(copy_overlap(p.tensor.reshape(-1), p.span, whole.view(-1), target) for p in found)
        if copied != whole.numel():
            raise UserError(
                f"{state.path}: {name}: {copied} of its {whole.numel()} elements are there; copy the files of all ranks"
            )
        return whole

    return _write_file(file, layout, tensor)


def file_to_checkpoint(file: Path, folder: Path, config: RunConfig | None, *, stage: str, step: int) -> Path:
    """Make a checkpoint in `folder` of a safetensors file; returns its path.

    Args:
        file: parameters under their plain names, or what `checkpoint_to_file` wrote with `everything`.
        config: of the run that the parameters are of; None takes the values in the file.
        stage: "pretrain" or "refine"; with `config`.
        step: optimizer steps behind the parameters; with `config`.

    Raises:
        UserError: the file is none, has no values and no config is given, or not the tensors of the config's model.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a safetensors file")
    tensors, metadata = map_tensors(file)
    try:
        others = set(json.loads(metadata.get("others", "[]")))
        values: dict[str, Any] | None = json.loads(metadata["state"]) if "state" in metadata else None
        if values is not None and config is None:
            step = int(values["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: its metadata is not this program's ({error!r}); write it again with to-file --everything"
        ) from None
    named = {name if name in others else MODEL_PREFIX + name: tensor for name, tensor in tensors.items()}
    if config is not None:
        named = {name: tensor for name, tensor in named.items() if name.startswith(MODEL_PREFIX)}
        check_parameters({name: tuple(tensor.shape) for name, tensor in named.items()}, config, str(file))
        values = converted_values(config, stage, step, file)
    elif values is None:
        raise UserError(f"{file}: holds parameters alone; give --config, the config of the run that they are of")
    return save_checkpoint(folder, step, named, values, keep_last=1 << 62)


def deepspeed_to_checkpoint(state: DeepSpeedState, folder: Path, config: RunConfig, *, stage: str) -> Path:
    """Make a checkpoint in `folder` of a DeepSpeed folder of `config`'s model: parameters and moments, piece by piece.

    Raises:
        UserError: the tensors are not those of the config's model.
    """
    shapes = {name: piece.shape for part in state.parts for name, piece in part.items()}
    check_parameters({n: s for n, s in shapes.items() if n.startswith(MODEL_PREFIX)}, config, str(state.path))
    values = converted_values(config, stage, state.step, state.path)
    return save_parts(folder, state.step, state.parts, values | {"engine": {"updates": state.updates}})


def check_parameters(shapes: Mapping[str, tuple[int, ...]], config: RunConfig, where: str) -> None:
    """Raise UserError unless these, `model.NAME` -> shape, are the parameters of the config's model."""
    with torch.device("meta"):
        parameters = LanguageModel(config.model).named_parameters()
    expected = {MODEL_PREFIX + name: tuple(parameter.shape) for name, parameter in parameters}
    missing, unknown = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or unknown:
        found = [f"without {n.removeprefix(MODEL_PREFIX)}" for n in missing[:_SHOWN]]
        found += [f"with {n.removeprefix(MODEL_PREFIX)}" for n in unknown[:_SHOWN]]
        raise UserError(
            f"{where}: not the parameters of the config's model: {', '.join(found)} "
            f"({len(missing)} missing, {len(unknown)} unknown); {_THEIR_CONFIG}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise UserError(
                f"{where}: {name.removeprefix(MODEL_PREFIX)}: shape {shapes[name]}; the config says {shape}; "
                f"{_THEIR_CONFIG}"
            )


def converted_values(config: RunConfig, stage: str, step: int, source: Path) -> dict[str, Any]:
    """What state.json says of a model that came from elsewhere: enough to open, export and refine it."""
    data = config.data
    tokenizer = None if data.train is None else recorded_tokenizer(data.train)
    if data.tokenizer is not None:
        tokenizer = reference_to(data.tokenizer)
    return {
        "stage": stage,
        "step": step,
        "package_version": __version__,
        "config": config_to_mapping(config),
        "tokenizer": None if tokenizer is None else config_to_mapping(tokenizer),
        "converted_from": str(source.resolve()),
    }


def _write_file(file: Path, layout: Layout, tensor: Callable[[str], Tensor]) -> int:
    """Write a safetensors file that appears only whole."""
    if file.exists():
        raise UserError(f"{file}: is already there; remove it or give another name")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        size, _ = write_synced(temporary, file_chunks(layout, tensor), hashed=False)
        temporary.replace(file)
        sync_folder(file.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return size
