"""What the commands that open a trained model have in common on their command lines."""

from __future__ import annotations

import argparse
from typing import get_args

import torch

from megatron_essh.config import RunConfig, TokenizerConfig, config_from_mapping
from megatron_essh.config.components import TokenizerType
from megatron_essh.data.tokenizer_reference import TokenizerReference
from megatron_essh.elastic.capacity import Capacity
from megatron_essh.errors import UserError
from megatron_essh.export.loading import open_model
from megatron_essh.export.provenance import Provenance
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.model.language_model import LanguageModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --device and the tokenizer's flags."""
    parser.add_argument("model", metavar="MODEL", help="folder of a run, of one of its checkpoints or of an export")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU if any")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 is autocast, as in training"
    )
    parser.add_argument("--tokenizer-type", choices=get_args(TokenizerType), help="in place of the recorded one")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="the tokenizer's file, where it has moved")
    parser.add_argument("--tokenizer-pattern", help="splitting pattern of a tiktoken rank file (default: gpt2)")


def open_given_model(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[LanguageModel, RunConfig, Provenance]:
    """MODEL; an export's own copy of its tokenizer's file must be whole only if the command line names no tokenizer.

    Raises:
        UserError: as `export.loading.open_model`.
    """
    return open_model(arguments.model, device, tokenizer=not _tokenizer_flags(arguments))


def _tokenizer_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """What the command line says of a tokenizer, by the config's names."""
    flags = {
        "type": arguments.tokenizer_type,
        "model": arguments.tokenizer_model,
        "pattern": arguments.tokenizer_pattern,
    }
    return {key: value for key, value in flags.items() if value is not None}


def given_tokenizer(arguments: argparse.Namespace, recorded: TokenizerReference | None) -> TokenizerConfig | None:
    """The tokenizer that the command line names, if any; a file alone is taken for the recorded type.

    Raises:
        UserError: the flags do not name a tokenizer.
    """
    named = _tokenizer_flags(arguments)
    if not named:
        return None
    if "type" not in named:
        if recorded is None:
            raise UserError("--tokenizer-type: not given, and neither model nor data record one; give it too")
        named = {"type": recorded.config.type, "pattern": recorded.config.pattern, **named}
    return config_from_mapping(TokenizerConfig, named, "--tokenizer-type, --tokenizer-model, --tokenizer-pattern")


def describe(provenance: Provenance, config: RunConfig, capacity: Capacity) -> str:
    """One line for a command's beginning: which model this is, and how large."""
    parameters = parameter_counts(config.model, capacity).total
    what = f"export {provenance.tier}" if provenance.kind == "export" else "checkpoint"
    return (
        f"{provenance.path}: {what} ({provenance.stage}, step {provenance.step:,}); {capacity.channels} channels, "
        f"{capacity.ff_width} feed-forward units, {parameters:,} parameters"
    )
