"""The one place that opens a trained model: a run's folder, one of its checkpoints, or an export.

Hashes are verified, tensors must be exactly the model's, nothing is unpickled. What a user can have got wrong
is a `UserError` that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_essh.config import ModelConfig, RunConfig, TokenizerConfig, config_from_mapping
from megatron_essh.data.tokenizer_reference import TokenizerReference
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.errors import UserError
from megatron_essh.export.folder import CONFIG_FILE, MODEL_FILE, RECORD_FILE, read_export
from megatron_essh.export.provenance import Provenance
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.training.checkpoint import load_checkpoint, model_sha256, resolve_checkpoint

SHOWN = 3
"""Names that an error lists."""
MAKE_AGAIN = "restore it, or make it again"
"""What to do about tensors that are not the model's."""


def open_model(
    path: str | Path, device: torch.device | str = "cpu", *, tokenizer: bool = True
) -> tuple[LanguageModel, RunConfig, Provenance]:
    """Build the model that `path` holds, in evaluation mode and without gradients.

    Args:
        path, tokenizer: as `open_tensors` takes them.
        device: where the model is to be.

    Raises:
        UserError: as `open_tensors` and `build_model`.
    """
    tensors, config, provenance = open_tensors(path, tokenizer=tokenizer)
    return build_model(tensors, config.model, provenance.path, device), config, provenance


def open_tensors(path: str | Path, *, tokenizer: bool = True) -> tuple[dict[str, Tensor], RunConfig, Provenance]:
    """The verified parameters that `path` holds, by plain name and on the CPU, with config and provenance.

    Args:
        path: a run's output folder or its folder of checkpoints (the newest whole checkpoint is taken), a
            checkpoint folder, or an export folder.
        tokenizer: False lets an export's copy of its tokenizer's file be missing or changed, for a caller that needs no
            tokenizer or brings the file.

    Raises:
        UserError: missing, truncated, damaged, foreign or unfinished.
    """
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"{folder}: no such folder; give a run, a checkpoint or an export")
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; give the folder of a run, a checkpoint or an export")
    if (folder / RECORD_FILE).exists() or all((folder / name).exists() for name in (MODEL_FILE, CONFIG_FILE)):
        tensors, config, record = read_export(folder, tokenizer=tokenizer)
        return tensors, config, record.provenance(folder)
    return _open_checkpoint(resolve_checkpoint(folder))


def _open_checkpoint(folder: Path) -> tuple[dict[str, Tensor], RunConfig, Provenance]:
    saved, values = load_checkpoint(folder, model_only=True)
    state = folder / "state.json"
    missing = [key for key in ("config", "stage", "step", "tokenizer") if key not in values]
    if missing:
        raise UserError(
            f"{state}: has no {missing[0]}: not the checkpoint of a training run; give one that training saved"
        )
    config = config_from_mapping(RunConfig, values["config"], str(state))
    tensors = {name.removeprefix("model."): tensor for name, tensor in saved.items()}
    path, digest = str(folder.resolve()), model_sha256(folder)
    tokenizer = values["tokenizer"]
    provenance = Provenance(
        kind="checkpoint",
        path=path,
        sha256=digest,
        origin=path,
        origin_sha256=digest,
        tier="full",
        step=values["step"],
        stage=values["stage"],
        tokenizer=None if tokenizer is None else config_from_mapping(TokenizerReference, tokenizer, str(state)),
    )
    return tensors, config, provenance


def build_model(
    tensors: Mapping[str, Tensor], model: ModelConfig, where: str, device: torch.device | str = "cpu"
) -> LanguageModel:
    """A model of exactly these tensors, in evaluation mode and without gradients.

    The model is built without initial values; on the CPU it takes over the tensors' memory.

    Args:
        tensors: parameters by plain name.
        model: the shapes to expect.
        where: names the tensors' origin in errors.
        device: where the model is to be.

    Raises:
        UserError: as `check_tensors`.
    """
    built = check_tensors(tensors, model, where)
    built.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, strict=True, assign=True)
    return built.requires_grad_(False).eval()


def check_tensors(tensors: Mapping[str, Tensor], model: ModelConfig, where: str) -> LanguageModel:
    """Hold tensors to a config's model, whose parameters they must be exactly, all of one floating dtype.

    Returns:
        The model on the meta device, which holds no numbers.

    Args:
        tensors: parameters by plain name.
        model: the shapes to expect.
        where: names the tensors' origin in errors.

    Raises:
        UserError: a tensor is missing, unknown, of another shape than the config makes it, or of another dtype.
    """
    with torch.device("meta"):
        blank = LanguageModel(model)
    expected = {name: tuple(parameter.shape) for name, parameter in blank.named_parameters()}
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected]
    if missing or unknown:
        found = [f"without {name}" for name in missing[:SHOWN]] + [f"with {name}" for name in unknown[:SHOWN]]
        raise UserError(
            f"{where}: not the tensors of its config's model: {', '.join(found)} "
            f"({len(missing)} missing, {len(unknown)} unknown); {MAKE_AGAIN}"
        )
    first, *_ = expected
    dtype = tensors[first].dtype
    if not dtype.is_floating_point:
        raise UserError(f"{where}: tensor {first} is of {dtype}, expected a floating dtype; {MAKE_AGAIN}")
    for name, shape in expected.items():
        actual = tuple(tensors[name].shape)
        if actual != shape:
            raise UserError(f"{where}: tensor {name} has shape {actual}, and its config says {shape}; {MAKE_AGAIN}")
        if tensors[name].dtype != dtype:
            raise UserError(f"{where}: tensor {name} is of {tensors[name].dtype}, and {first} of {dtype}; {MAKE_AGAIN}")
    return blank


def open_tokenizer(
    reference: TokenizerReference | None, given: TokenizerConfig | None = None, *, entries: int
) -> Tokenizer | None:
    """The tokenizer of a model, or None where neither the model nor the caller names one.

    Args:
        reference: what the model or its data record.
        given: takes the place of the recorded file, where that has moved.
        entries: the model's vocabulary, padding included.

    Raises:
        UserError: the tokenizer cannot be read, is not the one that the model was trained with, or has more
            entries than the model.
    """
    config = given if given is not None or reference is None else reference.config
    if config is None:
        return None
    tokenizer = build_tokenizer(config)
    name = config.model or f"tokenizer {config.type}"
    if reference is not None and tokenizer.fingerprint != reference.fingerprint:
        raise UserError(
            f"{name}: not the tokenizer that the model was trained with (fingerprint "
            f"{tokenizer.fingerprint[:12]}, recorded {reference.fingerprint[:12]}); name that one"
        )
    if tokenizer.vocab_size > entries:
        raise UserError(
            f"{name}: {tokenizer.vocab_size} entries, and the model's vocabulary has {entries}: "
            "not the tokenizer it was trained with; name that one"
        )
    return tokenizer
