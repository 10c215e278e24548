"""Rollout tables as Hugging Face datasets, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa

from rollout_io.dataset.polars_sources import Rows, lazy_frame
from rollout_io.dataset.reader import iter_tables, pieces, read
from rollout_io.dataset.shard_files import to_polars
from rollout_io.dataset.storage import Paths
from schemas.errors import InputError
from schemas.imports import requires_extra
from schemas.numpy_arrays import empty_table
from schemas.types import as_table, cast_table

_BATCH_ROWS = 1024


def to_hf(data: Paths | Rows, *, streaming: bool = False) -> Any:
    """Return the logical table as a `datasets.Dataset`, or an `IterableDataset` that reads as it goes.

    Args:
        data: A dataset, or a frame.
        streaming: Return an `IterableDataset`, which has a shard for each piece of the dataset, for the
            workers of a `DataLoader`.

    Raises:
        MissingExtra: `extra_installed`: the `datasets` package is not installed.

    Example:
        >>> next(iter(to_hf("rollouts/", streaming=True)))["trajectory_id"]
        'shop-0_0'
    """
    with requires_extra("hf", "to_hf"):
        from datasets import Dataset, DatasetInfo, Features, IterableDataset
        from datasets.iterable_dataset import ArrowExamplesIterable
        from datasets.table import InMemoryTable
    table = as_table(data) if isinstance(data, Rows) else None
    if not streaming:
        return Dataset(InMemoryTable(read(data) if table is None else table))
    parts = [*pieces(data)] if table is None else [table]
    schema = next(iter_tables(data)).schema if table is None else table.schema
    info = DatasetInfo(features=Features.from_arrow_schema(schema.remove_metadata()))
    # Rows that a generator yields one by one would lose their types, and be slower by far.
    return IterableDataset(ArrowExamplesIterable(_tables, {"parts": parts}), info=info)


def _tables(parts: list[Any]) -> Iterator[tuple[str, pa.Table]]:
    for number, part in enumerate(parts):
        for i, table in enumerate(iter_tables(part) if isinstance(part, str) else [part]):
            yield f"{number}-{i}", table.replace_schema_metadata()


def from_hf(dataset: Any) -> pl.LazyFrame:
    """Return the rows of a `datasets.Dataset` or `IterableDataset` as a rollout table, as they are read.

    Declared columns get their declared types. Write the frame with `RolloutWriter`, which checks it.

    Raises:
        InputError: `hf_dataset`: it has several splits, or a stream does not know its columns.

    Example:
        >>> from_hf(to_hf("rollouts/")).collect().equals(scan("rollouts/").collect())
        True
    """
    features: Any = getattr(dataset, "features", None)
    if not hasattr(features, "arrow_schema"):
        finding = (
            f"the splits {', '.join(dataset)}" if isinstance(dataset, dict) else "no known columns"
        )
        hint = (
            "choose a split, such as dataset['train'], and give a stream its features with `cast`"
        )
        raise InputError("hf_dataset", "dataset", finding, "a Dataset or IterableDataset", hint)

    def frames(names: list[str], predicate: pl.Expr | None) -> Iterator[pl.DataFrame]:
        del names, predicate  # `lazy_frame` applies both
        for batch in dataset.with_format(None).iter(_BATCH_ROWS):
            table = pa.Table.from_pydict(dict(batch), schema)
            yield to_polars(cast_table(table))

    schema = features.arrow_schema.remove_metadata()
    return lazy_frame(frames, to_polars(cast_table(empty_table(schema))).schema)
