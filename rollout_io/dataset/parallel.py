"""Parallel map over tasks: in this process, in several local processes, or on Ray."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollout_io.dataset.opening import OPENED, State, digest_of, state_of
from schemas.errors import ConfigError, InputError, RolloutError
from schemas.imports import requires_extra

if TYPE_CHECKING:
    from rollout_io.dataset.worker_processes import Pool

Engine = Literal["local", "ray"]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that run tasks.

    Attributes:
        num: Number of processes; 1 runs all tasks in this process. With `ray`: number of CPUs of
            the cluster that is started if RAY_ADDRESS is not set.
        engine: `local`, or `ray` (Ray Data). Each node reads the paths itself, from storage that all
            share or from a copy of its own, which must be the same as this machine's.

    Example:
        >>> dict(Workers().map(len, ["a", "bcd"]))
        {0: 1, 1: 3}
    """

    num: int = 1
    engine: Engine = "local"

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError("choices", "workers", str(self.num), "at least 1")

    def map(
        self, function: Callable[[T], R], tasks: Iterable[T]
    ) -> Generator[tuple[int, R], None, None]:
        """Yield the index and result of each task as soon as it finishes.

        Args:
            function: A module-level function (or `functools.partial` of one), which can be pickled.
            tasks: Arguments of the calls.

        Raises:
            RolloutError: Raised by a task; `worker`: a process died.
        """
        if self.engine == "ray" and (listed := list(tasks)):
            yield from _on_ray(function, listed, self.num)
        elif self.num == 1:
            for index, task in enumerate(tasks):
                yield index, function(task)
        else:
            following = iter(tasks)
            first = list(islice(following, self.num))
            with self.started(function, len(first)) as pool:
                yield from pool.map(function, chain(first, following))

    @contextmanager
    def started(
        self, function: Callable[..., Any], num_tasks: int
    ) -> Generator[Workers | Pool, None, None]:
        """Start local processes before their tasks are known, and yield an object to map with.

        The processes import the modules of `function` while this process prepares the tasks.

        Args:
            function: As for `map`; the function that is mapped later may have other arguments bound.
            num_tasks: Expected number of tasks; no more processes than that are started.
        """
        if self.engine == "ray" or self.num == 1:
            yield self
        else:
            from rollout_io.dataset.worker_processes import Pool

            with closing(Pool(function, min(self.num, num_tasks))) as pool:
                yield pool

    def map_in_order(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """Yield the result of each task, in the order of the tasks (see `map`)."""
        waiting: dict[int, R] = {}
        following = 0
        for index, result in self.map(function, tasks):
            waiting[index] = result
            while following in waiting:
                yield waiting.pop(following)
                following += 1


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_ray(function: Callable[[T], R], tasks: Sequence[T], num: int) -> Iterator[tuple[int, R]]:
    with _cluster(num) as data, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns about its own settings
        rows = data.from_items(list(range(len(tasks))), override_num_blocks=len(tasks))
        for row in rows.map(partial(_ray_task, function, tasks)).iter_rows():
            _refuse_other_copies(row["node"], row["files"])
            if row["error"] is not None:
                raise row["error"]
            yield row["index"], row["result"]


def _ray_task(
    function: Callable[[T], R], tasks: Sequence[T], row: dict[str, Any]
) -> dict[str, Any]:
    """Run one task; return a user error as a result, because Ray would wrap an exception.

    The digests of the files that it read are returned, too.
    """
    index, result, failure, node = row["item"], None, None, socket.gethostname()
    token = OPENED.set(set())
    try:
        result = function(tasks[index])
    except RolloutError as error:
        failure = error.at(f"{error.where}, on {node}") if error.rule in _OF_FILES else error
    opened = OPENED.get() or set()
    OPENED.reset(token)
    files = {path: (state_of(path), digest_of(path)) for path in sorted(opened) if state_of(path)}
    return {"index": index, "result": result, "error": failure, "node": node, "files": files}


_OF_FILES = frozenset(
    {"dataset_exists", "input_file", "output_file", "readable_file", "shards_complete"}
)
"""Rules of errors that may concern a single node."""


def _refuse_other_copies(node: str, files: Mapping[str, tuple[State, str]]) -> None:
    """Check that a node read the files that this machine has at the same paths, if it has them.

    In shared storage, a file has the same state on all nodes, and is not read again.
    """
    for path, (state, digest) in files.items():
        here = state_of(path)
        if (
            here
            and (here.inode, *here[:2]) != (state.inode, *state[:2])
            and digest_of(path) != digest
        ):
            finding = f"{node} has another version of this file than {socket.gethostname()}"
            hint = "copy the files to all nodes again, or read them from storage that all share"
            raise InputError("shared_storage", path, finding, "", hint)


@contextmanager
def _cluster(num: int) -> Iterator[Any]:
    """Connect to Ray and yield `ray.data`; afterwards, stop the cluster if it was started here."""
    with requires_extra("ray", "--engine ray"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        import ray.data
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
    """Check that the cluster responds, because Ray would otherwise wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto", "local"
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        finding = (error.strerror or str(error)).lower()
        hint = "check `ray status`, or unset RAY_ADDRESS to start a cluster on this machine"
        message = f"cannot connect to Ray at {address}: {finding}"
        raise ConfigError("ray_address", address, finding, "", hint, message=message) from None
