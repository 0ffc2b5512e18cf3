"""Measure a trained model.

python tools/evaluate.py perplexity out/exports/T4 --data out/data/corpus_text_validation
python tools/evaluate.py perplexity out/run --data PREFIX --tier T1 --tier T4 --tier full --json scores.json
python tools/evaluate.py perplexity out/exports/T4 --data PREFIX --weights int8 --weights fp8

perplexity: mean negative log-likelihood a token (nats), its exponential, and bits a byte where the tokenizer is
known. The same model, data and settings give the same figures. With --weights, each capacity is measured as it is
stored and then with its weights quantised, with what that changes. The JSON is one object for one measurement, a list
of objects for several; a perplexity that no float holds (nll above 709) is null there, and inf on the terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import track

from megatron_essh.config import RunConfig
from megatron_essh.data.tokenizer_reference import TokenizerReference
from megatron_essh.data.tokenizers import Tokenizer
from megatron_essh.device import pick_device
from megatron_essh.elastic.capacity import Capacity, full_capacity, parse_capacity
from megatron_essh.errors import UserError, run_command
from megatron_essh.evaluation.data import open_evaluation_data
from megatron_essh.evaluation.perplexity import Windows, score, scored_bytes
from megatron_essh.evaluation.quantized import quantized_model
from megatron_essh.export.loading import open_tokenizer
from megatron_essh.export.provenance import Provenance
from megatron_essh.files import check_target, write_atomically
from megatron_essh.inference.command import add_model_arguments, describe, given_tokenizer, open_given_model
from megatron_essh.inference.quantization import Quantization
from megatron_essh.model.accounting import parameter_counts
from megatron_essh.version import __version__

STORED = "stored"
"""Weights as the model holds them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = parser.add_subparsers(dest="measure", required=True)
    command = measures.add_parser("perplexity", help="perplexity and bits a byte on a token pair")
    command.set_defaults(run=perplexity)
    add_model_arguments(command)
    command.add_argument("--data", required=True, metavar="PREFIX", help="token pair PREFIX.bin and PREFIX.idx")
    command.add_argument(
        "--tier", action="append", help="T1, ..., full or K,n; may be repeated (default: all that MODEL holds)"
    )
    command.add_argument(
        "--weights",
        action="append",
        choices=get_args(Quantization),
        help="as stored, and then with the weights of products in eight bits, as decoding has them; may be repeated",
    )
    command.add_argument("--sequence-length", type=int, help="tokens a window (default: as trained)")
    command.add_argument("--batch-size", type=int, help="windows a batch (default: as trained)")
    extent = command.add_mutually_exclusive_group()
    extent.add_argument("--batches", type=int, help="only so many batches, from the beginning")
    extent.add_argument("--all", action="store_true", help="all of the data (the default)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    args.run(args)


def perplexity(args: argparse.Namespace) -> None:
    if args.json is not None:
        check_target(args.json, "--json")
    device = pick_device(args.device)
    model, config, provenance = open_given_model(args, device)
    capacities = _capacities(args.tier, config, provenance)
    if args.weights and len(set(args.weights)) < len(args.weights):
        raise UserError(f"--weights: one of {', '.join(args.weights)} is given twice; give each once")
    data = open_evaluation_data(args.data, provenance, config.data)
    length = config.data.sequence_length if args.sequence_length is None else args.sequence_length
    windows = Windows(
        data.dataset,
        length,
        config.training.micro_batch if args.batch_size is None else args.batch_size,
        args.batches,
        vocab_size=config.model.vocab_size,
    )
    tokenizer = _tokenizer(args, data.tokenizer, config.model.vocab_size)
    print(describe(provenance, config, full_capacity(config.model)))
    print(
        f"data: {args.data}, {data.dataset.tokens:,} tokens; {len(windows):,} batches of windows of {length} tokens "
        f"on {device.type} in {args.precision}",
        flush=True,
    )
    text_bytes = None if tokenizer is None else scored_bytes(windows, tokenizer, cut_at=data.cut_at)
    kinds: list[Quantization] = args.weights or []
    rows = []
    for tier, capacity in capacities.items():
        for weights in (STORED, *kinds):
            named = tier if weights == STORED else f"{tier} {weights}"
            batches = track(
                windows, description=named, total=len(windows), console=Console(stderr=True), transient=True
            )
            if weights == STORED:
                run, cut, head_VD = model, capacity, None
            else:
                (run, head_VD), cut = quantized_model(model, capacity, weights), None
            result = score(
                run,
                batches,
                cut,
                cut_at=data.cut_at,
                precision=args.precision,
                chunk=config.training.loss_chunk,
                head_VD=head_VD,
            )
            rows.append(
                {
                    "model": provenance.path,
                    "kind": provenance.kind,
                    "tier": tier,
                    "weights": weights,
                    "channels": capacity.channels,
                    "ff_width": capacity.ff_width,
                    "parameters": parameter_counts(config.model, capacity).total,
                    "stage": provenance.stage,
                    "step": provenance.step,
                    "sha256": provenance.sha256,
                    "origin": provenance.origin,
                    "origin_sha256": provenance.origin_sha256,
                    "data": str(Path(args.data).resolve()),
                    "data_fingerprint": data.dataset.fingerprint,
                    "sequence_length": length,
                    "precision": args.precision,
                    "nll": result.nll,
                    "perplexity": result.perplexity if math.isfinite(result.perplexity) else None,
                    "tokens": result.tokens,
                    "text_bytes": text_bytes,
                    "bytes_per_token": None if text_bytes is None else text_bytes / result.tokens,
                    "bits_per_byte": None if not text_bytes else result.bits_per_byte(text_bytes),
                    "package_version": __version__,
                }
            )
    _print_rows(rows)
    if args.json is not None:
        content = rows[0] if len(rows) == 1 else rows
        write_atomically(args.json, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
        print(f"figures: {args.json}")


def _capacities(tiers: list[str] | None, config: RunConfig, provenance: Provenance) -> dict[str, Capacity]:
    """By the names that the report gives them; without --tier, all that the model holds."""
    if tiers is None:
        return {provenance.tier: full_capacity(config.model)}
    if len(set(tiers)) < len(tiers):
        raise UserError(f"--tier: one of {', '.join(tiers)} is given twice; give each once")
    return {tier: parse_capacity(tier, config.model, config.elastic) for tier in tiers}


def _tokenizer(args: argparse.Namespace, recorded: TokenizerReference | None, entries: int) -> Tokenizer | None:
    """What counts the text's bytes. Perplexity does without: a recorded one that cannot be read is only told."""
    given = given_tokenizer(args, recorded)
    try:
        return open_tokenizer(recorded, given, entries=entries)
    except UserError as error:
        if given is not None:
            raise
        print(f"note: no bits a byte: {error}", file=sys.stderr)
        return None


def _print_rows(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'tier':>8} {'channels':>8} {'units':>6} {'parameters':>14} {'loss':>8} {'perplexity':>11} {'bits/byte':>9} "
        f"{'tokens':>12}"
    )
    for row in rows:
        perplexity = math.inf if row["perplexity"] is None else row["perplexity"]
        bits = "unknown" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        changed = ""
        if row["weights"] == STORED:
            stored_nll = row["nll"]
        else:
            changed = f"  {row['weights']}: perplexity x {_ratio(row['nll'] - stored_nll)}"
        print(
            f"{row['tier']:>8} {row['channels']:>8} {row['ff_width']:>6} {row['parameters']:>14,} {row['nll']:>8.4f} "
            f"{perplexity:>11.3f} {bits:>9} {row['tokens']:>12,}{changed}"
        )


def _ratio(nll: float) -> str:
    """exp of a difference of losses, which a broken model may make as large as it likes."""
    return f"{math.exp(nll):.4f}" if abs(nll) < 100 else f"e^{nll:.0f}"


if __name__ == "__main__":
    run_command(main)
