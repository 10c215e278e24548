"""Find a text or token ids in the rows of a dataset."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from pipelines.view.dataset import Dataset
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.dataset.finding import FOUND_COLUMNS, Match, find, find_in_texts
from schemas.errors import InputError

MAX_HITS = 10_000
MAX_NAMES = 20
"""Maximum number of tasks, and of trajectories, with matching ids that a search lists."""
MAX_SECONDS = 10.0
"""Seconds after which a search stops, even if it is incomplete."""


def search(
    dataset: Dataset, *, text: str | None, ids: list[int] | None, where: str | None, limit: int
) -> dict[str, Any]:
    """Find the rows that contain a text or a sequence of token ids, in row order.

    A match within tokens that a row repeats from an earlier row is reported only for the earlier
    row. Text is searched for in the decoded tokens, or, without a tokenizer, in the logged messages
    and responses; `position` is then null. Ids of tasks and trajectories that contain the text are
    listed separately, whether or not they satisfy `where`. `searched` is the number of trajectories
    that satisfy it.

    Raises:
        InputError: `view_query`: both or neither of `text` and `ids` are passed.
    """
    if bool(text) == bool(ids):
        raise InputError("view_query", "search", "pass either text or ids")
    limit, ends = min(max(limit, 1), MAX_HITS), time.monotonic() + MAX_SECONDS
    mask = dataset.index.matching(where)
    searched = len(dataset.index) if mask is None else int(mask.sum())
    facts = {"searched": searched, **_named(dataset.index, text)}
    hits: list[dict[str, Any]] = []
    for begin, end in _pieces(dataset, where, text):
        for match in _found(dataset, begin, end, text, ids):
            number = dataset.index.number(match.trajectory_id)
            text_of = dataset.index.trajectories["task_text"][number]
            hits.append({**dataclasses.asdict(match), "task_text": text_of})
            if len(hits) >= limit:
                return {"hits": hits, "complete": False, **facts}
        if time.monotonic() > ends:
            return {"hits": hits, "complete": False, **facts}
    return {"hits": hits, "complete": True, **facts}


def _named(index: TrajectoryIndex, text: str | None) -> dict[str, Any]:
    """Find the ids of tasks and trajectories that contain a text, ignoring case."""
    if text is None:
        return {"tasks": [], "num_tasks": 0, "trajectories": [], "num_trajectories": 0}
    lines = index.trajectories.select("instance_id", "trajectory_id", "task_text")

    def holds(name: str) -> pl.Expr:
        return pl.col(name).str.to_lowercase().str.contains(text.lower().strip(), literal=True)

    size = pl.col("instance_id").str.len_chars()
    same = lines.filter(holds("instance_id")).group_by("instance_id", maintain_order=True)
    tasks = same.agg(pl.len(), pl.col("task_text").first())
    others = lines.filter(holds("trajectory_id") & ~holds("instance_id"))["trajectory_id"]
    shown = tasks.sort(size, maintain_order=True).head(MAX_NAMES)
    return {
        "tasks": shown.rename({"len": "attempts"}).to_dicts(),
        "num_tasks": len(tasks),
        "trajectories": others.head(MAX_NAMES).to_list(),
        "num_trajectories": len(others),
    }


def _pieces(dataset: Dataset, where: str | None, text: str | None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that contain exactly the trajectories that satisfy `where`.

    Trajectories that are known not to contain the text are left out.
    """
    mask = dataset.index.matching(where)
    starts = dataset.index.starts
    chosen = np.arange(len(dataset.index)) if mask is None else np.flatnonzero(mask)
    begin = end = 0
    for number in chosen.tolist():
        if text is not None and not dataset.may_hold(number, text):
            continue
        first, after = int(starts[number]), int(starts[number + 1])
        if first != end or after - begin > dataset.rows_at_once:
            if end > begin:
                yield begin, end
            begin = first
        end = after
    if end > begin:
        yield begin, end


def _found(
    dataset: Dataset, begin: int, end: int, text: str | None, ids: list[int] | None
) -> Iterator[Match]:
    if text is not None and (dataset.is_log or dataset.token_bytes is None):
        names = ["trajectory_id", "step_index", *dataset.present("messages", "response_text")]
        yield from find_in_texts(dataset.reader.rows(begin, end, names), text)
        return
    table = dataset.reader.rows(begin, end, FOUND_COLUMNS)
    sought = np.array(ids, np.int32) if text is None else text
    yield from find(table, sought, dataset.token_bytes)
