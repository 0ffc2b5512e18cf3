"""Launch options of kernels: where they are looked up, and what is said of tables that are wrong."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_essh.errors import UserError
from megatron_essh.ops import tuning
from megatron_essh.ops.tuning import Entry, Table, declare, options, overriding, read_table, table_name, write_table

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KERNEL = "window_attention.fake"  # an operator that there is, a kernel that there is not
CHOICES = {"BLOCK": (16, 32, 64), "num_warps": (1, 2, 4), "num_stages": (1, 2)}
MADE = {"torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-30", "command": "python tools/tune_kernels.py"}


def entry(width: int, **chosen: int) -> dict[str, Any]:
    chosen = {"BLOCK": 16, "num_warps": 1, "num_stages": 1} | chosen
    return {"class": {"modes": 8, "width": width}, "options": chosen, "microseconds": 12.5}


def content(*entries: dict[str, Any]) -> dict[str, Any]:
    kernels = {KERNEL: list(entries)} if entries else {}
    return {"schema": 1, "device": "NVIDIA H200", "capability": [9, 0], "made": MADE, "kernels": kernels}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes the GPU one of a name and capability, with tables shipped for it and of the user's, one kernel declared."""
    for name in ("_kernels", "_tables", "_found", "_overrides"):
        monkeypatch.setattr(tuning, name, {})
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path)
    monkeypatch.delenv(tuning.USER_TABLE, raising=False)
    declare(
        KERNEL,
        shape_class=("modes", "width"),
        defaults=lambda modes, width: {"BLOCK": 64, "num_warps": 4 if width > 32 else 2, "num_stages": 2},
        choices=CHOICES,
    )

    def be(
        name: str = "NVIDIA H200",
        capability: tuple[int, int] = (9, 0),
        shipped: dict[str, Any] | None = None,
        user: Any = None,
    ) -> None:
        monkeypatch.setattr(tuning, "_describe", lambda device: (name, capability))
        for table in ("h200", "a100", "b300"):
            (tmp_path / f"{table}.json").write_text(json.dumps(shipped or content()))
        if user is not None:
            path = tmp_path / "user.json"
            path.write_text(user if isinstance(user, str) else json.dumps(user))
            monkeypatch.setenv(tuning.USER_TABLE, str(path))

    return be


# -- look-up ---------------------------------------------------------------------------------------------------------


def test_a_class_on_record_takes_its_options_and_any_other_the_declared_defaults(
    machine: Callable[..., None],
) -> None:
    machine(shipped=content(entry(32, BLOCK=32, num_warps=4)))
    assert options(KERNEL, GPU, modes=8, width=32) == {"BLOCK": 32, "num_warps": 4, "num_stages": 1}
    assert options(KERNEL, GPU, width=32, modes=8) == {"BLOCK": 32, "num_warps": 4, "num_stages": 1}
    assert options(KERNEL, GPU, modes=8, width=16) == {"BLOCK": 64, "num_warps": 2, "num_stages": 2}
    assert options(KERNEL, GPU, modes=16, width=64) == {"BLOCK": 64, "num_warps": 4, "num_stages": 2}


def test_a_cpu_has_the_defaults_whatever_tables_say(machine: Callable[..., None]) -> None:
    machine(shipped=content(entry(32)), user="not a table")
    assert options(KERNEL, CPU, modes=8, width=32) == {"BLOCK": 64, "num_warps": 2, "num_stages": 2}


def test_the_users_table_goes_before_the_shipped_one_for_the_classes_that_it_has(machine: Callable[..., None]) -> None:
    machine(shipped=content(entry(32, num_warps=2), entry(64, num_warps=2)), user=content(entry(32, num_warps=4)))
    assert options(KERNEL, GPU, modes=8, width=32)["num_warps"] == 4
    assert options(KERNEL, GPU, modes=8, width=64)["num_warps"] == 2


def test_a_second_look_reads_no_file(machine: Callable[..., None], tmp_path: Path) -> None:
    machine(shipped=content(entry(32)))
    first = options(KERNEL, GPU, modes=8, width=32)
    (tmp_path / "h200.json").unlink()
    assert options(KERNEL, GPU, modes=8, width=32) is first
    assert options(KERNEL, GPU, modes=8, width=64)["num_warps"] == 4  # another class: the file is known already


@pytest.mark.parametrize(
    ("name", "capability", "table"),
    [
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA H200 NVL", (9, 0), "h200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h200"),
        ("NVIDIA GH200 480GB", (9, 0), "h200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA B200", (10, 0), "b300"),
        ("NVIDIA GB200", (10, 0), "b300"),
        ("NVIDIA B300 SXM6 AC", (10, 3), "b300"),
        ("NVIDIA GB300", (10, 3), "b300"),
        ("NVIDIA H20", (9, 0), "h200"),
        ("NVIDIA RTX A1000", (8, 6), "a100"),
        ("NVIDIA L40S", (8, 9), "a100"),
        ("Tesla T4", (7, 5), "a100"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "b300"),
    ],
)
def test_a_device_is_served_by_the_table_of_its_kind_or_of_its_capability(
    name: str, capability: tuple[int, int], table: str
) -> None:
    assert table_name(name, capability) == table


