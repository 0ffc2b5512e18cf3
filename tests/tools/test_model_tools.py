"""The commands that open trained models, run as a user runs them: export, verify, evaluate, generate, plot."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_essh.config import TokenizerConfig
from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.tokenizers import ByteTokenizer
from megatron_essh.evaluation.perplexity import Windows, score
from megatron_essh.export.loading import open_model
from megatron_essh.training.checkpoint import load_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(write_run, byte_pair):
    return write_run()


def failed(done, message):
    """A mistake of the user's: status 2 and one line that says what it is."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert message in lines[-1], lines[-1]


def test_export_verify_evaluate_plot_generate(run, byte_pair, tmp_path, command):
    exports = tmp_path / "exports"
    done = command("tools/export_tiers.py", run.folder, "--tier", "T1", "--tier", "5,70", "--output", exports)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in exports.iterdir()) == ["5x70", "T1"]
    assert "5 channels, 70 feed-forward units" in done.stdout
    again = command("tools/export_tiers.py", run.folder, "--tier", "T1", "--output", exports)
    assert "already there, unchanged" in again.stdout

    done = command("tools/verify_export.py", exports / "T1", exports / "5x70", "--length", 20, "--batches", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: 2 exports" in done.stdout
    assert "DIFFERS" not in done.stdout

    figures = [tmp_path / "small.json", tmp_path / "several.json"]
    common = ("--data", byte_pair.prefix, "--batches", 3, "--batch-size", 4, "--device", "cpu")
    done = command("tools/evaluate.py", "perplexity", exports / "T1", *common, "--json", figures[0])
    assert done.returncode == 0, done.stderr
    tiers = ("--tier", "T1", "--tier", "5,70", "--tier", "full")
    done = command("tools/evaluate.py", "perplexity", run.folder, *tiers, *common, "--json", figures[1])
    assert done.returncode == 0, done.stderr
    alone, several = (json.loads(path.read_text()) for path in figures)
    assert [row["tier"] for row in several] == ["T1", "5,70", "full"]
    assert alone["nll"] == several[0]["nll"]  # the export is the model at that tier, bit for bit
    assert alone["parameters"] == several[0]["parameters"]
    assert alone["origin_sha256"] == several[2]["sha256"]
    windows = Windows(IndexedDataset(byte_pair.prefix), 24, 4, 3)
    expected = score(open_model(run.folder)[0], windows, chunk=None)
    assert several[2]["nll"] == expected.nll
    assert several[2]["tokens"] == expected.tokens == 3 * 4 * 24
    assert several[2]["perplexity"] == pytest.approx(math.exp(expected.nll))
    bits = several[2]["nll"] / math.log(2) / several[2]["bytes_per_token"]
    assert several[2]["bits_per_byte"] == pytest.approx(bits)

    picture = tmp_path / "frontier.png"
    done = command("tools/plot_frontier.py", *figures, "--output", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_generate_prints_the_prompt_and_its_continuation_only(run, command):
    words = (run.folder, "--tier", "T4", "--prompt", "Zwölf ", "--max-new-tokens", 40, "--seed", 3)
    first, second = (command("tools/generate.py", *words) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.startswith("Zwölf ")
    assert len(first.stdout) > 12
    assert "tokens/s" in first.stderr
    other = command("tools/generate.py", *words[:-1], 4)
    assert other.stdout != first.stdout


def test_generate_from_a_file_or_from_nothing(run, tmp_path, command):
    (tmp_path / "prompt.txt").write_text("αβγ\n", encoding="utf-8")
    few = ("--max-new-tokens", 3, "--temperature", 0)
    done = command("tools/generate.py", run.folder, "--prompt-file", tmp_path / "prompt.txt", *few)
    assert done.stdout.startswith("αβγ\n"), done.stderr
    assert command("tools/generate.py", run.folder, "--unconditional", *few).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "--prompt: empty; give some text, or --unconditional"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--prompt", "a", "--temperature", "-1"], "temperature: -1.0"),
        (["--prompt", "a", "--top-p", "0"], "top_p: 0.0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens: 0"),
        (["--prompt", "a", "--tier", "T99"], "capacity 'T99'"),
        (
            ["--prompt", "a", "--num-samples", "1000000000"],
            "--num-samples: 1000000000 of each prompt makes 1000000000 texts; give 1000000 or fewer in all",
        ),
        (["--prompt", "a", "--prompt", "b", "--num-samples", "500001"], "makes 1000002 texts; give 1000000 or fewer"),
        (["--unconditional", "--num-samples", "1000001"], "makes 1000001 texts; give 1000000 or fewer"),
        (["--prompt", "a", "--tier", "7,64"], "this model holds 1 to 6 channels"),
        (["--prompt", "a", "--tokenizer-type", "sentencepiece"], "needs `model`"),
    ],
)
def test_bad_requests_for_text_are_one_line(words, message, run, command):
    failed(command("tools/generate.py", run.folder, *words), message)


def test_a_prompt_is_encoded_once_for_all_of_its_texts(run, command, monkeypatch):
    encoded, encode = [], ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    words = ("--prompt", "One", "--prompt", "Two", "--num-samples", 3, "--max-new-tokens", 2)
    done = command("tools/generate.py", run.folder, *words)
    assert done.returncode == 0, done.stderr
    assert encoded == ["One", "Two"]
    texts = done.stdout.split("--- ")[1:]
    assert [text.split("\n")[1][:3] for text in texts] == ["One"] * 3 + ["Two"] * 3


def test_standard_output_without_room_is_said(run):
    words = [sys.executable, "tools/generate.py", str(run.folder), "--prompt", "a", "--max-new-tokens", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT, check=False
        )
    failed(done, "error: standard output: No space left on device")


def test_a_script_started_by_a_shell_says_its_mistake_and_ends_with_status_2(run):
    words = [sys.executable, "tools/generate.py", str(run.folder), "--prompt", ""]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    failed(done, "--prompt: empty")
    assert done.stdout == ""


@pytest.mark.parametrize("words", [["--unconditional"], ["--prompt", "a", "--no-stop-at-eod"]])
def test_a_model_trained_on_cut_documents_is_not_asked_to_begin_one(words, write_run, byte_pair, tiny_config, command):
    config = replace(tiny_config, data=replace(tiny_config.data, document_mask=True))
    run = write_run(config=config)
    failed(command("tools/generate.py", run.folder, *words), "trained with data.document_mask")
    assert command("tools/generate.py", run.folder, "--prompt", "a", "--max-new-tokens", 2).returncode == 0
    done = command("tools/evaluate.py", "perplexity", run.folder, "--data", byte_pair.prefix, "--all")
    documents = len(byte_pair.texts)
    assert f"{len(byte_pair.ids) - 1 - (documents - 1):,}" in done.stdout.split()  # none for what follows a document


def test_a_model_without_a_tokenizer_asks_for_one(write_run, command):
    run = write_run()  # its data is not there
    failed(command("tools/generate.py", run.folder, "--prompt", "a"), "give --tokenizer-type and --tokenizer-model")
    few = ("--prompt", "a", "--max-new-tokens", 2)
    assert command("tools/generate.py", run.folder, "--tokenizer-type", "byte", *few).returncode == 0


def test_bad_places_are_one_line_and_leave_nothing(run, byte_pair, tmp_path, command):
    output = tmp_path / "exports"
    failed(command("tools/export_tiers.py", tmp_path / "nowhere", "--tier", "T1", "--output", output), "no such folder")
    several = ("--tier", "T1", "--tier", "T99", "--output", output)
    failed(command("tools/export_tiers.py", run.folder, *several), "capacity 'T99'")
    assert not output.exists()
    failed(command("tools/verify_export.py", run.folder), "not an export")
    failed(
        command("tools/evaluate.py", "perplexity", run.folder, "--data", tmp_path / "none"), "none.bin: no such file"
    )
    (byte_pair.prefix.with_suffix(".bin")).write_bytes(b"")
    failed(command("tools/evaluate.py", "perplexity", run.folder, "--data", byte_pair.prefix), "truncated")


def test_a_changed_export_fails_verification_with_status_1(run, tmp_path, command):
    command("tools/export_tiers.py", run.folder, "--tier", "T1", "--output", tmp_path)
    file = tmp_path / "T1/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = command("tools/verify_export.py", tmp_path / "T1", "--length", 9, "--batches", 1)
    assert done.returncode == 1
    assert "first difference: " in done.stdout
    assert f"FAILED: {tmp_path / 'T1'}" in done.stdout


def test_every_export_of_a_list_is_looked_at(run, tmp_path, command):
    command("tools/export_tiers.py", run.folder, "--tier", "T1", "--tier", "T4", "--output", tmp_path)
    (tmp_path / "T1/model.safetensors").unlink()
    few = ("--length", 9, "--batches", 1)
    done = command("tools/verify_export.py", tmp_path / "T1", tmp_path / "T4", *few)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "verified: 1 export\n" in done.stdout
    assert done.stdout.endswith(f"FAILED: {tmp_path / 'T1'}\n")
    done = command("tools/verify_export.py", tmp_path, tmp_path / "T4", tmp_path / "T1", *few)
    failed(done, "not an export")
    assert f"verified: 1 export\nFAILED: {tmp_path / 'T1'}\nNOT VERIFIED: {tmp_path}\n" in done.stdout


def test_an_impossible_seed_is_one_line(run, tmp_path, command):
    command("tools/export_tiers.py", run.folder, "--tier", "T1", "--output", tmp_path)
    failed(command("tools/verify_export.py", tmp_path / "T1", "--seed", 99999999999999999999), "seed: 9999")


def test_an_export_that_was_moved_generates_by_itself(write_run, tiny_config, tmp_path, command):
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["abc"], vocab_size=257, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save(str(tmp_path / "words.json"))
    named = TokenizerConfig(type="huggingface", model=str(tmp_path / "words.json"))
    run = write_run(config=replace(tiny_config, data=replace(tiny_config.data, tokenizer=named)))
    words = ("tools/export_tiers.py", run.folder, "--tier", "T4", "--output")
    done = command(*words, tmp_path / "exports")
    assert f"tokenizer: {tmp_path / 'words.json'}, copied to tokenizer.json" in done.stdout
    done = command(*words, tmp_path / "bare", "--no-tokenizer")
    assert "tokenizer:" not in done.stdout

    (tmp_path / "words.json").rename(tmp_path / "moved.json")
    shutil.move(tmp_path / "exports/T4", tmp_path / "elsewhere")
    shutil.rmtree(run.folder)
    few = ("--prompt", "a", "--max-new-tokens", 3, "--seed", 1)
    moved = command("tools/generate.py", tmp_path / "elsewhere", *few)
    assert moved.returncode == 0, moved.stderr
    failed(command("tools/generate.py", tmp_path / "bare/T4", *few), "words.json: cannot be read")
    given = command("tools/generate.py", tmp_path / "bare/T4", *few, "--tokenizer-model", tmp_path / "moved.json")
    assert given.stdout == moved.stdout


def test_a_tokenizer_that_is_not_there_is_told_and_left_out(write_run, tiny_config, tmp_path, command):
    (tmp_path / "words.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": []}})
    )
    named = TokenizerConfig(type="huggingface", model=str(tmp_path / "words.json"))
    run = write_run(config=replace(tiny_config, data=replace(tiny_config.data, tokenizer=named)))
    (tmp_path / "words.json").unlink()
    done = command("tools/export_tiers.py", run.folder, "--tier", "T4", "--output", tmp_path / "exports")
    assert done.returncode == 0
    assert "warning: the exports carry no tokenizer: " in done.stderr
    assert "words.json: cannot be read" in done.stderr
    assert not (tmp_path / "exports/T4/tokenizer.json").exists()


