"""Logs as a dataset that a viewer shows: an index in memory; conversations are read from the files.

The index grows while the logs are read. `now` returns the dataset as it is, so that one request sees
one index.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import shlex
import shutil
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import polars as pl
import pyarrow as pa

from pipelines.view.dataset import Dataset, TokensMissing
from pipelines.view.index_columns import FACTS, escaped, kind_of
from pipelines.view.log_index import (
    CODEC,
    NOTHING,
    At,
    Counts,
    Job,
    LogRows,
    Message,
    Part,
    Progress,
    TableCache,
    Whole,
    index_logs,
    joined,
    without,
)
from pipelines.view.tokenizers import Found, Tokenizers
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.conversion.browsing import (
    AGAIN,
    CHANGED,
    Listing,
    decode_run,
    files_of,
    reread,
)
from rollout_io.conversion.chunk import Settings
from rollout_io.conversion.opened_logs import AUTO
from rollout_io.conversion.text import NO_TOKENS, Retokenizer, Untokenized
from rollout_io.dataset.blobs import Blobs
from rollout_io.dataset.storage import Location
from rollout_io.dataset.trajectory_conditions import COMPUTED
from rollout_io.dataset.worker_processes import stream
from rollout_io.formats.base import UNREAD, Run
from rollout_io.formats.detect import HINT, find_adapter
from rollout_io.retokenize.local import tokenizer_directory
from schemas.columns import COLUMN_BY_NAME, TASK
from schemas.errors import InputError, RolloutError

_LOG = logging.getLogger(__name__)
_SHOWN_NAMES = 100
_LOOK_S = 2.0
_READ_SHARE = 10
"""Logs that grow are read again after this multiple of the time that reading them took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What has been read of the logs so far.

    Attributes:
        first: Parts that are shown until all files are read, except for trajectories in `parts`.
    """

    first: tuple[Part, ...] = ()
    parts: tuple[Part, ...] = ()
    counts: Counts = field(default_factory=lambda: Counts(skipped={}))
    progress: Progress | None = None
    is_done: bool = False
    error: RolloutError | None = None


@dataclass(frozen=True, slots=True)
class _Shown:
    """The logs as one request sees them; `runs` has the place of each trajectory."""

    state: _State
    version: int
    index: TrajectoryIndex
    runs: Sequence[At]
    schema: pa.Schema
    notes: Mapping[str, int]


class LogDataset(Dataset):
    """Logs that a viewer shows.

    Args:
        number: Id of the dataset in the viewer, such as "d0".
        name: Short name for the page.
        path: File or directory.
        tokenizer: Directory of the tokenizer to re-tokenize opened conversations with; None: text
            stays text.
        tokenizers: Loads tokenizers.
        log_format: Name of their format, or `auto`.

    Raises:
        InputError: `input_file`: the path is missing, or has no files.
    """

    is_log = True
    rows_at_once = 16

    def __init__(
        self,
        number: str,
        name: str,
        path: str,
        tokenizer: str | None,
        tokenizers: Tokenizers,
        log_format: str = AUTO,
    ) -> None:
        super().__init__(number, name, path, tokenizer, tokenizers)
        self._listing = Listing.of(Path(path))
        self._spool = Path(tempfile.mkdtemp(prefix="rollouts-view-"))
        self._job = Job(path, log_format, self._spool)
        self._blobs = Blobs(Location.of(str(self._spool / "blobs")))
        self._cache, self._state, self._version = TableCache(), _State(), 0
        # The copies of `now` share the cache; while one of them is left, its files are needed.
        weakref.finalize(self._cache, shutil.rmtree, self._spool, ignore_errors=True)
        self._successor: LogDataset | None = None
        self._began_s, self._look_s = time.monotonic(), math.inf
        self._shown: list[_Shown] = []
        self._frozen: _Shown | None = None
        self._untokenized: dict[str, str] = {}
        """Why opened trajectories could not be re-tokenized."""
        self._changed = threading.Condition()

    def read(self) -> None:
        """Read all logs in this process.

        Raises:
            RolloutError: The path is not a log.
        """
        try:
            index_logs(self._job, self._take)
        except RolloutError as error:
            raise _hinted(error) from None
        self._become(is_done=True, progress=None, first=())

    def start(self, wait_s: float) -> None:
        """Read the logs in a process of its own; return once a trajectory is known.

        Args:
            wait_s: Return after this time even if none is known.

        Raises:
            RolloutError: The path is not a log.
        """
        threading.Thread(target=self._follow, daemon=True).start()
        with self._changed:
            self._changed.wait_for(self._has_begun, wait_s)
        if self._state.error is not None and not self._state.parts:
            raise _hinted(self._state.error)

    def wait(self) -> None:
        """Wait until all logs are read."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.is_done)

    @property
    def version(self) -> int:
        """A number that grows with the trajectories."""
        return self._version

    def newest(self) -> LogDataset:
        """Return these logs, or those that were read because a file was added, removed or written.

        They are read in the background, in at most a tenth of the time, until which these are shown.
        """
        if self._successor is None and self._state.is_done and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + _LOOK_S
            if files_of(self.path) not in (None, {*self._listing.files}):
                self._successor = LogDataset(
                    self.number,
                    self.name,
                    self.path,
                    self._given_tokenizer,
                    self._tokenizers,
                    self._job.format,
                )
                self._successor._version = self.version + 1
                threading.Thread(target=self._successor._follow, daemon=True).start()
        if self._successor is None or not self._successor._state.is_done:
            return self
        successor, self._successor = self._successor, None
        return self if successor._state.error is not None else successor

    def _has_begun(self) -> bool:
        return bool(self._state.parts) or self._state.is_done

    def _follow(self) -> None:
        error: RolloutError | None = None
        try:
            for message in stream(partial(index_logs, self._job)):
                self._take(message)
        except RolloutError as found:
            error = found
        except Exception as found:
            _LOG.exception("reading %s", self.path)
            finding = f"unexpected {type(found).__name__}: {' '.join(str(found).split())[:500]}"
            error = InputError("worker", self.path, finding)
        took_s = time.monotonic() - self._began_s
        self._look_s = time.monotonic() + max(_LOOK_S, _READ_SHARE * took_s)
        self._become(is_done=True, progress=None, first=(), error=error)

    def _take(self, message: Message) -> None:
        if isinstance(message, Progress):
            self._become(progress=message)
        elif isinstance(message, Counts):
            self._become(counts=message)
        elif isinstance(message, Whole):
            self._become(first=self._state.parts, parts=(), counts=message.counts)
        else:
            self._become(parts=(*self._state.parts, message))

    def _become(self, **changes: Any) -> None:
        with self._changed:
            self._state = replace(self._state, **changes)
            self._version += bool(changes.keys() & {"first", "parts"})
            self._changed.notify_all()

    def now(self) -> Self:
        """Return the logs as read so far, which do not change while a request is answered."""
        copied = copy.copy(self)
        copied._frozen = self._current()
        return copied

    def _current(self) -> _Shown:
        if self._frozen is not None:
            return self._frozen
        with self._changed:
            state, version = self._state, self._version
            if self._shown and self._shown[0].version == version:
                self._shown = [replace(self._shown[0], state=state)]
                return self._shown[0]
            if len(state.parts) > 1:
                state = self._state = replace(state, parts=(joined(state.parts),))
            self._shown = [_shown(self.path, state, version)]
            return self._shown[0]

    @property
    def index(self) -> TrajectoryIndex:
        """Index of the trajectories that have been read."""
        return self._current().index

    @property
    def reader(self) -> LogRows:
        """Access to rows by position; reads their files again."""
        shown = self._current()
        return LogRows(shown.schema, shown.index, self._table)

    @property
    def warnings(self) -> list[str]:
        """Warnings about columns that the page cannot show."""
        hidden = sorted({*COMPUTED, *FACTS} & {*self._current().schema.names})
        end = "because the viewer computes a column of this name."
        return [f"{self.name}: the column {name} is not shown, {end}" for name in hidden]

    @cached_property
    def _found(self) -> Found:
        return Found(self._given_tokenizer)

    @cached_property
    def _stores(self) -> list[Blobs]:
        return [self._blobs]

    @property
    def stored_path(self) -> str:
        """Raise an error: logs have no tables.

        Raises:
            InputError: `needs_dataset`.
        """
        finding = "labels are written to a copy of a dataset, and these are logs"
        raise InputError("needs_dataset", self.path, finding, hint=self.command)

    @property
    def tasks(self) -> pl.Series:
        """The distinct instance ids."""
        return self._current().index.trajectories[TASK].unique()

    @property
    def has_tokens(self) -> bool:
        """True if there is a tokenizer, or the log has the ids of a trajectory."""
        lengths = self._current().index.trajectories["longest_row_tokens"]
        return self._given_tokenizer is not None or lengths.null_count() < len(lengths)

    @property
    def command(self) -> str:
        """The command that converts the logs."""
        shown = self._current()
        words = ["rollouts", "convert", self.path]
        words += ["--format", self._job.format] if self._job.format != AUTO else []
        needs = self._given_tokenizer or any(
            find_adapter(name).is_text for name in {at.format for at in shown.runs} - {""}
        )
        words += ["--tokenizer", self._given_tokenizer or "DIR"] if needs else []
        words += ["--on-error", "skip"] if shown.state.counts.num_rejected else []
        return shlex.join([*words, "--out", f"{_stem(self.path)}.rollouts"])

    def row(self, trajectory_id: str, step_index: int, names: Sequence[str]) -> pa.Table:
        """Read columns of one row; see `Dataset.row`.

        Raises:
            InputError: `no_token_ids`: the row has text, but no token ids.
        """
        table = super().row(trajectory_id, step_index, names)
        if not table.num_rows or not sum(len(ids) for ids in table.column("response_ids")):
            hint = "pass --tokenizer DIR to re-tokenize the text (approximate)"
            finding, why = f"{trajectory_id} has no token ids", self._untokenized.get(trajectory_id)
            if why is not None:
                finding, hint = (
                    f"{trajectory_id} cannot be re-tokenized: {why}",
                    "read its conversation",
                )
            raise TokensMissing(NO_TOKENS, self.path, finding, hint=hint)
        return table

    def may_hold(self, number: int, text: str) -> bool:
        """True if a trajectory's text contains a text; its files are not read again."""
        at = self._current().runs[number]
        content = self._written(at.text_offset, at.text_length)
        return bool(content) and escaped(text) in pa.decompress(
            content, at.size, CODEC, asbytes=True
        )

    def _written(self, offset: int, length: int) -> bytes:
        with (self._spool / "runs").open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def _table(self, number: int) -> pa.Table:
        """Read a trajectory again."""
        shown = self._current()
        at, trajectory_id = shown.runs[number], shown.index.trajectories["trajectory_id"][number]

        def read() -> pa.Table:
            content = self._written(at.offset, at.length)
            if not at.format:
                return pa.ipc.open_stream(content).read_all()
            run = decode_run(zlib.decompress(content))
            if self._given_tokenizer is not None:
                directory = tokenizer_directory(self._given_tokenizer)
                try:
                    return again(run, Retokenizer(directory=directory))
                except RolloutError as error:  # the text can still be shown
                    self._untokenized[trajectory_id] = error.sentence
            return again(run, Untokenized())

        def again(run: Run, retokenizer: Retokenizer | Untokenized) -> pa.Table:
            adapter = find_adapter(at.format)
            settings = Settings(adapter=adapter, format=at.format, retokenizer=retokenizer)
            return reread(run, trajectory_id, settings, self._listing, self._spool, self._blobs)

        table = self._cache.get((at, trajectory_id), read)
        begin, end = shown.index.bounds(number)
        if table.num_rows != end - begin:
            raise InputError("input_file", self.path, CHANGED, hint=AGAIN)
        return table

    def describe(self) -> dict[str, Any]:
        """Return the dataset's entry in the response of `/api/sources`; `log` describes the logs."""
        shown = self._current()
        lines, counts, progress = shown.index.trajectories, shown.state.counts, shown.state.progress
        fields = [(f.name, kind_of(f.type), f.name not in COLUMN_BY_NAME) for f in shown.schema]
        facts = [(n, "text" if kind == pl.String else "number", True) for n, kind in FACTS.items()]
        error = shown.state.error
        hint = f" Hint: {error.hint}" if error is not None and error.hint else ""
        return {
            "name": self.name,
            "path": self.path,
            "num_rows": len(shown.index.rows),
            "num_trajectories": len(lines),
            "num_groups": lines["instance_id"].n_unique(),
            "columns": [{"name": n, "kind": k, "own": of} for n, k, of in [*fields, *facts]],
            "tokenizer": self._given_tokenizer,
            "layout": "log",
            "num_verdicts": 0,
            "num_findings": 0,
            "added": [],
            "log": {
                "version": shown.version,
                "is_done": shown.state.is_done,
                "stage": None if progress is None else progress.stage,
                "done": 0 if progress is None else progress.done,
                "total": 0 if progress is None else progress.total,
                "num_files": len(self._listing.files),
                "num_records": counts.num_records,
                "num_rejected": counts.num_rejected,
                "num_skipped": len(counts.skipped),
                "skipped": [f"{n}: {why}" for n, why in counts.skipped.items()][:_SHOWN_NAMES],
                "notes": _notes(shown.notes),
                "error": None if error is None else f"{error}{hint}",
                "has_tokens": self.has_tokens,
                "command": self.command,
            },
        }


def _shown(path: str, state: _State, version: int) -> _Shown:
    parts = [*state.first, *state.parts]
    if state.first and state.parts:
        names = state.parts[0].facts["trajectory_id"]
        parts = [*(without(part, names) for part in state.first), *state.parts]
    whole = joined(parts or [NOTHING])
    columns = frozenset(whole.schema.names)
    index = TrajectoryIndex.of_rows(path, whole.rows, columns, whole.cut)
    index.add(whole.facts)
    return _Shown(state, version, index, whole.runs, whole.schema, whole.notes)


def _notes(notes: Mapping[str, int]) -> list[str]:
    ordered = sorted(notes.items(), key=lambda item: (item[0].startswith(UNREAD), item[0]))
    return [f"{number:,} {what}" for what, number in ordered][:_SHOWN_NAMES]


def _hinted(error: RolloutError) -> RolloutError:
    if error.hint != HINT:
        return error
    hint = (
        "`rollouts view` opens a dataset, a run or logs; `rollouts formats` lists the log formats"
    )
    return error.at(error.where, hint)


def _stem(path: str) -> str:
    name = Path(os.path.abspath(path)).name.partition(".")[0]  # noqa: PTH100
    return name or "logs"
