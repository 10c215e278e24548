"""Code shared by exporters: checked rows, failures, counts, pictures, and atomic writing of files.

`write` in the module of a format exports to it. Pictures in exported messages are data URLs, as OpenAI's
chat API takes them:

    {"type": "image", "blob": "sha256:..."}    in a dataset
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}    exported
    {"type": "file", "file": {"file_data": "data:application/pdf;base64,...", "filename": "a.pdf"}}
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout_io.dataset.blobs import MEDIA_TYPES, RULE, SUFFIX, extension_of, stores_of
from rollout_io.dataset.filesystems import whole, writable
from rollout_io.dataset.footer import seal
from rollout_io.dataset.locking import destination
from rollout_io.dataset.sources import refuse_changed
from rollout_io.dataset.storage import PathLike, refuse_inside
from schemas.columns import PICTURES
from schemas.errors import ConfigError, InputError, InvariantError, count
from schemas.ragged import BoolArray, relisted
from schemas.types import cast_column, cast_table, with_absent

Failed = Literal["group", "trajectory"]

FAILED = "from failed trajectories"
IN_FAILED_GROUP = "from the group of a failed trajectory"


@dataclass(kw_only=True, slots=True)
class Exported:
    """Counts of an export: rows read = rows written + rows left out.

    Attributes:
        left_out: Number of rows that were not written, by reason.
        remarks: Warnings and notes about the exported file.
        num_samples: Number of samples in the file, if a sample is not a row.
        counts: Other counts, by name.
    """

    num_rows_read: int = 0
    num_rows_written: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    num_samples: int | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str, num_rows: int) -> None:
        """Count rows that are not written."""
        if num_rows:
            self.left_out[reason] = self.left_out.get(reason, 0) + num_rows

    def take_back(self, reason: str, num_rows: int) -> None:
        """Leave out rows that were counted as written."""
        self.num_rows_written -= num_rows
        self.leave_out(reason, num_rows)

    def close(self, dataset: PathLike) -> Exported:
        """Check the counts, and reject an export without rows."""
        assert self.num_rows_read == self.num_rows_written + sum(self.left_out.values())
        if self.num_rows_written == 0:
            finding, hint = "the dataset has no rows", None
            if self.left_out.keys() - {FAILED, IN_FAILED_GROUP}:
                finding = f"no row can be written ({self.text()})"
            elif self.left_out.keys() == {FAILED}:
                finding = "every trajectory failed"
            elif self.num_rows_read:
                finding = "every group has a failed trajectory"
                hint = "pass --failed trajectory to export the other trajectories of a group"
            raise InputError("some_rows", os.fspath(dataset), finding, hint=hint)
        return self

    def text(self) -> str:
        """Return the counts as one line."""
        why = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.items())
        num_left_out = sum(self.left_out.values())
        samples = "" if self.num_samples is None else f"; {count(self.num_samples, 'sample')}"
        return (
            f"{count(self.num_rows_read, 'row')} read: {self.num_rows_written:,} written, "
            f"{num_left_out:,} left out" + (f" ({why})" if why else "") + samples
        )


def declared_tables(dataset: PathLike) -> Iterator[pa.Table]:
    """Yield tables of complete trajectories, checked and cast to the declared types."""
    from rollout_io.dataset.checking import checked_tables

    for table in checked_tables(dataset):
        yield cast_table(table).combine_chunks()


@dataclass(frozen=True, slots=True)
class Failures:
    """Ids of failed trajectories in a dataset, and of the groups that are masked with them."""

    trajectories: pa.Array
    groups: pa.Array

    @classmethod
    def of(cls, dataset: PathLike, failed: Failed) -> Failures:
        """Read the ids of a dataset's failed trajectories, without reading token columns."""
        import polars as pl

        from rollout_io.dataset.reader import scan

        failed_rows = with_absent(scan(dataset), ["error"]).filter(pl.col("error").is_not_null())
        ids = failed_rows.select("trajectory_id", "instance_id").collect()
        groups = ids["instance_id"].unique() if failed == "group" else ids["instance_id"].head(0)
        return cls(*(pa.array(s.to_list(), pa.string()) for s in (ids["trajectory_id"], groups)))

    def failed(self, table: pa.Table) -> BoolArray:
        """Return [N] booleans: true for rows of failed trajectories."""
        return np.asarray(pc.is_in(table.column("trajectory_id"), self.trajectories))

    def masked(self, table: pa.Table) -> BoolArray:
        """Return [N] booleans: true for failed trajectories and for trajectories masked with them."""
        in_group: BoolArray = np.asarray(pc.is_in(table.column("instance_id"), self.groups))
        return self.failed(table) | in_group

    def leave_out(self, table: pa.Table, done: Exported) -> pa.Table:
        """Return the rows that are not masked, and count all rows."""
        failed, masked = self.failed(table), self.masked(table)
        done.num_rows_read += table.num_rows
        done.num_rows_written += int((~masked).sum())
        done.leave_out(FAILED, int(failed.sum()))
        done.leave_out(IN_FAILED_GROUP, int((masked & ~failed).sum()))
        return table.filter(pa.array(~masked)).combine_chunks()


