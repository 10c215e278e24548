"""Conversion between rollout tables and SkyRL's `GeneratorOutput`, in memory and as JSON.

A GeneratorOutput is a dict of lists with one entry per row. It represents a failed trajectory as one
placeholder row: prompt [0], response [0], mask [0], log-probability [0.0], reward 0.0, stop reason
"error".
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.dataset.opening import read_input
from rollout_io.formats.exporting import Failed, written_to
from rollout_io.formats.skyrl_fields import (
    SPLITS,
    TIMES,
    GeneratorOutput,
    OtherFields,
    TrajectoryID,
)
from rollout_io.formats.skyrl_output_columns import METRICS_KEY, table_of
from schemas.columns import JOINED, metrics_dict
from schemas.errors import InputError
from schemas.metadata import Outcome
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths, offsets_of
from schemas.types import as_table, cast_table

COLUMN = "sampling_support"


def to_generator_output(
    table: Any, failed: Failed = "group", outcome: Outcome = "last"
) -> GeneratorOutput:
    """Convert a table to a GeneratorOutput; the fields of absent columns are None.

    Rewards are per token if the column `rewards` has a value in every row, else scalars. The column
    `reward` of a merged row (one with `segments`) is the sum over its steps, but the exported
    scalar is the reward of its last step, which SkyRL's trainer reads as the outcome. SkyRL takes
    the return of a trajectory only from its last row. With `outcome` sum, a trajectory of several
    rows therefore has scalar rewards: the sum of all rewards in the last row, and 0 in all other
    rows.

    Args:
        table: A valid rollout table, in any Arrow-compatible form.
        failed: Rows that become placeholders if a trajectory has an `error`: its entire `group`, as
            in SkyRL, or only the `trajectory`.
        outcome: Return of a trajectory: the last step's reward, or the sum over its steps.

    Raises:
        ValidationError: The table breaks an invariant.
        RolloutError: `some_rows`: the table has no rows; `reward_known`: a reward is null without
            an `error`; `reward_kind`, `logprobs_kind`: a column is null in only some rows.

    Example:
        >>> output = to_generator_output(rollout_io.read("rollouts/"))
        >>> output["trajectory_ids"][0]
        TrajectoryID(instance_id='shop-0', repetition_id=0)
    """
    from schemas.checker import validate

    data = as_table(table)
    validate(data)
    if data.num_rows == 0:
        hint = "check the filters before the export: a GeneratorOutput needs at least one row"
        message = "the table has no rows"
        raise InputError("some_rows", "table", "no rows", hint=hint, message=message)
    data, masked = _with_placeholders(cast_table(data), failed)
    names = set(data.column_names)
    metrics = (data.schema.metadata or {}).get(METRICS_KEY)
    stops = logprobs = None
    if "stop_reason" in names or masked.any():
        stops = _filled(_of_last_step(data, "stop_reason"), masked, lambda: "error")
    if _is_filled(data, "rollout_logprobs", masked, "logprobs_kind"):
        logprobs = _filled(_lists(data, "rollout_logprobs"), masked, lambda: [0.0])
    ids = map(TrajectoryID, _values(data, "instance_id"), _values(data, "repetition_id"))
    env_metrics = map(metrics_dict, _values(data, "metrics")) if "metrics" in names else None
    return {
        "prompt_token_ids": _filled(_lists(data, "prompt_token_ids"), masked, lambda: [0]),
        "response_ids": _filled(_lists(data, "response_ids"), masked, lambda: [0]),
        "rewards": _rewards(data, masked, outcome),
        "loss_masks": _filled(_lists(data, "loss_mask"), masked, lambda: [0]),
        "stop_reasons": stops,
        "rollout_metrics": None if metrics is None else json.loads(metrics),
        "rollout_logprobs": logprobs,
        "trajectory_ids": list(ids),
        "rollout_expert_indices": _routes(data, masked),
        "is_last_step": _values(data, "is_last_step"),
        "env_metrics": None if env_metrics is None else list(env_metrics),
        "trajectory_generation_times": _values(data, TIMES) if TIMES in names else None,
        **_newer_fields(data, masked),
    }


def from_generator_output(
    output: Mapping[str, Any],
    group_size: int | None = None,
    other_fields: OtherFields = "refuse",
) -> pa.Table:
    """Convert a GeneratorOutput to a rollout table; apply SkyRL's checks and all invariants.

    Args:
        output: Lists or NumPy arrays; `trajectory_ids` as objects with `instance_id` and
            `repetition_id`, or as dicts. Without `is_last_step`, each row is a trajectory.
        group_size: Attempts per prompt, for outputs without `trajectory_ids`: row i is then attempt
            i % group_size at instance i // group_size.
        other_fields: Handling of fields that match no column: refuse them, keep them as columns of
            the same names (a mapping of lists as structs), or drop them; `keep` and `drop` warn.

    Returns:
        The table, with `rollout_metrics` in its schema metadata. A placeholder row becomes a row
        with an `error`, empty lists and a null reward.

    Raises:
        RolloutError: A field is missing or has the wrong length or type; ids are missing.
        ValidationError: The rows break an invariant.

    Example:
        >>> from_generator_output(
        ...     {
        ...         "prompt_token_ids": [[1, 2]],
        ...         "response_ids": [[3]],
        ...         "rewards": [1.0],
        ...         "loss_masks": [[1]],
        ...     },
        ...     group_size=1,
        ... )["trajectory_id"].to_pylist()
        ['0_0']
    """
    return _checked(output, group_size, other_fields)


def _checked(
    output: Mapping[str, Any],
    group_size: int | None,
    other_fields: OtherFields,
    source: str | None = None,
    prefix: str = "",
) -> pa.Table:
    from schemas.checker import validate

    table, remarks = table_of(output, group_size, other_fields, source, prefix)
    validate(table)
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    return table


def write_generator_output(
    table: Any,
    file: str | os.PathLike[str],
    failed: Failed = "group",
    outcome: Outcome = "last",
) -> None:
    """Write a table as a GeneratorOutput in JSON; an error leaves no partial file."""
    text = generator_output_text(table, file, failed, outcome)
    with written_to(file, is_new=False) as path:
        path.write_text(text, encoding="utf-8")


def generator_output_text(
    table: Any, file: str | os.PathLike[str], failed: Failed, outcome: Outcome
) -> str:
    """Return the text that `write_generator_output` writes to `file`."""
    output = to_generator_output(table, failed, outcome)
    try:
        return json.dumps(output, allow_nan=False, separators=(",", ":"), default=_plain) + "\n"
    except ValueError:
        hint = "drop the metric, or replace NaN and infinity"
        finding = "cannot write NaN or infinity as JSON"
        raise InputError("json_number", os.fspath(file), finding, hint=hint) from None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else asdict(value)


def read_generator_output(
    file: str | os.PathLike[str],
    group_size: int | None = None,
    other_fields: OtherFields = "refuse",
) -> pa.Table:
    """Read a GeneratorOutput from a JSON file, such as one written by `write_generator_output`.

    Args:
        file: Path of the JSON file.
        group_size: See `from_generator_output`.
        other_fields: See `from_generator_output`.

    Raises:
        RolloutError: `json_file`: the file is not a JSON object; or any error of
            `from_generator_output`.
    """
    return _checked(_json_object(file), group_size, other_fields)


def read_rows(
    file: str | os.PathLike[str], name: str, group_size: int | None, other_fields: OtherFields
) -> pa.Table:
    """Read a file as `read_generator_output` does, with the column `source`.

    Instances that `group_size` numbers are named after the file, so that several files of one
    conversion have different groups.
    """
    return _checked(_json_object(file), group_size, other_fields, source=name, prefix=f"{name}/")


def _json_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    where = os.fspath(file)
    hint = "write the file again: rollouts export DS --format skyrl --out " + where
    content = read_input(file)
    try:
        output = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError("json_file", where, f"invalid JSON: {error}", hint=hint) from None
    if not isinstance(output, dict):
        finding = f"a value of type {type(output).__name__}"
        raise InputError("json_file", where, finding, "a JSON object", hint)
    return output


def _with_placeholders(table: pa.Table, failed: Failed) -> tuple[pa.Table, BoolArray]:
    """Return the rows to export and a mask of placeholders, one per failed trajectory."""
    if "error" not in table.column_names:
        return table, np.zeros(table.num_rows, np.bool_)
    unit = table.column("instance_id" if failed == "group" else "trajectory_id")
    bad = pc.unique(unit.filter(pc.is_valid(table.column("error"))))
    masked = np.asarray(pc.is_in(unit, bad))
    keep = ~masked | np.asarray(table.column("is_last_step"))
    return table.filter(pa.array(keep)), masked[keep]


def _filled(rows: list[Any], masked: BoolArray, placeholder: Callable[[], Any]) -> list[Any]:
    return [placeholder() if m else row for row, m in zip(rows, masked.tolist(), strict=True)]


def _values(table: pa.Table, name: str) -> list[Any]:
    values: list[Any] = table.column(name).to_pylist()
    return values


def _lists(table: pa.Table, name: str) -> list[Any]:
    column = Ragged.from_arrow(table.column(name))
    values = column.values.astype(np.int64) if column.values.dtype == np.bool_ else column.values
    flat, bounds = values.tolist(), pairwise(column.offsets.tolist())
    valid = column.valid.tolist()
    return [flat[a:b] if has else None for (a, b), has in zip(bounds, valid, strict=True)]


def _is_filled(table: pa.Table, name: str, masked: BoolArray, rule: str) -> bool:
    """True if a column has a value in all rows except placeholders; false if it has no values."""
    if name not in table.column_names:
        return False
    valid = np.asarray(pc.is_valid(table.column(name)))
    alive = valid[~masked]
    if len(alive) and alive.any() != alive.all():
        row = int(np.flatnonzero(~valid & ~masked)[0])
        hint = f"drop the column, or keep only the rows with a value (`{name} IS NOT NULL`)"
        finding = "the value is null, but other rows have a value"
        raise InputError(rule, _place(table, row, name), finding, hint=hint)
    return bool(alive.all() if len(alive) else valid.any() or name == "rewards")


def _place(table: pa.Table, row: int, name: str) -> str:
    trajectory_id = table.column("trajectory_id")[row].as_py()
    return f"exported row {row}, trajectory {trajectory_id!r}, column {name!r}"


def _rewards(table: pa.Table, masked: BoolArray, outcome: Outcome) -> list[Any]:
    in_last_row = outcome == "sum" and not pc.all(table.column("is_last_step")).as_py()
    if not in_last_row and _is_filled(table, "rewards", masked, "reward_kind"):
        return _filled(_lists(table, "rewards"), masked, lambda: [0.0])
    sums = outcome == "sum" and "reward" in table.column_names
    values = _values(table, "reward") if sums else _of_last_step(table, "reward")
    rewards = _filled(values, masked, lambda: 0.0)
    if None in rewards:
        where = _place(table, rewards.index(None), "reward")
        hint = "convert with --rewards FILE, filter out these trajectories, or set their `error`"
        raise InputError("reward_known", where, "the reward is null", hint=hint)
    return _in_last_rows(rewards, _values(table, "is_last_step")) if in_last_row else rewards


def _in_last_rows(rewards: Sequence[float], last: Sequence[bool]) -> list[float]:
    """Put the sum of each trajectory's rewards in its last row, and 0 in its other rows.

    Example:
        >>> _in_last_rows([0.5, 0.25, 1.0], [False, True, True])
        [0.0, 0.75, 1.0]
    """
    placed, total = [], 0.0
    for reward, ends in zip(rewards, last, strict=True):
        total += reward
        placed.append(total if ends else 0.0)
        total = 0.0 if ends else total
    return placed


def _of_last_step(table: pa.Table, name: str) -> list[Any]:
    """Return a scalar column; a row of several merged steps gets the last step's value."""
    is_present = name in table.column_names
    values = _values(table, name) if is_present else [None] * table.num_rows
    if "segments" not in table.column_names:
        return values
    segments = table.column("segments")
    fields = segments.type.value_type
    if fields.get_field_index(name) < 0 or fields.get_field_index(JOINED) < 0:
        return values
    lengths = list_lengths(segments)
    rows: IntArray = np.flatnonzero(lengths)
    ends = pa.array(np.cumsum(lengths)[rows] - 1)
    flat = pc.list_flatten(segments)
    last, joined = (pc.struct_field(flat, n).take(ends).to_pylist() for n in (name, JOINED))
    for row, value, is_step in zip(rows.tolist(), last, joined, strict=True):
        values[row] = value if is_step else values[row]
    return values


