"""Index logs for the viewer: short columns of each row, counts of each trajectory, and where it is.

Large logs are indexed in a process of its own, which sends `Part`s. The first part has the newest
files, each read for itself; the parts after `Whole` replace it, and relate files to each other (the
sub-agents and forks of a session) as a conversion does. `joined` parts are the index; `LogRows` reads
rows from their files again.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.view.index_columns import FACTS, facts_of, kept_columns, placed, short_rows, text_of
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.conversion.browsing import (
    Listing,
    Read,
    encode_run,
    open_listed,
    read_opened,
    rejected_rows,
)
from rollout_io.conversion.chunk import repeated
from rollout_io.formats.base import Place, Rejected, added
from rollout_io.formats.detect import RULE, explanation, load_formats
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError, RolloutError
from schemas.numpy_arrays import empty_table
from schemas.ragged import IntArray

MAX_REJECTED = 1000
"""Maximum number of rejected records that have a row of their own; all are counted."""
MAX_EXPLAINED = 100
"""Maximum number of files in no format that are read to find out why."""
PREVIEW_BYTES = 16 << 20
"""Size of the newest files that are shown first, if the logs are larger than four times that."""
PREVIEW_FILES = 64

CODEC = "zstd"
_TOLD_FILES = 16

_CACHED_BYTES = 64 << 20


class Job(NamedTuple):
    """Logs to index.

    Attributes:
        path: File or directory.
        format: Name of their format, or `auto`.
        spool: Directory for decompressed files, and for the runs.
        preview_bytes: See `PREVIEW_BYTES`.
    """

    path: str
    format: str
    spool: Path
    preview_bytes: int = PREVIEW_BYTES


class At(NamedTuple):
    """Position of a trajectory's run and of its compressed text in the file of runs.

    `size` is the length of the text before compression. Instead of a run, a rejected record, whose
    `format` is "", has its row there, as an Arrow stream.
    """

    format: str
    offset: int = 0
    length: int = 0
    text_offset: int = 0
    text_length: int = 0
    size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Index of some trajectories.

    Attributes:
        rows: [N] short columns of each row.
        facts: [T] see `index_columns`.
        runs: [T] the run of each trajectory.
        cut: Columns with values that were cut.
        schema: Schema of the rows.
        notes: Notes of the readers.
    """

    rows: pl.DataFrame
    facts: pl.DataFrame
    runs: Sequence[At]
    cut: frozenset[str]
    schema: pa.Schema
    notes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What is being done: `open` (files), `find` (bytes), `read` (runs)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The inputs that are not shown.

    Attributes:
        num_records: Number of records that were found.
        num_rejected: Number of these that were rejected.
        skipped: Name of each file that is no log or was left out, with the reason.
    """

    num_records: int = 0
    num_rejected: int = 0
    skipped: Mapping[str, str]


class Whole(NamedTuple):
    """The parts that follow replace those before."""

    counts: Counts


Message = Part | Progress | Counts | Whole


def index_logs(job: Job, send: Callable[[Message], object]) -> None:
    """Index logs.

    Raises:
        RolloutError: The path is missing, or is not a log.
    """
    listing = Listing.of(Path(job.path))
    with (job.spool / "runs").open("wb") as file:
        indexing = _Indexing(listing, job.format, file)
        if listing.num_bytes > 4 * job.preview_bytes and Path(job.path).is_dir():
            for part in indexing.preview(job.spool / "preview", job.preview_bytes):
                send(part)
        indexing.whole(job.spool / "whole", send)


@dataclass(slots=True)
class _Indexing:
    listing: Listing
    format: str
    file: BinaryIO
    names: dict[str, str] = field(default_factory=dict)

    def preview(self, spool: Path, num_bytes: int) -> Iterator[Part]:
        """Yield the newest files, up to a size; files that cannot be read alone are left out."""
        newest = sorted(self.listing.files, key=lambda file: file.modified, reverse=True)
        chosen, size = list[Path](), 0
        for file in newest[:PREVIEW_FILES]:
            size += file.num_bytes
            if size > num_bytes:
                break
            chosen.append(file.path)
        for number, path in enumerate(chosen):
            try:
                one = Listing.of(path)
                opened = open_listed(one, spool / str(number), self.format)
                for read in read_opened(opened, one, spool, lambda *_: None):
                    yield from self._parts(read)
            except RolloutError:
                continue
        self.names.clear()

    def whole(self, spool: Path, send: Callable[[Message], object]) -> None:
        skipped: dict[str, str] = {}
        refused: list[Rejected] = []
        seen, total = 0, len(self.listing.files)

        def tell(name: str, error: RolloutError | None) -> None:
            nonlocal seen
            seen += 1
            if error is not None:
                refused.append(Rejected(Place(Path(name), name), error))
            if seen % _TOLD_FILES == 0:
                send(Progress(stage="open", done=min(seen, total), total=total))

        def progress(stage: str, done: int, total: int) -> None:
            send(Progress(stage=stage, done=done, total=total))

        opened = open_listed(self.listing, spool, self.format, tell)
        names, formats = {rejected.place.where for rejected in refused}, load_formats().adapters
        for name in (name for name in opened.left if name not in names):
            is_explained = len(skipped) < MAX_EXPLAINED and len(refused) < MAX_REJECTED
            clue = explanation(name, Path(name), formats) if is_explained else None
            if clue is not None and clue.rule != RULE:
                tell(name, clue)
            else:
                skipped[name] = "it is no log" if clue is None else clue.got
        num_rejected = num_records = 0
        unusable: list[Rejected] = []
        for number, read in enumerate(read_opened(opened, self.listing, spool, progress)):
            taken = self._taken(read)
            rejected = [*([] if number else refused), *read.rejected, *taken]
            shown = [] if taken else read.runs.values()
            num_rejected += len(rejected)
            num_records += len(rejected) + sum(len(run.places) for run in shown)
            unusable += rejected[: MAX_REJECTED - len(unusable)]
            counts = Counts(num_records=num_records, num_rejected=num_rejected, skipped=skipped)
            send(counts if number else Whole(counts))
            for part in self._parts(read):
                send(part)
        if not num_records:
            raise InputError("no_calls", str(self.listing.path), "the log contains no calls")
        for part in self._rejected(unusable):
            send(part)

    def _taken(self, read: Read) -> list[Rejected]:
        """Reject all runs of a table if one of its trajectories is also in an earlier table."""
        taken = sorted(self.names.keys() & read.runs.keys())
        places = [place for run in read.runs.values() for place in run.places] if taken else []
        return [
            Rejected(place, repeated(taken[0], self.names[taken[0]], place.where))
            for place in places
        ]

    def _parts(self, read: Read) -> Iterator[Part]:
        """Yield the part of what was read, if there is a trajectory."""
        if read.table.num_rows and not self.names.keys() & read.runs.keys():
            self.names |= {name: run.places[0].where for name, run in read.runs.items()}
            places = {
                name: (read.format, self._source(run.places[0])) for name, run in read.runs.items()
            }
            written: dict[int, At] = {}
            for run in read.runs.values():
                if id(run) not in written:
                    content = zlib.compress(encode_run(run), 1)
                    written[id(run)] = At(read.format, self.file.tell(), len(content))
                    self.file.write(content)
            ids = read.table.column("trajectory_id")
            runs = {
                name: self._with_text(written[id(run)], read.table.filter(pc.equal(ids, name)))
                for name, run in read.runs.items()
            }
            self.file.flush()
            yield self._part(read.table, places, runs, read.notes)

    def _source(self, place: Place) -> Path:
        """Return the file of a record; that of a decompressed one is named only in messages."""
        is_listed = place.path.is_relative_to(self.listing.path)
        return place.path if is_listed else Path(re.sub(r":\d+$", "", place.where))

    def _rejected(self, rejected: Sequence[Rejected]) -> Iterator[Part]:
        """Yield a part for each rejected record that has a row of its own."""
        for place, table in rejected_rows(rejected, self.listing):
            name = table.column("trajectory_id")[0].as_py()
            if name not in self.names:
                self.names[name] = place.where
                at = At("", self.file.tell())
                with pa.ipc.new_stream(self.file, table.schema) as stream:
                    stream.write_table(table)
                self.file.flush()
                at = at._replace(length=self.file.tell() - at.offset)
                yield self._part(table, {name: ("", place.path)}, {name: at}, {})

    def _with_text(self, at: At, rows: pa.Table) -> At:
        text = text_of(rows)
        offset, content = self.file.tell(), pa.compress(text, CODEC, asbytes=True)
        self.file.write(content)
        return at._replace(text_offset=offset, text_length=len(content), size=len(text))

    def _part(
        self,
        table: pa.Table,
        places: Mapping[str, tuple[str, Path]],
        runs: Mapping[str, At],
        notes: Mapping[str, int],
    ) -> Part:
        cut = set[str]()
        rows = short_rows(table, kept_columns(table.schema), cut)
        root = self.listing.path if self.listing.path.is_dir() else self.listing.path.parent
        facts = placed(facts_of(table), places, root)
        return Part(
            rows=rows,
            facts=facts,
            runs=[runs[name] for name in facts["trajectory_id"]],
            cut=frozenset(cut),
            schema=table.schema.remove_metadata(),
            notes=Counter(notes),
        )


@dataclass(slots=True, weakref_slot=True)
class TableCache:
    """The most recently opened trajectories, up to 64 MiB; at least one."""

    tables: OrderedDict[tuple[At, str], pa.Table] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, at: tuple[At, str], read: Callable[[], pa.Table]) -> pa.Table:
        """Return a table, reading it if it is not kept."""
        with self.lock:
            if at in self.tables:
                self.tables.move_to_end(at)
                return self.tables[at]
        table = read()
        with self.lock:
            self.tables[at] = table
            while (
                len(self.tables) > 1 and sum(t.nbytes for t in self.tables.values()) > _CACHED_BYTES
            ):
                self.tables.popitem(last=False)
        return table


class LogRows:
    """The rows of logs by position, with the interface of `RowReader`.

    Args:
        schema: Schema of all rows.
        index: The trajectories.
        table: Returns the rows of a trajectory.
    """

    def __init__(
        self, schema: pa.Schema, index: TrajectoryIndex, table: Callable[[int], pa.Table]
    ) -> None:
        self.schema, self.num_rows = schema, len(index.rows)
        self._starts, self._table = index.starts, table

    def rows(self, begin: int, end: int, names: Sequence[str]) -> pa.Table:
        """Read adjacent rows; rows of rejected records are left out."""
        wanted = pa.schema([self.schema.field(name) for name in names])
        parts = [empty_table(wanted)]
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        for number in range(max(first, 0), len(self._starts) - 1):
            start = int(self._starts[number])
            if start >= end:
                break
            table = self._table(number)[max(begin - start, 0) : end - start]
            parts.append(_selected(table, wanted))
        return pa.concat_tables(parts, promote_options="permissive").combine_chunks()

    def take(self, rows: IntArray, names: Sequence[str]) -> pa.Table:
        """Read rows at any positions, in order."""
        tables = [self.rows(row, row + 1, names) for row in rows.tolist()]
        return pa.concat_tables(tables, promote_options="permissive")


def _selected(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(f.name).cast(f.type) if f.name in table.column_names
        else pa.nulls(table.num_rows, f.type)
        for f in schema
    ]  # fmt: skip
    return pa.table(columns, names=schema.names)


def joined(parts: Sequence[Part]) -> Part:
    """Join parts; columns that only some have are null in the others.

    A user column with types that have no common one becomes text.
    """
    notes: dict[str, int] = {}
    for part in parts:
        notes = added(notes, part.notes)
    return Part(
        rows=pl.concat([part.rows for part in parts], how="diagonal_relaxed", rechunk=True),
        facts=pl.concat([part.facts for part in parts], rechunk=True),
        runs=[at for part in parts for at in part.runs],
        cut=frozenset(name for part in parts for name in part.cut),
        schema=_unified([part.schema for part in parts]),
        notes=notes,
    )


def _unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    unified: dict[str, pa.Field] = {}
    for field_ in (f for schema in dict.fromkeys(schemas) for f in schema):
        before = unified.get(field_.name, field_)
        try:
            merged = pa.unify_schemas(
                [pa.schema([before]), pa.schema([field_])], promote_options="permissive"
            ).field(0)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            merged = pa.field(field_.name, pa.string())
        unified[field_.name] = merged.with_nullable(nullable=True)
    return pa.schema(list(unified.values()))


def without(part: Part, names: pl.Series) -> Part:
    """Return a part without the trajectories in `names`."""
    is_left_out = part.facts["trajectory_id"].is_in(names.implode())
    remaining = pl.col("trajectory_id").is_in(
        part.facts["trajectory_id"].filter(~is_left_out).implode()
    )
    runs = [at for at, is_known in zip(part.runs, is_left_out, strict=True) if not is_known]
    rows, facts = part.rows.filter(remaining), part.facts.filter(remaining)
    return replace(part, rows=rows, facts=facts, runs=runs)


def _nothing() -> Part:
    columns = [
        COLUMN_BY_NAME[name] for name in ("instance_id", "trajectory_id", "repetition_id", "reward")
    ]
    columns += [
        COLUMN_BY_NAME[name] for name in ("prompt_token_ids", "response_ids", "loss_mask", "error")
    ]
    table = empty_table(pa.schema([pa.field(c.name, c.type) for c in columns]))
    rows = short_rows(table, kept_columns(table.schema), set())
    facts = pl.DataFrame(schema={"trajectory_id": pl.String, **FACTS})
    schema = table.schema
    return Part(rows=rows, facts=facts, runs=[], cut=frozenset(), schema=schema, notes={})


NOTHING = _nothing()
"""The part of a log without trajectories."""
