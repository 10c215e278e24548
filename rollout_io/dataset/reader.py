"""Readers of rollout datasets: tables of complete trajectories, Polars, Hugging Face."""

from __future__ import annotations

import base64
import binascii
import difflib
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.footer import Place, refuse_incomplete, verify
from rollout_io.dataset.id_filters import row_groups_with
from rollout_io.dataset.opening import refuse_irregular, too_many_open_files
from rollout_io.dataset.partitions import partition_fields, partition_values, with_partition
from rollout_io.dataset.polars_sources import lazy_frame
from rollout_io.dataset.prefix_layout import decode_prefixes, trajectory_starts
from rollout_io.dataset.sources import State, changed, state_of
from rollout_io.dataset.storage import Location, find_shards
from schemas.checker import (
    DECODE_COLUMNS,
    check_references,
    misnamed_columns,
    raise_errors,
    unreadable_text,
)
from schemas.columns import COLUMN_BY_NAME, PREFIX_FIELDS
from schemas.errors import ConfigError, InputError, InvariantError
from schemas.extras import requires_extra
from schemas.metadata import (
    DatasetMetadata,
    Layout,
    common,
    contradictory,
    layout_of,
    upgrade,
    version_of,
)
from schemas.numpy_arrays import empty_table, to_arrow
from schemas.ragged import IntArray, offsets_of
from schemas.types import PREFIX_TYPES, plain_table

PathLike = str | os.PathLike[str]


def scan(path: PathLike) -> pl.LazyFrame:
    """Return the logical rollout table of a dataset as a LazyFrame.

    Only the columns that a query uses are read. Prompts are decoded only if the query uses
    `prompt_token_ids`, and only in row groups with a row that the predicate keeps. Rows are ordered
    by shard name, then by position.

    Args:
        path: Directory, glob or file, local or an fsspec URL.

    Example:
        >>> scan("rollouts/").group_by("instance_id").agg(pl.col("reward").mean()).collect()
    """
    shards = _open_shards(path)
    schema = _schema_of(shards)

    def frames(names: list[str], predicate: pl.Expr | None) -> Iterator[pl.DataFrame]:
        return map(_frame, _tables(shards, schema, names, predicate))

    return lazy_frame(frames, _frame(empty_table(schema)).schema)


def iter_tables(
    path: PathLike, columns: Sequence[str] | None = None, *, decode: bool = True
) -> Iterator[pa.Table]:
    """Yield the logical table in pieces of complete trajectories, in order.

    Args:
        path: Directory, glob or file, local or an fsspec URL.
        columns: Columns to read; None reads all.
        decode: If false, pieces that are stored in `prefix` layout keep the three prefix columns
            instead of `prompt_token_ids`.

    Raises:
        ConfigError: `known_column`: a column does not exist.
        InputError: `dataset_exists`, `readable_file`, `shards_complete`: the dataset cannot be read.
    """
    shards = _open_shards(path)
    schema = _schema_of(shards)
    yield from _tables(shards, schema, list(columns or schema.names), decode=decode)


def pieces(path: PathLike) -> list[str]:
    """Return the paths of the pieces of a dataset that can be read separately, in order.

    The pieces are the shards, or the entire dataset if trajectories span shards.

    Example:
        >>> [table for piece in pieces("rollouts/") for table in iter_tables(piece)]
    """
    shards = _open_shards(path)
    if not all(shard.aligned for shard in shards):
        return [os.fspath(path)]
    return [shard.location.url for shard in shards]


def shard_paths(path: PathLike) -> list[str]:
    """Return the paths of the shards, in order."""
    return [shard.location.url for shard in _open_shards(path)]


def shard_sizes(path: PathLike) -> dict[str, int]:
    """Map the file name of each shard to its number of rows, in the order of the shards.

    The keys are paths instead if two shards have the same file name.
    """
    shards = _open_shards(path)
    names = [posixpath.basename(shard.location.path) for shard in shards]
    if len(set(names)) < len(names):
        names = [shard.location.path for shard in shards]
    return {name: shard.num_rows for name, shard in zip(names, shards, strict=True)}


