"""Write ended sessions as shards, with the reader that `rollouts convert` uses for `calls` logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import polars as pl
import pyarrow as pa

from pipelines.record.journal import FOLDER, Journal
from pipelines.record.redaction import (
    OUTCOMES,
    Redaction,
    rewrite_shard,
    without_known,
)
from pipelines.record.sessions import NO_CALLS, Session, trajectory_id
from rollout_io.conversion import rejections
from rollout_io.conversion.chunk import Reader, Settings, sound, tabulated
from rollout_io.conversion.rewards import Key, Outcome
from rollout_io.conversion.rows import Settled, stored_in
from rollout_io.conversion.staging import rejected_path
from rollout_io.dataset.blobs import Blobs
from rollout_io.dataset.filesystems import writable
from rollout_io.dataset.locking import Destination, remove_leftovers
from rollout_io.dataset.reader import footers, scan
from rollout_io.dataset.storage import Location
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.formats.base import Options, Rejected, Run
from rollout_io.formats.calls import ADAPTER
from rollout_io.formats.parsing.records import (
    INCOMPLETE,
    ModelNames,
    close_files,
    read_record,
    split_session,
)
from schemas.columns import metrics_dict
from schemas.errors import InputError, RolloutError, cleaning
from schemas.metadata import DatasetMetadata, LogprobsMode

VERB = "record"
MOST_A_SHARD, SHARD_BYTES = 1024, 64 << 20
_LOCK_WAIT_S = 5.0  # a recorder that is stopping still writes its last shard
_OUTCOME = ("trajectory_id", "is_last_step", "reward", "error", "metrics")


class _Said(NamedTuple):
    reward: float | None
    error: str | None
    metrics: dict[str, float]


_SAID = msgspec.json.Decoder(dict[str, _Said])


def lock_dataset(out: str | os.PathLike[str]) -> Destination:
    """Lock a dataset and its journal until `release()` is called or the process ends.

    Raises:
        InputError: `out_is_free`: another process is writing to the dataset; `output_file`: the
            directory is not local or not writable.
    """
    where = os.fspath(out)
    if not Location.of(where).is_local:
        hint = "record to a local directory and copy the shards"
        raise InputError("output_file", where, "the recorder needs a local directory", hint=hint)
    held = Destination(where, wait_s=_LOCK_WAIT_S)
    try:
        with writable(where, "choose a different --out"):
            Path(out, FOLDER).mkdir(parents=True, exist_ok=True)
        remove_leftovers(Location.of(where))
    except BaseException:  # also an interrupt: nobody else could release it
        held.release()
        raise
    return held


class Ended(NamedTuple):
    """A session to write to a shard, with its outcome."""

    run: Run
    outcome: Outcome


class Shards:
    """The dataset that a recorder writes.

    Args:
        out: Directory of the dataset.
        metadata: Metadata of its files.
        redaction: Replaces the secrets in the rows; None: they are written unchanged.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        metadata: DatasetMetadata,
        redaction: Redaction | None = None,
    ) -> None:
        self._redaction = redaction
        self._made: list[tuple[Location, int]] = []
        self._out, self._rejected = Path(out), Path(rejected_path(out))
        self._num_published = 0  # bytes of rejected calls whose sessions are in a shard
        close_files()  # an earlier recorder of this process may have had files of the same names
        tokenizer = metadata.tokenizer if metadata.tokenizer_fingerprint else None
        blobs = Blobs.of(out).folder.url
        about = {} if redaction is None else redaction.about
        self._settings = replace(_settings(metadata.made(VERB, **about), tokenizer), blobs=blobs)

    def trajectory_ids(self) -> set[str]:
        """Return the trajectory ids that the dataset contains.

        Raises:
            InputError: `out_is_free`: the dataset is partitioned, so that shards cannot be added.
        """
        location = Location.of(self._out)
        location.refuse_partitions()
        if not location.fs.exists(location.path) or not location.shards():
            return set()
        ids = scan(self._out).select("trajectory_id").unique().collect()
        return set(ids.to_series().to_list())

    def write(self, sessions: Sequence[Ended]) -> int:
        """Write one shard, completely or not at all; return its number of trajectories.

        A session with an unusable call is written as a failed trajectory, with the reason as its
        error and the steps that can be read. Its calls go to `DS.rejected.jsonl`.

        Raises:
            InputError: `output_file`: writing failed; no part of the shard is then written.
        """
        with cleaning(None if self._redaction is None else self._redaction.text):
            left, tables, rejected = self._tables([_with_calls(ended) for ended in sessions])
            # Try each session unchanged, then as failed with its readable steps, then without.
            for again in (_as_failed, _without_steps):
                if left:
                    left, more, _ = self._tables([again(ended, rejected) for ended in left])
                    tables += more
        assert not left, left
        metadata = self._settings.metadata.replace(models=_models(sessions))
        said = _differing(sessions, tables)
        footer = {OUTCOMES: msgspec.json.encode(said)} if said else {}
        known = None if self._redaction is None else self._redaction.redactor
        if known is not None:
            tables, metadata, footer = without_known(known, tables, metadata, footer)
        opened = RolloutWriter(
            self._out, layout="prefix", metadata=metadata, append=True, checked=True
        )
        with self._appended(rejected), opened as writer:
            for table in tables:
                writer.write(table)
            writer.footer = footer
        if known is not None:
            self._made += [(shard, len(known.literals.secrets)) for shard in writer.shards]
        return writer.num_trajectories

    def close(self) -> None:
        """Remove the secrets that were recognised after their shard was written."""
        if self._redaction is None:
            return
        known = self._redaction.redactor
        for shard, num in self._made:
            if num < len(known.literals.secrets):
                rewrite_shard(known, Path(shard.path), self._out / FOLDER / "redacting")
        if known.literals.secrets:
            rejected = [self._rejected] if self._rejected.exists() else []
            self._redaction.rewrite([*rejected, *Journal(self._out).files()])

    def outcome_of(self, name: str) -> Outcome | None:
        """Return the outcome of a session that is in the dataset; None if it is not."""
        wanted = trajectory_id(name)
        for pairs in footers(self._out):
            with contextlib.suppress(msgspec.MsgspecError):
                if said := _SAID.decode(pairs.get(OUTCOMES, b"{}")).get(wanted):
                    reward, error, metrics = said
                    return Outcome(
                        where=name, reward=reward, error=error, metrics=metrics, user_values={}
                    )
        found = scan(self._out).filter(pl.col("trajectory_id") == wanted)
        kept = [column for column in _OUTCOME if column in found.collect_schema()]
        return _outcomes(found.select(kept).collect()).get(wanted)

    def refuse_foreign(self) -> None:
        """Check that rejected calls can be written beside the dataset.

        Raises:
            InputError: `out_is_free`: the path of the file is a symbolic link, or not a file.
        """
        if os.path.lexists(self._rejected):
            _opened(self._rejected).close()

    @contextlib.contextmanager
    def _appended(self, rejected: Sequence[Rejected]) -> Iterator[None]:
        """Append rejected calls to their file, each once; cut them off if the block fails.

        A recorder that was killed before the shard was published may have appended them already,
        the last line in part.
        """
        if not rejected:
            yield
            return
        with _opened(self._rejected) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                with writable(str(self._rejected)):
                    size = self._append(file, rejected, size)
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
            self._num_published = file.tell()

    def _append(self, file: FileIO, rejected: Sequence[Rejected], size: int) -> int:
        """Append the calls that are not in the file; return its size without an incomplete line."""
        lines = dict.fromkeys(rejections.lines(rejected))
        file.seek(self._num_published if self._num_published <= size else 0)
        reader = BufferedReader(file)
        for known in reader:
            lines.pop(known, None)
            if known.endswith(b"\n"):
                continue
            if not any(line.startswith(known) for line in lines):
                finding = "the last line is incomplete, and is not a rejected call"
                hint = "choose a different --out, or rename the file"
                raise InputError("out_is_free", str(self._rejected), finding, "", hint)
            size -= len(known)
        reader.detach()
        file.truncate(size)
        content = b"".join(lines)
        while content:
            content = content[file.write(content) :]
        os.fsync(file.fileno())
        return size

    def _tables(
        self, sessions: Sequence[Ended]
    ) -> tuple[list[Ended], list[pa.Table], list[Rejected]]:
        """Return the unusable sessions, the rows of all others, and the rejected calls."""
        reader = Reader(self._settings, {_key(ended): ended.outcome for ended in sessions})
        broken: list[Rejected] = []
        vocab_size = self._settings.metadata.vocab_size
        with stored_in(self._settings.blobs):
            parts = list(reader.parts([ended.run for ended in sessions]))
        tables = [table for part in parts if (table := sound(part, broken, vocab_size)).num_rows]
        made = {name for table in tables for name in table["trajectory_id"].to_pylist()}
        left = [e for e in sessions if f"{e.run.instance_id}_{e.run.repetition_id}" not in made]
        return left, tables, reader.rejected + broken


