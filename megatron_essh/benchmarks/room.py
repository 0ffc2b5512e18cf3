"""Whether what is to be measured has room in a device's memory, and one line where it has not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_essh.errors import UserError

REMEDY = "take fewer at a time, or shorter ones"
FAILED = ("out of memory", "can't allocate memory")
"""In the message of an allocator that raises no more than a RuntimeError."""


def check_room(what: str, least: int, device: torch.device) -> None:
    """Refuse, before any of it is made, what does not fit into all of the device's memory.

    Args:
        what: begins the message.
        least: bytes that it takes at least.

    Raises:
        UserError: there are not as many.
    """
    if device.type == "cuda":
        there = torch.cuda.mem_get_info(device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if least > there:
        raise UserError(f"{what}: would take {least / 2**30:,.1f} GiB at least, more than {device} has; {REMEDY}")


@contextmanager
def within_memory(what: str, device: torch.device) -> Iterator[None]:
    """Turn an allocator's error into one line.

    Raises:
        UserError: what is done inside, on the device or for it on the host, found no memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in FAILED):
            raise
        place = device if isinstance(error, torch.OutOfMemoryError) else torch.device("cpu")
        raise UserError(f"{what}: takes more memory than {place} has; {REMEDY}") from None
