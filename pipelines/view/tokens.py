"""Tokens for the page: those of a row with their values, and the prefix tree of a trajectory or group."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from starlette.responses import Response

from pipelines.drift_diagnosis.diagnosis import diagnose
from pipelines.merging.segments import is_joined
from pipelines.rewards import placed_rewards
from pipelines.view.dataset import Dataset
from pipelines.view.responses import arrow_response
from pipelines.view.run_files import FLAGS, NUMBERS
from pipelines.view.runs import Run
from rollout_io.dataset.prefix_layout import Ids, Tokens, common_prefix
from rollout_io.retokenize.token_bytes import TokenBytes
from rollout_io.terminal import whole_characters
from schemas.columns import PICTURES
from schemas.errors import InputError
from schemas.numpy_arrays import to_arrow, to_numpy
from schemas.pictures import identities_of, pictures_of
from schemas.ragged import BoolArray, Ragged

MAX_TOKENS = 50_000_000
"""Maximum number of tokens, over all rows, that a tree is built from."""
MAX_ROWS = 100
"""Maximum number of rows that a node lists."""
SHOWN_CHARS = 300

_SHOWN_IDS = 24
_DIAGNOSED = (
    *("trajectory_id", "step_index", "prompt_token_ids", "response_ids", "agent"),
    *("messages", "response_text", "token_source", PICTURES),
)

_COLUMNS = (
    *("prompt_token_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward", "rewards"),
    *("segments", "policy_version", "policy_versions", PICTURES),
)


def tokens(
    dataset: Dataset, trajectory_id: str, step_index: int, run: Run | None, update: int | None
) -> Response:
    """Return one record per token of a row, with the values that an update recorded for it.

    The metadata has the row's pictures whose tokens are known, as JSON: their entries of `pictures`.
    """
    row = dataset.row(trajectory_id, step_index, dataset.present(*_COLUMNS))
    prompt = to_numpy(row.column("prompt_token_ids").chunk(0).flatten())
    response = Ragged.from_arrow(row.column("response_ids")).values
    num_prompt, ids = len(prompt), np.concatenate([prompt, response]).astype(np.int32)
    first = row.slice(0, 1).to_pylist() if "segments" in row.column_names else [{}]
    segments = first[0].get("segments")
    vocabulary = dataset.token_bytes
    masks = {
        "is_response": np.arange(len(ids)) >= num_prompt,
        "trained": _padded(num_prompt, Ragged.from_arrow(row.column("loss_mask")).values),
        "sampled": _padded(num_prompt, _sampled_mask(len(response), segments)),
    }
    if vocabulary is None:
        offsets = pa.py_buffer(np.zeros(len(ids) + 1, np.int32))
        spelled = pa.Array.from_buffers(pa.binary(), len(ids), [None, offsets, pa.py_buffer(b"")])
    else:
        spelled = vocabulary.to_arrow(ids)
    size, whole = len(response), len(ids)
    columns: dict[str, Any] = {
        "id": to_arrow(ids),
        "bytes": spelled,
        **{name: to_arrow(mask.astype(np.bool_)) for name, mask in masks.items()},
        "rollout_logprob": _at_end(whole, _list(row, "rollout_logprobs"), pa.float32()),
        "reward": _at_end(whole, _rewards(row), pa.float64()),
        "policy_version": _at_end(whole, _versions(row, size, segments), pa.int32()),
    }
    if run is not None and update is not None:
        recorded = run.records(update, dataset).filter(
            (pl.col("trajectory_id") == trajectory_id)
            & (pl.col("step_index") == step_index)
            & (pl.col("loss_mask").list.len() == size)  # else the dataset has changed since
        )
        columns |= _recorded(recorded, whole)
    columns |= _shares(dataset, trajectory_id, step_index, whole)
    number = dataset.index.number(trajectory_id)
    begin, end = dataset.index.bounds(number)
    value = dataset.index.trajectories["return"][number]
    totals = {"prompt_tokens": num_prompt, "num_steps": end - begin}
    entries = row.column(PICTURES)[0].as_py() if PICTURES in row.column_names else None
    pictures = [entry for entry in entries or () if None not in entry.values()]
    table = pa.Table.from_arrays(list(columns.values()), list(columns))
    return arrow_response(
        table,
        **totals,
        pictures=json.dumps(pictures),
        decoded=int(vocabulary is not None),
        **{"return": math.nan if value is None else value},
    )


def _sampled_mask(num_tokens: int, segments: list[dict[str, Any]] | None) -> BoolArray:
    """[R] Mark the sampled tokens of a response: those in its segments; all without segments."""
    mask = np.full(num_tokens, segments is None)
    for segment in segments or ():
        mask[segment["start"] : segment["start"] + segment["length"]] = True
    return mask


def _padded(num_prompt: int, mask: Any) -> Any:
    return np.concatenate([np.zeros(num_prompt, np.bool_), np.asarray(mask, np.bool_)])


def _list(row: pa.Table, name: str) -> pa.Array | None:
    """Return the row's list in a column; None if it is null or the column is absent."""
    if name not in row.column_names or not row.column(name).is_valid()[0].as_py():
        return None
    return row.column(name).chunk(0).flatten()


