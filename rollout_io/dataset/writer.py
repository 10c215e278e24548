"""Writer of rollout datasets, which checks trajectories and publishes each shard atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_io.dataset.blobs import Blobs, carry, names_in
from rollout_io.dataset.filesystems import writable
from rollout_io.dataset.footer import IdFilters, Part, Place, Places, seal
from rollout_io.dataset.locking import Destination, mark_alive, remove_leftovers
from rollout_io.dataset.prefix_layout import encode_prefixes, trajectory_starts
from rollout_io.dataset.storage import (
    SHARD_PREFIX,
    Location,
    PathLike,
    occupied,
    publish,
    shard_name,
    temporary,
)
from schemas.checker import Checker, raise_errors
from schemas.columns import arrow_schema
from schemas.errors import InputError, InvariantError
from schemas.metadata import DatasetMetadata
from schemas.numpy_arrays import empty_table, to_numpy
from schemas.type_checks import check_names
from schemas.types import (
    PREFIX_TYPES,
    as_table,
    cast_column,
    cast_table,
    without_null_elements,
)
from schemas.view import View

ROW_GROUP_ROWS = 4096
ROW_GROUP_BYTES = 128 << 20  # bounds memory: readers and transforms hold one row group at a time
SHARD_BYTES = 512 << 20
_SPLIT = frozenset(
    {
        *("prompt_token_ids", "prompt_suffix_ids", "response_ids"),
        *("rollout_logprobs", "sampling_support"),
        *("trainer_logprobs", "teacher_token_ids", "teacher_logprobs"),
    }
)


class RolloutWriter:
    """Streaming writer of a rollout dataset directory.

    Rows may arrive in batches of any size; a trajectory is kept together in one row group. A table
    that breaks a named invariant is rejected. An exception in the `with` block removes everything
    written.

    Args:
        path: Directory, local or an fsspec URL.
        layout: `prefix` (prompts refer to earlier steps) or `full`.
        metadata: Metadata of the files; None uses the metadata in the schema of the first table, as
            in tables from `read`.
        append: If true, add shards to an existing directory; several writers may share it.
        row_group_rows: Maximum rows of a row group, unless one trajectory has more.
        shard_bytes: Size in bytes, encoded but uncompressed, after which a new shard begins.
        checked: If true, skip the checks, because the caller has checked the tables.
        parents: Datasets that the rows come from; the pictures that the rows refer to become part of
            the new dataset.
        part: Part of the dataset that this writer writes; None: the entire dataset. Ignored with
            `append`, because appended shards are independent of each other.

    Attributes:
        shards: The shards that were published.
        footer: Key-value pairs for the footer of the last shard; may be set until `close`.

    Raises:
        InputError: `out_is_free`: the path already contains a dataset, and `append` is false or the
            dataset is partitioned (`rollout_io.dataset.shard_files`); or `append` is false and another
            process is writing to the path.
        ValidationError: From `write` or `close`; everything written is removed.

    Example:
        >>> with RolloutWriter("rollouts/") as writer:
        ...     for table in tables:
        ...         writer.write(table)
        >>> writer.num_rows, writer.num_trajectories
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: Literal["prefix", "full"] = "prefix",
        metadata: DatasetMetadata | None = None,
        append: bool = False,
        row_group_rows: int = ROW_GROUP_ROWS,
        shard_bytes: int = SHARD_BYTES,
        checked: bool = False,
        parents: Sequence[PathLike] = (),
        part: Part | None = None,
    ) -> None:
        self.num_rows = self.num_trajectories = 0
        self.footer: dict[bytes, bytes] = {}
        self._is_open = True
        self._where, self._location, self._layout = os.fspath(path), Location.of(path), layout
        self._metadata = metadata
        self._row_group_rows, self._shard_bytes = row_group_rows, shard_bytes
        self._is_checked = checked
        self._parents, self._blobs = parents, Blobs.of(path)
        self._referred, self._carried = set[str](), list[str]()
        self._checker: Checker | None = None
        self._pending: list[pa.Table] = []
        self._empty = empty_table(arrow_schema(optional=()))
        self._pending_rows = self._pending_bytes = 0
        self._shard: _Shard | None = None
        self._part, self._stands_alone = part, append
        self._places: Places | None = None
        self.shards: list[Location] = []
        # Appended shards have names of their own, and parts have directories of their own.
        self._held = None if append or part is not None else Destination(path)
        self._made_folder = not self._location.fs.exists(self._location.path)
        try:
            existing = [] if self._made_folder else self._existing(append=append)
        except BaseException:
            self._release()
            raise
        if self._held is not None:
            remove_leftovers(self._location)
        # Indices go on behind what is there: readers order shards by their names.
        self._next_index = 1 + max((_index_of(p) for p in existing), default=-1)
        self._tag = f"-{os.urandom(4).hex()}" if append else ""

    def _existing(self, *, append: bool) -> list[str]:
        location = self._location
        shards = location.shards()
        if not location.fs.isdir(location.path):
            finding, hint = "a file with that name exists", "choose a different --out"
            message = f"cannot create {self._where}: {finding}"
            raise InputError("out_is_free", self._where, finding, "", hint, message=message)
        # Readers see either shards or partitions, so neither is added to the other.
        if existing := location.partitions() if append else location.datasets():
            raise occupied(self._where, len(existing))
        return shards

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, data: Any) -> None:
        """Add the rows of a Table, RecordBatch or Polars frame, which may end mid-trajectory."""
        self._refuse_if_closed()
        try:
            self._add(as_table(data))
        except BaseException:
            self.abort()
            raise

    def _add(self, rows: pa.Table) -> None:
        raise_errors(View(rows).run(check_names), self._where)
        # Every write recomputes the physical columns.
        table = rows.drop_columns([n for n in rows.column_names if n in PREFIX_TYPES])
        if self.num_rows == 0 and not self._pending:
            self._empty = table.slice(0, 0)
        if self._metadata is None:
            self._metadata = DatasetMetadata.decode(rows.schema.metadata)
        if table.num_rows == 0:
            return
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes
        if self._pending_rows > self._row_group_rows or self._pending_bytes > ROW_GROUP_BYTES:
            self._flush(final=False)

    def close(self) -> None:
        """Write the remaining rows and publish the last shard."""
        self._refuse_if_closed()
        try:
            self._flush(final=True)
            if self._checker is not None:
                raise_errors(self._checker.finish(), self._where)
            if self._shard is None and not self.shards:
                raise_errors(Checker().check(self._empty), self._where)
                self._write_row_group(self._empty)
            self._publish(is_last=True)
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()

    def _refuse_if_closed(self) -> None:
        if not self._is_open:
            finding, hint = (
                "the writer is closed, or an earlier write failed",
                "create a new writer",
            )
            raise InputError("writer_is_open", self._where, finding, "", hint)

    def abort(self) -> None:
        """Remove everything that this writer wrote."""
        self._is_open = False
        if self._shard is not None:
            self._shard.discard()
            self._shard = None
        # Shards that were published before the failure too: half a dataset looks like a whole one.
        for location in self.shards:
            location.fs.rm_file(location.path)
        self.shards, self._pending = [], []
        self._blobs.remove(self._carried)
        folder = self._location
        if self._made_folder and folder.fs.isdir(folder.path) and not folder.fs.ls(folder.path):
            folder.fs.rmdir(folder.path)
        self._release()

    def _flush(self, *, final: bool) -> None:
        if not self._pending:
            return
        table = _concat(self._pending)
        # A trajectory is in one row group, so the last one waits until its end is known.
        complete = table.num_rows if final else _complete_rows(table)
        head, tail = table.slice(0, complete), table.slice(complete)
        self._pending = [tail] if tail.num_rows else []
        # `tail` may be a slice of a large table, but `nbytes` counts only the slice.
        self._pending_rows, self._pending_bytes = tail.num_rows, tail.nbytes
        if head.num_rows == 0:
            return
        if not self._is_checked:
            metadata = self._metadata or DatasetMetadata()
            self._checker = self._checker or Checker(metadata.vocab_size)
            raise_errors(self._checker.check(head), self._where)
        for group in _row_groups(head, self._row_group_rows):
            self._write_row_group(group)

    def _write_row_group(self, table: pa.Table) -> None:
        table = cast_table(table)
        self.num_rows += table.num_rows
        self.num_trajectories += len(trajectory_starts(table))
        if self._parents:
            self._referred |= names_in(table)
        table = encode_prefixes(table) if self._layout == "prefix" else table
        # Before this group and not behind the last one, so that `close` knows which shard is the last.
        if self._shard is not None and self._shard.num_bytes >= self._shard_bytes:
            self._publish(is_last=False)
        # A shard has one schema: it ends here, and the next one has its columns and the new ones.
        if self._shard is not None and not self._shard.holds(table):
            table = _concat([empty_table(self._shard.schema), table])
            self._publish(is_last=False)
        if self._shard is None:
            pairs = (self._metadata or DatasetMetadata()).encode(self._layout)
            if self._places is None and not self._stands_alone:
                part = self._part
                self._places = Places(part) if part else Places.of_whole(pairs, table)
            schema = table.schema.with_metadata(pairs)
            name = shard_name(self._next_index, self._tag)
            self._shard = _Shard(self._location, self._location.join(name), schema)
            self._next_index += 1
        self._shard.write(table)
        if self._places is not None:
            self._places.add(table)

    def _publish(self, *, is_last: bool) -> None:
        if self._shard is not None:
            # Pictures before the rows that refer to them, so that no reader ever sees a row without its picture.
            self._carried += carry(self._referred, self._parents, self._blobs)
            self._referred.clear()
            if self._held is not None:
                # The lock of an object store is a lease: whoever took it over may have published meanwhile.
                self._held.refuse_lost()
            place = None if self._places is None else self._places.next(is_last=is_last)
            footer = self.footer if is_last else {}
            self.shards.append(self._shard.publish(place, footer))
            self._shard = None


