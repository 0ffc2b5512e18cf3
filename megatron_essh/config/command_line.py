"""How every command that takes a config takes it: CONFIG and --set KEY=VALUE [KEY=VALUE ...], in any order."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ConfigParser(argparse.ArgumentParser):
    """A parser whose --set ends at the first word without a `=`, so that CONFIG may follow it."""

    def parse_known_args(  # type: ignore[override]  # argparse's overloads tell namespaces apart, all taken here
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        return super().parse_known_args(_settings_last(sys.argv[1:] if args is None else args), namespace)


def add_config_arguments(parser: ConfigParser, default: Path | None = None, *, several: bool = False) -> None:
    """Give `parser` the positional `config` (optional where there is a default) and `overrides` from --set.

    several: `configs` in its place, one or more.
    """
    if several:
        parser.add_argument("configs", metavar="CONFIG", type=Path, nargs="+", help="YAML config files")
    else:
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


def _settings_last(words: Sequence[str]) -> list[str]:
    """`words` with each setting as one word, `--set=KEY=VALUE`, after all others (but before a `--`).

    argparse itself would give every word up to the next option to --set, and CONFIG with them.
    """
    end = words.index("--") if "--" in words else len(words)
    others: list[str] = []
    settings: list[str] = []
    wanted = taking = False
    for word in words[:end]:
        if word == "--set":
            wanted = taking = True
        elif taking and not word.startswith("-") and (wanted or "=" in word):
            settings.append(f"--set={word}")
            wanted = False
        else:
            if wanted:
                break
            taking = False
            others.append(word)
    if wanted:
        return list(words)  # a --set without a value: argparse's own error says so
    return [*others, *settings, *words[end:]]
