"""Join token pairs into one, in natural order: `part_2` before `part_10`.

    python tools/merge_datasets.py --input data/parts/ --output-prefix data/corpus_text_document
    python tools/merge_datasets.py --input 'data/part_*' more/wiki_text_document --output-prefix data/all

The pair appears whole or not at all. Parts by different tokenizers are refused: an id would mean two things.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_essh.data.merging import merge_pairs
from megatron_essh.data.pair_files import find_pairs
from megatron_essh.errors import run_command


def main() -> None:
    arguments = _parser().parse_args()
    output = Path(arguments.output_prefix)
    prefixes = find_pairs(arguments.input, output)
    size = sum(Path(f"{prefix}{suffix}").stat().st_size for prefix in prefixes for suffix in (".bin", ".idx"))
    ends = f"{prefixes[0]} to {prefixes[-1]}" if len(prefixes) > 1 else f"{prefixes[0]}"
    print(f"{len(prefixes):,} pairs, {size / 1e6:.1f} MB: {ends}", flush=True)
    merged = merge_pairs(
        prefixes,
        output,
        lambda line: print(line, flush=True),
        widen=arguments.widen,
        assume_tokenizer=arguments.assume_tokenizer,
    )
    files = ".bin, .idx, .json" if merged.described else ".bin, .idx (no part has a sidecar, so none is written)"
    print(f"{merged.prefix}{files}: {merged.documents:,} documents, {merged.tokens:,} tokens of {merged.dtype}")
    rate = merged.bytes / 1e6 / max(merged.seconds, 1e-9)
    print(f"{merged.bytes / 1e6:.1f} MB in {merged.seconds:.1f} s: {rate:.0f} MB/s, checks and flushing included")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="prefixes of pairs, their .bin or .idx, folders (every pair below that is not hidden) or globs",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="path of the merged pair, without .bin and .idx")
    add("--widen", action="store_true", help="join different token types into the narrowest that holds all of them")
    add(
        "--assume-tokenizer",
        action="store_true",
        help="take parts without a sidecar for the work of the tokenizer that the others name",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
