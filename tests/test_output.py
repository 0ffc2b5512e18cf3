"""A command whose output nobody reads any more ends in order, with a status that says how it went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Buffered, as output is by default: what is written fails as late as the end of the process.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}


def unread(code: str, *, stderr_too: bool = False) -> tuple[int, str]:
    """Runs Python code with its standard output (and error) a pipe without a reader: status and error text."""
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        stdout=writer,
        stderr=writer if stderr_too else subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    return finished.returncode, finished.stderr or ""


COMMAND = "import sys\nfrom megatron_essh.errors import UserError, run_command\ndef main():\n    {}\nrun_command(main)"


@pytest.mark.parametrize("body", ["print('a')", "print('a', flush=True)", "print('a' * 100_000)"])
def test_a_command_that_only_prints_ends_silently(body) -> None:
    assert unread(COMMAND.format(body)) == (1, "")


@pytest.mark.parametrize(("body", "status"), [("raise UserError('no')", 2), ("raise KeyboardInterrupt", 130)])
def test_a_failure_keeps_its_status_when_it_cannot_be_told(body, status) -> None:
    assert unread(COMMAND.format(body), stderr_too=True) == (status, "")
    assert unread(COMMAND.format(body))[0] == status


def test_work_goes_on_behind_lasting_output(tmp_path) -> None:
    code = f"""
import sys
from pathlib import Path
from megatron_essh.output import lasting_output
with lasting_output():
    for i in range(3):
        print("x" * 10_000)
        print("told", flush=True)
        print("warned", file=sys.stderr, flush=True)
    Path({str(tmp_path / "done")!r}).touch()
    print("the rest")
print("after it")
"""
    assert unread(code, stderr_too=True) == (0, "")
    assert (tmp_path / "done").exists()


def test_output_that_is_read_passes_unchanged_and_other_errors_are_raised(capfd) -> None:
    from megatron_essh.output import lasting_output

    streams = sys.stdout, sys.stderr
    with lasting_output():
        print("out", end=" ", flush=True)
        print("err", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == streams
    assert tuple(capfd.readouterr()) == ("out ", "err\n")
    with open("/dev/full", "w") as full:
        code = "from megatron_essh.output import lasting_output\nwith lasting_output():\n    print('x', flush=True)"
        finished = subprocess.run(
            [sys.executable, "-c", code],
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert "No space left" in finished.stderr
