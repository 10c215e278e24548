"""Write labels as a column in a copy of a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.tables import set_column
from pipelines.view.dataset import Dataset
from pipelines.view.trajectory_index import COMPUTED
from rollout_io.dataset.reader import RowReader, read_metadata
from rollout_io.dataset.rewriting import rewrite
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError
from schemas.types import PREFIX_TYPES

Label = str | float | None


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Adds the column of labels to a table when called."""

    column: str
    values: Mapping[str, Label]
    kind: pa.DataType

    def __call__(self, table: pa.Table) -> pa.Table:
        ids = table.column("trajectory_id").to_pylist()
        values = pa.array([self.values.get(name) for name in ids], self.kind)
        return set_column(table, self.column, values)


def write_labels(
    dataset: Dataset, column: str, values: Mapping[str, Any], out: str
) -> dict[str, Any]:
    """Write a copy of a dataset with a column of labels; unlabelled trajectories get null.

    A user column with the same name is replaced.

    Args:
        dataset: The dataset.
        column: Name of the column.
        values: Strings or numbers by trajectory_id.
        out: Local directory that does not exist yet.

    Raises:
        InputError: `out_is_free`: `out` exists; `view_query`: `column` is reserved, empty or too
            long, a value is invalid, or `out` is not a local directory.
        ConfigError: `known_trajectory`: a label is for an unknown trajectory.
    """
    taken = {*COLUMN_BY_NAME, *PREFIX_TYPES, *COMPUTED, *dataset.index.added}
    if not column or column in taken or len(column) > 200:
        got = f"labels cannot be written to the column {column[:200]!r}"
        hint = "choose a name that neither the rollout table nor the viewer uses"
        raise InputError("view_query", "labels", got, hint=hint)
    kind = _kind(values)
    for name in values:
        dataset.index.number(name)
    if "://" in out or not out or "\0" in out:
        raise InputError("view_query", "labels", f"{out[:200]!r} is not a local directory")
    if os.path.lexists(out):
        got, hint = "a file or directory with that name exists", "choose a different name"
        raise InputError("out_is_free", out, got, hint=hint)
    labelled = _Labelled(column, _cast(values, kind), kind)
    metadata = read_metadata(dataset.path)
    made = metadata.made("view", parent=dataset.path, column=column)
    rewrite(dataset.path, out, labelled, made, decode=True)
    return {"path": out, "num_rows": RowReader(out).num_rows}


def _kind(values: Mapping[str, Any]) -> pa.DataType:
    kinds = {type(value) for value in values.values() if value is not None}
    if kinds <= {str}:
        return pa.string()
    if kinds <= {int, float}:
        if any(isinstance(value, int) and abs(value) > 2**53 for value in values.values()):
            hint = "write it as a string"
            got = "a label is an integer beyond 2^53, which would be rounded"
            raise InputError("view_query", "labels", got, hint=hint)
        return pa.float64()
    raise InputError("view_query", "labels", "labels must be either all strings or all numbers")


def _cast(values: Mapping[str, Any], kind: pa.DataType) -> dict[str, Label]:
    if kind == pa.string():
        return dict(values)
    return {name: None if value is None else float(value) for name, value in values.items()}
