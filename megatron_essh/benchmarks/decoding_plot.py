"""The times of decode steps as a picture: a group of bars for each case, and the floor of what must move."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

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


def draw(rows: list[dict[str, Any]], title: str) -> bytes:
    """The PNG's bytes; `rows` as `benchmarks.decoding.measure_decoding` gives them."""
    shown = [bar for bar in BARS if any(row.get(bar[0]) is not None for row in rows)]
    with pyplot.rc_context(
        {"font.size": 9, "font.family": "DejaVu Sans", "axes.linewidth": 0.8, "text.parse_math": False}
    ):
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
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
        pyplot.close(figure)
    return buffer.getvalue()
