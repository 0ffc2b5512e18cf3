"""Speed and memory of training, of the mixer's scan, of prefill and of decoding, on this machine; decoding's errors.

    python tools/benchmark.py                      training and the scan, on the quickstart's model
    python tools/benchmark.py train CONFIG         optimizer steps: full capacity, then the elastic mix
    python tools/benchmark.py scan CONFIG          the selective scan of one layer, forward and backward
    python tools/benchmark.py prefill CONFIG       a long prompt, from an empty state to the next token
    python tools/benchmark.py decode CONFIG        one token more of many sequences, fused and through PyTorch
    python tools/benchmark.py drift CONFIG         the steps' logits beside the training forward's, by position
    python tools/benchmark.py data CONFIG          drawing the order of samples, and serving batches
    python tools/benchmark.py scaling CONFIG ...   training on every layout of this machine's GPUs; --help of its own

    python tools/benchmark.py train CONFIG --model both --capacity full --micro-batch 8 --accumulation 16
                                                   our full model and a compiled Transformer++ of its size
    python tools/benchmark.py prefill CONFIG --length 131072 --batch 1 --tier T10
    python tools/benchmark.py decode CONFIG --tier T10 --tier T1 --batch 1 --batch 16 --context 2048
    python tools/benchmark.py decode exports/T4 --weights bf16 --weights int8 --plot decoding.png
    python tools/benchmark.py drift CONFIG --tier T1 --tier T10 --batch 1 --batch 3 --plot drift.png

Random weights and tokens; `decode` and `drift` also take the folder of a run or an export in CONFIG's place. Training:
the median over --repeats runs of the mean over the --measure steps of a run; decoding: over --repeats runs of --steps
steps, after --warmup untimed ones; scan and prefill: the median of --repeats timings after --warmup untimed ones.
--json FILE keeps every figure beside the tables.
docs/measuring.md and docs/decoding.md say what each figure means.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_essh.benchmarks.data import DataCase, measure_drawing, measure_serving
from megatron_essh.benchmarks.decoding import (
    DecodeTiming,
    Weights,
    decode_cases,
    end_tiers,
    measure_decoding,
    random_model,
)
from megatron_essh.benchmarks.decoding_plot import draw, draw_drift
from megatron_essh.benchmarks.drift import FORWARD, MOST_GROWTH, drift_cases, measure_drift, strengthen
from megatron_essh.benchmarks.prefill import Prompt, measure_prefill
from megatron_essh.benchmarks.room import within_memory
from megatron_essh.benchmarks.scaling_command import main as scaling
from megatron_essh.benchmarks.scan import measure_scan
from megatron_essh.benchmarks.training import Case, Schedule, make_case, measure_training, ratios, with_batches
from megatron_essh.config import ParallelConfig, RunConfig, load_config
from megatron_essh.config.command_line import ConfigParser, add_config_arguments
from megatron_essh.device import device_name
from megatron_essh.errors import UserError, run_command
from megatron_essh.export.loading import open_model
from megatron_essh.files import check_target, write_atomically
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.processes import open_mesh

LONG_PROMPT = 131_072
"""Tokens that a GPU's prefill is measured on."""
DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs/runs/quickstart.yaml"
ONES = ("repeats", "micro_batch", "accumulation", "steps", "length", "batch", "documents")
LEAST = {"warmup": 0, "context": 0, **dict.fromkeys(ONES, 1)}
"""What the numbers on the command line must be at least."""
MOST = {
    **dict.fromkeys(("repeats", "micro_batch", "accumulation", "steps", "warmup"), 10**6),
    **dict.fromkeys(("length", "batch", "documents", "context"), 2**53),
}
"""And at most: no run is as long, and a program that reads the figures holds no larger number exactly."""
DECODING = ("decode", "drift")
"""What takes a trained model, and several tiers and batches."""
DECODING_ONLY = ("context", "weights", "plot")
TAKEN_BY = {
    "length": ("prefill", "drift"),
    "measure": ("all", "train"),
    "parts": ("all", "train"),
    "documents": ("data",),
    "micro_batch": ("all", "train", "data", "scan"),
    "accumulation": ("all", "train", "data"),
    "steps": ("all", "train", "decode"),
    "repeats": ("all", "train", "scan", "prefill", "decode", "data"),
    "warmup": ("all", "scan", "prefill", "decode"),
    "compile_transformer": ("all", "train", "prefill"),
    "bandwidth": ("decode",),
    "control": ("decode",),
}
"""What each option is for, where it is not for everything; `_check_decoding` knows those of decode and drift alike."""
BANDWIDTH = 4.3
"""TB/s that an H200 was measured to move."""


