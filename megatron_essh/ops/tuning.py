"""Launch options of the Triton kernels: which to take, where they are on record, and how to try others.

A kernel is named `<operator>.<kernel>`, its operator being a folder of `megatron_essh.ops`; that folder's `triton.py`
calls `declare` once a kernel. A launch takes `options(kernel, device=..., **shape_class)`, which looks, in this order,

1. in the table that the environment variable ESSH_TUNED names, if it is set;
2. in the table shipped for this kind of device, `tuned/<kind>.json`;
3. at the kernel's declared defaults. A CPU, where kernels run in Triton's interpreter, has these alone.

A shape class is a few padded sizes that the compiled kernel depends on anyway, never a batch or a sequence length, so
that a new length neither compiles nor looks up anything new. Nothing is ever tuned here: tools/tune_kernels.py times
candidates, through `overriding`, and writes tables.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_essh.errors import UserError
from megatron_essh.files import write_atomically

USER_TABLE = "ESSH_TUNED"
"""Environment variable that names a table of the user's own. Read when a device is first asked about."""

SCHEMA = 1
SHIPPED = Path(__file__).parent / "tuned"
UNPIPELINED_FROM = 10
"""From this major compute capability on num_stages stays 1: some pipelined kernels give wrong numbers there."""

Options = dict[str, int]
ShapeClass = dict[str, int]
Defaults = Mapping[str, int] | Callable[..., Mapping[str, int]]
Capability = tuple[int, int]


@dataclass(frozen=True)
class Kernel:
    """What `declare` was told."""

    name: str
    shape_class: tuple[str, ...]
    defaults: Defaults
    choices: dict[str, tuple[int, ...]]

    def default(self, shape_class: Mapping[str, int], capability: Capability | None) -> Options:
        """The declared defaults of a class; num_stages is 1 where `pipelined` is false."""
        chosen = self.defaults(**shape_class) if callable(self.defaults) else self.defaults
        chosen = dict(chosen) if pipelined(capability) else {**chosen, "num_stages": 1}
        fault = self.fault(chosen)
        assert fault is None, f"defaults of {self.name} at {dict(shape_class)}: {fault[0]}: {fault[1]}"
        return chosen

    def fault(self, options: Mapping[str, int]) -> tuple[str, str] | None:
        """(option, what is wrong with it) if these are not a value of every option among its choices."""
        for option, value in options.items():
            if option not in self.choices:
                return option, f"{self.name} takes no such option; it takes {', '.join(self.choices)}"
            if value not in self.choices[option]:
                return option, f"got {value}, {self.name} takes {', '.join(map(str, self.choices[option]))}"
        missing = [option for option in self.choices if option not in options]
        return (missing[0], f"missing; {self.name} takes {', '.join(self.choices)}") if missing else None


@dataclass(frozen=True)
class Entry:
    """The options of one kernel for one shape class, and the GPU time that they were chosen for."""

    shape_class: ShapeClass
    options: Options
    microseconds: float


@dataclass(frozen=True)
class Table:
    """What a table file holds."""

    device: str
    """As torch.cuda.get_device_name gives it."""
    capability: Capability
    made: dict[str, str] | None
    """Versions of torch and triton, date and command; None where nothing has been measured."""
    kernels: dict[str, tuple[Entry, ...]]


_kernels: dict[str, Kernel] = {}
_tables: dict[torch.device, tuple[Capability, list[tuple[Path, Table]]]] = {}
_overrides: dict[str, Options] = {}
_found: dict[tuple[str, torch.device, tuple[tuple[str, int], ...]], Options] = {}


