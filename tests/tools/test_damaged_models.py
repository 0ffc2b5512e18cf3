"""What is wrong with a damaged export or run folder, and what to do, in one line of every command that opens it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_essh.config import TokenizerConfig
from megatron_essh.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_essh.training.checkpoint.files import file_sha256

TENSOR = "blocks.1.attention.qkv"
CONVERT = "tools/convert_checkpoint.py"


@pytest.fixture
def run(write_run: Callable[..., Any], tiny_config: Any, tmp_path: Path) -> Any:
    """A run whose tokenizer has a file, which exports carry a copy of."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["abc"], vocab_size=257, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save(str(tmp_path / "words.json"))
    named = TokenizerConfig(type="huggingface", model=str(tmp_path / "words.json"))
    return write_run(config=replace(tiny_config, data=replace(tiny_config.data, tokenizer=named)))


@pytest.fixture
def export(run: Any, tmp_path: Path, command: Callable[..., Any]) -> Path:
    done = command("tools/export_tiers.py", run.folder, "--tier", "full", "--output", tmp_path / "exports")
    assert done.returncode == 0, done.stderr
    return tmp_path / "exports/full"


def said(done: Any) -> str:
    """The one line of a mistake of the user's."""
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    return errors[0].removeprefix("error: ")


def opened(command: Callable[..., Any], model: Path, output: Path) -> list[Any]:
    """How every command that takes an export or a run as a model ends with this one."""
    return [
        command("tools/generate.py", model, "--prompt", "a", "--max-new-tokens", 2),
        command("tools/evaluate.py", "perplexity", model, "--data", output / "none"),
        command("tools/export_tiers.py", model, "--tier", "T1", "--output", output / "cut"),
        command("tools/benchmark.py", "decode", model),
    ]


def cut(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:count])


def agree(export: Path) -> None:
    """Let export.json record the files as they are now."""
    file = export / "export.json"
    tensors = export / "model.safetensors"
    changes = {
        "bytes": tensors.stat().st_size,
        "sha256": file_sha256(tensors),
        "config_sha256": file_sha256(export / "config.yaml"),
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def record(export: Path, **changes: Any) -> None:
    file = export / "export.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tensors(export: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    named = load_file(export / "model.safetensors")
    change(named)
    save_file(named, export / "model.safetensors")
    agree(export)


def config(export: Path, old: str, new: str) -> None:
    text = (export / "config.yaml").read_text()
    assert old in text
    (export / "config.yaml").write_text(text.replace(old, new))


NO_TOKENIZER = "no tokenizer"
AGAIN, REMADE = "; export it again", "; restore it, or make it again"
EXPORTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no tensors": (lambda e: (e / "model.safetensors").unlink(), "/model.safetensors: missing", AGAIN),
    NO_TOKENIZER: (lambda e: (e / "tokenizer.json").unlink(), "/tokenizer.json: missing", AGAIN),
    "no record": (
        lambda e: (e / "export.json").unlink(),
        ": not an export, or an unfinished one: it has no export.json; export it again",
        ", or give the folder of an export",
    ),
    "truncated": (lambda e: cut(e / "model.safetensors", -9), "/model.safetensors: ", AGAIN),
    "truncated, and recorded so": (
        lambda e: (cut(e / "model.safetensors", -9), agree(e)),
        "/model.safetensors: not a readable safetensors file (",
        AGAIN,
    ),
    "wrong JSON": (lambda e: cut(e / "export.json", 40), "/export.json: not valid JSON (", AGAIN),
    "wrong field": (lambda e: record(e, step="x"), "/export.json: step: expected an integer, got 'x'", AGAIN),
    "another record": (
        lambda e: record(e, format="x"),
        "/export.json: not the record of a megatron_essh export",
        "; give the folder of an export",
    ),
    "future version": (
        lambda e: record(e, version=99),
        "/export.json: version 99, and this package reads version 1",
        "; update the package, or export again with this one",
    ),
    "wrong shape": (
        lambda e: tensors(e, lambda t: t.update({TENSOR: torch.zeros(4, 2)})),
        f": tensor {TENSOR} has shape (4, 2), and its config says (4, 3, 8, 32)",
        REMADE,
    ),
    "whole numbers": (
        lambda e: tensors(e, lambda t: t.update({TENSOR: t[TENSOR].int()})),
        f": tensor {TENSOR} is of torch.int32, and embedding.weight of torch.float32",
        REMADE,
    ),
    "two precisions": (
        lambda e: tensors(e, lambda t: t.update({TENSOR: t[TENSOR].bfloat16()})),
        f": tensor {TENSOR} is of torch.bfloat16, and embedding.weight of torch.float32",
        REMADE,
    ),
    "no such tensor": (
        lambda e: tensors(e, lambda t: t.pop(TENSOR)),
        f": not the tensors of its config's model: without {TENSOR} (1 missing, 0 unknown)",
        REMADE,
    ),
    "edited config": (
        lambda e: config(e, "rope_base: 10000.0", "rope_base: .nan"),
        "/config.yaml: changed since the export (",
        AGAIN,
    ),
    "NaN in the config": (
        lambda e: (config(e, "rope_base: 10000.0", "rope_base: .nan"), agree(e)),
        "/config.yaml: model.rope_base: expected a finite number, got nan",
        AGAIN,
    ),
}
NO_EXPORT = ("no record", "another record", "future version")
"""What is no export that could be verified; all others are damaged ones, which fail verification."""


