"""Draw the quality-size frontier: perplexity against parameters, a point for each evaluated tier.

python tools/plot_frontier.py out/exports/*/perplexity.json --output frontier.png

Takes the JSON files of `tools/evaluate.py perplexity --json`. Tiers of one trained model make one line, with
quantised weights another. All figures must be of the same data in windows of the same length.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from megatron_essh.errors import UserError, run_command
from megatron_essh.files import write_atomically

TEXTS = ("tier", "data", "data_fingerprint", "origin", "origin_sha256")
COUNTS = {"parameters": 1, "sequence_length": 1, "tokens": 1, "step": 0}
"""Whole numbers, and the least that each can be."""
MOST_COUNT = 10**18
LEAST_PERPLEXITY, MOST_PERPLEXITY = 0.9, 1e200
"""A perplexity is at least 1, but for rounding; beyond the largest of these an axis overflows."""
COMPARABLE = ("data_fingerprint", "sequence_length", "tokens")
STORED = "stored"
"""`weights` of an evaluation of a model as it is; others are of quantised weights."""
COLORS = ("#1b5e9c", "#c2571a", "#2d7d46", "#7a4a9e", "#a3303b", "#5f5f5f")
LOG_FROM = 1.5
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
MOST_TICKS = 8
TITLE_WIDTH = 72
STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="JSON", type=Path, nargs="+", help="of evaluate.py perplexity --json")
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    parser.add_argument("--title", help="in place of the one that names data and model")
    args = parser.parse_args()
    rows = [row for path in args.results for row in read_rows(path)]
    check_comparable(rows)
    write_atomically(args.output, draw(rows, args.title))
    print(f"frontier of {len(rows)} tiers: {args.output}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The evaluations in one file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    rows = content if isinstance(content, list) else [content]
    if not rows:
        raise UserError(f"{path}: an empty list; give files of tools/evaluate.py perplexity --json")
    for index, row in enumerate(rows):
        check_row(row, f"{path}: entry {index}" if isinstance(content, list) else str(path))
        row["file"] = str(path)
    return rows


def check_row(row: Any, where: str) -> None:
    """Refuse what is no evaluation, or one that cannot be drawn, by key and value."""
    for key in (*TEXTS, *COUNTS, "perplexity"):
        if not isinstance(row, dict) or key not in row:
            raise UserError(f"{where}: has no {key}; give files of tools/evaluate.py perplexity --json")
        value = row[key]
        if key in TEXTS:
            right, expected = isinstance(value, str) and is_unicode(value), "text"
        elif key in COUNTS:
            right = type(value) is int and COUNTS[key] <= value <= MOST_COUNT
            expected = f"a whole number from {COUNTS[key]} to {MOST_COUNT:.0e}"
        else:
            right = type(value) in (int, float) and LEAST_PERPLEXITY <= value <= MOST_PERPLEXITY
            expected = f"a number from {LEAST_PERPLEXITY} to {MOST_PERPLEXITY:.0e}"
        if not right:
            raise UserError(f"{where}: {key}: {json.dumps(value)[:60]}, expected {expected}; evaluate this model again")
    if "weights" in row and not (isinstance(row["weights"], str) and is_unicode(row["weights"])):
        raise UserError(
            f"{where}: weights: {json.dumps(row['weights'])[:60]}, expected text; evaluate this model again"
        )


def is_unicode(text: str) -> bool:
    """Whether `text` can be drawn: JSON can spell half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_comparable(rows: list[dict[str, Any]]) -> None:
    """Refuse figures that do not belong on the same axes."""
    for row in rows:
        for key in COMPARABLE:
            if row[key] != rows[0][key]:
                raise UserError(
                    f"{row['file']}: {key} {row[key]}, but {rows[0]['file']} has {rows[0][key]}: "
                    "not comparable; evaluate both on the same data, windows and batches"
                )


def draw(rows: list[dict[str, Any]], title: str | None) -> bytes:
    """The PNG's bytes."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["parameters"]):
        lines.setdefault((row["origin_sha256"], row.get("weights", STORED)), []).append(row)
    with pyplot.rc_context(
        {"font.size": 9, "font.family": "DejaVu Sans", "axes.linewidth": 0.8, "text.parse_math": False}
    ):
        figure, axes = pyplot.subplots(figsize=(5.4, 3.7), layout="constrained")
        for index, points in enumerate(lines.values()):
            color = COLORS[index % len(COLORS)]
            x, y = [p["parameters"] for p in points], [p["perplexity"] for p in points]
            axes.plot(x, y, "-o", color=color, markersize=4.5, linewidth=1.4, label=model_name(points[0]))
            for point in points:
                axes.annotate(
                    point["tier"],
                    (point["parameters"], point["perplexity"]),
                    xytext=(5, 4),
                    textcoords="offset points",
                    color=color,
                )
        if is_wide(row["parameters"] for row in rows):
            axes.set_xscale("log")
            mark(axes.xaxis, [row["parameters"] for row in rows])
        if is_wide(row["perplexity"] for row in rows):
            axes.set_yscale("log")
            mark(axes.yaxis, [row["perplexity"] for row in rows])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("parameters")
        axes.set_ylabel("perplexity")
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(0.08)
        if len(lines) > 1:
            axes.legend(frameon=False)
        axes.set_title(textwrap.fill(title, TITLE_WIDTH) if title else default_title(lines), loc="left", fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=240, metadata={"Software": None})
        pyplot.close(figure)
    return buffer.getvalue()


def default_title(lines: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """The model, where there is one, and the data."""
    rows = [row for points in lines.values() for row in points]
    data = f"{Path(rows[0]['data']).name}, windows of {rows[0]['sequence_length']:,} tokens"
    names = [model_name(rows[0]), data] if len(lines) == 1 else [data]
    return "\n".join(textwrap.fill(name, TITLE_WIDTH) for name in names)


def is_wide(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis shows these better."""
    values = list(values)
    return max(values) / min(values) >= LOG_FROM


def mark(axis: Axis, values: Sequence[float]) -> None:
    """Round numbers within a logarithmic axis' data as its ticks; matplotlib's own would be powers of ten alone."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in STEPS]
    inside = [tick for tick in ticks if low / 1.05 <= tick <= high * 1.05]
    while len(inside) > MOST_TICKS:
        inside = inside[::2]
    axis.set_major_locator(FixedLocator(inside))
    axis.set_minor_locator(NullLocator())


def count_text(value: float) -> str:
    """1.2K, 3M, 1.5B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def model_name(row: dict[str, Any]) -> str:
    """The run that a model comes from, by the last two folders of its path, the step, and how it was quantised."""
    path = Path(row["origin"])
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    weights = row.get("weights", STORED)
    return f"{run.parent.name}/{run.name}, step {row['step']:,}" + ("" if weights == STORED else f", {weights}")


if __name__ == "__main__":
    run_command(main)
