"""Atomic writing of export files, and Parquet files that any reader accepts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.atomic_files import whole, writable
from rollout_io.dataset.footer import seal
from rollout_io.dataset.locking import destination
from rollout_io.dataset.sources import refuse_changed
from rollout_io.dataset.storage import refuse_inside
from schemas.errors import ConfigError, InputError
from schemas.types import cast_column


@contextmanager
def new_export(out: str | os.PathLike[str], dataset: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path for an export of `dataset`; rename that path to `out` at the end.

    Raises:
        ConfigError: `out_is_free`: `out` exists.
        InputError: `out_is_free`: `out` is inside `dataset`; `output_file`: the output cannot be
            written.
    """
    refuse_taken(out, dataset)
    with _export(out, is_new=True) as path:
        refuse_taken(out, dataset)  # another writer may have finished before this one locked it
        with refuse_changed(dataset):
            yield path


@contextmanager
def replaced_export(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Like `new_export`, but replace an existing file."""
    with _export(out, is_new=False) as path:
        yield path


@contextmanager
def _export(out: str | os.PathLike[str], *, is_new: bool) -> Iterator[Path]:
    target = Path(out).absolute()
    hint = f"check that the directory is writable: ls -ld {Path(out).parent}"
    with writable(os.fspath(out), hint), ExitStack() as stack:
        target.parent.stat()  # the lock would create it
        stack.enter_context(destination(out, noun="path"))
        yield stack.enter_context(whole(target, is_new=is_new))


def refuse_taken(out: str | os.PathLike[str], dataset: str | os.PathLike[str]) -> None:
    """Raise `out_is_free` if the output path exists, or is inside the dataset to export."""
    refuse_inside(out, dataset)
    if Path(out).exists() or Path(out).is_symlink():
        got, hint = "the output path already exists", "choose a different --out, or remove it"
        raise ConfigError("out_is_free", os.fspath(out), got, hint=hint)


class ParquetFile:
    """One Parquet file, written table by table; the first table determines the columns.

    Args:
        path: Path of the file.
        metadata: Key-value pairs of a rollout file, to which a digest is added (see
            `rollout_io.dataset.footer`).
    """

    def __init__(self, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
        self._path, self._metadata = path, metadata
        self._writer: pq.ParquetWriter | None = None
        self._num_rows: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            if self._metadata is not None:
                digest = seal(self._writer.schema, self._metadata, self._num_rows)
                self._writer.add_key_value_metadata(digest)
            self._writer.close()

    def write(self, table: pa.Table) -> None:
        """Write a table as a row group, unless it is empty."""
        if table.num_rows == 0:
            return
        if self._writer is None:
            schema = table.schema.with_metadata(self._metadata)
            self._writer = pq.ParquetWriter(
                self._path, schema, compression="zstd", write_page_checksum=True
            )
        table = table.replace_schema_metadata(self._metadata)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._num_rows.append(table.num_rows)


def renamed(table: pa.Table, names: Mapping[str, str], added: Mapping[str, pa.Array]) -> pa.Table:
    """Rename columns to another project's names, convert masks to integers, and add columns.

    Args:
        table: Rows without an error; the column `error` is dropped.
        names: Name of each column in the other project.
        added: Additional columns by name.

    Raises:
        InputError: `free_name`: a user column has a name that the export format uses.
    """
    mask = table.column("loss_mask").cast(pa.list_(pa.int8()))
    table = table.set_column(table.column_names.index("loss_mask"), "loss_mask", mask)
    table = table.drop_columns([n for n in table.column_names if n == "error"])
    table = without_maps(table)
    taken = {*names.values(), *added} & set(table.column_names)
    if taken:
        got = f"the user column {min(taken)!r} has a name that the export format uses"
        raise InputError("free_name", "dataset", got, hint="rename the column")
    table = table.rename_columns([names.get(n, n) for n in table.column_names])
    for name, values in added.items():
        table = table.append_column(name, values)
    return table


def without_maps(table: pa.Table) -> pa.Table:
    """Convert maps at any depth to lists of {key, value}, which `datasets` can represent."""
    for index, f in enumerate(table.schema):
        kind = _without_maps(f.type)
        if kind != f.type:
            table = table.set_column(
                index, f.with_type(kind), cast_column(table.column(index), kind)
            )
    return table


def _without_maps(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_map(kind):
        fields = [("key", _without_maps(kind.key_type)), ("value", _without_maps(kind.item_type))]
        return pa.list_(pa.struct(fields))
    if pa.types.is_list(kind):
        return pa.list_(_without_maps(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_maps(f.type)) for f in kind])
    return kind