@pytest.mark.parametrize(("steps", "unfinished"), [(7, False), (12_000, True)])
def test_an_export_says_how_far_its_run_had_come(
    steps, unfinished, write_run, byte_pair, tiny_config, tmp_path, command
):
    run = write_run(config=replace(tiny_config, training=replace(tiny_config.training, steps=steps)))
    done = command("tools/export_tiers.py", run.folder, "--tier", "T4", "--output", tmp_path / "exports")
    assert f"step 7 of {steps:,})" in done.stdout
    assert ("the model of an unfinished run" in done.stderr) == unfinished
    # What is cut from such an export is no more finished than it.
    done = command("tools/export_tiers.py", tmp_path / "exports/T4", "--tier", "T1", "--output", tmp_path / "exports")
    assert ("step 7 of 12,000: the model of an unfinished run" in done.stderr) == unfinished


def test_a_refinements_steps_are_its_own(write_run, byte_pair, tiny_config, tmp_path, command):
    run = write_run(config=replace(tiny_config, refinement=replace(tiny_config.refinement, steps=8)))
    tensors, values = load_checkpoint(run.checkpoint)
    save_checkpoint(run.checkpoint.parent, 8, tensors, {**values, "stage": "refine", "step": 8}, keep_last=1)
    done = command("tools/export_tiers.py", run.folder, "--tier", "T4", "--output", tmp_path / "exports")
    assert "refine, step 8 of 8)" in done.stdout
    assert done.stderr == ""


