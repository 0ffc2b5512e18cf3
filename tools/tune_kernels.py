"""Launch options for this machine's GPU: tries them, holds each to its operator's reference, writes the best.

    python tools/tune_kernels.py configs/models/370m.yaml --dry-run        what would be tried; needs no GPU
    python tools/tune_kernels.py configs/models/370m.yaml --output my.json
    ESSH_TUNED=my.json python launch/pretrain.py ...                       the options in use

Several configs give a table that serves all of them. Nothing is written if anything of it cannot be measured.
docs/kernels.md, "Launch options", says what a table is and what is tried.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table as Printed

from megatron_essh.benchmarks.training import with_batches
from megatron_essh.benchmarks.tuning import (
    HARNESSES,
    Judge,
    Outcome,
    Work,
    candidates,
    chosen_together,
    import_kernels,
    profiled_clock,
    tune_kernel,
    whole_times,
)
from megatron_essh.config import load_config
from megatron_essh.config.command_line import ConfigParser
from megatron_essh.errors import UserError, run_command
from megatron_essh.ops.tuning import (
    SHIPPED,
    USER_TABLE,
    Kernel,
    Table,
    check_operator,
    class_key,
    declared,
    options,
    read_table,
    table_name,
    write_table,
)

Job = tuple[Work, list[Kernel]]


def main() -> None:
    args = _parser().parse_args()
    for name, least in (("micro_batch", 1), ("most", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}")
    jobs = _jobs(args)
    if args.dry_run:
        _print_plan(jobs, args.most)
        return
    if not torch.cuda.is_available():
        raise UserError("there is no GPU here to time kernels on; --dry-run shows what would be tried")
    if args.output is None:
        raise UserError("--output FILE: say where the table is to go, or give --dry-run")
    if args.output.exists() and not args.force:
        raise UserError(f"--output {args.output} exists; name another file, or give --force to replace it")
    device = torch.device("cuda", torch.cuda.current_device())
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    print(f"{name}, torch {torch.__version__}, triton {_triton_version()}", flush=True)
    outcomes = [outcome for job in jobs for outcome in _tune(*job, device, args.most)]
    _print_outcomes(outcomes)
    made = {
        "torch": torch.__version__,
        "triton": _triton_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }
    tuned = sorted({o.kernel for o in outcomes})
    kernels = {kernel: tuple(o.entry for o in outcomes if o.kernel == kernel) for kernel in tuned}
    write_table(args.output, Table(name, capability, made, kernels), force=args.force)
    written = read_table(args.output)
    for operator in sorted({kernel.partition(".")[0] for kernel in kernels}):
        check_operator(args.output, written, operator)
    print(f"table: {args.output}")
    shipped = SHIPPED / f"{table_name(name, capability)}.json"
    print(f"to use it: {USER_TABLE}={args.output}, or, for all devices of the kind, in place of {shipped}")


def _parser() -> ConfigParser:
    parser = ConfigParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", type=Path, nargs="+", help="YAML config files of the models")
    parser.add_argument("--set", dest="overrides", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--kernel",
        dest="kernels",
        action="append",
        default=[],
        metavar="NAME",
        help="only this operator or <operator>.<kernel>; may be repeated",
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences a pass timed (default: the config's)")
    parser.add_argument("--most", type=int, default=32, metavar="N", help="candidates of a kernel and class (32)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the table goes")
    parser.add_argument("--force", action="store_true", help="replace FILE")
    parser.add_argument("--dry-run", action="store_true", help="print what would be tried, and stop")
    return parser


def _jobs(args: argparse.Namespace) -> list[Job]:
    """Each operator's work at each set of sizes that the models have, and the kernels of it to tune."""
    import_kernels(list(HARNESSES))
    wanted = args.kernels
    for name in wanted:
        if not any(name in (kernel, kernel.partition(".")[0]) for kernel in declared()):
            raise UserError(f"--kernel {name}: no such kernel; there are {', '.join(sorted(declared()))}")
    jobs: list[Job] = []
    seen: set[object] = set()
    for path in args.config:
        config = with_batches(load_config(path, args.overrides), args.micro_batch, None)
        for work in (work for harness in HARNESSES.values() for work in harness(config)):
            kernels = []
            for kernel in work.kernels():
                key = kernel.name, class_key(work.shape_class(kernel))
                if key not in seen and (not wanted or {kernel.name, work.operator} & set(wanted)):
                    seen.add(key)
                    kernels.append(kernel)
            if kernels:
                jobs.append((work, kernels))
    if not jobs:
        raise UserError(f"no kernel of {', '.join(HARNESSES)} declares launch options")
    return jobs


def _tune(work: Work, kernels: Sequence[Kernel], device: torch.device, most: int) -> list[Outcome]:
    judge = Judge(work, device)
    say = partial(print, flush=True)
    outcomes = [tune_kernel(work, k, judge, device, profiled_clock, most=most, say=say) for k in kernels]
    problem = chosen_together(work, judge, outcomes, lambda choices: whole_times(work, device, choices))
    if problem is not None:
        print(f"{work.operator} {work.sizes}: the present options stay: {problem}", flush=True)
        outcomes = [replace(o, best=o.current, best_us=o.current_us) for o in outcomes]
    return outcomes


def _print_plan(jobs: Sequence[Job], most: int) -> None:
    """Candidates for a device that may pipeline; from compute capability 10 on, those with num_stages 1 remain."""
    table = _table("what would be tried", "kernel", "class", "defaults", "candidates")
    for work, kernels in jobs:
        for kernel in kernels:
            shape_class = work.shape_class(kernel)
            current = options(kernel.name, torch.device("cpu"), **shape_class)
            tried, left_out = candidates(kernel, current, None, most)
            count = f"{len(tried)} of {len(tried) + left_out}"
            table.add_row(kernel.name, _words(shape_class), _words(current), count)
    _print(table)


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    table = _table("microseconds a pass", "kernel", "class", "present", "best", "options", "tried", "rejected")
    for o in outcomes:
        chosen = _words(o.best) if o.best != o.current else "as present"
        times = (f"{o.current_us:,.1f}", f"{o.best_us:,.1f}")
        table.add_row(o.kernel, _words(o.shape_class), *times, chosen, str(o.tried), str(len(o.rejected)))
    _print(table)
    for o in outcomes:
        for options_tried, reason in o.rejected:
            print(f"rejected: {o.kernel} {_words(o.shape_class)}: {_words(options_tried)}: {reason}")


def _table(title: str, *headings: str) -> Printed:
    table = Printed(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=place == 0)
    return table


def _print(table: Printed) -> None:
    console = Console()
    console.width = max(100, console.width)  # below that, options are broken inside a word
    console.print(table)


def _words(values: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    run_command(main)
