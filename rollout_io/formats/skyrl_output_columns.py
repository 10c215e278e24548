"""Conversion of the fields of a `GeneratorOutput` to columns of a rollout table."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_io.formats.parsing import tokens
from rollout_io.formats.parsing.tokens import IDS, LOGPROBS, MASK, ROUTES, BrokenArray
from rollout_io.formats.skyrl_fields import (
    COLUMN_FIELDS,
    OPTIONAL,
    REQUIRED,
    SPLITS,
    SUPPORT,
    OtherFields,
    TrajectoryID,
    field_error,
    number,
    unknown_fields,
    user_columns,
    without_empty_rows,
)
from schemas.columns import COLUMN_BY_NAME, COLUMNS
from schemas.ragged import ragged_array, routing_array

METRICS_KEY = b"rollout_io.rollout_metrics"
_ROUTES = "rollout_expert_indices"
_TOKEN_SOURCES = ("engine", "retokenized")
ERROR = "failed: a placeholder row in the GeneratorOutput"


_NUMBERS = {
    "prompt_token_ids": IDS,
    "response_ids": IDS,
    "loss_masks": MASK._replace(rules=("field_kind", "mask_kind")),
    "rollout_logprobs": LOGPROBS,
    "rewards": LOGPROBS._replace(dtype=np.float64),
    _ROUTES: ROUTES,
    SUPPORT: tokens.SUPPORT,
}
_LISTS = {
    "prompt_token_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "loss_mask": "loss_masks",
    "rollout_logprobs": "rollout_logprobs",
}
"""Columns with a number for each token, and their fields."""


def table_of(
    output: Mapping[str, Any],
    group_size: int | None,
    other_fields: OtherFields = "refuse",
    source: str | None = None,
    group_prefix: str = "",
) -> tuple[pa.Table, list[str]]:
    """Convert the fields to a table; check their types and lengths, but not the invariants.

    The second value are warnings about what was left out. The arguments are those of `from_generator_output`, the name of the output for the column `source`,
    and the prefix of the instance ids that `group_size` numbers.
    """
    others = unknown_fields(output)
    _check_fields(output, others if other_fields == "refuse" else [])
    identities = _identities(output, group_size, group_prefix)
    has_flags = output.get("is_last_step") is not None
    flags = _values(output, "is_last_step", _is_flag, "true or false", "last_flag")
    last = [bool(flag) for flag in flags] if has_flags else [True] * len(identities)
    step_indices = _step_indices(identities, last, has_flags=has_flags)
    fields = {column: name for column, name in _LISTS.items() if output.get(name) is not None}
    lists = {column: _arrays(output, name) for column, name in fields.items()}
    rewards = _rewards(output)
    stops = _values(output, "stop_reasons", _is_text, "a string or null")
    failed = _placeholders([*lists.values(), rewards], stops, identities, last)
    extra = _column_fields(output)
    stated = extra.get("error", [None] * len(failed))
    errors = [e or (ERROR if f else None) for e, f in zip(stated, failed, strict=True)]
    has_error = [error is not None for error in errors]
    columns: dict[str, Any] = extra | {
        "instance_id": [i.instance_id for i in identities],
        "repetition_id": [i.repetition_id for i in identities],
        "trajectory_id": [i.to_string() for i in identities],
        "step_index": step_indices,
        "is_last_step": last,
        "token_source": extra.get("token_source", ["engine"] * len(failed)),
        "metrics": _metrics(output),
        "stop_reason": stops or None,
        "error": errors if any(has_error) else None,
        "rollout_expert_indices": _routes(output, failed),
        "sampling_support": _support(output, failed),
    }
    if source is not None:
        columns["source"] = [f"{source}, row {row}" for row in range(len(failed))]
    for name, rows in lists.items():
        columns[name] = [row[:0] if f else row for row, f in zip(rows, failed, strict=True)]
    alive = [None if f else value for value, f in zip(rewards, has_error, strict=True)]
    columns["reward"] = alive
    if isinstance(rewards[0], np.ndarray):
        columns["rewards"] = alive
        columns["reward"] = [None if r is None else float(r.sum()) for r in alive]
    keep, warnings = without_empty_rows(columns)
    table = _assemble(columns)
    for name, column in user_columns(output, others if other_fields == "keep" else []).items():
        table = table.append_column(name, column)
    if not keep.all():
        table = table.filter(pa.array(keep))
    if others:
        done = "kept as columns" if other_fields == "keep" else "dropped"
        named = ", ".join(others)
        warnings.append(f"GeneratorOutput fields without a matching column were {done}: {named}")
    metrics = output.get("rollout_metrics")
    metadata = None if metrics is None else {METRICS_KEY: _json(metrics)}
    return table.replace_schema_metadata(metadata), warnings


def _check_fields(output: Mapping[str, Any], unknown: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if output.get(name) is None]
    if missing:
        raise field_error("fields", missing[0], "the required field is missing")
    if unknown:
        hint = 'pass other_fields="keep" or "drop" (--other-fields keep|drop)'
        raise field_error("fields", unknown[0], "the field is unknown", hint=hint)
    num_rows = _length(output, "response_ids")
    if num_rows == 0:
        raise field_error("some_rows", "response_ids", "the list is empty")
    for name in (*REQUIRED, *OPTIONAL, *COLUMN_FIELDS):
        if name == SPLITS:  # a mapping of lists
            continue
        length = num_rows if output.get(name) is None else _length(output, name)
        if length != num_rows:
            finding, expected = f"a list of length {length}", f"{num_rows}, as in response_ids"
            raise field_error("fields_align", name, finding, expected)


def _length(output: Mapping[str, Any], name: str) -> int:
    field = output[name]
    if not isinstance(field, list | tuple | np.ndarray):
        finding = f"a value of type {type(field).__name__}"
        raise field_error("field_kind", name, finding, "a list with one entry per row")
    return len(field)


def _identities(
    output: Mapping[str, Any], group_size: int | None, prefix: str
) -> list[TrajectoryID]:
    ids = output.get("trajectory_ids")
    if ids is not None:
        return [trajectory_identity(value, row) for row, value in enumerate(ids)]
    if output.get("is_last_step") is not None:
        finding = "is_last_step is given without trajectory_ids"
        hint = "add `trajectory_ids`, one {instance_id, repetition_id} per row; for one row per attempt,"
        hint += " leave out is_last_step and pass group_size=n (--group-size n)"
        raise field_error("fields", "trajectory_ids", finding, hint=hint)
    num_rows = len(output["response_ids"])
    if group_size is None or group_size < 1 or num_rows % group_size:
        finding = "the field is missing"
        if group_size is not None:
            finding += f", and {num_rows} rows cannot be split into groups of {group_size}"
        hint = "pass group_size=n (--group-size n), the number of attempts per prompt"
        raise field_error("fields", "trajectory_ids", finding, hint=hint)
    return [
        TrajectoryID(f"{prefix}{row // group_size}", row % group_size) for row in range(num_rows)
    ]


def _step_indices(
    identities: Sequence[TrajectoryID], last: Sequence[bool], *, has_flags: bool
) -> list[int]:
    """Number the rows of each trajectory 0..n-1; refuse one that continues after its last row."""
    following: dict[TrajectoryID, int | None] = {}
    indices = list[int]()
    for row, (identity, is_last) in enumerate(zip(identities, last, strict=True)):
        index = following.get(identity, 0)
        if index is None:
            finding = f"trajectory {identity.to_string()!r} has further rows"
            no_flags = ", but the output has no is_last_step"
            finding += " after its row with is_last_step true" if has_flags else no_flags
            hint = "for step-wise outputs, add `is_last_step`: true on the last row of each "
            hint += "trajectory, false on its other rows. If rows are different attempts, give "
            hint += "each its own repetition_id"
            raise field_error("unique_trajectory", "trajectory_ids", finding, hint=hint, row=row)
        indices.append(index)
        following[identity] = None if is_last else index + 1
    return indices


def trajectory_identity(value: Any, row: int) -> TrajectoryID:
    """Convert an object or mapping with `instance_id` and `repetition_id`, or `to_string()` of one.

    Example:
        >>> trajectory_identity("add-3-4_0", 0)
        TrajectoryID(instance_id='add-3-4', repetition_id=0)
    """
    try:
        if isinstance(value, str):
            name, _, digits = value.rpartition("_")
            identity = TrajectoryID(name, int(digits))
            is_valid = identity.to_string() == value
        else:
            get = value.__getitem__ if isinstance(value, Mapping) else partial(getattr, value)
            identity = TrajectoryID(str(get("instance_id")), operator.index(get("repetition_id")))
            is_valid = True
        is_valid &= _is_text(identity.instance_id) and abs(identity.repetition_id) < 2**31
    except (AttributeError, KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        expected = (
            "an instance_id and an integer repetition_id below 2147483648, or INSTANCE_REPETITION"
        )
        raise field_error("trajectory_id", "trajectory_ids", repr(value), expected, row=row)
    return identity


def _placeholders(
    fields: Sequence[Sequence[Any]],
    stops: Sequence[str | None],
    identities: Sequence[TrajectoryID],
    last: Sequence[bool],
) -> list[bool]:
    """Find the placeholders of failed trajectories: single rows with 0 or [0] in each field."""
    if not stops:
        return [False] * len(last)

    def is_placeholder(row: int) -> bool:
        alone = last[row] and (row == 0 or identities[row - 1] != identities[row])
        values = [np.atleast_1d(field[row]) for field in fields]
        return stops[row] == "error" and alone and all(len(v) == 1 and v[0] == 0 for v in values)

    return [is_placeholder(row) for row in range(len(last))]


def _values(
    output: Mapping[str, Any],
    name: str,
    is_valid: Callable[[Any], bool],
    expected: str,
    rule: str = "field_kind",
) -> list[Any]:
    """Return the values of a field with one in each row; none if it is missing."""
    field = output.get(name)
    values = [] if field is None else list(field)
    for row, value in enumerate(values):
        if not is_valid(value):
            raise field_error(rule, name, repr(value), expected, row=row)
    return values


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_text(value: Any) -> bool:
    """True for null, and text that Arrow can store: JSON may have half of a surrogate pair."""
    is_text = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    return value is None or is_text


def _fits(kind: pa.DataType, value: Any) -> bool:
    """True for null, and for a value that a column of this type can store as it is."""
    usual: tuple[type, ...] = (int, np.integer)
    if pa.types.is_string(kind):
        usual = (str,)
    elif pa.types.is_floating(kind):
        usual = (*usual, float, np.floating)
    try:
        pa.scalar(value, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return value is None or (isinstance(value, usual) and not isinstance(value, bool))


def _column_fields(output: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the fields that are named like columns."""
    columns = {}
    for name in COLUMN_FIELDS:
        kind = COLUMN_BY_NAME[name].type
        is_valid, expected = partial(_fits, kind), f"{kind} or null"
        if name == "token_source":
            is_valid, expected = (
                partial(operator.contains, _TOKEN_SOURCES),
                " or ".join(_TOKEN_SOURCES),
            )
        if output.get(name) is not None:
            columns[name] = _values(output, name, is_valid, expected)
    return columns


