"""Rollout tables to and from SkyRL's `GeneratorOutput`, in memory and as JSON.

A GeneratorOutput is a dict of lists, one entry per row. A failed trajectory is one placeholder row
there: prompt [0], response [0], mask [0], log-probability [0.0], reward 0.0, stop reason "error".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_io.generator_input import METRICS_KEY, TIMES, table_of
from schemas.checker import validate
from schemas.columns import JOINED
from schemas.errors import RolloutError
from schemas.ragged import BoolArray, IntArray, Ragged, list_lengths
from schemas.types import as_table, cast_table

Failed = Literal["group", "trajectory"]


def to_generator_output(table: Any, failed: Failed = "group") -> dict[str, Any]:
    """A table as a GeneratorOutput; every field is there, None where the table has nothing.

    Token-level rewards where the column `rewards` is filled on all rows, else scalars. The scalar of
    a merged row (one with `segments`) is its last step's reward, as in the reference, whose trainer
    reads the outcome there: our `reward` of such a row is the sum over its steps.

    Args:
        table: A valid rollout table: anything that speaks Arrow.
        failed: What becomes placeholder rows where a trajectory has an `error`: its whole group, as
            the reference does, or the `trajectory` alone.

    Raises:
        ValidationError: The table breaks an invariant.
        RolloutError: No rows; a null reward without an `error` (`reward_known`); a column that is
            null on some rows only (`reward_kind`, `logprobs_kind`).

    Example:
        >>> output = to_generator_output(rollout_io.read("rollouts/"))
        >>> output["trajectory_ids"][0]
        {'instance_id': 'shop-0', 'repetition_id': 0}
    """
    data = as_table(table)
    validate(data)
    if data.num_rows == 0:
        hint = "a GeneratorOutput cannot be empty: was everything filtered away?"
        raise RolloutError("some_rows", "table", "no rows", "at least one trajectory", hint)
    data, masked = _with_placeholders(cast_table(data), failed)
    return {
        "prompt_token_ids": _filled(_lists(data, "prompt_token_ids"), masked, lambda: [0]),
        "response_ids": _filled(_lists(data, "response_ids"), masked, lambda: [0]),
        "rewards": _rewards(data, masked),
        "loss_masks": _filled(_lists(data, "loss_mask"), masked, lambda: [0]),
        "stop_reasons": _stop_reasons(data, masked),
        "rollout_metrics": _rollout_metrics(data),
        "rollout_logprobs": _logprobs(data, masked),
        "trajectory_ids": [
            {"instance_id": i, "repetition_id": r}
            for i, r in zip(
                *(_values(data, n) for n in ("instance_id", "repetition_id")), strict=True
            )
        ],
        "rollout_expert_indices": _routes(data),
        "is_last_step": _values(data, "is_last_step"),
        "env_metrics": _env_metrics(data),
        TIMES: _values(data, TIMES) if TIMES in data.column_names else None,
    }


def from_generator_output(output: Mapping[str, Any], group_size: int | None = None) -> pa.Table:
    """A GeneratorOutput as a rollout table; checks what the reference checks, and all invariants.

    Args:
        output: Lists or NumPy arrays; `trajectory_ids` as objects with `instance_id` and
            `repetition_id`, or as dicts. Without `is_last_step`, each row is a trajectory.
        group_size: Attempts per prompt, where `trajectory_ids` are missing: row i is then attempt
            i % group_size at instance i // group_size.

    Returns:
        The table; `rollout_metrics` stay in its schema metadata. A placeholder row becomes a row
        with an `error`, empty lists and a null reward.

    Raises:
        RolloutError: A field is missing, of another length or kind; ids are missing.
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
    table = table_of(output, group_size)
    validate(table)
    return table


def write_generator_output(
    table: Any, file: str | os.PathLike[str], failed: Failed = "group"
) -> None:
    """Write a table as a GeneratorOutput in JSON; the file is there whole or not at all."""
    output = to_generator_output(table, failed)
    try:
        text = json.dumps(output, allow_nan=False, separators=(",", ":"))
    except ValueError:
        hint = "drop the metric, or replace NaN and infinity"
        got = "a number that JSON lacks (NaN or infinite)"
        raise RolloutError("json_number", os.fspath(file), got, "finite numbers", hint) from None
    target = Path(file)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        hint = f"ls -ld {target.parent}"
        raise RolloutError("output_file", os.fspath(file), got, "a writable file", hint) from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_generator_output(file: str | os.PathLike[str], group_size: int | None = None) -> pa.Table:
    """Read what `write_generator_output` wrote, or any GeneratorOutput dumped as JSON."""
    where = os.fspath(file)
    hint = "rollouts export DS --format skyrl --out " + where
    try:
        output = json.loads(Path(file).read_bytes())
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        raise RolloutError("input_file", where, got, "a readable file", hint) from None
    except (ValueError, RecursionError) as error:
        raise RolloutError("json_file", where, str(error), "one JSON object", hint) from None
    if not isinstance(output, dict):
        raise RolloutError("json_file", where, type(output).__name__, "one JSON object", hint)
    return from_generator_output(output, group_size)


