"""Tell datasets, runs, tables about them and logs apart, without reading more than their beginnings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.view.row_tables import kind_of_table
from pipelines.view.run_files import is_run
from rollout_io.conversion.opened_logs import AUTO
from rollout_io.dataset.storage import SHARD_SUFFIX, STAGING, Location
from rollout_io.formats.detect import load_formats, recognize

PathKind = Literal["run", "table", "log", "dataset"]
_ROLLOUTS = "response_ids"


def kind_of_path(path: str, log_format: str = AUTO) -> PathKind:
    """Return what a path is; a missing path, which opening it reports, is a dataset.

    Args:
        path: Path of the user.
        log_format: Format of the logs, or `auto`; with a format, the path is a log.

    Raises:
        InputError: `view_table`: a Parquet file is neither a dataset, a table about one, nor a log.
    """
    place = Path(path)
    if "://" in path or not place.exists():
        return "dataset"
    if log_format != AUTO:
        return "log"
    if is_run(place):
        return "run"
    shards = Location.of(path).datasets() if place.is_dir() else [path]
    if not any(map(os.path.isfile, shards)):
        is_staged = (place / STAGING).exists()
        return "dataset" if is_staged else "log"
    if any(_ROLLOUTS in names for names in map(_columns, shards)):
        return "dataset"
    if any(recognize(shard, load_formats().adapters) for shard in shards):
        return "log"
    if place.is_dir():
        return "log" if _has_others(place, {*shards}) else "dataset"
    if not path.endswith(SHARD_SUFFIX):
        return "log"
    return "dataset" if kind_of_table(path) is None else "table"


def _has_others(folder: Path, shards: set[str]) -> bool:
    """True if a directory has visible files other than these."""
    return any(
        str(Path(place) / name) not in shards and not name.startswith(".")
        for place, _, names in os.walk(folder)
        for name in names
    )


def _columns(path: str) -> list[str]:
    """Return the columns of a Parquet file; none for any other file."""
    try:
        return list(pq.read_schema(path).names) if os.path.isfile(path) else []  # noqa: PTH113
    except (pa.ArrowException, OSError):
        return []
