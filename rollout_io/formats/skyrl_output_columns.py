"""Conversion of the fields of a `GeneratorOutput` to columns of a rollout table."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_io.formats.skyrl_fields import (
    COLUMN_FIELDS,
    OPTIONAL,
    REQUIRED,
    SPLITS,
    SUPPORT,
    OtherFields,
    TrajectoryID,
    column_fields,
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
ERROR = "failed: a placeholder row in the GeneratorOutput"


class Converted(NamedTuple):
    """A GeneratorOutput as a table.

    Attributes:
        table: The table.
        warnings: What was left out, for the user.
    """

    table: pa.Table
    warnings: list[str]


def table_of(
    output: Mapping[str, Any],
    group_size: int | None,
    other_fields: OtherFields = "refuse",
    source: str | None = None,
    group_prefix: str = "",
) -> Converted:
    """Convert the fields to a table; check their types and lengths, but not the invariants.

    Args:
        output: See `from_generator_output`.
        group_size: See `from_generator_output`.
        other_fields: See `from_generator_output`.
        source: Name of the output, for the column `source`; None omits the column.
        group_prefix: Prefix of the instance ids that `group_size` numbers.
    """
    others = unknown_fields(output)
    _check_fields(output, others if other_fields == "refuse" else [])
    identities = _identities(output, group_size, group_prefix)
    last = _flags(output, identities)
    _check_repeats(identities, last, has_flags=output.get("is_last_step") is not None)
    lists = {
        "prompt_token_ids": _integers(output, "prompt_token_ids"),
        "response_ids": _integers(output, "response_ids"),
        "loss_mask": _masks(output),
    }
    if output.get("rollout_logprobs") is not None:
        lists["rollout_logprobs"] = _floats(output, "rollout_logprobs", np.float32)
    rewards = _rewards(output)
    stops = _texts(output, "stop_reasons")
    failed = _placeholders([*lists.values(), rewards], stops, identities, last)
    own = column_fields(output)
    said = own.get("error", [None] * len(failed))
    errors = [e or (ERROR if f else None) for e, f in zip(said, failed, strict=True)]
    has_error = [error is not None for error in errors]
    arrays: dict[str, Any] = own | {
        "instance_id": [i.instance_id for i in identities],
        "repetition_id": [i.repetition_id for i in identities],
        "trajectory_id": [i.to_string() for i in identities],
        "step_index": _step_indices(identities, last),
        "is_last_step": last,
        "token_source": own.get("token_source", ["engine"] * len(failed)),
        "metrics": _metrics(output),
        "stop_reason": stops,
        "error": errors if any(has_error) else None,
        "rollout_expert_indices": _routes(output, failed),
        "sampling_support": _support(output, failed),
    }
    if source is not None:
        arrays["source"] = [f"{source}, row {row}" for row in range(len(failed))]
    for name, rows in lists.items():
        arrays[name] = [row[:0] if f else row for row, f in zip(rows, failed, strict=True)]
    arrays |= _reward_columns(rewards, has_error)
    keep, warnings = without_empty_rows(arrays)
    table = _assemble(arrays)
    for name, column in user_columns(output, others if other_fields == "keep" else []).items():
        table = table.append_column(name, column)
    if not keep.all():
        table = table.filter(pa.array(keep))
    if others:
        done = "kept as columns" if other_fields == "keep" else "dropped"
        named = ", ".join(others)
        warnings.append(f"GeneratorOutput fields without a matching column were {done}: {named}")
    metrics = output.get("rollout_metrics")
    known = None if metrics is None else {METRICS_KEY: _json(metrics)}
    return Converted(table.replace_schema_metadata(known), warnings)


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
            got, expected = f"a list of length {length}", f"{num_rows}, as in response_ids"
            raise field_error("fields_align", name, got, expected)


def _length(output: Mapping[str, Any], name: str) -> int:
    field = output[name]
    if not isinstance(field, list | tuple | np.ndarray):
        got = f"a value of type {type(field).__name__}"
        raise field_error("field_kind", name, got, "a list with one entry per row")
    return len(field)


def _identities(
    output: Mapping[str, Any], group_size: int | None, prefix: str
) -> list[TrajectoryID]:
    ids = output.get("trajectory_ids")
    if ids is not None:
        return [trajectory_identity(value, row) for row, value in enumerate(ids)]
    if output.get("is_last_step") is not None:
        got = "is_last_step is given without trajectory_ids"
        hint = "add `trajectory_ids`, one {instance_id, repetition_id} per row; for one row per attempt,"
        hint += " leave out is_last_step and pass group_size=n (--group-size n)"
        raise field_error("fields", "trajectory_ids", got, hint=hint)
    num_rows = len(output["response_ids"])
    if group_size is None or group_size < 1 or num_rows % group_size:
        got = "the field is missing"
        if group_size is not None:
            got += f", and {num_rows} rows cannot be split into groups of {group_size}"
        hint = "pass group_size=n (--group-size n), the number of attempts per prompt"
        raise field_error("fields", "trajectory_ids", got, hint=hint)
    return [
        TrajectoryID(f"{prefix}{row // group_size}", row % group_size) for row in range(num_rows)
    ]


def _check_repeats(
    identities: Sequence[TrajectoryID], last: Sequence[bool], *, has_flags: bool
) -> None:
    """Refuse a trajectory that continues after its last row."""
    ended = set[TrajectoryID]()
    for row, (identity, is_last) in enumerate(zip(identities, last, strict=True)):
        if identity in ended:
            name = identity.to_string()
            got = f"trajectory {name!r} has further rows, but the output has no is_last_step"
            hint = "for step-wise outputs, add `is_last_step`: true on the last row of each "
            hint += "trajectory, false on its other rows. If rows are different attempts, give "
            hint += "each its own repetition_id"
            if has_flags:
                got = f"trajectory {name!r} has further rows after its row with is_last_step true"
            raise field_error("unique_trajectory", "trajectory_ids", got, hint=hint, row=row)
        if is_last:
            ended.add(identity)


def trajectory_identity(value: Any, row: int) -> TrajectoryID:
    """Convert an object or mapping with `instance_id` and `repetition_id`."""
    try:
        if isinstance(value, Mapping):
            found = TrajectoryID(str(value["instance_id"]), operator.index(value["repetition_id"]))
        else:
            found = TrajectoryID(str(value.instance_id), operator.index(value.repetition_id))
    except (AttributeError, KeyError, TypeError):
        found = None
    if found is None or not _is_text(found.instance_id) or abs(found.repetition_id) >= 2**31:
        expected = "an instance_id and an integer repetition_id below 2147483648"
        name, _, number = value.rpartition("_") if isinstance(value, str) else ("", "", "")
        own = {"instance_id": name, "repetition_id": int(number)} if number.isdecimal() else None
        hint = f"SkyRL's to_string() joined both ids: pass {json.dumps(own)} here" if own else None
        raise field_error("trajectory_id", "trajectory_ids", repr(value), expected, hint, row=row)
    return found


def _is_text(value: Any) -> bool:
    """True if Arrow can store the string; text from JSON may contain half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _flags(output: Mapping[str, Any], identities: Sequence[TrajectoryID]) -> list[bool]:
    flags = output.get("is_last_step")
    if flags is None:
        return [True] * len(identities)
    for row, flag in enumerate(flags):
        if not isinstance(flag, bool | np.bool_):
            raise field_error("last_flag", "is_last_step", repr(flag), "true or false", row=row)
    return [bool(flag) for flag in flags]


