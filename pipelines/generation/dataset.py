"""Rows of finished attempts: write them in complete groups, and find missing attempts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from pipelines.generation.config import GenerateConfig, identity
from pipelines.generation.tasks import Task
from pipelines.generation.user_code import encodable
from rollout_io.conversion.rows import Settled, table_of
from rollout_io.dataset.checking import validate
from rollout_io.dataset.reader import read_metadata, scan
from rollout_io.dataset.storage import Location
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.formats.base import Step
from schemas.errors import ConfigError, RolloutError
from schemas.metadata import DatasetMetadata

VERB = "generate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A trajectory that ended, successfully or not.

    Attributes:
        task: The task attempted.
        rows: Rows of the rollout table; at least one.
        rule: Rule id of the error; None if the trajectory succeeded, or if a generator reported its
            failure.
        warnings: Problems that do not affect the rows.
    """

    task: Task
    rows: pa.Table
    rule: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """Reason why the trajectory failed; None if it succeeded."""
        has = "error" in self.rows.column_names
        error: str | None = self.rows.column("error")[0].as_py() if has else None
        return error


def finished_of(
    task: Task,
    steps: Sequence[Step],
    error: RolloutError | None = None,
    warnings: Sequence[str] = (),
) -> Finished:
    """Build a trajectory from its steps; a failed one may have no steps and has unknown rewards."""
    if error is not None:
        for step in steps:
            step.reward = None
    settled = Settled(
        instance_id=task.instance_id,
        repetition_id=task.repetition_id,
        steps=list(steps) or [Step(source=task.source)],
        error=None if error is None else encodable(error.failure),
    )
    rule = None if error is None else error.rule
    return Finished(task=task, rows=table_of([settled]), rule=rule, warnings=list(warnings))


def rows_of(finished: Sequence[Finished]) -> pa.Table:
    """Concatenate the rows of trajectories, in order."""
    return pa.concat_tables([one.rows for one in finished], promote_options="default")


def missing_tasks(tasks: Sequence[Task], config: GenerateConfig) -> list[Task]:
    """List the tasks without a trajectory in `config.out`; failed trajectories are not repeated.

    Raises:
        ConfigError: `resume`: `config.out` is not a generated dataset, or was generated with
            settings that lead to different trajectories.
        InputError: `out_is_free`: `config.out` is a partitioned dataset.
    """
    location = Location.of(config.out)
    location.refuse_partitions()
    if not location.fs.exists(location.path) or not location.shards():
        return list(tasks)
    _check_same(config)
    validate(config.out)
    held = set(scan(config.out).select("trajectory_id").collect().to_series().to_list())
    return [task for task in tasks if task.trajectory_id not in held]


def _check_same(config: GenerateConfig) -> None:
    history = read_metadata(config.out).made_by
    made = history[-1] if history else {}
    if made.get("verb") != VERB:
        finding, hint = (
            "the dataset was not created by `rollouts generate`",
            "choose a different --out",
        )
        raise ConfigError("resume", config.out, finding, hint=hint)
    before: dict[str, Any] = made.get("config", {})
    now = identity(config)
    different = [key for key in now if before.get(key) != now[key]]
    if different:
        finding = ", ".join(f"`{k}` was {before.get(k)!r} and is {now[k]!r}" for k in different)
        hint = "choose a different --out, or restore the configuration"
        message = f"{config.out}: cannot resume with different settings: {finding}"
        raise ConfigError("resume", config.out, finding, hint=hint, message=message)


class GroupWriter:
    """Writes complete groups, several per shard; on exit, writes all other finished trajectories.

    A shard is written completely or not at all, so no trajectory is ever written twice:
    trajectories that an interrupted run did not write are generated again. On exit, even after an
    error, the finished trajectories of incomplete groups are written too.

    Args:
        out: Dataset directory.
        tasks: Expected tasks; a group is complete when all its tasks in this list have finished.
        metadata: Metadata from the generator.
        config: Provides `groups_per_shard`, and the settings to store in the metadata.
    """

    def __init__(
        self, out: str, tasks: Sequence[Task], metadata: DatasetMetadata, config: GenerateConfig
    ) -> None:
        place = Location.of(out)  # absolute, because environments and agents may call os.chdir
        self._out = place.path if place.is_local else os.fspath(out)
        self._metadata = metadata.made(VERB, config=identity(config))
        self._groups_per_shard = config.groups_per_shard
        self._order = {task.trajectory_id: index for index, task in enumerate(tasks)}
        self._missing = Counter(task.instance_id for task in tasks)
        self._finished: dict[str, list[Finished]] = {}
        self._complete: list[str] = []
        self.num_shards = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write(list(self._finished))

    def add(self, finished: Finished) -> None:
        """Add a trajectory; write a shard if enough groups are complete."""
        name = finished.task.instance_id
        self._finished.setdefault(name, []).append(finished)
        self._missing[name] -= 1
        if self._missing[name] == 0:
            self._complete.append(name)
        if len(self._complete) >= self._groups_per_shard:
            self._write(self._complete)
            self._complete = []

    def _write(self, groups: Sequence[str]) -> None:
        ended = [finished for name in groups for finished in self._finished.pop(name)]
        if not ended:
            return
        ended.sort(key=lambda finished: self._order[finished.task.trajectory_id])
        with RolloutWriter(self._out, metadata=self._metadata, append=True) as writer:
            writer.write(rows_of(ended))
        self.num_shards += 1