def _with_placeholders(table: pa.Table, failed: Failed) -> tuple[pa.Table, BoolArray]:
    """The rows to export, and which of them are placeholders: one per failed trajectory."""
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
    return _cut(values.tolist(), column)


def _cut(flat: list[Any], column: Ragged) -> list[Any]:
    bounds = zip(column.offsets[:-1].tolist(), column.offsets[1:].tolist(), strict=True)
    return [
        flat[a:b] if valid else None
        for (a, b), valid in zip(bounds, column.valid.tolist(), strict=True)
    ]


def _is_filled(table: pa.Table, name: str, masked: BoolArray, rule: str) -> bool:
    """Whether a column has a value on all rows (placeholders aside), or on none."""
    if name not in table.column_names:
        return False
    valid = np.asarray(pc.is_valid(table.column(name)))
    alive = valid[~masked]
    if len(alive) and alive.any() != alive.all():
        row = int(np.flatnonzero(~valid & ~masked)[0])
        hint = f"drop the column, or keep the rows of one kind (`{name}` IS NOT NULL)"
        expected = "a value on every row, or on none: a GeneratorOutput never mixes the two"
        raise RolloutError(rule, _place(table, row, name), "null", expected, hint)
    return bool(alive.all() if len(alive) else valid.any() or name == "rewards")


def _place(table: pa.Table, row: int, name: str) -> str:
    trajectory_id = table.column("trajectory_id")[row].as_py()
    return f"exported row {row}, trajectory {trajectory_id!r}, column {name!r}"


def _rewards(table: pa.Table, masked: BoolArray) -> list[Any]:
    if _is_filled(table, "rewards", masked, "reward_kind"):
        return _filled(_lists(table, "rewards"), masked, lambda: [0.0])
    rewards = _filled(_of_last_step(table, "reward"), masked, lambda: 0.0)
    if None in rewards:
        where = _place(table, rewards.index(None), "reward")
        hint = "convert with --rewards FILE, filter these trajectories, or set their `error`"
        raise RolloutError("reward_known", where, "null", "a reward on every row", hint)
    return rewards


def _of_last_step(table: pa.Table, name: str) -> list[Any]:
    """A scalar column, with the last step's value where a merge joined several steps in a row."""
    known = name in table.column_names
    values = _values(table, name) if known else [None] * table.num_rows
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


def _stop_reasons(table: pa.Table, masked: BoolArray) -> list[str | None] | None:
    if "stop_reason" not in table.column_names and not masked.any():
        return None
    return _filled(_of_last_step(table, "stop_reason"), masked, lambda: "error")


def _logprobs(table: pa.Table, masked: BoolArray) -> list[Any] | None:
    if not _is_filled(table, "rollout_logprobs", masked, "logprobs_kind"):
        return None
    return _filled(_lists(table, "rollout_logprobs"), masked, lambda: [0.0])


def _routes(table: pa.Table) -> list[Any] | None:
    name = "rollout_expert_indices"
    if name not in table.column_names:
        return None
    column = table.column(name)
    shape = (-1, column.type.value_type.list_size, column.type.value_type.value_type.list_size)
    flat = pc.list_flatten(pc.list_flatten(pc.list_flatten(column)))
    lengths = list_lengths(column)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    routes = np.asarray(flat).reshape(shape)
    return _cut(routes.tolist(), Ragged(routes, offsets, np.asarray(pc.is_valid(column))))


def _env_metrics(table: pa.Table) -> list[dict[str, float] | None] | None:
    if "metrics" not in table.column_names:
        return None
    return [None if entries is None else dict(entries) for entries in _values(table, "metrics")]


def _rollout_metrics(table: pa.Table) -> Mapping[str, Any] | None:
    found = (table.schema.metadata or {}).get(METRICS_KEY)
    metrics: Mapping[str, Any] | None = None if found is None else json.loads(found)
    return metrics


__all__: Sequence[str] = (
    "from_generator_output",
    "read_generator_output",
    "to_generator_output",
    "write_generator_output",
)
