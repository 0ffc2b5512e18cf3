"""Continue prompts with a trained model; a single text streams to the terminal as it is made.

python tools/generate.py out/exports/T4 --prompt "def " --max-new-tokens 100
python tools/generate.py out/run --tier T1 --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7
python tools/generate.py out/run --prompt "One" --prompt "Two" --num-samples 4 --weights int8 --stop "\\n\\n"

Standard output gets the prompt and its continuation and nothing else; of several texts, made at once, each in its
order under a line such as `--- 2 of 8`. The same seed gives the same text: the first text's is --seed, each further
one's is one more. With weights of 16 or 8 bits that holds for the same number of texts at a time; another number
rounds logits in other places.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import unicodedata
from pathlib import Path

import torch

from megatron_essh.data.tokenizers import Tokenizer
from megatron_essh.device import pick_device
from megatron_essh.elastic.capacity import full_capacity, parse_capacity
from megatron_essh.errors import UserError, run_command
from megatron_essh.export.loading import open_tokenizer
from megatron_essh.inference import (
    Engine,
    Request,
    SamplingConfig,
    StopStrings,
    TextStream,
    generate_many,
    real_tokens,
)
from megatron_essh.inference.command import add_model_arguments, describe, given_tokenizer, open_given_model
from megatron_essh.inference.generate import REPLACEMENT

MOST_SLOTS = 64
"""Texts that are made at once where --slots says nothing."""
MOST_TEXTS = 1_000_000
"""In one call: they are kept until the last of them is made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--prompt", metavar="TEXT", action="append", help="may be given several times")
    start.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text, taken as it is")
    start.add_argument("--unconditional", action="store_true", help="begin a new document")
    parser.add_argument("--tier", help="T1, ..., full or K,n (default: all that MODEL holds)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable token each time")
    parser.add_argument("--top-k", type=int, help="draw from the k most probable tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most probable tokens of mass p")
    parser.add_argument("--min-p", type=float, default=0.0, help="leave out tokens below this share of the top one's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="weaken tokens that came before; 1: none")
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help=r"end before this text (\n is a new line); repeatable",
    )
    parser.add_argument("--num-samples", type=int, default=1, help="texts of each prompt")
    parser.add_argument("--slots", type=int, help="texts that are made at once (default: all, at most 64)")
    parser.add_argument(
        "--weights",
        choices=("fp32", "bf16", "int8", "fp8"),
        help="of the decode steps; int8 and fp8 with activations in bf16 (default: as --precision)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop-at-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end where the model ends the document (default: yes)",
    )
    args = parser.parse_args()
    if sys.stdout is None:
        raise UserError("standard output is closed, and texts go there; leave it open")
    sampling = SamplingConfig(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    stops = [text.replace("\\n", "\n") for text in args.stop]
    StopStrings(stops)
    for name in ("num_samples", "slots"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(args, name)} makes no text; give 1 or more")
    check_texts(args)

    device = pick_device(args.device)
    model, config, provenance = open_given_model(args, device)
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
    prompts = read_prompts(args)
    encoded = [(prompt, tuple(tokenizer.encode(prompt) if prompt else [tokenizer.eod])) for prompt in prompts]
    texts = [Text(tokenizer, prompt, ids, stops) for prompt, ids in encoded for _ in range(args.num_samples)]
    requests = [
        Request(
            prompt=text.ids,
            sampling=sampling,
            seed=args.seed + number,
            max_new_tokens=args.max_new_tokens,
            stop_token=tokenizer.eod if args.stop_at_eod else None,
        )
        for number, text in enumerate(texts)
    ]
    for request in requests:
        request.check(config.model.vocab_size)

    print(describe(provenance, config, capacity), file=sys.stderr, flush=True)
    weights = args.weights or args.precision
    engine = Engine(
        model,
        capacity,
        slots=min(args.slots or MOST_SLOTS, len(requests)),
        dtype=torch.float32 if weights == "fp32" else torch.bfloat16,
        quantization=weights if weights in ("int8", "fp8") else None,
        max_length=max(len(request.prompt) + request.max_new_tokens for request in requests),
        real_V=real_tokens(tokenizer, config.model.vocab_size),
    )
    print_texts(engine, requests, texts)


def check_texts(args: argparse.Namespace) -> None:
    """Refuse more texts than one call makes."""
    count = len(args.prompt or [None]) * args.num_samples
    if count > MOST_TEXTS:
        raise UserError(
            f"--num-samples: {args.num_samples} of each prompt makes {count} texts; give {MOST_TEXTS} or fewer in all"
        )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts' texts; one empty text for --unconditional alone."""
    if args.unconditional:
        return [""]
    where, prompts = "--prompt", args.prompt
    if any("\udc80" <= character <= "\udcff" for prompt in prompts or () for character in prompt):
        raise UserError(f"{where}: not UTF-8; put the text into a file in UTF-8 and give --prompt-file")
    if args.prompt_file is not None:
        where = str(args.prompt_file)
        try:
            prompts = [args.prompt_file.read_bytes().decode()]
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: byte {error.start} is not UTF-8; give a text file") from None
    if "" in prompts:
        raise UserError(f"{where}: empty; give some text, or --unconditional to begin a new document")
    return list(prompts)


class Text:
    """A text that is being made: what has been written of it, and what has not."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, ids: tuple[int, ...], stops: list[str]) -> None:
        self.ids = ids
        self.count = 0
        self.why = "--max-new-tokens"
        self._stream, self._stops = TextStream(tokenizer, ids), StopStrings(stops)
        self._pending = prompt

    def push(self, token: int, ends: bool) -> bool:
        """Take in a token, one that `ends` the document or not; whether --stop ends the text here."""
        self.count += 1
        if ends:
            self.why = "the end of the document"
            return False
        self._pending += self._stops.push(self._stream.push(token))
        if self._stops.found:
            self.why = "--stop"
        return self._stops.found

    def finish(self) -> None:
        """No more tokens come."""
        self._pending += self._stops.push(self._stream.finish()) + self._stops.finish() + "\n"

    def take(self) -> str:
        """What has come since the last time."""
        piece, self._pending = self._pending, ""
        return piece


def print_texts(engine: Engine, requests: list[Request], texts: list[Text]) -> None:
    """Write prompts and what follows, a single one as it comes; the rate goes to standard error."""
    terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")

    def write(piece: str) -> None:
        try:
            sys.stdout.write(harmless(piece) if terminal else piece)
            sys.stdout.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error

    begin = time.perf_counter()
    ended: set[int] = set()
    if len(texts) == 1:
        write(texts[0].take())
    for number, token in generate_many(engine, requests, ended):
        if texts[number].push(token, token == requests[number].stop_token):
            ended.add(number)
        if len(texts) == 1:
            write(texts[0].take())
    seconds = time.perf_counter() - begin
    for number, text in enumerate(texts):
        text.finish()
        write((f"--- {number + 1} of {len(texts)}\n" if len(texts) > 1 else "") + text.take())
    count = sum(text.count for text in texts)
    why = f", up to {texts[0].why}" if len(texts) == 1 else f", {len(texts)} texts"
    print(f"{count} tokens in {seconds:.2f} s ({count / seconds:.1f} tokens/s){why}", file=sys.stderr)


def harmless(text: str) -> str:
    """`text` without what would drive a terminal: control characters other than newline and tab show as U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else REPLACEMENT for c in text)


if __name__ == "__main__":
    run_command(main)
