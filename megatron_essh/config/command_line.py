"""How every command that takes a config takes it: CONFIG and --set KEY=VALUE [KEY=VALUE ...]."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Give `parser` the positional `config` (optional where there is a default) and `overrides` from --set."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        nargs=None if default is None else "?",
        default=default,
        help="YAML config file" + ("" if default is None else f" (default: {default.name})"),
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="lay values over the config, such as training.steps=100 model.modes=4",
    )
