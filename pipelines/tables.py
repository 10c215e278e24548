"""Arrow transforms as Polars ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa

from rollout_io.prefix import trajectory_starts
from rollout_io.sources import lazy_frame
from schemas.columns import COLUMNS, Length
from schemas.ragged import IntArray, ranges
from schemas.types import as_table

PER_TOKEN: dict[str, pa.DataType] = {
    c.name: c.type.value_type for c in COLUMNS if c.type and c.length is Length.RESPONSE
}
"""Element types of the columns with one element per response token."""

ROUTING = "rollout_expert_indices"

Frame: TypeAlias = pl.LazyFrame | pl.DataFrame | pa.Table
"""What the transforms of this package take; they give back a LazyFrame."""


def as_lazy(frame: Frame) -> pl.LazyFrame:
    """A LazyFrame of a LazyFrame, DataFrame or Arrow table."""
    if isinstance(frame, pl.LazyFrame):
        return frame
    data = frame if isinstance(frame, pl.DataFrame) else pl.from_arrow(frame)
    assert isinstance(data, pl.DataFrame)
    return data.lazy()


def over_tables(frame: Frame, transform: Callable[[pa.Table], pa.Table]) -> pl.LazyFrame:
    """Apply a transform of Arrow tables of whole trajectories inside a lazy query.

    The rows stream through it piece by piece: memory use does not grow with the table.
    """
    frame = as_lazy(frame)

    def apply(data: pl.DataFrame) -> pl.DataFrame:
        result = pl.from_arrow(transform(as_table(data)))
        assert isinstance(result, pl.DataFrame)
        return result

    empty = apply(pl.DataFrame(schema=frame.collect_schema()))

    def pieces(names: list[str], predicate: pl.Expr | None) -> Iterator[pl.DataFrame]:
        del names, predicate
        return map(apply, _whole_trajectories(frame.collect_batches(maintain_order=True)))

    return lazy_frame(pieces, empty.schema)


def _whole_trajectories(batches: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The same rows, cut between trajectories."""
    rest: pl.DataFrame | None = None
    for batch in batches:
        whole = batch if rest is None else pl.concat([rest, batch])
        ids = whole["trajectory_id"]
        others = (ids != ids.last()).arg_true() if len(ids) else ids
        end = int(others.to_numpy()[-1]) + 1 if len(others) else 0
        if end:
            yield whole[:end]
        rest = whole[end:]
    if rest is not None:
        yield rest


def set_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    """Replace a column, or append it."""
    chunked = pa.chunked_array([column])
    if name not in table.column_names:
        return table.append_column(pa.field(name, column.type), chunked)
    index = table.column_names.index(name)
    old = table.schema.field(name)
    field = pa.field(name, column.type, old.nullable, old.metadata)
    return table.set_column(index, field, chunked)


def count_from_zero(table: pa.Table) -> IntArray:
    """[N] 0..n-1 over the rows of each trajectory."""
    starts = trajectory_starts(table)
    lengths = np.diff(np.append(starts, table.num_rows))
    return ranges(np.zeros(len(starts), np.int64), lengths)
