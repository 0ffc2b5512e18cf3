"""Writing checkpoints: every rank its share, behind the back of the training loop, and all of it or nothing.

The order of a save is what makes it safe. Each rank writes one file into a folder under a temporary name, syncs it,
reads it back, and then lays down a record of it; the first rank waits for the records of all, holds them together (each
element of each tensor once), writes state.json and manifest.json, syncs, and renames the folder. Only then do old
checkpoints go. Ranks speak through the file system alone: no thread of ours issues a collective operation beside those
of training.

One process writes `model.safetensors` under plain names, which every tool opens, and `optimizer.safetensors`; several
write `rank_00000.safetensors`, ... The manifest says where everything is, in either case.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL, sync_folder, write_atomically
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.training.checkpoint import folder as folders
from megatron_essh.training.checkpoint.files import CHUNK_BYTES, write_hashed_tensors, write_synced
from megatron_essh.training.checkpoint.folder import Retention, checkpoint_path
from megatron_essh.training.checkpoint.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    MODEL_PREFIX,
    OPTIMIZER_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    FileRecord,
    check_whole,
    encode_manifest,
    plan_file,
    read_manifest,
)
from megatron_essh.training.checkpoint.pieces import Piece, deal
from megatron_essh.training.checkpoint.reading import stream

PATIENCE = 1800.0
"""Seconds that a save waits for the other ranks' files."""
PATIENCE_AFTER_ERROR = 20.0
"""The same once the run has failed: a rank may be gone, and the whole run is to end."""
_SLACK_BYTES = 1 << 20  # headers, state.json, manifest.json
_REMEDY = "older checkpoints are intact: make room, then start the run again"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk."""

    path: Path
    step: int
    seconds: float
    """From the begin of its save to its rename."""


@dataclass(frozen=True)
class _Save:
    """One rank's part in one save."""

    folder: Path
    step: int
    name: str
    """Names this very save, the same on all ranks."""
    files: Mapping[str, Mapping[str, Piece]]
    """This rank's files, and the pieces in them by name."""
    state: bytes
    rank: int
    world: int
    retention: Retention | None
    """None: nothing is pruned."""
    give_up: threading.Event
    """Set when waiting for other ranks is to end soon."""

    @property
    def temporary(self) -> Path:
        return self.folder / f"step_{self.step:08d}.tmp-{self.name}"

    def run(self) -> Path:
        """Write, wait, publish; returns the checkpoint's path."""
        target = checkpoint_path(self.folder, self.step)
        size = sum(piece.bytes for pieces in self.files.values() for piece in pieces.values())
        needed = size * self.world + len(self.state) + _SLACK_BYTES
        try:
            self._write(target, needed)
        except OSError as error:
            if error.errno not in DISK_FULL:
                self._abandon(error)
                raise
            told = UserError(f"{self.folder}: {_needs(self.step, needed)} ({error.strerror}); {_REMEDY}")
            self._abandon(told)
            raise told from None
        except BaseException as error:
            self._abandon(error)
            raise
        if self.rank == 0 and self.retention is not None:
            folders._prune(self.folder, self.step, self.retention)
        return target

    def _write(self, target: Path, needed: int) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(f"{self.folder}: {_needs(self.step, needed)}, {_size(free)} are free; {_REMEDY}")
        self.temporary.mkdir(exist_ok=True)
        records = {name: _write_file(self.temporary / name, pieces) for name, pieces in self.files.items()}
        if self.world > 1:
            content = {name: record.to_mapping() for name, record in records.items()}
            write_atomically(self._record(self.rank), json.dumps(content).encode())
        if self.rank > 0:
            self._wait_for_publication(target)
            return
        for rank in range(1, self.world):
            records |= self._wait_for_record(rank)
        check_whole((entry for record in records.values() for entry in record.entries), self.temporary)
        size, digest = write_synced(self.temporary / STATE_FILE, [self.state])
        files = {STATE_FILE: FileRecord(size, digest), **records}
        write_synced(self.temporary / MANIFEST_FILE, [encode_manifest(self.step, self.name, files)])
        if self.world > 1:
            for rank in range(self.world):
                self._record(rank).unlink()
        sync_folder(self.temporary)
        folders._publish(self.temporary, target)

    def _record(self, rank: int) -> Path:
        return self.temporary / f"rank_{rank:05d}.json"

    @property
    def _failure(self) -> Path:
        return self.temporary / "failed.json"

    def _abandon(self, error: BaseException) -> None:
        """Leave nothing behind; where other ranks are at work, say what happened and leave the rest to the next run."""
        if self.world == 1:
            shutil.rmtree(self.temporary, ignore_errors=True)
            return
        try:
            for name in self.files:
                (self.temporary / name).unlink(missing_ok=True)
            if self.temporary.is_dir() and not self._failure.exists():
                message = f"rank {self.rank}: {error}"
                write_atomically(self._failure, json.dumps(message).encode())
        except OSError:
            pass  # the error that brought us here is the one to tell

    def _wait_for_record(self, rank: int) -> dict[str, FileRecord]:
        content = self._wait_for(lambda: _read(self._record(rank)), f"rank {rank} has not written its part")
        return {name: FileRecord.from_mapping(record) for name, record in json.loads(content).items()}

    def _wait_for_publication(self, target: Path) -> None:
        def published() -> bool | None:
            try:
                return True if read_manifest(target).save == self.name else None
            except DamagedCheckpoint:
                return None

        self._wait_for(published, "rank 0 has not published it")

    def _wait_for(self, ready: Any, failing: str) -> Any:
        begin, pause = time.monotonic(), 0.002
        end = begin + PATIENCE
        told = False
        while True:
            result = ready()
            if result is not None:
                return result
            failure = _read(self._failure)
            if failure is not None:
                raise UserError(f"the checkpoint of step {self.step} was not saved: {json.loads(failure)}")
            now = time.monotonic()
            if self.give_up.is_set() and not told:
                told, end = True, min(end, now + PATIENCE_AFTER_ERROR)
            if now > end:
                raise UserError(
                    f"{self.folder}: the checkpoint of step {self.step} was not saved: {failing} after "
                    f"{now - begin:.0f} s; the folder must be on a file system that all ranks share"
                )
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _files_of(pieces: Mapping[str, Piece], rank: int, world: int) -> dict[str, dict[str, Piece]]:
    """Which of a rank's files its share goes to."""
    if world > 1:
        return {_rank_file(rank): dict(pieces)}
    return {
        MODEL_FILE: {name: piece for name, piece in pieces.items() if name.startswith(MODEL_PREFIX)},
        OPTIMIZER_FILE: {name: piece for name, piece in pieces.items() if not name.startswith(MODEL_PREFIX)},
    }


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _key(file: str, name: str, piece: Piece) -> str:
    """What `file` calls a piece."""
    if file == MODEL_FILE:
        return name.removeprefix(MODEL_PREFIX)
    span = piece.span
    key = name if span.tp == 1 else f"{name}.tp{span.tp_rank}of{span.tp}"
    return key if span.numel == span.local else f"{key}[{span.start}:{span.end}]"


