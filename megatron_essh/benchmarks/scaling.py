"""How training scales over the GPUs of one machine: every layout that fits, one after another, within a time budget.

A launch is one config on one layout: as many processes as the layout has GPUs, each of which runs `scaling_rank.py`.
Launches go by importance, so that what a budget has no time for is the least important; what a launch has found when
its time is over, or when it fails, stays. Speed and memory stand beside what `parallel/prediction.py` and
`parallel/planning.py` say of the same layout, as `tools/plan_run.py` does.

Communication is what the profiler sees on the GPUs: the time in which NCCL's kernels run and nothing else does, the
wait for a slower rank included. A step less one GPU's step would serve for replicas alone: a tensor-parallel rank's
products are narrower than any that one GPU runs, so that there is no step of the same work to subtract. For replicas
it stands beside the profile. Exchanges are never left out to find what they cost.
"""

from __future__ import annotations

import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_essh.benchmarks.scaling_processes import Launcher, Processes
from megatron_essh.benchmarks.scaling_rank import Task
from megatron_essh.benchmarks.training import make_case, with_batches
from megatron_essh.config import RunConfig, config_to_mapping
from megatron_essh.errors import UserError
from megatron_essh.parallel import planning, prediction
from megatron_essh.parallel.dealing import deal, deal_in_step
from megatron_essh.parallel.imbalance import lost, plan_costs
from megatron_essh.parallel.rates import Rates

END = 5.0
"""Seconds of the budget that are kept for the end: processes to stop, files to remove."""
MOST_OF_BUDGET = 1 / 3
"""Of the budget, the most that one launch may take: one that hangs must not take all the others' time."""
TOLERANCES = {"fp32": (2e-5, 1e-3), "bf16": (5e-3, 0.05)}
"""By precision, the relative differences that losses and gradient norms may have; those of tests/parallel."""
CAPACITIES = ("full", "mix")


@dataclass(frozen=True)
class ScalingLayout:
    """A layout of one machine's GPUs."""

    tp: int
    dp: int
    zero_stage: int = 0
    """0: the native engine."""

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        """As --layout takes it; `one` for one GPU."""
        if self.gpus == 1:
            return "one"
        if self.zero_stage:
            return f"zero{self.zero_stage}"
        return "dp" if self.tp == 1 else f"tp{self.tp}"

    @property
    def label(self) -> str:
        """As tables show it."""
        if self.gpus == 1:
            return "one"
        parts = [f"tp {self.tp}" if self.tp > 1 else "", f"dp {self.dp}" if self.dp > 1 else ""]
        return " x ".join(filter(None, parts)) + (f", ZeRO {self.zero_stage}" if self.zero_stage else "")

    @property
    def plan(self) -> planning.Layout:
        """As the planner knows it."""
        return planning.Layout(gpus_per_node=self.gpus, tp=self.tp, zero_stage=self.zero_stage)


ONE = ScalingLayout(1, 1)


