"""Parquet files of a dataset, each opened only while it is read, and checked on opening.

The names of their directories may add columns, `DS/run=a/part-00000.parquet` (Hive partitions). PyArrow and
Polars read them too, but each its own way: `run=01` becomes 1, a directory without a column becomes null or
disappears with its column, and `run=a/run=b` is accepted. Importing `pyarrow.dataset` takes longer than all
other imports of a verb.
"""

from __future__ import annotations

import base64
import binascii
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.footer import Place, refuse_incomplete, row_groups_with, verify
from rollout_io.dataset.opening import (
    State,
    changed,
    refuse_irregular,
    state_of,
    too_many_open_files,
)
from rollout_io.dataset.prefix_layout import decode_prefixes
from rollout_io.dataset.storage import PARTITION_HINT, DatasetFiles, Location, Paths, find_datasets
from schemas.checker import DECODE_COLUMNS, check_references, raise_errors
from schemas.columns import COLUMN_BY_NAME, PREFIX_FIELDS
from schemas.errors import InputError, InvariantError, first_of
from schemas.metadata import DatasetMetadata, common, contradictory, layout_of, upgrade, version_of
from schemas.numpy_arrays import empty_table, to_arrow
from schemas.type_checks import check_texts
from schemas.types import PREFIX_TYPES, plain_table
from schemas.view import View

_KEPT_SHARDS, _KEPT_FOOTER_BYTES = 2048, 64 << 10
_BLOCK_BYTES = 1 << 20  # read-ahead beyond a column chunk; the default of s3fs is 50 MB


