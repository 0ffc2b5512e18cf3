"""The command `tools/benchmark.py scaling`: its options, and the table of what it found."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_essh.benchmarks.scaling import ScalingLayout, Settings, deepspeed_installed, layouts, measure_scaling
from megatron_essh.config import RunConfig, load_config
from megatron_essh.config.command_line import ConfigParser, add_config_arguments
from megatron_essh.device import device_name, pick_device
from megatron_essh.errors import UserError
from megatron_essh.files import write_atomically
from megatron_essh.parallel.rates import Rates, known_gpus, load_rates

DESCRIPTION = """\
Training on every layout of this machine's GPUs that fits, within a time budget: speed and memory beside what
tools/plan_run.py predicts, the share of communication, losses against one GPU's, checkpoints, a resume on another
layout. It starts all processes itself. docs/parallelism.md says what each figure means.

    python tools/benchmark.py scaling configs/models/1p5b.yaml configs/models/370m.yaml --json scaling.json
    python tools/benchmark.py scaling configs/runs/quickstart.yaml --processes 4        on a CPU, to try it
"""
LEAST_BUDGET = 30
"""Seconds in which one layout of a tiny model can be done."""
WIDTH = 150
"""Columns of the table, where the output is no terminal that says how many it has."""


def main(words: Sequence[str]) -> int:
    """Run `tools/benchmark.py scaling`; 1 where a layout's losses are not one GPU's, or a row failed."""
    begin = time.monotonic()
    args = _parser().parse_intermixed_args(words)
    configs = _configs(args.configs, args.overrides)
    devices = {pick_device(c.training.device, "training.device:") for c in configs.values()}
    if len(devices) > 1:
        raise UserError("training.device: the configs want different devices; --set training.device=cuda")
    device = devices.pop()
    gpus = _processes(args.processes, device)
    for name, least in (("accumulation", 1), ("micro_batch", 1), ("steps", 1), ("budget", LEAST_BUDGET)):
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: at least {least}")
    for option, folder in (("--json", args.json and args.json.parent), ("--scratch", args.scratch)):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{option} {getattr(args, option[2:])}: there is no folder {folder}; make it first")
    wanted = layouts(gpus, args.layout, deepspeed=deepspeed_installed())
    rates = _rates(args.gpu, device)
    settings = Settings(
        gpus=gpus,
        layouts=wanted,
        budget=args.budget,
        micro_batch=args.micro_batch,
        accumulation=args.accumulation,
        compared=3,
        timed=args.steps,
        resumed=2,
        rates=rates,
        scratch=args.scratch,
    )
    where = f"{gpus} x {device_name(device)}, torch {torch.__version__}"
    written = {"configs": [str(c) for c in args.configs], "set": args.overrides, "where": where, "budget": args.budget}
    written |= {"accumulation": args.accumulation, "steps": args.steps, "rates": None if rates is None else rates.gpu}

    def keep(content: dict[str, Any]) -> None:
        if args.json:
            write_atomically(args.json, json.dumps({**written, **content}, indent=1).encode())

    _announce(where, wanted, rates, args)
    scaling = measure_scaling(configs, settings, say=partial(print, flush=True), keep=keep, begin=begin)
    rows = list(scaling.rows.values())
    checks = {(c["config"], c["layout"]): c for c in scaling.checks}
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(_table(f"scaling on {where}", rows, checks))
    dropped, failed = scaling.dropped(), [r for r in rows if r["status"] == "failed"]
    if dropped:
        print(f"no time within --budget {args.budget:g}, the least important left out: {'; '.join(dropped)}")
    for row in failed:
        print(f"failed: {row['config']} {row['layout']} {row['capacity']}: {row['reason']}")
    unequal = scaling.unequal()
    for what in unequal:
        print(f"NOT the same as on the other layout: {what}")
    seconds = time.monotonic() - begin
    keep({**scaling.content(), "dropped": dropped, "unequal": unequal, "seconds": seconds})
    print(f"{seconds:.0f} s" + (f"; figures: {args.json}" if args.json else ""))
    return 1 if failed or unequal else 0


def _parser() -> ConfigParser:
    parser = ConfigParser(
        prog="benchmark.py scaling", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_config_arguments(parser, several=True)
    parser.add_argument("--processes", type=int, metavar="N", help="GPUs (default: all); on a CPU, processes (2)")
    parser.add_argument(
        "--layout", action="append", metavar="NAME", help="dp, tp2, tp4, tpN, zero1 to zero3; may be repeated"
    )
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="for all of it (default: 540)")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences a forward pass (default: the config's)")
    parser.add_argument(
        "--accumulation", type=int, default=4, metavar="N", help="micro-batches a step of each of N replicas (4)"
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each row (default: 4)")
    parser.add_argument(
        "--gpu", metavar="KIND", help=f"whose rates predict: {', '.join(known_gpus())} (default: what this machine has)"
    )
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="for checkpoints, which are removed again")
    parser.add_argument("--json", type=Path, help="write all figures here, anew after every row")
    return parser


def _configs(paths: Sequence[Path], overrides: list[str]) -> dict[str, RunConfig]:
    found: dict[str, RunConfig] = {}
    for path in paths:
        if path.stem in found:
            raise UserError(f"{path}: a config called {path.stem} is given already")
        found[path.stem] = load_config(path, overrides)
    return found


def _processes(given: int | None, device: torch.device) -> int:
    """GPUs, or on a CPU processes."""
    if device.type == "cpu":
        count = 2 if given is None else given
    else:
        present = torch.cuda.device_count()
        count = present if given is None else given
        if count > present:
            raise UserError(f"--processes {count}: this machine has {present} CUDA devices")
    if count < 2:
        what = "CUDA device is here" if given is None else "process"
        raise UserError(f"--processes {count}: {count} {what}, and scaling needs 2 or more")
    return count


def _rates(given: str | None, device: torch.device) -> Rates | None:
    """Those of the kind that was named, else of the kind that the device's name says."""
    if given is not None:
        return load_rates(given)
    name = device_name(device).lower()
    kind = next((kind for kind in known_gpus() if kind in name), None)
    return None if kind is None else load_rates(kind)


