"""Reading checkpoints: every layout's pieces into whatever part a reader wants, a chunk at a time, each byte verified.

On the host there is never more than what was asked for and a chunk a reader, however large the model or a tensor of it.
Finding and reading change nothing, so other tools may read from a live run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_essh.errors import UserError
from megatron_essh.training.checkpoint.files import CHUNK_BYTES, Layout, file_chunks, file_sha256
from megatron_essh.training.checkpoint.manifest import (
    MODEL_FILE,
    MODEL_PREFIX,
    STATE_FILE,
    DamagedCheckpoint,
    Entry,
    Manifest,
    check_whole,
    read_manifest,
)
from megatron_essh.training.checkpoint.pieces import Span, Want, copy_overlap, overlaps

Job = TypeVar("Job")
Result = TypeVar("Result")

READERS = 4
"""Threads that read and hash; each has a chunk in memory."""
SHOWN = 3
"""Names that an error lists."""
ANOTHER = "of another model; continue it with the config that it was saved with"
"""What is wrong with a checkpoint that does not fit, and what to do."""

_STACKED = re.compile(r".+\.\d+")


def load(path: Path, wanted: Mapping[str, Want]) -> dict[str, Tensor]:
    """Read parts of named tensors, by name as they were saved (`model.NAME`, `exp_avg.NAME`, ...).

    Args:
        path: a checkpoint's folder, of any layout.
        wanted: what to read, and into what.

    Returns:
        For each name the tensor that `Want.into` gave, or a new one on the CPU of the saved dtype: of the local
        part's shape where all of that was asked for, flat where only some elements were.

    Raises:
        DamagedCheckpoint: what is read is not what was saved; the message says which file and tensor. What was
            read into is then not to be used.
        UserError: a tensor is not there, or of another shape or dealt out in another way than the reader's.
    """
    manifest = read_manifest(path)
    for file in manifest.files_with(_with_stacks(wanted)):
        check_file(manifest, file)
    return read_parts(manifest, wanted)


def read_parts(manifest: Manifest, wanted: Mapping[str, Want]) -> dict[str, Tensor]:
    """As `load`, of a checkpoint whose files were held to their manifest by `check_file`."""
    path = manifest.path
    places: dict[str, list[tuple[str, Entry]]] = {}
    for file in manifest.files_with(_with_stacks(wanted)):
        for entry in manifest.entries(file):
            places.setdefault(entry.name, []).append((file, entry))
    missing = sorted(set(wanted) - set(places))
    stacked = {name for name in missing if _STACKED.fullmatch(name) and name.rpartition(".")[0] in places}
    if set(missing) != stacked:
        missing = [name for name in missing if name not in stacked]
        alone = missing[0].startswith("exp_avg.") and not any(name.startswith("exp_avg.") for name in places)
        remedy = f": {ANOTHER}"
        if alone:
            remedy = "; parameters alone can be evaluated, exported and refined, and continue no run"
        raise UserError(f"{path}: has no {', '.join(missing[:SHOWN])} ({len(missing)} missing in all){remedy}")
    if stacked:
        stacks = read_parts(manifest, {name.rpartition(".")[0]: Want() for name in stacked})
        read = read_parts(manifest, {name: want for name, want in wanted.items() if name not in stacked})
        read |= {name: _layer_of(path, stacks, name, wanted[name]) for name in stacked}
        return {name: read[name] for name in wanted}

    result: dict[str, Tensor] = {}
    spans: dict[str, Span] = {}
    left: dict[str, int] = {}
    for name, want in wanted.items():
        entry = places[name][0][1]
        spans[name], result[name] = _destination(path, name, want, entry.shape, entry.dtype)
        left[name] = spans[name].numel

    def fill(job: tuple[str, Entry], buffer: Tensor) -> int:
        file, entry = job
        name, copied = entry.name, 0
        try:
            if overlaps(entry.span, spans[name]):
                for begin, chunk in stream(path / file, entry, buffer):
                    part = entry.span.cut(begin, begin + chunk.numel())
                    copied += copy_overlap(chunk, part, result[name].view(-1), spans[name])
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{path}: {name}: saved {error}: {ANOTHER}") from None
        return copied

    jobs = sorted((job for name in wanted for job in places[name]), key=lambda job: (job[0], job[1].offset))
    for (_, entry), copied in zip(jobs, _with_buffers(fill, jobs), strict=True):
        left[entry.name] -= copied
    for name, count in left.items():
        if count:
            raise DamagedCheckpoint(f"{path}: tensor {name}: {count} elements of it are in no file")
    return result


def _destination(path: Path, name: str, want: Want, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Span, Tensor]:
    """Which elements go where; UserError where `want` does not fit a tensor of that shape."""
    if want.shape is not None and want.shape != shape:
        raise UserError(f"{path}: {name} has shape {shape}, and {want.shape} is wanted: {ANOTHER}")
    try:
        span, result_shape = want.span(shape), want.result_shape(shape)
    except ValueError as error:
        raise UserError(f"{path}: {name}: {error}: {ANOTHER}") from None
    into = torch.empty(result_shape, dtype=dtype) if want.into is None else want.into
    if into.numel() != span.numel:
        raise UserError(f"{path}: {name}: {span.numel} elements for a tensor of {into.numel()}: {ANOTHER}")
    return span, into


def _with_stacks(names: Iterable[str]) -> list[str]:
    return [*names, *(name.rpartition(".")[0] for name in names if _STACKED.fullmatch(name))]


def _layer_of(path: Path, whole: Mapping[str, Tensor], name: str, want: Want) -> Tensor:
    """NAME.3 of a checkpoint that holds NAME as one tensor [L, ...], as the unit statistics once were saved."""
    stack, _, layer = name.rpartition(".")
    if int(layer) >= len(whole[stack]):
        raise UserError(f"{path}: has no {name}: {ANOTHER}")
    tensor = whole[stack][int(layer)]
    span, into = _destination(path, name, want, tuple(tensor.shape), tensor.dtype)
    copy_overlap(tensor.reshape(-1), Span.of(tuple(tensor.shape)), into.view(-1), span)
    return into


def _with_buffers(work: Callable[[Job, Tensor], Result], jobs: Sequence[Job]) -> list[Result]:
    """`work` on each of `jobs`, several at a time, each with memory for a chunk; the first error in their order."""
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(READERS):
        buffers.put(torch.empty(CHUNK_BYTES, dtype=torch.uint8))
    failed = Event()

    def run(job: Job) -> Result:
        buffer = buffers.get()
        try:
            if failed.is_set():
                raise CancelledError
            with torch.no_grad():
                return work(job, buffer)
        except BaseException:
            failed.set()
            raise
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(READERS) as pool:
        futures = [pool.submit(run, job) for job in jobs]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]


def stream(file: Path, entry: Entry, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The elements of a piece as (index of the first, flat tensor), in order; verified when the last was taken.

    Each tensor is a view of `buffer`, uint8, and good until the next one is asked for.

    Raises:
        DamagedCheckpoint: the file is too short, cannot be read, or holds other bytes than were saved.
    """
    digest = hashlib.sha256()
    view = buffer.numpy()
    size = len(view) // entry.dtype.itemsize * entry.dtype.itemsize
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.seek(entry.offset)
            done = 0
            while done < entry.bytes:
                length = min(size, entry.bytes - done)
                filled = 0
                while filled < length:
                    count = opened.readinto(view[filled:length].data)
                    if not count:
                        raise DamagedCheckpoint(f"{file}: ends in the midst of tensor {entry.name}")
                    filled += count
                digest.update(view[:length].data)
                yield done // entry.dtype.itemsize, buffer[:length].view(entry.dtype)
                done += length
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{file}: cannot be read ({error.strerror})") from None
    if entry.sha256 is not None and digest.hexdigest() != entry.sha256:
        raise DamagedCheckpoint(
            f"{file}: tensor {entry.name}: its content is not what was saved (the SHA-256 differs from the manifest's)"
        )


