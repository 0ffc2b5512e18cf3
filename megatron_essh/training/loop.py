"""The training loop of both stages: build or resume, then step, log, validate, save, until done or stopped.

Everything that decides the coming steps is in the checkpoint: a run killed at any instant and started again is
bitwise the uninterrupted one. Capacities, losses and updates are the engine's, files the run folder's and the
checkpoints', figures the metrics': this file only says what happens when.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_essh.config import RunConfig, config_to_mapping
from megatron_essh.device import device_name, peak_tflops
from megatron_essh.elastic.capacity import tier_capacities
from megatron_essh.elastic.plan import FULL, budget_label
from megatron_essh.errors import UserError
from megatron_essh.files import DISK_FULL
from megatron_essh.model.language_model import LanguageModel
from megatron_essh.output import lasting_output
from megatron_essh.parallel.mesh import Mesh
from megatron_essh.parallel.processes import open_mesh
from megatron_essh.training.announce import announce_end, announce_start, validation_table
from megatron_essh.training.checkpoint import CheckpointWriter, Saved, read_values
from megatron_essh.training.checkpoint.engine_state import engine_pieces, load_into
from megatron_essh.training.engine import Stage, build_engine
from megatron_essh.training.guard import SpikeDetector
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
from megatron_essh.training.step_sums import StepReport
from megatron_essh.version import __version__

PACE_AFTER = 4
"""Steps of this process after which its pace is told; progress lines may be far apart."""
ECHO_SECONDS = 10.0
"""How long a launcher of several processes may take to pass on a signal that they have had already."""


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
    skipped: int = 0
    """Steps that updated nothing because a loss or gradient was not finite."""
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    """The loss that is to be expected."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What befell `step` and is still to be logged."""

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
            "skipped": self.skipped,
            "spikes": self.spikes.state_values(),
            "events": list(self.events),
        }

    def load_state(self, values: dict[str, Any]) -> None:
        """Put back what `state_values` gave."""
        self.step, self.tokens, self.seconds = values["step"], values["tokens"], values["seconds"]
        self.window.load_state(values["window"])
        self.reported = values["reported"]
        if "spikes" in values:  # a checkpoint from before there were any begins to learn anew
            self.skipped, self.events = values["skipped"], list(values["events"])
            self.spikes.load_state(values["spikes"])


def train(config: RunConfig, stage: Stage, *, initial: Path | None = None) -> Path | None:
    """Run `stage` of `config` to its end, or continue it from the newest checkpoint in training.output.

    Of several processes, which a launcher started, all call it; the first one speaks and writes for all, and an error
    of one ends all. A first SIGTERM or SIGINT to any of them ends the run early but in order: the step is finished and
    saved. Output that nobody reads any more ends nothing. Main thread only.

    Args:
        config: the run.
        stage: "pretrain" starts from random weights, "refine" from a pretrained model.
        initial: for "refine": a pretraining run's folder, or one of its checkpoints.

    Returns:
        The newest checkpoint; None when stopped before the first step.

    Raises:
        UserError: anything in config, data, checkpoints, disk or environment that forbids the run.
    """
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.training.seed)
    folder = RunFolder(Path(config.training.output))
    with (
        lasting_output(),
        open_mesh(config.parallel, config.training.device) as mesh,
        folder if mesh.is_first else nullcontext(),
        GracefulStop(ECHO_SECONDS if mesh.world > 1 else 0.0) as stop,
    ):
        try:
            saved = _find_saved(config, stage, initial, folder, mesh)
            steps = config.refinement.steps if stage == "refine" else config.training.steps
            if saved is not None and saved.values["step"] == steps:
                if mesh.is_first:
                    announce_end(folder, f"nothing to do: {saved.path} is the end of this run, step {steps}/{steps}")
                return saved.path
            run = Run(config, stage, mesh, folder)
            begin = run.start(initial) if saved is None else run.resume(saved)
            metrics = None
            if mesh.is_first:
                folder.write_config(config)
                announce_start(config, run.engine, run.data, folder, begin)
                metrics = MetricsWriter(folder.metrics, folder.tensorboard, run.progress.reported_step)
                for damage in [] if saved is None else saved.damaged:
                    metrics.event(run.progress.reported_step, "damaged_checkpoint", {"damage": damage})
            try:
                run.loop(metrics, stop)
            finally:
                if metrics is not None:
                    metrics.close()
            run.engine.close()
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
            signal = stop.requested or "a signal to another rank"
            headline = f"stopped by {signal} after step {run.progress.step}/{run.steps}: "
            headline += f"saved {run.checkpoint}" if run.checkpoint else "nothing to save yet"
            headline += "; the same command continues the run"
        if mesh.is_first:
            announce_end(folder, headline)
        return run.checkpoint