def test_a_perplexity_beyond_every_float_is_null(run, byte_pair, tmp_path, command):
    tensors, values = load_checkpoint(run.checkpoint)
    tensors["model.final_norm.weight"] *= 1e5
    save_checkpoint(run.checkpoint.parent, 8, tensors, values, keep_last=1)
    figures = tmp_path / "figures.json"
    words = ("--data", byte_pair.prefix, "--batches", 1, "--json", figures)
    done = command("tools/evaluate.py", "perplexity", run.folder, *words)
    assert done.returncode == 0, done.stderr
    assert " inf " in done.stdout
    row = json.loads(figures.read_text())
    assert row["nll"] > 710
    assert row["perplexity"] is None
    assert row["bits_per_byte"] > 1000
    done = command("tools/plot_frontier.py", figures, "--output", tmp_path / "x.png")
    failed(done, f"{figures}: perplexity: null, expected a number")


def row(**changes):
    return {
        "tier": "T1",
        "parameters": 1000,
        "perplexity": 20.0,
        "data": "/data/text",
        "data_fingerprint": "a",
        "sequence_length": 16,
        "tokens": 100,
        "step": 5,
        "origin": "/runs/one/checkpoints/step_00000005",
        "origin_sha256": "b",
        **changes,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "figures.json: an empty list"),
        ("{}", "has no tier"),
        ("[3]", "entry 0: has no tier"),
        ("3", "has no tier"),
        *(
            (
                json.dumps([row(), row(**{key: value})]),
                f"figures.json: entry 1: {key}: {json.dumps(value)[:60]}, expected",
            )
            for key, values in {
                "perplexity": (None, 0, -1.0, math.nan, math.inf, 1e-300, 1e201, 10**400, "20", True, [20.0]),
                "parameters": ("x", 0, -5, 1.5, True, None, 10**400),
                "step": ("q", -1, 5.0, None),
                "sequence_length": ("long", 0),
                "tokens": (None, 0),
                "tier": (1, None, "\ud800"),
                "origin": (3, None, ["/runs"]),
                "origin_sha256": ([], {}),
                "data": (None, 7),
                "data_fingerprint": (4,),
            }.items()
            for value in values
        ),
        (json.dumps([row(), row(data_fingerprint="c")]), "not comparable"),
        (json.dumps([row(), row(tokens=99)]), "not comparable"),
    ],
)
def test_figures_that_make_no_picture_are_refused(content, message, tmp_path, command):
    (tmp_path / "figures.json").write_text(content)
    failed(command("tools/plot_frontier.py", tmp_path / "figures.json", "--output", tmp_path / "x.png"), message)
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "changes",
    [{"perplexity": 1e200}, {"perplexity": 1.0}, {"perplexity": 3}, {"parameters": 10**18}, {"tier": "$\\frac$"}],
    ids=str,
)
def test_strange_but_possible_figures_are_drawn(changes, tmp_path, command):
    (tmp_path / "figures.json").write_text(json.dumps([row(), row(origin="/r/$\\q$", **changes)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = command("tools/plot_frontier.py", tmp_path / "figures.json", "--output", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr


def test_evaluate_tells_what_quantised_weights_change(run, byte_pair, tmp_path, command):
    figures, picture = tmp_path / "figures.json", tmp_path / "frontier.png"
    words = ("perplexity", run.folder, "--data", byte_pair.prefix, "--batches", 2, "--device", "cpu")
    kinds = ("--weights", "int8", "--weights", "fp8")
    done = command("tools/evaluate.py", *words, "--tier", "T4", "--tier", "full", *kinds, "--json", figures)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())
    assert [(row["tier"], row["weights"]) for row in rows] == [
        (tier, weights) for tier in ("T4", "full") for weights in ("stored", "int8", "fp8")
    ]
    for stored, *quantised in (rows[:3], rows[3:]):
        for row in quantised:
            assert row["nll"] != stored["nll"]
            assert row["nll"] == pytest.approx(stored["nll"], rel=0.1)
            assert row["parameters"] == stored["parameters"]
            ratio = math.exp(row["nll"] - stored["nll"])
            assert f"{row['weights']}: perplexity x {ratio:.4f}" in done.stdout
    plotted = command("tools/plot_frontier.py", figures, "--output", picture)
    assert plotted.returncode == 0, plotted.stderr
    failed(command("tools/evaluate.py", *words, "--weights", "int8", "--weights", "int8"), "--weights: one of")
