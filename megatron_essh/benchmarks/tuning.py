"""Trying launch options: candidates are held to an operator's reference, timed, and the best put on record.

An operator is checked and timed as a whole, forward and backward through its public function; one kernel of it at a
time takes a candidate's options. What a candidate has to be, in this order: launched without an error; within the
tests' tolerance of the fp64 reference, in every dtype that the operator serves, on several random inputs; the same
bits twice; and at least `LEAST_GAIN` faster than the options in force. A harness says, in a few lines, how to call an
operator at the sizes that a model has; `HARNESSES` holds them.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_essh.config import RunConfig
from megatron_essh.errors import UserError
from megatron_essh.model.attention import rotary_table
from megatron_essh.model.mixer import SpectralMixer
from megatron_essh.ops import tuning
from megatron_essh.ops.linear_loss import IGNORED, cross_entropy, distillation, refinement
from megatron_essh.ops.rms_norm import add_rms_norm
from megatron_essh.ops.rotary import rotate_qkv
from megatron_essh.ops.selective_scan import ModalTables, selective_scan
from megatron_essh.ops.swiglu import swiglu
from megatron_essh.ops.tuning import Capability, Entry, Kernel, Options, ShapeClass

LEAST_GAIN = 0.02
"""Share of a kernel's time that other options must save to be taken: less than that is noise."""
WARMUPS, ROUNDS, PASSES = 2, 5, 3
"""Untimed passes a candidate, times that all candidates are gone through, passes a candidate each time."""
TOLERANCES = {torch.bfloat16: (0.004, 0.005), torch.float32: (1e-5, 1e-5)}
"""What the tests allow: relative RMS errors of outputs and of gradients, by the dtype of the inputs."""

Inputs = dict[str, Tensor]
Call = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One operator at the sizes of one model."""

    operator: str
    sizes: ShapeClass
    """The padded sizes that its kernels' shape classes are made of, by the names that they declare."""
    call: Call
    """The operator's public function: takes the inputs by name, gives its outputs by name."""
    reference: Call
    """What defines it, for fp64 inputs."""
    small: Callable[[int, torch.dtype, torch.device], Inputs]
    """Inputs to check on, from a seed; gradients are taken of all that are floating-point and not `fixed`."""
    real: Callable[[torch.device], Inputs]
    """Inputs of a training micro-batch, to time."""
    fixed: tuple[str, ...] = ()
    """Floating-point inputs that no gradient reaches."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """What the GPU calls a kernel, by the declared name without the operator's, where that is not `<name>_kernel`."""
    only: str | None = None
    """The one kernel of the operator that is launched; None for all of them."""
    tolerances: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=lambda: TOLERANCES)
    """Relative RMS error allowed of outputs and of gradients, in each dtype that the operator serves.

    Options on record are for all of these dtypes.
    """
    seeds: tuple[int, ...] = (0, 1, 2)

    def kernels(self) -> list[Kernel]:
        """What it launches, as declared."""
        mine = f"{self.operator}."
        found = [k for name, k in tuning.declared().items() if name.startswith(mine)]
        return [k for k in found if self.only in (None, k.name.removeprefix(mine))]

    def shape_class(self, kernel: Kernel) -> ShapeClass:
        unknown = set(kernel.shape_class) - set(self.sizes)
        assert not unknown, f"{kernel.name} has sizes {sorted(unknown)} in its class that its harness does not give"
        return {name: self.sizes[name] for name in kernel.shape_class}

    def function(self, kernel: str) -> str:
        """What a profile of the GPU calls a kernel."""
        name = kernel.partition(".")[2]
        return self.functions.get(name, f"{name}_kernel")


@dataclass(frozen=True)
class Outcome:
    """What trying options for one kernel and class came to."""

    kernel: str
    shape_class: ShapeClass
    current: Options
    current_us: float
    best: Options
    best_us: float
    tried: int
    rejected: tuple[tuple[Options, str], ...]
    """Options that may not be used, and why."""

    @property
    def entry(self) -> Entry:
        return Entry(self.shape_class, self.best, self.best_us)


# -- harnesses -------------------------------------------------------------------------------------------------------