class Shard:
    """One Parquet file, which is kept open only while it is read."""

    def __init__(
        self, location: Location, file: pq.ParquetFile, partition: Mapping[str, pa.Scalar]
    ) -> None:
        self.location, self._footer, self._partition = location, file.metadata, partition
        self.state = state_of(location.path) if location.is_local else None
        self.num_rows: int = file.metadata.num_rows
        self.pairs = file.metadata.metadata or {}
        stored = empty_table(file.schema_arrow.remove_metadata())
        empty = upgrade(stored, version_of(self.pairs))
        self._stored = dict(zip(empty.column_names, file.schema_arrow.names, strict=True))
        added = [f for f in _partition_fields(partition) if f.name not in self._stored]
        self.names = [*empty.column_names, *(f.name for f in added)]
        self.encoded = _is_encoded(self.names)
        self.aligned = self.encoded or layout_of(self.pairs) is not None
        self.schema = pa.schema([*_logical_schema(plain_table(empty).schema), *added])

    @classmethod
    def open(
        cls, location: Location, partition: Mapping[str, pa.Scalar] = MappingProxyType({})
    ) -> Shard:
        """Open a shard, and check its footer.

        Args:
            location: Path of the file.
            partition: Columns in the names of its directories (`_partition_values`).
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
        if is_small and not partition and shard.state is not None and shard.state == key[1]:
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
        skipped without being read (`rollout_io.dataset.footer`). List and string columns have
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
                state = self.state and state_of(self.location.path)
                if self.state and state and not state.may_be(self.state):
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
            columns = [self._stored[name] for name in names if name in self._stored]
            table = file.read_row_group(index, columns=columns, use_threads=self.location.is_local)
            # A name with dots also selects the fields of a struct, and "a" also selects "a.b".
            wanted = frozenset(columns)
            indices = [i for i, name in enumerate(table.column_names) if name in wanted]
            # Polars aborts on metadata that is not UTF-8, and nothing reads that of the columns.
            stored = table.select(indices)
            if indices:  # without columns, the number of rows would be lost
                stored = stored.replace_schema_metadata(None)
            table = plain_table(upgrade(stored, version_of(self.pairs)))
            if is_checked:
                raise_errors(View(table).run(check_texts), self.location.path)
        values = {name: value for name, value in self._partition.items() if name in names}
        where = f"{self.location.path}, row group {index}"
        return _with_partition(table, values, where) if values else table

    def _keeps_some(self, file: pq.ParquetFile, index: int, predicate: pl.Expr) -> bool:
        names = predicate.meta.root_names()
        if not names or not set(names) <= set(self.names):
            return True  # the predicate needs decoded prompts, or a column that this shard lacks
        return not to_polars(self._row_group(file, index, names)).filter(predicate).is_empty()

    def tables(
        self, names: Sequence[str], predicate: pl.Expr | None = None, *, decode: bool = True
    ) -> Iterator[pa.Table]:
        """Yield the logical columns `names`, row group by row group (see `row_groups`)."""
        has_prompts = self.encoded and "prompt_token_ids" in names
        stored = list(dict.fromkeys([*names, *(DECODE_COLUMNS if has_prompts else ())]))
        wanted = names if decode or not has_prompts else physical(names)
        for index, table in self.row_groups([n for n in stored if n in self.names], predicate):
            if has_prompts:
                broken = View(table).run(check_references)
                raise_errors(broken, f"{self.location.path}, row group {index}")
                table = table if predicate is None else _trajectories_with(table, predicate)
                table = decode_prefixes(table) if decode else table
            present = frozenset(table.column_names)
            yield table.select([n for n in wanted if n in present])


# Verbs open a dataset of many small shards several times. A file that changed has another state.
_kept: dict[tuple[Location, State | None], Shard] = {}


def open_shards(path: Paths) -> list[Shard]:
    """Open all shards of a dataset, and check that each directory is complete.

    Raises:
        InputError: `dataset_exists`: there is no dataset; `readable_file`, `shards_complete`,
            `file_metadata`: the dataset is damaged or incomplete.
        InvariantError: `unique_trajectory`: the path names several datasets, and two of them have a
            trajectory in common.
    """
    datasets = find_datasets(path)
    opened = [_opened(dataset) for dataset in datasets]
    shards = [shard for inside in opened for shard in inside]
    if len(datasets) > 1:
        common_metadata(shards)
        _refuse_common_trajectories(datasets, opened)
    return shards


def _opened(dataset: DatasetFiles) -> list[Shard]:
    values = _partition_values(dataset.shards)
    shards = [Shard.open(*pair) for pair in zip(dataset.shards, values, strict=True)]
    if dataset.shards[0].root is not None:
        common_metadata(shards)
    if dataset.is_complete:
        for folder, group in groupby(shards, lambda shard: posixpath.dirname(shard.location.path)):
            inside = list(group)
            names = [posixpath.basename(shard.location.path) for shard in inside]
            refuse_incomplete(folder, [Place.decode(shard.pairs) for shard in inside], names)
    return shards


_distinct: set[tuple[tuple[Location, State | None], ...]] = set()  # verbs open datasets repeatedly


def _refuse_common_trajectories(
    datasets: Sequence[DatasetFiles], opened: Sequence[Sequence[Shard]]
) -> None:
    key = tuple((shard.location, shard.state) for shards in opened for shard in shards)
    if key in _distinct:
        return
    place_of = dict[str, str]()
    for dataset, shards in zip(datasets, opened, strict=True):
        ids = {name for shard in shards for name in _trajectory_ids(shard)}
        if common := sorted(ids & place_of.keys()):
            first = place_of[common[0]]
            shared = first_of(f"trajectory {common[0]!r}", len(common))
            finding = f"{first} and {dataset.where} both contain {shared}"
            hint = "pass each trajectory once, or give the instances of one dataset other ids"
            raise InvariantError("unique_trajectory", dataset.where, finding, "", hint)
        place_of |= dict.fromkeys(ids, dataset.where)
    _distinct.add(key)


def _trajectory_ids(shard: Shard) -> set[str]:
    name = "trajectory_id"
    is_text = name in shard.names and pa.types.is_string(shard.schema.field(name).type)
    tables = shard.row_groups([name]) if is_text else ()
    ids = {id_ for _, table in tables for id_ in table.column(0).unique().to_pylist()}
    return ids - {None}


def common_metadata(shards: Sequence[Shard]) -> DatasetMetadata:
    """Combine the metadata of partitions, which must not contradict each other."""
    metadata_of = {s.location.path: DatasetMetadata.decode(s.pairs) for s in shards}
    returns = {path: metadata.outcome or "last" for path, metadata in metadata_of.items()}
    first = next(iter(returns))
    if differs := [path for path in returns if returns[path] != returns[first]]:
        raise contradictory(f"{first} and {differs[0]}", "outcome")
    return common(metadata_of, {"tokenizer_fingerprint", "logprobs_mode", "vocab_size"})


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
        finding = f"the file is damaged or not Parquet: {' '.join(str(error).split())}"
        hint = "restore the file from a copy, or write it again"
        if not location.path.endswith(".parquet") and "magic bytes" in str(error):
            finding = "this is no dataset: the file is not Parquet"
            hint = f"if it is a log, convert it first: rollouts convert {location.path} --out DS"
        raise InputError("readable_file", where, finding, "", hint) from None


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


def unified(shards: Sequence[Shard], where: str) -> pa.Schema:
    """Return the schema with all columns of all shards.

    Raises:
        InvariantError: `columns_and_types`: a column has different types in two shards.
    """
    try:
        return pa.unify_schemas([s.schema for s in shards], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        finding = f"the shards have different types for a column: {error}"
        hint = "give the column the same type in all shards, or split the dataset"
        raise InvariantError("columns_and_types", where, finding, "", hint) from None


def physical(names: Sequence[str]) -> list[str]:
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
    rows = to_polars(table.select(list(used | {"trajectory_id"})))
    ids = rows.filter(predicate)["trajectory_id"].unique()
    return table.filter(to_arrow(rows["trajectory_id"].is_in(ids.implode()).to_numpy()))


def to_polars(table: pa.Table) -> pl.DataFrame:
    """Convert a table to a DataFrame."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_PARTITION_NUMBER = re.compile(r"0|-?[1-9]\d{0,17}")


