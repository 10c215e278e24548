"""The options `--workers` and `--engine` of verbs that run in parallel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schemas.errors import count

if TYPE_CHECKING:
    from rollout_io.dataset.parallel import Engine, Workers

_BYTES_PER_PROCESS = 64 << 20  # starting a process takes as long as reading tens of MB

_CONVERTED_ALONE_BYTES = 320 << 20
"""One process converts logs up to this size, because starting a second process takes longer."""

_LOG = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def engine_option(command: F) -> F:
    """Add the option `--engine`."""
    return click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="local: processes on this machine. ray: Ray Data, on the cluster at RAY_ADDRESS, or "
        "on a new cluster on this machine, whose ports are open to the network.",
    )(command)


def workers_options(command: F) -> F:
    """Add the options `--workers` and `--engine`."""
    option = click.option(
        "--workers",
        type=click.IntRange(1),
        metavar="N",
        help="Number of processes.  [default: based on the amount of data]",
    )
    return option(engine_option(command))


def workers_of(num: int | None, engine: Engine, dataset: str) -> Workers:
    """Return the workers for a dataset; by default, their number depends on its size."""
    from rollout_io.dataset.parallel import Workers
    from rollout_io.dataset.storage import find_shards

    shards = find_shards(dataset)
    if num is None:
        num = num_for(sum(shard.fs.size(shard.path) for shard in shards))
    chosen = Workers(max(1, min(num, len(shards))), engine)
    processes = count(chosen.num, "process", "es")
    _LOG.debug("%s: %s, %s (%s)", dataset, count(len(shards), "shard"), processes, engine)
    return chosen


def num_for(num_bytes: int) -> int:
    """Return the default number of processes for data of this size."""
    from rollout_io.dataset.parallel import num_cores

    return min(num_cores(), 1 + num_bytes // _BYTES_PER_PROCESS)


def num_converters(num_bytes: int, *, retokenizes: bool) -> int:
    """Return the default number of processes that convert logs of this size.

    Args:
        num_bytes: Size of the logs.
        retokenizes: True if text is re-tokenized, which makes the conversion many times slower.
    """
    is_small = num_bytes <= _CONVERTED_ALONE_BYTES
    return 1 if is_small and not retokenizes else num_for(num_bytes)