def _arrays(output: Mapping[str, Any], name: str) -> list[Any]:
    """Return the rows of a field of `_NUMBERS`; only routing may be null."""

    def read(row: int, value: Any) -> Any:
        try:
            return _NUMBERS[name].read(value)
        except BrokenArray as error:
            is_kind = error.broken_rule == "record_type"
            rule = "field_kind" if is_kind else error.broken_rule
            raise field_error(rule, name, error.got, error.expected, row=row) from None

    return [
        None if value is None and name == _ROUTES else read(row, value)
        for row, value in enumerate(output[name])
    ]


def _rewards(output: Mapping[str, Any]) -> Sequence[Any]:
    """Return the rewards: one number per row, or one array per row."""
    values = output["rewards"]
    is_list = [isinstance(value, list | tuple) or np.ndim(value) > 0 for value in values]
    if any(is_list) != all(is_list):
        row = is_list.index(not is_list[0])
        finding = "a mix of numbers and lists"
        expected = "only numbers, or only lists with one number per token"
        raise field_error("reward_kind", "rewards", finding, expected, row=row)
    if is_list[0]:
        return _arrays(output, "rewards")
    return [number(value, "rewards", row) for row, value in enumerate(values)]


def _metrics(output: Mapping[str, Any]) -> list[list[tuple[str, float]] | None] | None:
    name, rows = "env_metrics", list[list[tuple[str, float]] | None]()
    for row, metrics in enumerate(_values(output, name, _is_object, "an object or null")):
        values = [(str(key), number(value, name, row)) for key, value in (metrics or {}).items()]
        rows.append(None if metrics is None else values)
    return rows or None


