"""What a user can get wrong, and how a command says so.

Every command's `main` runs inside `run_command`: a `UserError`, or an operating-system error that no code of ours
turned into one (a full disk, a missing permission), is printed as one line on standard error and ends the process
with status 2. Anything else is our own defect and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_essh.output import discard, lasting_output


class UserError(ValueError):
    """Bad input. The message names the file, the field, the value and what would be right."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status: 0 for None, 2 for bad input."""
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what goes wrong can still be told
    except UserError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is wrong and nothing can be said.
        if sys.stdout is not None:
            discard(sys.stdout)
        sys.exit(1)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _fail(f"{place}{error.strerror or error}", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    sys.exit(status or 0)


def _fail(message: str, status: int) -> NoReturn:
    with lasting_output():
        print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
