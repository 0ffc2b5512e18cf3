"""Continue a prompt with a trained model; the text streams to the terminal as it is made.

python tools/generate.py out/exports/T4 --prompt "def " --max-new-tokens 100
python tools/generate.py out/run --tier T1 --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7

Standard output gets the prompt and its continuation and nothing else. The same seed gives the same text.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_essh.data.tokenizers import Tokenizer
from megatron_essh.device import pick_device
from megatron_essh.elastic.capacity import full_capacity, parse_capacity
from megatron_essh.errors import UserError, run_command
from megatron_essh.export.loading import open_model, open_tokenizer
from megatron_essh.inference import SamplingConfig, TextStream, generate, real_tokens
from megatron_essh.inference.command import add_model_arguments, describe, given_tokenizer
from megatron_essh.inference.generate import REPLACEMENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--prompt", metavar="TEXT")
    start.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text, taken as it is")
    start.add_argument("--unconditional", action="store_true", help="begin a new document")
    parser.add_argument("--tier", help="T1, ..., full or K,n (default: all that MODEL holds)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable token each time")
    parser.add_argument("--top-k", type=int, help="draw from the k most probable tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most probable tokens of mass p")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop-at-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end where the model ends the document (default: yes)",
    )
    args = parser.parse_args()
    sampling = SamplingConfig(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)

    device = pick_device(args.device)
    model, config, provenance = open_model(args.model, device)
    capacity = full_capacity(config.model)
    if args.tier is not None:
        capacity = parse_capacity(args.tier, config.model, config.elastic)
    given = given_tokenizer(args, provenance.tokenizer)
    tokenizer = open_tokenizer(provenance.tokenizer, given, entries=config.model.vocab_size)
    if tokenizer is None:
        raise UserError(f"{provenance.path}: records no tokenizer; give --tokenizer-type and --tokenizer-model")
    if config.data.document_mask and (args.unconditional or not args.stop_at_eod):
        raise UserError(
            f"{provenance.path}: trained with data.document_mask, so it never learnt how a document begins; "
            "give a prompt and let it stop at the end of the document"
        )
    prompt = read_prompt(args)
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.eod]

    print(describe(provenance, config, capacity), file=sys.stderr, flush=True)
    tokens = generate(
        model,
        ids,
        sampling,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        capacity=capacity,
        real_V=real_tokens(tokenizer, config.model.vocab_size).to(device),
        stop_token=tokenizer.eod if args.stop_at_eod else None,
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        print_text(tokenizer, prompt, ids, tokens, args)


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt's text, empty for --unconditional alone."""
    if args.unconditional:
        return ""
    where, prompt = "--prompt", args.prompt
    if args.prompt_file is not None:
        where = str(args.prompt_file)
        try:
            prompt = args.prompt_file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: byte {error.start} is not UTF-8; give a text file") from None
    if not prompt:
        raise UserError(f"{where}: empty; give some text, or --unconditional to begin a new document")
    return str(prompt)


def print_text(
    tokenizer: Tokenizer, prompt: str, ids: list[int], tokens: Iterator[int], args: argparse.Namespace
) -> None:
    """Write the prompt and what follows, as it comes; the rate goes to standard error."""
    terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")

    def write(text: str) -> None:
        sys.stdout.write(harmless(text) if terminal else text)
        sys.stdout.flush()

    write(prompt)
    stream = TextStream(tokenizer, ids)
    count, ended, begin = 0, False, time.perf_counter()
    for token in tokens:
        count += 1
        ended = args.stop_at_eod and token == tokenizer.eod
        if not ended:
            write(stream.push(token))
    write(stream.finish() + "\n")
    seconds = time.perf_counter() - begin
    why = "the end of the document" if ended else "--max-new-tokens"
    print(f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s), up to {why}", file=sys.stderr)


def harmless(text: str) -> str:
    """`text` without what would drive a terminal: control characters other than newline and tab show as U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else REPLACEMENT for c in text)


if __name__ == "__main__":
    run_command(main)
