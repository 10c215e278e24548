"""Files that are there whole or not at all, and Parquet that any reader takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import RolloutError
from schemas.types import cast_column


@contextmanager
def whole(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `out` to write to, a file or a folder; it becomes `out` when all went well.

    Raises:
        RolloutError: `out_is_free`: something is there; `output_file`: it cannot be written.
    """
    refuse_taken(out)
    target, where = Path(out), os.fspath(out)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        hint = f"ls -ld {target.parent}"
        raise RolloutError("output_file", where, got, "a writable place", hint) from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def refuse_taken(out: str | os.PathLike[str]) -> None:
    """Raise `out_is_free` where something is in the place of an export."""
    if Path(out).exists() or Path(out).is_symlink():
        expected, hint = "nothing there yet", "choose another --out, or remove the old one"
        raise RolloutError("out_is_free", os.fspath(out), "something is there", expected, hint)


class ParquetFile:
    """One Parquet file, written table by table; the first one settles the columns."""

    def __init__(self, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
        self._path, self._metadata = path, metadata
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, table: pa.Table) -> None:
        """Add a row group; a table without rows adds nothing."""
        if table.num_rows == 0:
            return
        if self._writer is None:
            schema = table.schema.with_metadata(self._metadata)
            self._writer = pq.ParquetWriter(
                self._path, schema, compression="zstd", write_page_checksum=True
            )
        table = table.replace_schema_metadata(self._metadata)
        self._writer.write_table(table, row_group_size=table.num_rows)


def renamed(table: pa.Table, names: Mapping[str, str], added: Mapping[str, pa.Array]) -> pa.Table:
    """Columns under a peer's names, masks as integers, and some columns more.

    Args:
        table: Rows without an error; the column `error` is left out.
        names: The peer's name of a column.
        added: Arrays by name.

    Raises:
        RolloutError: `free_name`: a column of the user's own has a name that the peer reads.
    """
    mask = table.column("loss_mask").cast(pa.list_(pa.int8()))
    table = table.set_column(table.column_names.index("loss_mask"), "loss_mask", mask)
    table = table.drop_columns([n for n in table.column_names if n == "error"])
    table = without_maps(table)
    taken = {*names.values(), *added} & set(table.column_names)
    if taken:
        got, hint = f"a column {min(taken)!r} beside the one of the format", "rename the column"
        raise RolloutError("free_name", "dataset", got, "no such column", hint)
    table = table.rename_columns([names.get(n, n) for n in table.column_names])
    for name, values in added.items():
        table = table.append_column(name, values)
    return table


def without_maps(table: pa.Table) -> pa.Table:
    """Maps, at any depth, as lists of {key, value}, which `datasets` can represent."""
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
