"""Conversion of trajectories' steps to rows of the rollout table.

In the column `pictures` are the parts of a row's messages that are not text, and their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pyarrow as pa

from rollout_io.dataset.blobs import Blobs
from rollout_io.dataset.storage import Location
from rollout_io.formats.base import Ids, Step, note
from rollout_io.formats.parsing.media import stored_content, stored_messages, storing
from rollout_io.formats.parsing.tokens import parse_ids, usage_differs
from schemas.columns import COLUMN_BY_NAME, COLUMNS, SEGMENT_FIELDS, TASK, Column
from schemas.errors import InputError
from schemas.messages import RETOKENIZED, media_in
from schemas.ragged import (
    IntArray,
    Ragged,
    list_lengths,
    offsets_of,
    ragged_array,
    ranges,
    routing_array,
)

if TYPE_CHECKING:
    from rollout_io.retokenize import ChatTokenizer
    from rollout_io.retokenize.processor import Expansion


_OF_RUN = frozenset({"instance_id", "repetition_id", "trajectory_id", "error"})
_NOT_READ = frozenset({"rewards", TASK})


@dataclass(kw_only=True, slots=True)
class Settled:
    """A trajectory ready to be written: named, with its outcome in its steps."""

    instance_id: str
    repetition_id: int
    steps: Sequence[Step]
    error: str | None = None
    user_values: Mapping[str, str] = field(default_factory=dict)

    @property
    def trajectory_id(self) -> str:
        """`{instance_id}_{repetition_id}`."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(slots=True)