@pytest.mark.parametrize("case", EXPORTS)
def test_a_damaged_export_says_what_is_wrong_and_what_to_do(case, export, tmp_path, command):
    damage, wrong, remedy = EXPORTS[case]
    damage(export)
    commands = opened(command, export, tmp_path)
    if case == NO_TOKENIZER:  # which benchmarks do without
        assert commands.pop().returncode == 0
    for done in commands:
        message = said(done)
        assert message.startswith(f"{export}{wrong}"), message
        assert message.endswith(remedy), message
    done = command("tools/verify_export.py", export, "--length", 9, "--batches", 1)
    assert done.returncode == (2 if case in NO_EXPORT else 1), done
    words = " ".join((said(done) if case in NO_EXPORT else done.stdout).split())  # of a table that folds long lines
    assert remedy in words, words
    assert not (tmp_path / "cut").exists() or not any((tmp_path / "cut").iterdir())


def saved_anew(run: Any, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> None:
    named, values = load_checkpoint(run.checkpoint)
    change(named, values)
    shutil.rmtree(run.checkpoint)
    save_checkpoint(run.checkpoint.parent, 7, named, values, keep_last=1)


OTHER = "; give another checkpoint, or restore this one"
CHECKPOINTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "no state": (lambda run: (run.checkpoint / "state.json").unlink(), "/state.json: missing", OTHER),
    "no manifest": (lambda run: (run.checkpoint / "manifest.json").unlink(), ": not a megatron_essh checkpoint", OTHER),
    "truncated": (
        lambda run: cut(run.checkpoint / "model.safetensors", -9),
        "/model.safetensors: ",
        OTHER,
    ),
    "wrong JSON": (lambda run: cut(run.checkpoint / "manifest.json", 30), "/manifest.json: cannot be read (", OTHER),
    "future version": (
        lambda run: (run.checkpoint / "manifest.json").write_text(
            json.dumps({"format": "megatron_essh checkpoint", "version": 99})
        ),
        "/manifest.json: version 99 where this package reads versions 1 and 2 (a newer one may read it)",
        OTHER,
    ),
    "not of training": (
        lambda run: saved_anew(run, lambda _, values: values.pop("config")),
        "/state.json: has no config: not the checkpoint of a training run",
        "; give one that training saved",
    ),
    "unknown tensor": (
        lambda run: saved_anew(run, lambda t, _: t.update({"model.extra": torch.zeros(1)})),
        ": not the tensors of its config's model: with extra (0 missing, 1 unknown)",
        REMADE,
    ),
    "whole numbers": (
        lambda run: saved_anew(
            run, lambda t, _: t.update({"model.embedding.weight": t["model.embedding.weight"].int()})
        ),
        ": tensor embedding.weight is of torch.int32, expected a floating dtype",
        REMADE,
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_damaged_checkpoint_says_what_is_wrong_and_what_to_do(case, run, tmp_path, command):
    damage, wrong, remedy = CHECKPOINTS[case]
    damage(run)
    for done in opened(command, run.checkpoint, tmp_path):
        message = said(done)
        assert message.startswith(f"{run.checkpoint}{wrong}"), message
        assert message.endswith(remedy), message
    if remedy == OTHER:
        message = said(command(CONVERT, "to-file", run.checkpoint, tmp_path / "one.safetensors"))
        assert message.startswith(f"{run.checkpoint}{wrong}"), message
        assert message.endswith(remedy), message
        folder = run.checkpoint.parent
        nothing = f"{folder}: no whole checkpoint (step_XXXXXXXX) in this folder; restore one, or give another run"
        assert [said(done) for done in opened(command, run.folder, tmp_path)] == [nothing] * 4


def test_a_folder_without_a_model_says_what_to_give(tmp_path, command):
    wrong = f"{tmp_path}: no checkpoint (step_XXXXXXXX) in this folder"
    remedy = "give a run's output folder or one of its checkpoints"
    assert [said(done) for done in opened(command, tmp_path, tmp_path)] == [f"{wrong}; {remedy}"] * 4
    assert said(command(CONVERT, "to-file", tmp_path, tmp_path / "one.safetensors")) == f"{wrong}; {remedy}"


def test_a_file_in_place_of_a_folder_says_what_to_give(tmp_path, command):
    file, none = tmp_path / "file", tmp_path / "none"
    file.touch()
    for done in opened(command, file, tmp_path)[:3]:  # what is no folder is a config to the benchmarks
        assert said(done) == f"{file}: is a file; give the folder of a run, a checkpoint or an export"
    for done in opened(command, none, tmp_path)[:3]:
        assert said(done) == f"{none}: no such folder; give a run, a checkpoint or an export"
    assert said(command("tools/verify_export.py", file)) == f"{file}: is a file; give the folder of an export"
    assert said(command("tools/verify_export.py", none)) == f"{none}: no such folder; give the folder of an export"


def test_exports_do_not_go_into_a_file(run, tmp_path, command):
    (tmp_path / "notes").touch()
    for output in (tmp_path / "notes", tmp_path / "notes/exports"):
        message = said(command("tools/export_tiers.py", run.folder, "--tier", "T1", "--output", output))
        assert message == f"{tmp_path / 'notes'}: is a file; give the name of a folder"


@pytest.mark.parametrize(
    ("metadata", "wrong", "remedy"),
    [
        (None, "holds parameters alone", "give --config, the config of the run that they are of"),
        ({"state": "{"}, "its metadata is not this program's (JSONDecodeError", "--everything"),
        ({"state": "{}"}, "its metadata is not this program's (KeyError('step'))", "--everything"),
        ({"state": "[]"}, "its metadata is not this program's (TypeError", "--everything"),
        ({"state": '{"step": 3}', "others": "5"}, "its metadata is not this program's (TypeError", "--everything"),
    ],
)
def test_a_file_that_is_no_checkpoint_says_what_to_do(metadata, wrong, remedy, tmp_path, command):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, file, metadata=metadata)
    message = said(command(CONVERT, "from-file", file, tmp_path / "made"))
    assert message.startswith(f"{file}: {wrong}"), message
    assert message.endswith(remedy), message
    cut(file, 50)
    message = said(command(CONVERT, "from-file", file, tmp_path / "made"))
    assert message.startswith(f"{file}: not a readable safetensors file ("), message
    assert message.endswith("; write or copy it again"), message
    file.unlink()
    assert said(command(CONVERT, "from-file", file, tmp_path / "made")) == (
        f"{file}: no such file; give a safetensors file"
    )
    assert not (tmp_path / "made").exists()


def test_another_tokenizer_than_the_models_is_refused_with_what_to_name(export, command):
    message = said(command("tools/generate.py", export, "--prompt", "a", "--tokenizer-type", "byte"))
    assert message.startswith("tokenizer byte: not the tokenizer that the model was trained with (fingerprint ")
    assert message.endswith("); name that one")


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_the_tokenizer_that_is_named_takes_the_place_of_the_exports_copy(
    damage, export, write_byte_pair, tmp_path, command
):
    few = ("--prompt", "abc", "--max-new-tokens", 3)
    whole = command("tools/generate.py", export, *few)
    copy, file = export / "tokenizer.json", tmp_path / "words.json"
    if damage == "missing":
        copy.unlink()
    else:
        copy.write_text("{}")
    given = command("tools/generate.py", export, *few, "--tokenizer-model", file)
    assert given.returncode == 0, given.stderr
    assert given.stdout == whole.stdout
    pair = write_byte_pair().prefix
    pair.with_suffix(".json").unlink()
    scored = command("tools/evaluate.py", "perplexity", export, "--data", pair, "--tokenizer-model", file)
    assert scored.returncode == 0, scored.stderr
    assert "unknown" not in scored.stdout  # bits a byte

    other = tmp_path / "other.json"
    other.write_text(file.read_text() + " ")
    for words in (("tools/generate.py", export, *few), ("tools/evaluate.py", "perplexity", export, "--data", pair)):
        message = said(command(*words, "--tokenizer-model", other))
        assert message.startswith(f"{other}: not the tokenizer that the model was trained with (fingerprint "), message


def test_the_other_files_are_held_to_their_hashes_where_a_tokenizer_is_named(export, tmp_path, command):
    (export / "tokenizer.json").unlink()
    cut(export / "model.safetensors", -9)
    named = ("--tokenizer-model", tmp_path / "words.json")
    for done in (
        command("tools/generate.py", export, "--prompt", "a", *named),
        command("tools/evaluate.py", "perplexity", export, "--data", tmp_path / "none", *named),
        command("tools/benchmark.py", "decode", export),
    ):
        assert said(done).startswith(f"{export}/model.safetensors: "), done
