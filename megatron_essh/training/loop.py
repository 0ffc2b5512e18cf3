"""The training loop of both stages: build or resume, then step, log, validate, save, until done or stopped.

Everything that decides the coming steps is in the checkpoint: a run killed at any instant and started again is
bitwise the uninterrupted one. Capacities, losses and updates are the engine's, files the run folder's and the
checkpoints', figures the metrics': this file only says what happens when.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_essh.config import RunConfig, config_to_mapping
from megatron_essh.device import pick_device
from megatron_essh.elastic.capacity import tier_capacities
from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.output import lasting_output
from megatron_essh.training.announce import announce_end, announce_start, validation_table
from megatron_essh.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_essh.training.engine import NativeEngine, Stage
from megatron_essh.training.metrics import (
    MetricsWriter,
    ProgressWindow,
    TimeLeft,
    format_duration,
    progress_line,
)
from megatron_essh.training.refinement_source import check_source, load_source
from megatron_essh.training.run_data import open_run_data
from megatron_essh.training.run_folder import RunFolder, refuse_another_run
from megatron_essh.training.signals import GracefulStop
from megatron_essh.version import __version__

PACE_AFTER = 4
"""Steps of this process after which its pace is told; progress lines may be far apart."""


@dataclass
class Progress:
    """What the loop itself carries from step to step, and through checkpoints."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Valid tokens trained on."""
    seconds: float = 0.0
    """Wall-clock time in steps, over all processes of the run."""
    window: ProgressWindow = field(default_factory=ProgressWindow)
    """The steps since the last progress line."""
    reported: bool = True
    """Whether what is due after `step`, progress line and validation, was done."""

    @property
    def reported_step(self) -> int:
        """The last step after which all that was due was done."""
        return self.step if self.reported else self.step - 1

    def state_values(self) -> dict[str, Any]:
        """What `load_state` takes; JSON-able."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "window": self.window.state_values(),
            "reported": self.reported,
        }

    def load_state(self, values: dict[str, Any]) -> None:
        """Put back what `state_values` gave."""
        self.step, self.tokens, self.seconds = values["step"], values["tokens"], values["seconds"]
        self.window.load_state(values["window"])
        self.reported = values["reported"]


def train(config: RunConfig, stage: Stage, *, initial: Path | None = None) -> Path | None:
    """Run `stage` of `config` to its end, or continue it from the newest checkpoint in training.output.

    A first SIGTERM or SIGINT ends it early but in order: the step is finished and saved. Output that nobody reads
    any more ends nothing. Main thread only.

    Args:
        config: the run.
        stage: "pretrain" starts from random weights, "refine" from a pretrained model.
        initial: for "refine": a pretraining run's folder, or one of its checkpoints.

    Returns:
        The newest checkpoint; None when stopped before the first step.

    Raises:
        UserError: anything in config, data, checkpoints, disk or environment that forbids the run.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        raise UserError(f"WORLD_SIZE is {world}: there is no parallel engine, training takes one process only")
    device = pick_device(config.training.device, "training.device:")
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.training.seed)
    with lasting_output(), RunFolder(Path(config.training.output)) as folder, GracefulStop() as stop:
        try:
            saved = _find_saved(config, stage, initial, folder)
            steps = config.refinement.steps if stage == "refine" else config.training.steps
            if saved is not None and saved.values["step"] == steps:
                announce_end(folder, f"nothing to do: {saved.path} is the end of this run, step {steps}/{steps}")
                return saved.path
            run = Run(config, stage, device, folder)
            begin = run.start(initial) if saved is None else run.resume(saved)
            del saved  # a second copy of model and moments, which the run must not hold to its end
            folder.write_config(config)
            announce_start(config, run.engine, run.data, folder, begin)
            with closing(MetricsWriter(folder.metrics, folder.tensorboard, run.progress.reported_step)) as metrics:
                run.loop(metrics, stop)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise UserError(
                    f"{folder.path}: the disk is full ({error.strerror}); checkpoints already there are "
                    "intact: make room, then start the run again"
                ) from None
            raise
        if run.progress.step == run.steps:
            spent = format_duration(run.progress.seconds)
            headline = f"done: {run.steps} steps, {run.progress.tokens:,} tokens, {spent} in steps"
        else:
            headline = f"stopped by {stop.requested} after step {run.progress.step}/{run.steps}: "
            headline += f"saved {run.checkpoint}" if run.checkpoint else "nothing to save yet"
            headline += "; the same command continues the run"
        announce_end(folder, headline)
        return run.checkpoint


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a run may continue from."""

    path: Path
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Run:
    """A stage of a config on one device: what is trained, on what, and how far it is."""

    def __init__(self, config: RunConfig, stage: Stage, device: torch.device, folder: RunFolder) -> None:
        self.config = config
        self.stage = stage
        self.folder = folder
        self.data = open_run_data(config, stage)
        model = LanguageModel(config.model, generator=torch.Generator().manual_seed(config.training.seed))
        self.engine = NativeEngine(model, config, stage, device, eod=self.data.eod)
        self.steps = self.engine.steps
        self.tiers = tier_capacities(config.model, config.elastic)
        self.progress = Progress()
        self.checkpoint: Path | None = None
        """The newest checkpoint."""
        self.source: dict[str, Any] | None = None
        """Refinement: the record of the pretrained model."""
        self._saved_step = 0
        self._time_left = TimeLeft()
        self._steps_here = 0

    def start(self, initial: Path | None) -> str:
        """Take a new run's parameters from where they come; returns in words from where."""
        if self.stage == "pretrain":
            return f"starting from random weights, seed {self.config.training.seed}"
        tensors, self.source = load_source(initial, self.config.model)
        self.engine.model.load_state_dict(tensors, strict=True)
        return f"refining {self.source['path']}, step {self.source['step']}"

    def resume(self, saved: Saved) -> str:
        """Go on where `saved` was; returns in words where."""
        self.engine.load_state(saved.tensors, saved.values["engine"])
        self.data.loader.load_state(saved.values["data"])
        self.progress.load_state(saved.values["progress"])
        self.source, self.checkpoint = saved.values["source"], saved.path
        self._saved_step = self.progress.step
        if not self.progress.reported:  # a progress line comes before this process has a step to judge by
            self._time_left.add_step(self.progress.seconds / self.progress.step)
        return f"continuing from {saved.path}, step {self.progress.step}/{self.steps}"

    def loop(self, metrics: MetricsWriter, stop: GracefulStop) -> None:
        """Step until all steps are done or `stop` is requested; the last step is saved in either case.

        Who asks for a stop does not wait for a validation: it is left to the run that continues this one.
        """
        save_every = self.config.checkpoint.save_every
        if not self.progress.reported and stop.requested is None:
            self._report(metrics)
        while self.progress.step < self.steps and stop.requested is None:
            self._train_step()
            step, last = self.progress.step, self.progress.step == self.steps
            if last or stop.requested is None or not self._validation_due():
                self._report(metrics)
            if last or (save_every and step % save_every == 0):
                self._save(metrics)
        if self._saved_step < self.progress.step:
            self._save(metrics)

    def _report(self, metrics: MetricsWriter) -> None:
        """Do what is due after this step, short of saving."""
        if self.progress.step % self.config.training.log_every == 0 or self.progress.step == self.steps:
            self._log(metrics)
        if self._validation_due():
            self._validate(metrics)
        self.progress.reported = True

    def _validation_due(self) -> bool:
        step, every = self.progress.step, self.config.training.validate_every
        return bool(self.data.validation and every and (step % every == 0 or step == self.steps))

    def _train_step(self) -> None:
        begin = time.perf_counter()
        tokens = self.data.loader.next_batch()
        try:
            report = self.engine.train_step(self.progress.step, tokens)
        except UserError as error:
            intact = f"the last checkpoint is intact: {self.checkpoint}" if self.checkpoint else "none was saved yet"
            raise UserError(f"{error}; {intact}") from None
        seconds = time.perf_counter() - begin
        progress = self.progress
        progress.step += 1
        progress.reported = False
        progress.tokens += report.tokens
        progress.seconds += seconds
        progress.window.add(report, seconds)
        self._time_left.add_step(seconds)
        self._steps_here += 1
        if self._steps_here == PACE_AFTER and progress.step < self.steps:
            print(f"pace: {seconds:.2f} s a step, about {self._left()} to go", flush=True)

    def _log(self, metrics: MetricsWriter) -> None:
        record = {**self.progress.window.take(), "tokens": self.progress.tokens}
        metrics.step(self.progress.step, record)
        print(progress_line(self.progress.step, self.steps, record, self._left()), flush=True)

    def _validate(self, metrics: MetricsWriter) -> None:
        begin = time.perf_counter()
        losses = {}
        for tier in self.config.training.validation_tiers:
            loss = losses[tier] = self.engine.evaluate(self.data.validation, self.tiers[tier])
            if not math.isfinite(loss):
                raise UserError(
                    f"step {self.progress.step}: validation loss of {tier} is {loss}; the last checkpoint, "
                    f"{self.checkpoint}, is of before this step"
                )
        metrics.validation(self.progress.step, losses)
        seconds = time.perf_counter() - begin
        self._time_left.add_overhead(seconds)
        print(f"validation after step {self.progress.step} ({format_duration(seconds)}):")
        print(validation_table(self.config, self.tiers, losses), flush=True)

    def _save(self, metrics: MetricsWriter) -> None:
        begin = time.perf_counter()
        metrics.sync()  # first, so that no line that the checkpoint counts as logged can be missing
        values = {
            "stage": self.stage,
            "step": self.progress.step,
            "package_version": __version__,
            "config": config_to_mapping(self.config),
            "progress": self.progress.state_values(),
            "data": self.data.loader.state_values(),
            "tokenizer": None if self.data.tokenizer is None else config_to_mapping(self.data.tokenizer),
            "engine": self.engine.state_values(),
            "source": self.source,
        }
        self.checkpoint = save_checkpoint(
            self.folder.checkpoints,
            self.progress.step,
            self.engine.state_tensors(),
            values,
            keep_last=self.config.checkpoint.keep_last,
        )
        self._saved_step = self.progress.step
        seconds = time.perf_counter() - begin
        self._time_left.add_overhead(seconds)
        print(f"saved {self.checkpoint} ({format_duration(seconds)})", flush=True)

    def _left(self) -> str:
        return format_duration(self._time_left.seconds(self.steps - self.progress.step))


def _find_saved(config: RunConfig, stage: Stage, initial: Path | None, folder: RunFolder) -> Saved | None:
    """The newest checkpoint in `folder`, held to belong to this very run; None in a new folder."""
    path = folder.newest_checkpoint()
    if path is None:
        return None
    tensors, values = load_checkpoint(path)
    refuse_another_run(path, values, config, stage)
    if stage == "refine":
        check_source(initial, values["source"], folder.path)
    return Saved(path, tensors, values)
