"""Append the batches of a training process to a dataset."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from rollout_io.dataset.reader import scan
from rollout_io.dataset.storage import Location
from rollout_io.dataset.writer import RolloutWriter
from rollout_io.formats.skyrl_fields import TrajectoryID
from rollout_io.formats.skyrl_generator_output import from_generator_output
from rollout_io.formats.skyrl_output_columns import trajectory_identity
from schemas.columns import TASK
from schemas.errors import RolloutError, count
from schemas.metadata import DatasetMetadata

_LOGGER = logging.getLogger(__name__)


class RolloutAppender:
    """Appends each batch of rollouts to a dataset, as one shard.

    A shard is complete or absent, so the dataset is readable while training runs, and after a crash.
    The second group of a task (in a later epoch, or after a restart) gets the `instance_id` `a@2`,
    and so on; the task's id is in the column `task_instance_id`.

    One process may append to a dataset at a time.

    Args:
        dataset: Directory or URL of the dataset; created by the first batch.
        metadata: Metadata of the dataset, such as `logprobs_mode`.

    Attributes:
        num_rows: Rows appended.
        num_refused: Rows of batches that were not appended.

    Example:
        >>> appender = RolloutAppender("rollouts/")
        >>> appender.append(output)
    """

    def __init__(
        self, dataset: str | os.PathLike[str], metadata: DatasetMetadata | None = None
    ) -> None:
        path = os.fspath(dataset)
        self.dataset = path if "://" in path else os.path.abspath(path)  # noqa: PTH100
        self.num_rows = self.num_refused = 0
        self._metadata, self._instances = metadata, set[str]()
        location = Location.of(self.dataset)
        if location.fs.exists(location.path) and location.shards():
            names = scan(self.dataset).select("instance_id").unique().collect()
            self._instances.update(names["instance_id"])

    def append(self, output: Mapping[str, Any]) -> None:
        """Append a batch; an error is logged with the number of lost rows, and training continues.

        Args:
            output: Fields of `rollout_io.GeneratorOutput`, with `trajectory_ids`; columns of the
                rollout table, such as `policy_version` and `temperature`, may be added.
        """
        rows = len(output["response_ids"])
        try:
            table = self._table(output)
            with RolloutWriter(self.dataset, append=True, metadata=self._metadata) as writer:
                writer.write(table)
        except RolloutError as error:
            self.num_refused += rows
            text = "%s not appended to %s: %s"
            _LOGGER.error(text, count(rows, "row"), self.dataset, error)  # noqa: TRY400
            return
        self.num_rows += table.num_rows
        self._instances.update(table.column("instance_id").to_pylist())

    def _table(self, output: Mapping[str, Any]) -> pa.Table:
        tasks = [trajectory_identity(value, i) for i, value in enumerate(output["trajectory_ids"])]
        flags = output.get("is_last_step")
        ended = Counter[TrajectoryID]()
        names = dict[tuple[str, int], str]()
        ids, task_of = list[TrajectoryID](), dict[str, str]()
        for task, is_last in zip(tasks, flags or [True] * len(tasks), strict=True):
            group = task.instance_id, ended[task]
            if group not in names:
                names[group] = self._free_name(task.instance_id, task_of)
                task_of[names[group]] = task.instance_id
            ids.append(TrajectoryID(names[group], task.repetition_id))
            ended[task] += bool(is_last)
        table = from_generator_output({**output, "trajectory_ids": ids})
        instances = table.column("instance_id").to_pylist()
        return table.append_column(TASK, pa.array([task_of[name] for name in instances]))

    def _free_name(self, task: str, taken: Collection[str]) -> str:
        visits = itertools.chain([task], (f"{task}@{n}" for n in itertools.count(2)))
        return next(n for n in visits if n not in self._instances and n not in taken)
