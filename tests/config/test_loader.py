"""A config says what it means: composed files, typed values, and errors that name file, key and remedy."""

from pathlib import Path

import pytest

from megatron_essh.config import RunConfig, TokenizerConfig, config_from_mapping, config_to_mapping, load_config
from megatron_essh.errors import UserError

ROOT = Path(__file__).parents[2] / "configs"
MODEL = "model: {d_model: 64, n_layers: 2, channels: 4, value_width: 16, ff_width: 128, vocab_size: 100}\n"


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.yaml")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_shipped_config_loads_and_survives_the_round_trip(path):
    config = load_config(path)
    assert config_from_mapping(RunConfig, config_to_mapping(config), "round trip") == config


def test_base_is_laid_under_and_overrides_over(write):
    write("bottom.yaml", MODEL + "training: {steps: 10, seed: 1}\n")
    write("middle.yaml", "base: bottom.yaml\ntraining: {seed: 2, log_every: 3}\n")
    config = load_config(write("top.yaml", "base: middle.yaml\nmodel: {modes: 4}\n"), ["training.log_every=7"])
    assert (config.training.steps, config.training.seed, config.training.log_every) == (10, 2, 7)
    assert (config.model.modes, config.model.d_model) == (4, 64)


def test_numbers_in_yaml_and_overrides(write):
    path = write("a.yaml", MODEL)
    assert load_config(path, ["optimizer.learning_rate=1e-3"]).optimizer.learning_rate == 1e-3
    assert load_config(path, ["optimizer.learning_rate=1"]).optimizer.learning_rate == 1.0
    assert load_config(path, ["model.attention_layers=[1]"]).model.attention_layers == (1,)
    assert load_config(path, ["model.window=null"]).model.window is None
    tokenizer = load_config(path, ["data.tokenizer.type=byte"]).data.tokenizer
    assert tokenizer is not None
    assert tokenizer.type == "byte"


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        (MODEL + "trainig: {}\n", None, "unknown key trainig; did you mean training?"),
        (MODEL + "training: {step: 3}\n", None, "unknown key training.step; did you mean training.steps?"),
        (MODEL, "model.chanels=3", "unknown key model.chanels; did you mean model.channels?"),
        (MODEL, "model.channels=many", "model.channels: expected an integer, got 'many'"),
        (MODEL, "model.channels=3.5", "model.channels: expected an integer, got 3.5"),
        (MODEL, "model.channels=true", "model.channels: expected an integer, got True"),
        (MODEL, "model.attention_layers=1", "model.attention_layers: expected a list of an integer, got 1"),
        (MODEL, "model.attention_layers=[a]", "model.attention_layers[0]: expected an integer"),
        (MODEL, "model.bank=hankle", "did you mean hankel?"),
        (MODEL, "model.attention_layers=[2]", "2 is not one of the 2 layers"),
        (MODEL, "model.channels=0", "channels must be at least 1, got 0"),
        (MODEL, "training.seed", "expected section.key=value"),
        (MODEL, "model.d_model.x=1", "d_model is a value, not a section"),
        (MODEL, "training.micro_batch=3", "training.micro_batch 3 does not divide elastic.slot_sequences 8"),
        (MODEL, "training.global_batch=12", "not a multiple of elastic.slot_sequences 8; try 8 or 16"),
        (MODEL, "model.ff_width=100", "not a multiple of 64"),
        (MODEL, "training.global_batch=1", "not a multiple of elastic.slot_sequences 8; try 8"),
        (MODEL, "training.validation_tiers=[T11]", "'T11' is none of T1 to T10"),
        (MODEL, "optimizer.learning_rate=-1", "learning_rate must be positive"),
        (MODEL, "data.tokenizer.type=tiktoken", "needs `model`"),
        ("training: {steps: 3}\n", None, "missing key model"),
        ("model: {d_model: 64}\n", None, "missing key model.n_layers (an integer)"),
        ("model: 3\n", None, "model: expected a section of keys, got 3"),
        ("- a\n", None, "expected `key: value` lines"),
        ("a: [\n", None, "not valid YAML"),
        ("base: nowhere.yaml\n", None, "nowhere.yaml: no such config file, named as base by"),
        ("base: bad.yaml\n", None, "leads back to"),
        ("base: 3\n", None, "base: must be the path"),
        (
            MODEL + "training:\n  steps: 3\n  seed: 1\n  'steps': 4\n",
            None,
            "line 5: key steps is given twice, first in line 3",
        ),
        (MODEL + "data: {}\n" + MODEL, None, "line 3: key model is given twice, first in line 1"),
        (MODEL, "training={steps: 3, steps: 4}", "line 1: key steps is given twice"),
        (MODEL, "training.steps=2020-13-45", "training.steps: expected an integer, got '2020-13-45'"),
        (MODEL, "optimizer.eps=2020-01-01", "optimizer.eps: expected a finite number, got '2020-01-01'"),
        (MODEL, "training.steps=!!int x", "remove the tag tag:yaml.org,2002:int"),
        (MODEL + "training: {steps: !!timestamp x}\n", None, "line 2: remove the tag"),
        (MODEL, "training.steps=0x_", "not valid YAML"),
        (MODEL, "training.steps=" + 5000 * "9", "not valid YAML"),
        (MODEL, "model.attention_layers=" + 3000 * "[", "nested too deeply"),
        (MODEL, 'training.output="a\\ud83d"', "training.output: expected text, got 'a\\ud83d'"),
        (MODEL, 'training.output="a\\0"', "training.output: expected text, got 'a\\x00'"),
        (MODEL, "optimizer.learning_rate=.inf", "learning_rate: expected a finite number, got inf"),
        (MODEL, "optimizer.weight_decay=.nan", "weight_decay: expected a finite number, got nan"),
        (MODEL, "optimizer.clip_norm=1e999", "clip_norm: expected a finite number, got '1e999'"),
        (MODEL, "elastic.full_only_fraction=nan", "full_only_fraction: expected a finite number, got 'nan'"),
        (MODEL, "model.rope_base=1" + 400 * "0", "rope_base: expected a finite number, got 1000"),
        (MODEL, "training.seed=4294967296", "seed must lie in [0, 4294967295], got 4294967296"),
        (MODEL, "model.bank_seed=4294967296", "bank_seed must lie in [0, 4294967295]"),
        (MODEL, "model.bank_seed=-1", "bank_seed must lie in [0, 4294967295], got -1"),
        (MODEL, "training.output=", "output"),
        (MODEL, "training.output=''", "training: output is empty"),
    ],
)
def test_a_mistake_is_one_error_that_names_it(write, text, override, said):
    path = write("bad.yaml", text)
    with pytest.raises(UserError) as caught:
        load_config(path, [override] if override else [])
    message = str(caught.value)
    assert said in message
    assert "bad.yaml" in message or message.startswith("--set")
    assert "\n" not in message


def test_one_batch_that_would_do_is_named_once(write):
    with pytest.raises(UserError) as caught:
        load_config(write("a.yaml", MODEL), ["training.global_batch=1"])
    assert str(caught.value).endswith("; try 8")


def test_text_that_looks_like_a_date_is_text_and_sections_may_share_keys_by_reference(write):
    text = "training: {steps: 3, output: 2020-01-01}\n"
    assert load_config(write("a.yaml", MODEL + text)).training.output == "2020-01-01"
    text = "training: &t {global_batch: 8}\nrefinement: {<<: *t, steps: 3, global_batch: 16}\n"
    config = load_config(write("b.yaml", MODEL + text))
    assert (config.training.global_batch, config.refinement.global_batch) == (8, 16)


def test_a_file_that_is_missing_or_no_text(write, tmp_path):
    with pytest.raises(UserError, match="no such config file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="not a readable text file"):
        load_config(path)


def test_a_pattern_is_of_rank_files_alone():
    with pytest.raises(ValueError, match="pattern cl100k is of tiktoken rank files; leave it out for type byte"):
        TokenizerConfig(type="byte", pattern="cl100k")
