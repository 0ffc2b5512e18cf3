"""What the training commands have in common on their command lines."""

from __future__ import annotations

import argparse
import json

from megatron_essh.config import RunConfig, load_config
from megatron_essh.config.command_line import ConfigParser, add_config_arguments


def run_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with CONFIG, --set and --output."""
    parser = ConfigParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--output", metavar="DIR", help="folder of the run, in place of training.output")
    # The DeepSpeed launcher gives every process its rank in this way too; LOCAL_RANK, which all launchers set, is read.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def run_config(arguments: argparse.Namespace, output: str | None = None) -> RunConfig:
    """The config that the command line gives; `output` takes the place of training.output."""
    overrides = list(arguments.overrides)
    if output is not None:
        overrides.append(f"training.output={json.dumps(output, ensure_ascii=False)}")  # YAML knows no \ud83d\ude00
    return load_config(arguments.config, overrides)