def main() -> int | None:
    if sys.argv[1:2] == ["scaling"]:
        return scaling(sys.argv[2:])
    parser = _parser()
    args = parser.parse_intermixed_args()  # CONFIG may stand behind options, away from its word
    for name, least in LEAST.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} {value}: at least {least}")
            if value is not None and value > MOST[name]:
                raise UserError(f"--{name.replace('_', '-')} {value}: at most {MOST[name]}")
    _check_options(args, parser)
    _check_decoding(args)
    for name in ("json", "plot"):
        if getattr(args, name) is not None:
            check_target(getattr(args, name), f"--{name}")
    if args.json is not None and args.plot is not None and _place(args.json) == _place(args.plot):
        raise UserError(f"--plot {args.plot}: the file of --json too; name another one")
    model, config = _open(args)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    with open_mesh(config.parallel, config.training.device) as mesh:
        if mesh.world > 1 and args.what != "train":
            raise UserError(f"{args.what}: measures one device; of {mesh.world} processes, `train` alone does")
        with within_memory(args.what, mesh.device):
            if args.what == "decode":
                _decode(args, config, model, mesh.device)
            elif args.what == "drift":
                _drift(args, config, model, mesh.device)
            else:
                _measure(args, with_batches(config, args.micro_batch, args.accumulation, mesh.dp), mesh)
    return None


def _place(file: Path) -> Path:
    """Where a file that is written lies; a link's own place, since it is the link that makes way."""
    return file.parent.resolve() / file.name


def _open(args: argparse.Namespace) -> tuple[LanguageModel | None, RunConfig]:
    """The config; and the model, where a folder of a trained one stands in its place."""
    if args.what not in DECODING and args.config.is_dir():
        raise UserError(
            f"{args.config}: a folder; {args.what} takes a config file, {' and '.join(DECODING)} a model too"
        )
    if not args.config.is_dir():
        return None, load_config(args.config, args.overrides)
    if args.overrides:
        raise UserError(f"--set {args.overrides[0]}: {args.config} is a trained model, whose config stands")
    model, config, _ = open_model(args.config, tokenizer=False)
    # How it was trained does not matter here: one process, on a GPU if there is one.
    training = replace(config.training, device="auto")
    return model, replace(config, parallel=ParallelConfig(), training=training)


def _check_options(args: argparse.Namespace, parser: ConfigParser) -> None:
    """Refuse options that mean nothing to what is measured, and what is given twice."""
    for name, kinds in TAKEN_BY.items():
        if args.what not in kinds and getattr(args, name) != parser.get_default(name):
            flag = name.replace("_", "-") if getattr(args, name) is not False else f"no-{name.replace('_', '-')}"
            raise UserError(f"--{flag}: belongs to {', '.join(kinds)}, not to {args.what}")
    for name in ("capacity", "batch", "context", "weights"):
        given = getattr(args, name) or []
        if len(set(given)) < len(given):
            raise UserError(f"--{name}: {' '.join(map(str, given))}; give each once")


def _check_decoding(args: argparse.Namespace) -> None:
    """Refuse what `decode` and `drift` alone take, and of theirs what the other takes."""
    if args.what in DECODING:
        if args.model != "essh" or args.elastic:
            raise UserError(f"{args.what}: takes our model at one capacity after another; leave out --model, --elastic")
        if args.what == "drift" and len(args.context or []) > 1:
            raise UserError(f"--context: given {len(args.context)} times; drift takes one")
        return
    for name in DECODING_ONLY:
        if getattr(args, name) is not None:
            raise UserError(f"--{name}: belongs to decode and drift, not to {args.what}")
    for name in ("capacity", "batch"):
        given = getattr(args, name)
        if given is not None and len(given) > 1:
            raise UserError(f"--{name}: given {len(given)} times; {args.what} takes one")


