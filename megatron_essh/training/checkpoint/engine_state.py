"""An engine's state as pieces, and back: parameters, both moments, unit statistics and random state, on any layout.

Randomness does not depend on the layout, because no rank has any of its own: initial weights are drawn whole from the
seed and then dealt out, the plan of a step is a function of (seed, step) and the order of the data of (seed, position),
and nothing in a step draws from a generator. The generators that PyTorch itself keeps begin alike on every rank; the
first rank's state is saved, and every rank of whatever layout takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_essh.errors import UserError
from megatron_essh.parallel.interleave import Sharding
from megatron_essh.training.checkpoint.manifest import read_manifest
from megatron_essh.training.checkpoint.pieces import Copies, Piece, Want
from megatron_essh.training.checkpoint.reading import ANOTHER, load, read_values
from megatron_essh.training.engine import NativeEngine
from megatron_essh.training.state import RANDOM, STATISTIC


def engine_pieces(engine: NativeEngine) -> dict[str, Piece]:
    """What this rank holds, for `CheckpointWriter.save`; the tensors are the engine's own, not copies.

    Statistics are one tensor a layer, dealt out as the layer's units are.
    """
    pieces: dict[str, Piece] = {}
    for name, tensor, sharding in _state(engine):
        if name.startswith(RANDOM):
            if engine.mesh.is_first:
                pieces[name] = Piece(tensor, tuple(tensor.shape))
            continue
        shape, start, end = _extent(engine, name, tensor, sharding)
        copies: Copies = "all" if sharding is None else "data"
        if end is not None:
            # Nobody else has these elements, but of undealt parameters every tensor-parallel rank has them all.
            copies = "none"
            if start == end or (sharding is None and engine.mesh.tp_rank > 0):
                continue
        pieces[name] = Piece(tensor, shape, sharding, engine.mesh.tp, engine.mesh.tp_rank, start, end, copies)
    return pieces


def load_into(engine: NativeEngine, path: Path) -> dict[str, Any]:
    """Make `engine` go on from the checkpoint `path`, of whatever layout; returns the checkpoint's values.

    This rank's parts are read into where they belong: beside them there is one chunk of a file in memory.

    Raises:
        DamagedCheckpoint: what is read is not what was saved; the engine is not to be used then.
        UserError: a tensor is missing, unknown or of another shape.
    """
    values = read_values(path)
    engine.state.make_moments()
    saved = {entry.name for entry in read_manifest(path).all_entries()}
    own = engine.state_tensors()
    wanted: dict[str, Want] = {}
    held_by_others: set[str] = set()
    for name, tensor, sharding in list(_state(engine, own)):
        if name.startswith(RANDOM):
            if name in saved:  # a resume may change device
                own[name] = torch.empty_like(tensor)
                wanted[name] = Want(into=own[name])
            continue
        shape, start, end = _extent(engine, name, tensor, sharding)
        if start == end:
            held_by_others.add(name)
        else:
            wanted[name] = Want(sharding, engine.mesh.tp, engine.mesh.tp_rank, start, end, into=tensor, shape=shape)
    known = {*wanted, *held_by_others, STATISTIC}
    unknown = sorted(name for name in saved - known if not name.startswith(RANDOM))
    if unknown:
        raise UserError(f"{path}: unknown {', '.join(unknown[:3])} ({len(unknown)} in all): {ANOTHER}")
    load(path, wanted)
    engine.load_state(own, values["engine"])
    return values


def _state(
    engine: NativeEngine, tensors: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor, Sharding | None]]:
    """(name, this rank's part, how it is dealt out) of all of an engine's tensors, or of `tensors`."""
    for name, tensor in (engine.state_tensors() if tensors is None else tensors).items():
        sharding = engine.state.sharding(name)
        if name == STATISTIC:
            for layer, tensor_N in enumerate(tensor):
                yield f"{name}.{layer}", tensor_N, sharding
        else:
            yield name, tensor, sharding


def _extent(
    engine: NativeEngine, name: str, tensor: Tensor, sharding: Sharding | None
) -> tuple[tuple[int, ...], int, int | None]:
    """The whole's shape, and which elements of this tensor-parallel rank's part `tensor` is (end None: all)."""
    span = engine.state.span(name)
    shape, start, end = (tuple(tensor.shape), 0, None) if span is None else span
    return (shape if sharding is None else (sharding.units * sharding.rows, *shape[1:])), start, end
