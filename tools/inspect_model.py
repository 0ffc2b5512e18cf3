"""What a model costs at every tier, without building it.

python tools/inspect_model.py configs/models/370m.yaml
python tools/inspect_model.py configs/models/370m.yaml --set model.channels=64 --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_essh.config import RunConfig, load_config
from megatron_essh.config.command_line import ConfigParser, add_config_arguments
from megatron_essh.elastic.capacity import Capacity, full_capacity, tier_capacities
from megatron_essh.errors import run_command
from megatron_essh.model.accounting import (
    TokenFlops,
    flops_per_token,
    parameter_counts,
    state_bytes,
    window_kv_bytes,
)


def main() -> None:
    parser = ConfigParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    args = parser.parse_args()
    costs = model_costs(load_config(args.config, args.overrides))
    if args.json:
        print(json.dumps(costs, indent=2))
    else:
        print_costs(args.config, costs)


def model_costs(config: RunConfig) -> dict[str, Any]:
    """Costs of the full model and of every tier that it holds, as plain JSON values.

    Attention FLOPs, and the key-value cache of a model without a window, are those of a sequence of
    `data.sequence_length` tokens.
    """
    model, length = config.model, config.data.sequence_length
    parts = parameter_counts(model)
    tiers = tier_capacities(model, config.elastic)

    def tier(capacity: Capacity) -> dict[str, Any]:
        counts = parameter_counts(model, capacity)
        return {
            "channels": capacity.channels,
            "ff_width": capacity.ff_width,
            "parameters": counts.total,
            "parts": asdict(counts),
            "share": counts.total / parts.total,
            "state_bytes": state_bytes(model, capacity),
            "window_kv_bytes": window_kv_bytes(model, length),
            "flops_per_token": _flops(flops_per_token(model, capacity, sequence_length=length)),
        }

    full = full_capacity(model)
    return {
        "parameters": parts.total,
        "parts": asdict(parts),
        "channels": full.channels,
        "ff_width": full.ff_width,
        "tiers": {name: tier(capacity) for name, capacity in tiers.items() if capacity.fits(model)},
        "tiers_beyond_this_model": [name for name, capacity in tiers.items() if not capacity.fits(model)],
        "state_bytes": state_bytes(model),
        "window_kv_bytes": window_kv_bytes(model, length),
        "flops_per_token": _flops(flops_per_token(model, sequence_length=length)),
        "sequence_length": length,
    }


def _flops(flops: TokenFlops) -> dict[str, int]:
    return {**asdict(flops), "forward": flops.forward, "training": flops.training}


def print_costs(title: str, costs: dict[str, Any]) -> None:
    """The same as two tables: the full model by part, and its tiers."""
    console = Console(highlight=False)
    total = costs["parameters"]
    console.print(f"[bold]{title}[/bold]: {total:,} parameters")
    parts = _table("part", "parameters", "of full")
    for name, count in costs["parts"].items():
        parts.add_row(name.replace("_", "-"), f"{count:,}", f"{count / total:.1%}")
    console.print(parts, "")

    tiers = _table("tier", "K", "n", "parameters", "of full", "state", "window KV", "forward", "training")
    rows = dict(costs["tiers"])
    if all(row["parameters"] != total for row in rows.values()):
        rows["full"] = {**costs, "share": 1.0}
    for name, row in rows.items():
        tiers.add_row(
            name,
            str(row["channels"]),
            str(row["ff_width"]),
            f"{row['parameters']:,}",
            f"{row['share']:.1%}",
            _si(row["state_bytes"], "B"),
            _si(row["window_kv_bytes"], "B"),
            _si(row["flops_per_token"]["forward"]),
            _si(row["flops_per_token"]["training"]),
        )
    console.print(tiers, "")

    if beyond := costs["tiers_beyond_this_model"]:
        console.print(f"Not within this model, which is cut from a larger one: {', '.join(beyond)}.")
    flops = costs["flops_per_token"]
    console.print(
        "State (fp32) and window cache (bf16): bytes a sequence. Forward and training: FLOPs a token, "
        f"in sequences of {costs['sequence_length']:,} tokens. The full model's forward pass: "
        + ", ".join(f"{part} {_si(flops[part])}" for part in ("projections", "head", "scan", "attention"))
        + "."
    )


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table


def _si(count: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 1089536 bytes are 1.09 MB."""
    prefixes = ["", "k", "M", "G", "T"]
    while count >= 999.5 and len(prefixes) > 1:
        count /= 1000
        prefixes.pop(0)
    return f"{count:.3g} {prefixes[0]}{unit}".rstrip()


if __name__ == "__main__":
    run_command(main)
