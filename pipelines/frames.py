"""Polars frames of rollouts: the namespace `rollouts`, and Arrow transforms inside Polars queries.

`rollout_io.scan` registers the namespace, `scan("DS/").rollouts.merge()`, and so does every transform
of `pipelines`; `import pipelines.frames` does so for frames of other origin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import pipelines
from rollout_io.dataset.footer import ID_COLUMNS, required_ids
from rollout_io.dataset.polars_sources import Rows, lazy_frame
from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.reader import scan
from rollout_io.dataset.storage import Paths
from schemas.checker import Checker, raise_errors
from schemas.columns import COLUMNS, Length
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.ragged import IntArray, Ragged, list_lengths, offsets_of, ranges
from schemas.types import as_table, cast_column

if TYPE_CHECKING:
    from pipelines.filtering import Filter
    from schemas.metadata import Outcome

PER_TOKEN: dict[str, pa.DataType] = {
    c.name: c.type.value_type for c in COLUMNS if c.type and c.length is Length.RESPONSE
}
"""Element types of the columns with one element per response token."""

ROUTING = "rollout_expert_indices"

Transform: TypeAlias = Callable[[pa.Table], pa.Table]
Frame: TypeAlias = Rows | Paths
"""Input types of the transforms in this package, which may be paths of datasets; they return a LazyFrame."""


def as_lazy(frame: Frame) -> pl.LazyFrame:
    """Convert a LazyFrame, DataFrame, Arrow table, or the path of a dataset to a LazyFrame."""
    if isinstance(frame, pl.LazyFrame | pl.DataFrame):
        return frame.lazy()
    if not isinstance(frame, pa.Table):
        return scan(frame)
    data = pl.from_arrow(frame)
    assert isinstance(data, pl.DataFrame)
    return data.lazy()


def exact_column(name: str) -> pl.Expr:
    """Select the column of exactly this name: `pl.col` takes "*" and "^...$" for patterns."""
    is_pattern = name == "*" or (name.startswith("^") and name.endswith("$"))
    return pl.col(f"^{re.escape(name)}$") if is_pattern else pl.col(name)


def over_tables(frame: Frame, transform: Transform) -> pl.LazyFrame:
    """Apply a transform of Arrow tables inside a lazy query.

    Each table contains complete trajectories. Rows are streamed, so memory use does not grow with
    the frame.
    """
    return _streamed(as_lazy(frame), transform, lambda tables: tables)


def over_valid_tables(frame: Frame, transform: Transform) -> pl.LazyFrame:
    """Apply `over_tables`, checking the rows against the named invariants first.

    Raises:
        ValidationError: The frame breaks a named invariant (raised on collection).
    """
    return _streamed(as_lazy(frame), transform, _valid)


def _streamed(
    frame: pl.LazyFrame,
    transform: Transform,
    check: Callable[[Iterator[pa.Table]], Iterator[pa.Table]],
) -> pl.LazyFrame:
    def apply(table: pa.Table) -> pl.DataFrame:
        result = pl.from_arrow(transform(table))
        assert isinstance(result, pl.DataFrame)
        return result

    # The output schema follows from the transform of an empty table.
    empty = apply(as_table(pl.DataFrame(schema=frame.collect_schema())))

    def pieces(names: list[str], predicate: pl.Expr | None) -> Iterator[pl.DataFrame]:
        # `lazy_frame` applies names and predicate to the yielded frames. Ids that the predicate
        # requires limit what is read, because a transform sees whole trajectories and keeps ids.
        del names
        needed = frame
        for name in ID_COLUMNS:
            ids = None if predicate is None else required_ids(predicate, name)
            if ids is not None:
                needed = needed.filter(pl.col(name).is_in(sorted(ids)))
        batches = needed.collect_batches(maintain_order=True)
        return map(apply, check(map(as_table, _whole_trajectories(batches))))

    return lazy_frame(pieces, empty.schema)


def _valid(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    checker = Checker()
    for table in tables:
        raise_errors(checker.check(table))
        yield table
    raise_errors(checker.finish())


def _whole_trajectories(batches: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Regroup batches so that none of them splits a trajectory."""
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


