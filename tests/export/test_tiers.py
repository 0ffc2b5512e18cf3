"""An export is a standalone model that computes, bit for bit, what the shared model computes at that tier."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_essh.elastic.capacity import Capacity, parse_capacity, tier_capacities
from megatron_essh.errors import UserError
from megatron_essh.export.folder import read_export
from megatron_essh.export.loading import open_model, open_tensors
from megatron_essh.export.staging import staging_folder
from megatron_essh.export.tiers import export_tier
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.training.checkpoint.files import file_sha256


@pytest.fixture
def run(write_run, byte_pair):
    return write_run()


def export(source, tier, folder, **options):
    return export_tier(*open_tensors(source), tier, folder, **options)


@pytest.mark.parametrize("tier", ["T1", "T4", "T7", "T10", "1,1", "5,129"])
def test_every_tier_equals_the_shared_model_bitwise(tier, run, tmp_path):
    record, written = export(run.folder, tier, tmp_path / "out")
    assert written
    model, config, _ = open_model(tmp_path / "out")
    capacity = parse_capacity(tier, run.config.model, run.config.elastic)
    assert (config.model.channels, config.model.ff_width) == (capacity.channels, capacity.ff_width)
    count = sum(p.numel() for p in model.parameters())
    assert count == record.parameters == parameter_counts(run.config.model, capacity).total

    generator = torch.Generator().manual_seed(3)
    for batch, length in ((3, 1), (2, 41)):
        tokens = torch.randint(264, (batch, length), generator=generator)
        assert torch.equal(model(tokens), run.model(tokens, capacity))
        logits, state = model.prefill(tokens, model.init_state(batch))
        expected, shared = run.model.prefill(tokens, run.model.init_state(batch, capacity), capacity)
        assert torch.equal(logits, expected)
        for _ in range(4):
            token = torch.randint(264, (batch,), generator=generator)
            logits, state = model.step(token, state)
            expected, shared = run.model.step(token, shared, capacity)
            assert torch.equal(logits, expected)


def test_the_folder_holds_what_it_says(run, tmp_path):
    record, _ = export(run.folder, "T4", tmp_path / "T4")
    assert sorted(p.name for p in (tmp_path / "T4").iterdir()) == ["config.yaml", "export.json", "model.safetensors"]
    written = json.loads((tmp_path / "T4/export.json").read_text())
    assert (written["tier"], written["channels"], written["ff_width"]) == ("T4", 3, 64)
    assert written["sha256"] == file_sha256(tmp_path / "T4/model.safetensors")
    assert written["config_sha256"] == file_sha256(tmp_path / "T4/config.yaml")
    assert written["source"]["path"] == str(run.checkpoint.resolve())
    assert written["source"]["sha256"] == file_sha256(run.checkpoint / "model.safetensors")
    assert (written["step"], written["stage"]) == (7, "pretrain")
    assert written["tokenizer"]["config"]["type"] == "byte"
    config = yaml.safe_load((tmp_path / "T4/config.yaml").read_text())
    assert {k: config["model"][k] for k in ("channels", "ff_width", "family_channels", "family_ff_width")} == {
        "channels": 3,
        "ff_width": 64,
        "family_channels": 6,
        "family_ff_width": 192,
    }
    tensors = load_file(tmp_path / "T4/model.safetensors")  # by the library itself
    assert sum(t.numel() for t in tensors.values()) == record.parameters
    stored = sum(t.numel() * t.element_size() for t in tensors.values())
    assert stored < (tmp_path / "T4/model.safetensors").stat().st_size < stored + 8192


def test_a_tier_of_an_export_is_the_tier_of_its_family(run, tmp_path):
    export(run.folder, "T7", tmp_path / "T7")
    export(run.folder, "T4", tmp_path / "direct")
    export(tmp_path / "T7", "T4", tmp_path / "nested")
    direct, nested = (load_file(tmp_path / name / "model.safetensors") for name in ("direct", "nested"))
    assert direct.keys() == nested.keys()
    assert all(torch.equal(direct[n], nested[n]) for n in direct)
    _, config, record = read_export(tmp_path / "nested")
    assert config == read_export(tmp_path / "direct")[1]
    assert record.source.kind == "export"
    assert record.source.origin == str(run.checkpoint.resolve())
    export(tmp_path / "T7", "full", tmp_path / "all")
    assert file_sha256(tmp_path / "all/model.safetensors") == file_sha256(tmp_path / "T7/model.safetensors")


def test_a_tier_larger_than_the_export_is_refused(run, tmp_path):
    export(run.folder, "T4", tmp_path / "T4")
    assert tier_capacities(run.config.model, run.config.elastic)["T7"] == Capacity(5, 128)
    for tier in ("T7", "T10", "4,64", "3,65"):
        with pytest.raises(UserError, match=r"holds 1 to 3 channels and 1 to 64"):
            export(tmp_path / "T4", tier, tmp_path / "larger")
    assert not (tmp_path / "larger").exists()


@pytest.mark.parametrize("tier", ["T11", "t4", "4", "4,", "4,64,1", "0,64", "x,y", ""])
def test_what_names_no_tier_is_refused(tier, run, tmp_path):
    with pytest.raises(UserError, match="capacity"):
        export(run.folder, tier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("embedding.weight"), "without embedding.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "with extra"),
        (lambda t: t.update({"final_norm.weight": torch.zeros(31)}), "tensor final_norm.weight has shape"),
        (lambda t: t.update({"blocks.0.mixer.theta": torch.zeros(5, 3)}), "tensor blocks.0.mixer.theta has shape"),
    ],
)
def test_what_is_not_the_model_of_its_config_is_refused_by_the_name_of_the_source(change, message, run, tmp_path):
    tensors, config, source = open_tensors(run.folder)
    change(tensors)
    with pytest.raises(UserError, match=f"^{re.escape(source.path)}: .*{re.escape(message)}"):
        export_tier(tensors, config, source, "T4", tmp_path / "exports" / "T4")
    assert not (tmp_path / "exports").exists()


def test_exporting_again_changes_nothing(run, tmp_path):
    export(run.folder, "T4", tmp_path / "T4")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "T4").iterdir()}
    (tmp_path / "T4/perplexity.json").write_text("{}")
    _, written = export(run.folder, "T4", tmp_path / "T4")
    assert not written
    assert {p: ((tmp_path / "T4" / p).read_bytes(), (tmp_path / "T4" / p).stat().st_mtime_ns) for p in before} == before
    assert (tmp_path / "T4/perplexity.json").exists()


def test_another_export_makes_way_only_when_asked(run, tmp_path):
    place = tmp_path / "place"
    export(run.folder, "T4", place)
    before = file_sha256(place / "export.json")
    with pytest.raises(UserError, match="another export is already there; give --overwrite"):
        export(run.folder, "T7", place)
    assert file_sha256(place / "export.json") == before
    (place / "perplexity.json").write_text("of T4")
    export(run.folder, "T7", place, overwrite=True)
    assert read_export(place)[2].tier == "T7"
    assert not (place / "perplexity.json").exists()  # it spoke of the model that made way
    assert sorted(p.name for p in tmp_path.iterdir() if "place" in p.name) == ["place"]


def test_what_is_no_export_never_makes_way(run, tmp_path):
    place = tmp_path / "home"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds something that is no export"):
        export(run.folder, "T4", place, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        export(run.folder, "T4", place / "thesis.txt", overwrite=True)
    assert (place / "thesis.txt").read_text() == "years of work"
    assert [p.name for p in place.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_a_fine_place(run, tmp_path):
    (tmp_path / "T4").mkdir()
    assert export(run.folder, "T4", tmp_path / "T4")[1]


SMALL_DISK = """
import resource, signal, sys
from pathlib import Path
from megatron_essh.export.tiers import export_tier
from megatron_essh.export.loading import open_tensors
from megatron_essh.errors import UserError
opened = open_tensors(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit is then an error, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    export_tier(*opened, "T10", Path(sys.argv[2]), overwrite=True)
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 5000, 100_000])
def test_a_full_disk_leaves_nothing_and_keeps_what_was_there(limit, run, tmp_path):
    place = tmp_path / "exports" / "place"
    export(run.folder, "T4", place)
    before = file_sha256(place / "export.json")
    done = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, str(run.folder), str(place), str(limit)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "the disk is too full for an export of" in done.stdout
    assert done.stdout.endswith("; make room, or give another folder\n")
    assert [p.name for p in place.parent.iterdir()] == ["place"]
    assert file_sha256(place / "export.json") == before
    read_export(place)


