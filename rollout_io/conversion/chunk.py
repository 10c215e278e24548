"""Conversion of one chunk of runs to shards; runs that break a rule are rejected."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from rollout_io.conversion import rejections
from rollout_io.conversion.batch import Reader, Settings, of_run, sound
from rollout_io.conversion.finished import Record, footer_of
from rollout_io.conversion.remote import named_rejection
from rollout_io.conversion.rewards import Key, Outcome
from rollout_io.conversion.staging import emptied
from rollout_io.conversion.summary import Summary
from rollout_io.dataset.footer import Part
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.formats.base import Rejected, Run
from rollout_io.formats.parsing.records import close_files
from schemas.errors import InvariantError, RolloutError

BATCH_BYTES = 32 << 20  # size of the log records of one table


@dataclass(kw_only=True, slots=True)
class Chunk:
    """Runs with their outcomes from the rewards file, and the directory to write them to.

    Attributes:
        log: Index of the log that contains the runs.
        record: Record for the footer of the chunk's last shard.
    """

    part: Part
    runs: Sequence[Run]
    out: str
    log: int = 0
    record: Record = field(default_factory=dict)
    outcomes: Mapping[Key, Outcome] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Index of the chunk in the conversion."""
        return self.part.index


@dataclass(kw_only=True, slots=True)
class Report:
    """Result of a chunk.

    Attributes:
        trajectory_ids: For table formats, the document that contains each trajectory id, because
            the plan does not list the trajectories of a document.
        routing: (layers, experts per token); None if there is no routing.
    """

    summary: Summary = field(default_factory=Summary)
    rejected: list[Rejected] = field(default_factory=list)
    trajectory_ids: dict[str, str] = field(default_factory=dict)
    routing: tuple[int, int] | None = None

    def encode(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; `decode` reads it."""
        return {
            "summary": self.summary.encode(),
            "rejected": [rejections.encode(r) for r in self.rejected],
            "trajectory_ids": self.trajectory_ids,
            "routing": self.routing,
        }

    @classmethod
    def decode(cls, values: dict[str, Any]) -> Self:
        """Parse the output of `encode`."""
        return cls(
            summary=Summary.decode(values["summary"]),
            rejected=[rejections.decode(r) for r in values["rejected"]],
            trajectory_ids=values["trajectory_ids"],
            routing=values["routing"] and tuple(values["routing"]),
        )

    def take_names(self, table: pa.Table, where: str) -> None:
        """Record the trajectory ids of a document.

        Raises:
            InvariantError: `unique_trajectory`: another document contains one of the trajectories.
        """
        names = dict.fromkeys(table.column("trajectory_id").to_pylist(), where)
        for name in names:
            if name in self.trajectory_ids:
                raise repeated(name, self.trajectory_ids[name], where)
        self.trajectory_ids |= names


def _with_columns(known: pa.Schema, table: pa.Table, where: str) -> pa.Schema:
    """Add the columns of a document to the columns of earlier documents.

    Raises:
        InvariantError: `columns_and_types`: a column has a different type in this document.
    """
    try:
        return pa.unify_schemas([known, table.schema], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        got = f"a column has a different type than in an earlier document: {error}"
        hint = "give the column one type in all documents, or convert them separately"
        raise InvariantError("columns_and_types", where, got, "", hint) from None


def repeated(name: str, first: str, second: str) -> InvariantError:
    """Return the error for a trajectory that two documents contain."""
    hint = "convert the outputs of each training step to a separate dataset"
    got = f"trajectory {name!r} also occurs in {first}"
    return InvariantError("unique_trajectory", second, got, "", hint)


def convert_chunk(
    chunk: Chunk, logs: Sequence[Settings], progress: Callable[[int, int], object] | None = None
) -> Report:
    """Write the rows of a chunk to its own directory.

    Args:
        chunk: The runs to convert.
        logs: Settings for reading and writing each log.
        progress: Called with the numbers of bytes and rows since the last call.
    """
    close_files()  # a process of a Ray cluster may have converted an earlier file of the same name
    report, tell = Report(), progress or (lambda _num_bytes, _num_rows: None)
    settings = logs[chunk.log]
    layout, metadata = settings.layout, settings.metadata
    reader = Reader(settings, chunk.outcomes)
    writer = RolloutWriter(
        emptied(chunk.out), layout=layout, metadata=metadata, checked=True, part=chunk.part
    )
    broken: list[Rejected] = []
    columns = pa.schema([])
    with without_collector(), writer:
        for runs, num_bytes in _batches(chunk.runs):
            for part in reader.parts(runs):
                table = sound(part, broken, metadata.vocab_size)
                # Later documents are not compared with the types and names of a rejected document.
                if settings.adapter.is_table and table.num_rows:
                    try:
                        where = part.runs[0].places[0].where
                        known = _with_columns(columns, table, where)
                        report.take_names(table, where)
                    except RolloutError as error:
                        broken += of_run(part.runs[0], error)
                        continue
                    columns = known
                if table.num_rows:
                    report.summary.add(table, reader.compared)
                    writer.write(table)
                tell(0, table.num_rows)
            tell(num_bytes, 0)
        rejected, spool = reader.rejected + broken, settings.spool
        report.rejected = [named_rejection(r, spool) for r in rejected] if spool else rejected
        report.routing = reader.routing
        report.summary.left_out = dict(reader.left_out)
        report.summary.reject(report.rejected)
        writer.footer = footer_of(chunk.record, report.summary)
    return report


def _batches(runs: Sequence[Run]) -> Iterator[tuple[list[Run], int]]:
    """Yield consecutive runs and the number of bytes of their records."""
    batch: list[Run] = []
    num_bytes = 0
    for run in runs:
        batch.append(run)
        num_bytes += run.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch, num_bytes
            batch, num_bytes = [], 0
    if batch:
        yield batch, num_bytes


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the cycle collector: parsing allocates millions of objects but no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