def rearranged(
    column: pa.ChunkedArray, kind: pa.DataType, change: Callable[[Ragged], Ragged]
) -> pa.Array:
    """Change which elements each row of a per-token column has; the values themselves are kept.

    Args:
        column: The column.
        kind: Type of its elements (see `PER_TOKEN`).
        change: Function of the column as flat values. Values of 0 that it adds become 0, false or
            an empty list.
    """
    if not pa.types.is_list(kind):
        return change(Ragged.from_arrow(column)).to_arrow(kind)
    lists = cast_column(pc.list_flatten(column), kind)
    lists = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    number = np.arange(1, len(lists) + 1)  # 0 is the empty list
    numbered = Ragged(number, offsets_of(list_lengths(column)), to_numpy(column.is_valid()))
    found = change(numbered)
    empty = pa.ListArray.from_arrays(pa.array([0, 0], pa.int32()), lists.values[:0])
    values = pa.concat_arrays([empty.cast(kind), lists]).take(to_arrow(found.values))
    mask = None if found.valid.all() else to_arrow(~found.valid)
    return pa.ListArray.from_arrays(to_arrow(found.offsets, pa.int32()), values, mask=mask)


def set_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    """Replace a column, or append it."""
    return set_columns(table, {name: column})


def set_columns(table: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Replace columns, or append them."""
    fields = {field.name: field for field in table.schema}
    values = dict(zip(fields, table.columns, strict=True)) | dict(columns)
    for name, column in columns.items():
        old = fields.get(name, pa.field(name, column.type))
        fields[name] = old.with_type(column.type)
    schema = pa.schema(fields.values(), table.schema.metadata)
    return pa.table([values[name] for name in fields], schema)


def count_from_zero(table: pa.Table) -> IntArray:
    """[N] Number the rows of each trajectory: 0..n-1."""
    starts = trajectory_starts(table)
    lengths = np.diff(np.append(starts, table.num_rows))
    return ranges(np.zeros(len(starts), np.int64), lengths)


_FUNCTIONS = {
    "stats": "dataset_metrics",
    "returns": "trajectory_returns",
    "mask": "apply_masks",
} | {
    name: name
    for name in [
        "merge",
        "unmerge",
        "part_by_routes",
        "place_outcomes",
        "place_rewards",
        "place_token_rewards",
        "keep_rows",
        "judge",
        "drift",
        "messages",
    ]
}


@pl.api.register_dataframe_namespace("rollouts")
@pl.api.register_lazyframe_namespace("rollouts")
class Rollouts:
    """The transforms of `pipelines` as methods: what they take after the frame, and what they return.

    `stats` is `dataset_metrics`, `returns` is `trajectory_returns`, `mask` is `apply_masks`.

    Example:
        >>> scan("rollouts/").rollouts.filter("return > 0").rollouts.merge().sink_parquet(
        ...     "steps.parquet"
        ... )
    """

    def __init__(self, frame: pl.LazyFrame | pl.DataFrame) -> None:
        self._frame = frame.lazy()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _FUNCTIONS:
            raise AttributeError(f"rollouts has no method {name!r}, only {', '.join(dir(self))}")
        function = getattr(pipelines, _FUNCTIONS[name])
        return wraps(function)(lambda *values, **named: function(self._frame, *values, **named))

    def __dir__(self) -> list[str]:
        return [*_FUNCTIONS, "filter"]

    def filter(self, *filters: Filter | str, outcome: Outcome = "last") -> pl.LazyFrame:
        """Drop trajectories by filters and by conditions in SQL, as `rollouts filter --where` has them.

        Raises:
            InputError: `nothing_left`: no trajectory is left.
        """
        rules = [pipelines.where(rule) if isinstance(rule, str) else rule for rule in filters]
        return pipelines.apply_filters(self._frame, rules, outcome)[0]
