"""Conversion of one chunk of runs to checked tables and shards.

A run with an invalid record, or with rows that break a rule, is rejected entirely.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.conversion import rejections
from rollout_io.conversion.joining import Recorded
from rollout_io.conversion.rejections import of_run, pointed
from rollout_io.conversion.remote import named_rejection, named_table
from rollout_io.conversion.rewards import Key, Outcome, settle
from rollout_io.conversion.rows import Settled, stored_in, table_of
from rollout_io.conversion.staging import emptied
from rollout_io.conversion.summary import Record, Summary, footer_of, refuse_unread
from rollout_io.conversion.text import (
    Retokenizer,
    Untokenized,
    check_decoded,
    is_of_tokenizer,
    with_tokens,
)
from rollout_io.dataset.footer import Part
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.formats.base import Adapter, Input, Options, Rejected, Run, Trajectory, noted
from rollout_io.formats.detect import find_adapter
from rollout_io.formats.parsing.jsonl import contained
from rollout_io.formats.parsing.messages import check_slips, note_lacks
from rollout_io.formats.parsing.records import INCOMPLETE, close_files, natural_key
from rollout_io.formats.parsing.tokens import strict_ids
from schemas.checker import Checker
from schemas.errors import InvariantError, RolloutError
from schemas.metadata import DatasetMetadata
from schemas.rules import RULES

BATCH_BYTES = 32 << 20  # size of the log records of one table


@dataclass(kw_only=True, slots=True)
class Chunk:
    """Runs with their outcomes from the rewards file, and the directory to write them to."""

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

    @property
    def num_bytes(self) -> int:
        """Size of the records of its runs."""
        return size_of(self.runs)


@dataclass(kw_only=True, slots=True)
class Report:
    """Result of a chunk.

    Attributes:
        trajectory_ids: For table formats, the document that contains each trajectory id, because
            the plan does not list the trajectories of a document.
        routing: (layers, experts per token); None if there is no routing.
        joined: State of the recorded calls (`Recorded.state`); None if there are none.
    """

    summary: Summary = field(default_factory=Summary)
    rejected: list[Rejected] = field(default_factory=list)
    trajectory_ids: dict[str, str] = field(default_factory=dict)
    routing: tuple[int, int] | None = None
    joined: dict[str, Any] | None = None

    def encode(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict; `decode` reads it."""
        report: dict[str, Any] = msgspec.to_builtins(self, enc_hook=rejections.encoded)
        return report

    @classmethod
    def decode(cls, values: dict[str, Any]) -> Self:
        """Parse the output of `encode`."""
        return msgspec.convert(values, cls, dec_hook=rejections.decoded)


def take_names(first: dict[str, str], names: Mapping[str, str]) -> None:
    """Add the places of trajectories to `first`; none may be there already."""
    for name, where in names.items():
        if name in first:
            raise repeated(name, first[name], where)
    first |= names


def repeated(name: str, first: str, second: str) -> InvariantError:
    """Return the error for a trajectory that two documents contain."""
    hint = "convert the outputs of each training step to a separate dataset"
    finding = f"trajectory {name!r} also occurs in {first}"
    return InvariantError("unique_trajectory", second, finding, "", hint)


