"""A byte-level BPE trained from files: what tools/train_tokenizer.py does by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_essh.data.tokenizer_training import TokenizerFile, check_vocabulary, training_texts

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of a document
LARGEST_VOCABULARY = 10_000_000  # the library reserves memory for every entry, and aborts where there is none


def train_bpe(
    files: Sequence[Path],
    vocab_size: int,
    output: Path,
    *,
    key: str = "text",
    encoding_errors: Literal["strict", "replace"] = "strict",
) -> int:
    """Train on the documents of `files` and write a tokenizer.json to `output`, whole or not at all.

    Text is split as GPT-2 does it; every byte has a token, so that any text comes back; `<|endoftext|>` is id
    0. The same files give the same file.

    Returns:
        Entries of the vocabulary: fewer than `vocab_size` where the text has no more pairs to merge.

    Raises:
        UserError: a vocabulary below 257 or above 10,000,000, unreadable input, or an output that cannot be written.
    """
    check_vocabulary(vocab_size, SMALLEST_VOCABULARY, LARGEST_VOCABULARY, f"every byte, and {END_OF_DOCUMENT}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with TokenizerFile(output, "tokenizer.json", files) as file:
        tokenizer.train_from_iterator(training_texts(files, key, encoding_errors), trainer)
        file.publish(tokenizer.to_str(pretty=True).encode())
    return tokenizer.get_vocab_size()