def layouts(gpus: int, names: Sequence[str] | None, *, deepspeed: bool) -> list[ScalingLayout]:
    """Layouts of `gpus` GPUs, the most important first: all that there are, or those that `names` says.

    Args:
        deepspeed: whether DeepSpeed is installed.

    Raises:
        UserError: fewer than two GPUs, or a name that is unknown, does not fit, or needs what is not installed.
    """
    if gpus < 2:
        raise UserError(f"scaling over {gpus} GPU: at least 2; on a CPU, --processes 2 or more")
    zeros = [ScalingLayout(1, gpus, stage) for stage in (1, 3, 2)] if deepspeed else []
    tps = sorted({tp for tp in (2, 4, gpus) if gpus % tp == 0 and 1 < tp <= gpus})
    shared = [ScalingLayout(tp, gpus // tp) for tp in tps]
    known = [ScalingLayout(1, gpus), *shared[:1], *zeros[:1], *shared[1:], *zeros[1:]]
    if names is None:
        return known
    for name in names:
        if re.fullmatch(r"zero[123]", name) and not deepspeed:
            raise UserError(f"--layout {name}: DeepSpeed is not installed; pip install deepspeed, or leave it out")
        if (given := re.fullmatch(r"tp(\d+)", name)) and name not in {layout.name for layout in known}:
            raise UserError(
                f"--layout {name}: tp {given[1]} is no layout of {gpus} GPUs here; use one of "
                f"{', '.join(layout.name for layout in known)}"
            )
        if name not in {layout.name for layout in known}:
            raise UserError(f"--layout {name!r}: expected one of {', '.join(layout.name for layout in known)}")
    return [layout for layout in known if layout.name in names]


def deepspeed_installed() -> bool:
    """Whether ZeRO can be measured here."""
    return find_spec("deepspeed") is not None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and how."""

    gpus: int
    layouts: list[ScalingLayout]
    budget: float
    """Seconds for everything."""
    micro_batch: int | None
    """None: the config's."""
    accumulation: int
    """Micro-batches of each GPU in a step, where all are replicas; every layout's step has as many sequences."""
    compared: int
    timed: int
    resumed: int
    rates: Rates | None
    """None: nothing is predicted."""
    scratch: Path | None
    """Folder for checkpoints; None: the system's for temporary files."""


# -- one config on one layout ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One config on one layout, and what it is of."""

    config: str
    """What the config is called."""
    layout: ScalingLayout
    full: RunConfig
    mix: RunConfig

    @classmethod
    def of(cls, name: str, config: RunConfig, layout: ScalingLayout, settings: Settings) -> Launch:
        """Steps of as many sequences for every layout; one GPU's full ones are those of one replica of many.

        Raises:
            UserError: the config trains no mix, or its steps' slots do not divide among the replicas.
        """
        if not config.elastic.enabled:
            raise UserError(f"{name}: elastic.enabled is false, and the elastic mix is measured; set it to true")
        stage = layout.zero_stage
        parallel = replace(
            config.parallel,
            tensor=layout.tp,
            sequence_parallel=config.parallel.sequence_parallel and layout.tp > 1,
            engine="deepspeed" if stage else "native",
            zero_stage=stage or 1,
            deepspeed_config=config.parallel.deepspeed_config if stage else None,
        )
        # At the peak rate from the first step, so that few steps change the losses that are compared.
        config = replace(
            config,
            parallel=parallel,
            optimizer=replace(config.optimizer, warmup_fraction=0.0),
            data=replace(config.data, batch_ramp=None),
        )
        mix = with_batches(config, settings.micro_batch, settings.accumulation, settings.gpus)
        full = mix if layout.gpus > 1 else with_batches(config, settings.micro_batch, settings.accumulation, 1)
        planning.check_layout(mix, layout.plan)
        for capacity, of in (("full", full), ("elastic", mix)):
            make_case(of, "essh", capacity, compiled=False)
        return cls(name, layout, full, mix)

    def config_of(self, capacity: str) -> RunConfig:
        """The config whose steps are measured at `capacity`, full or mix."""
        if capacity == "full":
            return make_case(self.full, "essh", "full", compiled=False).config
        return make_case(self.mix, "essh", "elastic", compiled=False).config

    def predicted(self, capacity: str, rates: Rates | None) -> dict[str, float | None]:
        """What `tools/plan_run.py plan` says of it: ktok/s, and the peak of allocations in MiB."""
        config, plan = self.config_of(capacity), self.layout.plan
        plan = replace(plan, sequence_parallel=config.parallel.sequence_parallel)
        peak = planning.memory(config, plan).before_moments / 2**20
        rate = None
        if rates is not None and config.training.precision == "bf16":
            said = prediction.predict(config, plan, rates)
            of = said if capacity == "full" else said.mix
            rate = None if of is None else of.tokens_per_second / 1e3
        return {"ktok_per_s": rate, "peak_mib": peak}

    def imbalance(self, first: int, steps: int) -> float:
        """The busiest replica's work over the mean's in the mix's steps `first` and on, as dealt out: the mean."""
        config, dp = self.config_of("mix"), self.layout.dp
        dealing = deal_in_step if self.layout.zero_stage >= 2 else deal
        costs = plan_costs(config, first + steps)[first:]
        return statistics.fmean(1.0 + lost(step, dp, dealing) for step in costs)


def _row(launch: Launch, capacity: str) -> dict[str, Any]:
    """A row of which nothing is known yet."""
    layout = launch.layout
    return {
        "config": launch.config,
        "layout": layout.label,
        "name": layout.name,
        **asdict(layout),
        "gpus": layout.gpus,
        "capacity": capacity,
        "status": "waiting",
        "reason": None,
    }


def _measured(
    launch: Launch, capacity: str, event: dict[str, Any], one: dict[str, Any] | None, settings: Settings
) -> dict[str, Any]:
    """What a row gains from what its ranks measured; `one` is the row of one GPU."""
    layout = launch.layout
    rate = event["tokens"] / event["ms_per_step"]
    alone = None if one is None else one.get("ktok_per_s")
    said = launch.predicted(capacity, settings.rates)
    found = {key: value for key, value in event.items() if key != "part"}
    found |= {
        "ktok_per_s": rate,
        "ktok_per_s_per_gpu": rate / layout.gpus,
        "over_one_gpu": None if alone is None else rate / alone,
        "communication": None,
        "imbalance": launch.imbalance(settings.compared, settings.timed) if capacity == "mix" else None,
        "predicted": said,
        "over_predicted": None if said["ktok_per_s"] is None else rate / said["ktok_per_s"],
        # A CPU's peak is the process's, whose code and libraries no plan knows.
        "peak_over_predicted": event["peak_mib"] / said["peak_mib"] if event["peak_of"] == "allocations" else None,
        "status": "measured",
    }
    return found


def _communication(profile: dict[str, Any] | None, row: dict[str, Any], one: dict[str, Any] | None) -> dict[str, Any]:
    """Shares of a step: NCCL alone and NCCL at all, by the profiler; of replicas, what one GPU's step leaves too.

    Args:
        row: of the layout, measured.
        one: the same of one GPU.
    """
    found: dict[str, Any] = {"share": None, "share_worst_rank": None, "exchanging": None, "profile": profile}
    if profile is None:
        found["why_not"] = "the profiler saw no kernels of a GPU"
    else:
        alone = [rank["alone_ms"] / profile["ms"] for rank in profile["ranks"]]
        exchanging = [rank["exchanging_ms"] / profile["ms"] for rank in profile["ranks"]]
        found |= {
            "share": statistics.fmean(alone),
            "share_worst_rank": max(alone),
            "exchanging": statistics.fmean(exchanging),
        }
    # At full capacity one GPU runs what each replica runs, so the rest of the step is the exchanges' and the wait's.
    alone_ms = None if one is None else one.get("ms_per_step")
    same = row["capacity"] == "full" and row["tp"] == 1
    found["beyond_one_gpu"] = 1 - alone_ms / row["ms_per_step"] if same and alone_ms is not None else None
    return found


def compare(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], precision: str) -> dict[str, Any]:
    """Losses and gradient norms of the same steps on two layouts: the largest relative differences, and whether they
    are within `TOLERANCES`."""
    most_loss, most_norm = TOLERANCES[precision]

    def difference(key: str) -> float:
        pairs = [(a[key], b[key]) for a, b in zip(found, expected, strict=True)]
        different = [abs(a - b) / abs(b) for a, b in pairs]
        return max(different, key=lambda x: (x != x, x))  # a NaN is the largest

    loss, norm = difference("loss"), difference("grad_norm")
    return {
        "loss_difference": loss,
        "grad_norm_difference": norm,
        "tolerance": {"loss": most_loss, "grad_norm": most_norm},
        "equal": loss <= most_loss and norm <= most_norm,
        "losses": [row["loss"] for row in found],
        "expected": [row["loss"] for row in expected],
    }


# -- all of them -----------------------------------------------------------------------------------------------------


class Scaling:
    """All launches of some configs: `run` them once.

    Args:
        configs: by what they are called, the most important first.
        say: is given a line about every row as it comes.
        keep: is given all figures whenever there are more.
        begin: time.monotonic() when the budget began.

    Raises:
        UserError: a config does not fit a layout.
    """

    def __init__(
        self,
        configs: dict[str, RunConfig],
        settings: Settings,
        *,
        say: Callable[[str], None],
        keep: Callable[[dict[str, Any]], None],
        begin: float,
    ) -> None:
        self.settings, self._say, self._keep = settings, say, keep
        self._end = begin + settings.budget - END
        self.launches = [
            Launch.of(name, config, layout, settings)
            for layout in (ONE, *settings.layouts)
            for name, config in configs.items()
        ]
        self.rows = {(i, c): _row(launch, c) for i, launch in enumerate(self.launches) for c in CAPACITIES}
        self.checks: list[dict[str, Any]] = [
            {"config": launch.config, "layout": launch.layout.label, "name": launch.layout.name}
            for launch in self.launches
        ]
        """By launch: losses compared, checkpoint, resume, seconds."""
        self.device = ""
        self._took: dict[str, list[float]] = {}
        """By config, seconds of launches of many GPUs, their checkpoint left out."""
        self._saving: dict[str, float] = {}
        """By config, seconds of a launch's checkpoint."""

    def content(self) -> dict[str, Any]:
        """Every figure."""
        return {"device": self.device, "rows": list(self.rows.values()), "launches": self.checks}

    def dropped(self) -> list[str]:
        """What there was no time for."""
        rows = [f"{r['config']} {r['layout']} {r['capacity']}" for r in self.rows.values() if r["status"] == "dropped"]
        saves = [f"{c['config']} {c['layout']} checkpoint" for c in self.checks if "no time" in str(c.get("not_saved"))]
        return rows + saves

    def run(self, launcher: Launcher, folder: Path) -> None:
        """Launch one after another. `folder` is an empty one, for checkpoints and what processes leave."""
        for index, launch in enumerate(self.launches):
            left = self._end - time.monotonic()
            least = max(0.0, min(self._took.get(launch.config, [0.0])))
            if left <= least:
                self._drop(index, f"no time: {max(0, left):.0f} s of --budget {self.settings.budget:g} left")
                continue
            following = self.launches[index + 1].layout.gpus if index + 1 < len(self.launches) else 0
            limit = min(left, self.settings.budget * MOST_OF_BUDGET)
            self._run_one(index, launcher, folder / str(index), limit, following)

    def _run_one(self, index: int, launcher: Launcher, folder: Path, limit: float, following: int) -> None:
        launch, check, begin = self.launches[index], self.checks[index], time.monotonic()
        folder.mkdir()
        task = self._task(index, folder)
        failure, late, saving = "", False, 0.0
        for event in launcher.launch(task, limit, following):
            part = event["part"]
            if part == "begun":
                self.device, check["start_s"] = event["device"], time.monotonic() - begin
            elif part in CAPACITIES:
                self.rows[index, part] |= _measured(launch, part, event, self._one(index, part), self.settings)
                self._say(describe(self.rows[index, part]))
            elif part == "profile":
                row = self.rows[index, event["capacity"]]
                row["communication"] = _communication(event["profile"], row, self._one(index, event["capacity"]))
                self._say(f"{launch.config} {launch.layout.label} {event['capacity']}: {_talk(row['communication'])}")
            elif part == "end":
                failure, late = event["failure"], event["late"]
                if failure:
                    check["log"] = event["log"]
            else:
                saving += event["seconds"] if part == "checkpoint" else 0.0
                self._check(index, part, event)
            if part == "end":
                self._close(index, failure, late, limit)
            self._keep(self.content())
        check["seconds"] = time.monotonic() - begin
        if launch.layout.gpus > 1 and failure is None and not late:
            self._took.setdefault(launch.config, []).append(check["seconds"] - saving)
        if saving:
            self._saving[launch.config] = saving
        if task.save is not None and not self._resumes(index):
            shutil.rmtree(task.save, ignore_errors=True)  # another launch's checkpoint may need its room
        if task.resume is not None:
            shutil.rmtree(Path(task.resume).parent, ignore_errors=True)

    def _task(self, index: int, folder: Path) -> Task:
        launch, settings, check = self.launches[index], self.settings, self.checks[index]
        source = self._source(index)
        resume = None if source is None else self.checks[source].get("checkpoint", {}).get("path")
        if source is not None and resume is None:
            check["not_resumed"] = f"{self.launches[source].layout.label} left no checkpoint"
        save = self._resumes(index) or (launch.layout.gpus > 1 and self._time_to_save(index))
        if launch.layout.gpus > 1 and not save:
            check["not_saved"] = "no time for it and for what follows"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return Task(
            full=config_to_mapping(launch.full),
            mix=config_to_mapping(launch.mix),
            compared=settings.compared,
            timed=settings.timed,
            resumed=settings.resumed,
            found=str(folder / "found.jsonl"),
            failures=str(folder / "failures"),
            save=str(folder / "checkpoints") if save else None,
            resume=resume,
            world=launch.layout.gpus,
            port=port,
        )

    def _of_config(self, index: int) -> list[int]:
        """The launches of several GPUs of this launch's config."""
        config = self.launches[index].config
        return [i for i, other in enumerate(self.launches) if other.config == config and other.layout.gpus > 1]

    def _resumes(self, index: int) -> bool:
        """Whether another layout goes on from this launch's checkpoint: the first's, which is dp's if it is there."""
        of = self._of_config(index)
        return len(of) > 1 and index == of[0]

    def _source(self, index: int) -> int | None:
        """The launch from whose checkpoint this one goes on."""
        of = self._of_config(index)
        return of[0] if len(of) > 1 and index == of[1] else None

    def _time_to_save(self, index: int) -> bool:
        """Whether there is time for a checkpoint beside this launch and all that follow it."""
        saving = self._saving.get(self.launches[index].config, 0.0)
        configs = [launch.config for launch in self.launches[index:]]
        known = [statistics.fmean(took) for took in self._took.values()]
        ahead = sum(statistics.fmean(self._took[c]) if c in self._took else max(known, default=0.0) for c in configs)
        return self._end - time.monotonic() > ahead + saving

    def _one(self, index: int, capacity: str) -> dict[str, Any] | None:
        """The row of one GPU of this launch's config."""
        config = self.launches[index].config
        of = (i for i, launch in enumerate(self.launches) if launch.config == config and launch.layout == ONE)
        return self.rows[next(of), capacity]

    def _check(self, index: int, part: str, event: dict[str, Any]) -> None:
        """Take in steps to compare, a checkpoint or a resume."""
        launch, check = self.launches[index], self.checks[index]
        precision = launch.mix.training.precision
        check[part] = event
        if part == "compared" and launch.layout.gpus > 1:
            one = next(
                c for c, other in zip(self.checks, self.launches, strict=True)
                if other.config == launch.config and other.layout == ONE
            )  # fmt: skip
            if "compared" not in one:
                check["not_compared"] = "one GPU's losses are missing"
                return
            check["verified"] = compare(event["steps"], one["compared"]["steps"], precision)
            self._say(_verdict(f"{launch.config} {launch.layout.label}: steps against one GPU's", check["verified"]))
        elif part == "checkpoint":
            self._say(
                f"{launch.config} {launch.layout.label}: checkpoint of {event['bytes'] / 1e9:.2f} GB saved in "
                f"{event['save_s']:.1f} s, of which training waits {event['held_up_s']:.1f}; loaded in "
                f"{event['load_s']:.1f} s"
            )
        elif part == "resume":
            source = self._source(index)
            assert source is not None
            before = self.launches[source].layout.label
            check["resumed"] = compare(event["steps"], self.checks[source]["checkpoint"]["steps"], precision)
            check["resumed"] |= {"from": before, "load_s": event["load_s"]}
            what = f"{launch.config} {launch.layout.label}: going on from {before}'s checkpoint"
            self._say(_verdict(what, check["resumed"]))

    def _close(self, index: int, failure: str | None, late: bool, limit: float) -> None:
        """Say of the rows of a launch that ended without them why they are missing."""
        for capacity in CAPACITIES:
            row = self.rows[index, capacity]
            if row["status"] == "waiting":
                over = late and time.monotonic() >= self._end
                why = f"no time: --budget {self.settings.budget:g} was over" if over else f"not done in {limit:.0f} s"
                row["status"] = "dropped" if over else "failed"
                row["reason"] = failure or (why if late else "its processes ended without it")
                self._say(describe(row))
        check = self.checks[index]
        if failure or late:
            check["failure"] = failure or f"stopped after {limit:.0f} s"
            if all(self.rows[index, c]["status"] == "measured" for c in CAPACITIES):
                self._say(f"{check['config']} {check['layout']}: after its rows: {check['failure']}")

    def _drop(self, index: int, why: str) -> None:
        for capacity in CAPACITIES:
            self.rows[index, capacity] |= {"status": "dropped", "reason": why}
            self._say(describe(self.rows[index, capacity]))
        self._keep(self.content())

    def unequal(self) -> list[str]:
        """What differs between layouts by more than it may."""
        found = []
        for check in self.checks:
            for key, what in (("verified", "steps"), ("resumed", "resumed steps")):
                if key in check and not check[key]["equal"]:
                    found.append(f"{check['config']} {check['layout']}: {what}")
        return found


def describe(row: dict[str, Any]) -> str:
    """A row in a line."""
    what = f"{row['config']} {row['layout']} {row['capacity']}"
    if row["status"] != "measured":
        return f"{what}: {row['status']}: {row['reason']}"
    over = "" if row["over_one_gpu"] is None else f", {row['over_one_gpu']:.2f} of one GPU's"
    said = row["predicted"]["ktok_per_s"]
    beside = "" if said is None else f"; predicted {said:,.1f}, ratio {row['over_predicted']:.3f}"
    return f"{what}: {row['ktok_per_s']:,.1f} ktok/s{over}, {row['peak_mib']:,.0f} MiB{beside}"


def _talk(found: dict[str, Any]) -> str:
    """Of communication, a line."""
    if found["share"] is None:
        return f"no share of communication: {found['why_not']}"
    beyond = found["beyond_one_gpu"]
    said = "" if beyond is None else f"; beyond one GPU's step {beyond:.1%}"
    return f"NCCL alone {found['share']:.1%} of a step, {found['exchanging']:.1%} beside products too{said}"


def _verdict(what: str, found: dict[str, Any]) -> str:
    verdict = "the same" if found["equal"] else "NOT the same"
    return (
        f"{what}: {verdict}: losses differ by {found['loss_difference']:.1e}, gradient norms by "
        f"{found['grad_norm_difference']:.1e}"
    )


def measure_scaling(
    configs: dict[str, RunConfig],
    settings: Settings,
    *,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    begin: float,
) -> Scaling:
    """Run all launches of `configs`; arguments and errors as of `Scaling`."""
    scaling = Scaling(configs, settings, say=say, keep=keep, begin=begin)
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=settings.scratch) as name:
        folder = Path(name)
        with Processes(folder) as processes:
            scaling.run(processes, folder)
    return scaling
