"""Score a dataset with a reward function, each trajectory once, and continue after a kill."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.generation.environments import environment_class, resolve
from pipelines.rescoring.attempts import Attempt, attempts
from pipelines.rescoring.scorers import RULE, Score, Scorer, scores
from pipelines.rescoring.sources import source_digests
from pipelines.rescoring.versions import (
    SCHEMA,
    digests,
    read_version,
    version_path,
    write_version,
)
from rollout_io.dataset.locking import lock
from rollout_io.dataset.opening import read_input
from rollout_io.dataset.reader import read_metadata, scan
from rollout_io.retokenize.local import remembered_tokenizer
from rollout_io.retokenize.token_bytes import load_token_bytes
from schemas.errors import InputError

_SCORES = {name: kind for name, kind in SCHEMA.items() if name != "digest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """Numbers of a run; they add up to the trajectories that did not fail.

    Attributes:
        num_scored: Trajectories with a reward, from this run or an earlier one.
        num_errors: Trajectories without, because the function raised, hung, died or gave no number.
        num_resumed: How many of the rewards come from an earlier run.
        num_retried: How many trajectories had no reward after an earlier run, and were tried again.
        errors: How often each reason occurred, the most frequent first.
    """

    num_scored: int
    num_errors: int
    num_resumed: int
    num_retried: int
    errors: dict[str, int]


def rescore(
    dataset: str,
    name: str,
    scorer: Scorer,
    *,
    num_workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> Rescored:
    """Write a reward version of a dataset: one score per trajectory that did not fail.

    Each score is added to a journal beside the version before the next one is asked for, so a run
    that is killed continues where it stopped. If a file that the function is made of has changed
    since (`source_digests`), the run starts from the beginning. Of a version that is complete, only
    trajectories that have no reward, or whose rows changed since (`digests`), are scored.

    Args:
        dataset: Path of a valid dataset: a local directory.
        name: Name of the version.
        scorer: The reward function.
        num_workers: Number of processes that score.
        progress: Called with the number of trajectories done since the last call.

    Raises:
        InputError: `reward_version`: another process writes this version, or the version exists and
            was made by another function; `reward_function`: the function cannot be imported.
        ConfigError: `reward_function`, `reward_version`: the function or name is not usable.
    """
    path = version_path(dataset, name)
    tasks = None if scorer.tasks is None else hashlib.sha256(read_input(scorer.tasks)).hexdigest()
    load = environment_class if scorer.tasks is not None else partial(resolve, rule=RULE)
    sources = source_digests(scorer.function, load(scorer.function))
    made = {**asdict(scorer), "sources": sources, "tasks_sha256": tasks}
    with _only_writer(path):
        current = digests(scan(dataset))
        header = {**made, "dataset_digest": current["digest"].sum()}
        journal = path.with_name(f".{path.name}.journal")
        before = [*_earlier(path, dataset, name, made, current), *_journaled(journal, header)]
        done = {score.trajectory_id: score for score in before if score.reward is not None}
        num_resumed = len(done)
        num_retried = len({score.trajectory_id for score in before} - done.keys())
        progress(num_resumed)
        tokenizer = remembered_tokenizer(read_metadata(dataset))
        vocabulary = None if tokenizer is None else load_token_bytes(tokenizer)

        def left() -> Iterator[Attempt]:
            return (a for a in attempts(dataset, vocabulary) if a.trajectory_id not in done)

        with _appending(journal, header) as write:
            for score in scores(scorer, left(), num_workers):
                write(asdict(score))
                done[score.trajectory_id] = score
                progress(1)
        rows = [asdict(score) for score in done.values()]
        table = pl.DataFrame(rows, schema=_SCORES).join(current, on="trajectory_id")
        table = table.sort("trajectory_id")
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        write_version(path, table, {**made, "created": stamp, "num_trajectories": len(table)})
        journal.unlink()
    lost = table.filter(pl.col("error").is_not_null())
    reasons = lost["error"].value_counts(sort=True)
    return Rescored(
        num_scored=len(table) - len(lost),
        num_errors=len(lost),
        num_resumed=num_resumed,
        num_retried=num_retried,
        errors=dict(reasons.rows()),
    )


def _earlier(
    path: Path, dataset: str, name: str, made: dict[str, Any], current: pl.DataFrame
) -> list[Score]:
    """Return the scores of a complete version, which must be of the same function.

    Those of trajectories that changed since are left out.
    """
    if not path.exists():
        return []
    scores, before = read_version(dataset, name)
    if any(before.get(key) != value for key, value in made.items() if key != "timeout_s"):
        files = {**made["sources"], **before.get("sources", {})}
        changed = [f for f in files if made["sources"].get(f) != before.get("sources", {}).get(f)]
        why = (
            f"whose source changed since ({', '.join(changed)})"
            if changed
            else "with other options"
        )
        got = f"version {name!r} was made by {before.get('function')}, {why}"
        hint = f"pass another --name, or remove {path}"
        raise InputError("reward_version", dataset, got, hint=hint)
    same = scores.join(current, on=["trajectory_id", "digest"], how="semi")
    return [Score(*row) for row in same.select(*_SCORES).rows()]


def _journaled(journal: Path, made: dict[str, Any]) -> list[Score]:
    """Return the scores of a journal of the same function; a line that was cut off is left out."""
    if not journal.exists():
        return []
    first, *lines = journal.read_text().split("\n")
    if _parsed(first) != made:
        journal.unlink()
        return []
    return [Score(**record) for line in lines if (record := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


@contextmanager
def _appending(journal: Path, made: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open a journal; each record is with the operating system when the call returns."""
    is_new = not journal.exists()
    with journal.open("ab", buffering=0) as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record).encode() + b"\n")

        if is_new:
            write(made)
        else:
            file.write(b"\n")  # ends a line that was cut off
        yield write
        os.fsync(file.fileno())


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    held = lock(path.with_name(f".{path.name}.lock"))
    if held is None:
        hint = "wait for it, or pass another --name"
        raise InputError("reward_version", str(path), "another process is writing it", hint=hint)
    try:
        yield
    finally:
        held.release()
