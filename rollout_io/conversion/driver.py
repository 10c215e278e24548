"""Conversion of logs: to a dataset, in chunks that survive an interruption, or to one table."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, Unpack

import pyarrow as pa
from msgspec import structs

from rollout_io.conversion import rejections
from rollout_io.conversion.chunk import (
    Reader,
    Report,
    Settings,
    causes_first,
    convert_chunk,
    in_order,
    other_routing,
    sound,
    take_names,
    without_collector,
)
from rollout_io.conversion.inputs import (
    PathLike,
    files_of,
    open_file,
    paths_of,
    refuse_changed,
    versions_of,
)
from rollout_io.conversion.joining import Recorded, recorded_calls
from rollout_io.conversion.opened_logs import Log, Opened, open_log
from rollout_io.conversion.plan import (
    Choices,
    Keywords,
    Plan,
    chunk_size,
    chunks_of,
    identity_of,
    plan_logs,
    refuse_misfits,
    refuse_nothing,
    settings_of,
)
from rollout_io.conversion.remote import naming_errors
from rollout_io.conversion.rewards import Key, Outcome, read_rewards
from rollout_io.conversion.staging import Staging, rejected_path, spool_path
from rollout_io.conversion.summary import Summary, finished, record_of
from rollout_io.dataset.opening import Version
from rollout_io.dataset.parallel import Workers
from rollout_io.dataset.reader import read_metadata, refuse_mixed_types
from rollout_io.formats.base import Input, Rejected
from rollout_io.formats.parsing.records import MODELS
from rollout_io.retokenize.local import tokenizer_directory
from schemas.errors import InputError, RolloutError
from schemas.metadata import DatasetMetadata

T = TypeVar("T")
Progress = Callable[[int, int], object]
# Keys of the history that describe the inputs; all other keys are facts about the logs.
_OF_INPUTS = frozenset({"verb", "tool", "format", "inputs", "rewards"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        summary: Counts of records, rows and trajectories.
        about: Facts about the logs by name; with several formats, each name ends with its format.
        left: Names of skipped files and other entries inside directories (see `Opened.left`).
        num_resumed: Number of chunks that an earlier, interrupted run had finished.
        was_done: True if the dataset was already complete.
        joined: Numbers and names of calls that were joined or not (`Recorded.report`); None without
            `join`, and if the dataset was already complete.
    """

    summary: Summary
    about: Mapping[str, Any]
    left: Sequence[str] = ()
    num_resumed: int = 0
    was_done: bool = False
    joined: Mapping[str, Any] | None = None

    @property
    def format(self) -> str:
        """Formats of the logs, separated by commas."""
        return ", ".join(self.summary.formats)


class NothingUsable(InputError):
    """Every record was rejected, so there is no dataset."""

    summary: Summary


