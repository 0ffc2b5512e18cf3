"""Verification passes what is right and finds each thing that is not."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_essh.errors import UserError
from megatron_essh.export.loading import open_tensors
from megatron_essh.export.tiers import export_tier
from megatron_essh.export.verify import CHECKS, RandomTokens, verify_export
from megatron_essh.training.checkpoint.files import file_sha256


@pytest.fixture
def run(write_run, byte_pair):
    return write_run()


@pytest.fixture
def export(run, tmp_path):
    export_tier(*open_tensors(run.folder), "5,100", tmp_path / "cut")
    return tmp_path / "cut"


def failures(*args):
    checks = verify_export(*args, tokens=RandomTokens(batches=2, length=33))
    assert [check.name for check in checks] == list(CHECKS)
    return {check.name: check.detail for check in checks if not check.passed}


def rewrite(export, change, *, keep_hash=False):
    """Change the export's tensors; with `keep_hash`, let export.json agree, as a consistent forgery would."""
    tensors = load_file(export / "model.safetensors")
    change(tensors)
    save_file(tensors, export / "model.safetensors")
    if keep_hash:
        record = json.loads((export / "export.json").read_text())
        record["sha256"] = file_sha256(export / "model.safetensors")
        record["bytes"] = (export / "model.safetensors").stat().st_size
        (export / "export.json").write_text(json.dumps(record))


def nudge(name, index=-1):
    def change(tensors):
        flat = tensors[name].view(-1)
        flat[index] = torch.nextafter(flat[index], torch.tensor(9.0))

    return change


def test_a_good_export_passes_every_check(export):
    checks = verify_export(export)
    assert [c.name for c in checks] == list(CHECKS)
    assert all(c.passed for c in checks), checks


def test_an_export_of_an_export_passes(export, tmp_path):
    export_tier(*open_tensors(export), "2,64", tmp_path / "smaller")
    assert failures(tmp_path / "smaller") == {}


def test_one_changed_bit_is_found_and_its_tensor_named(export):
    rewrite(export, nudge("blocks.2.feed_forward.down"))
    found = failures(export)
    assert "changed since the export" in found["files"]
    assert found["tensors"] == "first difference: blocks.2.feed_forward.down"


def test_a_consistent_forgery_is_found(export):
    rewrite(export, nudge("blocks.0.mixer.theta", 0), keep_hash=True)
    found = failures(export)
    assert "files" not in found
    assert found["tensors"] == "first difference: blocks.0.mixer.theta"


def test_the_function_is_compared_too(export, monkeypatch):
    """Were the tensor comparison blind, logits and decoding would still tell."""
    import megatron_essh.export.verify as verify

    rewrite(export, lambda t: t["blocks.1.attention.qkv"].mul_(1.001), keep_hash=True)
    monkeypatch.setattr(verify, "_compare_tensors", lambda *_: verify.Check("tensors", True, ""))
    found = failures(export)
    assert set(found) == {"logits", "decoding"}
    assert "batch 0 (largest difference" in found["logits"]


def test_a_missing_tensor_is_named_and_what_needs_it_is_not_run(export):
    rewrite(export, lambda t: t.pop("blocks.1.ff_norm.weight"), keep_hash=True)
    found = failures(export)
    assert "without blocks.1.ff_norm.weight" in found["names"]
    assert set(found) == {"names", "parameters", "tensors", "logits", "decoding"}


def test_a_changed_config_is_named(export):
    text = (export / "config.yaml").read_text().replace("rope_base: 10000.0", "rope_base: 9999.0")
    (export / "config.yaml").write_text(text)
    found = failures(export)
    assert "config.yaml: changed" in found["files"]
    assert found["config"] == "model.rope_base: 9999.0, should be 10000.0"


def test_a_wrong_recorded_count_is_found(export):
    record = json.loads((export / "export.json").read_text())
    record["parameters"] += 1
    (export / "export.json").write_text(json.dumps(record))
    assert f"{record['parameters']:,} recorded" in failures(export)["parameters"]


def test_another_source_is_told_apart(export, write_run):
    other = write_run("other", seed=5)
    found = failures(export, other.folder)
    assert "is another model" in found["source"]
    assert found["tensors"].startswith("first difference: ")
    assert {"logits", "decoding"} <= set(found)


def test_a_smaller_source_cannot_be_it(export, write_run):
    found = failures(export, write_run("smaller", channels=4).folder)
    assert "more than the source holds" in found["config"]


def test_a_source_that_moved_is_found_with_its_new_place(export, run, tmp_path):
    shutil.move(run.folder, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is not there; say where it is with --source"):
        verify_export(export)
    assert failures(export, tmp_path / "elsewhere") == {}


def cut_off(file, count):
    file.write_bytes(file.read_bytes()[:count])


def without_a_key(file):
    record = json.loads(file.read_text())
    del record["sha256"]
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda file: file.unlink(), "missing"),
        ("model.safetensors", lambda file: cut_off(file, -100), "bytes where export.json records"),
        ("model.safetensors", lambda file: cut_off(file, 0), "0 bytes where export.json records"),
        ("config.yaml", lambda file: file.unlink(), "missing"),
        ("config.yaml", lambda file: cut_off(file, 40), "changed since the export"),
        ("export.json", lambda file: cut_off(file, 40), "not valid JSON"),
        ("export.json", without_a_key, "missing key sha256"),
    ],
)
def test_a_file_that_is_missing_or_cut_off_fails_the_check_of_files(name, damage, message, export):
    damage(export / name)
    found = failures(export)
    assert set(found) == set(CHECKS)
    assert name in found["files"]
    assert message in found["files"]
    assert all("not run" in found[check] for check in CHECKS[1:])


@pytest.mark.parametrize("content", [None, "{}", '{"format": "something else"}'])
def test_what_is_no_export_is_an_error(content, tmp_path):
    if content is not None:
        (tmp_path / "export.json").write_text(content)
    with pytest.raises(UserError, match=r"not (an export|the record)"):
        verify_export(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"batches": 0}, {"length": 0}, {"length": 10**20}, {"seed": -1}, {"seed": 2**63}, {"seed": 10**20}]
)
def test_impossible_comparisons_are_refused_by_name(settings):
    (name, value), *_ = settings.items()
    with pytest.raises(UserError, match=f"{name}: {value} must lie in"):
        RandomTokens(**settings)


def test_the_largest_seed_works(export):
    assert all(c.passed for c in verify_export(export, tokens=RandomTokens(batches=1, length=3, seed=2**63 - 1)))
