"""A dataset as a verb opens it: anything that is not one is a clean error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.errors import RolloutError

if TYPE_CHECKING:
    import polars as pl


def open_dataset(path: str) -> pl.LazyFrame:
    """Scan a dataset that has all the required columns, each of its declared type.

    Raises:
        RolloutError: Nothing is there, or it is not a rollout table.
    """
    import polars as pl

    from rollout_io.reader import scan
    from schemas.checker import check_types

    frame = scan(path)
    empty = pl.DataFrame(schema=frame.collect_schema()).to_arrow()
    breaches, _ = check_types(empty)
    if len(breaches):
        first = breaches.row(0, named=True)
        got, hint = f"{first['got']} {first['column']!r}", f"rollouts validate {path}"
        if first["got"] != "no such column":
            got = f"column {first['column']!r} of type {first['got']}"
        raise RolloutError("columns_and_types", path, got, "a rollout table", hint)
    return frame