def _step_indices(identities: Sequence[TrajectoryID], last: Sequence[bool]) -> list[int]:
    """Number the rows of each trajectory 0..n-1.

    A trajectory ends at its first row that is marked last.
    """
    following: dict[TrajectoryID, int] = {}
    indices = []
    for identity, is_last in zip(identities, last, strict=True):
        indices.append(following.get(identity, 0))
        following[identity] = 0 if is_last else indices[-1] + 1
    return indices


def _placeholders(
    fields: Sequence[Sequence[Any]],
    stops: Sequence[str | None] | None,
    identities: Sequence[TrajectoryID],
    last: Sequence[bool],
) -> list[bool]:
    """Find the placeholders of failed trajectories: single rows with 0 or [0] in each field."""
    if stops is None:
        return [False] * len(last)

    def is_placeholder(row: int) -> bool:
        alone = last[row] and (row == 0 or identities[row - 1] != identities[row])
        values = [np.atleast_1d(field[row]) for field in fields]
        return stops[row] == "error" and alone and all(len(v) == 1 and v[0] == 0 for v in values)

    return [is_placeholder(row) for row in range(len(last))]


def _array(output: Mapping[str, Any], name: str, row: int, kinds: str) -> npt.NDArray[Any]:
    """Return one row of a field as a 1-D array whose NumPy kind is in `kinds`."""
    value = output[name][row]
    if "b" not in kinds and isinstance(value, list | tuple) and bool in set(map(type, value)):
        raise field_error("field_kind", name, "booleans", "a flat list of numbers", row=row)
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        got = "null" if output[name][row] is None else f"{array.dtype} of shape {array.shape}"
        raise field_error("field_kind", name, got, "a flat list of numbers", row=row)
    return array


def _integers(output: Mapping[str, Any], name: str) -> list[npt.NDArray[Any]]:
    rows = [_array(output, name, row, "iu") for row in range(len(output[name]))]
    for row, ids in enumerate(rows):
        if len(ids) and not 0 <= ids.min() <= ids.max() < 2**31:
            got, expected = f"ids in {ids.min()}..{ids.max()}", "ids in 0..2147483647"
            raise field_error("token_range", name, got, expected, row=row)
    return [ids.astype(np.int32) for ids in rows]


def _floats(output: Mapping[str, Any], name: str, dtype: Any) -> list[npt.NDArray[Any]]:
    rows = [_array(output, name, r, "fiu") for r in range(len(output[name]))]
    with np.errstate(over="ignore"):  # overflow gives infinity, which the invariants reject
        return [row.astype(dtype) for row in rows]