def _measure(args: argparse.Namespace, config: RunConfig, mesh: Mesh) -> None:
    device = mesh.device
    schedule = _schedule(args, device)
    cases = _cases(args, config, device) if args.what in ("all", "train") else []
    warmup = 2 if args.warmup is None else args.warmup

    where = _where(device, mesh.world)
    title = f"{args.config.name} on {where}"
    console = Console(quiet=not mesh.is_first)
    scans = measure_scan(config, device, warmup, args.repeats) if args.what in ("all", "scan") else []
    if scans:
        console.print(_scan_table(title, scans))
    trained: list[dict[str, Any]] = []
    for case in cases:
        if mesh.is_first:
            _announce(case, schedule)
        say = partial(print, flush=True) if mesh.is_first else _say_nothing
        trained.append(measure_training(case, mesh, schedule, parts=args.parts, say=say))
    if not mesh.is_first:
        return
    if trained:
        console.print(_training_table(title, trained))
        if all(row["peak_tflops"] is None for row in trained):
            print(f"no MFU: no {config.training.precision} peak is on record for {device_name(device)}")
        for row in trained:
            if row["parts"]:
                console.print(_parts_table(row))
        for what, ratio in ratios(trained).items():
            print(f"{what}: {ratio:.3f}")
    prefilled = _prefill(args, config, device) if args.what == "prefill" else []
    if prefilled:
        console.print(_prefill_table(title, prefilled))
        ours = [row for row in prefilled if row["model"] == "essh"]
        if ours:
            console.print(_engine_table(ours))
        for what, ratio in ratios(prefilled).items():
            print(f"{what}: {ratio:.3f}")
    served = _data(args, config) if args.what == "data" else []
    if served:
        console.print(_data_table(served))
    figures = {"scan": scans, "train": trained, "prefill": prefilled, "data": served}
    _keep(args, where, {**figures, "ratios": ratios(trained or prefilled)})


def _where(device: torch.device, world: int = 1) -> str:
    devices = device_name(device) if world == 1 else f"{world} x {device_name(device)}"
    return f"{devices}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _keep(args: argparse.Namespace, where: str, figures: dict[str, Any]) -> None:
    """Write what was measured, if it is asked for."""
    if args.json:
        content = {"config": str(args.config), "set": args.overrides, "where": where, **figures}
        write_atomically(args.json, json.dumps(content, indent=1).encode())
        print(f"figures: {args.json}")


def _say_nothing(line: str) -> None:
    """Of several processes, the first one speaks."""


def _parser() -> ConfigParser:
    parser = ConfigParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("all", "train", "scan", "prefill", *DECODING, "data")
    parser.add_argument("what", nargs="?", choices=kinds, default="all")
    add_config_arguments(parser, DEFAULT_CONFIG)
    parser.add_argument("--model", choices=("essh", "transformer_pp", "both"), default="essh")
    parser.add_argument(
        "--capacity",
        "--tier",
        action="append",
        metavar="TIER",
        help="full or a tier (T4); in training, as it trains, its teacher included; in decoding several",
    )
    parser.add_argument("--elastic", action="store_true", help="the recipe's mix after its warm-up, teachers included")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences a forward pass (default: the config's)")
    parser.add_argument("--accumulation", type=int, metavar="N", help="micro-batches a step (default: the config's)")
    parser.add_argument("--steps", type=int, help="steps a run (default: 40, decoding 200; on a CPU 8)")
    parser.add_argument("--measure", metavar="FROM-TO", help="steps measured, counted from 1 (default: 20-35; CPU 4-7)")
    parser.add_argument(
        "--length",
        type=int,
        help="tokens of a prompt (default: 131072; CPU: the config's sequences); of a sequence that drift looks at "
        "(default: 4096 past the window)",
    )
    parser.add_argument(
        "--batch", type=int, action="append", metavar="N", help="prompts or sequences at a time; in decoding several"
    )
    parser.add_argument(
        "--context",
        type=int,
        action="append",
        metavar="N",
        help="tokens that sequences have taken in before decoding; may be repeated (default: the window); before "
        "drift's steps, one number (default: 64)",
    )
    parser.add_argument(
        "--weights",
        choices=get_args(Weights),
        action="append",
        help="of decoding; may be repeated (default: bf16; drift: fp32 too)",
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="TB/S", help=f"the floor of decoding (default: on a GPU {BANDWIDTH:g})"
    )
    parser.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode through PyTorch's step of the same model too",
    )
    parser.add_argument(
        "--documents", type=int, default=10**7, help="documents of the orders of `data` (default: 10,000,000)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs; timings of scan and prefill (default: 3)")
    parser.add_argument(
        "--warmup", type=int, help="untimed calls of scan and prefill (default: 2), steps of decoding (50; on a CPU 2)"
    )
    parser.add_argument(
        "--compile-transformer",
        action=argparse.BooleanOptionalAction,
        help="torch.compile the Transformer++'s blocks (default: on for CUDA)",
    )
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="time a step's parts too")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the times of decoding, or the errors")
    return parser