class _Shard:
    """A shard that is being written under a temporary name."""

    def __init__(self, folder: Location, final: Location, schema: pa.Schema) -> None:
        self.schema, self.num_bytes = schema, 0
        self._stored = without_null_elements(schema)
        self._num_rows: list[int] = []
        self._ids = IdFilters()
        self._final, self._temporary = final, temporary(final)
        self._writer: pq.ParquetWriter | None = None
        with _writable(final):
            folder.fs.makedirs(folder.path, exist_ok=True)
            self._file = folder.fs.open(self._temporary.path, "wb")
            if folder.is_local:
                mark_alive(self._file)
        try:
            self._writer = self._open(self._stored)
        except BaseException:
            self.discard()
            raise

    def _open(self, schema: pa.Schema) -> pq.ParquetWriter:
        dictionary, encodings = _encodings(schema)
        with _writable(self._final):
            return pq.ParquetWriter(
                self._file,
                schema,
                compression="zstd",
                write_page_checksum=True,
                use_dictionary=dictionary,
                column_encoding=encodings,
                write_statistics=[f.name for f in schema if not pa.types.is_nested(f.type)],
            )

    def holds(self, table: pa.Table) -> bool:
        """True if this shard has every column of the table, with the same type."""
        names = self.schema.names
        return all(
            f.name in names and f.type == self.schema.field(f.name).type for f in table.schema
        )

    def write(self, table: pa.Table) -> None:
        assert self._writer is not None
        # Concatenating to the empty table adds missing columns as nulls, in the shard's order.
        whole = _concat([empty_table(self.schema), table]).select(self.schema.names)
        self.num_bytes += whole.nbytes
        columns = [cast_column(whole.column(f.name), f.type) for f in self._stored]
        whole = pa.Table.from_arrays(columns, schema=self._stored)
        with _writable(self._final):
            self._writer.write_table(whole, row_group_size=max(1, whole.num_rows))
        # As written: the footer's digest covers the rows of each group, its filters cover their ids.
        self._num_rows.append(whole.num_rows)
        self._ids.add(whole)

    def publish(self, place: Place | None, footer: Mapping[bytes, bytes]) -> Location:
        """Write the footer and rename the file.

        Args:
            place: The shard's place in its dataset; None if it is appended.
            footer: Further key-value pairs.
        """
        assert self._writer is not None
        pairs = {**footer, **self._ids.encode(), **({} if place is None else place.encode())}
        digest = seal(self._stored, self._stored.metadata | pairs, self._num_rows)
        with _writable(self._final):
            self._writer.add_key_value_metadata(pairs | digest)
            self._writer.close()
            self._file.close()
            publish(self._temporary, self._final)
        return self._final

    def discard(self) -> None:
        with (
            ExitStack() as stack
        ):  # from the last to the first, whatever fails: the file goes in the end
            stack.callback(self._temporary.fs.rm_file, self._temporary.path)
            stack.callback(_close, self._file)
            stack.callback(_close, self._writer)


