"""The same function over many tasks: in this process, in several of this machine, or on Ray."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

from schemas.errors import RolloutError

Engine = Literal["local", "ray"]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Workers:
    """Who does the work.

    Attributes:
        num: Processes; 1 is this one. With `ray`: the CPUs of a cluster that is started for this,
            where no address (RAY_ADDRESS) names one that runs already.
        engine: `local`, or `ray` (Ray Data; tasks and results must be visible to all its nodes).

    Example:
        >>> dict(Workers().map(len, ["a", "bcd"]))
        {0: 1, 1: 3}
    """

    num: int = 1
    engine: Engine = "local"

    def __post_init__(self) -> None:
        if self.num < 1:
            raise RolloutError("choices", "workers", str(self.num), "at least 1")

    def map(
        self, function: Callable[[T], R], tasks: Iterable[T]
    ) -> Generator[tuple[int, R], None, None]:
        """The index and result of each task, as they are done.

        Args:
            function: Of a module's top level (or `functools.partial` of one).
            tasks: What to call it with.

        Raises:
            RolloutError: What a task raised; `worker`: a process was killed.
        """
        if self.engine == "ray" and (given := list(tasks)):
            yield from _on_ray(function, given, self.num)
        elif self.num == 1:
            for index, task in enumerate(tasks):
                yield index, function(task)
        else:
            yield from _in_processes(function, tasks, self.num)

    def map_in_order(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """The result of each task, in the order of the tasks (see `map`)."""
        waiting: dict[int, R] = {}
        following = 0
        for index, result in self.map(function, tasks):
            waiting[index] = result
            while following in waiting:
                yield waiting.pop(following)
                following += 1


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(
    function: Callable[[T], R], tasks: Iterable[T], num: int
) -> Iterator[tuple[int, R]]:
    with _processes(num) as pool:
        with _uninterrupted():
            futures = {pool.submit(function, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool:
                got = "a process that was killed (out of memory?)"
                hint = "the same command again; --workers 1"
                raise RolloutError(
                    "worker", "--workers", got, "processes that live", hint
                ) from None
            yield futures[future], result


@contextmanager
def _processes(num: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this block, however it ends, and with this process, if it is killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    pool = ProcessPoolExecutor(num, spawn, initializer=_end_with, initargs=(theirs,))
    with ours, theirs, pool:
        try:
            yield pool
        except BaseException:
            ours.close()
            raise


def _end_with(parent: Connection) -> None:
    """End this process as soon as the other end is closed."""

    def watch() -> None:
        parent.poll(None)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Processes that are started in this block leave interrupts to this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_ray(function: Callable[[T], R], tasks: Sequence[T], num: int) -> Iterator[tuple[int, R]]:
    with _cluster(num) as data, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of its own settings
        rows = data.from_items(list(range(len(tasks))), override_num_blocks=len(tasks))
        for row in rows.map(partial(_ray_task, function, tasks)).iter_rows():
            if row["error"] is not None:
                raise row["error"]
            yield row["index"], row["result"]


def _ray_task(
    function: Callable[[T], R], tasks: Sequence[T], row: dict[str, Any]
) -> dict[str, Any]:
    """One task's row; a user's error is a result, so that it comes back as it is."""
    index = row["item"]
    try:
        return {"index": index, "result": function(tasks[index]), "error": None}
    except RolloutError as error:
        return {"index": index, "result": None, "error": error}


@contextmanager
def _cluster(num: int) -> Iterator[Any]:
    """`ray.data`, connected; a cluster that is started for this block ends with it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
            import ray.data
    except ImportError:
        hint = 'pip install "rollout-io[ray]"'
        raise RolloutError("extra_installed", "--engine ray", "no `ray`", "", hint) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    starts = not ray.is_initialized()
    if starts and "RAY_ADDRESS" in os.environ:
        _refuse_silent(os.environ["RAY_ADDRESS"])
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    elif starts:
        ray.init(
            num_cpus=num, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield ray.data
    finally:
        if starts:
            ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Ray waits for minutes for a cluster that is not there.

    Raises:
        RolloutError: `ray_address`.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto", "local"
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        hint = "ray status; or unset RAY_ADDRESS, and a cluster is started here"
        raise RolloutError("ray_address", address, got, "a running Ray", hint) from None