def _at_end(num_tokens: int, values: pa.Array | None, kind: pa.DataType) -> pa.Array:
    """Pad the values of a response with nulls for its prompt; without values, all are null."""
    if values is None:
        return pa.nulls(num_tokens, kind)
    return pa.concat_arrays([pa.nulls(num_tokens - len(values), kind), values.cast(kind)])


def _rewards(row: pa.Table) -> pa.Array | None:
    """Return per-token rewards: the stored ones, or each step's reward at its last token."""
    if (stored := _list(row, "rewards")) is not None:
        return stored
    if "reward" not in row.column_names or not row.column("reward").is_valid()[0].as_py():
        return None
    return placed_rewards(row).flatten()


def _versions(
    row: pa.Table, num_tokens: int, segments: list[dict[str, Any]] | None
) -> pa.Array | None:
    """Return the policy version of each response token; the steps of a merged row may differ."""
    if (stored := _list(row, "policy_versions")) is not None:
        return stored
    if "policy_version" not in row.column_names:
        return None
    version = row.column("policy_version")[0].as_py()
    versions = np.full(num_tokens, -1 if version is None else version, np.int32)
    for segment in segments or ():
        version = segment.get("policy_version")
        if version is not None:
            versions[segment["start"] : segment["start"] + segment["length"]] = version
    return to_arrow(versions, mask=versions < 0)


def _shares(
    dataset: Dataset, trajectory_id: str, step_index: int, num_tokens: int
) -> dict[str, pa.Array]:
    """Return the tokens' shares of updates: one column for each table that contains the row."""
    columns = {}
    for column, rows in dataset.shares.items():
        of_row = rows.filter(
            (pl.col("trajectory_id") == trajectory_id) & (pl.col("step_index") == step_index)
        )
        if len(of_row):
            values = _list(of_row.select("token_shares").to_arrow(), "token_shares")
            columns[column] = _at_end(num_tokens, values, pa.float32())
    return columns