def _is_object(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(_is_text(str(n)) for n in value))


def _routes(output: Mapping[str, Any], failed: Sequence[bool]) -> pa.Array | None:
    """Return the routing of the rows, null for placeholders, whose token was not sampled."""
    if output.get(_ROUTES) is None:
        return None
    rows = zip(_arrays(output, _ROUTES), failed, strict=True)
    routing = [None if is_failed else routes for routes, is_failed in rows]
    shapes = {r.shape[1:] for r in routing if r is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        finding = f"rows with different (layers, topk): {', '.join(map(str, sorted(shapes)))}"
        raise field_error(
            "routing_shape", _ROUTES, finding, "the same layers and topk in every row"
        )
    return routing_array(routing, *shapes.pop())


def _support(output: Mapping[str, Any], failed: Sequence[bool]) -> list[Any] | None:
    """Return the sets of ids that could have been drawn, which SkyRL pads with -1."""
    if output.get(SUPPORT) is None:
        return None
    rows = zip(_arrays(output, SUPPORT), failed, strict=True)
    return [[] if f else [[i for i in ids if i >= 0] for ids in a.tolist()] for a, f in rows]


def _assemble(arrays: Mapping[str, Any]) -> pa.Table:
    columns = [c for c in COLUMNS if arrays.get(c.name) is not None]
    converted = [_to_arrow(arrays[c.name], c.type) for c in columns]
    pairs = zip(columns, converted, strict=True)
    fields = [pa.field(c.name, a.type, c.nullable) for c, a in pairs]
    return pa.Table.from_arrays(converted, schema=pa.schema(fields))


def _to_arrow(values: Any, kind: pa.DataType | None) -> pa.Array:
    if kind is None:
        return values
    is_ragged = pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type)
    return ragged_array(values, kind) if is_ragged else pa.array(values, kind)


def _json(metrics: Any) -> bytes:
    try:
        return json.dumps(metrics, default=lambda value: value.item()).encode()
    except (AttributeError, TypeError, ValueError):
        raise field_error("fields", "rollout_metrics", "cannot write the values as JSON") from None
