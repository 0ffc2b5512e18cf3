"""An export carries its tokenizer's file, so that it speaks wherever it is put; what it carries is held to its hash."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_essh.config import TokenizerConfig
from megatron_essh.data.tokenizers import build_tokenizer
from megatron_essh.errors import UserError
from megatron_essh.export.folder import read_export
from megatron_essh.export.loading import open_model, open_tensors, open_tokenizer
from megatron_essh.export.tiers import export_tier, tokenizer_content
from megatron_essh.export.verify import verify_export
from megatron_essh.training.checkpoint.files import file_sha256

TEXT = "Zwölf Boxkämpfer jagen Viktor"


def make_huggingface(path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(iter([TEXT] * 9), vocab_size=260, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save(str(path))


def make_tiktoken(path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"Vi", b"er"]
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)))


def make_sentencepiece(path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 9),
        model_prefix=str(path.with_suffix("")),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )


MAKERS = {
    "huggingface": (make_huggingface, "words.json", "tokenizer.json"),
    "tiktoken": (make_tiktoken, "words.tiktoken", "ranks.tiktoken"),
    "sentencepiece": (make_sentencepiece, "words.model", "tokenizer.model"),
}


@pytest.fixture
def run(request, write_run, tiny_config, tmp_path):
    """A run whose tokenizer has a file: a tokenizer.json where the test does not ask for another type."""
    kind = getattr(request, "param", "huggingface")
    make, name, _ = MAKERS[kind]
    make(tmp_path / name)
    named = TokenizerConfig(type=kind, model=str(tmp_path / name))
    return write_run(config=replace(tiny_config, data=replace(tiny_config.data, tokenizer=named)))


def export(source, folder, **options):
    tensors, config, provenance = open_tensors(source)
    content = tokenizer_content(provenance, config)
    return export_tier(tensors, config, provenance, "T4", folder, **{"tokenizer": content, **options})


def original(run) -> Path:
    return Path(run.config.data.tokenizer.model)


@pytest.mark.parametrize("run", MAKERS, indirect=True)
def test_the_copy_is_the_file_and_stands_in_for_it(run, tmp_path):
    record, _ = export(run.folder, tmp_path / "T4")
    name = MAKERS[run.config.data.tokenizer.type][2]
    assert record.tokenizer_file == name
    assert sorted(p.name for p in (tmp_path / "T4").iterdir()) == sorted(
        ["config.yaml", "export.json", "model.safetensors", name]
    )
    copy = tmp_path / "T4" / name
    assert copy.read_bytes() == original(run).read_bytes()
    assert json.loads((tmp_path / "T4/export.json").read_text())["tokenizer_sha256"] == file_sha256(copy)
    ids = build_tokenizer(run.config.data.tokenizer).encode(TEXT)

    original(run).unlink()
    shutil.move(tmp_path / "T4", tmp_path / "elsewhere")
    provenance = open_model(tmp_path / "elsewhere")[2]
    assert provenance.tokenizer.config.model == str((tmp_path / "elsewhere" / name).resolve())
    assert open_tokenizer(provenance.tokenizer, entries=264).encode(TEXT) == ids


def test_an_export_of_an_export_carries_it_on(run, tmp_path):
    export(run.folder, tmp_path / "T4")
    original(run).unlink()
    export(tmp_path / "T4", tmp_path / "again")
    shutil.rmtree(tmp_path / "T4")
    tokenizer = open_tokenizer(open_model(tmp_path / "again")[2].tokenizer, entries=264)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_an_export_without_it_uses_the_recorded_path(run, tmp_path):
    record, _ = export(run.folder, tmp_path / "T4", tokenizer=None)
    assert record.tokenizer_file is None
    assert not (tmp_path / "T4/tokenizer.json").exists()
    provenance = open_model(tmp_path / "T4")[2]
    assert provenance.tokenizer.config.model == str(original(run).resolve())
    assert all(check.passed for check in verify_export(tmp_path / "T4"))


def test_exporting_again_with_and_without_it(run, tmp_path):
    export(run.folder, tmp_path / "T4")
    assert not export(run.folder, tmp_path / "T4")[1]
    with pytest.raises(UserError, match="give --overwrite"):
        export(run.folder, tmp_path / "T4", tokenizer=None)
    assert (tmp_path / "T4/tokenizer.json").exists()
    assert export(run.folder, tmp_path / "T4", tokenizer=None, overwrite=True)[1]
    assert not (tmp_path / "T4/tokenizer.json").exists()
    (tmp_path / "T4/tokenizer.json").write_text("not of the export")
    assert not export(run.folder, tmp_path / "T4", tokenizer=None)[1]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_copy_that_is_not_as_recorded_is_found(damage, run, tmp_path):
    export(run.folder, tmp_path / "T4")
    copy = tmp_path / "T4/tokenizer.json"
    if damage == "missing":
        copy.unlink()
    else:
        copy.write_bytes(copy.read_bytes() + b" ")
    failed = [check for check in verify_export(tmp_path / "T4") if not check.passed]
    assert [check.name for check in failed] == ["files"]
    assert f"tokenizer.json: {damage}" in failed[0].detail
    with pytest.raises(UserError, match=f"tokenizer.json: {damage}"):
        open_model(tmp_path / "T4")
    provenance = open_model(tmp_path / "T4", tokenizer=False)[2]  # for who needs none, or brings the file
    given = TokenizerConfig(type="huggingface", model=str(original(run)))
    assert open_tokenizer(provenance.tokenizer, given, entries=264).encode(TEXT)
    (tmp_path / "T4/config.yaml").unlink()
    with pytest.raises(UserError, match=r"config\.yaml: missing"):
        open_model(tmp_path / "T4", tokenizer=False)


def test_a_hash_of_no_file_is_refused(run, tmp_path):
    export(run.folder, tmp_path / "T4")
    record = json.loads((tmp_path / "T4/export.json").read_text())
    record["tokenizer"]["config"].update(type="byte", model=None)
    (tmp_path / "T4/export.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="tokenizer_sha256: given, but"):
        read_export(tmp_path / "T4")


def test_only_the_tokenizer_that_the_model_was_trained_with_is_copied(run):
    _, config, provenance = open_tensors(run.folder)
    original(run).write_bytes(original(run).read_bytes() + b" ")
    with pytest.raises(UserError, match="not the tokenizer that the model was trained with"):
        tokenizer_content(provenance, config)
    original(run).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        tokenizer_content(provenance, config)


def test_bytes_need_no_file(write_run, byte_pair, tmp_path):
    record, _ = export(write_run().folder, tmp_path / "T4")
    assert record.tokenizer.config.type == "byte"
    assert record.tokenizer_file is None
