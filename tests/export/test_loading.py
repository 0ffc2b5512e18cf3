"""One door to every kind of trained model; what does not belong behind it is refused by name."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil

import pytest
import torch

from megatron_essh.config import TokenizerConfig
from megatron_essh.device import pick_device
from megatron_essh.errors import UserError
from megatron_essh.export.loading import build_model, open_model, open_tensors, open_tokenizer
from megatron_essh.export.tiers import export_tier
from megatron_essh.training.checkpoint import save_checkpoint


@pytest.fixture
def run(write_run, byte_pair):
    return write_run()


@pytest.fixture
def export(run, tmp_path):
    tensors, config, source = open_tensors(run.folder)
    export_tier(tensors, config, source, "T4", tmp_path / "exports" / "T4")
    return tmp_path / "exports" / "T4"


@pytest.mark.parametrize("place", ["run", "checkpoints", "checkpoint"])
def test_run_folder_and_checkpoint_folder_open_the_same_model(run, place):
    folder = {"run": run.folder, "checkpoints": run.folder / "checkpoints", "checkpoint": run.checkpoint}[place]
    model, config, provenance = open_model(folder)
    assert config == run.config
    assert (provenance.kind, provenance.tier, provenance.step, provenance.stage) == (
        "checkpoint",
        "full",
        7,
        "pretrain",
    )
    assert provenance.path == provenance.origin == str(run.checkpoint.resolve())
    assert provenance.sha256 == provenance.origin_sha256
    for name, parameter in run.model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    tokens = torch.randint(264, (2, 11))
    assert torch.equal(model(tokens), run.model(tokens))


def test_an_opened_model_is_for_inference(run):
    model, _, _ = open_model(run.folder)
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())


def test_the_tokenizer_is_the_one_that_the_checkpoint_records(run, byte_pair, write_run):
    _, _, provenance = open_model(run.folder)
    assert provenance.tokenizer.fingerprint == byte_pair.tokenizer.fingerprint
    assert provenance.tokenizer.eod == 256
    assert open_tokenizer(provenance.tokenizer, entries=264).decode([97]) == "a"
    shutil.rmtree(byte_pair.prefix.parent)
    assert open_model(run.folder)[2] == provenance  # known where the data is not
    _, _, provenance = open_model(write_run("of unknown data").folder)
    assert provenance.tokenizer is None
    assert open_tokenizer(provenance.tokenizer, entries=264) is None


def test_the_config_names_the_tokenizer_of_data_that_does_not(write_run, tiny_config):
    named = dataclasses.replace(tiny_config.data, tokenizer=TokenizerConfig(type="byte"))
    run = write_run(config=dataclasses.replace(tiny_config, data=named))
    assert open_model(run.folder)[2].tokenizer.eod == 256


def test_an_export_opens_with_its_origin(run, export):
    _, config, provenance = open_model(export)
    assert (provenance.kind, provenance.tier, provenance.step) == ("export", "T4", 7)
    assert provenance.path == str(export.resolve())
    assert provenance.origin == str(run.checkpoint.resolve())
    assert provenance.tokenizer.fingerprint == open_tensors(run.folder)[2].tokenizer.fingerprint
    assert (config.model.channels, config.model.family_channels) == (3, 6)


def foreign(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


BREAKAGES = {
    "missing": (lambda run, tmp: tmp / "nowhere", "no such folder"),
    "a file": (lambda run, tmp: run.checkpoint / "state.json", "is a file"),
    "empty folder": (lambda run, tmp: (tmp / "empty").mkdir() or tmp / "empty", "no checkpoint"),
    "foreign folder": (lambda run, tmp: foreign(tmp / "hf"), "no checkpoint"),
    "truncated": (lambda run, tmp: cut(run, "model.safetensors"), "bytes where the manifest records"),
    "truncated state": (lambda run, tmp: cut(run, "state.json"), "bytes where the manifest records"),
    "flipped byte": (lambda run, tmp: flip(run, "model.safetensors"), "SHA-256"),
    "no manifest": (lambda run, tmp: (run.checkpoint / "manifest.json").unlink() or run.checkpoint, "manifest.json"),
}


def cut(run, name):
    file = run.checkpoint / name
    file.write_bytes(file.read_bytes()[:-9])
    return run.checkpoint


def flip(run, name):
    content = bytearray((run.checkpoint / name).read_bytes())
    content[-5] ^= 1
    (run.checkpoint / name).write_bytes(content)
    return run.checkpoint


@pytest.mark.parametrize("case", BREAKAGES)
def test_what_is_no_whole_model_is_refused(case, run, tmp_path):
    breakage, message = BREAKAGES[case]
    with pytest.raises(UserError, match=message):
        open_model(breakage(run, tmp_path))


def test_a_run_whose_newest_checkpoint_is_damaged_opens_the_one_before_and_says_so(run, capsys):
    later = run.folder / "checkpoints/step_00000009"
    shutil.copytree(run.checkpoint, later)
    (later / "model.safetensors").write_bytes(b"")
    _, _, provenance = open_model(run.folder)
    assert provenance.step == 7
    assert "step_00000009" in capsys.readouterr().err


def test_the_checkpoint_of_something_else_is_refused(tmp_path):
    path = save_checkpoint(tmp_path / "other", 1, {"model.w": torch.zeros(2)}, {"step": 1}, keep_last=1)
    with pytest.raises(UserError, match=r"state\.json: has no config"):
        open_model(path)


def test_pickles_are_not_opened(tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    for name in ("model.safetensors", "pytorch_model.bin", "state.json", "manifest.json", "export.json"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="JSON"):
        open_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("final_norm.weight"), r"without final_norm\.weight \(1 missing, 0 unknown\)"),
        (lambda t: t.update(extra=torch.zeros(1)), r"with extra \(0 missing, 1 unknown\)"),
        (lambda t: t.update({"final_norm.weight": torch.zeros(31)}), r"final_norm\.weight has shape \(31,\).*\(32,\)"),
        (
            lambda t: t.update({"final_norm.weight": t["final_norm.weight"].bfloat16()}),
            r"final_norm\.weight is of torch\.bfloat16, and embedding\.weight of torch\.float32",
        ),
        (
            lambda t: t.update({name: tensor.int() for name, tensor in t.items()}),
            r"embedding\.weight is of torch\.int32, expected a floating dtype",
        ),
    ],
)
def test_tensors_must_be_exactly_the_models(change, message, run):
    tensors, config, _ = open_tensors(run.folder)
    change(tensors)
    with pytest.raises(UserError, match=f"^here: .*{message}.*; restore it, or make it again$"):
        build_model(tensors, config.model, "here")


def edit(export, name, old, new):
    text = (export / name).read_text()
    assert old in text
    (export / name).write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda e: (e / "model.safetensors").unlink(), r"model\.safetensors: missing"),
        (lambda e: (e / "model.safetensors").write_bytes(b"x" * 99), r"99 bytes where export\.json records"),
        (lambda e: edit(e, "config.yaml", "rope_base: 10000.0", "rope_base: 20000.0"), r"config\.yaml: changed since"),
        (lambda e: (e / "export.json").write_text("{"), r"export\.json: not valid JSON"),
        (lambda e: (e / "export.json").write_text('{"format": "x"}'), "not the record of a megatron_essh export"),
        (
            lambda e: edit(e, "export.json", '"version": 1', '"version": 2'),
            "version 2, and this package reads version 1",
        ),
        (lambda e: edit(e, "export.json", '"tier"', '"teir"'), "unknown key teir; did you mean tier"),
        (lambda e: edit(e, "export.json", '"channels": 3', '"channels": 4'), r"3 channels.*records 4"),
    ],
)
def test_a_damaged_or_edited_export_is_refused(damage, message, export):
    open_model(export)
    damage(export)
    with pytest.raises(UserError, match=message):
        open_model(export)


def test_another_tokenizer_than_the_recorded_one_is_refused(run, tmp_path):
    reference = open_tensors(run.folder)[2].tokenizer
    other = tmp_path / "tokenizer.json"
    vocabulary = {"<|endoftext|>": 0, "a": 1}
    end = {"id": 0, "content": "<|endoftext|>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    other.write_text(json.dumps({"version": "1.0", "added_tokens": [end], "model": model}))
    given = TokenizerConfig(type="huggingface", model=str(other))
    with pytest.raises(UserError, match="not the tokenizer that the model was trained with"):
        open_tokenizer(reference, given, entries=264)
    assert open_tokenizer(None, given, entries=264).vocab_size == 2


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(UserError, match="257 entries, and the model's vocabulary has 200"):
        open_tokenizer(None, TokenizerConfig(type="byte"), entries=200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused():
    assert pick_device("auto").type == "cpu"
    with pytest.raises(UserError, match="no CUDA device"):
        pick_device("cuda")
