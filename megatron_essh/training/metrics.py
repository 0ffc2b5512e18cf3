"""What a run reports: a progress line, a validation table, TensorBoard scalars and metrics.jsonl.

metrics.jsonl holds one JSON object a line: {"kind": "step", "step": 20, "loss": ...} for a progress line and
{"kind": "validation", "step": 20, "loss_by_tier": {...}} for a validation; a step that was skipped ("skip") or whose
loss jumped ("spike") has a line of its own. A resumed run drops what came after the checkpoint that it continues from,
so no step appears twice. Of a run on many ranks the first one writes. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_essh.files import write_atomically
from megatron_essh.training.event_file import EventFile
from megatron_essh.training.step_sums import StepReport

_CAPACITY = "capacity "
_PART = "part "
_SLOTS = "slots "
_RANKS = ("communication_share", "waiting_share", "slowest_pace")
"""What progress records of several ranks tell of them, as TensorBoard shows it."""


class ProgressWindow:
    """Means over the steps since the last progress line; its state is part of the checkpoint.

    With `seconds` (time in the steps alone, without validation and saving) it also gives the throughput.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def add(self, report: StepReport, seconds: float) -> None:
        """Count one step that took `seconds`; of a skipped one, that it was, its tokens and its time."""
        terms = {
            "full_share": report.full_slots / report.slots,
            "tokens": report.tokens,
            "seconds": seconds,
            "skipped": float(report.skipped is not None),
            "flops": report.flops,
        }
        terms |= {_SLOTS + label: slots for label, slots in report.slots_by_capacity.items()}
        if report.skipped is None:
            terms["loss"] = report.loss
            terms |= {_CAPACITY + label: loss for label, loss in report.loss_by_capacity.items()}
            terms |= {_PART + part: norm for part, norm in report.grad_norm_by_part.items()}
            if report.divergence is not None:
                terms["divergence"] = report.divergence
            self._last["grad_norm"] = report.grad_norm
        for name, value in terms.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        self._last["learning_rate"] = report.learning_rate

    def take(self, peak_tflops: float | None = None) -> dict[str, Any]:
        """The window's record, as metrics.jsonl holds it less kind and step; the window is empty afterwards.

        peak_tflops: what the run's devices compute at most, together; None where that is not known.

        Slots of a capacity are counted over the steps. Losses, gradient norms of parts and the full share are means
        over the steps (those in which the capacity took part), learning rate and gradient norm the last step's. What
        only skipped steps could tell is None.
        """
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        labels = (name.removeprefix(_CAPACITY) for name in means if name.startswith(_CAPACITY))
        slots = {name.removeprefix(_SLOTS): int(n) for name, n in self._sums.items() if name.startswith(_SLOTS)}
        seconds = max(self._sums["seconds"], 1e-9)
        record = {
            "loss": means.get("loss"),
            "loss_by_capacity": {label: means[_CAPACITY + label] for label in sorted(labels, key=_widest_first)},
            "divergence": means.get("divergence"),
            "learning_rate": self._last["learning_rate"],
            "grad_norm": self._last.get("grad_norm"),
            "grad_norm_by_part": {n.removeprefix(_PART): v for n, v in means.items() if n.startswith(_PART)},
            "skipped_steps": int(self._sums.get("skipped", 0)),
            "full_share": means["full_share"],
            "slots_by_capacity": {label: slots[label] for label in sorted(slots, key=_widest_first)},
            "tokens_per_second": self._sums["tokens"] / seconds,
            "mfu": self._sums["flops"] / seconds / 1e12 / peak_tflops if peak_tflops else None,
        }
        self._sums, self._counts, self._last = {}, {}, {}
        return record

    def state_values(self) -> dict[str, Any]:
        """What `load_state` takes; JSON-able."""
        return {"sums": dict(self._sums), "counts": dict(self._counts), "last": dict(self._last)}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Put back what `state_values` gave."""
        self._sums, self._counts = dict(values["sums"]), dict(values["counts"])
        self._last = dict(values["last"])


class TimeLeft:
    """Estimates a run's remaining wall-clock time from its recent steps and its validations and saves."""

    def __init__(self) -> None:
        self._step_seconds, self._overhead, self._steps = 0.0, 0.0, 0

    def add_step(self, seconds: float) -> None:
        """Count a step. Recent ones weigh more, because the recipe changes what a step costs."""
        if self._steps < 2:  # the first step also warms the machine up: it counts until there is a second
            self._step_seconds = seconds
        else:
            self._step_seconds = 0.9 * self._step_seconds + 0.1 * seconds
        self._steps += 1

    def add_overhead(self, seconds: float) -> None:
        """Count time between steps."""
        self._overhead += seconds

    def seconds(self, remaining_steps: int) -> float:
        """Seconds for `remaining_steps`; at least one step was counted before."""
        assert self._steps, "no step to judge by"
        return remaining_steps * (self._step_seconds + self._overhead / self._steps)