def _write_file(path: Path, named: Mapping[str, Piece]) -> FileRecord:
    """Write a new safetensors file and read it back from the disk."""
    pieces = {_key(path.name, name, piece): (name, piece) for name, piece in named.items()}
    layout, entries = plan_file(pieces)
    hashes = write_hashed_tensors(path, layout, lambda key: pieces[key][1].tensor)
    entries = tuple(replace(entry, sha256=hashes[entry.key]) for entry in entries)
    header_sha256 = hashlib.sha256(layout.header).hexdigest()
    _drop_from_memory(path)
    buffer = torch.empty(min(CHUNK_BYTES, max(8, layout.bytes)), dtype=torch.uint8)
    for entry in entries:
        for _ in stream(path, entry, buffer):
            pass
    return FileRecord(layout.bytes, None, len(layout.header), header_sha256, entries)


def _drop_from_memory(path: Path) -> None:
    """Let the system forget what it has cached of a file that is on disk, so that it is read from there."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class CheckpointWriter:
    """Saves a run's checkpoints in the background; one at a time.

    Building one is a collective operation over the mesh. Used as a context manager, it ends with the last save on disk
    or with its error. An interpreter that ends waits for a save that runs.

    Args:
        folder: the run's folder of checkpoints, on a file system that all ranks share; made when missing.
        mesh: the run's ranks; None: one process.
        keep_last: whole checkpoints that stay, the newest among them; at least 1.
        keep_every: those of steps that are multiples of this stay for good; 0: none.
    """

    def __init__(self, folder: Path, mesh: Mesh | None = None, *, keep_last: int, keep_every: int = 0) -> None:
        self.folder = folder
        self._mesh = mesh if mesh is not None else Mesh.single(torch.device("cpu"))
        self._retention = Retention(keep_last, keep_every)
        box = [secrets.token_hex(4)]
        if self._mesh.world > 1:
            dist.broadcast_object_list(box, src=0, group=self._mesh.world_group, device=self._mesh.device)
        self._run, self._count = box[0], 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done: list[Saved] = []
        self._give_up = threading.Event()
        self._host: Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        self._give_up.set()  # the run has failed, whose error is the one to tell: finish what can be finished
        if self._thread is not None:
            self._thread.join()

    def save(self, step: int, pieces: Mapping[str, Piece], values: Mapping[str, Any]) -> Path:
        """Begin to save step `step`; returns where the checkpoint will be, once the tensors are copied to the host.

        Every rank calls it, with its pieces and any values; the first rank's values are saved. Waits for the save
        before. The tensors may be changed as soon as it returns (on a CUDA device: by work on the current stream).

        Args:
            step: optimizer steps done.
            pieces: by name; names that start with "model." are parameters.
            values: whatever JSON can hold; NaN and infinities are refused (ValueError).

        Raises:
            UserError: the save before has failed.
        """
        self._join()
        state = json.dumps(values, indent=1, allow_nan=False).encode()
        host, event = self._to_host(deal(pieces, self._mesh))
        name = f"{self._run}-{self._count}"
        self._count += 1
        mesh = self._mesh
        files = _files_of(host, mesh.rank, mesh.world)
        job = _Save(self.folder, step, name, files, state, mesh.rank, mesh.world, self._retention, self._give_up)
        begin = time.perf_counter()

        def work() -> None:
            try:
                if event is not None:
                    event.synchronize()
                path = job.run()
                self._done.append(Saved(path, step, time.perf_counter() - begin))
            except BaseException as error:
                self._error = error

        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=work, name=f"checkpoint {step}")
        self._thread.start()
        return checkpoint_path(self.folder, step)

    def poll(self) -> list[Saved]:
        """The saves that have come to their end since the last call; for each step of a loop, as it costs nothing.

        Raises:
            UserError: one has failed; or whatever else made it fail.
        """
        if self._thread is not None and not self._thread.is_alive():
            return self.wait()
        return []

    def wait(self) -> list[Saved]:
        """As `poll`, after the end of the save that runs."""
        self._join()
        done, self._done = self._done, []
        return done

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _to_host(self, pieces: Mapping[str, Piece]) -> tuple[dict[str, Piece], torch.cuda.Event | None]:
        """Copies of the pieces in one block of host memory, which stays for the next save."""
        order = sorted(pieces, key=lambda name: (-pieces[name].tensor.element_size(), name))
        total = sum(piece.bytes for piece in pieces.values())
        on_device = any(piece.tensor.is_cuda for piece in pieces.values())
        if self._host is None or self._host.numel() < total:
            self._host = torch.empty(total, dtype=torch.uint8, pin_memory=on_device)
        copies: dict[str, Piece] = {}
        offset = 0
        for name in order:
            piece = pieces[name]
            place = self._host[offset : offset + piece.bytes].view(piece.tensor.dtype).view(piece.tensor.shape)
            place.copy_(piece.tensor.detach(), non_blocking=piece.tensor.is_cuda)
            offset += piece.bytes
            copies[name] = replace(piece, tensor=place)
        if not on_device:
            return copies, None
        # On the current stream: what changes the tensors comes after the copies there, and nobody has to wait here.
        event = torch.cuda.Event()
        event.record()
        return copies, event


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    keep_last: int,
    keep_every: int = 0,
) -> Path:
    """Write `folder`/step_<step> from one process, at once, and keep what `keep_last` and `keep_every` say.

    Args:
        folder: the run's folder of checkpoints; made when missing.
        step: optimizer steps done.
        tensors: whole, by name. Names that start with "model." go to model.safetensors without that prefix, all
            others to optimizer.safetensors.
        values: whatever JSON can hold; NaN and infinities are refused (ValueError).
        keep_last: whole checkpoints that stay, this one among them; at least 1.
        keep_every: those of steps that are multiples of this stay for good; 0: none.

    Returns:
        The checkpoint's path.

    Raises:
        UserError: the disk is too full (nothing is left behind, older checkpoints are intact), or a whole
            checkpoint of this step is already there.
    """
    pieces = {name: Piece(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return _save_now(folder, step, _files_of(pieces, 0, 1), values, Retention(keep_last, keep_every))


def save_parts(folder: Path, step: int, parts: Sequence[Mapping[str, Piece]], values: Mapping[str, Any]) -> Path:
    """As `save_checkpoint`, of what several ranks hold, a file each, from one process; nothing is pruned.

    Args:
        parts: of each rank, its pieces; no two of them the same elements.
    """
    files = {_rank_file(rank): pieces for rank, pieces in enumerate(parts)}
    return _save_now(folder, step, files, values, None)


def _save_now(
    folder: Path,
    step: int,
    files: Mapping[str, Mapping[str, Piece]],
    values: Mapping[str, Any],
    retention: Retention | None,
) -> Path:
    state = json.dumps(values, indent=1, allow_nan=False).encode()
    return _Save(folder, step, str(os.getpid()), files, state, 0, 1, retention, threading.Event()).run()


def _needs(step: int, needed: int) -> str:
    return f"the disk is too full for the checkpoint of step {step}, which needs {_size(needed)}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