def _with_columns(columns: pa.Schema, table: pa.Table, where: str) -> pa.Schema:
    """Add the columns of a document to the columns of earlier documents."""
    try:
        return pa.unify_schemas([columns, table.schema], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        finding = f"a column has a different type than in an earlier document: {error}"
        hint = "give the column one type in all documents, or convert them separately"
        raise InvariantError("columns_and_types", where, finding, "", hint) from None


def convert_chunk(
    chunk: Chunk, logs: Sequence[Settings], progress: Callable[[int, int], object] | None = None
) -> Report:
    """Write the rows of a chunk to its own directory."""
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
    with without_collector(), stored_in(settings.blobs), writer:
        for runs in cut(chunk.runs, BATCH_BYTES):
            for part in reader.parts(runs):
                table = sound(part, broken, metadata.vocab_size)
                # Later documents are not compared with the types and names of a rejected document.
                if settings.adapter.is_table and table.num_rows:
                    try:
                        where = part.runs[0].places[0].where
                        widened = _with_columns(columns, table, where)
                        names = dict.fromkeys(table.column("trajectory_id").to_pylist(), where)
                        take_names(report.trajectory_ids, names)
                    except RolloutError as error:
                        broken += of_run(part.runs[0], error)
                        continue
                    columns = widened
                if table.num_rows:
                    report.summary.add(table, reader.compared, reader.notes)
                    writer.write(table)
                tell(0, table.num_rows)
            tell(size_of(runs), 0)
        rejected, spool = reader.rejected + broken, settings.spool
        report.rejected = [named_rejection(r, spool) for r in rejected] if spool else rejected
        report.routing = reader.routing
        report.joined = None if settings.recorded is None else settings.recorded.state()
        report.summary.reject(report.rejected)
        writer.footer = footer_of(chunk.record, report.summary)
    return report


def size_of(runs: Iterable[Run]) -> int:
    """Return the size of the records of runs."""
    return sum([run.num_bytes for run in runs])


def cut(runs: Iterable[Run], most_bytes: int) -> Iterator[list[Run]]:
    """Cut consecutive runs into non-empty parts of at most `most_bytes` of records, or one run."""
    part: list[Run] = []
    num_bytes = 0
    for run in runs:
        if part and num_bytes + run.num_bytes > most_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(run)
        num_bytes += run.num_bytes
    if part:
        yield part


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings that all chunks of a conversion share; see also `Choices`.

    Attributes:
        tokenizer: Directory of the tokenizer against which exact ids are checked; None if unknown.
        spool: Directory with copies of remote directories; None if there are none.
        blobs: Directory to store pictures in; None keeps them in the messages.
    """

    adapter: Adapter
    format: str = ""
    options: Options = field(default_factory=Options)
    retokenizer: Retokenizer | Untokenized | None
    tokenizer: str | None = None
    layout: Literal["prefix", "full"] = "full"
    metadata: DatasetMetadata = field(default_factory=DatasetMetadata)
    spool: Path | None = None
    blobs: str | None = None
    recorded: Recorded | None = None
    strict: bool = False

    def __reduce__(self) -> tuple[Callable[..., Settings], tuple[dict[str, Any]]]:
        """Be sent with the name of the format alone: decoders cannot be sent to other processes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _received, (values | {"adapter": None},)


def _received(values: dict[str, Any]) -> Settings:
    return Settings(**values | {"adapter": find_adapter(values["format"])})


class RunRows(NamedTuple):
    """Runs and a table with their rows."""

    runs: Sequence[Run]
    table: pa.Table


@dataclass(slots=True)
class Reader:
    """Read runs from a log and convert them to tables.

    `compared` are the trajectories whose ids were compared with the text in the log; notes are by
    trajectory, too. `routing` is (layers, experts per token) of the first run that has routing.
    """

    settings: Settings
    outcomes: Mapping[Key, Outcome]
    rejected: list[Rejected] = field(default_factory=list)
    routing: tuple[int, int] | None = None
    compared: set[str] = field(default_factory=set)
    notes: dict[str, Counter[str]] = field(default_factory=dict)

    def parts(self, runs: Sequence[Run]) -> Iterator[RunRows]:
        """Yield the runs and their rows in order; the rows are checked later, by `sound`."""
        spool, is_table = self.settings.spool, self.settings.adapter.is_table
        settled = [] if is_table else self.settle(runs)
        for part in self._tables(runs) if is_table else tabulated(settled, self.rejected):
            yield part._replace(table=named_table(part.table, spool)) if spool else part

    def _tables(self, runs: Sequence[Run]) -> Iterator[RunRows]:
        for run in runs:
            try:
                with contained(run.places[0].where):
                    table = self.settings.adapter.read(run, self.settings.options)
                self._take_routing([_routing_of(table)], run)
            except RolloutError as error:
                self.rejected += of_run(run, pointed(error, self.settings.format))
            else:
                yield RunRows([run], table)

    def settle(self, runs: Sequence[Run]) -> list[tuple[Run, Settled]]:
        """Read the runs; return each readable run with its trajectory."""
        batch: list[tuple[Run, Settled]] = []
        settings, options = self.settings, self.settings.options
        with np.errstate(over="ignore"):  # the checks reject infinity
            for run in runs:
                try:
                    with contained(run.places[0].where if run.places else run.instance_id):
                        assert run.repetition_id is not None
                        logged = Trajectory(steps=[])
                        with noted() as notes:
                            if run.places:
                                logged = settings.adapter.read(run, options)
                            if settings.adapter.is_agent:
                                note_lacks(logged)
                            if settings.adapter.is_own:
                                check_slips(logged, strict=settings.strict)
                            steps = with_tokens(
                                logged, settings.retokenizer, settings.tokenizer, settings.recorded
                            )
                        if settings.strict:
                            refuse_unread(notes, run)
                        outcome = self.outcomes.get((run.instance_id, run.repetition_id))
                        settled = settle(run, logged, steps, outcome, options.reward)
                    tokenizer = settings.tokenizer
                    if tokenizer is not None and check_decoded(settled.steps, tokenizer):
                        self.compared.add(settled.trajectory_id)
                    routes = [step.rollout_expert_indices for step in settled.steps]
                    self._take_routing([r.shape[1:] for r in routes if r is not None], run)
                    if notes:
                        self.notes[settled.trajectory_id] = notes
                    batch.append((run, settled))
                except RolloutError as error:
                    if is_of_tokenizer(error, settings.retokenizer):
                        raise
                    self.rejected += of_run(run, pointed(error, settings.format))
        return batch

    def _take_routing(self, shapes: Iterable[tuple[int, ...] | None], run: Run) -> None:
        for shape in shapes:
            if shape is not None and self.routing is not None and self.routing != shape:
                raise other_routing(run.places[0].where, shape, self.routing)
            if shape is not None:
                self.routing = (shape[0], shape[1])


def other_routing(where: str, shape: tuple[int, ...], earlier: tuple[int, ...]) -> InvariantError:
    """Return the error for routing that has a different shape than in earlier calls."""
    finding, before = (f"{layers} layers, top {topk}" for layers, topk in (shape, earlier))
    message = f"{where}: the routing has {finding}, but earlier calls have {before}"
    hint = "convert the logs of each model to a separate dataset"
    return InvariantError("routing_shape", where, finding, before, hint, message=message)


def _routing_of(table: pa.Table) -> tuple[int, ...] | None:
    if "rollout_expert_indices" not in table.column_names:
        return None
    kind = table.schema.field("rollout_expert_indices").type.value_type
    return (kind.list_size, kind.value_type.list_size)


def tabulated(batch: Sequence[tuple[Run, Settled]], rejected: list[Rejected]) -> Iterator[RunRows]:
    """Yield the batch as one table; if that fails, split it in half to find the faulty run."""
    try:
        yield RunRows([run for run, _ in batch], table_of([settled for _, settled in batch]))
    except (ArithmeticError, ValueError) as error:
        if len(batch) == 1:
            rejected += of_run(batch[0][0], _fault(*batch[0], error))
            return
        middle = len(batch) // 2
        yield from tabulated(batch[:middle], rejected)
        yield from tabulated(batch[middle:], rejected)


def _fault(run: Run, settled: Settled, error: Exception) -> RolloutError:
    """Return the error for a run that cannot be converted because of invalid ids or values."""
    if isinstance(error, RolloutError):
        return error
    try:
        for step in settled.steps:
            for what, ids in (("prompt", step.prompt_token_ids), ("response", step.response_ids)):
                if isinstance(ids, bytes):
                    strict_ids(ids, what, step.source)
    except RolloutError as found:
        return found
    where, finding = run.places[0].where, " ".join(str(error).split())
    hint = "check the run for a number that is too large, or a value of the wrong type"
    return InvariantError("columns_and_types", where, finding, "", hint)


def sound(part: RunRows, rejected: list[Rejected], vocab_size: int | None) -> pa.Table:
    """Move trajectories that break a named invariant to `rejected`, and return the remaining rows."""
    runs, table = part
    report = Checker(vocab_size).check(table)
    breaches = report.filter(pl.col("severity") == "error") if len(report) else report
    if not len(breaches):
        return table
    names = table.column("trajectory_id")
    by_name = {f"{run.instance_id}_{run.repetition_id}": run for run in runs}
    faults: dict[str, RolloutError] = {}
    for breach in breaches.iter_rows(named=True):
        row = breach["row"]
        # A breach of the entire table, or of an unknown trajectory, rejects all runs of the part.
        if row is None or names[row].as_py() not in by_name:
            error = _breach(breach, runs[0].places[0].where)
            rejected += [r for run in runs for r in of_run(run, error)]
            return table.slice(0, 0)
        where = table.column("source")[row].as_py()
        faults.setdefault(names[row].as_py(), _breach(breach, where))
    rejected += [r for name, error in faults.items() for r in of_run(by_name[name], error)]
    return table.filter(pc.invert(pc.is_in(names, pa.array(list(faults), names.type))))


def in_order(rejected: Iterable[Rejected], inputs: Sequence[Input]) -> list[Rejected]:
    """Sort records by log, in the order of the command line, then by position in the log."""
    ranks = {place.path: rank for rank, place in enumerate(inputs)}

    @lru_cache
    def key(path: Path) -> tuple[Any, ...]:
        place = next((p for p in (path, *path.parents) if p in ranks), None)
        return ranks[place] if place else len(ranks), natural_key(str(path))

    return sorted(rejected, key=lambda r: (key(r.place.path), r.place.offset or 0))


def causes_first(rejected: Iterable[Rejected], inputs: Sequence[Input]) -> list[Rejected]:
    """Sort records in the order of the logs; those with errors caused by other errors come last."""
    return sorted(in_order(rejected, inputs), key=lambda one: one.error.rule == INCOMPLETE)


def _breach(breach: dict[str, Any], where: str) -> RolloutError:
    rule, column = breach["rule"], breach["column"]
    finding = f"{column}: {breach['got']}" if column else breach["got"]
    message = f"{where}: {breach['message']}"
    return InvariantError(
        rule, where, finding, breach["expected"], RULES[rule].hint, message=message
    )
