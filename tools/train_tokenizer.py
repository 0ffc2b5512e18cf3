"""Train a tokenizer on text: a byte-level BPE as a tokenizer.json, or a unigram model as sentencepiece's .model.

python tools/train_tokenizer.py --input corpus/ --vocab-size 8192 --output data/tokenizer.json
python tools/train_tokenizer.py --input corpus/ --vocab-size 8192 --type unigram --output data/tokenizer.model
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megatron_essh.data.bpe_training import train_bpe
from megatron_essh.data.documents import find_files
from megatron_essh.data.input_flags import add_input_flags
from megatron_essh.data.tokenizers import VOCABULARY_MULTIPLE, padded_vocab_size
from megatron_essh.data.unigram_training import train_unigram
from megatron_essh.errors import run_command


def main() -> None:
    arguments = _parser().parse_args()
    files = find_files(arguments.input)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files):,} files, {size / 1e6:.1f} MB; a vocabulary of {arguments.vocab_size:,}", flush=True)
    start = time.monotonic()
    train = {"bpe": train_bpe, "unigram": train_unigram}[arguments.type]
    entries = train(
        files,
        arguments.vocab_size,
        Path(arguments.output),
        key=arguments.json_keys,
        encoding_errors=arguments.encoding_errors,
    )
    if entries < arguments.vocab_size:
        print(f"the text is enough for {entries:,} entries only, not for {arguments.vocab_size:,}")
    print(f"{arguments.output}: {entries:,} entries, trained in {time.monotonic() - start:.1f} s")
    kind = {"bpe": "huggingface", "unigram": "sentencepiece"}[arguments.type]
    print(
        f"prepare data with --tokenizer-type {kind}, and train with model.vocab_size={padded_vocab_size(entries)}, the "
        f"next multiple of {VOCABULARY_MULTIPLE}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_input_flags(parser)
    add("--vocab-size", type=int, required=True, metavar="N", help="entries, 257 to 10000000; unigram 260 to 1000000")
    add("--output", required=True, metavar="FILE", help="the tokenizer.json, or for unigram the .model, to write")
    add("--type", default="bpe", choices=["bpe", "unigram"], help="a byte-level BPE, or a unigram model (bpe)")
    add(
        "--json-keys",
        default="text",
        metavar="KEY",
        help="key of a JSON line's or column of a Parquet file's text (text)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
