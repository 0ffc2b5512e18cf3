"""A function applied to a stream of items on many processes: results in the items' order, in bounded memory.

Each worker has a pipe of its own, so that one that dies, even in the middle of a result, shows as the end of its
pipe: the run then ends with an error instead of waiting. Workers whose parent is gone see the same and end.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from megatron_essh.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 4  # items a worker that are in work or waiting for their turn
_AHEAD_BYTES = 1 << 30  # of such items, by their sizes: from here on only the next one in turn is waited for


def map_in_order(
    setup: Callable[..., Callable[[Item], Result]],
    arguments: tuple[Any, ...],
    items: Iterable[Item],
    workers: int,
    size_of: Callable[[Item], int] = lambda item: 0,
) -> Generator[Result, None, None]:
    """Yield `function(item)` for each item in order, where every process makes `function = setup(*arguments)`
    once.

    One worker is this process. Close the generator to end the workers early (`contextlib.closing`).

    Args:
        setup: a module's top-level function, as the processes are spawned.
        arguments: picklable.
        items: read no further than a few items a worker ahead of what was yielded, and no further than a gibibyte.
        workers: number of processes.
        size_of: bytes of an item.

    Raises:
        UserError: raised by the function, in the items' order; or a worker died or could not be started.
        RuntimeError: any other exception in a worker, with its traceback.
    """
    if workers == 1:
        function = setup(*arguments)
        for item in items:
            yield function(item)
        return
    pool: list[_Worker] = []
    try:
        for number in range(workers):
            try:
                pool.append(_start(setup, arguments))
            except OSError as error:
                raise UserError(
                    f"--workers {workers}: number {number + 1} cannot be started: {error.strerror or error}; use fewer"
                ) from None
        yield from _run(pool, iter(items), size_of)
    finally:
        for worker in pool:
            worker.connection.close()
            worker.process.terminate()
        for worker in pool:
            worker.process.join()


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    position: int = -1
    """Of the item in work."""


@dataclass(frozen=True)
class _Failure:
    text: str
    by_user: bool


def _start(setup: Callable[..., Any], arguments: tuple[Any, ...]) -> _Worker:
    # Spawned, not forked: a fork would hold open its siblings' pipes, and a dead worker's would never end.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(setup, arguments, theirs), daemon=True)
    # Ctrl-C reaches the workers too, which would each print a traceback while they still import what they need: they
    # inherit that it is held back. We get ours a moment later. (Starting the tracker lets the signal through.)
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Worker(process, ours)


def _serve(setup: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    faulthandler.enable()  # a crash in a native library then shows where we called it
    try:
        function = None
        while True:
            item = connection.recv()
            try:
                function = function or setup(*arguments)
                result = function(item)
            except UserError as error:
                result = _Failure(str(error), by_user=True)
            except BaseException:  # a panic of a native library is no Exception
                result = _Failure(traceback.format_exc(), by_user=False)
            connection.send(result)
    except (EOFError, ConnectionError):
        return  # the parent is gone or needs us no longer


def _run(pool: list[_Worker], items: Iterator[Any], size_of: Callable[[Any], int]) -> Iterator[Any]:
    idle = list(pool)
    busy: dict[Connection, _Worker] = {}
    finished: dict[int, Any] = {}
    sizes: deque[int] = deque()  # of the items given and not yielded
    ahead = 0
    given = yielded = 0
    more = True
    while more or busy or finished:
        # A worker gets an item only when it waits for one: parent and worker never both stand in a full pipe.
        while more and idle and given - yielded < _AHEAD * len(pool) and ahead < _AHEAD_BYTES:
            try:
                item = next(items)
            except StopIteration:
                more = False
                break
            worker = idle.pop()
            worker.position = given
            given += 1
            sizes.append(size_of(item))
            ahead += sizes[-1]
            try:
                worker.connection.send(item)
            except ConnectionError:
                raise _died(worker) from None
            busy[worker.connection] = worker
        for connection in wait(list(busy), timeout=0 if yielded in finished else None) if busy else ():
            assert isinstance(connection, Connection)
            worker = busy.pop(connection)
            try:
                finished[worker.position] = connection.recv()
            except (EOFError, OSError):
                raise _died(worker) from None
            idle.append(worker)
        if yielded in finished:
            result = finished.pop(yielded)
            yielded += 1
            ahead -= sizes.popleft()
            if isinstance(result, _Failure):
                raise (UserError(result.text) if result.by_user else RuntimeError(f"in a worker:\n{result.text}"))
            yield result


def _died(worker: _Worker) -> UserError:
    worker.process.join(timeout=5)
    code = worker.process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    return UserError(
        f"worker process {worker.process.pid} {how} before its work was done. Where memory ran out, use fewer --workers"
    )
