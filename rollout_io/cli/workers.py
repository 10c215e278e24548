"""`--workers` and `--engine`, of the verbs that work shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rollout_io.parallel import Engine, Workers

_BYTES_PER_PROCESS = 64 << 20

F = TypeVar("F", bound=Callable[..., Any])


def engine_option(command: F) -> F:
    """Add `--engine`."""
    return click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="local: processes of this machine. ray: Ray Data, on the cluster that RAY_ADDRESS "
        "names, or on one started here (its ports are open to the network).",
    )(command)


def workers_options(command: F) -> F:
    """Add `--workers` and `--engine`."""
    option = click.option(
        "--workers",
        type=click.IntRange(1),
        metavar="N",
        help="Processes to use, at most one per shard.  [default: all cores, where it is worth it]",
    )
    return option(engine_option(command))


def workers_of(num: int | None, engine: Engine, dataset: str) -> Workers:
    """The choice made: a process costs as much to start as some tens of megabytes to read."""
    from rollout_io.parallel import Workers, num_cores
    from rollout_io.storage import find_shards

    shards = find_shards(dataset)
    if num is None:
        num_bytes = sum(shard.fs.size(shard.path) for shard in shards)
        num = min(num_cores(), 1 + num_bytes // _BYTES_PER_PROCESS)
    return Workers(max(1, min(num, len(shards))), engine)