def _announce(where: str, wanted: Sequence[ScalingLayout], rates: Rates | None, args: argparse.Namespace) -> None:
    names = ", ".join(layout.label for layout in wanted)
    print(f"{where}: one, {names}; at most {args.budget:g} s", flush=True)
    if not deepspeed_installed():
        print("without ZeRO: DeepSpeed is not installed", flush=True)
    if rates is None:
        print("no predictions: this device has no rates; --gpu KIND takes another's", flush=True)


def _table(title: str, rows: Sequence[dict[str, Any]], checks: dict[tuple[str, str], dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("config", "layout", "slots")
    right = (
        "ktok/s/GPU",
        "of one",
        "planned",
        "ratio",
        "MiB",
        "ratio",
        "NCCL",
        "busiest",
        "losses",
        "save s",
        "load s",
    )
    for heading in (*left, *right):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for row in rows:
        names = row["config"], row["layout"], row["capacity"]
        if row["status"] != "measured":
            table.add_row(*names, row["status"])
            continue
        planned = row["predicted"]["ktok_per_s"]
        talk = row["communication"] or {}
        check = checks[row["config"], row["layout"]] if row["capacity"] == "mix" else {}
        saved = check.get("checkpoint", {})
        table.add_row(
            *names,
            f"{row['ktok_per_s_per_gpu']:,.2f}",
            _form(row["over_one_gpu"], ".2f"),
            _form(None if planned is None else planned / row["gpus"], ",.2f"),
            _form(row["over_predicted"], ".3f"),
            f"{row['peak_mib']:,.0f}",
            _form(row["peak_over_predicted"], ".2f"),
            _form(talk.get("share"), ".1%"),
            _form(row["imbalance"], ".3f"),
            _form(check.get("verified", {}).get("loss_difference"), ".0e"),
            _form(saved.get("save_s"), ".1f"),
            _form(saved.get("load_s"), ".1f"),
        )
    return table


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