@dataclass(frozen=True)
class Found:
    """A checkpoint that a run may continue from."""

    path: Path
    values: dict[str, Any]
    damaged: list[str]
    """What is wrong with newer ones; on the first rank."""


class Run:
    """A stage of a config on a mesh: what is trained, on what, and how far it is. The same on every rank."""

    def __init__(self, config: RunConfig, stage: Stage, mesh: Mesh, folder: RunFolder) -> None:
        self.mesh = mesh
        self.config = config
        self.stage = stage
        self.folder = folder
        self.data = open_run_data(config, stage)
        model = LanguageModel(config.model, generator=torch.Generator().manual_seed(config.training.seed))
        self.engine = build_engine(model, config, stage, mesh, eod=self.data.eod)
        if mesh.dp > 1:
            self.data.loader.rows = self.engine.rows
        self.steps = self.engine.steps
        self.tiers = tier_capacities(config.model, config.elastic)
        self.progress = Progress()
        self.checkpoint: Path | None = None
        """The newest checkpoint that is on disk."""
        kept = config.checkpoint
        self.writer = CheckpointWriter(folder.checkpoints, mesh, keep_last=kept.keep_last, keep_every=kept.keep_every)
        self.source: dict[str, Any] | None = None
        """Refinement: the record of the pretrained model."""
        self._saved_step = 0
        self._time_left = TimeLeft()
        self._steps_here = 0
        self._stopping = False
        """Whether the ranks have agreed to stop."""

    def start(self, initial: Path | None) -> str:
        """Take a new run's parameters from where they come; returns in words from where."""
        if self.stage == "pretrain":
            return f"starting from random weights, seed {self.config.training.seed}"
        tensors, self.source = load_source(initial, self.config.model)
        self.engine.load_model(tensors)
        return f"refining {self.source['path']}, step {self.source['step']}"

    def resume(self, saved: Found) -> str:
        """Go on where `saved` was; returns in words where."""
        load_into(self.engine, saved.path)
        self.data.loader.load_state(saved.values["data"])
        self.progress.load_state(saved.values["progress"])
        self.source, self.checkpoint = saved.values["source"], saved.path
        self._saved_step = self.progress.step
        if not self.progress.reported:  # a progress line comes before this process has a step to judge by
            self._time_left.add_step(self.progress.seconds / self.progress.step)
        return f"continuing from {saved.path}, step {self.progress.step}/{self.steps}"

    def loop(self, metrics: MetricsWriter | None, stop: GracefulStop) -> None:
        """Step until all steps are done or `stop` is requested; the last step is saved in either case.

        Who asks for a stop does not wait for a validation: it is left to the run that continues this one.
        """
        save_every = self.config.checkpoint.save_every
        with self.writer:
            if not self.progress.reported and not self._must_stop(stop):
                self._report(metrics)
            while self.progress.step < self.steps and not self._must_stop(stop):
                self._train_step(stop)
                self._tell(self.writer.poll())
                step, last = self.progress.step, self.progress.step == self.steps
                compare_every = self.config.training.compare_every
                if compare_every and step % compare_every == 0:
                    self.engine.compare_replicas()
                if last or not self._must_stop(stop) or not self._validation_due():
                    self._report(metrics)
                if last or (save_every and step % save_every == 0):
                    self._save(metrics)
            if self._saved_step < self.progress.step:
                self._save(metrics)
            self._tell(self.writer.wait())

    def _must_stop(self, stop: GracefulStop) -> bool:
        """Whether a stop is due: of one process at once, of several when all have learnt of it in a step."""
        return self._stopping if self.mesh.world > 1 else stop.requested is not None

    def _report(self, metrics: MetricsWriter | None) -> None:
        """Do what is due after this step, short of saving."""
        for event in self.progress.events:
            if metrics is not None:
                metrics.event(self.progress.step, event["kind"], event)
        self.progress.events = []
        if self.progress.step % self.config.training.log_every == 0 or self.progress.step == self.steps:
            self._log(metrics)
        if self._validation_due():
            self._validate(metrics)
        self.progress.reported = True

    def _validation_due(self) -> bool:
        step, every = self.progress.step, self.config.training.validate_every
        return bool(self.data.validation and every and (step % every == 0 or step == self.steps))

    def _train_step(self, stop: GracefulStop) -> None:
        begin = time.perf_counter()
        first_sample = self.data.loader.consumed_samples
        tokens = self.data.loader.next_batch()
        try:
            report = self.engine.train_step(self.progress.step, tokens, stop=lambda: stop.requested is not None)
        except UserError as error:
            intact = f"the last checkpoint is intact: {self.checkpoint}" if self.checkpoint else "none was saved yet"
            raise UserError(f"{error}; {intact}") from None
        seconds = time.perf_counter() - begin
        progress = self.progress
        progress.step += 1
        progress.reported = False
        progress.tokens += report.tokens if report.skipped is None else 0
        self._stopping = report.stop
        self._judge(report, first_sample)
        progress.seconds += seconds
        progress.window.add(report, seconds)
        self._time_left.add_step(seconds)
        self._steps_here += 1
        if self._steps_here == PACE_AFTER and progress.step < self.steps:
            self._say(f"pace: {seconds:.2f} s a step, about {self._left()} to go")

    def _judge(self, report: StepReport, first_sample: int) -> None:
        """Tell of a step that was skipped, or whose loss jumped, and note it for the log."""
        progress, skip = self.progress, report.skipped
        if skip is not None:
            progress.skipped += 1
            samples = None if skip.rows is None else [first_sample + row for row in skip.rows]
            where = f", samples {samples[0]} to {samples[1] - 1} of the run" if samples else ""
            self._say(f"step {progress.step}: skipped: {skip}{where}; {progress.skipped} skipped so far")
            event = {"micro_batch": skip.micro_batch, "samples": samples, "capacity": skip.capacity}
            progress.events.append({"kind": "skip", **event, "parameters": list(skip.parameters[:8])})
            return
        loss = report.loss_by_capacity.get(budget_label(FULL, self.config.elastic), report.loss)
        expected = progress.spikes.add(loss)
        if expected is not None:
            self._say(
                f"step {progress.step}: the loss jumped to {loss:.4f} from about {expected:.4f} (gradient norm "
                f"{report.grad_norm:.2f}, from sample {first_sample} of the run on)"
            )
            figures = {"loss": loss, "expected": expected, "grad_norm": report.grad_norm}
            progress.events.append({"kind": "spike", **figures, "first_sample": first_sample})

    def _say(self, text: str) -> None:
        if self.mesh.is_first:
            print(text, flush=True)

    def _log(self, metrics: MetricsWriter | None) -> None:
        device, peak = self.mesh.device, None
        if (one := peak_tflops(device_name(device), self.config.training.precision)) is not None:
            peak = one * self.mesh.world
        record = {**self.progress.window.take(peak), "tokens": self.progress.tokens, "memory_mib": None}
        if device.type == "cuda":  # all that the allocator took, recorded passes included, of the first rank
            record["memory_mib"] = torch.cuda.max_memory_reserved(device) / 2**20
        if self.mesh.world > 1:
            record["ranks"] = self.engine.times.take()
        if metrics is not None:
            metrics.step(self.progress.step, record)
        self._say(progress_line(self.progress.step, self.steps, record, self._left()))

    def _validate(self, metrics: MetricsWriter | None) -> None:
        begin = time.perf_counter()
        losses = {}
        for tier in self.config.training.validation_tiers:
            loss = losses[tier] = self.engine.evaluate(self.data.validation, self.tiers[tier])
            if not math.isfinite(loss):
                raise UserError(
                    f"step {self.progress.step}: validation loss of {tier} is {loss}; the last checkpoint, "
                    f"{self.checkpoint}, is of before this step"
                )
        if metrics is not None:
            metrics.validation(self.progress.step, losses)
        seconds = time.perf_counter() - begin
        self._time_left.add_overhead(seconds)
        self._say(f"validation after step {self.progress.step} ({format_duration(seconds)}):")
        self._say(validation_table(self.config, self.tiers, losses))

    def _save(self, metrics: MetricsWriter | None) -> None:
        begin = time.perf_counter()
        if metrics is not None:
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
        self.writer.save(self.progress.step, engine_pieces(self.engine), values)
        if self.mesh.device.type == "cpu":  # the same cores would write and train
            self._tell(self.writer.wait())
        self._saved_step = self.progress.step
        self._time_left.add_overhead(time.perf_counter() - begin)

    def _tell(self, done: list[Saved]) -> None:
        """Say which saves have come to their end."""
        for saved in done:
            self.checkpoint = saved.path
            self._say(f"saved {saved.path} ({format_duration(saved.seconds)})")

    def _left(self) -> str:
        return format_duration(self._time_left.seconds(self.steps - self.progress.step))


def _find_saved(
    config: RunConfig, stage: Stage, initial: Path | None, folder: RunFolder, mesh: Mesh
) -> Found | None:  # fmt: skip
    """The newest checkpoint in `folder`, held to belong to this very run; None in a new folder."""
    damaged: list[str] = []
    path = folder.newest_checkpoint(mesh, damaged)
    if path is None:
        return None
    values = read_values(path)
    refuse_another_run(path, values, config, stage)
    if stage == "refine" and mesh.is_first:
        check_source(initial, values["source"], folder.path)
    return Found(path, values, damaged)
