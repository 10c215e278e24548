"""The fields of SkyRL's GeneratorOutput: types, rollout metrics, optional fields, empty rows.

The `rollout_metrics` of generators are one JSON object per group, in the column `rollout_metrics`.
Optional fields named like a column of the rollout table are converted to that column, newer fields
of SkyRL and unknown fields to user columns. Rows whose response is empty have nothing to train on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import numpy as np
import pyarrow as pa

from rollout_io.formats.parsing.tokens import array_of
from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError, InvariantError, RolloutError, count
from schemas.ragged import BoolArray
from schemas.rules import RULES


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryID:
    """Ids of a GeneratorOutput row's trajectory; equal to any object with the same ids, as in SkyRL.

    Attributes:
        instance_id: The task; its trajectories form a group.
        repetition_id: Index of the attempt, from 0.

    Example:
        >>> TrajectoryID("shop-1", 0).to_string()
        'shop-1_0'
    """

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """Return `{instance_id}_{repetition_id}`."""
        return f"{self.instance_id}_{self.repetition_id}"

    def __eq__(self, other: object) -> bool:
        identity = self.instance_id, self.repetition_id
        return identity == tuple(getattr(other, f.name, None) for f in fields(self))

    def __hash__(self) -> int:
        return hash((self.instance_id, self.repetition_id))


class GeneratorOutput(TypedDict, total=False):
    """Output of a SkyRL generator: lists with one entry per row of P prompt and R response tokens.

    The first four fields are required. A row is a trajectory or, with `is_last_step`, one of its
    steps.
    """

    prompt_token_ids: Sequence[Sequence[int]]
    """[N][P] ids."""
    response_ids: Sequence[Sequence[int]]
    """[N][R] ids."""
    rewards: Sequence[float] | Sequence[Sequence[float]]
    """[N] one per row, or [N][R] one per response token; never mixed."""
    loss_masks: Sequence[Sequence[int]]
    """[N][R] 1 where the token is trained on, else 0."""
    stop_reasons: Sequence[str | None] | None
    """[N] reasons why generation ended."""
    rollout_metrics: Mapping[str, Any] | None
    """Metrics of the entire output."""
    rollout_logprobs: Sequence[Sequence[float]] | None
    """[N][R] nats, 0 at tokens that were not sampled."""
    trajectory_ids: Sequence[TrajectoryID] | None
    """[N] objects or mappings with `instance_id` and `repetition_id`."""
    trajectory_generation_times: Sequence[float | None] | None
    """[N] times in seconds."""
    rollout_expert_indices: Sequence[Any] | None
    """[N] arrays [tokens, layers, topk] of the experts of the leading tokens of prompt and response."""
    is_last_step: Sequence[bool] | None
    """[N] true for the last step of a trajectory; only in step-wise outputs."""
    env_metrics: Sequence[Mapping[str, float] | None] | None
    """[N] metrics of the environment by name."""
    trajectory_time_splits: Mapping[str, Sequence[float | None]] | None
    """{name: [N]} parts of the generation times in seconds; since SkyRL 0.4."""
    rollout_sample_support: Sequence[Any] | None
    """[N] arrays [R, k] of token ids that the sampler could draw, padded with -1; since SkyRL 0.4."""
    token_source: Sequence[str] | None
    """[N] `engine` (exact ids) or `retokenized` (from text); SkyRL ignores it. Missing: `engine`."""


ROLLOUT_METRICS = "rollout_metrics"


def to_json(metrics: Any) -> tuple[str | None, list[str]]:
    """Return the finite numbers of `rollout_metrics` as JSON, if any, and the names of other values."""
    if metrics is None:
        return None, []
    if not isinstance(metrics, Mapping):
        return None, [ROLLOUT_METRICS]
    numbers: dict[str, float] = {}
    others = []
    for key, value in metrics.items():
        name, number = str(key).encode(errors="replace").decode(), _number(value)
        if number is None:
            others.append(name)
        else:
            numbers[name] = number
    return json.dumps(numbers) if numbers else None, others


def aggregated(objects: Iterable[str]) -> dict[str, float]:
    """Combine the metrics of several groups as SkyRL does, which decides by the name.

    A name with `avg` or `mean` is averaged, with `min` or `max` the extreme is taken, and all other
    metrics are added.

    Example:
        >>> aggregated(['{"avg_x": 1, "calls": 2}', '{"avg_x": 2, "calls": 3}'])
        {'avg_x': 1.5, 'calls': 5.0}
    """
    values_of: dict[str, list[float]] = {}
    for text in objects:
        for name, value in json.loads(text).items():
            values_of.setdefault(name, []).append(float(value))
    return {name: _how(name)(values) for name, values in values_of.items()}


def _how(name: str) -> Callable[[Sequence[float]], float]:
    if "avg" in name or "mean" in name:
        return lambda values: math.fsum(values) / len(values)
    if "min" in name:
        return min
    return max if "max" in name else math.fsum


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


TIMES, SPLITS = "trajectory_generation_times", "trajectory_time_splits"
SUPPORT = "rollout_sample_support"
USER_FIELDS = (TIMES, SPLITS)
"""Fields of SkyRL that become user columns of the same names."""

COLUMN_FIELDS = (
    *("policy_version", "temperature", "top_p", "top_k", "sampling_extra", "agent"),
    *("token_source", "error", "messages", "response_text"),
)
"""Columns that a GeneratorOutput may have as fields of the same names, though SkyRL has none."""

REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
OPTIONAL = tuple(
    name
    for name in GeneratorOutput.__annotations__
    if name not in {*REQUIRED, "rollout_metrics", "token_source"}
)

_DROP = 'drop the field: other_fields="drop" (--other-fields drop)'
OtherFields = Literal["refuse", "keep", "drop"]
"""Handling of fields that match no column of a rollout table."""


def unknown_fields(output: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that have a value but match no column."""
    names = {*REQUIRED, *OPTIONAL, *COLUMN_FIELDS, "rollout_metrics"}
    return [name for name, value in output.items() if value is not None and name not in names]


