"""What a run needs on a given machine, and how fast it should be, before anything is started. No GPU is needed.

    python tools/plan_run.py plan CONFIG --gpu h200 --nodes 2 --gpus-per-node 8 --tp 1
                                  memory of a GPU by part, what a step exchanges, predicted step time
    python tools/plan_run.py scale CONFIG --gpu h200       the same layout on 1 to 1024 GPUs
    python tools/plan_run.py imbalance CONFIG              what waiting for the slowest replica costs
    python tools/plan_run.py rates --gpu b300              the rates that predictions rest on, and where they are from

Micro-batch, recomputation and the rest are the config's; --micro-batch, --global-batch, --recompute, --precision and
--set lay others over it. A layout that does not fit is an error that names those that would. --json prints JSON.
docs/parallelism.md says how figures are made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_essh.config import RunConfig, load_config
from megatron_essh.config.command_line import ConfigParser, add_config_arguments
from megatron_essh.errors import UserError, run_command
from megatron_essh.parallel.imbalance import Imbalance, simulate
from megatron_essh.parallel.planning import GIB, Layout, Memory, check_layout, check_memory, memory
from megatron_essh.parallel.prediction import Prediction, exchanges, predict, scale_out
from megatron_essh.parallel.rates import Rates, known_gpus, load_rates

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs/models/370m.yaml"
SCALE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RANKS = (8, 64, 512)
SLOTS_PER_RANK = (1, 2, 4, 8, 16)
SLOTS_SIMULATED = 8_192
"""Slots that each line of the imbalance table deals out, at least two steps of them."""


def main() -> None:
    args = _parser().parse_intermixed_args()
    rates = load_rates(args.gpu)
    config = _config(args)
    console = Console(highlight=False)
    if args.what == "rates":
        _print(args.json, _rates_json(rates), lambda: console.print(_rates_table(rates)))
    elif args.what == "imbalance":
        rows = [
            simulate(config, dp, slots, max(2, SLOTS_SIMULATED // (dp * slots)))
            for dp in args.gpus or RANKS
            for slots in SLOTS_PER_RANK
        ]
        _print(args.json, [asdict(row) for row in rows], lambda: console.print(_imbalance_table(args.config, rows)))
    elif args.what == "scale":
        rows_of = scale_out(config, _layout(args, config), rates, args.gpus or SCALE)
        content = [{**_prediction_json(p), "memory_bytes": m.total} for p, m in rows_of]
        _print(args.json, content, lambda: _show_scale(console, args.config, rates, rows_of))
    else:
        _plan(args, config, rates, console)


def _parser() -> ConfigParser:
    parser = ConfigParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("plan", "scale", "imbalance", "rates"), default="plan")
    add_config_arguments(parser, DEFAULT_CONFIG)
    parser.add_argument("--gpu", default="h200", metavar="KIND", help=f"{', '.join(known_gpus())} (default: h200)")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of each (default: 8)")
    parser.add_argument("--tp", type=int, metavar="N", help="GPUs that share a replica (default: parallel.tensor)")
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="norms and the residual stream dealt out too (default: parallel.sequence_parallel)",
    )
    parser.add_argument(
        "--zero-stage", type=int, default=0, choices=range(4), metavar="N", help="0: native engine; 1 to 3: DeepSpeed"
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences a forward pass")
    parser.add_argument("--global-batch", type=int, metavar="N", help="sequences a step")
    parser.add_argument("--recompute", choices=("none", "selective", "block"))
    parser.add_argument("--precision", choices=("bf16", "fp32"))
    parser.add_argument("--gpus", type=_counts, metavar="N,N,..", help="scale: numbers of GPUs; imbalance: of replicas")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 8,64,512")
    return [int(word) for word in words]


def _config(args: argparse.Namespace) -> RunConfig:
    config = load_config(args.config, args.overrides)
    given = {name: getattr(args, name) for name in ("micro_batch", "global_batch", "recompute", "precision")}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return replace(config, training=replace(config.training, **given))
    except ValueError as error:
        raise UserError(f"{args.config}: {error}") from None


def _layout(args: argparse.Namespace, config: RunConfig) -> Layout:
    tp = config.parallel.tensor if args.tp is None else args.tp
    shared = config.parallel.sequence_parallel if args.sequence_parallel is None else args.sequence_parallel
    return Layout(
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        tp=tp,
        sequence_parallel=shared,
        zero_stage=args.zero_stage,
    )


def _print(as_json: bool, content: Any, show: Any) -> None:
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        show()


def _plan(args: argparse.Namespace, config: RunConfig, rates: Rates, console: Console) -> None:
    layout = _layout(args, config)
    check_layout(config, layout)
    needed = memory(config, layout)
    predicted = predict(config, layout, rates) if config.training.precision == "bf16" else None
    available = rates["device_memory"]
    content = {
        "config": str(args.config),
        "gpu": args.gpu,
        "layout": {**asdict(layout), "dp": layout.dp, "gpus": layout.gpus},
        "memory": {**asdict(needed), "tensors": needed.tensors, "total": needed.total, "available": available},
        "fits": needed.total <= available,
        "exchanges": [
            {**asdict(e), "sent_bytes": e.sent(layout.tp if e.between == "tp" else layout.dp)}
            for e in exchanges(config, layout)
        ],
        "prediction": _prediction_json(predicted) if predicted else None,
        "rates": _rates_json(rates),
    }
    _print(args.json, content, lambda: _show_plan(console, args.config, config, layout, rates, needed, predicted))
    check_memory(config, layout, available, rates.name)


def _show_plan(
    console: Console,
    title: Path,
    config: RunConfig,
    layout: Layout,
    rates: Rates,
    needed: Memory,
    predicted: Prediction | None,
) -> None:
    training = config.training
    console.print(
        f"[bold]{title.name}[/bold] on {layout.nodes} x {layout.gpus_per_node} {rates.name}: tp {layout.tp}"
        f"{' with sequence parallelism' if layout.sequence_parallel else ''}, dp {layout.dp}, "
        f"{f'ZeRO {layout.zero_stage}' if layout.zero_stage else 'native engine'}; {training.global_batch} sequences a "
        f"step in micro-batches of {training.micro_batch}, recompute {training.recompute}, {training.precision}",
        "",
    )
    console.print(_memory_table(needed, rates["device_memory"]), "")
    if rows := exchanges(config, layout):
        table = _table("exchanged in a step, by a GPU", "ranks", "calls", "MB each", "GB sent", "beside")
        for column in (table.columns[0], table.columns[-1]):
            column.justify, column.no_wrap = "left", False
        for e in rows:
            ranks = layout.tp if e.between == "tp" else layout.dp
            each, sent = f"{e.bytes_each / 1e6:,.2f}", f"{e.sent(ranks) / 1e9:,.2f}"
            table.add_row(e.kind, f"{e.between} {ranks}", f"{e.calls:,}", each, sent, e.beside)
        console.print(table, "")
    if predicted is None:
        console.print("No prediction: there are rates of bf16 training only.")
        return
    console.print(_time_table(predicted), "")
    kind = "measured" if rates.measured else "scaled from H200's by data sheets, not measured"
    console.print(f"Rates: {kind}; the network's is a data sheet's. `plan_run.py rates --gpu {rates.gpu}` lists them.")
    if layout.zero_stage:
        console.print(
            "ZeRO's passes are taken to be as fast as the native engine's recorded ones; they are not recorded."
        )


def _memory_table(needed: Memory, available: float) -> Table:
    table = _table("memory of a GPU", "GiB")
    groups = (
        ("states", needed.states),
        ("activations", needed.activations),
        ("beside them, at most", needed.transient),
    )
    for name, parts in groups:
        table.add_row(f"[bold]{name}[/bold]", f"[bold]{sum(parts.values()) / GIB:.2f}[/bold]")
        for part, size in parts.items():
            if size >= 0.005 * GIB:
                table.add_row(f"  {part}", f"{size / GIB:.2f}")
    table.add_row("[bold]all tensors[/bold]", f"[bold]{needed.tensors / GIB:.2f}[/bold]")
    table.add_row("held by CUDA graphs beside another pass", f"{needed.graphs / GIB:.2f}")
    table.add_row("context, kernels, NCCL (allowance)", f"{needed.outside / GIB:.2f}")
    table.add_row("[bold]total[/bold]", f"[bold]{needed.total / GIB:.2f}[/bold]")
    table.add_row("the device has", f"{available / GIB:.2f}")
    return table


def _time_table(p: Prediction) -> Table:
    table = _table("predicted", "full capacity", "elastic mix")
    for name, seconds in (
        (f"{p.micro_batches} micro-batches", p.compute),
        ("waiting for tensor-parallel ranks", p.tp_waiting),
        ("waiting for replicas", p.dp_waiting),
        ("optimizer", p.optimizer),
    ):
        table.add_row(f"{name}, ms", f"{seconds * 1e3:,.1f}", "")
    mix = p.mix
    table.add_row("step, ms", f"{p.step * 1e3:,.1f}", f"{mix.step * 1e3:,.1f}" if mix else "-")
    table.add_row("ktok/s", f"{p.tokens_per_second / 1e3:,.1f}", f"{mix.tokens_per_second / 1e3:,.1f}" if mix else "-")
    table.add_row("efficiency against one GPU", f"{p.efficiency:.1%}", "")
    table.add_row("slowest replica over the mean", "", f"{mix.imbalance:+.1%}" if mix else "-")
    return table


def _show_scale(console: Console, title: Path, rates: Rates, rows: list[tuple[Prediction, Memory]]) -> None:
    kind = "measured rates" if rates.measured else "rates scaled from H200's, not measured"
    table = _table("GPUs", "dp", "tp", "batch", "step ms", "ktok/s", "efficiency", "mix ktok/s", "imbalance", "GiB")
    for p, needed in rows:
        table.add_row(
            f"{p.layout.gpus}",
            f"{p.layout.dp}",
            f"{p.layout.tp}",
            f"{p.global_batch}",
            f"{p.step * 1e3:,.1f}",
            f"{p.tokens_per_second / 1e3:,.0f}",
            f"{p.efficiency:.1%}",
            f"{p.mix.tokens_per_second / 1e3:,.0f}" if p.mix else "-",
            f"{p.mix.imbalance:.1%}" if p.mix else "-",
            f"{needed.total / GIB:.1f}{'' if needed.total <= rates['device_memory'] else ' (too much)'}",
        )
    console.print(f"[bold]{title.name}[/bold] on {rates.name}, predicted from {kind}", table)


def _imbalance_table(title: Path, rows: list[Imbalance]) -> Table:
    table = _table(f"{title.name}: replicas", "slots each", "steps", "balanced", "worst step", "in turn")
    for r in rows:
        shares = (f"{x:.1%}" for x in (r.balanced, r.balanced_worst, r.naive))
        table.add_row(f"{r.dp}", f"{r.slots_per_rank}", f"{r.steps}", *shares)
    return table


def _rates_table(rates: Rates) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (f"{rates.name}", "value", "unit", "source"):
        table.add_column(heading)
    for name, figure in rates.figures.items():
        table.add_row(name, f"{figure.value:.4g}", figure.unit, figure.source)
    return table


def _rates_json(rates: Rates) -> dict[str, Any]:
    return {
        "gpu": rates.gpu,
        "name": rates.name,
        "measured": rates.measured,
        "figures": {n: asdict(f) for n, f in rates.figures.items()},
    }


def _prediction_json(p: Prediction) -> dict[str, Any]:
    return {**asdict(p), "gpus": p.layout.gpus}


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    run_command(main)
