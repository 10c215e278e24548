"""Score a dataset with a function, each trajectory once, and continue after a kill."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.generation.environments import environment_class
from pipelines.rescoring.attempts import Attempt, attempts
from pipelines.rescoring.scorers import RULE, Score, Scorer, scores, source_digests
from rollout_io.dataset.locking import lock
from rollout_io.dataset.opening import read_input
from rollout_io.dataset.reader import read_metadata, scan
from rollout_io.dataset.versions import (
    FINDINGS,
    REWARDS,
    Kind,
    digests,
    read_version,
    version_path,
    write_version,
)
from rollout_io.plugins import resolve
from rollout_io.retokenize.local import remembered_tokenizer
from rollout_io.retokenize.token_bytes import load_token_bytes
from schemas.errors import InputError

_KINDS = {"reward": (REWARDS, FINDINGS), "findings": (FINDINGS,)}
"""Versions that a function may write; the first one always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """Numbers of a run; they add up to the trajectories that did not fail.

    Attributes:
        num_scored: Trajectories with a result, from this run or an earlier one.
        num_errors: Trajectories without, because the function raised, hung, died or gave no valid
            result.
        num_resumed: How many of the results come from an earlier run.
        num_retried: How many trajectories had no result after an earlier run, and were tried again.
        errors: How often each reason occurred, the most frequent first.
        findings: Number of findings of each label; None: the function gave no findings.
    """

    num_scored: int
    num_errors: int
    num_resumed: int
    num_retried: int
    errors: dict[str, int]
    findings: dict[str, int] | None


def rescore(
    dataset: str,
    name: str,
    scorer: Scorer,
    *,
    num_workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> Rescored:
    """Write a version of a dataset's rewards or findings: a score per trajectory that did not fail.

    A function that gives a reward and findings writes both, under one name. Each score is added to a journal beside the version before the next one is asked for, so a run
    that is killed continues where it stopped. If a file that the function is made of has changed
    since (`source_digests`), the run starts from the beginning. Of a version that is complete, only
    trajectories that have no score, or whose rows changed since (`digests`), are scored.

    Args:
        dataset: Path of a valid dataset: a local directory.
        name: Name of the version.
        scorer: The reward function.
        num_workers: Number of processes that score.
        progress: Called with the number of trajectories done since the last call.

    Raises:
        InputError: `reward_version`: another process writes this version, or the version exists and
            was made by another function; `reward_function`: the function cannot be imported.
        ConfigError: `reward_function`, `reward_version`: the function or name is
            not usable.
    """
    kind, *_ = kinds = _KINDS[scorer.gives]
    path = version_path(dataset, name, kind)
    tasks = None if scorer.tasks is None else hashlib.sha256(read_input(scorer.tasks)).hexdigest()
    load = environment_class if scorer.tasks is not None else partial(resolve, rule=RULE)
    sources = source_digests(scorer.function, load(scorer.function))
    how = {**asdict(scorer), "sources": sources, "tasks_sha256": tasks}
    del how["gives"]
    with _only_writer(path):
        current = digests(scan(dataset))
        header = {**how, "dataset_digest": current["digest"].sum()}
        journal = path.with_name(f".{path.name}.journal")
        before = [*_earlier(dataset, name, kinds, how, current), *_journaled(journal, header)]
        done = {score.trajectory_id: score for score in before if score.error is None}
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
        columns = {one.column: one.type for one in _KINDS["reward"]}
        table = pl.DataFrame(
            rows, schema={"trajectory_id": pl.String, "error": pl.String, **columns}
        )
        table = table.join(current, on="trajectory_id").sort("trajectory_id")
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        facts = {**how, "created": stamp, "num_trajectories": len(table)}
        has_findings = table["findings"].null_count() < len(table) or kind is FINDINGS
        for one in reversed(kinds):  # the first one completes the run
            if one is kind or has_findings:
                write_version(version_path(dataset, name, one), _filled(table, one), facts, one)
        journal.unlink()
    lost = table.filter(pl.col("error").is_not_null())
    reasons = lost["error"].value_counts(sort=True)
    return Rescored(
        num_scored=len(table) - len(lost),
        num_errors=len(lost),
        num_resumed=num_resumed,
        num_retried=num_retried,
        errors=dict(reasons.rows()),
        findings=_labels_of(table) if has_findings else None,
    )


def _labels_of(version: pl.DataFrame) -> dict[str, int]:
    """Count the findings of each label, the most frequent first."""
    findings = version["findings"].drop_nulls().explode(empty_as_null=False)
    counts = findings.struct.field("label").value_counts(sort=True)
    return dict(counts.sort("count", "label", descending=[True, False]).rows())


def _filled(table: pl.DataFrame, kind: Kind) -> pl.DataFrame:
    """Select the columns of a version; a scored trajectory without a finding has an empty list."""
    empty = pl.lit([], kind.type) if kind is FINDINGS else None
    value = pl.when(pl.col("error").is_null()).then(pl.coalesce(kind.column, empty))
    return table.with_columns(value.alias(kind.column)).select(*kind.schema)


def _earlier(
    dataset: str, name: str, kinds: Sequence[Kind], how: dict[str, Any], current: pl.DataFrame
) -> list[Score]:
    """Return the scores of a complete version, which must be of the same function.

    Those of trajectories that changed since are left out.
    """
    earlier = pl.DataFrame(schema=kinds[0].schema)
    for kind in kinds:
        path = version_path(dataset, name, kind)
        if not path.exists():
            continue
        values, before = read_version(dataset, name, kind)
        if any(before.get(key) != value for key, value in how.items() if key != "timeout_s"):
            raise _made_otherwise(dataset, name, kind, how, before)
        if kind is kinds[0]:
            earlier = values
        else:
            more = values.select("trajectory_id", "digest", kind.column)
            earlier = earlier.join(more, on=["trajectory_id", "digest"], how="left")
    same = earlier.join(current, on=["trajectory_id", "digest"], how="semi").drop("digest")
    return [Score(**{"reward": None, **row}) for row in same.iter_rows(named=True)]


def _made_otherwise(
    dataset: str, name: str, kind: Kind, how: dict[str, Any], before: dict[str, Any]
) -> InputError:
    files = {**how["sources"], **before.get("sources", {})}
    changed = [f for f in files if how["sources"].get(f) != before.get("sources", {}).get(f)]
    why = f"whose source changed since ({', '.join(changed)})" if changed else "with other options"
    finding = f"{kind.name} {name!r} was made by {before.get('function')}, {why}"
    hint = f"pass another --name, or remove {version_path(dataset, name, kind)}"
    return InputError("reward_version", dataset, finding, hint=hint)


def _journaled(journal: Path, how: dict[str, Any]) -> list[Score]:
    """Return the scores of a journal of the same function; a line that was cut off is left out."""
    if not journal.exists():
        return []
    first, *lines = journal.read_text().split("\n")
    if _parsed(first) != how:
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
def _appending(journal: Path, how: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open a journal; each record is with the operating system when the call returns."""
    is_new = not journal.exists()
    with journal.open("ab", buffering=0) as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record).encode() + b"\n")

        if is_new:
            write(how)
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
