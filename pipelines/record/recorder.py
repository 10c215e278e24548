"""Write calls to the journal, and ended sessions to shards."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipelines.record.engine_requests import Fields
from pipelines.record.engine_responses import LONG_BYTES, seen_in
from pipelines.record.journal import Journal
from pipelines.record.redaction import Redaction
from pipelines.record.sessions import (
    ABANDONED,
    UNASSIGNED,
    Seen,
    Session,
    Sessions,
    check_same,
    losses_of,
)
from pipelines.record.settings import RecordSettings
from pipelines.record.shards import MOST_A_SHARD, Shards, cut, ended_of, lock_dataset
from rollout_io.conversion.rewards import parse_outcome
from rollout_io.dataset.filesystems import replace_text
from schemas.errors import InputError, RolloutError, cleaning
from schemas.metadata import DatasetMetadata

_LOG = logging.getLogger(__name__)
_TICK_S = 0.25

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Recorder:
    """Records sessions into one dataset; enter its context before the first call.

    Args:
        settings: Settings of the recorder.
        metadata: Metadata of the dataset.
        tell: Receives warnings for the user; by default, they are logged.
        redaction: Replaces the secrets in what is written; None: it is written unchanged.

    Attributes:
        metrics: Counters, gauges and histograms.
        policy_version: Version of the engines' weights.
        ended: Callback for every session that ends.
        problem: Reason why the last attempt to write shards failed; None if it succeeded.
    """

    def __init__(
        self,
        settings: RecordSettings,
        metadata: DatasetMetadata | None = None,
        tell: Callable[[str], object] = _LOG.warning,
        redaction: Redaction | None = None,
    ) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.journal = Journal(settings.out)
        self._redaction = redaction
        self._shards = Shards(settings.out, metadata or DatasetMetadata(), redaction)
        self._tell = tell
        self._flushing = asyncio.Lock()
        self.policy_version = settings.policy_version
        self.problem: str | None = None
        self._last_time_s = 0.0
        self._said: set[str] = set()
        self.ended: Callable[[Session], object] = lambda _: None

    async def __aenter__(self) -> Self:
        self._lock = await asyncio.to_thread(lock_dataset, self.settings.out)
        try:
            await self._recover()
        except BaseException:
            self._lock.release()
            raise
        self._stop = asyncio.Event()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stop.set()
        await self._ticking
        try:
            if self.settings.end_open:
                for session in [s for s in self.sessions if s.outcome is None]:
                    await self.end(session.name, {"reward": None})
            await self._keep_losses()
            await self.flush()
            self.journal.folder += 1
            await self._remove_folders(self.journal.folders())
            writing = [task for session in self.sessions for task in session.writing]
            await asyncio.gather(*writing, return_exceptions=True)
            await asyncio.to_thread(self._shards.close)
        except Exception as failed:
            self.warn(text_of(failed), "the journal keeps unwritten sessions for the next start")
        finally:
            self._lock.release()

    @property
    def num_waiting(self) -> int:
        """Number of ended sessions that are not in a shard yet."""
        return sum(s.outcome is not None for s in self.sessions)

    def update_gauges(self) -> None:
        """Update the gauges, whose values are computed on demand."""
        self.metrics.open.set(self.sessions.num_open)
        self.metrics.waiting.set(self.num_waiting)

    def warn(self, what: str, text: str) -> None:
        """Report a problem to the user, only once for each value of `what`."""
        if what not in self._said:
            self._said.add(what)
            line = f"{what}: {text}"
            self._tell(line if self._redaction is None else self._redaction.text(line))

    def cleaning(self) -> AbstractContextManager[None]:
        """Replace secrets in the contents that errors quote in a block."""
        return cleaning(None if self._redaction is None else self._redaction.text)

    def refused(self, error: RolloutError) -> None:
        """Count a rejected request, and report the first of its kind."""
        self.metrics.refused.inc()
        hint = f" Hint: {error.hint}" if error.hint else ""
        self.warn("a request was refused", f"{error}{hint}")

    async def _recover(self) -> None:
        await asyncio.to_thread(self._shards.refuse_foreign)
        if self._redaction is not None:  # calls that an earlier recorder did not redact
            await asyncio.to_thread(self._redaction.rewrite, self.journal.files())
        recovered, written = await asyncio.to_thread(
            lambda: (self.journal.recover(), self._shards.trajectory_ids())
        )
        self.sessions = Sessions(written)
        names = "\n".join(recovered)
        clean = str if self._redaction is None else self._redaction.text
        if await asyncio.to_thread(clean, names) != names:
            self.warn("session_name", "some from before contain a secret: run `rollouts redact`")
        self._last_time_s = self.journal.last_time_s
        for name, session in recovered.items():
            if not self.sessions.is_written(name):
                self.sessions.add(session)
        if self.policy_version is None:
            self.policy_version = _read_version(self._version_path)
        for session in list(self.sessions):
            if session.name.startswith(f"{UNASSIGNED}/") and session.outcome is None:
                await self.end(session.name, {})
        await self._remove_folders(self.journal.folders())

    def session_for(self, name: str | None) -> Session:
        """Return the session of a call; without a name, a new session for this call.

        Raises:
            InputError: `session_ended`: the session has ended; `too_many_sessions`: too many
                sessions are open or waiting for a shard.
        """
        folder = self.journal.next_folder()
        if name is None:
            name = f"{UNASSIGNED}/{self.sessions.free_repetition(UNASSIGNED)}"
        self._check_name(name)
        return self.sessions.called(name, folder)

    def _check_name(self, name: str) -> None:
        is_new = self.sessions.find(name) is None and not self.sessions.is_written(name)
        if self._redaction is not None and is_new:
            self._redaction.refuse_name(name)

    def open(self, instance_id: str, repetition_id: int | None) -> Session:
        """Open a session; if no repetition is given, use the first unused one.

        Raises:
            InputError: `session_open`, `session_ended`: the session exists; `session_name`: the
                name is invalid; `too_many_sessions`: too many sessions are open or waiting for a
                shard.
        """
        if repetition_id is None:
            repetition_id = self.sessions.free_repetition(instance_id)
        self._check_name(f"{instance_id}/{repetition_id}")
        return self.sessions.open(f"{instance_id}/{repetition_id}", self.journal.next_folder())

    def now_s(self) -> float:
        """Return the time in seconds since 1970; every call returns a later time than the last."""
        # Strictly increasing, because readers order the calls of a session by time.
        self._last_time_s = max(time.time(), self._last_time_s + 1e-6)
        return self._last_time_s

    async def record(
        self, session: Session, request: Fields, response: msgspec.Raw, **about: Any
    ) -> None:
        """Write a call to the journal; it is on disk when this returns.

        Args:
            session: Session of the call.
            request: Fields that the client sent.
            response: The engine's response: an object, or a list of chunks.
            about: `time`; `agent` and `policy_version` if known.

        Raises:
            InputError: `journal`: the call could not be written.
        """
        facts = {name: value for name, value in about.items() if value is not None}
        record = {"session": session.name, **facts, "request": request, "response": response}
        writing = asyncio.create_task(self._append(session, record))
        session.writing.add(writing)
        writing.add_done_callback(session.writing.discard)
        # Mark the exception as retrieved, even if nobody waits.
        writing.add_done_callback(lambda done: done.exception())
        await asyncio.shield(writing)  # not cancelled when the client disconnects

    async def _append(self, session: Session, record: Mapping[str, Any]) -> None:
        with session.calling():
            if self._redaction is not None:
                record = await self._redaction.call(record)
            session.places.append(await self.journal.append(session.folder, "calls", record))
        self.metrics.calls.inc()

    async def read(self, session: Session, response: msgspec.Raw) -> Seen | None:
        """Read the tokens of a recorded call; None if they are unusable.

        A long response is decoded in a thread, so that it does not delay other calls.
        """
        where = f"session {session.name}"
        try:
            if memoryview(response).nbytes > LONG_BYTES:
                return await asyncio.to_thread(seen_in, response, where)
            return seen_in(response, where)
        except (RolloutError, msgspec.MsgspecError) as error:
            text = f"its session will be marked as failed: {error}"
            self.warn("a call has no usable tokens", text)
            return None

    def count(self, session: Session, agent: str | None, seen: Seen) -> None:
        """Count the tokens of a recorded call."""
        self.metrics.tokens.inc(sum(map(len, seen.responses)))
        if session.count(agent, seen):
            self.metrics.drifts.inc()

    async def end(self, name: str, fields: Mapping[str, Any]) -> Session:
        """End a session; repeating the same outcome has no effect, even once it is in a shard.

        Args:
            name: Name of the session, which may be new if it ends with an error.
            fields: `reward` and `error`; metrics (numbers) and other values (strings) by name.

        Raises:
            InputError: `unknown_session`: the session has no calls and no error; `session_ended`:
                it ended with a different outcome; `reward_line`: the outcome is invalid; `journal`:
                the outcome could not be written.
        """
        session = self.sessions.find(name)
        if session is None and not fields.get("error") and not self.sessions.is_written(name):
            hint = "send calls before the session ends; to end a session without calls, pass an `error`"
            raise InputError("unknown_session", name, "the session has no calls", hint=hint)
        if session is None:
            self._check_name(name)
        record = {"session": name, "reward": None, **self._clean(fields)}
        outcome = parse_outcome(record, f"session {name}")[1]
        if session is None and self.sessions.is_written(name):
            stored = await asyncio.to_thread(self._shards.outcome_of, name)
            check_same(name, outcome, stored)
            return Session(name=name, folder=self.journal.folder, outcome=stored)
        if session is not None and session.outcome is not None:
            check_same(name, outcome, session.outcome)
            if session.ending is not None:
                await asyncio.shield(session.ending)
            return session
        record |= self._clean(losses_of(session, fields))
        session = session or self.sessions.open(name, self.journal.next_folder())
        session.outcome = parse_outcome(record, f"session {name}")[1]
        with session.calling():  # keep it out of shards until the outcome is durable
            writing = self.journal.append(session.folder, "rewards", record)
            session.ending = asyncio.ensure_future(writing)
            try:
                await asyncio.shield(session.ending)
            except RolloutError:
                session.outcome = session.ending = None
                raise
        session.ends.clear()
        self.ended(session)
        return session

    def _clean(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return fields if self._redaction is None else self._redaction.value(fields)

    async def end_unassigned(self, session: Session) -> None:
        """End a session that was opened for one call; drop it if the call was not recorded."""
        if not session.places:
            self.sessions.drop(session)
            return
        with suppress(RolloutError):  # the next recorder ends the session
            await self.end(session.name, {})

    async def forget(self, session: Session) -> None:
        """Drop an open session with its calls, which the caller has read."""
        self.sessions.drop(session)
        await self._remove_folders([session.folder])

    async def flush(self) -> None:
        """Write ended sessions to shards.

        Raises:
            InputError: `output_file`: writing failed; the sessions are kept for the next attempt.
        """
        async with self._flushing:
            ended = [s for s in self.sessions if s.outcome is not None and not s.num_under_way]
            for together in cut(ended):
                await self._write(together)

    async def _write(self, sessions: Sequence[Session]) -> None:
        ended = [ended_of(s, s.outcome) for s in sessions if s.outcome is not None]
        await asyncio.to_thread(self._shards.write, ended)
        self.metrics.written.inc(len(sessions))
        self.sessions.wrote(sessions)
        by_folder: defaultdict[int, list[str]] = defaultdict(list)
        for session in sessions:
            by_folder[session.folder].append(session.name)
        for folder, names in by_folder.items():
            await self.journal.append(folder, "written", {"sessions": names})
        await self._remove_folders(by_folder)

    async def _remove_folders(self, folders: Sequence[int] | Mapping[int, Any]) -> None:
        used = {session.folder for session in self.sessions} | {self.journal.folder}
        for folder in set(folders) - used:
            await self.journal.remove(folder)

    async def _tick(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(_TICK_S, self.settings.flush_s))
            try:
                idle_s = self.settings.idle_timeout_s
                for session in self.sessions.idle(idle_s):
                    # No one who reports rewards knows the name that a harness chose itself.
                    is_left = not session.is_of_harness or not session.places
                    error = f"{ABANDONED}: no call for {idle_s:g} s"
                    await self.end(session.name, {"error": error} if is_left else {})
                await self._keep_losses()
                is_due = time.monotonic() - last > self.settings.flush_s
                if is_due or self.num_waiting >= MOST_A_SHARD:
                    last = time.monotonic()
                    await self.flush()
                    self.problem = None
            except Exception as error:  # whatever one attempt raises, the next may succeed
                rule = error.rule if isinstance(error, RolloutError) else type(error).__name__
                self.warn(rule, f"{text_of(error)} Retrying.")
                if rule != "journal":  # reported by the journal itself
                    self.problem = text_of(error)

    async def _keep_losses(self) -> None:
        """Write the number of missing calls of each open session, for a later recorder."""
        for session in [s for s in self.sessions if s.outcome is None and s.places]:
            losses = session.num_unrecorded, session.num_lost
            if losses != session.losses_kept:
                record = {"session": session.name, "unrecorded": losses[0], "lost": losses[1]}
                with session.calling():
                    await self.journal.append(session.folder, "lost", record)
                session.losses_kept = losses

    @property
    def _version_path(self) -> Path:
        return Path(self.settings.out) / ".recording" / "policy_version.json"

    async def set_version(self, version: int) -> None:
        """Set the version of the weights for calls from now on."""
        self.policy_version = version
        await asyncio.to_thread(replace_text, self._version_path, json.dumps(version))


def text_of(error: Exception) -> str:
    """Return an error as a sentence."""
    if isinstance(error, RolloutError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}."


def _read_version(path: Path) -> int | None:
    try:
        version = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return version if isinstance(version, int) else None


class Metrics:
    """Counters, gauges and histograms of one recorder."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("calls", "Calls that were recorded.")
        self.tokens = self._counter("tokens", "Tokens sampled in recorded calls.")
        self.drifts = self._counter("drifts", "Calls that did not continue the previous call.")
        self.cut_off = self._counter("cut_off", "Calls whose stream was cut off.")
        self.unrecorded = self._counter("unrecorded", "Calls that were served but not recorded.")
        self.refused = self._counter("refused", "Requests rejected with 4xx or 5xx.")
        self.retries = self._counter("retries", "Retries of calls to an engine.")
        self.written = self._counter("trajectories", "Trajectories written to shards.")
        self.exact_prefix = Counter(
            "rollouts_record_exact_prefix",
            "Chat calls by how they were sent.",
            ["sent"],
            registry=self.registry,
        )
        self.open = self._gauge("open_sessions", "Sessions that have not ended.")
        self.waiting = self._gauge("ended_sessions", "Ended sessions that are not in a shard yet.")
        self.under_way = self._gauge("calls_under_way", "Calls in progress.")
        self.first_token = Histogram(
            "rollouts_record_first_byte_seconds",
            "Time from a request to the first byte of its response.",
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"rollouts_record_{name}", text, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"rollouts_record_{name}", text, registry=self.registry)

    def text(self) -> bytes:
        """Export all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def number(metric: Counter | Gauge) -> float:
    """Read the value of a counter or gauge."""
    return float(next(iter(next(iter(metric.collect())).samples)).value)
