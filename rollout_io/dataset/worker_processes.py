"""Worker processes, each with a pipe that no other process holds open.

Sending to a dead process therefore fails at once, and a partial result from it is an error. A queue
would block in both cases, because the other processes hold its other end open.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from rollout_io.startup import (
    keep_pandas_out_of_arrow,
    keep_torch_out_of_transformers,
    keeps_torch_out_of_transformers,
)
from schemas.errors import InputError, RolloutError

_START_S = 300.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class _Worker:
    """A process with its pipe, and what it does.

    Attributes:
        process: The process.
        connection: Our end of its pipe.
        task: Index of the task that it runs; None if it has none.
        is_ready: True once it has imported what it needs.
        ends_s: Time on the monotonic clock at which it has to have answered, if there is a limit.
    """

    process: SpawnProcess
    connection: Connection
    task: int | None = None
    is_ready: bool = False
    ends_s: float = math.inf

    def receive(self) -> tuple[Any, str]:
        """Return what the process sent, and how it ended; "" if it lives.

        Raises:
            Exception: What the task raised.
        """
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):
            return None, self.end()
        if error is not None:
            raise error
        return result, ""

    def end(self) -> str:
        """Say how the process ended."""
        self.process.join(1)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _nothing() -> None:
    """Do nothing."""


class Pool:
    """Worker processes, which import the modules of a function before they receive tasks.

    The processes are stopped when the pool is closed, or this process is killed. Each has its own
    pipe, which ends with it. `concurrent.futures.ProcessPoolExecutor` has one pipe for all results:
    if a process is killed while it sends a large one, the executor waits for the rest forever.

    Args:
        function: A module-level function (or `functools.partial` of one), which can be pickled.
        num: Number of processes.
        prepare: Function that each process calls before its first task.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num: int,
        *,
        prepare: Callable[[], object] = _nothing,
    ) -> None:
        self._target = partial(_work, imported=function, prepare=prepare)
        self._workers: list[_Worker] = []
        try:
            with _uninterrupted():
                self._workers.extend(_start(self._target) for _ in range(num))
        except BaseException:
            self.close()
            raise

    def map(
        self,
        function: Callable[[T], R],
        tasks: Iterable[T],
        *,
        timeout_s: float = math.inf,
        lose: Callable[[str], R] | None = None,
    ) -> Generator[tuple[int, R], None, None]:
        """Yield the index and result of each task as soon as it finishes.

        Args:
            function: As for the pool; it may have other arguments bound.
            tasks: Arguments of the calls; consumed as processes become idle.
            timeout_s: Time limit for a task, in seconds, if `lose` is given.
            lose: Makes the result of a task from the reason why there is none: its process died or
                was too slow, and is replaced. None: a process that dies is an error.

        Raises:
            RolloutError: Raised by a task; `worker`: a process died, before its first task if there
                is `lose`.
        """
        numbered = enumerate(tasks)

        def give(worker: _Worker) -> None:
            for worker.task, task in islice(numbered, 1):
                if worker.is_ready:
                    worker.ends_s = time.monotonic() + timeout_s
                with suppress(OSError):  # a process that died is seen when its result is read
                    worker.connection.send((function, task))

        for worker in self._workers:
            give(worker)
        while busy := [worker for worker in self._workers if worker.task is not None]:
            ends_s = min(worker.ends_s for worker in busy) if lose is not None else math.inf
            left_s = None if ends_s == math.inf else max(ends_s - time.monotonic(), 0.0)
            ready = wait([worker.connection for worker in busy], left_s)
            for place, worker in enumerate(self._workers):
                message: Any = None
                lost = f"no result within {timeout_s:g} s"
                if worker.connection in ready:
                    message, lost = worker.receive()
                elif lose is None or worker.task is None or worker.ends_s > time.monotonic():
                    continue
                if not lost and not worker.is_ready:  # its first message
                    worker.is_ready, worker.ends_s = True, time.monotonic() + timeout_s
                    continue
                index, following = worker.task, worker
                if lost:
                    if lose is None or not worker.is_ready:
                        raise _died(lost)
                    worker.stop()
                    message, following = lose(lost), _start(self._target)
                    self._workers[place] = following
                following.task = None
                give(following)
                if index is not None:
                    yield index, message

    def close(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.stop()
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
        worker = _start(partial(_send, function=function))
    try:
        while True:
            try:
                value, error, is_end = worker.connection.recv()
            except (EOFError, OSError):
                raise _died(worker.end()) from None
            if error is not None:
                raise error
            if is_end:
                return
            yield value
    finally:
        worker.stop()


def _send(connection: Connection, *, function: Callable[..., Any]) -> None:
    """Run the function of a stream: send (value, None, False) for each value, and an end."""

    def send(value: Any) -> None:
        connection.send((value, None, False))

    connection.send((*_answer(function, send), True))


def _start(target: Callable[[Connection], None]) -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(
        target=_run,
        args=(theirs, target),
        kwargs={"keeps_torch_out": keeps_torch_out_of_transformers()},
        daemon=True,
    )
    with theirs:
        process.start()
    return _Worker(process, ours, ends_s=time.monotonic() + _START_S)


def _run(
    connection: Connection, target: Callable[[Connection], None], *, keeps_torch_out: bool
) -> None:
    if keeps_torch_out:
        keep_torch_out_of_transformers()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_pandas_out_of_arrow()
    with suppress(EOFError, OSError):
        target(connection)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT in the processes started in this context: only the parent handles Ctrl-C."""
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _died(end: str) -> InputError:
    hint = "check the free memory, and run the same command again, if necessary with --workers 1"
    return InputError("worker", "--workers", end.replace("its", "a worker", 1), "", hint)


def _work(
    connection: Connection,
    *,
    imported: Callable[..., Any],  # noqa: ARG001 unpickling it has imported what tasks need
    prepare: Callable[[], object],
) -> None:
    """Run a worker: say that it is ready, then receive functions with tasks and send results."""
    connection.send((None, _answer(lambda _: prepare(), None)[1]))
    while True:
        connection.send(_answer(*connection.recv()))


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
