"""What the workers of test_worker_pool.py run: they are spawned, and must be able to import it."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection


def squarer(delay: float) -> Callable[[int], tuple[int, int]]:
    """The square and the process that made it, after a while that differs from item to item."""

    def square(item: int) -> tuple[int, int]:
        time.sleep(delay * (item * 7 % 3))
        return item * item, os.getpid()

    return square


def fail_at(position: int, how: str) -> Callable[[int], bytes]:
    """More bytes than a pipe holds, and a failure at one item."""

    def work(item: int) -> bytes:
        if item == position:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "kill in a result":
                # Announce a result of a thousand bytes, send three, die: only the pipe's end can tell.
                (pipe,) = [o for o in gc.get_objects() if isinstance(o, Connection) and not o.closed]
                os.write(pipe.fileno(), struct.pack("!i", 1000) + b"abc")
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "crash":
                faulthandler._sigsegv()
            if how == "exit":
                os._exit(3)
            if how == "panic":
                raise type("PanicException", (BaseException,), {})("a panic of a native library")
            if how == "user":
                from megatron_essh.errors import UserError

                raise UserError("file: line 7: bad")
            raise KeyError("a defect")
        return bytes(1 << 17)

    return work