def check_file(manifest: Manifest, name: str, *, hashes: bool = True) -> None:
    """Hold one file's size, and its hash or its header's, to the manifest; DamagedCheckpoint where they differ."""
    file, record = manifest.path / name, manifest.files[name]
    try:
        if not file.is_file():
            raise DamagedCheckpoint(f"{file}: missing")
        size = file.stat().st_size
        if size != record.bytes:
            raise DamagedCheckpoint(f"{file}: {size} bytes where the manifest records {record.bytes}")
        if not hashes:
            return
        if record.sha256 is not None:
            if file_sha256(file) != record.sha256:
                raise DamagedCheckpoint(
                    f"{file}: its content is not what was saved (the SHA-256 differs from the manifest's)"
                )
            return
        with open(file, "rb") as opened:
            header = opened.read(record.header_bytes)
        if hashlib.sha256(header).hexdigest() != record.header_sha256:
            raise DamagedCheckpoint(
                f"{file}: its header is not what was saved (the SHA-256 differs from the manifest's)"
            )
    except OSError as error:
        raise DamagedCheckpoint(f"{file}: cannot be read ({error.strerror})") from None


def verify(manifest: Manifest, *, files: list[str] | None = None, prefix: str = "") -> None:
    """Read all of a checkpoint, or some `files` of it, and hold every byte to the manifest.

    Args:
        prefix: look only at tensors whose name begins so, and at the files that hold any.

    Raises:
        DamagedCheckpoint: naming the first file, and tensor, that is not as it was saved.
    """
    if files is None and manifest.version != 1:
        check_whole(manifest.all_entries(), manifest.path)
    jobs: list[tuple[Path, Entry]] = []
    for name in (STATE_FILE, *manifest.files_with([prefix])):
        if files is None or name in files:
            check_file(manifest, name)
            entries = manifest.files[name].entries
            jobs += [(manifest.path / name, entry) for entry in entries if entry.name.startswith(prefix)]
    _with_buffers(_check, jobs)


