"""What token pairs hold, and whether they are sound.

python tools/inspect_data.py data/corpus_text_document
python tools/inspect_data.py data/corpus_text_document --document 17
python tools/inspect_data.py data/ --verify --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from megatron_essh.config import TokenizerConfig, config_from_mapping
from megatron_essh.config.components import TokenizerType
from megatron_essh.data.indexed_dataset import IndexedDataset
from megatron_essh.data.inspection import Statistics, decode_document, histogram_lines, measure, verify
from megatron_essh.data.pair_files import find_pairs
from megatron_essh.data.sidecar import read_sidecar
from megatron_essh.data.tokenizer_reference import build_recorded, tokenizer_of
from megatron_essh.data.tokenizers import Tokenizer, build_tokenizer
from megatron_essh.errors import UserError, run_command


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    prefixes = find_pairs(arguments.pairs)
    if arguments.document is not None:
        if len(prefixes) > 1:
            raise UserError(f"--document {arguments.document}: of which of {len(prefixes)} pairs? name one")
        _show_document(IndexedDataset(prefixes[0]), arguments)
        return 0
    records, faults = [], []
    for prefix in prefixes:
        try:
            record = _inspect(prefix, arguments)
        except UserError as error:
            record = {"prefix": str(prefix), "faults": [str(error)]}
        faults += record["faults"]
        records.append(record)
    whole = [record for record in records if "documents" in record]
    total = {key: sum(record[key] for record in whole) for key in ("documents", "sequences", "tokens", "bin_bytes")}
    total = {"pairs": len(records), "sound": sum(not record["faults"] for record in records)} | total
    if arguments.json:
        print(json.dumps({"pairs": records, "total": total}, indent=2, ensure_ascii=False))
    elif len(records) > 1:
        print(
            f"together: {total['pairs']:,} pairs, {total['documents']:,} documents, {total['tokens']:,} tokens, "
            f"{total['bin_bytes'] / 1e6:.1f} MB of tokens; {total['sound']:,} pairs without a fault"
        )
    sys.stdout.flush()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 2 if faults else 0


def _inspect(prefix: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    pair = IndexedDataset(prefix)
    if not arguments.verify:  # which says what differs
        tokenizer_of(pair)
    statistics = measure(pair)
    sidecar = read_sidecar(prefix)
    record = {**asdict(statistics), "fingerprint": pair.fingerprint, "sidecar": sidecar, "faults": []}
    if not arguments.json:
        _print_statistics(statistics, sidecar)
    if arguments.verify:
        start = time.monotonic()
        progress = _Progress(statistics.bin_bytes)
        found = verify(pair, vocab_size=arguments.vocab_size, progress=progress)
        seconds = time.monotonic() - start
        record["verification"] = {**asdict(found), "seconds": seconds}
        record["faults"] = found.faults
        if not arguments.json:
            held = "" if found.vocab_size is None else f" in a vocabulary of {found.vocab_size:,}"
            beside = "the sidecar agrees" if found.described else "no sidecar to compare with"
            state = "; ".join(fault.split(": ", 1)[1] for fault in found.faults) or f"sound; {beside}"
            rate = statistics.bin_bytes / 1e6 / max(seconds, 1e-9)
            print(f"  verified    ids {found.smallest_id} to {found.largest_id}{held}; {state} ({rate:.0f} MB/s)")
    if not arguments.json:
        print()
    return record


def _print_statistics(statistics: Statistics, sidecar: dict[str, Any] | None) -> None:
    print(f"{statistics.prefix}")
    empty = f" ({statistics.empty_documents:,} empty)" if statistics.empty_documents else ""
    print(
        f"  holds       {statistics.documents:,} documents{empty} in {statistics.sequences:,} sequences, "
        f"{statistics.tokens:,} tokens of {statistics.dtype}"
    )
    print(f"  files       .bin {statistics.bin_bytes:,} bytes, .idx {statistics.idx_bytes:,} bytes")
    if sidecar is None:
        print("  tokenizer   not recorded (no sidecar)")
    else:
        tokenizer = sidecar["tokenizer"]
        name = " ".join(str(tokenizer[key]) for key in ("type", "model") if tokenizer.get(key))
        print(
            f"  tokenizer   {name}, {sidecar['vocab_size']:,} entries, padded to {sidecar['padded_vocab_size']:,}, "
            f"end of document {sidecar['eod']}"
        )
        if isinstance(parts := sidecar.get("parts"), list):
            print(f"  merged      from {len(parts):,} pairs")
    print(f"  lengths     {statistics.shortest:,} to {statistics.longest:,} tokens, {statistics.mean:,.1f} on average")
    for line in histogram_lines(statistics.histogram):
        print(f"    {line}")


def _show_document(pair: IndexedDataset, arguments: argparse.Namespace) -> None:
    if not -pair.documents <= arguments.document < pair.documents:
        raise UserError(f"--document {arguments.document}: {pair.prefix} has documents 0 to {pair.documents - 1}")
    if arguments.tokens < 1:
        raise UserError(f"--tokens {arguments.tokens}: must be at least 1")
    document = decode_document(pair, arguments.document, _tokenizer(pair, arguments), arguments.tokens)
    if arguments.json:
        print(json.dumps({"prefix": str(pair.prefix), **asdict(document)}, indent=2, ensure_ascii=False))
        return
    shown = f", the first {len(document.ids):,} of them" if len(document.ids) < document.tokens else ""
    print(f"{pair.prefix}: document {document.index}: {document.tokens:,} tokens{shown}", file=sys.stderr)
    print(document.text)


def _tokenizer(pair: IndexedDataset, arguments: argparse.Namespace) -> Tokenizer:
    if arguments.tokenizer_type is not None:
        flags = "--tokenizer-type, --tokenizer-model, --tokenizer-pattern"
        named = {
            "type": arguments.tokenizer_type,
            "model": arguments.tokenizer_model,
            "pattern": arguments.tokenizer_pattern,
        }
        config = config_from_mapping(TokenizerConfig, named, flags)
        return build_tokenizer(config)
    if arguments.tokenizer_model is not None:
        raise UserError("--tokenizer-model: give --tokenizer-type with it")
    reference = tokenizer_of(pair)
    if reference is None:
        raise UserError(f"{pair.prefix}: no sidecar records its tokenizer; give --tokenizer-type and --tokenizer-model")
    return build_recorded(reference)


class _Progress:
    """Says on standard error, every few seconds, how much is read."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.said = total, 0, time.monotonic()

    def __call__(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self.said >= 5:
            self.said = time.monotonic()
            print(f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB read", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "pairs",
        nargs="+",
        metavar="PAIR",
        help="prefixes of pairs, their .bin or .idx, folders (every pair below that is not hidden) or globs",
    )
    add("--verify", action="store_true", help="read everything: each entry, each token, and what the sidecar says")
    add("--vocab-size", type=int, metavar="N", help="with --verify: ids must lie below N (the sidecar's tokenizer)")
    add("--document", type=int, metavar="I", help="show document I as text instead, from 0; -1 is the last")
    add("--tokens", type=int, default=2000, metavar="N", help="with --document: show at most N tokens (2000)")
    add("--tokenizer-type", choices=get_args(TokenizerType), help="in place of the recorded one")
    add("--tokenizer-model", metavar="FILE", help="its rank file, .model or tokenizer.json")
    add("--tokenizer-pattern", default="gpt2", choices=["gpt2", "cl100k", "o200k", "llama3"], help="of a rank file")
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    run_command(main)