def declare(
    kernel: str, *, shape_class: tuple[str, ...], defaults: Defaults, choices: Mapping[str, tuple[int, ...]]
) -> None:
    """Make a kernel's launch options known: once, where the kernel's operator is imported.

    shape_class: names of the sizes that its options may depend on.
    defaults: its options where no table has any, or a function of the class's sizes, as keywords, that returns them.
    choices: for each option it takes (num_warps and num_stages always; block sizes by the kernel's argument name) all
        values that may stand in a table, which are also those that tools/tune_kernels.py tries.
    """
    assert re.fullmatch(r"\w+\.\w+", kernel), f"a kernel is named <operator>.<kernel>, got {kernel!r}"
    assert kernel not in _kernels, f"{kernel} is declared twice"
    assert {"num_warps", "num_stages"} <= set(choices), f"{kernel} declares no num_warps or no num_stages"
    assert 1 in choices["num_stages"], f"{kernel} must have num_stages 1 among its choices"
    _kernels[kernel] = Kernel(kernel, shape_class, defaults, {name: tuple(each) for name, each in choices.items()})
    if not callable(defaults):
        _kernels[kernel].default({}, None)


def declared() -> dict[str, Kernel]:
    """All kernels declared so far, by name."""
    return dict(_kernels)


def options(kernel: str, device: torch.device, **shape_class: int) -> dict[str, int]:
    """Launch options of a declared kernel for a shape class: keyword arguments of its launch. Not to be changed.

    The first call for a kernel, device and class looks them up; every other one is a dict access.

    Raises:
        UserError: a table that cannot be read, or that holds what the kernel does not take. Names file and field.
    """
    key = (kernel, device, tuple(shape_class.items()))
    found = _found.get(key)
    if found is None:
        found = _found[key] = _look_up(kernel, device, shape_class)
    return found


@contextmanager
def overriding(chosen: Mapping[str, Mapping[str, int]]) -> Iterator[None]:
    """While entered, the named kernels take these options, in every thread, in place of theirs of the same name.

    For tuning alone: a kernel that is launched in a CUDA graph keeps the options that it was captured with.

    Raises:
        KeyError: a kernel that has not been declared.
        ValueError: an option that it does not take, or num_stages above 1 on a device that must not pipeline (when
            the kernel is launched).
    """
    global _overrides, _found
    for kernel, given in chosen.items():
        known = _kernels[kernel].choices
        for option, value in given.items():
            if value not in known.get(option, ()):
                raise ValueError(f"{kernel}: {option} = {value} is not among its choices {known.get(option, 'at all')}")
    before = _overrides, _found
    _overrides, _found = {**_overrides, **{kernel: dict(given) for kernel, given in chosen.items()}}, {}
    try:
        yield
    finally:
        _overrides, _found = before


def looked_up() -> set[tuple[str, tuple[tuple[str, int], ...]]]:
    """(kernel, its class as sorted items) of every look-up since `overriding` was entered, or since the start."""
    return {(kernel, class_key(dict(items))) for kernel, _, items in _found}