def _routes(table: pa.Table, masked: BoolArray) -> list[Any] | None:
    """Return the routing; a placeholder's token gets experts 0..topk-1, as in SkyRL's padding."""
    name = "rollout_expert_indices"
    if name not in table.column_names:
        return None
    column = table.column(name)
    num_layers, topk = column.type.value_type.list_size, column.type.value_type.value_type.list_size
    shape = (-1, num_layers, topk)
    flat = pc.list_flatten(pc.list_flatten(pc.list_flatten(column)))
    bounds = pairwise(offsets_of(list_lengths(column)).tolist())
    routes = np.asarray(flat).reshape(shape)
    valid = np.asarray(pc.is_valid(column)).tolist()
    rows = [routes[a:b] if has else None for (a, b), has in zip(bounds, valid, strict=True)]
    unsampled = np.tile(np.arange(topk, dtype=routes.dtype), (1, num_layers, 1))
    return _filled(rows, masked, lambda: unsampled)


def _newer_fields(table: pa.Table, masked: BoolArray) -> GeneratorOutput:
    """Return fields that SkyRL 0.3 lacks and `token_source`, if the table has them."""
    output: GeneratorOutput = {}
    names = table.column_names
    sources = _values(table, "token_source")
    if set(sources) != {"engine"}:
        output["token_source"] = sources
    if SPLITS in names and pa.types.is_struct(table.schema.field(SPLITS).type):
        splits = _values(table, SPLITS)
        keys = [field.name for field in table.schema.field(SPLITS).type]
        output["trajectory_time_splits"] = {
            key: [None if split is None else split[key] for split in splits] for key in keys
        }
    if (support := support_arrays(table, masked)) is not None:
        output["rollout_sample_support"] = support
    return output


def support_arrays(table: pa.Table, masked: BoolArray) -> list[Any] | None:
    """Return the sets as arrays [tokens, k] padded with -1; None unless every row has sets."""
    if COLUMN not in table.column_names:
        return None
    rows = _filled(_values(table, COLUMN), masked, lambda: [[]])
    if any(row is None for row in rows):
        return None
    width = max(1, *(len(ids) for row in rows for ids in row))
    return [np.array([[*ids, *[-1] * (width - len(ids))] for ids in row], np.int32) for row in rows]
