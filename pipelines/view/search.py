"""Find a text or token ids in the rows of a dataset."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipelines.merging.prefix_tree import prefix_tree
from pipelines.view.dataset import Dataset
from pipelines.view.trajectory_index import TrajectoryIndex
from rollout_io.dataset.prefix_layout import Tokens
from rollout_io.retokenize.token_bytes import TokenBytes
from schemas.errors import InputError
from schemas.ragged import IntArray, Ragged, offsets_of

MAX_HITS = 10_000
MAX_NAMES = 20
"""Maximum number of tasks, and of trajectories, with matching ids that a search lists."""
MAX_SECONDS = 10.0
"""Seconds after which a search stops, even if it is incomplete."""

_NUM_ROWS = 4096
_BYTES_PER_ID = 4


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
    known = {"searched": searched, **_named(dataset.index, text)}
    hits: list[dict[str, Any]] = []
    for begin, end in _pieces(dataset, where):
        for trajectory_id, step_index, position in _found(dataset, begin, end, text, ids):
            hit = {"trajectory_id": trajectory_id, "step_index": step_index, "position": position}
            hits.append(hit)
            if len(hits) >= limit:
                return {"hits": hits, "complete": False, **known}
        if time.monotonic() > ends:
            return {"hits": hits, "complete": False, **known}
    return {"hits": hits, "complete": True, **known}


def _named(index: TrajectoryIndex, text: str | None) -> dict[str, Any]:
    """Find the ids of tasks and trajectories that contain a text, ignoring case.

    Returns:
        `tasks`: instance_id and number of attempts, shortest ids first; `trajectories`: ids of
        trajectories whose task does not match; at most `MAX_NAMES` of each. `num_tasks` and
        `num_trajectories` count all matches.
    """
    if text is None:
        return {"tasks": [], "num_tasks": 0, "trajectories": [], "num_trajectories": 0}
    lines = index.trajectories.select("instance_id", "trajectory_id")

    def holds(name: str) -> pl.Expr:
        return pl.col(name).str.to_lowercase().str.contains(text.lower().strip(), literal=True)

    size = pl.col("instance_id").str.len_chars()
    tasks = lines.filter(holds("instance_id")).group_by("instance_id", maintain_order=True).len()
    others = lines.filter(holds("trajectory_id") & ~holds("instance_id"))["trajectory_id"]
    shown = tasks.sort(size, maintain_order=True).head(MAX_NAMES)
    return {
        "tasks": [{"instance_id": name, "attempts": number} for name, number in shown.rows()],
        "num_tasks": len(tasks),
        "trajectories": others.head(MAX_NAMES).to_list(),
        "num_trajectories": len(others),
    }


def _pieces(dataset: Dataset, where: str | None) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that contain exactly the trajectories that satisfy `where`."""
    mask = dataset.index.matching(where)
    starts = dataset.index.starts
    chosen = np.arange(len(dataset.index)) if mask is None else np.flatnonzero(mask)
    begin = end = 0
    for number in chosen.tolist():
        first, after = int(starts[number]), int(starts[number + 1])
        if first != end or after - begin > _NUM_ROWS:
            if end > begin:
                yield begin, end
            begin = first
        end = after
    if end > begin:
        yield begin, end


def _found(
    dataset: Dataset, begin: int, end: int, text: str | None, ids: list[int] | None
) -> Iterator[tuple[str, int, int | None]]:
    keys = ["trajectory_id", "step_index"]
    if text is not None and dataset.token_bytes is None:
        yield from _in_texts(dataset, begin, end, text)
        return
    table = dataset.reader.rows(begin, end, [*keys, "prompt_token_ids", "response_ids"])
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    shared = prefix_tree(table).shared.tolist()
    names = zip(*(table.column(name).to_pylist() for name in keys), strict=True)
    for row, (trajectory_id, step_index) in enumerate(names):
        whole = np.concatenate([prompts.row(row), responses.row(row)]).astype(np.int32)
        for first, last in _places(whole, text, ids, dataset.token_bytes):
            if last > shared[row]:
                yield trajectory_id, step_index, first


def _places(
    whole: Tokens, text: str | None, ids: list[int] | None, vocabulary: TokenBytes | None
) -> Iterator[tuple[int, int]]:
    """Yield each match as (index of its first token, index after its last token)."""
    if ids is not None:
        needle = np.array(ids, np.int32).tobytes()
        for at in _matches(whole.tobytes(), needle):
            if at % _BYTES_PER_ID == 0:
                yield at // _BYTES_PER_ID, at // _BYTES_PER_ID + len(ids)
        return
    assert text is not None
    assert vocabulary is not None
    needle, content = text.encode("utf-8", "replace"), vocabulary.join(whole)
    ends: IntArray | None = None
    for at in _matches(content, needle):
        ends = offsets_of(vocabulary.lengths(whole))[1:] if ends is None else ends
        first = int(np.searchsorted(ends, at, side="right"))
        yield first, int(np.searchsorted(ends, at + len(needle) - 1, side="right")) + 1


def _matches(content: bytes, needle: bytes) -> Iterator[int]:
    at = content.find(needle)
    while at >= 0:
        yield at
        at = content.find(needle, at + 1)


def _in_texts(
    dataset: Dataset, begin: int, end: int, text: str
) -> Iterator[tuple[str, int, int | None]]:
    texts = dataset.present("messages", "response_text")
    table: pa.Table = dataset.reader.rows(begin, end, ["trajectory_id", "step_index", *texts])
    known, seen = None, set[str]()
    for row in table.to_pylist():
        if row["trajectory_id"] != known:
            known, seen = row["trajectory_id"], set()
        found = {t for t in _strings(row.get("messages"), text) if text in t}
        if text in (row.get("response_text") or ""):
            found.add(row["response_text"])
        if not found <= seen:
            yield row["trajectory_id"], row["step_index"], None
        seen |= found


def _strings(messages: str | None, text: str) -> Iterator[str]:
    """Yield the strings in logged messages; none if the JSON cannot contain the text."""
    if messages is None or ("\\" not in messages and text not in messages):
        return
    try:
        nodes = [json.loads(messages)]
    except (ValueError, RecursionError):
        yield messages
        return
    while nodes:
        node = nodes.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += node.values()
