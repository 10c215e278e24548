"""Fields of a `GeneratorOutput` that SkyRL's trainer does not require.

Fields named like a column of the rollout table are converted to that column, newer fields of SkyRL
and unknown fields to user columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from schemas.columns import COLUMN_BY_NAME
from schemas.errors import InputError, InvariantError, RolloutError
from schemas.rules import RULES

TIMES, SPLITS = "trajectory_generation_times", "trajectory_time_splits"
SUPPORT = "rollout_sample_support"
USER_FIELDS = (TIMES, SPLITS, SUPPORT)
"""Fields of SkyRL that become user columns of the same names."""

COLUMN_FIELDS = (
    *("policy_version", "temperature", "top_p", "top_k", "sampling_extra", "agent"),
    *("token_source", "error", "messages", "response_text"),
)
"""Columns that a GeneratorOutput may have as fields of the same names, though SkyRL has none."""

REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
OPTIONAL = (
    *("stop_reasons", "rollout_logprobs", "trajectory_ids", "rollout_expert_indices"),
    *("is_last_step", "env_metrics", *USER_FIELDS),
)
TOKEN_SOURCES = ("engine", "retokenized")

OtherFields = Literal["refuse", "keep", "drop"]
"""Handling of fields that match no column of a rollout table."""


def unknown_fields(output: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that have a value but match no column."""
    known = {*REQUIRED, *OPTIONAL, *COLUMN_FIELDS, "rollout_metrics"}
    return [name for name, value in output.items() if value is not None and name not in known]


def column_fields(output: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the fields that are named like columns, as lists of values of the columns' types.

    Raises:
        InputError: `field_kind`: a value does not have the type of its column.
    """
    found = {}
    for name in COLUMN_FIELDS:
        if output.get(name) is not None:
            found[name] = _typed(name, list(output[name]))
    sources = found.get("token_source", [])
    for row, source in enumerate(sources):
        if source not in TOKEN_SOURCES:
            expected = " or ".join(TOKEN_SOURCES)
            raise field_error("field_kind", "token_source", repr(source), expected, row=row)
    return found


def _typed(name: str, values: list[Any]) -> list[Any]:
    kind = COLUMN_BY_NAME[name].type
    usual: tuple[type, ...] = (int, np.integer)
    if pa.types.is_string(kind):
        usual = (str,)
    elif pa.types.is_floating(kind):
        usual = (*usual, float, np.floating)
    for row, value in enumerate(values):
        is_valid = value is None or (isinstance(value, usual) and not isinstance(value, bool))
        try:
            pa.scalar(value if is_valid else None, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            is_valid = False
        if not is_valid:
            raise field_error("field_kind", name, repr(value), f"{kind} or null", row=row)
    return values


def user_columns(output: Mapping[str, Any], others: Sequence[str]) -> dict[str, pa.Array]:
    """Return the user columns: those of SkyRL's fields, and the unknown fields in `others`.

    Raises:
        InputError: `fields`: an unknown field has the name of a column that is computed;
            `fields_align`, `field_kind`: a field cannot be a column.
    """
    found = {}
    if output.get(TIMES) is not None:
        times = [None if t is None else number(t, TIMES, r) for r, t in enumerate(output[TIMES])]
        found[TIMES] = pa.array(times, pa.float64())
    named = [name for name in (SPLITS, SUPPORT) if output.get(name) is not None]
    for name in (*named, *others):
        if name in COLUMN_BY_NAME:
            got = f"the rollout table computes its column `{name}` from SkyRL's fields"
            hint = 'rename the field, or drop it: other_fields="drop" (--other-fields drop)'
            raise field_error("fields", name, got, hint=hint)
        found[name] = _kept(output, name)
    return found


def _kept(output: Mapping[str, Any], name: str) -> pa.Array:
    """Return a field as a column; a mapping of lists with one entry per row becomes structs."""
    field, num_rows = output[name], len(output["response_ids"])
    columns = dict(field) if isinstance(field, Mapping) else {name: field}
    for value in columns.values():
        length = len(value) if isinstance(value, list | tuple | np.ndarray) else None
        if length != num_rows:
            kind = f"a value of type {type(value).__name__}"
            got = kind if length is None else f"a list of length {length}"
            expected = f"a list of length {num_rows}, as in response_ids"
            hint = 'drop the field: other_fields="drop" (--other-fields drop)'
            raise field_error("fields_align", name, got, expected, hint)
    try:
        arrays = {
            str(key): pa.array([v.tolist() if isinstance(v, np.ndarray) else v for v in value])
            for key, value in columns.items()
        }
    except (pa.ArrowException, TypeError, ValueError):
        hint = 'drop the field: other_fields="drop" (--other-fields drop)'
        raise field_error(
            "field_kind", name, "the values have different types", hint=hint
        ) from None
    if isinstance(field, Mapping) and arrays:
        return pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
    return arrays.get(name, pa.nulls(num_rows))


def number(value: Any, name: str, row: int) -> float:
    """Convert a scalar to a float.

    Raises:
        InputError: `field_kind`: the value is not a number.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.ndim != 0 or array.dtype.kind not in "fiub":
        raise field_error("field_kind", name, repr(value), "a number", row=row)
    return float(array)


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
