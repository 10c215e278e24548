"""What paths are that a user passes (datasets, runs, tables, logs), and their short names for menus.

Only the beginnings of files are read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.view.annotations import kind_of_table
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


def absolute(path: str) -> str:
    """Return a local path as an absolute path, and a URL as it is."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100


def short_name(path: str) -> str:
    """Return the last part of a path."""
    return path.rstrip("/").rpartition("/")[2] or path


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest end of each path that no other path has.

    Example:
        >>> distinct_names(["runs/a/merged", "runs/b/merged", "shop/"])
        ['a/merged', 'b/merged', 'shop']
    """
    parts = [absolute(path.rstrip("/")).split("/") for path in paths]
    sizes = [1] * len(parts)
    while True:
        names = ["/".join(segments[-size:]) for segments, size in zip(parts, sizes, strict=True)]
        counts = Counter(names)
        longer = [
            min(size + (counts[name] > 1), len(segments))
            for segments, size, name in zip(parts, sizes, names, strict=True)
        ]
        if longer == sizes:
            return [name or path for name, path in zip(names, paths, strict=True)]
        sizes = longer
