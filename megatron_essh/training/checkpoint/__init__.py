"""Checkpoints by parameter name and without layout: a folder a step, written under another name, then renamed.

    <folder>/step_00000123/
        model.safetensors       of one process: the parameters under their plain names
        optimizer.safetensors   of one process: moments, statistics, random state: all other tensors
        rank_00007.safetensors  of several processes: what each of them wrote
        state.json              plain values: step, config, data position, counters
        manifest.json           which piece of which tensor lies where, with its SHA-256; written last

A folder of that name is never half-written: a crash of any rank at any instant of a save leaves either the old set of
checkpoints or the new one. What was saved on one layout is read on any other (pieces.py). Only engine_state.py knows of
models and optimizers.
"""

from megatron_essh.training.checkpoint.folder import (
    checkpoint_path,
    checkpoint_steps,
    find_checkpoint,
    remove_unfinished,
    resolve_checkpoint,
)
from megatron_essh.training.checkpoint.manifest import DamagedCheckpoint
from megatron_essh.training.checkpoint.pieces import Piece, Want
from megatron_essh.training.checkpoint.reading import load, load_checkpoint, model_sha256, read_values
from megatron_essh.training.checkpoint.writer import CheckpointWriter, Saved, save_checkpoint

__all__ = [
    "CheckpointWriter",
    "DamagedCheckpoint",
    "Piece",
    "Saved",
    "Want",
    "checkpoint_path",
    "checkpoint_steps",
    "find_checkpoint",
    "load",
    "load_checkpoint",
    "model_sha256",
    "read_values",
    "remove_unfinished",
    "resolve_checkpoint",
    "save_checkpoint",
]
