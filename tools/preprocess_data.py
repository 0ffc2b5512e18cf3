"""Turn text into a token pair: `{output-prefix}_{key}_document.bin`, `.idx` and a small `.json` beside them.

    python tools/preprocess_data.py --input corpus/ --output-prefix data/corpus \\
        --tokenizer-type huggingface --tokenizer-model data/tokenizer.json --append-eod
"""

from __future__ import annotations

import argparse
import os
import re
from typing import get_args

from megatron_essh.config import TokenizerConfig, config_from_mapping
from megatron_essh.config.components import TokenizerType
from megatron_essh.data.documents import LARGEST_DOCUMENT, find_files
from megatron_essh.data.input_flags import add_input_flags
from megatron_essh.data.preprocessing import Preprocessing, preprocess
from megatron_essh.errors import UserError, run_command


def main() -> None:
    arguments = _parser().parse_args()
    flags = "--tokenizer-type, --tokenizer-model, --tokenizer-pattern"
    named = {
        "type": arguments.tokenizer_type,
        "model": arguments.tokenizer_model,
        "pattern": arguments.tokenizer_pattern,
    }
    tokenizer = config_from_mapping(TokenizerConfig, named, flags)
    partition, partitions = _partition(arguments)
    task = Preprocessing(
        tokenizer=tokenizer,
        output_prefix=arguments.output_prefix,
        keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        vocab_size=arguments.vocab_size,
        validation_every=arguments.validation_every,
        partitions=partitions,
        partition=partition,
        workers=arguments.workers,
        log_interval=arguments.log_interval,
        encoding_errors=arguments.encoding_errors,
        strict=arguments.strict,
        max_document_mb=arguments.max_document_mb,
        fresh=arguments.fresh,
    )
    files = find_files(arguments.input)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files):,} files, {size / 1e6:.1f} MB, {task.workers} workers", flush=True)
    for pair in preprocess(files, task, lambda line: print(line, flush=True)):
        empty = f" ({pair.empty:,} empty)" if pair.empty else ""
        held = f"{pair.documents:,} documents{empty}, {pair.tokens:,} tokens of {pair.dtype}"
        print(f"{pair.prefix}.bin, .idx, .json: {held}")


def _partition(arguments: argparse.Namespace) -> tuple[int | None, int]:
    if arguments.partition is None:
        return None, arguments.partitions
    if arguments.partitions != 1:
        raise UserError("--partition and --partitions: give one of them")
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", arguments.partition)
    if match is None:
        raise UserError(f"--partition {arguments.partition}: expected I/N, the number from 0 and how many: 0/4 to 3/4")
    return int(match[1]), int(match[2])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_input_flags(parser)
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a JSON line or columns of a Parquet file, a pair each (text)",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="start of the outputs' paths")
    add("--tokenizer-type", required=True, choices=get_args(TokenizerType))
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
    add(
        "--append-eod", action="store_true", help="put the end-of-document token after every document that is not empty"
    )
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
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="write N pairs, {PREFIX}_{i}_of_{N}_{KEY}_document, each from its share of the files (1: one pair, whose "
        "name has no number)",
    )
    add(
        "--partition",
        metavar="I/N",
        help="write only number I, from 0, of N partitions: one machine's work out of N; tools/merge_datasets.py joins "
        "them",
    )
    add("--strict", action="store_true", help="end at the first document that cannot be read, instead of skipping it")
    add(
        "--max-document-mb",
        type=int,
        default=LARGEST_DOCUMENT >> 20,
        metavar="N",
        help="a document of more mebibytes counts as one that cannot be read (1024)",
    )
    add(
        "--fresh",
        action="store_true",
        help="start anew where {PREFIX}.parts holds finished parts of an earlier run; without it a run of the same "
        "command goes on after them and another one is refused",
    )
    add(
        "--log-interval",
        type=int,
        default=10_000,
        metavar="N",
        help="documents between progress lines, of which there is one a minute in any case (10000)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