def _recorded(records: pl.DataFrame, num_tokens: int) -> dict[str, pa.Array]:
    """Return the values that an update recorded for a row; all null if it recorded none."""
    columns = {}
    for name, one in [*NUMBERS.items(), *((flag, flag) for flag in FLAGS)]:
        kind = pa.bool_() if name in FLAGS else pa.float32()
        values = _list(records[:1].select(name).to_arrow(), name) if len(records) else None
        columns[one] = _at_end(num_tokens, values, kind)
    return columns


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row of the tree.

    Attributes:
        key: trajectory_id and step_index.
        tokens: [L] prompt and response.
        ids: [L] their `identity_ids`, which tell pictures apart.
        sampled: [L] true for tokens that were sampled in this row.
        advantage: [L] advantages of its targets, NaN elsewhere; None if not recorded.
        breaks_at: First token that differs from the step that the row should continue; -1 if none.
        cause: Cause of that break; None if there is none.
        value: Return of its trajectory.
    """

    key: tuple[str, int]
    tokens: Tokens
    ids: Ids
    sampled: BoolArray
    advantage: npt.NDArray[np.float64] | None
    breaks_at: int
    cause: str | None
    value: float | None


def tree(
    dataset: Dataset, numbers: Sequence[int], run: Run | None, update: int | None
) -> dict[str, Any]:
    """Return the prefix tree of trajectories as a list of nodes, parents first.

    A node is a run of tokens shared by the same rows; either all of them were sampled, or none.

    Args:
        dataset: The dataset.
        numbers: Positions of the trajectories.
        run: A run that trained on them; None: no advantages.
        update: The update whose advantages are shown.

    Raises:
        InputError: `view_size`: the rows have more than `MAX_TOKENS` tokens.
    """
    rows = [row for row in _rows(dataset, numbers, run, update) if len(row.tokens)]
    vocabulary = dataset.token_bytes
    nodes = [_described(node, vocabulary) for node in _nodes(rows)]
    return {"nodes": nodes, "num_tokens": sum(node["end"] - node["start"] for node in nodes)}


def _rows(
    dataset: Dataset, numbers: Sequence[int], run: Run | None, update: int | None
) -> Iterator[_Row]:
    lines = dataset.index.trajectories[list(numbers)]
    num_tokens = sum(
        int(dataset.index.rows[f"num tokens: {name}"][begin:end].sum())
        for begin, end in map(dataset.index.bounds, numbers)
        for name in ("prompt", "response")
    )
    if num_tokens > MAX_TOKENS:
        finding = f"the rows have {num_tokens:,} tokens; a tree shows at most {MAX_TOKENS:,}"
        hint = "open the tree of one trajectory, or merge first: rollouts merge DS --out MERGED"
        raise InputError("view_size", dataset.name, finding, hint=hint)
    names = dataset.present(*_DIAGNOSED)
    if dataset.has("segments"):
        names = [n for n in dataset.reader.schema.names if n != "rollout_expert_indices"]
    table = pa.concat_tables([dataset.trajectory(number, names) for number in numbers])
    values = dict(lines.select("trajectory_id", "return").rows())
    causes = _causes(dataset, table)
    recorded = _advantages(dataset, run, update, list(values))
    prompts = Ragged.from_arrow(table.column("prompt_token_ids"))
    responses = Ragged.from_arrow(table.column("response_ids"))
    seen = identities_of(prompts, responses, pictures_of(table))
    spans = table.column("segments").to_pylist() if "segments" in names else [None] * table.num_rows
    keys = zip(*(table.column(n).to_pylist() for n in ("trajectory_id", "step_index")), strict=True)
    for i, key in enumerate(keys):
        prompt, response = prompts.row(i), responses.row(i)
        advantage = recorded.get(key)
        if advantage is not None and len(advantage) == len(response):
            advantage = np.concatenate([np.full(len(prompt), np.nan), advantage])
        else:
            advantage = None
        outside = np.zeros(len(prompt), np.bool_)
        breaks_at, cause = causes.get(key, (-1, None))
        yield _Row(
            key=key,
            tokens=np.concatenate([prompt, response]),
            ids=np.concatenate([part.row(i) for part in seen]),
            sampled=np.concatenate([outside, _sampled_mask(len(response), spans[i])]),
            advantage=advantage,
            breaks_at=breaks_at,
            cause=cause,
            value=values[key[0]],
        )


def _causes(dataset: Dataset, table: pa.Table) -> dict[tuple[str, int], tuple[int, str]]:
    """Find each row's first prefix break and its cause, as `rollouts drift` does."""
    breaks = diagnose(table, dataset.chat_tokenizer).breaks
    found = {
        (name, step): (at, cause)
        for name, step, at, cause in breaks.select(
            "trajectory_id", "step_index", "token_index", "cause"
        ).rows()
    }
    joined = is_joined(table)
    if not joined.any():
        return found
    # `drift` splits merged rows into steps; a merged row gets the break of its first step.
    keys = zip(*(table.column(n).to_pylist() for n in ("trajectory_id", "step_index")), strict=True)
    spans = table.column("segments").to_pylist()
    first = {}
    for key, segments in zip(keys, spans, strict=True):
        step = segments[0]["step_index"] if segments else key[1]
        if (key[0], step) in found:
            first[key] = found[key[0], step]
    return first


