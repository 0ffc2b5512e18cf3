"""What training a tokenizer of any kind needs: the text, and a file that appears whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_essh.data.documents import batches, read_batch
from megatron_essh.data.files import StagedFile
from megatron_essh.data.readers import check_readable
from megatron_essh.data.tokenizers import valid_text
from megatron_essh.errors import UserError
from megatron_essh.files import sync_folder


def training_texts(files: Sequence[Path], key: str, encoding_errors: str) -> Iterator[str]:
    """Every text of `files`, in order, as preprocessing reads it.

    Raises:
        UserError: a file that preprocessing would refuse, or a document that it would skip.
    """
    check_readable(files)
    for batch in batches(files, (key,)):
        for document in read_batch(batch, (key,), encoding_errors):
            yield from map(valid_text, document[0])


class TokenizerFile:
    """The output of a training, claimed before the work begins and written whole or not at all.

    Raises:
        UserError: it is a folder or one of `files`, the text, or cannot be written.
    """

    def __init__(self, output: Path, name: str, files: Sequence[Path]) -> None:
        if any(path.resolve() == output.resolve() for path in files):
            raise UserError(f"--output {output}: is an input, which writing would replace; name another file")
        if output.is_dir():
            raise UserError(f"--output {output}: a folder; name the file, say {output / name}")
        self._staged = StagedFile(output)

    def __enter__(self) -> TokenizerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._staged.discard()  # does nothing once it has its name

    def publish(self, content: bytes) -> None:
        """Write `content` and give the file its name."""
        self._staged.write(content)
        self._staged.seal()
        self._staged.publish()
        sync_folder(self._staged.path.parent)


def check_vocabulary(vocab_size: int, smallest: int, largest: int, why: str) -> None:
    """UserError unless `smallest` <= vocab_size <= `largest`; `why` says what the smallest is."""
    if vocab_size < smallest:
        raise UserError(f"--vocab-size {vocab_size}: must be at least {smallest}: {why}")
    if vocab_size > largest:
        raise UserError(f"--vocab-size {vocab_size}: must be at most {largest}")
