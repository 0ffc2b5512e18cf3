"""Train a byte-level BPE on text and write it as a tokenizer.json with `<|endoftext|>`.

python tools/train_tokenizer.py --input corpus/ --vocab-size 8192 --output data/tokenizer.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megatron_essh.data.bpe_training import train_bpe
from megatron_essh.data.documents import find_files
from megatron_essh.errors import run_command


def main() -> None:
    arguments = _parser().parse_args()
    files = find_files(arguments.input)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files):,} files, {size / 1e6:.1f} MB; a vocabulary of {arguments.vocab_size:,}", flush=True)
    start = time.monotonic()
    entries = train_bpe(
        files,
        arguments.vocab_size,
        Path(arguments.output),
        key=arguments.json_key,
        encoding_errors=arguments.encoding_errors,
    )
    if entries < arguments.vocab_size:
        print(f"the text has pairs for {entries:,} entries only, not for {arguments.vocab_size:,}")
    print(f"{arguments.output}: {entries:,} entries, trained in {time.monotonic() - start:.1f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders (every file below that is not hidden) or globs (** goes through folders). "
        ".jsonl and .json hold JSON lines, any other file is one document of plain text",
    )
    add("--vocab-size", type=int, required=True, metavar="N", help="entries, 257 to 10000000")
    add("--output", required=True, metavar="FILE", help="the tokenizer.json to write")
    add("--json-key", default="text", metavar="KEY", help="key of a JSON line's text (text)")
    add(
        "--encoding-errors",
        default="strict",
        choices=["strict", "replace"],
        help="bytes that are not UTF-8: refuse the file, or read them as U+FFFD (strict)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