def read(path: PathLike, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the entire logical table (see `iter_tables`), with its metadata in the Arrow schema."""
    table = pa.concat_tables(iter_tables(path, columns))
    return table.replace_schema_metadata(read_metadata(path).encode("full"))


def read_metadata(path: PathLike) -> DatasetMetadata:
    """Return the metadata of a dataset, from its first shard or, if partitioned, from all shards.

    Raises:
        InputError: `file_metadata`: the metadata of partitions contradict each other.
    """
    found = find_shards(path)
    if found[0].root is not None:
        return _common_metadata([_Shard.open(location) for location in found])
    return DatasetMetadata.decode(_Shard.open(found[0]).pairs)


def footers(path: PathLike) -> list[dict[bytes, bytes]]:
    """Return the key-value metadata of each shard, after checking that no shard is missing."""
    return [shard.pairs for shard in _open_shards(path)]


def refuse_mixed_types(shards: Sequence[Location], where: str) -> None:
    """Check that each column has one type in all shards of a dataset.

    Args:
        shards: The shards.
        where: Source of the dataset, for the message.

    Raises:
        InvariantError: `columns_and_types`: a column has different types in two shards.
    """
    if shards:
        _unified([_Shard.open(shard) for shard in shards], where)


def read_layout(path: PathLike) -> Layout:
    """Return the layout that the first shard declares; `full` if it declares none."""
    return layout_of(_Shard.open(find_shards(path)[0]).pairs) or "full"


def to_hf(path: PathLike) -> Any:
    """Return the logical table as an in-memory `datasets.Dataset`.

    Raises:
        MissingExtra: `extra_installed`: the `datasets` package is not installed.
    """
    with requires_extra("hf", "to_hf"):
        from datasets import Dataset
        from datasets.table import InMemoryTable
    return Dataset(InMemoryTable(read(path)))


_CACHED_BYTES = 64 << 20
_TOGETHER_ROWS, _TOGETHER_BYTES = 1024, 8 << 20
_KEPT_SHARDS, _KEPT_FOOTER_BYTES = 2048, 64 << 10
_BLOCK_BYTES = 1 << 20  # read-ahead beyond a column chunk; the default of s3fs is 50 MB


class RowReader:
    """Random access to the rows of a valid dataset, reading only the row groups that contain them.

    The most recently used row groups are cached, up to 64 MiB. Threads may share a reader.

    Args:
        path: Directory, glob or file, local or an fsspec URL.

    Attributes:
        schema: Schema of the logical table.
        num_rows: Number of rows.

    Example:
        >>> RowReader("rollouts/").rows(4096, 4100, ["trajectory_id", "prompt_token_ids"])
    """

    def __init__(self, path: PathLike) -> None:
        self._shards = _open_shards(path)
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
        stored = tuple(name for name in wanted if name in shard.names)
        table = self._row_group(number, stored)[part]
        table = decode_prefixes(table) if decodes else table
        return table.select([name for name in names if name in table.column_names])

    def _row_group(self, number: int, names: tuple[str, ...]) -> pa.Table:
        shard, index = self._groups[number]
        with self._lock:
            table = self._cached.pop((number, names), None)
        if table is None:
            table = shard.row_group(index, names)
        with self._lock:
            if table.nbytes <= _CACHED_BYTES:
                self._cached[number, names] = table  # the cache is ordered by last use
            while sum(known.nbytes for known in self._cached.values()) > _CACHED_BYTES:
                self._cached.pop(next(iter(self._cached)))
        return table


def stored_tables(path: PathLike) -> Iterator[pa.Table]:
    """Yield the tables as stored, including invalid ones, cut between trajectories if possible.

    A `prefix` row group is decoded unless its references are broken.
    """
    for shard in _open_shards(path):
        is_named = len(set(shard.names)) == len(shard.names) and "trajectory_id" in shard.names
        cut = is_named and not shard.aligned
        whole = (table for _, table in shard.row_groups(shard.names, is_checked=False))
        for stored in _align([shard], shard.names, whole) if cut else whole:
            decodes = shard.encoded and not len(check_references(stored))
            yield decode_prefixes(stored) if decodes else stored


class _Shard:
    """One Parquet file, which is kept open only while it is read."""

    def __init__(
        self, location: Location, file: pq.ParquetFile, partition: Mapping[str, pa.Scalar]
    ) -> None:
        self.location, self._footer, self._partition = location, file.metadata, partition
        self._state = state_of(location.path) if location.is_local else None
        self.num_rows: int = file.metadata.num_rows
        self.pairs = file.metadata.metadata or {}
        self._stored: list[str] = file.schema_arrow.names
        added = [f for f in partition_fields(partition) if f.name not in self._stored]
        self.names = [*self._stored, *(f.name for f in added)]
        self.encoded = _is_encoded(self.names)
        self.aligned = self.encoded or layout_of(self.pairs) is not None
        empty = empty_table(file.schema_arrow.remove_metadata())
        stored = _logical_schema(plain_table(upgraded(empty, self.pairs)).schema)
        self.schema = pa.schema([*stored, *added])

    @classmethod
    def open(
        cls, location: Location, partition: Mapping[str, pa.Scalar] = MappingProxyType({})
    ) -> _Shard:
        """Open a shard, and check its footer.

        Args:
            location: Path of the file.
            partition: Columns in the names of its directories (`partition_values`).
        """
        key = location, state_of(location.path) if location.is_local else None
        if key[1] is not None and not partition and (shard := _kept.get(key)) is not None:
            return shard
        with _readable(location), _source(location) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            _refuse_renamed(file)
            verify(file, source)
            shard = cls(location, file, partition)
        is_small = file.metadata.serialized_size <= _KEPT_FOOTER_BYTES
        if is_small and not partition and shard._state is not None and shard._state == key[1]:
            if len(_kept) >= _KEPT_SHARDS:
                _kept.clear()
            _kept[key] = shard
        return shard

    @property
    def group_sizes(self) -> list[int]:
        """Number of rows of each row group."""
        return [self._footer.row_group(i).num_rows for i in range(self._footer.num_row_groups)]

    def row_groups(
        self,
        names: Sequence[str],
        predicate: pl.Expr | None = None,
        *,
        is_checked: bool = True,
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield row groups in their stored layout, upgraded to the current schema version.

        Row groups in which no row satisfies `predicate` are skipped. If it limits the ids, most are
        skipped without being read (`rollout_io.dataset.id_filters`). List and string columns have
        plain types, even if the file has large or view types.

        Raises:
            ValidationError: `columns_and_types`: a text is not UTF-8, and `is_checked` is true.
        """
        numbers: Sequence[int] = range(self._footer.num_row_groups)
        if predicate is not None and not self._partition:
            with _readable(self.location):
                numbers = row_groups_with(predicate, self.pairs, len(numbers)).tolist()
        with self._opened() as file:
            for index in numbers:
                if predicate is None or self._keeps_some(file, index, predicate):
                    yield index, self._row_group(file, index, names, is_checked=is_checked)

    def row_group(self, index: int, names: Sequence[str]) -> pa.Table:
        """Return one row group, in the same form as `row_groups`."""
        with self._opened() as file:
            return self._row_group(file, index, names)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        with ExitStack() as stack:
            with _readable(self.location):
                state = self._state and state_of(self.location.path)
                if self._state and state and not state.may_be(self._state):
                    raise changed(self.location.path, "replaced or rewritten")
                source = stack.enter_context(_source(self.location))
                footer = self._footer
                file = pq.ParquetFile(source, metadata=footer, page_checksum_verification=True)
            yield file

    def _row_group(
        self,
        file: pq.ParquetFile,
        index: int,
        names: Sequence[str],
        *,
        is_checked: bool = True,
    ) -> pa.Table:
        with _readable(self.location, index):
            # Threads that read through a Python file object can outlive the interpreter.
            columns = [name for name in names if name in self._stored]
            table = file.read_row_group(index, columns=columns, use_threads=self.location.is_local)
            # A name with dots also selects the fields of a struct, and "a" also selects "a.b".
            kept = [i for i, name in enumerate(table.column_names) if name in columns]
            # Polars aborts on metadata that is not UTF-8, and nothing reads that of the columns.
            stored = table.select(kept).replace_schema_metadata(None)
            table = plain_table(upgraded(stored, self.pairs))
            if is_checked:
                raise_errors(unreadable_text(table), self.location.path)
        values = {name: value for name, value in self._partition.items() if name in names}
        where = f"{self.location.path}, row group {index}"
        return with_partition(table, values, where) if values else table

    def _keeps_some(self, file: pq.ParquetFile, index: int, predicate: pl.Expr) -> bool:
        names = predicate.meta.root_names()
        if not names or not set(names) <= set(self.names):
            return True  # the predicate needs decoded prompts, or a column that this shard lacks
        return not _frame(self._row_group(file, index, names)).filter(predicate).is_empty()

    def tables(
        self, names: Sequence[str], predicate: pl.Expr | None = None, *, decode: bool = True
    ) -> Iterator[pa.Table]:
        """Yield the logical columns `names`, row group by row group (see `row_groups`)."""
        has_prompts = self.encoded and "prompt_token_ids" in names
        stored = list(dict.fromkeys([*names, *(DECODE_COLUMNS if has_prompts else ())]))
        wanted = names if decode or not has_prompts else _physical(names)
        for index, table in self.row_groups([n for n in stored if n in self.names], predicate):
            if has_prompts:
                raise_errors(check_references(table), f"{self.location.path}, row group {index}")
                table = table if predicate is None else _trajectories_with(table, predicate)
                table = decode_prefixes(table) if decode else table
            yield table.select([n for n in wanted if n in table.column_names])


# Verbs open a dataset of many small shards several times. A file that changed has another state.
_kept: dict[tuple[Location, State | None], _Shard] = {}


def _open_shards(path: PathLike) -> list[_Shard]:
    """Open all shards of a dataset, and check that each directory is complete.

    Raises:
        InputError: `dataset_exists`: there is no dataset; `readable_file`, `shards_complete`,
            `file_metadata`: the dataset is damaged or incomplete.
    """
    found = find_shards(path)
    shards = [
        _Shard.open(location, values)
        for location, values in zip(found, partition_values(found), strict=True)
    ]
    if found[0].root is not None:
        _common_metadata(shards)
    if Location.of(path).fs.isdir(Location.of(path).path):
        for folder, group in groupby(shards, lambda shard: posixpath.dirname(shard.location.path)):
            inside = list(group)
            names = [posixpath.basename(shard.location.path) for shard in inside]
            where = os.fspath(path) if inside[0].location.root is None else folder
            refuse_incomplete(where, [Place.decode(shard.pairs) for shard in inside], names)
    return shards


def _common_metadata(shards: Sequence[_Shard]) -> DatasetMetadata:
    """Combine the metadata of partitions, which must not contradict each other."""
    found = {s.location.path: DatasetMetadata.decode(s.pairs) for s in shards}
    returns = {path: metadata.outcome or "last" for path, metadata in found.items()}
    first = next(iter(returns))
    if differs := [path for path in returns if returns[path] != returns[first]]:
        raise contradictory(f"{first} and {differs[0]}", "outcome")
    return common(found, {"tokenizer_fingerprint", "logprobs_mode", "vocab_size"})


def upgraded(table: pa.Table, pairs: dict[bytes, bytes]) -> pa.Table:
    """Upgrade a table to the current schema version."""
    return upgrade(table, version_of(pairs))


@contextmanager
def _source(location: Location) -> Iterator[Any]:
    """Open a Parquet file as a stream of bytes."""
    if location.is_local:
        refuse_irregular(location.path)
        source = pa.OSFile(os.fsencode(location.path))  # bytes: a name need not be UTF-8
    else:
        source = location.fs.open(location.path, "rb", block_size=_BLOCK_BYTES)
    with source:
        yield source


@contextmanager
def _readable(location: Location, row_group: int | None = None) -> Iterator[None]:
    """Convert the errors that Parquet readers raise for a damaged file to an `InputError`."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeError, binascii.Error) as error:
        if isinstance(error, OSError) and (limit := too_many_open_files(error, location.path)):
            raise limit from None
        where = location.path + ("" if row_group is None else f", row group {row_group}")
        hint = "restore the file from a copy, or write it again"
        if location.path.endswith((".jsonl", ".json")):
            hint = f"convert the log first: rollouts convert {location.path} --out DS"
        got = f"the file is damaged or not Parquet: {' '.join(str(error).split())}"
        raise InputError("readable_file", where, got, "", hint) from None


def _refuse_renamed(file: pq.ParquetFile) -> None:
    """Compare column names with Arrow's copy of them, because the footer has no checksum."""
    copy = (file.metadata.metadata or {}).get(b"ARROW:schema")
    if copy is not None:
        names = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(copy))).names
        if names != file.schema_arrow.names:
            raise pa.ArrowInvalid("column names differ from their copy in the footer")


