"""Small tokenizers of the kinds whose tokens end inside characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_essh.config import TokenizerConfig
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "Größe, façade, naïve",
    "漢字かな交じり文 😀🎉",
    "αβγ δεζ",
) * 20


@pytest.fixture(scope="session", params=["byte", "huggingface", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer, a byte-level BPE, and a sentencepiece model with byte fallback."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "byte":
        return build_tokenizer(TokenizerConfig(type="byte"))
    if request.param == "huggingface":
        from tokenizers import ByteLevelBPETokenizer

        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(iter(CORPUS), vocab_size=290, special_tokens=["<|endoftext|>"], show_progress=False)
        bpe.save(str(folder / "tokenizer.json"))
        return build_tokenizer(TokenizerConfig(type="huggingface", model=str(folder / "tokenizer.json")))
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "small"),
        vocab_size=340,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return build_tokenizer(TokenizerConfig(type="sentencepiece", model=str(folder / "small.model")))
