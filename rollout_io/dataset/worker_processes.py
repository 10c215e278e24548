"""Worker processes, each with a pipe that no other process holds open.

Sending to a dead process therefore fails at once, and a partial result from it is an error. A queue
would block in both cases, because the other processes hold its other end open.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, TypeVar

from rollout_io.startup import (
    keep_pandas_out_of_arrow,
    keep_torch_out_of_transformers,
    keeps_torch_out_of_transformers,
)
from schemas.errors import InputError, RolloutError

T = TypeVar("T")
R = TypeVar("R")


class _Worker(NamedTuple):
    process: SpawnProcess
    connection: Connection


class Pool:
    """Worker processes, which import the modules of a function before they receive tasks.

    The processes are stopped when the pool is closed, or this process is killed. Each has its own
    pipe, which ends with it. `concurrent.futures.ProcessPoolExecutor` has one pipe for all results:
    if a process is killed while it sends a large one, the executor waits for the rest forever.

    Args:
        function: A module-level function (or `functools.partial` of one), which can be pickled.
        num: Number of processes.
    """

    def __init__(self, function: Callable[..., Any], num: int) -> None:
        self._workers: list[_Worker] = []
        try:
            with _uninterrupted():
                self._workers.extend(_start(function, _work) for _ in range(num))
        except BaseException:
            self.close()
            raise

    def map(
        self, function: Callable[[T], R], tasks: Iterable[T]
    ) -> Generator[tuple[int, R], None, None]:
        """Yield the index and result of each task as soon as it finishes.

        Args:
            function: As for the pool; it may have other arguments bound.
            tasks: Arguments of the calls; consumed as processes become idle.

        Raises:
            RolloutError: Raised by a task; `worker`: a process died.
        """
        busy: dict[Connection, tuple[_Worker, int]] = {}
        numbered = enumerate(tasks)

        def give(worker: _Worker, index: int, message: Any) -> None:
            with _alive(worker):
                worker.connection.send(message)
            busy[worker.connection] = worker, index

        for worker, (index, task) in zip(self._workers, numbered, strict=False):
            give(worker, index, (function, task))
        while busy:
            ready = wait(list(busy))[0]
            assert isinstance(ready, Connection)
            worker, done = busy.pop(ready)
            with _alive(worker):
                result, error = worker.connection.recv()
            if error is not None:
                raise error
            for index, task in islice(numbered, 1):
                give(worker, index, task)
            yield done, result

    def close(self) -> None:
        """Stop the processes."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()


def stream(function: Callable[[Callable[[Any], object]], object]) -> Generator[Any, None, None]:
    """Run a function in a process of its own, and yield what it sends until it returns.

    The process is stopped when the generator is closed, or this process is killed.

    Args:
        function: A module-level function (or `functools.partial` of one), called with `send`.

    Raises:
        RolloutError: Raised by the function; `worker`: the process died.
    """
    with _uninterrupted():
        worker = _start(function, _send)
    try:
        while True:
            with _alive(worker):
                value, error, is_end = worker.connection.recv()
            if error is not None:
                raise error
            if is_end:
                return
            yield value
    finally:
        worker.process.kill()
        worker.process.join()
        worker.connection.close()


def _send(connection: Connection, function: Callable[..., Any], *, keeps_torch_out: bool) -> None:
    """Run the function of a stream: send (value, None, False) for each value, and an end."""
    _prepare(keeps_torch_out=keeps_torch_out)

    def send(value: Any) -> None:
        connection.send((value, None, False))

    with suppress(EOFError, OSError):
        connection.send((*_answer(function, send), True))


def _start(function: Callable[..., Any], target: Callable[..., None]) -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(
        target=target,
        args=(theirs, function),
        kwargs={"keeps_torch_out": keeps_torch_out_of_transformers()},
        daemon=True,
    )
    with theirs:
        process.start()
    return _Worker(process, ours)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT in the processes started in this context: only the parent handles Ctrl-C."""
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _alive(worker: _Worker) -> Iterator[None]:
    """Convert a broken pipe to an error that reports the exit code of the process."""
    try:
        yield
    except (EOFError, OSError):
        worker.process.join(1)
        code = worker.process.exitcode
        finding = f"a worker process ended with exit code {code}"
        if code is not None and code < 0:
            finding = f"a worker process was killed by {signal.Signals(-code).name}"
        hint = (
            "check the free memory, and run the same command again, if necessary with --workers 1"
        )
        raise InputError("worker", "--workers", finding, "", hint) from None


def _work(connection: Connection, _imported: Callable[..., Any], *, keeps_torch_out: bool) -> None:
    """Run a worker: receive the function and a task, then send results and receive tasks.

    The second argument is not called: unpickling it has imported what the tasks need.
    """
    _prepare(keeps_torch_out=keeps_torch_out)
    with suppress(EOFError, OSError):
        function, task = connection.recv()
        while True:
            connection.send(_answer(function, task))
            task = connection.recv()


def _prepare(*, keeps_torch_out: bool) -> None:
    if keeps_torch_out:
        keep_torch_out_of_transformers()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_pandas_out_of_arrow()


def _answer(function: Callable[[T], R], task: T) -> tuple[R | None, Exception | None]:
    try:
        return function(task), None
    except RolloutError as error:
        return None, error
    except Exception as error:
        error.add_note(traceback.format_exc())  # a traceback cannot be pickled
        return None, error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