class MetricsWriter:
    """metrics.jsonl and TensorBoard of one run, continued after step `resumed_step` (0 for a new run)."""

    def __init__(self, jsonl: Path, tensorboard: Path, resumed_step: int) -> None:
        truncate_metrics(jsonl, resumed_step)
        self._file = open(jsonl, "a", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._board = EventFile(tensorboard, resumed_step + 1)

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Log a progress window's record after `step` steps."""
        self._line({"kind": "step", "step": step, **record})
        for name in (
            "loss", "learning_rate", "grad_norm", "tokens_per_second", "full_share", "divergence", "skipped_steps",
            "mfu", "memory_mib",
        ):  # fmt: skip
            if record.get(name) is not None:
                self._board.scalar(f"train/{name}", record[name], step)
        for group in ("loss_by_capacity", "grad_norm_by_part", "slots_by_capacity"):
            for label, value in record[group].items():
                self._board.scalar(f"train/{group}/{label}", value, step)
        if record.get("ranks"):
            for name in _RANKS:
                self._board.scalar(f"ranks/{name}", record["ranks"][name], step)
        self._board.flush()

    def event(self, step: int, kind: str, record: Mapping[str, Any]) -> None:
        """Log something that befell `step`."""
        self._line({"kind": kind, "step": step, **record})

    def validation(self, step: int, loss_by_tier: Mapping[str, float]) -> None:
        """Log the mean loss of each tier after `step` steps."""
        self._line({"kind": "validation", "step": step, "loss_by_tier": dict(loss_by_tier)})
        for tier, loss in loss_by_tier.items():
            self._board.scalar(f"validation/{tier}", loss, step)
        self._board.flush()

    def sync(self) -> None:
        """Put all that was logged on disk: before a checkpoint, so that a resume from it misses no line."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.sync()

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()
        self._board.close()

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop the lines after `last_step` from a metrics.jsonl, and a last line that a kill left unfinished."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = 0
    for number, line in enumerate(lines, start=1):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                print(f"warning: {path}: dropped from line {number} on, which is damaged", file=sys.stderr)
            break
        if step > last_step or not line.endswith(b"\n"):
            break
        kept += 1
    if kept < len(lines):
        write_atomically(path, b"".join(lines[:kept]))


def _widest_first(label: str) -> tuple[bool, int, str]:
    """Sort key of capacity labels: `full`, then `24/32`, `8/32`, ..., then others by name."""
    budget = label.partition("/")[0]
    return (label != "full", -int(budget) if budget.isdecimal() else 1, label)


def progress_line(step: int, steps: int, record: Mapping[str, Any], left: str) -> str:
    """One line: step, loss, loss per capacity, learning rate, gradient norm, throughput, time `left`."""
    capacities = " ".join(f"{label} {loss:.3f}" for label, loss in record["loss_by_capacity"].items())
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if record["loss"] is None:
        parts.append("every step skipped")
    else:
        parts.append(f"loss {record['loss']:.4f} ({capacities})")
        if record["skipped_steps"]:
            parts.append(f"{record['skipped_steps']} skipped")
    if record["divergence"] is not None:
        parts.append(f"divergence {record['divergence']:.4f}")
    parts.append(f"lr {record['learning_rate']:.2e}")
    if record["grad_norm"] is not None:
        parts.append(f"grad norm {record['grad_norm']:.2f}")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    ranks = record.get("ranks")
    if ranks:
        parts.append(
            f"reducing {ranks['communication_share']:.1%} waiting {ranks['waiting_share']:.1%} "
            f"rank {ranks['slowest_rank']} slowest x{ranks['slowest_pace']:.2f}"
        )
    parts.append(f"{left} left")
    return "  ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An indented text table, first column left and the others right aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def perplexity(loss: float) -> str:
    """exp(loss) as text; a loss too large for a float gives `inf`."""
    return f"{math.exp(loss):,.2f}" if loss < 700 else "inf"


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min` or `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"
