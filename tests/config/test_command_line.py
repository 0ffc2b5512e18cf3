"""CONFIG and --set mean the same in any order, in every command that takes them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_essh.config.command_line import ConfigParser, add_config_arguments

CONFIG = Path(__file__).parents[2] / "configs/models/synthetic.yaml"


def parsed(*words: str, default: Path | None = None) -> argparse.Namespace:
    parser = ConfigParser()
    parser.add_argument("what", nargs="?", choices=("all", "scan"), default="all")
    add_config_arguments(parser, default)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output")
    return parser.parse_args(list(words))


@pytest.mark.parametrize(
    "words",
    [
        "scan C --set a=1 b=2",
        "--set a=1 b=2 scan C",
        "scan --set a=1 b=2 C",
        "scan --set a=1 C --set b=2",
        "--set a=1 --set b=2 -- scan C",
        "scan C --set=a=1 --set b=2",
    ],
)
def test_settings_stand_anywhere(words) -> None:
    for default in (None, Path("other.yaml")):
        got = parsed(*words.split(), default=default)
        assert (got.what, got.config, got.overrides) == ("scan", Path("C"), ["a=1", "b=2"])


def test_a_setting_ends_at_the_next_option_and_takes_its_first_word_whatever_it_is() -> None:
    got = parsed("scan", "C", "--set", "a=1", "--output", "x=y", "--json")
    assert (got.overrides, got.output, got.json) == (["a=1"], "x=y", True)
    assert parsed("scan", "C", "--set", "a").overrides == ["a"], "the config's reader says what is wrong with it"
    assert parsed("--set", "a=1", default=CONFIG).config == CONFIG


@pytest.mark.parametrize("words", ["scan C --set", "scan C --set --json"])
def test_a_missing_value_or_config_is_a_usage_error(words, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        parsed(*words.split())
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["launch/pretrain.py", "tools/inspect_model.py", "tools/benchmark.py all"])
def test_every_command_takes_either_order(tool, command) -> None:
    """Two settings, of which the second is wrong: all words arrived where they belong."""
    first, second = "model.modes=4", "training.steps=0"
    for words in (
        ["--set", first, second, CONFIG],
        [CONFIG, "--set", first, second],
        [CONFIG, "--set", first, "--set", second],
    ):
        done = command(*tool.split(), *words)
        assert done.returncode == 2
        assert f"{CONFIG} with --set: training: steps must be at least 1, got 0" in done.stderr
