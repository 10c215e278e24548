"""Findings beside a dataset, as the viewer shows them: by trajectory, turn and token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipelines.merging.merge import unmerge_table
from pipelines.view.row_tables import NO_FAULTS
from rollout_io.dataset.versions import FINDINGS, read_current, version_names
from schemas.columns import JOINED
from schemas.errors import InputError
from schemas.ragged import Ragged

if TYPE_CHECKING:
    from pipelines.view.dataset import Dataset

COLUMN = "findings"
"""Column that findings add to the table of trajectories."""
_READ = (
    *("trajectory_id", "step_index", "is_last_step", "prompt_token_ids", "response_ids"),
    *("loss_mask", "token_source", "response_text", "segments"),
)


class Findings:
    """The findings of all versions that are about the rows that a dataset has now.

    Args:
        dataset: Path of the dataset.

    Attributes:
        warnings: Why a version is not shown.
    """

    def __init__(self, dataset: str) -> None:
        self.warnings: list[str] = []
        parts = []
        for name in version_names(dataset, FINDINGS):
            try:
                values = read_current(dataset, name, FINDINGS)
            except InputError as error:
                self.warnings.append(f"{error.sentence} They are not shown.")
                continue
            parts.append(values.select("trajectory_id", COLUMN, name=pl.lit(name)))
        schema: dict[str, Any] = {
            "trajectory_id": pl.String,
            COLUMN: FINDINGS.type,
            "name": pl.String,
        }
        self._values = pl.concat(parts) if parts else pl.DataFrame(schema=schema)

    def __len__(self) -> int:
        """Return the number of findings."""
        return int(self._values[COLUMN].list.len().sum() or 0)

    def __bool__(self) -> bool:
        """True if a version is shown, even one that found nothing."""
        return len(self._values) > 0

    @cached_property
    def by_trajectory(self) -> pl.DataFrame:
        """`trajectory_id` and the labels found in it: "none" if none, null if no finder succeeded."""
        labels = pl.col(COLUMN).explode(empty_as_null=False).struct.field("label").drop_nulls()
        labelled = self._values.group_by("trajectory_id").agg(
            labels.unique().sort().str.join(", ").alias("labels"),
            is_known=pl.col(COLUMN).is_not_null().any(),
        )
        none = pl.when("is_known").then(pl.lit(NO_FAULTS))
        named = pl.when(pl.col("labels") != "").then("labels").otherwise(none)
        return labelled.select("trajectory_id", named.alias(COLUMN))

    def of(self, dataset: Dataset, trajectory_id: str) -> list[dict[str, Any]]:
        """Return the findings in a trajectory, with their places in its rows, merged or not.

        Returns:
            name, label, text; row; at (a token of the row's prompt + response in the turn that it is
            about); start and end (tokens of the row's response that it is about, equal if it is about
            none in particular).
        """
        values = self._values.filter(pl.col("trajectory_id") == trajectory_id).drop_nulls(COLUMN)
        listed = [
            (name, one)
            for name, findings in values.select("name", COLUMN).rows()
            for one in findings
        ]
        if not listed:
            return []
        table = dataset.trajectory(dataset.index.number(trajectory_id), dataset.present(*_READ))
        segments = (
            table.column("segments").to_pylist()
            if "segments" in table.column_names
            else [None] * table.num_rows
        )
        row_of = _rows_of_steps(segments)
        prompts = Ragged.from_arrow(table.column("prompt_token_ids")).lengths
        steps = unmerge_table(table)
        return [
            {"name": name, "label": one["label"], "text": one["text"]}
            | _place(dataset, steps, one, row_of, prompts)
            for name, one in listed
        ]


def _rows_of_steps(rows: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[int]:
    """Return the row that holds each step, in the order in which `unmerge` numbers them."""
    steps, are_merged = list[tuple[int, int]](), True
    for row, segments in enumerate(rows):
        is_merged = segments is not None and any(one.get(JOINED) for one in segments[:1])
        numbers = [one["step_index"] for one in segments or ()] if is_merged else [row]
        steps += [(step, row) for step in numbers]
        are_merged &= is_merged
    return [row for _, row in (sorted(steps) if are_merged else steps)]


def _place(
    dataset: Dataset,
    steps: Any,
    finding: Mapping[str, Any],
    row_of: Sequence[int],
    prompts: Any,
) -> dict[str, int | None]:
    """Place a finding in the row of its step: a merged row begins with all tokens of its steps."""
    step = finding["step"]
    if step is None:
        return {"row": None, "at": None, "start": 0, "end": 0}
    row = row_of[step]
    before, prompt = (int(n) for n in (prompts[row], len(steps.column("prompt_token_ids")[step])))
    start, length = finding["start"], finding["length"]
    if start is None and finding["text_start"] is not None:
        start, length = _tokens_of_text(dataset, steps, finding)
        start = None if start is None else prompt + start
    if start is None:
        return {"row": row, "at": prompt, "start": 0, "end": 0}
    return {"row": row, "at": start, "start": start - before, "end": start - before + length}


def _tokens_of_text(
    dataset: Dataset, steps: Any, finding: Mapping[str, Any]
) -> tuple[int, int] | tuple[None, None]:
    """Find the response tokens that spell a part of a step's response text."""
    step, first = finding["step"], finding["text_start"]
    ids = np.array(steps.column("response_ids")[step].as_py(), np.int32)
    vocabulary = dataset.token_bytes
    if vocabulary is None or not finding["text_length"]:
        return None, None
    ends = np.cumsum([len(spelled) for spelled in vocabulary.to_arrow(ids).to_pylist()])
    spelled = b"".join(vocabulary.to_arrow(ids).to_pylist())
    has_text = "response_text" in steps.column_names
    text = (steps.column("response_text")[step].as_py() if has_text else None) or vocabulary.text(
        ids
    )
    sought = text[first : first + finding["text_length"]].encode("utf-8", "replace")
    # A logged text may lack what the tokens spell before it, never the reverse.
    at = spelled.find(sought, len(text[:first].encode("utf-8", "replace")))
    at = spelled.find(sought) if at < 0 else at
    if at < 0:
        return None, None
    begin, last = np.searchsorted(ends, [at, at + len(sought) - 1], side="right")
    return int(begin), int(last - begin + 1)