@dataclass(slots=True)
class Groups:
    """Instances and trajectories, numbered by first appearance, with counts of their rows."""

    num_rows_of_instance: dict[str, int] = field(default_factory=dict)
    num_rows_of_trajectory: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, table: pa.Table) -> tuple[list[int], list[int]]:
        """Count rows; return the instance number of each row, and its trajectory number."""
        instances = self._add(table, "instance_id", self.num_rows_of_instance)
        return instances, self._add(table, "trajectory_id", self.num_rows_of_trajectory)

    def _add(self, table: pa.Table, name: str, counts: dict[str, int]) -> list[int]:
        numbers, indices = self._numbers.setdefault(name, {}), []
        for key in table.column(name).to_pylist():
            counts[key] = counts.get(key, 0) + 1
            indices.append(numbers.setdefault(key, len(numbers)))
        return indices

    def remarks(self, peer: str, size: str) -> Iterator[str]:
        """Yield remarks for users of a trainer that treats every row as a sample."""
        several = sum(num_rows > 1 for num_rows in self.num_rows_of_trajectory.values())
        if several:
            yield (
                f"{several} of {len(self.num_rows_of_trajectory)} trajectories have more than one "
                f"row, and {peer}'s baseline treats each row as a sample with the row's "
                "reward. Run `rollouts merge` first to join rows that continue each other"
            )
        sizes = set(self.num_rows_of_instance.values())
        if len(sizes) > 1:
            yield (
                f"groups have {min(sizes)} to {max(sizes)} rows, but {peer} expects {size} rows "
                "in every group"
            )


class Uniform:
    """A check that a column has a value in every row or in none, as some formats require."""

    def __init__(self, dataset: PathLike, names: Sequence[str]) -> None:
        self._where, self._names = os.fspath(dataset), names
        self._has_values: dict[str, bool] = {}

    def check(self, table: pa.Table) -> None:
        """Check the next rows."""
        for name in self._names:
            if name in table.column_names and table.num_rows:
                valid = np.asarray(pc.is_valid(table.column(name)))
                expected = self._has_values.setdefault(name, bool(valid[0]))
                odd = np.flatnonzero(valid != expected)
                if len(odd):
                    self._refuse(table, name, int(odd[0]))

    def has_values(self, name: str) -> bool:
        """True if the rows so far have values in the column."""
        return self._has_values.get(name, False)

    def _refuse(self, table: pa.Table, name: str, row: int) -> None:
        finding = "the column has values in only some of the rows"
        hint = f"drop the column, or keep only the rows with a value (`{name} IS NOT NULL`)"
        raise InputError("all_or_none", _place(self._where, table, name, row), finding, hint=hint)


def rewards_of(dataset: PathLike, table: pa.Table) -> list[float]:
    """Return the reward of each row."""
    name = "reward"
    values: list[Any] = [None] * table.num_rows
    if name in table.column_names:
        values = table.column(name).to_pylist()
    if None in values:
        where = _place(os.fspath(dataset), table, name, values.index(None))
        hint = "convert with --rewards FILE, filter out these trajectories, or set their `error`"
        raise InputError("reward_known", where, "the reward is null", hint=hint)
    return values


def _place(where: str, table: pa.Table, name: str, row: int) -> str:
    key, step = (table.column(n)[row].as_py() for n in ("trajectory_id", "step_index"))
    return f"{where}, trajectory {key!r}, step_index {step}, column {name!r}"


