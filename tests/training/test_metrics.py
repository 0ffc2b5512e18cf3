"""Figures: windows that a resume continues, files that it cuts, and lines that people read."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_essh.training.engine import StepReport
from megatron_essh.training.metrics import (
    MetricsWriter,
    ProgressWindow,
    TimeLeft,
    format_duration,
    perplexity,
    progress_line,
    table,
    truncate_metrics,
)

REPORT = StepReport(
    step=0,
    loss=2.0,
    loss_by_capacity={"full": 2.0},
    divergence=None,
    tokens=100,
    learning_rate=1e-3,
    grad_norm=0.5,
    full_slots=4,
    slots=4,
    ordered=False,
)


def report(**changes) -> StepReport:
    return dataclasses.replace(REPORT, **changes)


finite = st.floats(-1e6, 1e6)
reports = st.builds(
    report,
    loss=finite,
    loss_by_capacity=st.dictionaries(st.sampled_from(["full", "8/32", "16/32", "2/32"]), finite, min_size=1),
    divergence=st.none() | finite,
    tokens=st.integers(1, 10**6),
    full_slots=st.integers(0, 4),
)


def test_a_window_means_over_its_steps_and_each_capacitys_own_steps() -> None:
    window = ProgressWindow()
    slots = {"8/32": 1, "full": 3}
    window.add(
        report(
            loss=1.0, loss_by_capacity={"full": 1.0, "8/32": 4.0}, full_slots=3, divergence=0.5,
            slots_by_capacity=slots, flops=2e13,
        ),
        2.0,
    )  # fmt: skip
    window.add(report(loss=3.0, loss_by_capacity={"full": 3.0}, learning_rate=2e-3, grad_norm=0.25), 3.0)
    slots = {"full": 2, "8/32": 1, "16/32": 1}
    losses = {"full": 5.0, "16/32": 7.0, "8/32": 6.0}
    window.add(report(loss=5.0, loss_by_capacity=losses, full_slots=2, slots_by_capacity=slots, flops=4e13), 5.0)
    record = window.take(peak_tflops=12.0)
    assert record == {
        "loss": 3.0,
        "loss_by_capacity": {"full": 3.0, "16/32": 7.0, "8/32": 5.0},
        "divergence": 0.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "grad_norm_by_part": {},
        "skipped_steps": 0,
        "full_share": (3 + 4 + 2) / 12,
        "slots_by_capacity": {"full": 5, "16/32": 1, "8/32": 2},
        "tokens_per_second": 30.0,
        "mfu": 0.5,
    }
    assert list(record["loss_by_capacity"]) == ["full", "16/32", "8/32"]
    window.add(report(loss=9.0), 1.0)
    assert window.take()["loss"] == 9.0, "a taken window begins anew"


@given(st.lists(st.tuples(reports, st.floats(1e-3, 10)), min_size=1, max_size=8), st.integers(0, 8))
def test_a_window_continued_through_json_is_exactly_the_uninterrupted_one(steps, cut) -> None:
    whole, first, second = ProgressWindow(), ProgressWindow(), ProgressWindow()
    for step in steps:
        whole.add(*step)
    for step in steps[:cut]:
        first.add(*step)
    second.load_state(json.loads(json.dumps(first.state_values())))
    for step in steps[cut:]:
        second.add(*step)
    assert second.take() == whole.take()


def test_time_left_follows_recent_steps_and_counts_what_lies_between() -> None:
    left = TimeLeft()
    left.add_step(60.0)
    assert left.seconds(10) == 600.0
    for _ in range(3):
        left.add_step(2.0)
    assert left.seconds(10) == pytest.approx(20.0), "the first step's warm-up is forgotten"
    left.add_overhead(8.0)
    assert left.seconds(10) == pytest.approx(10 * (2.0 + 8.0 / 4))
    for _ in range(200):
        left.add_step(1.0)
    assert left.seconds(100) == pytest.approx(100 * (1.0 + 8.0 / 204), rel=1e-3)


def write(folder, resumed_step, events) -> None:
    writer = MetricsWriter(folder / "metrics.jsonl", folder / "tensorboard", resumed_step)
    for kind, step, loss in events:
        if kind == "step":
            window = ProgressWindow()
            window.add(report(loss=loss, loss_by_capacity={"full": loss, "8/32": loss + 1}), 0.5)
            writer.step(step, window.take())
        else:
            writer.validation(step, {"T1": loss})
    writer.close()


def test_a_resumed_run_logs_every_step_once_in_both_places(tmp_path) -> None:
    write(tmp_path, 0, [("step", 2, 9.0), ("step", 4, 8.0), ("validation", 4, 7.5), ("step", 6, 7.0), ("step", 8, 6.0)])
    write(tmp_path, 4, [("step", 6, 7.25), ("validation", 8, 5.5)])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 2),
        ("step", 4),
        ("validation", 4),
        ("step", 6),
        ("validation", 8),
    ]
    assert lines[3]["loss"] == 7.25
    assert lines[4]["loss_by_tier"] == {"T1": 5.5}
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(2, 9.0), (4, 8.0), (6, 7.25)]
    assert [(e.step, e.value) for e in board.Scalars("validation/T1")] == [(4, 7.5), (8, 5.5)]
    assert set(board.Tags()["scalars"]) == {
        "train/loss",
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/full_share",
        "train/skipped_steps",
        "train/loss_by_capacity/full",
        "train/loss_by_capacity/8/32",
        "validation/T1",
    }


@pytest.mark.parametrize("tail", ["", '{"kind": "step", "st', '{"step": 9}\n', '{"step": 4}', "\0\0\0"])
def test_truncation_keeps_whole_lines_up_to_the_resumed_step(tmp_path, tail, capsys) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = '{"kind": "step", "step": 2}\n{"kind": "validation", "step": 4, "x": 1.50}\n'
    path.write_text(kept + tail)
    truncate_metrics(path, 4)
    assert path.read_text() == kept, "kept lines keep their very bytes"
    assert capsys.readouterr().err == "", "a line that a kill cut short is not worth a warning"


def test_damage_inside_is_told_and_cut(tmp_path, capsys) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    truncate_metrics(path, 4)
    assert path.read_text() == '{"step": 1}\n'
    assert capsys.readouterr().err == f"warning: {path}: dropped from line 2 on, which is damaged\n"
    truncate_metrics(tmp_path / "nothing", 4)


def test_a_figure_that_is_no_number_never_reaches_the_file(tmp_path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write(tmp_path, 0, [("step", 2, float("nan"))])


def test_the_progress_line_tells_everything() -> None:
    window = ProgressWindow()
    window.add(report(loss=3.14159, loss_by_capacity={"8/32": 4.0, "full": 3.0}, divergence=0.125, tokens=123_456), 2.0)
    assert progress_line(20, 1000, window.take(), "3 min 05 s") == (
        "step   20/1000  loss 3.1416 (full 3.000 8/32 4.000)  divergence 0.1250  lr 1.00e-03  grad norm 0.50  "
        "61,728 tokens/s  3 min 05 s left"
    )


def test_tables_align() -> None:
    assert table(["tier", "loss"], [["T1", "3.5"], ["T10", "12.25"]]) == "  tier   loss\n  T1      3.5\n  T10   12.25"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (86399, "1 d 00 h"),
        (3 * 86400 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_durations_read_well(seconds, text) -> None:
    assert format_duration(seconds) == text


def test_perplexity_of_an_absurd_loss_is_not_an_error() -> None:
    assert perplexity(math.log(31.5)) == "31.50"
    assert perplexity(1e6) == "inf"