def _schedule(args: argparse.Namespace, device: torch.device) -> Schedule:
    steps = args.steps or (40 if device.type == "cuda" else 8)
    first, last = max(1, steps // 2), max(1, steps * 7 // 8)
    if args.measure is not None:
        words = args.measure.split("-")
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise UserError(f"--measure {args.measure}: expected FROM-TO, such as 20-35")
        first, last = map(int, words)
        if not 1 <= first <= last <= steps:
            raise UserError(f"--measure {args.measure}: not within steps 1 to {steps}; see --steps")
    return Schedule(steps, first, last, args.repeats)


def _cases(args: argparse.Namespace, config: RunConfig, device: torch.device) -> list[Case]:
    if args.model == "transformer_pp" and (args.elastic or args.capacity not in (None, ["full"])):
        raise UserError("--model transformer_pp has one capacity; leave out --capacity and --elastic")
    if args.capacity == ["elastic"]:
        raise UserError("--capacity elastic: expected full or a tier; the mix is --elastic")
    capacities = [*(args.capacity or []), *(["elastic"] if args.elastic else [])]
    capacities = capacities or (["full", "elastic"] if config.elastic.enabled else ["full"])
    cases = []
    if args.model != "transformer_pp":
        cases += [make_case(config, "essh", c, compiled=False) for c in capacities]
    if args.model != "essh":
        compiled = device.type == "cuda" if args.compile_transformer is None else args.compile_transformer
        cases.append(make_case(config, "transformer_pp", "full", compiled=compiled))
    return cases


def _prefill(args: argparse.Namespace, config: RunConfig, device: torch.device) -> list[dict[str, Any]]:
    if args.elastic:
        raise UserError("--elastic is a mix of training; a prefill runs one --tier")
    if args.model == "transformer_pp" and args.capacity not in (None, ["full"]):
        raise UserError("--model transformer_pp has one capacity; leave out --tier")
    length = args.length or (LONG_PROMPT if device.type == "cuda" else config.data.sequence_length)
    (batch,), (capacity,) = args.batch or [1], args.capacity or ["full"]
    prompt = Prompt(batch, length, 2 if args.warmup is None else args.warmup, args.repeats)
    found = []
    for model in ("essh", "transformer_pp") if args.model == "both" else (args.model,):
        tier = capacity if model == "essh" else "full"
        compiled = device.type == "cuda" if args.compile_transformer is None else args.compile_transformer
        print(
            f"{model} {tier}: {prompt.batch} x {prompt.length:,} tokens, {config.training.precision} weights; "
            f"{prompt.warmup} untimed calls, then {prompt.repeats}",
            flush=True,
        )
        found.append(measure_prefill(config, model, tier, prompt, device, compiled=compiled))
    return found


def _decode(args: argparse.Namespace, config: RunConfig, model: LanguageModel | None, device: torch.device) -> None:
    if args.bandwidth is not None and not 1e-6 <= args.bandwidth <= 1e6:
        raise UserError(f"--bandwidth {args.bandwidth:g}: TB/s, 1e-6 to 1e6")
    on_gpu = device.type == "cuda"
    cases = decode_cases(
        config, device, tiers=args.capacity, batches=args.batch, contexts=args.context, weights=args.weights
    )
    warmup, steps = (50, 200) if on_gpu else (2, 8)
    timing = DecodeTiming(warmup if args.warmup is None else args.warmup, args.steps or steps, args.repeats)
    bandwidth = args.bandwidth or (BANDWIDTH if on_gpu else None)
    random = model is None
    rows = measure_decoding(
        random_model(config, device) if model is None else model.to(device),
        config,
        cases,
        timing,
        bandwidth=None if bandwidth is None else 1e12 * bandwidth,
        control=args.control,
        say=partial(print, flush=True),
    )
    where = _where(device)
    title = f"{args.config.name} on {where}"
    floor = "" if bandwidth is None else f"; floor: what must move, at {bandwidth:g} TB/s"
    runs = f"median of {timing.repeats} runs of {timing.steps} steps"
    console = Console()
    console.print(_decode_table(f"{title}\n{runs}{floor}", rows))
    console.print(_decode_memory_table(rows))
    if args.control:
        console.print(_decode_control_table(rows))
    _keep(args, where, {"random_weights": random, **asdict(timing), "decode": rows})
    if args.plot:
        write_atomically(args.plot, draw(rows, title))
        print(f"plot: {args.plot}")


def _drift(args: argparse.Namespace, config: RunConfig, model: LanguageModel | None, device: torch.device) -> None:
    (prompt,) = args.context or [None]
    tiers, weights = args.capacity or end_tiers(config), args.weights or ["bf16", "fp32"]
    cases = drift_cases(config, tiers, args.batch or [1, 3], args.length, prompt)
    random = model is None
    if model is None:
        model = random_model(config, device)
        strengthen(model, config.training.seed)
    rows = measure_drift(model.to(device), config, cases, weights, say=partial(print, flush=True))
    where = _where(device)
    title = f"{args.config.name} on {where}"
    begin = "prompt" if rows[0]["window"] is None else f"window of {rows[0]['window']:,}"
    Console().print(_drift_table(f"{title}\nerrors of logits past the {begin}, relative to fp32's", rows))
    print(_drift_verdict(rows))
    _keep(args, where, {"random_weights": random, "drift": rows})
    if args.plot:
        write_atomically(args.plot, draw_drift(rows, title))
        print(f"plot: {args.plot}")


def _data(args: argparse.Namespace, config: RunConfig) -> list[dict[str, Any]]:
    batch, length = config.training.global_batch, config.data.sequence_length
    case = DataCase(documents=args.documents, sequence_length=length, batch=batch, workers=max(1, config.data.workers))
    print(f"orders of {case.documents:,} documents; batches of {batch} x {length} from the page cache", flush=True)
    return measure_drawing(case, args.repeats) + measure_serving(case, args.repeats)


def _announce(case: Case, schedule: Schedule) -> None:
    training, length = case.config.training, case.config.data.sequence_length
    slots = "" if case.capacity != "elastic" else f" (slots of {case.config.elastic.slot_sequences})"
    print(
        f"{case.model} {case.capacity}: {case.parameters:,} parameters, {training.precision}, "
        f"{'compiled blocks' if case.compiled else 'no compilation'}; "
        f"steps of {training.global_batch // training.micro_batch} x "
        f"{training.micro_batch} sequences of {length}{slots}; "
        f"measures {schedule.first}-{schedule.last} of {schedule.steps} steps, {schedule.repeats} times",
        flush=True,
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def _scan_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = _table(title, "what", "median ms", "least", "most", "tokens/s", "peak MiB")
    for row in rows:
        times = (f"{row[k]:.2f}" for k in ("median_ms", "min_ms", "max_ms"))
        table.add_row(row["what"], *times, f"{row['tokens_per_second']:,.0f}", f"{row['peak_mib']:,.0f}")
    return table


def _training_table(title: str, rows: list[dict[str, Any]]) -> Table:
    headings = ("training", "ktok/s", "ms/step", "6N", "attn", "scan", "MFU", "peak MiB")
    table = _table(f"{title}\n6N, attention and scan in TFLOP/s", *headings)
    for row in rows:
        table.add_row(
            f"{row['model']} {row['capacity']}",
            f"{row['ktok_per_s']:,.1f}",
            f"{row['ms_per_step']:,.1f}",
            *(_short(row[k]) for k in ("tflops_6n", "tflops_attention", "tflops_scan")),
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_mib']:,.0f}",
        )
    return table


def _prefill_table(title: str, rows: list[dict[str, Any]]) -> Table:
    headings = ("prefill", "prompts", "ktok/s", "ms", "first token ms", "MFU", "peak MiB", "state MiB")
    table = _table(f"{title}\nstate: of one sequence, after the prompt", *headings)
    for row in rows:
        table.add_row(
            f"{row['model']} {row['capacity']}",
            f"{row['batch']} x {row['length']:,}",
            f"{row['ktok_per_s']:,.1f}",
            f"{row['median_ms']:,.1f}",
            f"{row['first_token_ms']:,.1f}",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            f"{row['peak_mib']:,.0f}",
            f"{row['state_mib']:,.1f}",
        )
    return table


def _engine_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("through a warm engine", "prompts", "first token ms", "of that, adding", "then tokens/s")
    for row in rows:
        table.add_row(
            f"{row['capacity']} {row['batch']} x {row['length']:,}",
            f"{row['engine_first_token_ms']:,.1f}",
            f"{row['engine_add_ms']:,.1f}",
            f"{row['generate_tokens_per_second']:,.0f}",
        )
    return table


def _decode_case(row: dict[str, Any]) -> str:
    return f"{row['capacity']} {row['weights']} {row['batch']}x{row['context']}"


def _decode_table(title: str, rows: list[dict[str, Any]]) -> Table:
    headings = ("decode, ms", "graph", "tokens/s", "floor", "share", "eager", "kernels")
    table = _table(title, *headings)
    for row in rows:
        table.add_row(
            _decode_case(row),
            _optional(row["graph_ms"], ".3f"),
            f"{row['tokens_per_second']:,.0f}",
            _optional(row["floor_ms"], ".3f"),
            _optional(row["floor_share"], ".1%"),
            f"{row['eager_ms']:,.3f}",
            _optional(row["kernels"], "d"),
        )
    return table


def _decode_memory_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("MiB", "memory", "weights", "states", "keys, values", "buffers", "peak")
    for row in rows:
        parts = ("weights_mib", "spectral_mib", "keys_values_mib", "buffers_mib", "peak_mib")
        table.add_row(_decode_case(row), *(f"{row[part]:,.1f}" for part in parts))
    return table


def _decode_control_table(rows: list[dict[str, Any]]) -> Table:
    headings = ("LanguageModel.step", "ms", "in a graph", "fused is faster", "logits differ")
    table = _table("the same model through PyTorch", *headings)
    for row in rows:
        graph = row["control_graph_ms"]
        fastest = row["control_ms"] if graph is None else min(graph, row["control_ms"])
        table.add_row(
            _decode_case(row),
            f"{row['control_ms']:,.3f}",
            _optional(graph, ",.3f"),
            f"{fastest / row['median_ms']:.2f} x",
            f"{row['logits_difference']:.1e}",
        )
    return table


def _drift_table(title: str, rows: list[dict[str, Any]]) -> Table:
    headings = ("drift", "error", "highest", "noise", "growth", "slope")
    table = _table(title, *headings)
    for row in rows:
        for line, verdict in row["verdicts"].items():
            table.add_row(
                f"{row['capacity']} x{row['batch']} {line}",
                f"{verdict['error']:.2e}",
                f"{verdict['highest']:.2e}",
                _optional(verdict["over_noise"], ".2f"),
                f"{verdict['growth']:.3f}",
                f"{verdict['slope']:+.3f} ± {verdict['slope_deviation']:.3f}",
            )
    return table


def _drift_verdict(rows: list[dict[str, Any]]) -> str:
    """What of the steps drifts, and what is further off than it may be."""
    found = [
        f"{row['capacity']} x{row['batch']} {line} {what}"
        for row in rows
        for line, verdict in row["verdicts"].items()
        if line != FORWARD
        for wrong, what in ((verdict["drifts"], "drift"), (verdict["near"] is False, "are too far off"))
        if wrong
    ]
    return "; ".join(found) or f"no drift: no error grows by more than {MOST_GROWTH - 1:.0%}, none is too far off"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _data_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("data, per second of processor time unless told", "what", "ms", "M/s", "unit", "bytes each")
    for row in rows:
        held = "" if row["bytes_each"] is None else f"{row['bytes_each']:.1f}"
        table.add_row(row["what"], f"{1e3 * row['seconds']:,.2f}", f"{row['per_second'] / 1e6:,.1f}", row["unit"], held)
    return table


def _short(value: float) -> str:
    if 0 < value < 0.01:
        return "<0.01"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _parts_table(row: dict[str, Any]) -> Table:
    table = _table(f"{row['model']}, a step of {row['ms_per_step']:,.1f} ms", "part, alone", "ms", "share")
    for part in row["parts"]:
        table.add_row(part["part"], f"{part['ms']:,.1f}", f"{part['share']:.1%}")
    return table


if __name__ == "__main__":
    run_command(main)
