"""The folder of a run's checkpoints: what is in it, which one to continue from, how one appears and how old ones go.

A finished checkpoint appears by one rename and goes by one rename. Only the run that owns the folder may publish,
prune and call `remove_unfinished`; finding changes nothing, so other tools may look into a live run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_essh.errors import UserError
from megatron_essh.files import sync_folder
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.checkpoint.manifest import MANIFEST_FILE, STATE_FILE, DamagedCheckpoint, read_manifest
from megatron_essh.training.checkpoint.reading import check_file, verify

_FINISHED = re.compile(r"step_(\d{8,})")
_UNFINISHED = re.compile(r"step_\d{8,}\.tmp-.+")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay on disk."""

    keep_last: int
    """The newest so many whole ones, at least 1."""
    keep_every: int = 0
    """Those of steps that are multiples of this; 0: none for that reason."""

    def __post_init__(self) -> None:
        assert self.keep_last >= 1, self.keep_last
        assert self.keep_every >= 0, self.keep_every

    def keeps_for_good(self, step: int) -> bool:
        """Whether the checkpoint of `step` never goes."""
        return self.keep_every > 0 and step % self.keep_every == 0


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return folder / f"step_{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, whole or not, newest first."""
    if not folder.is_dir():
        return []
    matches = (_FINISHED.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _warn(damage: str) -> None:
    print(f"warning: skipping a damaged checkpoint: {damage}", file=sys.stderr, flush=True)


def find_checkpoint(folder: Path, mesh: Mesh | None = None, *, on_damage: Callable[[str], None] = _warn) -> Path | None:
    """The newest checkpoint in `folder` of which every byte is as it was saved, or None.

    Args:
        folder: a run's folder of checkpoints.
        mesh: the ranks that look for it together, each reading its share, and that all get the same answer; None:
            this process alone.
        on_damage: told of every newer, damaged one, by file and tensor, on the first rank; prints a warning on
            standard error unless given.
    """
    alone = mesh is None or mesh.world == 1
    steps = checkpoint_steps(folder)
    if not alone:
        steps = _from_first(mesh, steps)
    for step in steps:
        path = checkpoint_path(folder, step)
        damage = _damage(path) if alone else _shared_damage(path, mesh)
        if damage is None:
            return path
        if mesh is None or mesh.is_first:
            on_damage(damage)
    return None


def _from_first(mesh: Mesh | None, value: list[int]) -> list[int]:
    assert mesh is not None
    box = [value]
    dist.broadcast_object_list(box, src=0, group=mesh.world_group, device=mesh.device)
    return box[0]


def _shared_damage(path: Path, mesh: Mesh | None) -> str | None:
    """As `_damage`, each rank reading the files of which it is the turn."""
    assert mesh is not None
    found: str | None = None
    try:
        manifest = read_manifest(path)
        verify(manifest, files=list(manifest.files)[mesh.rank :: mesh.world])
    except DamagedCheckpoint as damage:
        found = str(damage)
    answers: list[str | None] = [None] * mesh.world
    dist.all_gather_object(answers, found, group=mesh.world_group)
    return next((answer for answer in answers if answer is not None), None)


def _damage(path: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with the checkpoint `path`, in words, or None when it is as it was saved."""
    try:
        manifest = read_manifest(path)
        if hashes:
            verify(manifest)
        else:
            for file in (STATE_FILE, *manifest.tensor_files):
                check_file(manifest, file, hashes=False)
    except DamagedCheckpoint as damage:
        return str(damage)
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
            raise UserError(f"{damage}; give another checkpoint, or restore this one")
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = find_checkpoint(folder)
    if found is None:
        what, remedy = "checkpoint", "give a run's output folder or one of its checkpoints"
        if checkpoint_steps(folder):
            what, remedy = "whole checkpoint", "restore one, or give another run"
        raise UserError(f"{folder}: no {what} (step_XXXXXXXX) in this folder; {remedy}")
    return found


def refuse_whole(target: Path) -> None:
    """Raise UserError where a whole checkpoint already has that name."""
    if target.exists() and _damage(target) is None:
        raise UserError(f"{target}: a whole checkpoint of this step is already there; remove it to save anew")


def _publish(temporary: Path, target: Path) -> None:
    """Give the finished folder its name; a damaged one that holds the name makes way."""
    if target.exists():
        refuse_whole(target)
        _remove(target)
    os.replace(temporary, target)
    sync_folder(target.parent)


def _prune(folder: Path, newest: int, retention: Retention) -> None:
    """Remove what is older than `newest` and not to be kept; a damaged one counts for nothing, and goes.

    Wholeness is judged by names and sizes here: to hash every old checkpoint at each save would cost minutes.
    """
    older = [step for step in checkpoint_steps(folder) if step < newest]
    whole = [step for step in older if _damage(checkpoint_path(folder, step), hashes=False) is None]
    kept = {*whole[: retention.keep_last - 1], *(step for step in whole if retention.keeps_for_good(step))}
    for step in set(older) - kept:
        _remove(checkpoint_path(folder, step))


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