def _partition_values(shards: Sequence[Location]) -> list[dict[str, pa.Scalar]]:
    """Return the partition columns in the path of each shard (`run=7/`), with their values.

    A column of the rollout table has its declared type. Any other column is int64 if all its values
    in the dataset are integers without leading zeros, else string.
    """
    texts_of = [_texts(shard) for shard in shards]
    every = texts_of
    if len(shards) == 1 and shards[0].root is not None:  # one shard of a partitioned dataset
        root = Location(shards[0].fs, shards[0].root)
        every = [_texts(Location(root.fs, path, root.path)) for path in root.partitions()]
    for shard, texts in zip(shards, texts_of, strict=True):
        if [*texts] != [*every[0]]:
            finding = f"the directories name the columns {', '.join(texts)}"
            raise _misplaced(shard, f"{finding}, but other directories name {', '.join(every[0])}")
    types = {name: _type_of(name, [texts.get(name) for texts in every]) for name in every[0]}
    return [
        {name: _value(shard, name, text, types[name]) for name, text in texts.items()}
        for shard, texts in zip(shards, texts_of, strict=True)
    ]


def _with_partition(table: pa.Table, values: Mapping[str, pa.Scalar], where: str) -> pa.Table:
    """Append columns that have the same value in all rows.

    If the file already has such a column, all its values must equal that value.
    """
    for name, value in values.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        elif not _holds_only(table.column(name), value):
            finding = f"column {name!r} has a value that differs from the directory {name}={value}"
            hint = "rename the directory, or drop the column from the file"
            raise InvariantError("columns_and_types", where, finding, "", hint)
    return table


def _partition_fields(values: Mapping[str, pa.Scalar]) -> list[pa.Field]:
    """Return the fields of partition columns."""
    declared = {name: COLUMN_BY_NAME.get(name) for name in values}
    nullable = {name: column is None or column.nullable for name, column in declared.items()}
    return [pa.field(name, value.type, nullable[name]) for name, value in values.items()]


def _holds_only(column: pa.ChunkedArray, value: pa.Scalar) -> bool:
    try:
        expected = value.cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return bool(column.equals(pa.chunked_array([pa.repeat(expected, len(column))])))


def _texts(shard: Location) -> dict[str, str | None]:
    """Parse the `COLUMN=VALUE` directories in a shard's path below the dataset's root."""
    folders = [] if shard.root is None else shard.path.removeprefix(shard.root).split("/")[1:-1]
    pairs = [tuple(_decoded(shard, text) for text in folder.split("=", 1)) for folder in folders]
    texts = {name: None if text == _NULL_PARTITION else text for name, text in pairs}
    if len(texts) < len(pairs):
        raise _misplaced(shard, f"the directories name a column twice: {', '.join(folders)}")
    return texts


def _decoded(shard: Location, text: str) -> str:
    try:
        text.encode()
        return unquote(text, errors="strict")
    except UnicodeError:
        raise _misplaced(shard, f"the directory name {text!a} is not UTF-8") from None


def _type_of(name: str, texts: Sequence[str | None]) -> pa.DataType:
    column = COLUMN_BY_NAME.get(name)
    if column is not None and column.type is not None:
        return column.type
    present = [text for text in texts if text is not None]
    is_integer = bool(present) and all(_PARTITION_NUMBER.fullmatch(text) for text in present)
    return pa.int64() if is_integer else pa.string()


def _value(shard: Location, name: str, text: str | None, kind: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(text, pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        finding = f"the directory {name}={text} is not a value of type {kind}"
        raise _misplaced(shard, finding) from None


def _misplaced(shard: Location, got: str) -> InvariantError:
    return InvariantError("columns_and_types", shard.path, got, "", PARTITION_HINT)
