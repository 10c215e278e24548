"""Ended sessions as shards of the dataset, by the conversion's own reading of `calls` logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pipelines.record.sessions import Session
from rollout_io.adapters import Options, Rejected, Run
from rollout_io.adapters.calls import ADAPTER
from rollout_io.conversion import rejections
from rollout_io.conversion.batch import INCOMPLETE, Reader, Settings, sound
from rollout_io.conversion.rewards import Key, Outcome
from rollout_io.logs.naming import split_session
from rollout_io.reader import scan
from rollout_io.storage import Location
from rollout_io.writer import RolloutWriter
from schemas.metadata import DatasetMetadata

VERB = "record"
REJECTED = "rejected.jsonl"


class Ended(NamedTuple):
    """A session to write, as it is now."""

    run: Run
    outcome: Outcome


class Shards:
    """The dataset of a recorder.

    Args:
        out: Its directory.
        metadata: What its files say about themselves.
    """

    def __init__(self, out: str | os.PathLike[str], metadata: DatasetMetadata) -> None:
        self._out = Path(out)
        self._settings = Settings(
            adapter=ADAPTER,
            options=Options(),
            retokenizer=None,
            layout="prefix",
            metadata=metadata.made(VERB),
        )

    def trajectory_ids(self) -> set[str]:
        """What the dataset holds."""
        location = Location.of(self._out)
        if not location.fs.exists(location.path) or not location.shards():
            return set()
        ids = scan(self._out).select("trajectory_id").unique().collect()
        return set(ids.to_series().to_list())

    def write(self, sessions: Sequence[Ended]) -> int:
        """Write one shard, whole or not at all; how many trajectories it has.

        A session with a call that cannot be used is there all the same: a failed trajectory, whose
        error says why, with the steps that can be read. Its calls go to `rejected.jsonl`.

        Raises:
            RolloutError: output_file: nothing was written.
        """
        left, tables, rejected = self._tables([_with_calls(ended) for ended in sessions])
        for again in (_as_failed, _without_steps):
            if left:
                left, more, _ = self._tables([again(ended, rejected) for ended in left])
                tables += more
        assert not left, left
        if rejected:
            self._put_aside(rejected)
        with RolloutWriter(
            self._out, layout="prefix", metadata=self._settings.metadata, append=True, checked=True
        ) as writer:
            for table in tables:
                writer.write(table)
        return writer.num_trajectories

    def _tables(
        self, sessions: Sequence[Ended]
    ) -> tuple[list[Ended], list[pa.Table], list[Rejected]]:
        """What cannot be used, the rows of the others, and why."""
        outcomes: dict[Key, Outcome] = {}
        for run, outcome in sessions:
            assert run.repetition_id is not None
            outcomes[run.instance_id, run.repetition_id] = outcome
        reader = Reader(self._settings, outcomes)
        broken: list[Rejected] = []
        parts = reader.parts([ended.run for ended in sessions])
        tables = [table for part in parts if (table := sound(part, broken)).num_rows]
        made = {name for table in tables for name in table["trajectory_id"].to_pylist()}
        left = [e for e in sessions if f"{e.run.instance_id}_{e.run.repetition_id}" not in made]
        return left, tables, reader.rejected + broken

    def _put_aside(self, rejected: Sequence[Rejected]) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        with (self._out / REJECTED).open("ab") as file:
            for line in rejections.lines(rejected):
                file.write(line)


def ended_of(session: Session) -> Ended:
    """A session to write."""
    assert session.outcome is not None
    instance_id, repetition_id = split_session(session.name, "session")
    run = Run(
        instance_id=instance_id,
        repetition_id=repetition_id,
        places=list(session.places),
        failed=session.outcome.error is not None,
        rewarded=True,
    )
    return Ended(run, session.outcome)


def _with_calls(ended: Ended) -> Ended:
    """One that ended well without a call has failed."""
    if ended.run.places or ended.outcome.error is not None:
        return ended
    return _failed(ended, "no_calls: the session ended without a recorded call")


def _as_failed(ended: Ended, rejected: Sequence[Rejected]) -> Ended:
    places = set(ended.run.places)
    errors = [str(error) for place, error in rejected if place in places]
    mine = sorted(errors, key=lambda error: error.startswith(INCOMPLETE))
    return _failed(ended, mine[0] if mine else "session_unusable")


def _without_steps(ended: Ended, _: Sequence[Rejected]) -> Ended:
    return Ended(replace(ended.run, places=()), ended.outcome)


def _failed(ended: Ended, error: str) -> Ended:
    outcome = ended.outcome if ended.outcome.error else replace(ended.outcome, error=error)
    return Ended(replace(ended.run, failed=True), outcome)
