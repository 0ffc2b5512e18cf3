"""Cut standalone models out of an elastic one.

python tools/export_tiers.py out/run --tier T1 --tier T4 --output out/exports
python tools/export_tiers.py out/run --tier 12,640 --output out/exports

Each tier becomes a folder of --output: T1, T4, 12x640, full. It holds model.safetensors, config.yaml, export.json
(parameter count, SHA-256, where it came from, which tokenizer it speaks) and a copy of the tokenizer's file, so that it
can be moved and passed on. --no-tokenizer leaves the copy out, for a tokenizer that may not be passed on. A tier's name
means the same in an export as in the model that the export was cut from.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_essh.config import RunConfig
from megatron_essh.elastic.capacity import parse_capacity
from megatron_essh.errors import UserError, run_command
from megatron_essh.export.folder import TOKENIZER_FILES
from megatron_essh.export.loading import open_tensors
from megatron_essh.export.provenance import Provenance
from megatron_essh.export.tiers import export_tier, tokenizer_content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="folder of a run, of one of its checkpoints or of an export")
    parser.add_argument(
        "--tier",
        action="append",
        required=True,
        help="T1, T2, ..., full, or K,n for K channels and n feed-forward units; may be repeated",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder that the exports go into")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace exports that are there, with all in their folders"
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="leave the tokenizer's file out (default: a copy goes along)"
    )
    args = parser.parse_args()

    tensors, config, source = open_tensors(args.source)
    folders: dict[Path, str] = {}
    for tier in args.tier:  # all of them before the first is written
        parse_capacity(tier, config.model, config.elastic)
        folder = args.output / tier.replace(" ", "").replace(",", "x")
        if folder in folders:
            raise UserError(f"--tier {tier}: given twice; give it once")
        folders[folder] = tier
    announce_source(source, config)
    tokenizer = None if args.no_tokenizer else find_tokenizer(source, config)
    for folder, tier in folders.items():
        record, written = export_tier(
            tensors, config, source, tier, folder, tokenizer=tokenizer, overwrite=args.overwrite
        )
        print(
            f"{tier:>8}: {record.channels} channels, {record.ff_width} feed-forward units, {record.parameters:,} "
            f"parameters, {record.bytes / 1e6:,.1f} MB, SHA-256 {record.sha256[:12]} -> {folder}"
            + ("" if written else " (already there, unchanged)"),
            flush=True,
        )
    print(f"exports: {args.output}; check one with tools/verify_export.py {next(iter(folders))}")


def announce_source(source: Provenance, config: RunConfig) -> None:
    """Say which model is cut, and loudly if its run had not come to its end."""
    steps = config.refinement.steps if source.stage == "refine" else config.training.steps
    print(f"source: {source.path} ({source.kind}, {source.stage}, step {source.step:,} of {steps:,})", flush=True)
    if source.step < steps:
        print(
            f"warning: {source.path}: step {source.step:,} of {steps:,}: the model of an unfinished run; "
            "export again when the run is done",
            file=sys.stderr,
        )


def find_tokenizer(source: Provenance, config: RunConfig) -> bytes | None:
    """The tokenizer's file, for the exports to carry; one that cannot be had is only told."""
    try:
        content = tokenizer_content(source, config)
    except UserError as error:
        print(f"warning: the exports carry no tokenizer: {error}", file=sys.stderr)
        return None
    if content is not None and source.tokenizer is not None:
        name = TOKENIZER_FILES[source.tokenizer.config.type]
        print(f"tokenizer: {source.tokenizer.config.model}, copied to {name} (--no-tokenizer leaves it out)")
    return content


if __name__ == "__main__":
    run_command(main)
