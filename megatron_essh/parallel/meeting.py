"""The ranks of a run find each other, or say who has not come.

The first rank hosts a store, or torchrun's agent does. Every rank leaves a word of its own there, the first one answers
each with the name of this meeting, and who has the name says so under it. So the first rank knows who is missing, and
nobody takes what a run before left in the store for a rank of this one: torchrun keeps its store when it starts the
ranks anew (--max-restarts).
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_essh.errors import UserError

NOTICE = 30.0
"""Seconds of waiting after which a rank says what it waits for; the first one again after twice as long, and so on."""
POLL = 0.1
"""Seconds between two looks at who has come."""
GRACE = 5.0
"""Seconds by which the others wait longer than the first rank, which knows more."""


def meet(rank: int, world: int, address: str, port: int, seconds: int) -> dist.Store:
    """The store of this run's `world` ranks, each of which calls this and waits for the others.

    Args:
        address: of the first rank, with `port`.
        seconds: the longest wait, parallel.timeout_seconds.

    Raises:
        UserError: not all came in time; the first rank names those that did not.
    """
    end = time.monotonic() + seconds
    where, limit = f"{address}:{port}", f"parallel.timeout_seconds {seconds}"
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    notice = threading.Timer(NOTICE, _say, [f"rank {rank} waits for an answer at {where}, for {limit}"])
    notice.daemon = True
    notice.start()
    word = secrets.token_hex(8)
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=rank == 0 and not hosted,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
        meeting = dist.PrefixStore("meeting", store)
        if rank == 0:
            notice.cancel()
            _wait_for_all(meeting, word, world, seconds, where)
            meeting.set(f"{word}/all", "here")
            return dist.PrefixStore(word, store)
        meeting.set(str(rank), word)
        name = _answer(meeting, word, end)
    except dist.DistError as error:
        what = "start a server" if rank == 0 and not hosted else "reach the first rank"
        raise UserError(
            f"rank {rank} could not {what} at {where} within {limit}; see that all {world} ranks (WORLD_SIZE) are "
            f"started and that the port is free and reachable ({_reason(error)})"
        ) from error
    finally:
        notice.cancel()
    try:
        meeting.set(f"{name}/{rank}", "here")
        _answer(meeting, f"{name}/all", end)
    except dist.DistError as error:
        raise UserError(
            f"rank {rank} reached {where}, and not all {world} ranks (WORLD_SIZE) came within {limit}; the first rank "
            f"says which did not ({_reason(error)})"
        ) from error
    return dist.PrefixStore(name, store)


def _answer(meeting: dist.Store, key: str, end: float) -> str:
    """What the first rank sets `key` to, until a little after `end`."""
    meeting.wait([key], timedelta(seconds=max(0.0, end - time.monotonic()) + GRACE))
    return meeting.get(key).decode()


def _wait_for_all(meeting: dist.Store, name: str, world: int, seconds: int, where: str) -> None:
    """The first rank's part: answer all others with `name`, until all of them have it."""
    begin, told = time.monotonic(), NOTICE
    missing, answered = list(range(1, world)), set[bytes]()
    while True:
        for rank in missing:
            if meeting.check([str(rank)]) and (word := meeting.get(str(rank))) not in answered:
                meeting.set(word.decode(), name)
                answered.add(word)
        missing = [rank for rank in missing if not meeting.check([f"{name}/{rank}"])]
        if not missing:
            return
        waited = time.monotonic() - begin
        if waited > seconds:
            raise UserError(
                f"rank 0 waited at {where} for parallel.timeout_seconds {seconds}, and of {world} ranks (WORLD_SIZE) "
                f"{_named(missing)} did not come; see that they are started with this MASTER_ADDR and MASTER_PORT, and "
                "that the port is reachable from their machines"
            )
        if waited > told:
            _say(
                f"rank 0 has waited {waited:.0f} s at {where}: of {world} ranks (WORLD_SIZE) {_named(missing)} did not "
                f"come yet; it waits for parallel.timeout_seconds {seconds}"
            )
            told *= 2
        time.sleep(POLL)


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 5, 6`, or the first eight of them and how many more."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _reason(error: dist.DistError) -> str:
    return str(error).splitlines()[0]


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