def number(value: Any, name: str, row: int) -> float:
    """Return a scalar as a float."""
    array = array_of(value)
    if array.ndim != 0 or array.dtype.kind not in "fiub":
        raise field_error("field_kind", name, repr(value), "a number", row=row)
    return float(array)


def user_columns(output: Mapping[str, Any], others: Sequence[str]) -> dict[str, pa.Array]:
    """Return the user columns: those of SkyRL's fields, and the unknown fields in `others`."""
    columns = {}
    if output.get(TIMES) is not None:
        times = [None if t is None else number(t, TIMES, r) for r, t in enumerate(output[TIMES])]
        columns[TIMES] = pa.array(times, pa.float64())
    named = [SPLITS] if output.get(SPLITS) is not None else []
    for name in (*named, *others):
        if name in COLUMN_BY_NAME:
            finding = f"the rollout table computes its column `{name}` from SkyRL's fields"
            hint = 'rename the field, or drop it: other_fields="drop" (--other-fields drop)'
            raise field_error("fields", name, finding, hint=hint)
        columns[name] = _kept(output, name)
    return columns


def _kept(output: Mapping[str, Any], name: str) -> pa.Array:
    """Return a field as a column; a mapping of lists with one entry per row becomes structs."""
    field, num_rows = output[name], len(output["response_ids"])
    columns = dict(field) if isinstance(field, Mapping) else {name: field}
    for value in columns.values():
        length = len(value) if isinstance(value, list | tuple | np.ndarray) else None
        if length != num_rows:
            kind = f"a value of type {type(value).__name__}"
            finding = kind if length is None else f"a list of length {length}"
            expected = f"a list of length {num_rows}, as in response_ids"
            raise field_error("fields_align", name, finding, expected, _DROP)
    try:
        arrays = {
            str(key): pa.array([v.tolist() if isinstance(v, np.ndarray) else v for v in value])
            for key, value in columns.items()
        }
    except (pa.ArrowException, TypeError, ValueError):
        raise field_error(
            "field_kind", name, "the values have different types", hint=_DROP
        ) from None
    if isinstance(field, Mapping) and arrays:
        return pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
    return arrays.get(name, pa.nulls(num_rows))