def _is_encoded(names: Sequence[str]) -> bool:
    return PREFIX_TYPES.keys() <= set(names) and "prompt_token_ids" not in names


def _logical_schema(stored: pa.Schema) -> pa.Schema:
    if not _is_encoded(stored.names):
        return stored.remove_metadata()
    index = stored.names.index(PREFIX_FIELDS[0].name)
    fields = [f for f in stored if f.name not in PREFIX_TYPES]
    prompt = pa.field("prompt_token_ids", COLUMN_BY_NAME["prompt_token_ids"].type, nullable=False)
    return pa.schema([*fields[:index], prompt, *fields[index:]])


def _schema_of(shards: Sequence[_Shard]) -> pa.Schema:
    """Return the schema with all columns of all shards."""
    first_with = {shard.schema: shard for shard in reversed(shards)}
    for schema, shard in first_with.items():
        raise_errors(misnamed_columns(empty_table(schema)), shard.location.path)
    return _unified(shards, os.path.dirname(shards[0].location.path))  # noqa: PTH120


def _unified(shards: Sequence[_Shard], where: str) -> pa.Schema:
    try:
        return pa.unify_schemas([s.schema for s in shards], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        got = f"the shards have different types for a column: {error}"
        hint = "give the column the same type in all shards, or split the dataset"
        raise InvariantError("columns_and_types", where, got, "", hint) from None


def _tables(
    shards: Sequence[_Shard],
    schema: pa.Schema,
    names: Sequence[str],
    predicate: pl.Expr | None = None,
    *,
    decode: bool = True,
) -> Iterator[pa.Table]:
    unknown = [n for n in names if n not in schema.names]
    if unknown:
        where, got = shards[0].location.path, f"the dataset has no column {unknown[0]!r}"
        near = difflib.get_close_matches(unknown[0], schema.names, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(schema.names)}"
        raise ConfigError("known_column", where, got, "", hint)
    target = pa.schema([schema.field(n) for n in names])
    aligned = all(shard.aligned for shard in shards)
    whole = (table for shard in shards for table in shard.tables(names, predicate, decode=decode))
    empty, found = empty_table(target), False
    for encoded, tables in small_together(whole if aligned else _align(shards, names), names):
        found = True
        kept = _physical(names) if encoded else names
        like = empty.drop_columns(["prompt_token_ids"]) if encoded else empty
        yield pa.concat_tables([like, *tables], promote_options="permissive").select(kept)
    if not found:
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
    shards: Sequence[_Shard], names: Sequence[str], given: Iterable[pa.Table] | None = None
) -> Iterator[pa.Table]:
    """Regroup the tables of other programs' files so that no trajectory spans two tables."""
    keyed = list(dict.fromkeys([*names, "trajectory_id"]))
    for shard in shards:
        if "trajectory_id" not in shard.names:
            where, got = shard.location.path, "the required column trajectory_id is missing"
            hint = f"run `rollouts validate {where}` to list every error"
            raise InvariantError("columns_and_types", where, got, "", hint)
    rest: pa.Table | None = None
    for table in given or (table for shard in shards for table in shard.tables(keyed)):
        parts = [table] if rest is None else [rest, table]
        whole = pa.concat_tables(parts, promote_options="permissive")
        starts = trajectory_starts(whole)
        cut = int(starts[-1]) if len(starts) else 0
        if cut:
            yield whole.slice(0, cut).select(names)
        rest = whole.slice(cut)
    if rest is not None and rest.num_rows:
        yield rest.select(names)


def _physical(names: Sequence[str]) -> list[str]:
    """Return the names with the prefix columns instead of `prompt_token_ids`."""
    prefix = [field.name for field in PREFIX_FIELDS]
    at = names.index("prompt_token_ids")
    return [*names[:at], *prefix, *names[at + 1 :]]


def _trajectories_with(table: pa.Table, predicate: pl.Expr) -> pa.Table:
    """Return the rows of the trajectories in which any row satisfies the predicate.

    If the predicate needs decoded prompts, return all rows.
    """
    used = set(predicate.meta.root_names())
    if not used <= set(table.column_names):
        return table
    rows = _frame(table.select(list(used | {"trajectory_id"})))
    ids = rows.filter(predicate)["trajectory_id"].unique()
    return table.filter(to_arrow(rows["trajectory_id"].is_in(ids.implode()).to_numpy()))


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
