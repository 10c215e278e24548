"""Parts of the index of logs, joined; and the rows of logs, which are read from their files again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.view.log_index import At, Part
from pipelines.view.log_table import FACTS
from pipelines.view.short_rows import kept_columns, short_rows
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.formats.base import added
from schemas.columns import COLUMN_BY_NAME
from schemas.numpy_arrays import empty_table
from schemas.ragged import IntArray

_CACHED_BYTES = 64 << 20


@dataclass(slots=True, weakref_slot=True)
class TableCache:
    """The most recently opened trajectories, up to 64 MiB; at least one."""

    tables: OrderedDict[tuple[At, str], pa.Table] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, at: tuple[At, str], read: Callable[[], pa.Table]) -> pa.Table:
        """Return a table, reading it if it is not kept."""
        with self.lock:
            if at in self.tables:
                self.tables.move_to_end(at)
                return self.tables[at]
        table = read()
        with self.lock:
            self.tables[at] = table
            while (
                len(self.tables) > 1 and sum(t.nbytes for t in self.tables.values()) > _CACHED_BYTES
            ):
                self.tables.popitem(last=False)
        return table


class LogRows:
    """The rows of logs by position, with the interface of `RowReader`.

    Args:
        schema: Schema of all rows.
        index: The trajectories.
        table: Returns the rows of a trajectory.
    """

    def __init__(
        self, schema: pa.Schema, index: TrajectoryIndex, table: Callable[[int], pa.Table]
    ) -> None:
        self.schema, self.num_rows = schema, len(index.rows)
        self._starts, self._table = index.starts, table

    def rows(self, begin: int, end: int, names: Sequence[str]) -> pa.Table:
        """Read adjacent rows; rows of rejected records are left out."""
        wanted = pa.schema([self.schema.field(name) for name in names])
        parts = [empty_table(wanted)]
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        for number in range(max(first, 0), len(self._starts) - 1):
            start = int(self._starts[number])
            if start >= end:
                break
            table = self._table(number)[max(begin - start, 0) : end - start]
            parts.append(_selected(table, wanted))
        return pa.concat_tables(parts, promote_options="permissive").combine_chunks()

    def take(self, rows: IntArray, names: Sequence[str]) -> pa.Table:
        """Read rows at any positions, in order."""
        tables = [self.rows(row, row + 1, names) for row in rows.tolist()]
        return pa.concat_tables(tables, promote_options="permissive")


def _selected(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(f.name).cast(f.type) if f.name in table.column_names
        else pa.nulls(table.num_rows, f.type)
        for f in schema
    ]  # fmt: skip
    return pa.table(columns, names=schema.names)


def joined(parts: Sequence[Part]) -> Part:
    """Join parts; columns that only some have are null in the others.

    A user column with types that have no common one becomes text.
    """
    notes: dict[str, int] = {}
    for part in parts:
        notes = added(notes, part.notes)
    return Part(
        rows=pl.concat([part.rows for part in parts], how="diagonal_relaxed", rechunk=True),
        facts=pl.concat([part.facts for part in parts], rechunk=True),
        runs=[at for part in parts for at in part.runs],
        cut=frozenset(name for part in parts for name in part.cut),
        schema=_unified([part.schema for part in parts]),
        notes=notes,
    )


def _unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    unified: dict[str, pa.Field] = {}
    for field_ in (f for schema in dict.fromkeys(schemas) for f in schema):
        before = unified.get(field_.name, field_)
        try:
            merged = pa.unify_schemas(
                [pa.schema([before]), pa.schema([field_])], promote_options="permissive"
            ).field(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            merged = pa.field(field_.name, pa.string())
        unified[field_.name] = merged.with_nullable(nullable=True)
    return pa.schema(list(unified.values()))


def without(part: Part, names: pl.Series) -> Part:
    """Return a part without the trajectories in `names`."""
    is_left_out = part.facts["trajectory_id"].is_in(names.implode())
    remaining = pl.col("trajectory_id").is_in(
        part.facts["trajectory_id"].filter(~is_left_out).implode()
    )
    runs = [at for at, is_known in zip(part.runs, is_left_out, strict=True) if not is_known]
    rows, facts = part.rows.filter(remaining), part.facts.filter(remaining)
    return replace(part, rows=rows, facts=facts, runs=runs)


def _nothing() -> Part:
    columns = [
        COLUMN_BY_NAME[name] for name in ("instance_id", "trajectory_id", "repetition_id", "reward")
    ]
    columns += [
        COLUMN_BY_NAME[name] for name in ("prompt_token_ids", "response_ids", "loss_mask", "error")
    ]
    table = empty_table(pa.schema([pa.field(c.name, c.type) for c in columns]))
    rows = short_rows(table, kept_columns(table.schema), set())
    facts = pl.DataFrame(schema={"trajectory_id": pl.String, **FACTS})
    schema = table.schema
    return Part(rows=rows, facts=facts, runs=[], cut=frozenset(), schema=schema, notes={})


NOTHING = _nothing()
"""The part of a log without trajectories."""
