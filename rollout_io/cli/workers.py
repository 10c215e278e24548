"""The options `--workers` and `--engine` of verbs that process shards in parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rollout_io.dataset.parallel import Engine, Workers

_BYTES_PER_PROCESS = 64 << 20  # starting a process takes as long as reading tens of MB

F = TypeVar("F", bound=Callable[..., Any])


def engine_option(command: F) -> F:
    """Add the option `--engine`."""
    return click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="local: processes on this machine. ray: Ray Data, on the cluster at RAY_ADDRESS or on "
        "a new one on this machine (its ports are open to the network).",
    )(command)


def workers_options(command: F) -> F:
    """Add the options `--workers` and `--engine`."""
    option = click.option(
        "--workers",
        type=click.IntRange(1),
        metavar="N",
        help="Number of processes, at most one per shard.  [default: based on the dataset size]",
    )
    return option(engine_option(command))


def workers_of(num: int | None, engine: Engine, dataset: str) -> Workers:
    """Return the chosen workers; the default number depends on the size of the dataset."""
    from rollout_io.dataset.parallel import Workers, num_cores
    from rollout_io.dataset.storage import find_shards

    shards = find_shards(dataset)
    if num is None:
        num_bytes = sum(shard.fs.size(shard.path) for shard in shards)
        num = min(num_cores(), 1 + num_bytes // _BYTES_PER_PROCESS)
    return Workers(max(1, min(num, len(shards))), engine)
