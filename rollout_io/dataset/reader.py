"""Readers of rollout datasets: tables of complete trajectories, Polars, Hugging Face (and back)."""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from rollout_io.dataset.polars_sources import Rows, lazy_frame
from rollout_io.dataset.prefix_layout import decode_prefixes, trajectory_starts
from rollout_io.dataset.shard_files import (
    Shard,
    common_metadata,
    open_shards,
    physical,
    to_polars,
    unified,
)
from rollout_io.dataset.storage import Location, Paths, find_datasets, find_shards, joined
from schemas.checker import DECODE_COLUMNS, check_references, raise_errors
from schemas.errors import ConfigError, InputError, InvariantError
from schemas.imports import requires_extra
from schemas.metadata import DatasetMetadata, Layout, layout_of
from schemas.numpy_arrays import empty_table, to_arrow
from schemas.ragged import IntArray, offsets_of
from schemas.type_checks import check_names
from schemas.types import as_table, cast_table
from schemas.view import View


def scan(path: Paths) -> pl.LazyFrame:
    """Return the logical rollout table of a dataset as a LazyFrame.

    Only the columns that a query uses are read. Prompts are decoded only if the query uses
    `prompt_token_ids`, and only in row groups with a row that the predicate keeps. Rows are ordered
    by shard name, then by position.

    Args:
        path: Directory, glob or file, local or an fsspec URL, or a list of these.

    Example:
        >>> scan("rollouts/").group_by("instance_id").agg(pl.col("reward").mean()).collect()
    """
    shards = open_shards(path)
    schema = _schema_of(shards)

    def frames(names: list[str], predicate: pl.Expr | None) -> Iterator[pl.DataFrame]:
        return map(to_polars, _tables(shards, schema, names, predicate))

    return lazy_frame(frames, to_polars(empty_table(schema)).schema)


def iter_tables(
    path: Paths, columns: Sequence[str] | None = None, *, decode: bool = True
) -> Iterator[pa.Table]:
    """Yield the logical table in pieces of complete trajectories, in order.

    Args:
        path: Directory, glob or file, local or an fsspec URL, or a list of these.
        columns: Columns to read; None reads all.
        decode: If false, pieces that are stored in `prefix` layout keep the three prefix columns
            instead of `prompt_token_ids`.

    Raises:
        ConfigError: `known_column`: a column does not exist.
        InputError: `dataset_exists`, `readable_file`, `shards_complete`: the dataset cannot be read.
    """
    shards = open_shards(path)
    schema = _schema_of(shards)
    yield from _tables(shards, schema, list(columns or schema.names), decode=decode)


def pieces(path: Paths) -> list[str]:
    """Return the paths of the pieces of a dataset that can be read separately, in order.

    The pieces are the shards, or the entire dataset if trajectories span shards.

    Example:
        >>> [table for piece in pieces("rollouts/") for table in iter_tables(piece)]
    """
    shards = open_shards(path)
    if not all(shard.aligned for shard in shards):
        return [joined(path)]
    return [shard.location.url for shard in shards]


def shard_paths(path: Paths) -> list[str]:
    """Return the paths of the shards, in order."""
    return [shard.location.url for shard in open_shards(path)]


def shard_sizes(path: Paths) -> dict[str, int]:
    """Map the file name of each shard to its number of rows, in the order of the shards.

    The keys are paths instead if two shards have the same file name.
    """
    shards = open_shards(path)
    names = [posixpath.basename(shard.location.path) for shard in shards]
    if len(set(names)) < len(names):
        names = [shard.location.path for shard in shards]
    return {name: shard.num_rows for name, shard in zip(names, shards, strict=True)}


