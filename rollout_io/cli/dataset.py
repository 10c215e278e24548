"""A dataset as a verb opens it: anything that is not one is a clean error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import RolloutError

if TYPE_CHECKING:
    import polars as pl


def open_dataset(path: str) -> pl.LazyFrame:
    """Scan a dataset that has all the required columns.

    Raises:
        RolloutError: Nothing is there, or it is not a rollout table.
    """
    from rollout_io.reader import scan
    from schemas.columns import REQUIRED_COLUMNS

    frame = scan(path)
    names = frame.collect_schema().names()
    missing = [name for name in REQUIRED_COLUMNS if name not in names]
    if missing:
        got, hint = f"no column {missing[0]!r}", f"rollouts validate {path}"
        raise RolloutError("columns_and_types", path, got, "a rollout table", hint)
    return frame