KILLED = """
import os, signal, sys
from pathlib import Path
import megatron_essh.export.tiers as tiers
from megatron_essh.export.loading import open_tensors
tiers._check = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
tiers.export_tier(*open_tensors(sys.argv[1]), "T4", Path(sys.argv[2]))
"""


def test_what_a_killed_export_left_is_cleared_by_the_next(run, tmp_path):
    place = tmp_path / "exports" / "T4"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(run.folder), str(place)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [p.name for p in place.parent.rglob("*")]
    assert "model.safetensors" in left  # it was killed in the midst of it
    assert not place.exists()
    assert export(run.folder, "T4", place)[1]
    assert [p.name for p in place.parent.iterdir()] == ["T4"]
    read_export(place)


def test_two_exports_to_one_place_at_once_are_told_apart(run, tmp_path):
    place = tmp_path / "exports" / "T4"
    with staging_folder(place) as staging:
        (staging / "new").mkdir()
        with pytest.raises(UserError, match="T4: another process is writing an export there"):
            export(run.folder, "T4", place)
        assert (staging / "new").is_dir()
        assert export(run.folder, "T4", place.with_name("T1"))[1]
    assert [p.name for p in place.parent.iterdir()] == ["T1"]
    assert export(run.folder, "T4", place)[1]


def test_a_failed_check_leaves_nothing(run, tmp_path, monkeypatch):
    import megatron_essh.export.tiers as tiers

    def refuse(path):
        assert (path / "export.json").exists()
        raise UserError("not right")

    monkeypatch.setattr(tiers, "_check", refuse)
    with pytest.raises(UserError, match="not right"):
        export(run.folder, "T4", tmp_path / "exports" / "T4")
    assert list((tmp_path / "exports").iterdir()) == []