def _masks(output: Mapping[str, Any]) -> list[npt.NDArray[np.bool_]]:
    rows = [_array(output, "loss_masks", r, "biuf") for r in range(len(output["loss_masks"]))]
    for row, mask in enumerate(rows):
        if not np.isin(mask, (0, 1)).all():
            got = f"the value {mask[~np.isin(mask, (0, 1))][0]}"
            raise field_error("mask_kind", "loss_masks", got, "0 or 1", row=row)
    return [mask.astype(np.bool_) for mask in rows]


def _rewards(output: Mapping[str, Any]) -> Sequence[Any]:
    """Return the rewards: one number per row, or one array per row."""
    values = output["rewards"]
    is_list = [isinstance(value, list | tuple) or np.ndim(value) > 0 for value in values]
    if any(is_list) != all(is_list):
        row = is_list.index(not is_list[0])
        got = "a mix of numbers and lists"
        expected = "only numbers, or only lists with one number per token"
        raise field_error("reward_kind", "rewards", got, expected, row=row)
    if is_list[0]:
        return _floats(output, "rewards", np.float64)
    return [number(value, "rewards", row) for row, value in enumerate(values)]


def _reward_columns(rewards: Sequence[Any], failed: Sequence[bool]) -> dict[str, Any]:
    alive = [None if f else value for value, f in zip(rewards, failed, strict=True)]
    if not isinstance(rewards[0], np.ndarray):
        return {"reward": alive}
    return {"reward": [None if r is None else float(r.sum()) for r in alive], "rewards": alive}


def _texts(output: Mapping[str, Any], name: str) -> list[str | None] | None:
    values = output.get(name)
    if values is None:
        return None
    for row, value in enumerate(values):
        if value is not None and not _is_text(value):
            raise field_error("field_kind", name, repr(value), "a string or null", row=row)
    return [None if value is None else str(value) for value in values]


def _metrics(output: Mapping[str, Any]) -> list[list[tuple[str, float]] | None] | None:
    rows = output.get("env_metrics")
    return None if rows is None else [_metric(metrics, row) for row, metrics in enumerate(rows)]


def _metric(metrics: Any, row: int) -> list[tuple[str, float]] | None:
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping) or not all(_is_text(str(name)) for name in metrics):
        raise field_error("field_kind", "env_metrics", repr(metrics), "an object or null", row=row)
    return [(str(name), number(value, "env_metrics", row)) for name, value in metrics.items()]


def _routes(output: Mapping[str, Any], failed: Sequence[bool]) -> pa.Array | None:
    """Return the routing of the rows, null for placeholders, whose token was not sampled."""
    rows = output.get(_ROUTES)
    if rows is None:
        return None
    given = [None if routes is None else _route(routes, row) for row, routes in enumerate(rows)]
    arrays = [None if f else routes for routes, f in zip(given, failed, strict=True)]
    shapes = {a.shape[1:] for a in arrays if a is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        got = f"rows with different (layers, topk): {', '.join(map(str, sorted(shapes)))}"
        raise field_error("routing_shape", _ROUTES, got, "the same layers and topk in every row")
    return routing_array(arrays, *shapes.pop())


def _route(routes: Any, row: int) -> npt.NDArray[Any]:
    try:
        array = np.asarray(routes)
    except ValueError:
        array = np.asarray(None)
    if array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape:
        got, expected = f"{array.dtype} of shape {array.shape}", "integers [tokens, layers, topk]"
        raise field_error("routing_shape", _ROUTES, got, expected, row=row)
    if not 0 <= array.min() <= array.max() < 2**15:
        got = f"experts {array.min()}..{array.max()}"
        raise field_error("routing_shape", _ROUTES, got, "experts in 0..32767", row=row)
    return array


def _support(output: Mapping[str, Any], failed: Sequence[bool]) -> list[Any] | None:
    """Return the sets of ids that could have been drawn, which SkyRL pads with -1."""
    if output.get(SUPPORT) is None:
        return None
    rows: list[Any] = []
    for row, (value, is_failed) in enumerate(zip(output[SUPPORT], failed, strict=True)):
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.asarray(None)
        if array.ndim != 2 or array.dtype.kind not in "iu":
            got = "null" if value is None else f"{array.dtype} of shape {array.shape}"
            raise field_error("field_kind", SUPPORT, got, "integers [tokens, k]", row=row)
        if array.size and not -1 <= array.min() <= array.max() < 2**31:
            got, expected = f"ids in {array.min()}..{array.max()}", "ids in 0..2147483647, or -1"
            raise field_error("token_range", SUPPORT, got, expected, row=row)
        rows.append([] if is_failed else [[i for i in ids if i >= 0] for ids in array.tolist()])
    return rows


def _assemble(arrays: Mapping[str, Any]) -> pa.Table:
    columns = [c for c in COLUMNS if arrays.get(c.name) is not None]
    made = [_to_arrow(arrays[c.name], c.type) for c in columns]
    fields = [
        pa.field(c.name, a.type, COLUMN_BY_NAME[c.name].nullable)
        for c, a in zip(columns, made, strict=True)
    ]
    return pa.Table.from_arrays(made, schema=pa.schema(fields))


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