def _opened(path: Path) -> FileIO:
    """Open the file of rejected calls to read it and append to it, without following a link."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a symbolic link" if path.is_symlink() else "not a file"
        finding = f"the path is needed for rejected calls, but is {kind}"
        hint = "choose a different --out, or remove it"
        raise InputError("out_is_free", str(path), finding, "", hint)
    with writable(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return FileIO(os.open(path, flags, 0o666), "ab+")


def _outcomes(frame: pl.DataFrame) -> dict[str, Outcome]:
    """Return the outcomes of the trajectories in a table, by trajectory id."""
    return {
        row["trajectory_id"]: Outcome(
            where=row["trajectory_id"],
            reward=row.get("reward"),
            error=row.get("error"),
            metrics=metrics_dict(row.get("metrics")) or {},
            user_values={},
        )
        for row in frame.filter("is_last_step").to_dicts()
    }


def _differing(sessions: Sequence[Ended], tables: Sequence[pa.Table]) -> dict[str, _Said]:
    """Return the outcomes that clients gave and the rows do not hold, by trajectory id.

    The recorder replaces the outcome of a session with missing or unusable calls.
    """
    rows: dict[str, Outcome] = {}
    for table in tables:
        kept = [name for name in _OUTCOME if name in table.column_names]
        rows |= _outcomes(cast(pl.DataFrame, pl.from_arrow(table.select(kept))))
    said = {f"{e.run.instance_id}_{e.run.repetition_id}": e.outcome for e in sessions}
    return {
        name: _Said(given.reward, given.error, given.metrics)
        for name, given in said.items()
        if replace(given, where=name, user_values={})
        != replace(rows[name], is_exact=given.is_exact)
    }


def _settings(metadata: DatasetMetadata, tokenizer: str | None) -> Settings:
    return Settings(
        adapter=ADAPTER,
        options=Options(logprobs_mode=metadata.logprobs_mode),
        retokenizer=None,
        tokenizer=tokenizer,
        layout="prefix",
        metadata=metadata,
    )


def settle(
    ended: Ended, vocab_size: int, logprobs_mode: LogprobsMode | None = None
) -> tuple[Settled, RolloutError | None]:
    """Convert one session to a trajectory, as `Shards.write` does.

    Args:
        ended: The session.
        vocab_size: Vocabulary size; all token ids must be below it.
        logprobs_mode: Distribution of the engine's log-probabilities; None if unknown.

    Returns:
        The trajectory with its readable steps; and the error that makes some calls unusable, or
        None.
    """
    settings, fault = _settings(DatasetMetadata(logprobs_mode=logprobs_mode), None), None
    for again in (_as_failed, _without_steps, None):
        reader = Reader(settings, {_key(ended): ended.outcome})
        for run, settled in reader.settle([ended.run]):
            parts = list(tabulated([(run, settled)], reader.rejected))
            if any(sound(part, reader.rejected, vocab_size).num_rows for part in parts):
                return settled, fault
        fault = fault or _first(reader.rejected)
        assert again is not None, fault
        ended = again(ended, reader.rejected)
    raise AssertionError(fault)


def cut(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """Split sessions into groups, one per shard, of bounded number and size."""
    together: list[Session] = []
    num_bytes = 0
    for session in sessions:
        own = sum(place.num_bytes for place in session.places)
        if together and (len(together) >= MOST_A_SHARD or num_bytes + own > SHARD_BYTES):
            yield together
            together, num_bytes = [], 0
        together.append(session)
        num_bytes += own
    if together:
        yield together


def _key(ended: Ended) -> Key:
    assert ended.run.repetition_id is not None
    return ended.run.instance_id, ended.run.repetition_id


def _first(rejected: Sequence[Rejected]) -> RolloutError | None:
    """Return the first error that was not caused by another error."""
    errors = sorted((each.error for each in rejected), key=lambda e: e.rule == INCOMPLETE)
    return errors[0] if errors else None


def _models(sessions: Sequence[Ended]) -> tuple[str, ...]:
    """Collect the model names in the calls of sessions."""
    names = ModelNames()
    for place in (place for run, _ in sessions for place in run.places):
        with contextlib.suppress(RolloutError):  # an unreadable call fails its session
            names.see(read_record(place))
    return tuple(names.names())


def ended_of(session: Session, outcome: Outcome) -> Ended:
    """Build the `Ended` record of a session."""
    instance_id, repetition_id = split_session(session.name, "session")
    run = Run(
        instance_id=instance_id,
        repetition_id=repetition_id,
        places=list(session.places),
        failed=outcome.error is not None,
        rewarded=True,
    )
    return Ended(run, outcome)


def _with_calls(ended: Ended) -> Ended:
    """Mark a session as failed if it ended successfully without any call."""
    if ended.run.places or ended.outcome.error is not None:
        return ended
    return _failed(ended, NO_CALLS)


def _as_failed(ended: Ended, rejected: Sequence[Rejected]) -> Ended:
    places = set(ended.run.places)
    first = _first([one for one in rejected if one.place in places])
    return _failed(ended, "session_unusable" if first is None else first.failure)


def _without_steps(ended: Ended, _: Sequence[Rejected]) -> Ended:
    return Ended(replace(ended.run, places=()), ended.outcome)


def _failed(ended: Ended, error: str) -> Ended:
    outcome = ended.outcome if ended.outcome.error else replace(ended.outcome, error=error)
    return Ended(replace(ended.run, failed=True), outcome)
