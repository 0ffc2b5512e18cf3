"""Pairs and small tokenizers, made on the spot."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_essh.data import IndexedDatasetWriter

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def parse(self, line):\n    return [int(part) for part in line.split()]\n",
    "Ça va? Grüße, naïve façade; 漢字かな交じり文 and emoji 😀🎉.",
    "Numbers 0 1 12 123 1234 12345 and   spaces\t\ttabs\r\n\r\nlines.",
)


@pytest.fixture
def write_pair(tmp_path: Path) -> Callable[..., Path]:
    """Writes documents (each a list of ids) as a pair and gives its prefix."""

    def write(documents: Sequence[Sequence[int]], name: str = "pair", dtype: str = "<u2") -> Path:
        with IndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for document in documents:
                writer.add_document(np.array(document, np.int64))
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiktoken rank file of the 256 bytes and a few merges."""
    merges = [b"th", b"he", b"the", b" t", b" the", b"in", b"er", b"an", b"12", b"123", b"\n\n", b"  "]
    tokens = [bytes([i]) for i in range(256)] + merges
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model with byte fallback and an end-of-sentence piece."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_prefix=str(folder / "small"),
        vocab_size=420,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "small.model"


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json that our own command's library trained."""
    from megatron_essh.data.bpe_training import train_bpe

    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    train_bpe([folder / "text.txt"], 300, folder / "tokenizer.json")
    return folder / "tokenizer.json"
