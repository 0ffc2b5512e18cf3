"""A failed rank ends the run on all, at once and with its reason, whatever the others are waiting for.

Every rank keeps a connection to the first one. The operating system closes it when a process dies, however it dies, so
that nothing has to be timed; what a rank that fails of itself has to say, it says over it. The first rank passes it on.
A machine that vanishes without closing anything is noticed by the connection's own probes, within `PROBES` seconds.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

PROBES = 40
"""Seconds without an answer after which a machine counts as gone."""
HEARING = 1.0
"""Seconds for which a failing rank first listens whether another's end is the cause: a broken exchange tells little."""
PATIENCE = 5.0
"""Seconds that a failed rank waits for the others' word, so that one error of all ranks is told by the first alone."""


class RankWatch:
    """Watches over all ranks of a run in a thread of each. Made by all of them, closed by each when it is done.

    Args:
        store: where the first rank leaves its address.
        host: the first rank's, as the others reach it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, host: str, timeout: timedelta) -> None:
        self.rank, self.world = rank, world
        self._told: dict[str, Any] | None = None
        """What this rank said before it fails."""
        self._over = False
        self._peers: dict[socket.socket, int] = {}
        """Connections, and whose they are."""
        if rank == 0:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            with socket.create_server(
                ("", 0), family=family, backlog=world, dualstack_ipv6=family == socket.AF_INET6
            ) as server:
                server.settimeout(timeout.total_seconds())
                word = secrets.token_hex(16)  # whoever else finds the port does not know it
                store.set("watch", f"{server.getsockname()[1]} {word}")
                while len(self._peers) < world - 1:
                    connection, _ = server.accept()
                    connection.settimeout(PROBES)
                    greeting = b""
                    with suppress(OSError):
                        greeting = connection.recv(len(word) + 4, socket.MSG_WAITALL)
                    if greeting[:-4] == word.encode():
                        self._peers[connection] = int.from_bytes(greeting[-4:], "big")
        else:
            store.wait(["watch"], timeout)
            port, word = store.get("watch").decode().split()
            connection = socket.create_connection((host, int(port)), timeout.total_seconds())
            connection.sendall(word.encode() + rank.to_bytes(4, "big"))
            self._peers[connection] = 0
        for connection in self._peers:
            connection.settimeout(None)
            _probe(connection)
        self._lines: dict[socket.socket, bytes] = dict.fromkeys(self._peers, b"")
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    def close(self) -> None:
        """This rank is done: that its connections close means nothing any more."""
        self._say({"done": True})
        self._over = True

    def fail(self, text: str, status: int) -> None:
        """Tell all ranks that this one ends with `text`; where another has said the same first, end here in silence.

        status: 2 for what the user got wrong, which every rank may find at the same time.
        """
        told = {"rank": self.rank, "text": text, "status": status}
        if status == 2:
            self._told = told
        if self.rank > 0 or status != 2:
            time.sleep(HEARING)  # the thread ends the process if there is a cause elsewhere
        self._told = told
        self._say(told)
        if self.rank > 0:
            time.sleep(PATIENCE)  # the thread ends the process before, as a rule

    def _say(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for connection in self._peers:
                with suppress(OSError):  # it is gone, which its own connection tells
                    connection.sendall(line)

    def _watch(self) -> None:
        open_ = selectors.DefaultSelector()
        for connection in self._peers:
            open_.register(connection, selectors.EVENT_READ)
        while open_.get_map():
            for key, _ in open_.select():
                connection = cast(socket.socket, key.fileobj)
                try:
                    data = connection.recv(1 << 16)
                except OSError:
                    data = b""
                if self._over:
                    return
                *lines, self._lines[connection] = (self._lines[connection] + data).split(b"\n")
                messages = [json.loads(line) for line in lines]
                failure = next((m for m in messages if "text" in m), None)
                if failure is not None:
                    self._end(failure)
                if any("done" in m for m in messages):
                    open_.unregister(connection)
                elif not data:
                    time.sleep(0.2)  # a first rank that failed of itself says so itself
                    self._end(
                        {
                            "rank": self._peers[connection],
                            "text": "its process is gone: killed, or its machine is",
                            "status": 1,
                        }
                    )

    def _end(self, failure: dict[str, Any]) -> None:
        """Another rank failed: pass it on, say it and end, without what the interpreter would still wait for."""
        if self.rank == 0:
            self._say(failure)
            time.sleep(0.1)  # so that the others have it before this rank's end tells them less
        if self.rank > 0 and failure["status"] == 2:
            end = time.monotonic() + PATIENCE
            while self._told is None and time.monotonic() < end:
                time.sleep(0.05)  # this rank may be about to find the same
        told, text = self._told, failure["text"].strip()
        if told is None:
            if self.rank > 0:
                text = text.splitlines()[-1]
            self._print(f"rank {self.rank} ends because rank {failure['rank']} has ended: {text}")
        elif self.rank == 0:
            time.sleep(PATIENCE)  # this rank is about to say itself what befell it
        elif failure["rank"] == self.rank or told["text"] != failure["text"]:
            self._print(f"rank {self.rank}: {told['text'].strip()}")
        os._exit(failure["status"])

    def _print(self, text: str) -> None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _probe(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, PROBES // 4),
            (socket.TCP_KEEPINTVL, PROBES // 4),
            (socket.TCP_KEEPCNT, 3),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