def _advantages(
    dataset: Dataset, run: Run | None, update: int | None, ids: list[str]
) -> dict[tuple[str, int], npt.NDArray[np.float64]]:
    if run is None or update is None:
        return {}
    columns = ["trajectory_id", "step_index", "advantages"]
    records = run.records(update, dataset, columns).filter(pl.col("trajectory_id").is_in(ids))
    return {
        (name, step): np.array(values, np.float64)
        for name, step, values in records.rows()
        if values is not None
    }


@dataclass(slots=True)
class _Node:
    number: int
    parent: int | None
    start: int
    end: int
    rows: list[_Row]
    sampled: bool
    cause: str | None


def _nodes(rows: list[_Row]) -> Iterator[_Node]:
    """Yield nodes, split where rows diverge, end or break, or sampled tokens begin or end."""
    waiting = [(0, None, part) for part in reversed(_by_token(rows, 0))]
    todo: list[tuple[int, int | None, list[_Row]]] = list(waiting)
    number = 0
    while todo:
        start, parent, passing = todo.pop()
        first = passing[0].ids[start:]
        shared = (common_prefix(first, row.ids[start:]) for row in passing[1:])
        end = start + min(shared, default=len(first))
        sampled = np.logical_or.reduce([row.sampled[start:end] for row in passing])
        cuts = {start, *(start + 1 + np.flatnonzero(sampled[1:] != sampled[:-1])).tolist()}
        cuts |= {row.breaks_at for row in passing if start < row.breaks_at < end}
        bounds = [*sorted(cuts), end]
        for begin, until in pairwise(bounds):
            cause = next((row.cause for row in passing if row.breaks_at == begin), None)
            is_sampled = bool(sampled[begin - start])
            yield _Node(number, parent, begin, until, passing, is_sampled, cause)
            parent, number = number, number + 1
        going_on = [row for row in passing if len(row.tokens) > end]
        todo += [(end, parent, part) for part in reversed(_by_token(going_on, end))]


def _by_token(rows: list[_Row], at: int) -> list[list[_Row]]:
    parts: dict[int, list[_Row]] = {}
    for row in rows:
        parts.setdefault(int(row.ids[at]), []).append(row)
    return list(parts.values())


def _described(node: _Node, vocabulary: TokenBytes | None) -> dict[str, Any]:
    """Describe a node with JSON values; rows that sampled its first token come first."""
    rows = sorted(node.rows, key=lambda row: not row.sampled[node.start])
    values = {row.key[0]: row.value for row in node.rows}
    known = [value for value in values.values() if value is not None and np.isfinite(value)]
    return {
        "id": node.number,
        "parent": node.parent,
        "start": node.start,
        "end": node.end,
        "rows": [list(row.key) for row in rows[:MAX_ROWS]],
        "num_rows": len(rows),
        "num_trajectories": len(values),
        "return": sum(known) / len(known) if known else None,
        "advantage": _mean_advantage(node),
        "sampled": node.sampled,
        "text": _text(node.rows[0].tokens[node.start : node.end], vocabulary),
        "cause": node.cause,
    }


def _mean_advantage(node: _Node) -> float | None:
    parts = [r.advantage[node.start : node.end] for r in node.rows if r.advantage is not None]
    values = np.concatenate(parts) if parts else np.zeros(0)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _text(ids: Tokens, vocabulary: TokenBytes | None) -> str:
    if vocabulary is None:
        more = " ..." if len(ids) > _SHOWN_IDS else ""
        return " ".join(map(str, ids[:_SHOWN_IDS].tolist())) + more
    return whole_characters(vocabulary.text(ids[:SHOWN_CHARS])[:SHOWN_CHARS])