def class_key(shape_class: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """A shape class as something to compare and to look up by."""
    return tuple(sorted(shape_class.items()))


def pipelined(capability: Capability | None) -> bool:
    """Whether kernels may take num_stages above 1 on a device of this capability; None is a CPU."""
    return capability is None or capability[0] < UNPIPELINED_FROM


def table_name(name: str, capability: Capability) -> str:
    """Which shipped table serves the device of this name, or, for a name unknown to us, of this compute capability."""
    if found := re.search(r"\b(?:G?(H[12]00)|(A100)|G?(B[23]00))\b", name):
        return next(table for part, table in zip(found.groups(), ("h200", "a100", "b300"), strict=True) if part)
    return "a100" if capability[0] <= 8 else "h200" if capability[0] == 9 else "b300"


def _describe(device: torch.device) -> tuple[str, Capability]:
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def _look_up(kernel: str, device: torch.device, shape_class: ShapeClass) -> Options:
    assert kernel in _kernels, f"{kernel} asks for its launch options without having declared any"
    known = _kernels[kernel]
    assert set(shape_class) == set(known.shape_class), f"{kernel} has class {known.shape_class}, got {shape_class}"
    capability, tables = _tables_of(device) if device.type == "cuda" else (None, [])
    for path, table in reversed(tables):  # so that a fault of any is told, and the first wins
        check_operator(path, table, kernel.partition(".")[0])
    recorded = (
        entry.options
        for _, table in tables
        for entry in table.kernels.get(kernel, ())
        if entry.shape_class == shape_class
    )
    found = next(recorded, None) or known.default(shape_class, capability)
    found = {**found, **_overrides.get(kernel, {})}
    if found["num_stages"] > 1 and not pipelined(capability):
        raise ValueError(f"{kernel}: num_stages {found['num_stages']} on compute capability {capability}; it must be 1")
    return found


def _tables_of(device: torch.device) -> tuple[Capability, list[tuple[Path, Table]]]:
    """The device's compute capability and the tables that serve it, the user's first."""
    if device not in _tables:
        name, capability = _describe(device)
        kind = table_name(name, capability)
        shipped = SHIPPED / f"{kind}.json"
        tables = [(shipped, read_table(shipped, capability))]
        if user := os.environ.get(USER_TABLE):
            path = Path(user)
            table = read_table(path, capability)
            if table_name(table.device, table.capability) != kind:
                raise UserError(
                    f"{path}: device: made on {table.device!r}, which is not of a kind with this machine's {name!r}; "
                    f"run tools/tune_kernels.py here, or unset {USER_TABLE}"
                )
            tables.insert(0, (path, table))
        _tables[device] = capability, tables
    return _tables[device]


# -- table files -----------------------------------------------------------------------------------------------------


def read_table(path: Path, capability: Capability | None = None) -> Table:
    """The table in a file. What its kernels take is for `check_operator`, once these are known.

    capability: of the device that it is to serve; None for the one that it was made on.

    Raises:
        UserError: unreadable, not JSON, another schema, or a field that is missing, unknown or of the wrong kind.
    """
    hint = f" (named by {USER_TABLE})" if os.environ.get(USER_TABLE) == str(path) else ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise UserError(f"{path}{hint}: {error.strerror or error}") from None
    except ValueError as error:  # JSON's and Unicode's are both
        raise UserError(f"{path}{hint}: not a table of launch options: {error}") from None
    reader = _Reader(path)
    fields = reader.mapping(content, "", ("schema", "device", "capability", "made", "kernels"))
    if fields["schema"] != SCHEMA:
        raise reader.error("schema", f"got {fields['schema']!r}, this version reads {SCHEMA}")
    own = fields["capability"]
    if not (isinstance(own, list) and len(own) == 2 and all(type(part) is int for part in own)):
        raise reader.error("capability", f"must be two whole numbers such as [9, 0], got {own!r}")
    made = fields["made"]
    if made is not None:
        made = reader.mapping(made, "made", ("torch", "triton", "date", "command"))
        made = {name: reader.text(value, f"made.{name}") for name, value in made.items()}
    elif fields["kernels"]:
        raise reader.error("made", "must say how the entries were measured, got null")
    kernels = reader.mapping(fields["kernels"], "kernels")
    for name in kernels:
        operator, _, kernel = name.partition(".")
        if not (operator.isidentifier() and kernel and importlib.util.find_spec(f"megatron_essh.ops.{operator}")):
            raise reader.error(f"kernels.{name}", "no operator of this version has such a kernel")
    table = Table(
        device=reader.text(fields["device"], "device"),
        capability=(own[0], own[1]),
        made=made,
        kernels={name: reader.entries(value, f"kernels.{name}") for name, value in kernels.items()},
    )
    if not (pipelined(table.capability) and pipelined(capability)):
        for name, entries in table.kernels.items():
            for number, entry in enumerate(entries):
                if entry.options.get("num_stages", 1) > 1:
                    raise reader.error(
                        f"kernels.{name}[{number}].options.num_stages",
                        f"got {entry.options['num_stages']}; it must be 1 from compute capability {UNPIPELINED_FROM} "
                        "on, where pipelined kernels may give wrong numbers",
                    )
    return table


def check_operator(path: Path, table: Table, operator: str) -> None:
    """Hold what a table says of an operator's kernels to what they declare; the operator must have been imported.

    Raises:
        UserError: a kernel that the operator does not have, another class than its own, or an option it does not take.
    """
    reader = _Reader(path)
    for name, entries in table.kernels.items():
        if name.partition(".")[0] != operator:
            continue
        if name not in _kernels:
            known = ", ".join(sorted(k for k in _kernels if k.startswith(f"{operator}."))) or "none"
            raise reader.error(f"kernels.{name}", f"no such kernel; {operator} has {known}")
        kernel = _kernels[name]
        for number, entry in enumerate(entries):
            place = f"kernels.{name}[{number}]"
            if set(entry.shape_class) != set(kernel.shape_class):
                expected, got = ", ".join(kernel.shape_class), ", ".join(entry.shape_class)
                raise reader.error(f"{place}.class", f"must give {expected}, got {got or 'nothing'}")
            if fault := kernel.fault(entry.options):
                raise reader.error(f"{place}.options.{fault[0]}", fault[1])


def write_table(path: Path, table: Table, *, force: bool = False) -> None:
    """Write a table, whole or not at all; one line an entry.

    Raises:
        UserError: the file is there and `force` is false.
    """
    if path.exists() and not force:
        raise UserError(f"{path} exists; name another file, or give --force to replace it")
    made = json.dumps(table.made, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    head = {"schema": SCHEMA, "device": table.device, "capability": list(table.capability)}
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    lines.append(f'  "made": {made}')
    kernels = []
    for name, entries in sorted(table.kernels.items()):
        rows = [
            json.dumps({"class": e.shape_class, "options": e.options, "microseconds": round(e.microseconds, 1)})
            for e in sorted(entries, key=lambda entry: class_key(entry.shape_class))
        ]
        kernels.append(f"    {json.dumps(name)}: [\n      " + ",\n      ".join(rows) + "\n    ]")
    lines.append('  "kernels": ' + ("{\n" + ",\n".join(kernels) + "\n  }" if kernels else "{}"))
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_atomically(path, text.encode())


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


class _Reader:
    """Takes a file's fields for what they must be, or raises an error that names them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def error(self, field: str, problem: str) -> UserError:
        return UserError(f"{self.path}: {field}: {problem}")

    def mapping(self, value: Any, field: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(field or "the file", f"must be an object, got {value!r}")
        for name in names or ():
            if name not in value:
                raise self.error(f"{field}.{name}".lstrip("."), "missing")
        for name in value:
            if names is not None and name not in names:
                raise self.error(f"{field}.{name}".lstrip("."), f"unknown field; known are {', '.join(names)}")
        return value

    def text(self, value: Any, field: str) -> str:
        if not (isinstance(value, str) and value):
            raise self.error(field, f"must be a text, got {value!r}")
        return value

    def counts(self, value: Any, field: str) -> dict[str, int]:
        for name, number in self.mapping(value, field).items():
            if type(number) is not int or number < 0:
                raise self.error(f"{field}.{name}", f"must be a whole number, got {number!r}")
        return dict(value)

    def entries(self, value: Any, field: str) -> tuple[Entry, ...]:
        if not isinstance(value, list):
            raise self.error(field, f"must be a list, got {value!r}")
        found: dict[tuple[tuple[str, int], ...], Entry] = {}
        for number, item in enumerate(value):
            place = f"{field}[{number}]"
            fields = self.mapping(item, place, ("class", "options", "microseconds"))
            shape_class = self.counts(fields["class"], f"{place}.class")
            time = fields["microseconds"]
            if type(time) not in (int, float) or not 0 < time < float("inf"):
                raise self.error(f"{place}.microseconds", f"must be a positive number, got {time!r}")
            if class_key(shape_class) in found:
                raise self.error(f"{place}.class", f"{shape_class} stands twice")
            options = self.counts(fields["options"], f"{place}.options")
            found[class_key(shape_class)] = Entry(shape_class, options, float(time))
        return tuple(found.values())