def read(path: Paths, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the entire logical table (see `iter_tables`), with its metadata in the Arrow schema."""
    table = pa.concat_tables(iter_tables(path, columns))
    return table.replace_schema_metadata(read_metadata(path).encode("full"))


def read_metadata(path: Paths) -> DatasetMetadata:
    """Return the metadata of a dataset, from its first shard.

    The metadata of several datasets or partitions are combined.

    Raises:
        InputError: `file_metadata`: the metadata of two datasets or partitions differ.
    """
    datasets = find_datasets(path)
    shards = [shard for dataset in datasets for shard in dataset.shards]
    if len(datasets) > 1 or shards[0].root is not None:
        return common_metadata([Shard.open(location) for location in shards])
    return DatasetMetadata.decode(Shard.open(shards[0]).pairs)


def footers(path: Paths) -> list[dict[bytes, bytes]]:
    """Return the key-value metadata of each shard, after checking that no shard is missing."""
    return [shard.pairs for shard in open_shards(path)]


def refuse_mixed_types(shards: Sequence[Location], where: str) -> None:
    """Check that each column has one type in all shards of a dataset.

    Args:
        shards: The shards.
        where: Source of the dataset, for the message.

    Raises:
        InvariantError: `columns_and_types`: a column has different types in two shards.
    """
    if shards:
        unified([Shard.open(shard) for shard in shards], where)


def read_layout(path: Paths) -> Layout:
    """Return the layout that the first shard declares; `full` if it declares none."""
    return layout_of(Shard.open(find_shards(path)[0]).pairs) or "full"


_CACHED_BYTES = 64 << 20
_TOGETHER_ROWS, _TOGETHER_BYTES = 1024, 8 << 20


class RowReader:
    """Random access to the rows of a valid dataset, reading only the row groups that contain them.

    The most recently used row groups are cached, up to 64 MiB. Threads may share a reader.

    Args:
        path: Directory, glob or file, local or an fsspec URL, or a list of these.

    Attributes:
        schema: Schema of the logical table.
        num_rows: Number of rows.

    Example:
        >>> RowReader("rollouts/").rows(4096, 4100, ["trajectory_id", "prompt_token_ids"])
    """

    def __init__(self, path: Paths) -> None:
        self._shards = open_shards(path)
        self.schema = _schema_of(self._shards)
        self._groups = [(s, i) for s in self._shards for i in range(len(s.group_sizes))]
        sizes = [size for shard in self._shards for size in shard.group_sizes]
        self._starts = offsets_of(np.array(sizes, np.int64))
        self.num_rows = int(self._starts[-1])
        self._cached: dict[tuple[int, tuple[str, ...]], pa.Table] = {}
        self._lock = Lock()

    def rows(self, begin: int, end: int, names: Sequence[str]) -> pa.Table:
        """Read adjacent rows.

        Args:
            begin: First row. If `names` includes `prompt_token_ids`, it must begin a trajectory.
            end: Row after the last one. If `names` includes `prompt_token_ids`, the last row must
                end a trajectory.
            names: Columns of the logical table, in the order of the result.
        """
        parts = [empty_table(pa.schema([self.schema.field(name) for name in names]))]
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        for number in range(first, len(self._groups)):
            start = int(self._starts[number])
            if start >= end:
                break
            part = slice(max(begin - start, 0), end - start)
            parts.append(self._read(number, part, names))
        return pa.concat_tables(parts, promote_options="permissive")

    def take(self, rows: IntArray, names: Sequence[str]) -> pa.Table:
        """Read rows at any positions, in order (but not `prompt_token_ids`: use `rows` for these).

        Args:
            rows: [K] positions in ascending order.
            names: Columns of the logical table, in the order of the result.
        """
        parts = [empty_table(pa.schema([self.schema.field(name) for name in names]))]
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(groups).tolist():
            inside = rows[groups == number] - self._starts[number]
            whole = self._read(number, slice(None), names)
            parts.append(whole.take(to_arrow(inside)))
        return pa.concat_tables(parts, promote_options="permissive")

    def _read(self, number: int, part: slice, names: Sequence[str]) -> pa.Table:
        shard = self._groups[number][0]
        decodes = shard.encoded and "prompt_token_ids" in names
        wanted = dict.fromkeys([*names, *(DECODE_COLUMNS if decodes else ())])
        present = frozenset(shard.names)
        stored = tuple(name for name in wanted if name in present)
        table = self._row_group(number, stored)[part]
        table = decode_prefixes(table) if decodes else table
        present = frozenset(table.column_names)
        return table.select([name for name in names if name in present])

    def _row_group(self, number: int, names: tuple[str, ...]) -> pa.Table:
        shard, index = self._groups[number]
        with self._lock:
            table = self._cached.pop((number, names), None)
        if table is None:
            table = shard.row_group(index, names)
        with self._lock:
            if table.nbytes <= _CACHED_BYTES:
                self._cached[number, names] = table  # the cache is ordered by last use
            while sum(cached.nbytes for cached in self._cached.values()) > _CACHED_BYTES:
                self._cached.pop(next(iter(self._cached)))
        return table


def stored_tables(path: Paths) -> Iterator[pa.Table]:
    """Yield the tables as stored, including invalid ones, cut between trajectories if possible.

    A `prefix` row group is decoded unless its references are broken.
    """
    for shard in open_shards(path):
        is_named = len(set(shard.names)) == len(shard.names) and "trajectory_id" in shard.names
        cut = is_named and not shard.aligned
        whole = (table for _, table in shard.row_groups(shard.names, is_checked=False))
        for stored in _align([shard], shard.names, whole) if cut else whole:
            decodes = shard.encoded and View(stored).run(check_references).is_empty()
            yield decode_prefixes(stored) if decodes else stored


def _schema_of(shards: Sequence[Shard]) -> pa.Schema:
    """Return the schema with all columns of all shards."""
    first_with = {shard.schema: shard for shard in reversed(shards)}
    for schema, shard in first_with.items():
        raise_errors(View(empty_table(schema)).run(check_names), shard.location.path)
    return unified(shards, posixpath.dirname(shards[0].location.path))


def _tables(
    shards: Sequence[Shard],
    schema: pa.Schema,
    names: Sequence[str],
    predicate: pl.Expr | None = None,
    *,
    decode: bool = True,
) -> Iterator[pa.Table]:
    present = frozenset(schema.names)
    unknown = [n for n in names if n not in present]
    if unknown:
        where, finding = shards[0].location.path, f"the dataset has no column {unknown[0]!r}"
        near = difflib.get_close_matches(unknown[0], schema.names, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(schema.names)}"
        raise ConfigError("known_column", where, finding, "", hint)
    target = pa.schema([schema.field(n) for n in names])
    aligned = all(shard.aligned for shard in shards)
    whole = (table for shard in shards for table in shard.tables(names, predicate, decode=decode))
    empty, has_rows = empty_table(target), False
    for encoded, tables in small_together(whole if aligned else _align(shards, names), names):
        has_rows = True
        columns = physical(names) if encoded else names
        like = empty.drop_columns(["prompt_token_ids"]) if encoded else empty
        yield pa.concat_tables([like, *tables], promote_options="permissive").select(columns)
    if not has_rows:
        yield empty


def small_together(
    tables: Iterable[pa.Table], names: Sequence[str] = ()
) -> Iterator[tuple[bool, list[pa.Table]]]:
    """Group adjacent small tables, because each table has a fixed cost.

    The first groups are smaller, so that a query of the first rows reads little.

    Args:
        tables: The tables.
        names: Columns that are wanted of them.

    Yields:
        True if `prompt_token_ids` is wanted but encoded; and tables with the same column names.
    """
    group: list[pa.Table] = []
    num_rows = num_bytes = 0
    most_rows = 1
    for table in tables:
        is_full = num_rows + table.num_rows > most_rows or num_bytes > _TOGETHER_BYTES
        if group and (is_full or table.column_names != group[0].column_names):
            yield _lacks_prompts(group[0], names), group
            group, num_rows, num_bytes = [], 0, 0
            most_rows = min(2 * most_rows, _TOGETHER_ROWS)
        group.append(table)
        num_rows += table.num_rows
        num_bytes += table.nbytes
    if group:
        yield _lacks_prompts(group[0], names), group


def _lacks_prompts(table: pa.Table, names: Sequence[str]) -> bool:
    return "prompt_token_ids" in names and "prompt_token_ids" not in table.column_names


def _align(
    shards: Sequence[Shard], names: Sequence[str], tables: Iterable[pa.Table] | None = None
) -> Iterator[pa.Table]:
    """Regroup the tables of other programs' files so that no trajectory spans two tables."""
    keyed = list(dict.fromkeys([*names, "trajectory_id"]))
    for shard in shards:
        if "trajectory_id" not in shard.names:
            where, finding = shard.location.path, "the required column trajectory_id is missing"
            hint = f"run `rollouts validate {where}` to list every error"
            raise InvariantError("columns_and_types", where, finding, "", hint)
    rest: pa.Table | None = None
    for table in tables or (table for shard in shards for table in shard.tables(keyed)):
        parts = [table] if rest is None else [rest, table]
        whole = pa.concat_tables(parts, promote_options="permissive")
        starts = trajectory_starts(whole)
        cut = int(starts[-1]) if len(starts) else 0
        if cut:
            yield whole.slice(0, cut).select(names)
        rest = whole.slice(cut)
    if rest is not None and rest.num_rows:
        yield rest.select(names)


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
    return IterableDataset(ArrowExamplesIterable(_decoded_tables, {"parts": parts}), info=info)


def _decoded_tables(parts: list[Any]) -> Iterator[tuple[str, pa.Table]]:
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