def _close(file: Any) -> None:
    """Close a file that will be deleted, ignoring errors such as a full disk."""
    with suppress(OSError, pa.ArrowException):
        if file is not None:
            file.close()


@contextmanager
def _writable(final: Location) -> Iterator[None]:
    """Convert filesystem errors and unsupported types to errors that name the path."""
    try:
        with writable(final.path):
            yield
    except pa.ArrowNotImplementedError as error:
        finding = f"Parquet cannot store a column: {error}"
        hint = "cast the column to a type that Parquet supports, or drop it"
        raise InvariantError("columns_and_types", final.path, finding, "", hint) from None


def _encodings(schema: pa.Schema) -> tuple[list[str], dict[str, str]]:
    """Choose dictionary encoding for columns whose values recur.

    Token ids and log-probabilities are split by byte significance, which compresses them better and
    faster than a dictionary.
    """
    # A user column may have the name of a list's elements.
    leaves = {f.name: _leaves(f.name, f.type) for f in schema}
    split = [n for n in leaves if n in _SPLIT and leaves[n][0] not in schema.names]
    dictionary = [path for name in leaves if name not in split for path in leaves[name]]
    return dictionary, {leaves[name][0]: "BYTE_STREAM_SPLIT" for name in split}


def _leaves(path: str, kind: pa.DataType) -> list[str]:
    if pa.types.is_struct(kind):
        return [leaf for f in kind for leaf in _leaves(f"{path}.{f.name}", f.type)]
    if pa.types.is_map(kind):
        entry = f"{path}.key_value"
        return _leaves(f"{entry}.key", kind.key_type) + _leaves(f"{entry}.value", kind.item_type)
    if pa.types.is_nested(kind):
        return _leaves(f"{path}.list.element", kind.value_type)
    return [path]


