"""Where a refinement starts: the pretrained parameters, and the record of them that its checkpoints carry."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_essh.config import ModelConfig, RunConfig, config_from_mapping, config_to_mapping
from megatron_essh.errors import UserError
from megatron_essh.training.checkpoint import load_checkpoint, model_sha256, resolve_checkpoint
from megatron_essh.training.run_folder import differences


def load_source(path: Path | None, model: ModelConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters of a pretraining run, by plain name, and their record: path, model_sha256, step.

    Warns on standard error where that run is not finished.

    Args:
        path: the run's folder (its newest whole checkpoint is taken) or one of its checkpoints.
        model: what the refinement's config says; the checkpoint's must be the same.

    Raises:
        UserError: none given, none there, damaged, not of pretraining, or of another model.
    """
    if path is None:
        raise UserError("refinement starts from a pretrained model: give --from RUN or --from CHECKPOINT")
    checkpoint = resolve_checkpoint(path)
    tensors, values = load_checkpoint(checkpoint, model_only=True)
    if values.get("stage") != "pretrain":
        raise UserError(f"{checkpoint}: holds a {values.get('stage')} run; refinement starts from a pretrain run")
    saved = config_from_mapping(RunConfig, values["config"], f"{checkpoint}: config").model
    for key, before, now in differences(config_to_mapping(saved), config_to_mapping(model), "model"):
        raise UserError(
            f"{checkpoint}: its model was trained with {key}: {before}, and the config says {now}; "
            "refine with the config that the model was pretrained with"
        )
    steps = values["config"]["training"]["steps"]
    if values["step"] < steps:
        print(
            f"warning: {checkpoint}: step {values['step']} of {steps}: pretraining is not finished",
            file=sys.stderr,
            flush=True,
        )
    record = {
        "path": str(checkpoint.resolve()),
        "model_sha256": model_sha256(checkpoint),
        "step": values["step"],
    }
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, record


def check_source(path: Path | None, record: Mapping[str, Any], run: Path) -> None:
    """Hold a continued refinement to the source that it started from.

    Args:
        path: what the user gives now; None, or a source that is no longer there, is not needed any more.
        record: the source's record in the refinement's checkpoint.
        run: the refinement's folder, named in errors.

    Raises:
        UserError: `path` leads to another model.
    """
    if path is None:
        return
    if not path.exists():
        print(f"{path} is no longer there, and not needed: the refinement in {run} continues on its own")
        return
    found = resolve_checkpoint(path)
    if model_sha256(found) != record["model_sha256"]:
        raise UserError(
            f"{run}: holds a refinement of {record['path']} (step {record['step']}), and --from now leads to "
            f"{found}; give --from that checkpoint, or another output folder to refine this one"
        )
