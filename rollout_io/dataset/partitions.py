"""Columns in the names of directories, `DS/run=a/part-00000.parquet` (Hive partitions).

PyArrow and Polars read them too, but each its own way: `run=01` becomes 1, a directory without a
column becomes null or disappears with its column, and `run=a/run=b` is accepted. Importing
`pyarrow.dataset` takes longer than all other imports of a verb.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from rollout_io.dataset.storage import PARTITION_HINT, Location
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InvariantError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9]\d{0,17}")


def partition_values(shards: Sequence[Location]) -> list[dict[str, pa.Scalar]]:
    """Return the partition columns in the path of each shard (`run=7/`), with their values.

    A column of the rollout table has its declared type. Any other column is int64 if all its values
    in the dataset are integers without leading zeros, else string.

    Raises:
        InvariantError: `columns_and_types`: the directories of two shards name different columns,
            a value does not fit its column, or a name is not UTF-8.

    Example:
        `DS/run=7/part-00000.parquet` and `DS/run=8/part-00000.parquet`:

        >>> [values["run"].as_py() for values in partition_values(find_shards("DS"))]
        [7, 8]
    """
    texts_of = [_texts(shard) for shard in shards]
    every = texts_of
    if len(shards) == 1 and shards[0].root is not None:  # one shard of a partitioned dataset
        root = Location(shards[0].fs, shards[0].root)
        every = [_texts(Location(root.fs, path, root.path)) for path in root.partitions()]
    for shard, texts in zip(shards, texts_of, strict=True):
        _refuse_other_names(shard, list(texts), list(every[0]))
    types = {name: _type_of(name, [texts.get(name) for texts in every]) for name in every[0]}
    return [
        {name: _value(shard, name, text, types[name]) for name, text in texts.items()}
        for shard, texts in zip(shards, texts_of, strict=True)
    ]


def with_partition(table: pa.Table, values: Mapping[str, pa.Scalar], where: str) -> pa.Table:
    """Append columns that have the same value in all rows.

    If the file already has such a column, all its values must equal that value.

    Raises:
        InvariantError: `columns_and_types`: a column of the file has a different value.
    """
    for name, value in values.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        elif not _holds_only(table.column(name), value):
            finding = (
                f"the column {name!r} has a value that differs from the directory {name}={value}"
            )
            hint = "rename the directory, or drop the column from the file"
            raise InvariantError("columns_and_types", where, finding, "", hint)
    return table


def partition_fields(values: Mapping[str, pa.Scalar]) -> list[pa.Field]:
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
    texts = {name: None if text == _NULL else text for name, text in pairs}
    if len(texts) < len(pairs):
        raise _refused(shard, f"the directories name a column twice: {', '.join(folders)}")
    return texts


def _decoded(shard: Location, text: str) -> str:
    try:
        text.encode()
        return unquote(text, errors="strict")
    except UnicodeError:
        raise _refused(shard, f"the directory name {text!a} is not UTF-8") from None


def _refuse_other_names(shard: Location, names: list[str], expected: list[str]) -> None:
    if names != expected:
        finding = f"the directories name the columns {', '.join(names)}"
        raise _refused(shard, f"{finding}, but other directories name {', '.join(expected)}")


def _type_of(name: str, texts: Sequence[str | None]) -> pa.DataType:
    column = COLUMN_BY_NAME.get(name)
    if column is not None and column.type is not None:
        return column.type
    present = [text for text in texts if text is not None]
    is_integer = bool(present) and all(_INTEGER.fullmatch(text) for text in present)
    return pa.int64() if is_integer else pa.string()


def _value(shard: Location, name: str, text: str | None, kind: pa.DataType) -> pa.Scalar:
    try:
        return pa.scalar(text, pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise _refused(
            shard, f"the directory {name}={text} is not a value of type {kind}"
        ) from None


def _refused(shard: Location, got: str) -> InvariantError:
    return InvariantError("columns_and_types", shard.path, got, "", PARTITION_HINT)
