"""`convert`: from logs to a dataset, in chunks that a stopped conversion keeps."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollout_io.adapters import Input, Rejected, Run
from rollout_io.conversion import rejections
from rollout_io.conversion.batch import Settings, errors_of, in_order, other_routing
from rollout_io.conversion.choices import Choices, refuse_misfits, settings_of, tool_name
from rollout_io.conversion.chunk import Chunk, Report, convert_chunk, repeated, without_collector
from rollout_io.conversion.inputs import STDIN, PathLike, paths_of
from rollout_io.conversion.log import Log, open_log
from rollout_io.conversion.plan import CHUNK_BYTES, Plan, chunks, plan, refuse_nothing
from rollout_io.conversion.rewards import Key, Outcome, read_rewards
from rollout_io.conversion.staging import REJECTED, Staging, spool_path
from rollout_io.conversion.summary import Summary
from rollout_io.parallel import Workers
from rollout_io.storage import occupied
from schemas.errors import RolloutError, raise_first

Progress = Callable[[int, int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What became of a conversion.

    Attributes:
        summary: Counts.
        format: The format the logs were read as.
        about: What the logs say of themselves as a whole.
        num_resumed: Chunks that an earlier, stopped run had done.
        was_done: Whether there was nothing left to do.
    """

    summary: Summary
    format: str
    about: Mapping[str, Any]
    num_resumed: int = 0
    was_done: bool = False