# -- pipelining ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)])
def test_nothing_is_pipelined_from_capability_10_on(machine: Callable[..., None], capability: tuple[int, int]) -> None:
    machine("NVIDIA B300", capability)
    assert options(KERNEL, GPU, modes=8, width=32)["num_stages"] == 1
    with overriding({KERNEL: {"num_stages": 2}}), pytest.raises(ValueError, match="num_stages 2 on compute capability"):
        options(KERNEL, GPU, modes=8, width=32)


@pytest.mark.parametrize("made_on", [[9, 0], [10, 3]])
def test_a_table_that_pipelines_there_is_refused_whatever_it_says_of_its_origin(
    machine: Callable[..., None], made_on: list[int]
) -> None:
    pipelining = content(entry(64), entry(32, num_stages=2)) | {"device": "NVIDIA B300", "capability": made_on}
    machine("NVIDIA B300", (10, 3), user=pipelining)
    with pytest.raises(UserError, match=rf"user.json: kernels.{KERNEL}\[1\].options.num_stages: got 2"):
        options(KERNEL, GPU, modes=8, width=16)


# -- overriding ------------------------------------------------------------------------------------------------------


def test_an_override_holds_inside_in_every_thread_and_only_for_what_it_names(machine: Callable[..., None]) -> None:
    machine(shipped=content(entry(32, BLOCK=32)))
    before = options(KERNEL, GPU, modes=8, width=32)
    seen = []
    with overriding({KERNEL: {"num_warps": 4}}):
        thread = threading.Thread(target=lambda: seen.append(options(KERNEL, GPU, modes=8, width=32)))
        thread.start()
        thread.join()
        with overriding({KERNEL: {"num_warps": 2, "BLOCK": 64}}):
            assert options(KERNEL, GPU, modes=8, width=32) == {"BLOCK": 64, "num_warps": 2, "num_stages": 1}
        assert options(KERNEL, GPU, modes=8, width=32) == {"BLOCK": 32, "num_warps": 4, "num_stages": 1}
        assert tuning.looked_up() == {(KERNEL, (("modes", 8), ("width", 32)))}
    assert seen == [{"BLOCK": 32, "num_warps": 4, "num_stages": 1}]
    assert options(KERNEL, GPU, modes=8, width=32) == before == {"BLOCK": 32, "num_warps": 1, "num_stages": 1}


def test_an_override_ends_with_an_error_inside_and_refuses_what_the_kernel_does_not_take(
    machine: Callable[..., None],
) -> None:
    machine()
    with pytest.raises(ZeroDivisionError), overriding({KERNEL: {"num_warps": 1}}):
        raise ZeroDivisionError
    assert options(KERNEL, GPU, modes=8, width=32)["num_warps"] == 2
    for wrong in ({"num_warps": 8}, {"WIDTH": 16}):
        with pytest.raises(ValueError, match="is not among its choices"), overriding({KERNEL: wrong}):
            pass
    with pytest.raises(KeyError), overriding({"window_attention.other": {}}):
        pass


# -- bad files -------------------------------------------------------------------------------------------------------


def change(path: str, value: Any) -> dict[str, Any]:
    """A good table with one place of it, words and numbers between slashes, set to `value`, or taken out if None."""
    table = copy.deepcopy(content(entry(32), entry(64)))
    place: Any = table
    *inner, last = [int(word) if word.isdecimal() else word for word in path.split("/")]
    for word in inner:
        place = place[word]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return table


