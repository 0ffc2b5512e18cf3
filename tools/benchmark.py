"""Speed and memory of training and of the mixer's scan, on this machine.

    python tools/benchmark.py                      both, on the quickstart's model
    python tools/benchmark.py train CONFIG         optimizer steps: full capacity, then the elastic mix
    python tools/benchmark.py scan CONFIG          the selective scan of one layer, forward and backward

Random weights and tokens. Every figure is the median of --repeats timings after --warmup untimed ones; --json FILE
keeps all of them beside the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_essh.config import RunConfig, load_config
from megatron_essh.config.command_line import ConfigParser, add_config_arguments
from megatron_essh.elastic.plan import trains_full_only
from megatron_essh.errors import UserError, run_command
from megatron_essh.files import write_atomically
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.ops.selective_scan import ModalTables, selective_scan
from megatron_essh.training.engine import NativeEngine

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs/runs/quickstart.yaml"


def main() -> None:
    parser = ConfigParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "train", "scan"), default="all")
    add_config_arguments(parser, DEFAULT_CONFIG)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if args.repeats < 1 or args.warmup < 0:
        raise UserError(
            f"--repeats {args.repeats}, --warmup {args.warmup}: at least one repeat and no negative warm-up"
        )

    config = load_config(args.config, args.overrides)
    device = _device(config)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    rows: list[dict[str, Any]] = []
    if args.what in ("all", "scan"):
        rows += measure_scan(config, device, args.warmup, args.repeats)
    if args.what in ("all", "train"):
        rows += measure_training(config, device, args.warmup, args.repeats)

    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    where = f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    table = Table(title=f"{args.config.name} on {where}", title_justify="left")
    for heading in ("what", "median ms", "least", "most", "tokens/s", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        table.add_row(
            row["what"], *(f"{row[k]:.2f}" for k in ("median_ms", "min_ms", "max_ms")),
            f"{row['tokens_per_second']:,.0f}", f"{row['peak_mib']:,.0f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        content = {"config": str(args.config), "set": args.overrides, "where": where, "rows": rows}
        write_atomically(args.json, json.dumps(content, indent=1).encode())
        print(f"figures: {args.json}")


def measure_scan(config: RunConfig, device: torch.device, warmup: int, repeats: int) -> list[dict[str, Any]]:
    """One layer's selective scan on a micro-batch, from random projections and the real bank."""
    model = config.model
    mixer = SpectralMixer(model)
    mixer.reset_parameters(None)
    tables = ModalTables(*(table.detach().to(device).requires_grad_() for table in mixer.tables(model.channels)))
    batch, length = config.training.micro_batch, config.data.sequence_length
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    shape = (batch, length, model.channels, model.value_width + 3 * model.modes)
    raw = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], model.value_width, device=device, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            selective_scan(raw, tables)

    def forward_backward() -> None:
        z, _ = selective_scan(raw, tables)
        torch.autograd.grad(z, [raw, *tables], grad)

    tokens = batch * length
    return [
        timed("scan, forward", forward, tokens, device, warmup, repeats),
        timed("scan, forward + backward", forward_backward, tokens, device, warmup, repeats),
    ]


def measure_training(config: RunConfig, device: torch.device, warmup: int, repeats: int) -> list[dict[str, Any]]:
    """Whole optimizer steps: at full capacity, and with the elastic plan as it is after the warm-up."""
    rows = []
    first = next((s for s in range(config.training.steps) if not trains_full_only(config, s)), None)
    for what, start in (("step, full capacity", 0), ("step, elastic mix", first)):
        if start is None:
            continue
        enabled = replace(config.elastic, enabled=what != "step, full capacity")
        engine = NativeEngine(LanguageModel(config.model), replace(config, elastic=enabled), "pretrain", device, eod=0)
        shape = (config.training.global_batch, config.data.sequence_length + 1)
        step = iter(range(start, start + warmup + repeats))

        def train(engine: NativeEngine = engine, shape: tuple[int, int] = shape, step: Any = step) -> None:
            engine.train_step(next(step), torch.randint(0, config.model.vocab_size, shape))

        rows.append(timed(what, train, shape[0] * (shape[1] - 1), device, warmup, repeats))
    return rows


def timed(
    what: str, call: Callable[[], None], tokens: int, device: torch.device, warmup: int, repeats: int
) -> dict[str, Any]:
    """Run `call` and describe its timings; peak memory is the device's, or the whole process's on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for repeat in range(warmup + repeats):
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        if repeat >= warmup:
            times.append(1e3 * (time.perf_counter() - begin))
    median = statistics.median(times)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "what": what,
        "median_ms": median,
        "min_ms": min(times),
        "max_ms": max(times),
        "all_ms": times,
        "tokens_per_second": 1e3 * tokens / median,
        "peak_mib": peak,
    }


def _device(config: RunConfig) -> torch.device:
    name = config.training.device
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device: cuda, but no CUDA device is there; use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run_command(main)