def _concat(tables: list[pa.Table]) -> pa.Table:
    """Concatenate tables, filling missing columns with nulls."""
    try:
        return pa.concat_tables(tables, promote_options="permissive").replace_schema_metadata(None)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        finding = f"the tables have different types for a column: {error}"
        hint = "cast the column to one type in all tables"
        raise InvariantError("columns_and_types", "write", finding, "", hint) from None


def _complete_rows(table: pa.Table) -> int:
    """Return the number of rows up to the last row that ends a trajectory."""
    name = "is_last_step"
    if name not in table.column_names or not pa.types.is_boolean(table.schema.field(name).type):
        return int(table.num_rows)
    ends = np.flatnonzero(to_numpy(table.column("is_last_step")))
    return int(ends[-1]) + 1 if len(ends) else 0


def _row_groups(table: pa.Table, num_rows: int) -> list[pa.Table]:
    """Cut a table into groups of up to `num_rows` rows; a longer trajectory forms one group."""
    bounds = [*trajectory_starts(table).tolist(), table.num_rows]
    cuts = [0]
    for here, following in pairwise(bounds):
        if following - cuts[-1] > num_rows and here > cuts[-1]:
            cuts.append(here)
    cuts.append(table.num_rows)
    return [table.slice(a, b - a) for a, b in pairwise(cuts)]


def _index_of(path: str) -> int:
    digits = path.rsplit("/", 1)[-1].removeprefix(SHARD_PREFIX)[:5]
    return int(digits) if digits.isdigit() else -1
