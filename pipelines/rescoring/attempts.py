"""What a reward function gets: one recorded trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_io.dataset.prefix_layout import trajectory_starts
from rollout_io.dataset.reader import iter_tables, scan
from rollout_io.dataset.storage import PathLike
from rollout_io.retokenize.token_bytes import TokenBytes

LEFT_OUT = frozenset(
    {"prompt_token_ids", "rollout_logprobs", "trainer_logprobs", "sampling_support", "rewards"}
    | {"teacher_token_ids", "teacher_logprobs", "policy_versions", "rollout_expert_indices"}
)
"""Columns that are large and say nothing about the text."""


@dataclass(frozen=True)
class Attempt:
    """A recorded trajectory.

    Attributes:
        trajectory_id: Its id.
        instance_id: Id of its task.
        rows: Its rows in order, as dicts: all columns of the dataset, also the user's own, except
            prompts, log-probabilities and other numbers per token. `response_text` is the logged
            text, or else the decoded response.

    Example:
        >>> def exact(attempt: Attempt) -> float:
        ...     return float(attempt.response.strip() == attempt.rows[0]["truth"])
    """

    trajectory_id: str
    instance_id: str
    rows: list[dict[str, Any]]

    @property
    def response(self) -> str:
        """Text of the last response; empty if it is unknown."""
        return self.rows[-1].get("response_text") or ""

    @property
    def reward(self) -> float | None:
        """The recorded reward of the last row."""
        reward: float | None = self.rows[-1].get("reward")
        return reward

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The logged messages of the last row; empty if the log has none."""
        found: list[dict[str, Any]] = json.loads(self.rows[-1].get("messages") or "[]")
        return found


def attempts(dataset: PathLike, vocabulary: TokenBytes | None) -> Iterator[Attempt]:
    """Yield the trajectories that did not fail, in order, reading a part of the dataset at a time.

    Args:
        dataset: Path of a valid dataset.
        vocabulary: Bytes of each token, for responses without a logged text; None: they are null.
    """
    present = scan(dataset).collect_schema().names()
    names = [name for name in present if name not in LEFT_OUT]
    for table in iter_tables(dataset, names):
        starts = [*trajectory_starts(table).tolist(), table.num_rows]
        for begin, end in pairwise(starts):
            rows = table.slice(begin, end - begin)
            if "error" not in names or rows.column("error").null_count == rows.num_rows:
                yield _attempt(rows, vocabulary)


def _attempt(table: pa.Table, vocabulary: TokenBytes | None) -> Attempt:
    rows = table.to_pylist()
    for row in rows:
        if row.get("response_text") is None and vocabulary is not None:
            row["response_text"] = vocabulary.text(np.array(row["response_ids"], np.int32))
    return Attempt(rows[0]["trajectory_id"], rows[0]["instance_id"], rows)
