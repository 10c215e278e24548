"""Rows of the rollout table from the steps of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_io.adapters import Ids, Step
from rollout_io.arrays import ragged_array, routing_array
from rollout_io.logs.tokens import num_ids, parse_ids
from schemas.columns import COLUMN_BY_NAME, COLUMNS, SEGMENT_FIELDS
from schemas.ragged import Ragged, offsets_of

_OF_RUN = frozenset({"instance_id", "repetition_id", "trajectory_id", "error"})
_NOT_READ = frozenset({"rewards"})


@dataclass(kw_only=True, slots=True)
class Settled:
    """A trajectory as it is written: named, its outcome in its steps."""

    instance_id: str
    repetition_id: int
    steps: Sequence[Step]
    error: str | None = None
    user_values: Mapping[str, str] = field(default_factory=dict)

    @property
    def trajectory_id(self) -> str:
        """`{instance_id}_{repetition_id}`."""
        return f"{self.instance_id}_{self.repetition_id}"


def table_of(batch: Sequence[Settled]) -> pa.Table:
    """One row per step; optional columns, and the user's, where any step has a value.

    Raises:
        ArithmeticError, ValueError: A value that its column cannot hold, or routes of several models.
    """
    steps = [step for t in batch for step in t.steps]
    made = {c.name: _column(c.name, batch, steps) for c in COLUMNS if c.name not in _NOT_READ}
    columns: dict[str, pa.Array] = {n: array for n, array in made.items() if array is not None}
    for name in sorted({name for t in batch for name in t.user_values}):
        values = [t.user_values.get(name) for t in batch for _ in t.steps]
        columns[name] = pa.array(values, pa.string())
    fields = [
        pa.field(n, a.type, n not in COLUMN_BY_NAME or COLUMN_BY_NAME[n].nullable)
        for n, a in columns.items()
    ]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def _column(name: str, batch: Sequence[Settled], steps: Sequence[Step]) -> pa.Array | None:
    """A column; None where it is optional and no step has a value."""
    column = COLUMN_BY_NAME[name]
    if name in _MADE:
        return _MADE[name](batch, steps, column.type)
    if name in _OF_RUN:
        values = [value for t in batch for value in [getattr(t, name)] * len(t.steps)]
    else:
        values = list(map(attrgetter(name), steps))
    if column.nullable and values.count(None) == len(values):
        return None
    return pa.array(values, column.type)


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


def _prompts(_: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array:
    return _ids([s.prompt_token_ids for s in steps], kind)


def _responses(_: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array:
    return _ids([s.response_ids for s in steps], kind)


def _logprobs(_: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array | None:
    rows = [s.rollout_logprobs for s in steps]
    return None if all(row is None for row in rows) else ragged_array(rows, kind)


def _loss_masks(_: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array:
    lengths = np.array([num_ids(s.response_ids) for s in steps], np.int64)
    if all(s.loss_mask is None for s in steps):
        trains = np.repeat(np.array([s.trains for s in steps], np.bool_), lengths)
        valid = np.ones(len(steps), np.bool_)
        return Ragged(trains, offsets_of(lengths), valid).to_arrow(kind.value_type)
    rows = [
        np.full(n, s.trains) if s.loss_mask is None else s.loss_mask & s.trains
        for s, n in zip(steps, lengths.tolist(), strict=True)
    ]
    return ragged_array(rows, kind)


def _rewards(batch: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array | None:
    """Null throughout where a run failed: a failed run has a reward, which is unknown."""
    values = [s.reward for s in steps]
    is_absent = values.count(None) == len(values) and all(t.error is None for t in batch)
    return None if is_absent else pa.array(values, kind)


def _metrics(_: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array | None:
    values = [s.metrics and list(s.metrics.items()) for s in steps]
    return pa.array(values, kind) if any(values) else None


def _step_indices(batch: Sequence[Settled], _: Sequence[Step], kind: pa.DataType) -> pa.Array:
    return pa.array([i for t in batch for i in range(len(t.steps))], kind)


def _last_flags(batch: Sequence[Settled], _: Sequence[Step], kind: pa.DataType) -> pa.Array:
    return pa.array([i == len(t.steps) - 1 for t in batch for i in range(len(t.steps))], kind)


def _segments(_: Sequence[Settled], steps: Sequence[Step], kind: pa.DataType) -> pa.Array | None:
    if all(s.spans is None for s in steps):
        return None
    names = [f.name for f in SEGMENT_FIELDS]
    rows: list[list[dict[str, Any]] | None] = [
        None
        if s.spans is None
        else [dict(zip(names, (*span, i), strict=True)) for i, span in enumerate(s.spans)]
        for s in steps
    ]
    return pa.array(rows, kind)


def _routes(_: Sequence[Settled], steps: Sequence[Step], __: pa.DataType) -> pa.Array | None:
    routes = [step.rollout_expert_indices for step in steps]
    shapes = {route.shape[1:] for route in routes if route is not None}
    if len(shapes) > 1:
        raise ValueError(f"routing of several models: {sorted(shapes)} (layers, experts a token)")
    return routing_array(routes, *shapes.pop()) if shapes else None


_MADE = {
    "prompt_token_ids": _prompts,
    "response_ids": _responses,
    "loss_mask": _loss_masks,
    "rollout_logprobs": _logprobs,
    "reward": _rewards,
    "metrics": _metrics,
    "step_index": _step_indices,
    "is_last_step": _last_flags,
    "segments": _segments,
    "rollout_expert_indices": _routes,
}
