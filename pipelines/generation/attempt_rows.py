"""Build the rows of finished attempts at tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pipelines.generation.tasks import Task
from pipelines.generation.texts import encodable
from rollout_io.conversion.rows import Settled, table_of
from rollout_io.formats.base import Step
from schemas.errors import RolloutError


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
