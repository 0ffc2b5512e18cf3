"""Decode steps as pictures: their times as bars beside the floor of what must move; their errors by position."""

from __future__ import annotations

import io
import math
from contextlib import AbstractContextManager
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

BARS = (
    ("graph_ms", "step, as a graph", "#1b5e9c"),
    ("eager_ms", "step", "#8fb4d4"),
    ("control_graph_ms", "LanguageModel.step, as a graph", "#c2571a"),
    ("control_ms", "LanguageModel.step", "#e3ac8b"),
)
"""Figure of a row, what the legend calls it, color; from top to bottom."""
FLOOR_COLOR = "#222222"
HEIGHT = 0.2
"""Of a bar; a case has a place of one."""
LINE_COLORS = ("#c2571a", "#1b5e9c", "#3c8d5a", "#7a4fa3", "#222222")
"""Of the bf16 forward's error, then of the steps' in the order of their weights."""


def draw(rows: list[dict[str, Any]], title: str) -> bytes:
    """The PNG's bytes; `rows` as `benchmarks.decoding.measure_decoding` gives them."""
    shown = [bar for bar in BARS if any(row.get(bar[0]) is not None for row in rows)]
    with _style():
        figure, axes = pyplot.subplots(figsize=(6.4, 1.4 + 0.62 * len(rows)), layout="constrained")
        for place, (name, label, color) in enumerate(shown):
            offset = (place - (len(shown) - 1) / 2) * HEIGHT
            there = [(at + offset, row[name]) for at, row in enumerate(rows) if row.get(name) is not None]
            bars = axes.barh([y for y, _ in there], [ms for _, ms in there], HEIGHT, color=color, label=label)
            axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
        floors = [(at, row["floor_ms"]) for at, row in enumerate(rows) if row["floor_ms"] is not None]
        if floors:
            reach = len(shown) * HEIGHT / 2
            x = [ms for _, ms in floors]
            axes.vlines(
                x, [at - reach for at, _ in floors], [at + reach for at, _ in floors], color=FLOOR_COLOR, label="floor"
            )
        axes.set_yticks(
            range(len(rows)), [f"{r['capacity']} {r['weights']}\n{r['batch']:,} x {r['context']:,}" for r in rows]
        )
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("milliseconds a step")
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
        axes.set_title(title, loc="left", fontsize=9, wrap=True)
        return _png(figure)


def draw_drift(rows: list[dict[str, Any]], title: str) -> bytes:
    """The PNG's bytes: a panel for each of `rows`, as `benchmarks.drift.measure_drift` gives them."""
    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    with _style():
        figure, panels = pyplot.subplots(
            lines,
            columns,
            figsize=(4.4 * columns, 0.8 + 2.2 * lines),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, row in zip(panels.flat, rows, strict=False):
            for color, (name, errors) in zip(LINE_COLORS, row["errors"].items(), strict=False):
                # No error at all has no place on the axis.
                shown = [error or math.nan for error in errors]
                axes.plot(row["positions"], shown, color=color, linewidth=1, label=name)
            if row["window"] is not None:
                axes.axvline(row["window"], color="0.6", linestyle=":", linewidth=1, label="window")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("position")
            axes.grid(color="0.9", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(f"{row['capacity']}, batch {row['batch']:,}", loc="left", fontsize=9)
        for axes in panels.flat[len(rows) :]:
            axes.set_visible(False)
        for axes in panels[:, 0]:
            axes.set_ylabel("error of the logits")
        figure.legend(*panels.flat[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, wrap=True)
        return _png(figure)


def _style() -> AbstractContextManager[None]:
    return pyplot.rc_context(
        {"font.size": 9, "font.family": "DejaVu Sans", "axes.linewidth": 0.8, "text.parse_math": False}
    )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    pyplot.close(figure)
    return buffer.getvalue()
