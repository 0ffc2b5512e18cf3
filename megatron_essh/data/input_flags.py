"""Command-line flags that every command which reads text has."""

from __future__ import annotations

import argparse


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--input` and `--encoding-errors`."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders (every file below that is not hidden) or globs (** goes through folders), taken in "
        "natural order: part_2 before part_10. .jsonl and .json hold JSON lines, .parquet rows, .fasta, .fa, .fna, "
        ".faa, .ffn and .frn sequences; any other file is one document of plain text. All but Parquet may be "
        "compressed: .gz, .zst",
    )
    parser.add_argument(
        "--encoding-errors",
        default="strict",
        choices=["strict", "replace"],
        help="bytes that are not UTF-8: take the document for unreadable, or read them as U+FFFD (strict)",
    )