def convert(
    inputs: PathLike | Sequence[PathLike],
    out: str | os.PathLike[str],
    choices: Choices | None = None,
    *,
    workers: Workers | int = 1,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Conversion:
    """Convert logs to a rollout dataset.

    The dataset appears when all of it is there. A run that was stopped leaves the chunks that are
    done in a hidden directory inside `out`; the same call goes on from them, and where all is there
    already it does nothing. With `on_error="skip"`, records that cannot be used go to
    `out/rejected.jsonl`, those of one run together: records read = written + rejected.

    Args:
        inputs: Files, directories, "-" for standard input; gzip and Zstandard are unpacked.
        out: Directory to write, local or an fsspec URL.
        choices: See `Choices`.
        workers: Processes that read and write chunks; `Workers(2, "ray")` for Ray.
        progress: Told (bytes, rows) as they are done; each input byte counts twice in all.
        chunk_bytes: Log bytes of a chunk.

    Raises:
        RolloutError: A bad record (`fail`), or bad arguments; nothing of the dataset is left.

    Example:
        >>> convert(["shop.calls.jsonl"], "shop/", Choices(rewards="shop.rewards.jsonl"))
    """
    workers = workers if isinstance(workers, Workers) else Workers(workers)
    choices, staging = choices or Choices(), Staging(out)
    report = progress or (lambda _num_bytes, _num_rows: None)
    with staging.resumable(), ExitStack() as stack:
        spool = spool_path(staging)
        if spool is None:
            spool = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = Path(staging.out.path) if staging.out.is_local else None
        skips = choices.on_error == "skip"
        log = open_log(paths_of(inputs), choices.format, spool, own, skip_foreign=skips)
        job = _Job(staging, log, choices, workers, report, chunk_bytes)
        return job.earlier() or job.run()


@dataclass(slots=True)
class _Job:
    """One conversion, its choices made."""

    staging: Staging
    log: Log
    choices: Choices
    workers: Workers
    progress: Progress
    chunk_bytes: int

    def earlier(self) -> Conversion | None:
        """What was made of the same logs with the same choices before.

        Raises:
            RolloutError: `out_is_free`: another dataset is there.
        """
        shards, done = self.staging.out.shards(), self.staging.done()
        if done is not None and done["identity"] == self.identity:
            self.staging.clear()
            summary = Summary.decode(done["summary"])
            return Conversion(
                summary=summary, format=self.log.format, about=done["about"], was_done=True
            )
        if shards and not self.staging.is_publishing(self.identity):
            raise occupied(self.staging.where, len(shards))
        return None

    def run(self) -> Conversion:
        """Convert what is not done yet, and publish."""
        refuse_misfits(self.choices, self.log)
        self.staging.begin(self.identity)
        outcomes = {} if self.choices.rewards is None else read_rewards(self.choices.rewards)
        adapter, options = self.log.adapter, self.choices
        found = adapter.find(self.log.inputs, lambda num_bytes: self.progress(num_bytes, 0))
        with without_collector():
            planned = plan(found, outcomes, options.group_by)
        planned.rejected += self.log.foreign
        refuse_nothing(planned, self.log)
        settings = settings_of(self.choices, self.log, planned.about)
        parts = list(chunks(planned.runs, self.chunk_bytes))
        reports, num_resumed = self._reports(parts, outcomes, settings)
        rejected = planned.rejected + [r for report in reports for r in report.rejected]
        if rejected and self.choices.on_error == "fail":
            raise_first(errors_of(rejected, self.log.inputs))
        summary = _total(planned, reports, rejected)
        if rejected:
            self.staging.write_rejected(rejections.lines(in_order(rejected, self.log.inputs)))
        else:
            self.staging.remove_rejected()
        if not summary.num_rows:
            raise _all_rejected(self.staging.where, errors_of(rejected, self.log.inputs))
        record = {"identity": self.identity, "summary": summary.encode(), "about": planned.about}
        self.staging.publish(len(parts), record)
        return Conversion(
            summary=summary, format=self.log.format, about=planned.about, num_resumed=num_resumed
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two conversions the same: files, choices, version; JSON."""
        choices = asdict(self.choices) | {"group_by": list(self.choices.group_by)}
        rewards = self.choices.rewards
        files = [*self.log.inputs, *([Input(rewards, Path(rewards))] if rewards else [])]
        return {
            "tool": tool_name(),
            "format": self.log.format,
            "choices": choices,
            "chunk_bytes": self.chunk_bytes,
            "inputs": [[file.name, _state(file)] for file in files],
        }

    def _reports(
        self, parts: Sequence[Sequence[Run]], outcomes: Mapping[Key, Outcome], settings: Settings
    ) -> tuple[list[Report], int]:
        """The report of every chunk, in order, and how many were there already."""
        known = {i: self.staging.report(i) for i in range(len(parts))}
        reports = {i: Report.decode(found) for i, found in known.items() if found is not None}
        num_resumed = len(reports)
        for i, report in reports.items():
            self.progress(sum(run.num_bytes for run in parts[i]), report.summary.num_rows)
        missing = (
            Chunk(index=i, runs=runs, outcomes=_outcomes_of(runs, outcomes))
            for i, runs in enumerate(parts)
            if i not in reports
        )
        with closing(self._convert(missing, settings)) as done:
            for index, report in done:
                self.staging.finish_chunk(index, report.encode())
                reports[index] = report
        return _refuse_mixtures([reports[i] for i in range(len(parts))]), num_resumed

    def _convert(
        self, missing: Iterator[Chunk], settings: Settings
    ) -> Generator[tuple[int, Report], None, None]:
        staging = self.staging
        if self.workers == Workers():
            for chunk in missing:
                path = staging.chunk_path(chunk.index)
                yield chunk.index, convert_chunk(chunk, settings, path, self.progress)
            return
        tasks = [(chunk, staging.chunk_path(chunk.index)) for chunk in missing]
        with closing(self.workers.map(partial(_convert_task, settings), tasks)) as done:
            for i, report in done:
                chunk, _ = tasks[i]
                self.progress(sum(r.num_bytes for r in chunk.runs), report.summary.num_rows)
                yield chunk.index, report


def _convert_task(settings: Settings, task: tuple[Chunk, str]) -> Report:
    chunk, path = task
    return convert_chunk(chunk, settings, path)


def _refuse_mixtures(reports: list[Report]) -> list[Report]:
    first: dict[str, str] = {}
    for report in reports:
        for name, where in report.trajectory_ids.items():
            if name in first:
                raise repeated(name, first[name], where)
            first[name] = where
    routings = {report.routing for report in reports} - {None}
    if len(routings) > 1:
        known, other, *_ = sorted(r for r in routings if r is not None)
        raise other_routing("the logs", other, known)
    return reports


def _outcomes_of(runs: Sequence[Run], outcomes: Mapping[Key, Outcome]) -> dict[Key, Outcome]:
    keys = ((run.instance_id, run.repetition_id) for run in runs)
    return {(i, r): outcomes[i, r] for i, r in keys if r is not None and (i, r) in outcomes}


def _total(planned: Plan, reports: Sequence[Report], rejected: Sequence[Rejected]) -> Summary:
    summary = Summary()
    for report in reports:
        summary.merge(report.summary)
    summary.num_records = planned.num_records
    summary.num_rejected = len(rejected)
    summary.num_written = planned.num_records - len(rejected)
    return summary


def _all_rejected(where: str, errors: Sequence[RolloutError]) -> RolloutError:
    got = f"{len(errors)} records, none of which can be used (the first: {errors[0]})"
    return RolloutError("no_calls", where, got, "at least one run", f"see {where}/{REJECTED}")


def _state(given: Input) -> Any:
    """What changes when an input does: of each file size and time, of a stream its content."""
    if given.name == STDIN:
        with given.path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    source = Path(given.name)
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    found = [(str(f), f.stat()) for f in files if f.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]
