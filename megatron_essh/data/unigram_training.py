"""A sentencepiece unigram model trained from files: what tools/train_tokenizer.py --type unigram does."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import sentencepiece

from megatron_essh.data.tokenizer_training import TokenizerFile, check_vocabulary, training_texts
from megatron_essh.errors import UserError

SMALLEST_VOCABULARY = 260  # every byte, unknown, begin, end, and a character of the text
LARGEST_VOCABULARY = 1_000_000  # pieces that the library begins with and takes away from
_LONGEST_LINE = 4000  # bytes: the library leaves out, without a word, what is longer than 4192
_THREADS = 16  # not the machine's number: sums, and so the model, depend on it


def train_unigram(
    files: Sequence[Path],
    vocab_size: int,
    output: Path,
    *,
    key: str = "text",
    encoding_errors: Literal["strict", "replace"] = "strict",
) -> int:
    """Train on the documents of `files`, line by line, and write a .model file to `output`, whole or not at all.

    Nothing is normalised, and a character without a piece of its own goes into its bytes: every text comes back but for
    U+2581, which is how the library writes a space. `</s>` ends a document. The same files give the same file. The
    library holds all of the text in memory.

    Returns:
        Entries of the vocabulary: fewer than `vocab_size` where the text has no more pieces.

    Raises:
        UserError: a vocabulary that is too small for the text's characters or above 1,000,000, unreadable input, no
            text, or an output that cannot be written.
    """
    check_vocabulary(vocab_size, SMALLEST_VOCABULARY, LARGEST_VOCABULARY, "every byte, and four more")
    model = io.BytesIO()
    with TokenizerFile(output, "tokenizer.model", files) as file:
        lines = _Lines(files, key, encoding_errors)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="unigram",
                vocab_size=vocab_size,
                hard_vocab_limit=False,
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                num_threads=_THREADS,
                minloglevel=3,
            )
        except RuntimeError as error:
            if lines.failure is not None:
                raise lines.failure from None
            reason = str(error).rsplit("] ", 1)[-1].strip() or "the text is empty"
            raise UserError(f"--vocab-size {vocab_size}: no model could be trained: {reason}") from None
        if lines.failure is not None:
            raise lines.failure
        file.publish(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


class _Lines:
    """Lines of text, long ones in pieces. The library swallows what an iterator raises: it is kept in `failure`."""

    def __init__(self, files: Sequence[Path], key: str, encoding_errors: str) -> None:
        self._texts = training_texts(files, key, encoding_errors)
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            for text in self._texts:
                for line in text.splitlines(keepends=True):
                    yield from _pieces(line.encode())
        except Exception as error:
            self.failure = error


def _pieces(line: bytes) -> Iterator[bytes]:
    begin = 0
    while len(line) - begin > _LONGEST_LINE:
        end = begin + _LONGEST_LINE
        while line[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        yield line[begin:end]
        begin = end
    yield line[begin:]