class _Rows:
    """T trajectories as rows of a table: N steps, [T] numbers of steps, and column `response_ids`."""

    trajectories: Sequence[Settled]
    steps: Sequence[Step]
    lengths: IntArray
    responses: pa.Array

    @classmethod
    def of(cls, batch: Sequence[Settled]) -> _Rows:
        steps = [step for t in batch for step in t.steps]
        lengths = np.array([len(t.steps) for t in batch], np.int64)
        kind = COLUMN_BY_NAME["response_ids"].type
        return cls(batch, steps, lengths, _ids([s.response_ids for s in steps], kind))

    def repeated(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        """Return a column that repeats each trajectory's value for all its rows."""
        index = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return pa.array(values, kind).take(pa.array(index))


def table_of(batch: Sequence[Settled]) -> pa.Table:
    """Build a table with one row per step; optional and user columns exist if a step has a value."""
    rows = _Rows.of(batch)
    arrays = {c.name: _column(c, rows) for c in COLUMNS if c.name not in _NOT_READ}
    _check_counts(rows.steps, 0, arrays["prompt_token_ids"])
    _check_counts(rows.steps, 1, rows.responses)
    columns: dict[str, pa.Array] = {n: array for n, array in arrays.items() if array is not None}
    for name in sorted({name for t in batch for name in t.user_values}):
        columns[name] = rows.repeated([t.user_values.get(name) for t in batch], pa.string())
    kinds = {name: value.type for step in rows.steps for name, value in step.columns.items()}
    for name, kind in kinds.items():
        if name in columns:
            where, hint = rows.steps[0].source, "rename it in the rewards"
            finding = f"the log and the rewards both give a column {name!r}"
            raise InputError("free_name", where, finding, hint=hint)
        values = [step.columns.get(name) for step in rows.steps]
        columns[name] = pa.array([None if v is None else v.as_py() for v in values], kind)
    fields = [
        pa.field(n, a.type, n not in COLUMN_BY_NAME or COLUMN_BY_NAME[n].nullable)
        for n, a in columns.items()
    ]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def _check_counts(steps: Sequence[Step], which: int, ids: pa.Array | None) -> None:
    """Compare the numbers of ids with the counts that the engine reported, if any."""
    counted = [step.num_counted[which] for step in steps]
    if ids is None or not any(counted):
        return
    lengths = list_lengths(ids)
    stated = np.array([-1 if number is None else number for number in counted])
    differs = np.flatnonzero((stated != lengths) & (stated >= 0) & (lengths > 0))
    if len(differs):
        at, what = int(differs[0]), ("prompt", "response")[which]
        raise usage_differs(what, int(lengths[at]), int(stated[at]), steps[at].source)


def _column(column: Column, rows: _Rows) -> pa.Array | None:
    """Build a column; None if it is optional and no step has a value."""
    if column.name in _MADE:
        return _MADE[column.name](rows, column.type)
    value = attrgetter(column.name)
    if column.name in _OF_RUN:
        array = rows.repeated(list(map(value, rows.trajectories)), column.type)
    else:
        array = pa.array(list(map(value, rows.steps)), column.type)
    return None if column.nullable and array.null_count == len(array) else array


def _ids(rows: Sequence[Ids], kind: pa.DataType) -> pa.Array:
    texts = [row for row in rows if isinstance(row, bytes)]
    if not texts:
        return ragged_array([row for row in rows if not isinstance(row, bytes)], kind)
    values, lengths = parse_ids(texts)
    if len(texts) == len(rows):
        offsets = offsets_of(lengths)
        return Ragged(values, offsets, np.ones(len(rows), np.bool_)).to_arrow(kind.value_type)
    parsed = iter(np.split(values, np.cumsum(lengths)[:-1]))
    return ragged_array([next(parsed) if isinstance(r, bytes) else r for r in rows], kind)


def _logprobs(rows: _Rows, kind: pa.DataType) -> pa.Array | None:
    values = [s.rollout_logprobs for s in rows.steps]
    return None if all(row is None for row in values) else ragged_array(values, kind)


def _versions(rows: _Rows, kind: pa.DataType) -> pa.Array | None:
    """Build `policy_versions`; if a step has them, all steps get them, so that steps can be merged."""
    if all(s.policy_versions is None for s in rows.steps):
        return None
    versions = [
        np.full(n, s.policy_version, np.int32)
        if s.policy_versions is None and s.policy_version is not None
        else s.policy_versions
        for s, n in zip(rows.steps, list_lengths(rows.responses).tolist(), strict=True)
    ]
    return ragged_array(versions, kind)


def _loss_masks(rows: _Rows, kind: pa.DataType) -> pa.Array:
    lengths, steps = list_lengths(rows.responses), rows.steps
    if all(s.loss_mask is None for s in steps):
        trains = np.repeat(np.array([s.trains for s in steps], np.bool_), lengths)
        valid = np.ones(len(steps), np.bool_)
        return Ragged(trains, offsets_of(lengths), valid).to_arrow(kind.value_type)
    masks = [
        np.full(n, s.trains) if s.loss_mask is None else s.loss_mask & s.trains
        for s, n in zip(steps, lengths.tolist(), strict=True)
    ]
    return ragged_array(masks, kind)


def _metrics(rows: _Rows, kind: pa.DataType) -> pa.Array | None:
    values = [s.metrics and list(s.metrics.items()) for s in rows.steps]
    return pa.array(values, kind) if any(values) else None


def _segments(rows: _Rows, kind: pa.DataType) -> pa.Array | None:
    if all(s.spans is None for s in rows.steps):
        return None
    names = [f.name for f in SEGMENT_FIELDS]
    segments: list[list[dict[str, Any]] | None] = [
        None
        if s.spans is None
        else [dict(zip(names, (*span, i), strict=True)) for i, span in enumerate(s.spans)]
        for s in rows.steps
    ]
    return pa.array(segments, kind)


def _routes(rows: _Rows, _: pa.DataType) -> pa.Array | None:
    routes = [step.rollout_expert_indices for step in rows.steps]
    shapes = {route.shape[1:] for route in routes if route is not None}
    if len(shapes) > 1:
        shown = f"{sorted(shapes)} (layers, experts per token)"
        raise ValueError(f"the calls have different routing: {shown}")
    return routing_array(routes, *shapes.pop()) if shapes else None


def _last_flags(rows: _Rows, kind: pa.DataType) -> pa.Array:
    is_last = np.zeros(len(rows.steps), np.bool_)
    is_last[np.cumsum(rows.lengths) - 1] = True
    return pa.array(is_last, kind)


_MADE: dict[str, Callable[[_Rows, pa.DataType], pa.Array | None]] = {
    "prompt_token_ids": lambda rows, kind: _ids([s.prompt_token_ids for s in rows.steps], kind),
    "response_ids": lambda rows, _: rows.responses,
    "loss_mask": _loss_masks,
    "rollout_logprobs": _logprobs,
    # Built even if it is all null, so that filters can always refer to it.
    "reward": lambda rows, kind: pa.array([s.reward for s in rows.steps], kind),
    "metrics": _metrics,
    "step_index": lambda rows, kind: pa.array(
        ranges(np.zeros_like(rows.lengths), rows.lengths), kind
    ),
    "is_last_step": _last_flags,
    "segments": _segments,
    "rollout_expert_indices": _routes,
    "policy_versions": _versions,
}


Part = Mapping[str, Any]
Span = tuple[int | None, int | None]

STORED = "images and other parts stored beside the dataset, in its .blobs"
_LEFT = {
    "url": "images and other parts that the log has only as a URL, which is not fetched",
    "path": "images and other parts in files that do not exist or have no known type",
    "file": "images and other parts that only the API has, under an id",
    "base64": "images and other parts with invalid base64, kept as they are",
}
CHECKED = "images whose tokens are those of the image processor"
RUNS = "images at runs of the placeholder, not checked by an image processor"
UNPLACED = "images whose tokens are unknown"


def stored_in(folder: str | None) -> AbstractContextManager[None]:
    """Store the pictures of all runs that are read in this block in a directory, if there is one."""
    return nullcontext() if folder is None else storing(Blobs(Location.of(folder)))


def entries_of(
    parts: Sequence[Part], step: Step, tokenizer: Callable[[], ChatTokenizer | None]
) -> list[dict[str, Any]]:
    """Return the entries of the column `pictures` of a row, and count what is stored and what is not.

    Raises:
        InputError: `picture_tokens`: the row's tokens are not those of the tokenizer's image
            processor; `picture_file`: a picture cannot be decoded.
    """
    images = [part for part in parts if part["type"] == "image"]
    spans = iter(_spans(images, step, tokenizer()) if images else [])
    entries = []
    for part in parts:
        note(STORED if "blob" in part else _LEFT[_left_as(part["source"])])
        start, length = next(spans) if part["type"] == "image" else (None, None)
        entries.append({"sha256": part.get("blob"), "start": start, "length": length})
    return entries


def _spans(images: Sequence[Part], step: Step, tokenizer: ChatTokenizer | None) -> list[Span]:
    expansions = None if tokenizer is None else expansions_of(images, tokenizer, step.source)
    unknown: list[Span] = [(None, None)] * len(images)
    spans = unknown
    if tokenizer is not None and expansions is not None:
        from rollout_io.retokenize.processor import spans_in

        assert tokenizer.processor is not None
        spans = [*spans_in(_ids_of(step), expansions, tokenizer.processor.pads, step.source)]
        note(CHECKED, len(images))
    elif tokenizer is not None and step.token_source != RETOKENIZED:
        spans = _runs(tokenizer.placeholder_id, _ids_of(step), len(images)) or unknown
        note(RUNS, 0 if spans is unknown else len(images))
    note(UNPLACED, len(images) if spans is unknown else 0)
    return spans


def expansions_of(
    images: Sequence[Part], tokenizer: ChatTokenizer, where: str
) -> list[Expansion] | None:
    """Return what stands for each picture; None without a processor, or if a file is unknown."""
    contents = [stored_content(part["blob"]) if "blob" in part else None for part in images]
    if any(content is None for content in contents) or tokenizer.processor is None:
        return None
    names = (f"{where}, picture {part['blob'][:15]}" for part in images)
    pairs = zip(contents, names, strict=True)
    return [tokenizer.processor.expansion(c, name) for c, name in pairs if c is not None]


def _runs(token: int | None, ids: np.ndarray, num_images: int) -> list[Span] | None:
    """Return the runs of a placeholder; None if there are more or fewer than pictures."""
    bounds = np.flatnonzero(np.diff(np.pad(ids == token, 1).astype(np.int8)))
    runs = bounds.reshape(-1, 2).tolist()
    return [(a, b - a) for a, b in runs] if len(runs) == num_images else None


def with_pictures(step: Step, tokenizer: Callable[[], ChatTokenizer | None]) -> Step:
    """Return a step with exact ids, its pictures in the store, and its column `pictures`."""
    step.messages = stored_messages(step.messages)
    if step.messages is None or ('"blob"' not in step.messages and '"source"' not in step.messages):
        return step
    try:
        messages = msgspec.json.decode(step.messages)
    except (msgspec.DecodeError, RecursionError):
        return step
    listed = messages if isinstance(messages, list) else []
    parts = [part for m in listed if isinstance(m, dict) for part in _media_within(m)]
    if parts:
        step.pictures = entries_of(parts, step, tokenizer)
    return step


def _media_within(message: Part) -> list[Part]:
    """Return the parts of a message that are not text, those of tool results included."""
    media = [part for part in media_in(message) if "blob" in part or _has_source(part)]
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and "content" in part:
            media += _media_within(part)
    return media


def _has_source(part: Part) -> bool:
    source = part["source"]
    return isinstance(source, dict) and source.get("type") in {"url", "file", "base64"}


def _left_as(source: Part) -> str:
    if source["type"] == "url" and urlsplit(source.get("url", "")).scheme in {"", "file"}:
        return "path"
    return str(source["type"])


def _ids_of(step: Step) -> np.ndarray:
    """[L] Return the tokens of a step's prompt + response."""
    return np.concatenate([_parsed(step.prompt_token_ids), _parsed(step.response_ids)])


def _parsed(ids: Ids) -> np.ndarray:
    return parse_ids([ids])[0] if isinstance(ids, bytes) else np.asarray(ids)
