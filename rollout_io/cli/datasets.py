"""The options `--workers`, `--engine` and `--layout` of verbs, and how verbs open a dataset."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from schemas.errors import InvariantError, count

if TYPE_CHECKING:
    import polars as pl

    from rollout_io.dataset.parallel import Engine, Workers
    from rollout_io.dataset.storage import Paths

_BYTES_PER_PROCESS = 64 << 20  # starting a process takes as long as reading tens of MB

_CONVERTED_ALONE_BYTES = 320 << 20
"""One process converts logs up to this size, because starting a second process takes longer."""

_LOG = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def _one_dataset(_: click.Context, __: click.Parameter, paths: tuple[str, ...]) -> str | None:
    from rollout_io.dataset.storage import joined

    return joined(paths) if paths else None


def dataset_argument(*, required: bool = True) -> Callable[[F], F]:
    """Add the argument DS: one or several paths, which are read as one dataset."""
    return click.argument(
        "dataset",
        metavar="DS...",
        nargs=-1,
        required=required,
        type=click.Path(),
        callback=_one_dataset,
    )


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


layout_option = click.option(
    "--layout",
    type=click.Choice(["prefix", "full"]),
    help="Store prompts as references to earlier steps, or in full.  [default: as in DS]",
)


_LOG = logging.getLogger(__name__)


def open_dataset(path: str) -> pl.LazyFrame:
    """Scan a dataset, after checking that the required columns exist with their declared types.

    Raises:
        InputError: `dataset_exists`: the path is not a dataset.
        InvariantError: `columns_and_types`: a column is missing or has the wrong type.
    """
    import polars as pl

    from rollout_io.dataset.reader import scan
    from schemas.checker import check_types

    frame = scan(path)
    empty = pl.DataFrame(schema=frame.collect_schema()).to_arrow()
    breaches, _ = check_types(empty)
    if len(breaches):
        first = breaches.row(0, named=True)
        hint = f"run `rollouts validate {path}` to list every error"
        raise InvariantError("columns_and_types", path, first["message"], "", hint)
    return frame


def open_valid(path: str, workers: Workers | None = None) -> pl.LazyFrame:
    """Scan a dataset, after checking every row against the named invariants.

    Raises:
        InputError: `dataset_exists`: the path is not a dataset.
        InvariantError: The dataset breaks an invariant, whose name is the rule id.
    """
    from rollout_io.cli.datasets import workers_of
    from rollout_io.dataset.checking import validate

    frame, start_s = open_dataset(path), time.monotonic()
    validate(path, workers or workers_of(None, "local", path))
    _LOG.debug("%s: checked in %.2f s", path, time.monotonic() - start_s)
    return frame


def can_audit(dataset: Paths) -> bool:
    """True if a row has log-probabilities and shows no picture, which `audit` does not recompute."""
    import polars as pl

    from rollout_io.dataset.reader import scan
    from schemas.columns import PICTURES

    rows = scan(dataset)
    names = rows.collect_schema().names()
    if "rollout_logprobs" not in names:
        return False
    present = rows.filter(pl.col("rollout_logprobs").is_not_null())
    if PICTURES in names:
        present = present.filter(pl.col(PICTURES).is_null())
    return not present.select("rollout_logprobs").head(1).collect().is_empty()
