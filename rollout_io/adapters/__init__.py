"""Adapters: harness logs in, whole trajectories as tables out.

An adapter is an `Adapter`, registered as an entry point of the group `rollout_io.adapters` under the
name that `rollouts convert --format` takes. What adapters share is here: the two records a log is
read into, and the way from them to a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.columns import COLUMN_BY_NAME, COLUMNS, PREFIX_FIELDS, routing_type
from schemas.errors import RolloutError
from schemas.ragged import Ragged

Progress = Callable[[int], object]
"""Called with the bytes read since the last call; each input byte counts twice in all, for the log
is read once to check it and once to convert it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One log format.

    Attributes:
        summary: One line: what writes the format.
        recognizes: Whether a file or directory is of this format, from its content. Called with
            any file or directory there is, not with a pipe: must be quick and must not raise.
        read: `read(paths, *, rewards=None, progress=None)` gives an iterator of tables, each of
            whole trajectories, all with one schema. Raises `RolloutError` for bad input when it is
            called, before it yields anything. `rewards` is a JSONL file of outcomes that win over
            those of the log; an adapter that has no use for it refuses it. What is known of the
            log as a whole may be in the metadata of the tables' schema, as JSON under keys that
            begin with `ABOUT`: it goes to the history of the dataset.
    """

    summary: str
    recognizes: Callable[[Path], bool]
    read: Callable[..., Iterator[pa.Table]]


ABOUT = "rollout_io.log."
BATCH_TOKENS = 4_000_000
RESERVED_NAMES = frozenset(COLUMN_BY_NAME) | {f.name for f in PREFIX_FIELDS}

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(kw_only=True, slots=True)
class Step:
    """One LLM call, or one of its choices.

    Attributes:
        source: File and position it was read from.
        prompt_token_ids: [P] int32.
        response_ids: [R] int32.
        rollout_logprobs: [R] float32 nats, or None.
        rollout_expert_indices: [tokens, layers, topk] int16, or None.
        trains: Whether the loss mask is true; false where the harness says not to train on it.
        others: As the columns of the same name.
    """

    source: str
    prompt_token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    response_ids: npt.NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    rollout_logprobs: npt.NDArray[np.float32] | None = None
    rollout_expert_indices: npt.NDArray[np.int16] | None = None
    trains: bool = True
    reward: float | None = None
    stop_reason: str | None = None
    policy_version: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    agent: str | None = None
    messages: str | None = None
    response_text: str | None = None
    metrics: dict[str, float] | None = None


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """All steps of one run; a failed one has `error` set and may hold a single empty step."""

    instance_id: str
    repetition_id: int
    steps: Sequence[Step]
    error: str | None = None
    user_values: Mapping[str, str] = field(default_factory=dict)

    @property
    def trajectory_id(self) -> str:
        """`{instance_id}_{repetition_id}`."""
        return f"{self.instance_id}_{self.repetition_id}"


def tables(
    trajectories: Iterable[Trajectory],
    optional: Iterable[str],
    user_columns: Sequence[str] = (),
    routing: tuple[int, int] | None = None,
) -> Iterator[pa.Table]:
    """Tables of whole trajectories, of about `BATCH_TOKENS` tokens each.

    Args:
        trajectories: In the order of the rows.
        optional: Nullable columns to include (`rollout_logprobs`, `agent`, ...).
        user_columns: String columns to include, from `Trajectory.user_values`.
        routing: (layers, topk) of `rollout_expert_indices`; None: no such column.
    """
    names = [c.name for c in COLUMNS if not c.nullable or c.name in set(optional)]
    batch: list[Trajectory] = []
    num_tokens = 0
    for trajectory in trajectories:
        batch.append(trajectory)
        num_tokens += sum(len(s.prompt_token_ids) + len(s.response_ids) for s in trajectory.steps)
        if num_tokens >= BATCH_TOKENS:
            yield _table(batch, names, user_columns, routing)
            batch, num_tokens = [], 0
    if batch:
        yield _table(batch, names, user_columns, routing)


def _table(
    batch: Sequence[Trajectory],
    names: Sequence[str],
    user_columns: Sequence[str],
    routing: tuple[int, int] | None,
) -> pa.Table:
    columns: dict[str, pa.Array] = {name: _column(batch, name) for name in names}
    if routing is not None:
        routes = [step.rollout_expert_indices for t in batch for step in t.steps]
        columns["rollout_expert_indices"] = routing_array(routes, *routing)
    for name in user_columns:
        values = [t.user_values.get(name) for t in batch for _ in t.steps]
        columns[name] = pa.array(values, pa.string())
    fields = [
        pa.field(n, a.type, n not in COLUMN_BY_NAME or COLUMN_BY_NAME[n].nullable)
        for n, a in columns.items()
    ]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


def _column(batch: Sequence[Trajectory], name: str) -> pa.Array:
    kind = COLUMN_BY_NAME[name].type
    steps = [step for t in batch for step in t.steps]
    if name == "loss_mask":
        return ragged_array([np.full(len(s.response_ids), s.trains) for s in steps], kind)
    if name in {"prompt_token_ids", "response_ids", "rollout_logprobs"}:
        return ragged_array([getattr(s, name) for s in steps], kind)
    if name == "metrics":
        return pa.array([s.metrics and list(s.metrics.items()) for s in steps], kind)
    if name == "token_source":
        return pa.array(["engine"] * len(steps), kind)
    if name == "step_index":
        return pa.array([i for t in batch for i in range(len(t.steps))], kind)
    if name == "is_last_step":
        last = [i == len(t.steps) - 1 for t in batch for i in range(len(t.steps))]
        return pa.array(last, kind)
    if name in {"instance_id", "repetition_id", "trajectory_id", "error"}:
        return pa.array([getattr(t, name) for t in batch for _ in t.steps], kind)
    return pa.array([getattr(s, name) for s in steps], kind)


def ragged_array(rows: Sequence[npt.NDArray[Any] | None], kind: pa.DataType) -> pa.Array:
    """A list array of type `kind` from one 1-D array per row; None makes a null."""
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    known = [row for row in rows if row is not None]
    values = np.concatenate(known) if known else np.zeros(0, kind.value_type.to_pandas_dtype())
    valid = np.array([row is not None for row in rows], np.bool_)
    return Ragged(values, offsets, valid).to_arrow(kind.value_type)


def routing_array(rows: Sequence[npt.NDArray[Any] | None], num_layers: int, topk: int) -> pa.Array:
    """`rollout_expert_indices` from one [tokens, num_layers, topk] array per row; None: a null."""
    flat = [np.zeros(0, np.int16), *(row.reshape(-1) for row in rows if row is not None)]
    values = pa.array(np.concatenate(flat).astype(np.int16), pa.int16())
    values = pa.FixedSizeListArray.from_arrays(values, topk)
    values = pa.FixedSizeListArray.from_arrays(values, num_layers)
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = pa.array([row is None for row in rows])
    kind = routing_type(num_layers, topk)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=mask)


def split_session(session: str, where: str) -> tuple[str, int]:
    """Instance and repetition of "instance/repetition"; the instance may hold slashes.

    Example:
        >>> split_session("math/train/12/3", "a.jsonl:1")
        ('math/train/12', 3)
    """
    instance_id, _, repetition = session.rpartition("/")
    if not instance_id or not re.fullmatch(r"0|[1-9][0-9]{0,8}", repetition):
        expected = "'instance/repetition', the repetition a number from 0"
        hint = "number the attempts at each instance: shop-1/0, shop-1/1, ..."
        raise RolloutError("session_name", where, repr(session), expected, hint)
    return instance_id, int(repetition)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sort key under which shop-2 comes before shop-10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(p) if i % 2 else p for i, p in enumerate(parts)], name


def refuse_repeated(paths: Sequence[str | Path]) -> None:
    """Refuse a log that is given twice, under whatever name."""
    known: set[Path] = set()
    for path in paths:
        resolved = Path(path).resolve()
        if resolved in known:
            got, hint = "one log given twice", "give each file once"
            raise RolloutError("duplicate_input", str(path), got, "each call once", hint)
        known.add(resolved)


def raise_first(errors: Sequence[RolloutError]) -> NoReturn:
    """Raise the first error, saying how many more records are bad."""
    e = errors[0]
    others = f" (and {len(errors) - 1} more bad records)" if len(errors) > 1 else ""
    raise RolloutError(e.rule, e.where, e.got, e.expected + others, e.hint)
