"""What a user can get wrong, and how a command says so.

Every command's `main` runs inside `run_command`: a `UserError`, or an operating-system error that no code of ours
turned into one (a full disk, a missing permission), is printed as one line on standard error and ends the process
with status 2. Anything else is our own defect and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(ValueError):
    """Bad input. The message names the file, the field, the value and what would be right."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status: 0 for None, 2 for bad input."""
    try:
        status = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)  # the reader of our output went away (`| head`): nothing is wrong and nothing can be said
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status or 0)
