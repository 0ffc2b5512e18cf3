"""Turn text into a token pair: `{output-prefix}_{key}_document.bin`, `.idx` and a small `.json` beside them.

    python tools/preprocess_data.py --input corpus/ --output-prefix data/corpus \\
        --tokenizer-type huggingface --tokenizer-model data/tokenizer.json --append-eod
"""

from __future__ import annotations

import argparse
import os

from megatron_essh.config import TokenizerConfig
from megatron_essh.data.documents import find_files
from megatron_essh.data.preprocessing import Preprocessing, preprocess
from megatron_essh.errors import UserError, run_command


def main() -> None:
    arguments = _parser().parse_args()
    try:
        tokenizer = TokenizerConfig(
            type=arguments.tokenizer_type,
            model=arguments.tokenizer_model,
            pattern=arguments.tokenizer_pattern,
        )
    except ValueError as error:
        raise UserError(f"--tokenizer-model: {error}") from None
    task = Preprocessing(
        tokenizer=tokenizer,
        output_prefix=arguments.output_prefix,
        keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        vocab_size=arguments.vocab_size,
        validation_every=arguments.validation_every,
        workers=arguments.workers,
        log_interval=arguments.log_interval,
        encoding_errors=arguments.encoding_errors,
    )
    files = find_files(arguments.input)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files):,} files, {size / 1e6:.1f} MB, {task.workers} workers", flush=True)
    for pair in preprocess(files, task, lambda line: print(line, flush=True)):
        held = f"{pair.documents:,} documents, {pair.tokens:,} tokens of {pair.dtype}"
        print(f"{pair.prefix}.bin, .idx, .json: {held}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders (every file below that is not hidden) or globs (** goes through folders), "
        "taken in natural order: part_2 before part_10. .jsonl and .json hold JSON lines, any other file is "
        "one document of plain text",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a JSON line, a pair each (text)",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="start of the outputs' paths")
    add("--tokenizer-type", required=True, choices=["byte", "tiktoken", "sentencepiece", "huggingface"])
    add("--tokenizer-model", metavar="FILE", help="rank file, .model or tokenizer.json; none for byte")
    add(
        "--tokenizer-pattern",
        default="gpt2",
        choices=["gpt2", "cl100k", "o200k", "llama3"],
        help="splitting pattern and special tokens of a tiktoken rank file (gpt2)",
    )
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="vocabulary with its padding (the tokenizer's); under 65,500 entries tokens take 16 bits",
    )
    add("--append-eod", action="store_true", help="put the end-of-document token after every document")
    add(
        "--validation-every",
        type=int,
        metavar="N",
        help="every N-th document goes to {PREFIX}_{KEY}_validation",
    )
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that parse and tokenise; the output does not depend on it (one a core)",
    )
    add(
        "--encoding-errors",
        default="strict",
        choices=["strict", "replace"],
        help="bytes that are not UTF-8: refuse the file, or read them as U+FFFD (strict)",
    )
    add(
        "--log-interval",
        type=int,
        default=10_000,
        metavar="N",
        help="documents between progress lines (10000)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
