"""The output folder: one run at a time, only its own run continued, nothing of a killed save mistaken for whole."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from megatron_essh.config import RunConfig, config_from_mapping, config_to_mapping, load_config
from megatron_essh.errors import UserError
from megatron_essh.training.checkpoint import save_checkpoint
from megatron_essh.training.run_folder import RunFolder, differences, refuse_another_run

MAPPING = {
    "model": {
        "d_model": 32,
        "n_layers": 2,
        "channels": 4,
        "value_width": 8,
        "ff_width": 128,
        "vocab_size": 300,
        "head_dim": 16,
    },
    "training": {"validation_tiers": ["T1"]},
}


def config(**sections) -> RunConfig:
    return config_from_mapping(RunConfig, MAPPING | sections, "test")


def values(saved: RunConfig, stage: str = "pretrain") -> dict:
    return {"stage": stage, "config": config_to_mapping(saved)}


def test_differences_name_keys_of_either_side_in_order() -> None:
    left = {"a": 1, "b": {"c": [1, 2], "d": None}, "e": 5}
    right = {"a": 1, "b": {"c": [1, 3], "x": 7}, "e": 5.0}
    assert list(differences(left, right)) == [("b.c", [1, 2], [1, 3]), ("b.x", None, 7)]


def test_two_runs_cannot_share_a_folder_but_a_killed_ones_is_free(tmp_path, in_child) -> None:
    with RunFolder(tmp_path / "run"):
        status, text = in_child(lambda: RunFolder(tmp_path / "run").__enter__())
        assert status == 1
        assert f"UserError: training.output: another process is training in {tmp_path / 'run'}" in text

    def killed() -> None:
        RunFolder(tmp_path / "run").__enter__()
        os.kill(os.getpid(), 9)

    assert in_child(killed)[0] == -9
    with RunFolder(tmp_path / "run"):
        pass


def test_an_output_that_is_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"training\.output: .* is a file or lies below one"), RunFolder(path):
            pass


def test_the_written_config_reads_back_the_same(tmp_path) -> None:
    saved = config(optimizer={"learning_rate": 1.0e-5}, data={"train": "weg/zu: den #Daten"})
    with RunFolder(tmp_path) as folder:
        folder.write_config(saved)
    assert load_config(folder.config) == saved


def test_the_newest_whole_checkpoint_continues_and_leftovers_go(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_checkpoint() is None
    for step in (1, 2):
        save_checkpoint(folder.checkpoints, step, {"model.a": torch.ones(3)}, {}, keep_last=3)
    (folder.checkpoints / "step_00000003.tmp-1").mkdir()
    assert folder.newest_checkpoint() == folder.checkpoints / "step_00000002"
    assert not (folder.checkpoints / "step_00000003.tmp-1").exists()


def test_a_run_with_damaged_checkpoints_only_does_not_silently_start_over(tmp_path, capsys) -> None:
    folder = RunFolder(tmp_path)
    path = save_checkpoint(folder.checkpoints, 1, {"model.a": torch.ones(3)}, {}, keep_last=3)
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        folder.newest_checkpoint()
    assert "model.safetensors: 0 bytes where the manifest records" in capsys.readouterr().err


def changed(base: RunConfig, section: str, key: str, value: object) -> RunConfig:
    return dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **{key: value})})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "steps", 7),
        ("training", "seed", 1),
        ("training", "micro_batch", 4),
        ("training", "precision", "fp32"),
        ("training", "loss_chunk", None),
        ("model", "channels", 8),
        ("model", "attention_layers", (1,)),
        ("elastic", "kl_weight", 0.25),
        ("elastic", "training_budgets", (2, 32)),
        ("optimizer", "learning_rate", 2e-3),
        ("data", "sequence_length", 64),
        ("data", "document_mask", True),
    ],
)
def test_a_change_that_would_alter_the_run_is_refused_by_name(tmp_path, section, key, value) -> None:
    saved = config()
    now = changed(saved, section, key, value)
    with pytest.raises(UserError) as caught:
        refuse_another_run(tmp_path, values(saved), now, "pretrain")
    before = config_to_mapping(saved)[section][key]
    message = str(caught.value)
    assert f"was started with {section}.{key}: " in message
    for shown in (before, value):
        assert (
            str(list(shown) if isinstance(shown, (list, tuple)) else "null" if shown is None else shown).lower()
            in message.lower()
        )
    assert "--output" in message
    assert f"set {section}.{key} back to" in message


def test_changes_that_do_not_alter_the_run_are_allowed(tmp_path) -> None:
    saved = config()
    now = config(
        training={
            "log_every": 1,
            "validate_every": 3,
            "validation_batches": 2,
            "validation_tiers": ["T2"],
            "output": "elsewhere",
            "device": "cpu",
            "threads": 1,
        },
        checkpoint={"save_every": 5, "keep_last": 9},
        data={"train": "moved/train", "validation": "moved/validation"},
        refinement={"steps": 3},
    )
    refuse_another_run(tmp_path, values(saved), now, "pretrain")
    with pytest.raises(UserError, match=r"refinement\.steps: 2060, and the config now says 3"):
        refuse_another_run(tmp_path, values(saved, "refine"), now, "refine")


def test_a_folder_of_the_other_stage_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="holds a pretrain run, not a refine run; give a new run another output"):
        refuse_another_run(tmp_path, values(config()), config(), "refine")


def test_a_config_of_a_newer_version_is_refused_by_its_unknown_key(tmp_path) -> None:
    saved = values(config())
    saved["config"]["training"]["warp"] = 9
    with pytest.raises(UserError, match=r"config: unknown key training\.warp"):
        refuse_another_run(tmp_path, saved, config(), "pretrain")
