"""Checkpoints by parameter name: a folder a step, written under another name, verified, then renamed.

    <folder>/step_00000123/
        model.safetensors       the parameters under their plain names
        optimizer.safetensors   moments, statistics, random state: all other tensors
        state.json              plain values: step, config, data position, counters
        manifest.json           size and SHA-256 of the three; written last

A folder of that name is never half-written: a crash at any instant of a save leaves either the old set of
checkpoints or the new one. Nothing here knows of ranks, models or optimizers.
"""

from megatron_essh.training.checkpoint.folder import (
    checkpoint_steps,
    find_checkpoint,
    load_checkpoint,
    model_sha256,
    remove_unfinished,
    resolve_checkpoint,
    save_checkpoint,
)

__all__ = [
    "checkpoint_steps",
    "find_checkpoint",
    "load_checkpoint",
    "model_sha256",
    "remove_unfinished",
    "resolve_checkpoint",
    "save_checkpoint",
]