def _padded(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _dtype(config: RunConfig) -> torch.dtype:
    return torch.bfloat16 if config.training.precision == "bf16" else torch.float32


def _scan(config: RunConfig) -> list[Work]:
    model = config.model
    k, m, p = model.channels, model.modes, model.value_width

    def call(raw: Tensor, state: Tensor, documents: Tensor | None = None, **tables: Tensor) -> dict[str, Tensor]:
        z, leaving = selective_scan(
            raw, ModalTables(**tables), eps=model.eps, state_BKM2P=state, documents_BT=documents
        )
        return {"z": z, "leaving state": leaving}

    def small(seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        length = (65, 130, 520)[seed % 3]
        raw = normal(2, length, k, p + 3 * m)
        clocks = raw[..., p + 2 * m :]
        clocks[torch.rand(clocks.shape, generator=torch.Generator().manual_seed(seed)) < 0.01] = 80.0  # empties states
        bias = [normal(k, m), normal(k, m), normal(k, m) / 10 - 1]
        tables = [*bias, 2 * normal(k, m) - 2, 3 * normal(k, m), *(normal(k, m) for _ in range(3)), normal(k)]
        found = {"raw": raw.to(dtype), "state": normal(2, k, m, 2, p)}
        if seed % 2:
            found["documents"] = torch.arange(length).expand(2, length) // 37
        return _to(device, found | dict(zip(ModalTables._fields, tables, strict=True)))

    def real(device: torch.device) -> Inputs:
        mixer = SpectralMixer(model)
        mixer.reset_parameters(None)
        batch, length = config.training.micro_batch, config.data.sequence_length
        raw = torch.randn(batch, length, k, p + 3 * m, device=device, dtype=_dtype(config))
        state = torch.zeros(batch, k, m, 2, p, device=device)
        tables = {name: table.detach() for name, table in mixer.tables(k)._asdict().items()}
        return {"raw": raw, "state": state} | _to(device, tables)

    # A matrix product takes no fewer than 16 lanes, two a mode, or values.
    sizes = {"modes": _padded(m, 8), "width": _padded(p, 16)}
    return [Work(operator="selective_scan", sizes=sizes, call=call, reference=call, small=small, real=real)]


def _norm(config: RunConfig) -> list[Work]:
    model = config.model

    def call(x: Tensor, branch: Tensor, weight: Tensor) -> dict[str, Tensor]:
        total, normed = add_rms_norm(x, branch, weight, model.eps, branch.dtype)
        return {"sum": total, "norm": normed}

    def inputs(rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        normal = partial(torch.randn, generator=generator, device=generator.device)
        x, branch = normal(2, rows, model.d_model)
        return _to(device, {"x": x, "branch": branch.to(dtype), "weight": 1 + normal(model.d_model) / 4})

    def small(seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        return inputs(300 + seed, dtype, device, torch.Generator().manual_seed(seed))

    def real(device: torch.device) -> Inputs:
        return inputs(_positions(config), _dtype(config), device, torch.Generator(device))

    sizes = {"width": _padded(model.d_model)}
    functions = {"forward": "norm_forward_kernel", "backward": "norm_backward_kernel"}
    return [
        Work(
            operator="rms_norm",
            sizes=sizes,
            call=call,
            reference=call,
            small=small,
            real=real,
            functions=functions,
        )
    ]


def _swiglu(config: RunConfig) -> list[Work]:
    n = config.model.ff_width

    def call(gate_up: Tensor, *, observed: bool) -> dict[str, Tensor]:
        sums = torch.zeros(n, device=gate_up.device) if observed else None
        units = swiglu(gate_up, sums)
        return {"units": units} | ({} if sums is None else {"square sums": sums})

    def small(seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return _to(device, {"gate_up": (2 * torch.randn(70 + seed, 2 * n, generator=generator)).to(dtype)})

    def real(device: torch.device) -> Inputs:
        return {"gate_up": torch.randn(_positions(config), 2 * n, device=device, dtype=_dtype(config))}

    return [
        Work(
            operator="swiglu",
            sizes={"statistics": int(observed)},
            call=partial(call, observed=observed),
            reference=partial(call, observed=observed),
            small=small,
            real=real,
            functions={"forward": "swiglu_forward_kernel", "backward": "swiglu_backward_kernel"},
        )
        for observed in (False, True)
    ]


def _rotary(config: RunConfig) -> list[Work]:
    model = config.model
    if not model.attention_layers:
        return []

    def call(qkv: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
        return dict(zip("qkv", rotate_qkv(qkv, cos, sin), strict=True))

    def inputs(batch: int, length: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        place = generator.device
        shape = (batch, length, model.n_heads, 3, model.head_dim)
        qkv = torch.randn(shape, generator=generator, device=place).to(dtype)
        cos, sin = rotary_table(torch.arange(length, device=place), model.head_dim, model.rope_base, torch.float32)
        return {"qkv": qkv, "cos": cos, "sin": sin}

    def small(seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        return _to(device, inputs(2, 70 + seed, dtype, torch.Generator().manual_seed(seed)))

    def real(device: torch.device) -> Inputs:
        return inputs(config.training.micro_batch, config.data.sequence_length, _dtype(config), torch.Generator(device))

    return [
        Work(
            operator="rotary",
            sizes={"half": _padded(model.head_dim // 2)},
            call=call,
            reference=call,
            small=small,
            real=real,
            fixed=("cos", "sin"),
            functions={"rotate": "rotary_kernel"},
        )
    ]


def _linear_loss(config: RunConfig) -> list[Work]:
    vocabulary, width, chunk = config.model.vocab_size, config.model.d_model, config.training.loss_chunk
    losses: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
        "cross_entropy": cross_entropy,
        "distillation": partial(distillation, ce_weight=0.7, kl_weight=0.3),
        "refinement": partial(refinement, tv_weight=0.5),
    }

    def inputs(name: str, rows: int, d: int, generator: torch.Generator) -> Inputs:
        place = generator.device
        hidden = torch.randn(2, rows, d, generator=generator, device=place)
        weight = 1.5 * d**-0.5 * torch.randn(vocabulary, d, generator=generator, device=place)
        labels = torch.randint(vocabulary, (rows,), generator=generator, device=place)
        labels[::5] = IGNORED
        states = {"hidden": hidden[0]} if name == "cross_entropy" else {"hidden": hidden[0], "other": hidden[1]}
        return states | {"weight": weight, "labels": labels}

    def cast(found: Inputs, dtype: torch.dtype, device: torch.device) -> Inputs:
        return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in found.items()}

    def small(name: str, seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        return cast(inputs(name, 70 + seed, 64, torch.Generator().manual_seed(seed)), dtype, device)

    def real(name: str, device: torch.device) -> Inputs:
        return cast(inputs(name, _positions(config), width, torch.Generator(device)), _dtype(config), device)

    def call(name: str, hidden: Tensor, weight: Tensor, labels: Tensor, other: Tensor | None = None) -> Inputs:
        states = (hidden,) if other is None else (hidden, other)
        found = losses[name](*states, weight, labels, chunk=chunk)
        values = (found,) if isinstance(found, Tensor) else found
        return {f"loss {number}": value for number, value in enumerate(values)}

    return [
        Work(
            operator="linear_loss",
            only=name,
            sizes={"columns": _padded(vocabulary)},
            call=partial(call, name),
            reference=partial(call, name),
            small=partial(small, name),
            real=partial(real, name),
            tolerances={torch.bfloat16: (0.004, 0.02), torch.float32: (1e-5, 1e-5)},  # bf16 logits
        )
        for name in losses
    ]


HARNESSES: dict[str, Callable[[RunConfig], list[Work]]] = {
    "selective_scan": _scan,
    "rms_norm": _norm,
    "swiglu": _swiglu,
    "rotary": _rotary,
    "linear_loss": _linear_loss,
}
"""By operator: the work that a model gives it, one for each set of sizes."""


def _positions(config: RunConfig) -> int:
    return config.training.micro_batch * config.data.sequence_length


def _to(device: torch.device, inputs: Inputs) -> Inputs:
    return {name: x.to(device) for name, x in inputs.items()}


def import_kernels(operators: Sequence[str]) -> None:
    """Have the operators declare their kernels.

    Raises:
        UserError: Triton is not installed.
    """
    for operator in operators:
        try:
            importlib.import_module(f"megatron_essh.ops.{operator}.triton")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise UserError("there are no kernels to tune without Triton; it is for Linux on x86-64") from None


# -- right or wrong --------------------------------------------------------------------------------------------------


def values_and_gradients(
    call: Call, inputs: Inputs, outgoing: dict[str, Tensor], fixed: Sequence[str]
) -> tuple[Inputs, Inputs]:
    """The outputs of `call` and the gradients, under `outgoing` gradients, of what it uses of its inputs."""
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point() and name not in fixed) for name, x in inputs.items()
    }
    outputs = call(**leaves)
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    differentiable = {name: y for name, y in outputs.items() if y.requires_grad}
    gradients = torch.autograd.grad(
        list(differentiable.values()),
        [leaves[name] for name in wanted],
        [outgoing[name].to(y.dtype) for name, y in differentiable.items()],
        allow_unused=True,
    )
    found = {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True) if g is not None}
    return {name: y.detach() for name, y in outputs.items()}, found


class Judge:
    """Holds an operator, under the options in force, to its reference; the reference is computed once."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work = work
        self.cases = []
        for dtype, seed in itertools.product(work.tolerances, work.seeds):
            inputs = work.small(seed, dtype, device)
            exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
            generator = torch.Generator().manual_seed(seed)
            # Values that every dtype holds, so that all get the same.
            outgoing = {
                name: torch.randn(y.shape, generator=generator).bfloat16().to(device)
                for name, y in work.reference(**exact).items()
            }
            expected = values_and_gradients(work.reference, exact, outgoing, work.fixed)
            self.cases.append((dtype, inputs, outgoing, expected))

    def fault(self) -> str | None:
        """Why the options in force are not to be used; None where nothing is wrong with them.

        Raises:
            UserError: a launch left the device unusable.
        """
        for dtype, inputs, outgoing, expected in self.cases:
            try:
                run = partial(values_and_gradients, self.work.call, inputs, outgoing, self.work.fixed)
                first, second = run(), run()
            except Exception as error:  # whatever the compiler, the driver or the kernel makes of the options
                _still_usable(inputs)
                return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            for kind, found, again, exact in zip(range(2), first, second, expected, strict=True):
                if missing := exact.keys() - found.keys():
                    return f"{', '.join(sorted(missing))}, {_short(dtype)}: missing"
                for name, value in found.items():
                    error_rms = _relative_rms(value, exact[name])
                    if not error_rms <= self.work.tolerances[dtype][kind]:
                        allowed = self.work.tolerances[dtype][kind]
                        return f"{name}, {_short(dtype)}: off by {error_rms:.2g}, allowed {allowed:g}"
                    if not torch.equal(value, again[name]):
                        return f"{name}, {_short(dtype)}: not the same bits twice"
        return None


def _relative_rms(value: Tensor, exact: Tensor) -> float:
    size = torch.linalg.vector_norm(exact)
    return float(torch.linalg.vector_norm(value.double() - exact) / size.clamp(min=1e-30))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _still_usable(inputs: Inputs) -> None:
    device = next(iter(inputs.values())).device
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise UserError(
            f"the candidate tried last broke the CUDA context ({str(error).splitlines()[0]}); nothing was written. "
            "Take its value out of the kernel's choices, or name the other kernels with --kernel"
        ) from None


# -- the search ------------------------------------------------------------------------------------------------------

Clock = Callable[[Work, str, Sequence[Options]], list[float]]
"""Microseconds that a kernel takes in one pass of the operator under each of several options."""


def candidates(kernel: Kernel, current: Options, capability: Capability | None, most: int) -> tuple[list[Options], int]:
    """Options to try beside the current ones, those that differ least first, at most `most`; how many were left out."""
    names = list(kernel.choices)
    grid = [dict(zip(names, values, strict=True)) for values in itertools.product(*kernel.choices.values())]
    allowed = [o for o in grid if o != current and (o["num_stages"] == 1 or tuning.pipelined(capability))]
    allowed.sort(key=lambda o: sum(o[name] != current[name] for name in names))
    return allowed[:most], max(0, len(allowed) - most)


def tune_kernel(
    work: Work,
    kernel: Kernel,
    judge: Judge,
    device: torch.device,
    clock: Clock,
    *,
    most: int,
    say: Callable[[str], None],
) -> Outcome:
    """Find the best options of one kernel for the work's class.

    say: is told of each candidate before it is tried, so that one that ends the process is known.

    Raises:
        UserError: the operator is wrong under the options in force, which no other options can mend.
    """
    shape_class = work.shape_class(kernel)
    current = tuning.options(kernel.name, device, **shape_class)
    with tuning.overriding({}):
        if fault := judge.fault():
            raise UserError(f"{kernel.name} {shape_class}: wrong under its present options {current}: {fault}")
        launched = tuning.looked_up()
    assert (kernel.name, tuning.class_key(shape_class)) in launched, (
        f"the harness of {work.operator} gives {kernel.name} the class {shape_class}, the launches were {launched}"
    )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    tried, left_out = candidates(kernel, current, capability, most)
    if left_out:
        say(f"{kernel.name}: {left_out} of {left_out + len(tried)} candidates left out (--most)")
    good, rejected = [current], []
    for options in tried:
        say(f"{kernel.name} {shape_class}: {options}")
        with tuning.overriding({kernel.name: options}):
            fault = judge.fault()
        if fault is None:
            good.append(options)
        else:
            rejected.append((options, fault))
    times = clock(work, kernel.name, good)
    best_us, best = min(zip(times, good, strict=True), key=lambda pair: pair[0])
    if best_us > (1 - LEAST_GAIN) * times[0]:
        best_us, best = times[0], current
    return Outcome(kernel.name, shape_class, current, times[0], best, best_us, len(tried), tuple(rejected))


def profiled_clock(work: Work, kernel: str, options: Sequence[Options]) -> list[float]:
    """The median GPU time of the kernel's launches in a pass at real size, candidates taking turns."""
    device = torch.device("cuda", torch.cuda.current_device())
    run = _pass(work, device)
    for chosen in options:
        with tuning.overriding({kernel: chosen}):
            for _ in range(WARMUPS):
                run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        for _ in range(ROUNDS):
            for chosen in options:
                with tuning.overriding({kernel: chosen}):
                    for _ in range(PASSES):
                        run()
        torch.cuda.synchronize()
    name = work.function(kernel)
    launches: list[Any] = [e for e in record.events() or () if e.name == name and e.device_type.name == "CUDA"]
    launches.sort(key=lambda event: event.time_range.start)
    each, rest = divmod(len(launches), ROUNDS * len(options) * PASSES)
    seen = f"{len(launches)} launches of {name} in {ROUNDS} x {len(options)} x {PASSES} passes"
    assert each > 0, seen
    assert rest == 0, seen
    times = [event.device_time for event in launches]
    passes = [sum(times[at : at + each]) for at in range(0, len(times), each)]
    by_option: list[list[float]] = [[] for _ in options]
    for number, time in enumerate(passes):
        by_option[number // PASSES % len(options)].append(time)
    return [statistics.median(found) for found in by_option]


def _pass(work: Work, device: torch.device) -> Callable[[], object]:
    """One forward and backward pass at real size."""
    inputs = work.real(device)
    outgoing = {name: torch.randn_like(y) for name, y in work.call(**inputs).items()}
    return partial(values_and_gradients, work.call, inputs, outgoing, work.fixed)


def whole_times(work: Work, device: torch.device, choices: Sequence[dict[str, Options]]) -> list[float]:
    """Microseconds of a whole pass at real size, captured in a CUDA graph, under each of several sets of options.

    By CUDA events, the median of rounds in which the sets take turns.
    """
    graphs = []
    run = _pass(work, device)
    for chosen in choices:
        with tuning.overriding(chosen):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in choices]
    for round_number in range(WARMUPS + 5 * ROUNDS):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_number >= WARMUPS:
                found.append(1e3 * begin.elapsed_time(end))
    return [statistics.median(found) for found in times]


def chosen_together(
    work: Work, judge: Judge, outcomes: Sequence[Outcome], times: Callable[[Sequence[dict[str, Options]]], list[float]]
) -> str | None:
    """Why the best options of the operator's kernels are not to be used all at once; None if they are to be.

    times: of a whole pass under each of several sets of options.
    """
    before = {o.kernel: o.current for o in outcomes}
    after = {o.kernel: o.best for o in outcomes}
    if before == after:
        return None
    with tuning.overriding(after):
        if fault := judge.fault():
            return fault
    slow, fast = times([before, after])
    return None if fast <= slow else f"a whole pass takes {fast:,.0f} us with them, {slow:,.0f} us without"