@contextmanager
def new_export(out: str | os.PathLike[str], dataset: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path for an export of `dataset`; rename that path to `out` at the end."""
    refuse_taken(out, dataset)
    with written_to(out, is_new=True) as path:
        refuse_taken(out, dataset)  # another writer may have finished before this one locked it
        with refuse_changed(dataset):
            yield path


@contextmanager
def written_to(out: str | os.PathLike[str], *, is_new: bool) -> Iterator[Path]:
    """Yield a temporary path; rename it to `out`, which may exist unless the output `is_new`."""
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
        finding, hint = "the output path already exists", "choose a different --out, or remove it"
        raise ConfigError("out_is_free", os.fspath(out), finding, hint=hint)


class ParquetFile:
    """One Parquet file, written table by table; the first table determines the columns."""

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

    Raises:
        InputError: `free_name`: a user column has a name that the export format uses.
    """
    mask = table.column("loss_mask").cast(pa.list_(pa.int8()))
    table = table.set_column(table.column_names.index("loss_mask"), "loss_mask", mask)
    table = table.drop_columns([n for n in table.column_names if n == "error"])
    table = without_maps(table)
    taken = {*names.values(), *added} & set(table.column_names)
    if taken:
        finding = f"the user column {min(taken)!r} has a name that the export format uses"
        raise InputError("free_name", "dataset", finding, hint="rename the column")
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


IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
"""Pictures as `datasets` and verl read them."""


class PictureBytes:
    """Restores the bytes of pictures in messages."""

    def __init__(self, dataset: PathLike) -> None:
        self._dataset, self._stores = dataset, stores_of(dataset)

    def restored_in(self, table: pa.Table) -> pa.Table:
        """Return a table whose `messages` have the bytes, without the column `pictures`.

        The same applies to the steps of merged rows, in `segments`.
        """
        if PICTURES in table.column_names:
            if "messages" in table.column_names:
                table = _replaced(table, "messages", self._texts(table.column("messages")))
            table = table.drop_columns([PICTURES])
        if "segments" not in table.column_names:
            return table
        column = table.column("segments").combine_chunks()
        if not {PICTURES, "messages"} & {f.name for f in column.type.value_type}:
            return table
        lists = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        return _replaced(table, "segments", self._segments(lists))

    def _segments(self, lists: pa.ListArray) -> pa.ListArray:
        steps = pc.list_flatten(lists)
        fields = {f.name: pc.struct_field(steps, f.name) for f in steps.type}
        fields.pop(PICTURES, None)
        if "messages" in fields:
            fields["messages"] = self._texts(fields["messages"])
        return relisted(lists, pa.StructArray.from_arrays([*fields.values()], [*fields]))

    def _texts(self, column: pa.ChunkedArray | pa.Array) -> pa.Array:
        return pa.array([self.restored(text) for text in column.to_pylist()], pa.string())

    def restored(self, text: str | None) -> str | None:
        """Return the JSON of messages with the bytes of all pictures."""
        if text is None or '"blob"' not in text:
            return text
        return json.dumps(with_parts(json.loads(text), self._part), ensure_ascii=False)

    def in_messages(self, value: Any) -> Any:
        """Return messages with the bytes of all pictures."""
        return with_parts(value, self._part)

    def content(self, name: str) -> bytes:
        """Return the content of a file of the store.

        Raises:
            InvariantError: `picture_reference`: the file is missing, or its content was changed.
        """
        store = next((store for store in self._stores if name in store.files), None)
        content = None if store is None else store.read(name)
        if content is None:
            finding, hint = (
                f"the file {name} is missing or was changed",
                f"move DS{SUFFIX} together with DS",
            )
            raise InvariantError(RULE, str(self._dataset), finding, "", hint)
        return content

    def apart(self, messages: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Return messages without the references of their pictures, and the pictures, in order."""
        images = list[dict[str, Any]]()

        def without_reference(part: Mapping[str, Any]) -> dict[str, Any]:
            images.append({"bytes": self.content(part["blob"]), "path": None})
            return {"type": part["type"]}

        return with_parts(messages, without_reference), images

    def images_in(self, table: pa.Table) -> pa.Array:
        """[N] Return the pictures of each row as `IMAGES`, in order; null if it has none in the store."""
        rows = table.column(PICTURES).to_pylist()
        stored = [[e["sha256"] for e in row or () if e["sha256"] is not None] for row in rows]
        images = [[image for name in names if (image := self._image(name))] for names in stored]
        return pa.array([row or None for row in images], IMAGES)

    def _image(self, name: str) -> dict[str, Any] | None:
        content = self.content(name)
        is_image = MEDIA_TYPES.get(extension_of(content), "").startswith("image/")
        return {"bytes": content, "path": None} if is_image else None

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        content = self.content(part["blob"])
        kind, data = part["type"], base64.b64encode(content).decode()
        mime = part.get("media_type") or MEDIA_TYPES.get(extension_of(content))
        url = f"data:{mime or 'application/octet-stream'};base64,{data}"
        if kind in {"image", "video"}:
            return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
        if kind == "audio":
            sound = {"data": data, "format": str(mime).rpartition("/")[2]}
            return {"type": "input_audio", "input_audio": sound}
        named = {"filename": part["name"]} if "name" in part else {}
        return {"type": "file", "file": {"file_data": url, **named}}


def with_parts(value: Any, replaced: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return messages with another value for each part that refers to a file of the store."""
    if isinstance(value, list):
        return [with_parts(inner, replaced) for inner in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("blob"), str) and "type" in value:
        return replaced(value)
    return {
        k: with_parts(v, replaced) if k in {"content", "output"} else v for k, v in value.items()
    }


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)