FIRST = f"kernels/{KERNEL}/0"


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("{", "not a table of launch options: Expecting property name"),
        ('{"schema": 1, "schema": 1}', "'schema' is given twice"),
        ("[]", "the file: must be an object"),
        (change("schema", 2), "schema: got 2, this version reads 1"),
        (change("device", None), "device: missing"),
        (change("device", ""), "device: must be a text, got ''"),
        (change("device", "NVIDIA A100-SXM4-80GB"), "device: made on 'NVIDIA A100-SXM4-80GB'"),
        (change("capability", [9]), "capability: must be two whole numbers"),
        (change("notes", "fast"), "notes: unknown field; known are schema"),
        (change("made/date", None), "made.date: missing"),
        (change("made/torch", 2.11), "made.torch: must be a text, got 2.11"),
        (content(entry(32)) | {"made": None}, "made: must say how the entries were measured"),
        (change("kernels", []), "kernels: must be an object, got []"),
        (change("kernels/no_operator.outputs", []), "kernels.no_operator.outputs: no operator of this version"),
        (change("kernels/outputs", []), "kernels.outputs: no operator of this version"),
        (change("kernels/window_attention.other", []), f"no such kernel; window_attention has {KERNEL}"),
        (change(f"kernels/{KERNEL}", {}), f"kernels.{KERNEL}: must be a list"),
        (change(f"{FIRST}/class", None), f"kernels.{KERNEL}[0].class: missing"),
        (change(f"{FIRST}/class/width", 64), f"kernels.{KERNEL}[1].class: {{'modes': 8, 'width': 64}} stands twice"),
        (change(f"{FIRST}/class/width", 32.0), f"kernels.{KERNEL}[0].class.width: must be a whole number, got 32.0"),
        (change(f"{FIRST}/class/length", 2048), f"kernels.{KERNEL}[0].class: must give modes, width, got modes, width"),
        (change(f"{FIRST}/options/num_warps", None), f"kernels.{KERNEL}[0].options.num_warps: missing"),
        (change(f"{FIRST}/options/num_warps", True), "options.num_warps: must be a whole number, got True"),
        (change(f"{FIRST}/options/num_warps", 3), f"options.num_warps: got 3, {KERNEL} takes 1, 2, 4"),
        (change(f"{FIRST}/options/num_ctas", 1), f"options.num_ctas: {KERNEL} takes no such option"),
        (change(f"{FIRST}/microseconds", 0), "microseconds: must be a positive number, got 0"),
        (change(f"{FIRST}/microseconds", "12"), "microseconds: must be a positive number, got '12'"),
    ],
)
def test_a_wrong_table_of_the_users_is_one_error_that_names_file_field_and_value(
    machine: Callable[..., None], tmp_path: Path, user: Any, said: str
) -> None:
    machine(user=user)
    with pytest.raises(UserError) as caught:
        options(KERNEL, GPU, modes=8, width=32)
    assert str(caught.value).startswith(str(tmp_path / "user.json"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_not_there_is_an_error_that_names_the_variable(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    monkeypatch.setenv(tuning.USER_TABLE, str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match=r"absent.json \(named by ESSH_TUNED\): No such file"):
        options(KERNEL, GPU, modes=8, width=32)


# -- declaring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ({"BLOCK": 16, "num_warps": 3, "num_stages": 1}, "num_warps: got 3"),
        ({"BLOCK": 16, "num_warps": 1}, "num_stages: missing"),
        ({"BLOCK": 16, "num_warps": 1, "num_stages": 1, "WIDTH": 8}, "WIDTH: .* takes no such option"),
    ],
)
def test_defaults_are_held_to_the_choices(machine: Callable[..., None], defaults: dict[str, int], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        declare("window_attention.second", shape_class=(), defaults=defaults, choices=CHOICES)


def test_a_kernel_is_asked_for_by_the_class_that_it_declared(machine: Callable[..., None]) -> None:
    machine()
    with pytest.raises(AssertionError, match="has class"):
        options(KERNEL, GPU, modes=8)
    with pytest.raises(AssertionError, match="without having declared any"):
        options("window_attention.second", GPU)


# -- table files -----------------------------------------------------------------------------------------------------


def test_a_written_table_is_read_back_and_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "table.json"
    entries = tuple(
        Entry({"modes": 8, "width": width}, {"num_warps": 2, "num_stages": 1}, 31.5) for width in (16, 32, 128)
    )
    table = Table("NVIDIA H200", (9, 0), MADE, {KERNEL: entries, "window_attention.second": entries[:1]})
    write_table(path, table)
    assert read_table(path) == table
    assert sum("class" in line for line in path.read_text().splitlines()) == 4
    other = Table("NVIDIA B300", (10, 3), None, {})
    with pytest.raises(UserError, match=r"table.json exists.*--force"):
        write_table(path, other)
    assert read_table(path) == table
    write_table(path, other, force=True)
    assert read_table(path) == other


@pytest.mark.parametrize("kind", ["h200", "a100", "b300"])
def test_a_shipped_table_is_of_its_device_and_holds_what_the_kernels_take(kind: str) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64")
    path = tuning.SHIPPED / f"{kind}.json"
    table = read_table(path)
    assert table_name(table.device, table.capability) == kind
    for operator in {kernel.partition(".")[0] for kernel in table.kernels}:
        importlib.import_module(f"megatron_essh.ops.{operator}.triton")
        tuning.check_operator(path, table, operator)


def test_an_installed_package_has_the_shipped_tables(tmp_path: Path) -> None:
    words = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path]
    subprocess.run([sys.executable, "setup.py", "-q", *words], cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / tuning.SHIPPED.relative_to(ROOT)
    assert {path.name for path in built.iterdir()} == {"h200.json", "a100.json", "b300.json"}