def convert(
    inputs: PathLike | Sequence[PathLike],
    out: str | os.PathLike[str],
    *,
    workers: Workers | int = 1,
    progress: Progress | None = None,
    chunk_bytes: int | None = None,
    **keywords: Unpack[Keywords],
) -> Conversion:
    """Convert logs in one or several formats to a rollout dataset.

    The dataset becomes visible once it is complete. An interrupted run leaves its finished chunks in a
    hidden directory inside `out`; the same call resumes from them, and does nothing if the dataset
    is already complete. With `on_error="skip"`, a run with an unusable record is rejected: all its
    records are written to `OUT.rejected.jsonl`, so records read = written + rejected.

    Args:
        inputs: Files, directories, patterns, URLs, or "-" for standard input; gzip and Zstandard are
            decompressed.
        out: Directory to write, local or an fsspec URL.
        workers: Processes that read and write chunks; `Workers(2, "ray")` uses Ray.
        progress: Called with (bytes, rows) since the last call; each input byte is counted twice,
            because logs are read twice.
        chunk_bytes: Number of log bytes per chunk; None: a sixteenth of the logs, but between 32 and
            128 MiB.
        **keywords: The options of `rollouts convert`, with underscores: `format`, `rewards`, `reward`,
            `group_by`, `map`, `tokenizer`, `chat_template`, `join`, `layout`, `logprobs_mode`,
            `on_error`, `strict`, `timeouts`, `overflows`, `other_fields`, `group_size`.

    Raises:
        RolloutError: An argument is invalid or, with `on_error="fail"`, a record is invalid; no
            dataset is written.

    Example:
        >>> convert("shop.calls.jsonl", "shop/", rewards="shop.rewards.jsonl")
    """
    workers = workers if isinstance(workers, Workers) else Workers(workers)
    choices, staging = _checked(keywords), Staging(out)
    report = progress or (lambda _num_bytes, _num_rows: None)
    with staging.resumable(), ExitStack() as stack:
        spool = spool_path(staging)
        if spool is None:
            spool = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(naming_errors(spool))
        staging.refuse_foreign()
        sources = _Sources.open(inputs, choices, spool, staging)
        opened = sources.opened
        num_bytes = sum(file.stat().st_size for log in opened.inputs for file in files_of(log))
        if choices.join is not None:  # each recorded call is used once, in the order of the log
            workers, chunk_bytes = Workers(), num_bytes + 1
        chunk_bytes = chunk_size(num_bytes) if chunk_bytes is None else chunk_bytes
        # Hash the logs in a thread: it takes as long as finding their runs, and releases the GIL.
        identified = _in_background(
            partial(identity_of, opened, sources.rewards, choices, chunk_bytes)
        )
        if staging.out.datasets() and (done := _done_before(staging, opened, identified.result())):
            return done
        refuse_misfits(choices, opened.logs)
        # Worker processes import their modules, which takes half a second, while the runs are found.
        pool = stack.enter_context(workers.started(convert_chunk, 1 + num_bytes // chunk_bytes))
        plans, outcomes = sources.plan(lambda number: report(number, 0))
        identity = identified.result()
        refuse_changed(sources.versions)  # or the digests may be of other files than the runs
        recorded = stack.enter_context(
            recorded_calls(choices.join, partial(convert, on_error="skip"))
        )
        settings = sources.settings(plans, recorded)
        planned = _counts_of(opened.logs, plans)
        whole, every = chunks_of(plans, outcomes, chunk_bytes, identity, staging)
        for chunk in every:
            chunk.record = record_of(identity, None if chunk.index else planned)
        reports = _resumed(staging.resume(whole), spool, recorded)
        num_resumed = len(reports)
        for i, resumed in reports.items():
            report(every[i].num_bytes, resumed.summary.num_rows)
        missing = [chunk for chunk in every if chunk.index not in reports]
        in_process = report if workers == Workers() else None
        work = partial(convert_chunk, logs=settings, progress=in_process)
        for number, converted in stack.enter_context(closing(pool.map(work, missing))):
            if in_process is None:
                report(missing[number].num_bytes, converted.summary.num_rows)
            staging.finish_chunk(missing[number].index, converted.encode())
            reports[missing[number].index] = converted
        refuse_changed(sources.versions)
        results = [reports[i] for i in range(len(every))]
        summary = _conclude(staging, sources, plans, planned, results)
        about = _facts(settings[0].metadata)
        staging.publish(whole, [] if recorded is None else [recorded.path])
        joined = None if recorded is None else recorded.report()
    return Conversion(
        summary=summary, about=about, left=opened.left, num_resumed=num_resumed, joined=joined
    )


def read_log(inputs: PathLike | Sequence[PathLike], **keywords: Unpack[Keywords]) -> pa.Table:
    """Convert logs to one rollout table, following the same rules as `convert`.

    Args:
        inputs: As for `convert`.
        **keywords: As for `convert`; an invalid record raises an error even if `on_error` is "skip".

    Raises:
        RolloutError: A record is invalid (the error describes the first one), or an argument is.

    Example:
        >>> read_log("shop.calls.jsonl", rewards="shop.rewards.jsonl").num_rows
        205
    """
    choices = _checked(keywords)
    with (
        tempfile.TemporaryDirectory() as folder,
        naming_errors(Path(folder)),
        recorded_calls(choices.join, partial(convert, on_error="skip")) as recorded,
    ):
        sources = _Sources.open(inputs, choices, Path(folder))
        refuse_misfits(choices, sources.opened.logs)
        plans, outcomes = sources.plan(lambda _num_bytes: None)
        rejected, tables = [rejected for planned in plans for rejected in planned.rejected], []
        for settings, planned in zip(sources.settings(plans, recorded), plans, strict=True):
            reader, metadata = Reader(settings, outcomes, rejected), settings.metadata
            parts = reader.parts(planned.runs)
            tables += [sound(part, rejected, metadata.vocab_size) for part in parts]
        refuse_changed(sources.versions)
        if rejected:
            sources.fail(rejected, plans)
    table = pa.concat_tables(tables, promote_options="permissive")
    return table.replace_schema_metadata(metadata.encode("full"))


def _checked(keywords: Keywords) -> Choices:
    """Return the choices, after checking that the tokenizer exists: before any log is read."""
    choices = Choices.of(keywords)
    if choices.tokenizer is not None:
        tokenizer_directory(choices.tokenizer)
    return choices


@dataclass(frozen=True, slots=True)
class _Sources:
    """The opened inputs of a conversion, from which `convert` and `read_log` read."""

    choices: Choices
    opened: Opened
    rewards: Input | None
    spool: Path
    versions: Mapping[Path, tuple[str, Version]]
    blobs: str | None = None

    @classmethod
    def open(
        cls,
        inputs: PathLike | Sequence[PathLike],
        choices: Choices,
        spool: Path,
        staging: Staging | None = None,
    ) -> Self:
        """Open the logs and the rewards file."""
        written = () if staging is None else (staging.out, staging.rejected)
        ignored = [choices.rewards] if choices.rewards else []
        ignored += [place.path if place.is_local else place.url for place in written]
        skips = staging is not None and choices.on_error == "skip"
        opened = open_log(
            paths_of(inputs),
            choices.format,
            spool,
            ignored,
            skips=skips,
            strict=choices.strict,
            paths_of_fields=choices.map,
        )
        rewards = open_file(choices.rewards, spool) if choices.rewards else None
        versions = versions_of([*opened.inputs, *([rewards] if rewards else [])])
        blobs = None if staging is None else staging.blobs.folder.url
        return cls(choices, opened, rewards, spool, versions, blobs)

    def plan(self, progress: Callable[[int], object]) -> tuple[list[Plan], Mapping[Key, Outcome]]:
        """Find, name and order the runs of all logs; return a plan for each, and the outcomes."""
        named = {} if self.rewards is None else read_rewards(*self.rewards)
        items = (log.find(progress, self.spool) for log in self.opened.logs)
        with without_collector():
            plans, outcomes = plan_logs(items, named, self.choices.group_by)
        plans[-1].rejected += self.opened.unused
        refuse_nothing(plans, self.opened.inputs)
        return plans, outcomes

    def settings(self, plans: Sequence[Plan], recorded: Recorded | None) -> list[Settings]:
        """Return the settings for reading the runs of each log."""
        abouts, logs = [planned.about for planned in plans], self.opened.logs
        return settings_of(self.choices, logs, abouts, self.spool, self.blobs, recorded)

    def fail(
        self, rejected: Iterable[Rejected], plans: Sequence[Plan], num_usable: int = 0
    ) -> NoReturn:
        """Raise the first error of rejected records; see `rejections.fail`."""
        num_runs = sum(planned.num_runs for planned in plans)
        ordered = causes_first(rejected, self.opened.inputs)
        rejections.fail(ordered, num_runs, self.opened.noun, num_usable=num_usable)


def _facts(metadata: DatasetMetadata) -> dict[str, Any]:
    """Return the facts about the logs by name; with several formats, names include the format."""
    facts: dict[str, Any] = {MODELS: list(metadata.models)} if metadata.models else {}
    for step in metadata.made_by:
        mark = f" ({step['format']})" if len(metadata.made_by) > 1 else ""
        facts |= {f"{name}{mark}": v for name, v in step.items() if name not in _OF_INPUTS}
    return facts


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Start work in a daemon thread, so that an interrupted process does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _done_before(staging: Staging, opened: Opened, identity: dict[str, Any]) -> Conversion | None:
    """Return the result of an identical earlier conversion, if there is one."""
    if (summary := finished(staging.where, identity)) is not None:
        staging.clear()
        about = _facts(read_metadata(staging.where))
        return Conversion(summary=summary, about=about, left=opened.left, was_done=True)
    staging.refuse_occupied()
    return None


def _counts_of(logs: Sequence[Log], plans: Sequence[Plan]) -> Summary:
    """Count what is known before any run is read."""
    num_runs = {log.format: p.num_runs for log, p in zip(logs, plans, strict=True)}
    planned = Summary(formats=num_runs, num_records=sum(p.num_records for p in plans))
    planned.reject([rejected for p in plans for rejected in p.rejected])
    return planned


def _resumed(
    finished_chunks: Mapping[int, dict[str, Any]], spool: Path, recorded: Recorded | None
) -> dict[int, Report]:
    """Return the reports of the chunks that an interrupted run finished, by index."""
    reports = {index: Report.decode(content) for index, content in finished_chunks.items()}
    for resumed in reports.values():
        resumed.rejected = [_located(rejected, spool) for rejected in resumed.rejected]
        if recorded is not None:
            recorded.restore(resumed.joined or {"used": (), "alone": ()})
    return reports


def _located(rejected: Rejected, spool: Path) -> Rejected:
    """Point to this run's copy of an input if the interrupted run's copy no longer exists."""
    place, copy = rejected.place, spool / rejected.place.path.name
    if place.path.exists() or not copy.exists():
        return rejected
    return rejected._replace(place=structs.replace(place, path=copy))


def _conclude(
    staging: Staging,
    sources: _Sources,
    plans: Sequence[Plan],
    planned: Summary,
    reports: Sequence[Report],
) -> Summary:
    """Write the rejected records, or raise their first error; return the total counts."""
    opened = sources.opened
    _refuse_mixtures(reports, opened.logs, plans)
    names = ", ".join(log.name for log in opened.inputs)
    refuse_mixed_types([s for i in range(len(reports)) for s in staging.shards(i)], names)
    rejected = [r for planned in plans for r in planned.rejected]
    rejected += [r for report in reports for r in report.rejected]
    if rejected and sources.choices.on_error == "fail":
        num_usable = sum(report.summary.num_trajectories for report in reports)
        sources.fail(rejected, plans, num_usable)
    summary = planned
    for report in reports:
        summary.merge(report.summary)
    if rejected:
        staging.write_rejected(rejections.lines(in_order(rejected, opened.inputs)))
    else:
        staging.remove_rejected()
    if not summary.num_rows:
        errors = [one.error for one in causes_first(rejected, opened.inputs)]
        raise _nothing_usable(staging.where, errors, summary)
    return summary


def _refuse_mixtures(reports: Sequence[Report], logs: Sequence[Log], plans: Sequence[Plan]) -> None:
    first = {
        f"{run.instance_id}_{run.repetition_id}": run.places[0].where
        for log, planned in zip(logs, plans, strict=True)
        for run in planned.runs
        if run.places and not log.adapter.is_table
    }
    for report in reports:
        take_names(first, report.trajectory_ids)
    routings = {report.routing for report in reports} - {None}
    if len(routings) > 1:
        first_shape, other, *_ = sorted(r for r in routings if r is not None)
        raise other_routing("the logs", other, first_shape)


def _nothing_usable(where: str, errors: Sequence[RolloutError], summary: Summary) -> NothingUsable:
    finding = f"no record can be used ({len(errors)} rejected; the first: {errors[0].failure})"
    hint, reason = f"see {rejected_path(where)}", summary.reasons[0]
    if reason["hint"]:
        hint += f"; the most frequent error is [{reason['rule']}]: {reason['hint']}"
    error = NothingUsable("no_calls", where, finding, "", hint)
    error.summary = summary
    return error
