"""Saving, finding, verifying, loading and pruning checkpoint folders.

The order of a save is what makes it safe: files and manifest are written and synced under a temporary name,
the folder is renamed, the parent is synced, and only then are old checkpoints pruned (each renamed to a
temporary name before it is deleted). Only the run that owns the folder may call `save_checkpoint` and
`remove_unfinished`; finding and loading change nothing, so other tools may read from a live run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL, sync_folder
from megatron_essh.training.checkpoint.files import (
    file_sha256,
    read_tensors,
    write_synced,
    write_tensors,
)

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
MANIFEST_FILE = "manifest.json"
MODEL_PREFIX = "model."
FORMAT, VERSION = "megatron_essh checkpoint", 1

_FINISHED = re.compile(r"step_(\d{8,})")
_UNFINISHED = re.compile(r"step_\d{8,}\.tmp-.+")
_SLACK_BYTES = 1 << 20  # headers, state.json, manifest.json


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, keep_last: int
) -> Path:
    """Write `folder`/step_<step> and keep the newest `keep_last` whole checkpoints, this one among them.

    Args:
        folder: the run's folder of checkpoints; made when missing.
        step: optimizer steps done.
        tensors: by name. Names that start with "model." go to model.safetensors without that prefix, all
            others to optimizer.safetensors.
        values: whatever JSON can hold; NaN and infinities are refused (ValueError).
        keep_last: at least 1.

    Returns:
        The checkpoint's path.

    Raises:
        UserError: the disk is too full (nothing is left behind, older checkpoints are intact), or a whole
            checkpoint of this step is already there.
    """
    assert keep_last >= 1, keep_last
    model = {n.removeprefix(MODEL_PREFIX): t for n, t in tensors.items() if n.startswith(MODEL_PREFIX)}
    others = {n: t for n, t in tensors.items() if not n.startswith(MODEL_PREFIX)}
    state = json.dumps(values, indent=1, allow_nan=False).encode()

    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync_folder(folder.parent)
    target = folder / f"step_{step:08d}"
    needed = sum(t.numel() * t.element_size() for t in tensors.values()) + len(state) + _SLACK_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"{folder}: {_needs(step, needed)}, {_size(free)} are free; {_REMEDY}")

    temporary = folder / f"{target.name}.tmp-{os.getpid()}"
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        files = {
            MODEL_FILE: write_tensors(temporary / MODEL_FILE, model),
            OPTIMIZER_FILE: write_tensors(temporary / OPTIMIZER_FILE, others),
            STATE_FILE: write_synced(temporary / STATE_FILE, [state]),
        }
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in files.items()},
        }
        write_synced(temporary / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
        sync_folder(temporary)
        _publish(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise UserError(f"{folder}: {_needs(step, needed)} ({error.strerror}); {_REMEDY}") from None
        raise
    _prune(folder, step, keep_last)
    return target


_REMEDY = "older checkpoints are intact: make room, then start the run again"


def _needs(step: int, needed: int) -> str:
    return f"the disk is too full for the checkpoint of step {step}, which needs {_size(needed)}"


def _publish(temporary: Path, target: Path) -> None:
    """Give the finished folder its name; a damaged one that holds the name makes way."""
    if target.exists():
        if _damage(target) is None:
            raise UserError(f"{target}: a whole checkpoint of this step is already there; remove it to save anew")
        _remove(target)
    os.replace(temporary, target)
    sync_folder(target.parent)


def _prune(folder: Path, newest: int, keep_last: int) -> None:
    """Remove what is older than `newest` and not among the `keep_last` newest whole ones.

    Wholeness is judged by names and sizes here: to hash every old checkpoint at each save would cost minutes.
    """
    older = [step for step in checkpoint_steps(folder) if step < newest]
    whole = [step for step in older if _damage(folder / f"step_{step:08d}", hashes=False) is None]
    for step in set(older) - set(whole[: keep_last - 1]):
        _remove(folder / f"step_{step:08d}")


def _remove(path: Path) -> None:
    """Delete a checkpoint so that a crash half-way leaves no half of it under a checkpoint's name."""
    doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}-removed")
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed save or prune left. Only for the run that owns `folder`, before its first save."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, whole or not, newest first."""
    if not folder.is_dir():
        return []
    matches = (_FINISHED.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def find_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` whose sizes and hashes hold, or None.

    Every newer, damaged one is named with its damage on standard error.
    """
    for step in checkpoint_steps(folder):
        path = folder / f"step_{step:08d}"
        damage = _damage(path)
        if damage is None:
            return path
        print(f"warning: skipping a damaged checkpoint: {damage}", file=sys.stderr, flush=True)
    return None


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest whole one of a run or a folder of checkpoints.

    Raises:
        UserError: there is none, or `path` is a checkpoint folder that is damaged.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run's output folder or one of its checkpoints")
    if _FINISHED.fullmatch(path.resolve().name) or (path / MANIFEST_FILE).exists():
        damage = _damage(path)
        if damage is not None:
            raise UserError(damage)
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = find_checkpoint(folder)
    if found is None:
        damaged = " whole" if checkpoint_steps(folder) else ""
        raise UserError(f"{folder}: no{damaged} checkpoint (step_XXXXXXXX) in this folder")
    return found


def load_checkpoint(path: Path, *, model_only: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify a checkpoint and read it: (tensors by their saved names, values); tensors on the CPU.

    `model_only` reads and verifies only the parameters and the values.

    Raises:
        UserError: the folder is missing, foreign, truncated or damaged; the message names file and reason.
    """
    tensor_files = {MODEL_FILE: MODEL_PREFIX} if model_only else {MODEL_FILE: MODEL_PREFIX, OPTIMIZER_FILE: ""}
    damage = _damage(path, names=(*tensor_files, STATE_FILE))
    if damage is not None:
        raise UserError(damage)
    tensors: dict[str, Tensor] = {}
    for name, prefix in tensor_files.items():
        tensors.update(read_tensors(path / name, prefix))
    try:
        values = json.loads((path / STATE_FILE).read_bytes())
    except ValueError as error:
        raise UserError(f"{path / STATE_FILE}: not valid JSON ({error})") from None
    return tensors, values


def model_sha256(path: Path) -> str:
    """SHA-256 of a checkpoint's model.safetensors, as its manifest records it."""
    manifest = _read_manifest(path)
    if isinstance(manifest, str):
        raise UserError(manifest)
    return str(manifest[MODEL_FILE]["sha256"])


def _damage(
    path: Path, *, names: tuple[str, ...] = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE), hashes: bool = True
) -> str | None:
    """What is wrong with the checkpoint `path`, in words, or None when the files `names` are as recorded."""
    files = _read_manifest(path)
    if isinstance(files, str):
        return files
    try:
        for name in names:
            file, expected = path / name, files[name]
            if not file.is_file():
                return f"{file}: missing"
            size = file.stat().st_size
            if size != expected["bytes"]:
                return f"{file}: {size} bytes where the manifest records {expected['bytes']}"
            if hashes and file_sha256(file) != expected["sha256"]:
                return f"{file}: its content is not what was saved (the SHA-256 differs from the manifest's)"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return None


def _read_manifest(path: Path) -> dict[str, dict[str, Any]] | str:
    """The manifest's `files`, or what is wrong with it, in words."""
    file = path / MANIFEST_FILE
    if not path.is_dir():
        return f"{path}: no such checkpoint folder"
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        return f"{path}: not a megatron_essh checkpoint, or an unfinished one: it has no {MANIFEST_FILE}"
    except (OSError, ValueError) as error:
        return f"{file}: cannot be read ({error})"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{file}: not the manifest of a megatron_essh checkpoint"
    if manifest.get("version") != VERSION:
        return f"{file}: version {manifest.get('version')!r} where this package reads version {VERSION}"
    files = manifest.get("files")
    wanted = {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE}
    if (
        not isinstance(files, dict)
        or set(files) != wanted
        or not all(isinstance(f, dict) and {"bytes", "sha256"} <= set(f) for f in files.values())
    ):
        return f"{file}: does not list the size and SHA-256 of {', '.join(sorted(wanted))}"
    return files


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