def field_error(
    rule: str,
    name: str,
    got: str,
    expected: str = "",
    hint: str | None = None,
    row: int | None = None,
) -> RolloutError:
    """Return the error for a field, or for one of its rows."""
    where = f"GeneratorOutput, {name}" + ("" if row is None else f"[{row}]")
    kind = InvariantError if rule in RULES else InputError
    return kind(rule, where, got, expected, hint)


NO_RESPONSE = "failed: the response is empty"
_NO_REWARD = "failed: the reward of a step with an empty response cannot be moved to another step"


def without_empty_rows(arrays: dict[str, Any]) -> tuple[BoolArray, list[str]]:
    """Return a mask of the rows to keep, and warnings; adapt the columns of these rows in place.

    The row's reward, and the metrics of a last row, move to the row before it, so that the return of the trajectory is the same
    whether it is the last reward or the sum. If no move achieves that, or if no row remains, the
    trajectory fails; other trajectories are unaffected.
    """
    num_rows = len(arrays["is_last_step"])
    errors: list[str | None] = arrays.get("error") or [None] * num_rows
    lengths = [len(ids) for ids in arrays["response_ids"]]
    is_empty = [n == 0 and error is None for n, error in zip(lengths, errors, strict=True)]
    keep = np.ones(num_rows, np.bool_)
    if not any(is_empty):
        return keep, []
    num_failed = 0
    for rows in _trajectories(arrays["is_last_step"]):
        if not any(is_empty[row] for row in rows):
            continue
        filled_rows = [row for row in rows if not is_empty[row]]
        error = NO_RESPONSE
        if filled_rows:
            error = "" if _move_rewards(arrays, rows, is_empty) else _NO_REWARD
        if error:
            num_failed += 1
            for row in rows:
                errors[row] = error
        filled_rows = filled_rows or rows[-1:]
        keep[rows] = False
        keep[filled_rows] = True
        for index, row in enumerate(filled_rows):
            arrays["step_index"][row] = index
            arrays["is_last_step"][row] = row == filled_rows[-1]
    if num_failed:
        arrays["error"] = errors
        for name in ("reward", "rewards"):
            if name in arrays:
                pairs = zip(arrays[name], errors, strict=True)
                arrays[name] = [None if error else value for value, error in pairs]
    first = arrays["trajectory_id"][is_empty.index(True)]
    text = f"{count(sum(is_empty), 'row')} with an empty response left out"
    text += f", first in trajectory {first!r}"
    text += f"; {count(num_failed, 'trajectory')} failed for it" if num_failed else ""
    return keep, [text]


def _trajectories(last: list[bool]) -> Iterator[list[int]]:
    rows: list[int] = []
    for row, is_last in enumerate(last):
        rows.append(row)
        if is_last:
            yield rows
            rows = []
    if rows:
        yield rows


def _move_rewards(arrays: dict[str, Any], rows: list[int], is_empty: list[bool]) -> bool:
    """Move the rewards of empty rows; false if that would change a return."""
    rewards = arrays["reward"]
    target: int | None = None
    for row in rows:
        if not is_empty[row]:
            target = row
            continue
        reward = rewards[row]
        if target is None:
            if reward:
                return False
        elif row == rows[-1] or reward:
            if rewards[target]:
                return False
            rewards[target] = reward
    metrics = arrays.get("metrics")
    if metrics is not None and target is not None and not metrics[target]:
        metrics[target] = metrics[rows[-1]]
    return True