def _check(job: tuple[Path, Entry], buffer: Tensor) -> None:
    for _ in stream(*job, buffer):
        pass


def load_checkpoint(path: Path, *, model_only: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Verify a checkpoint and read it whole: (tensors by their saved names, values); tensors on the CPU.

    `model_only` reads and verifies only the parameters and the values.

    Raises:
        DamagedCheckpoint: the folder is missing, foreign, truncated or damaged; the message names file and reason.
    """
    manifest = read_manifest(path)
    values = read_values(path)
    return read_parts(manifest, {name: Want() for name in _checked_entries(manifest, model_only)}), values


def _checked_entries(manifest: Manifest, model_only: bool) -> dict[str, Entry]:
    """By name, of every tensor or every parameter a piece; the files that hold them are checked first."""
    prefix = MODEL_PREFIX if model_only else ""
    files = manifest.files_with([prefix])
    for file in files:
        check_file(manifest, file)
    entries = {entry.name: entry for file in files for entry in manifest.entries(file)}
    return {name: entry for name, entry in entries.items() if name.startswith(prefix)}


def read_values(path: Path) -> dict[str, Any]:
    """What a checkpoint's state.json holds, verified.

    Raises:
        DamagedCheckpoint: it is not what was saved.
    """
    check_file(read_manifest(path), STATE_FILE)
    try:
        values = json.loads((path / STATE_FILE).read_bytes())
    except ValueError as error:
        raise DamagedCheckpoint(f"{path / STATE_FILE}: not valid JSON ({error})") from None
    assert isinstance(values, dict)
    return values


def model_sha256(path: Path) -> str:
    """What names a checkpoint's parameters, on whatever layout it was saved: the SHA-256 of the model.safetensors that
    a single process would have written. Reads them, but for version 1, which has it on record.

    Raises:
        DamagedCheckpoint: they are not what was saved.
    """
    manifest = read_manifest(path)
    record = manifest.files.get(MODEL_FILE)
    if record is not None and record.sha256 is not None:
        return record.sha256
    digest = hashlib.sha256()
    for chunk in model_file_chunks(manifest):
        digest.update(chunk)
    return digest.hexdigest()


def model_file_chunks(manifest: Manifest) -> Iterator[bytes | memoryview]:
    """The bytes of model.safetensors, plain names, of a checkpoint of any layout: one tensor at a time is read.

    Raises:
        DamagedCheckpoint: the parameters are not what was saved.
    """
    model = {name.removeprefix(MODEL_PREFIX): entry for name, entry in _checked_entries(manifest, True).items()}
    layout = Layout({name: (entry.dtype, entry.shape) for name, entry in model.items()})

    def tensor(name: str) -> Tensor:
        return read_parts(manifest, {MODEL_PREFIX + name: Want()})[MODEL_PREFIX + name]

    yield from file_chunks(layout, tensor)
