"""For each named invariant, changes of a valid table that break it and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from schemas.columns import COLUMN_BY_NAME, REQUIRED_COLUMNS
from schemas.row_checks import MIN_ANSWER_TOKENS

Row = dict[str, Any]
Draw = st.DrawFn
LOGPROBS = ("rollout_logprobs", "trainer_logprobs")


@dataclass(frozen=True, slots=True)
class Breaker:
    """One way to break a rule.

    Attributes:
        apply: Function that changes the rows in place; it may give them further nullable columns.
        columns: Nullable columns that the table needs before the change.
    """

    apply: Callable[[Draw, list[Row]], None]
    columns: tuple[str, ...] = ()


SHORT_ROW: Row = {"prompt_token_ids": [1, 2], "response_ids": [3, 4], "loss_mask": [True, True]}
"""Tokens of a row that `in_a_row` breaks."""


def in_a_row(
    others: Row | None = None, columns: tuple[str, ...] | None = None, **values: Iterable[Any]
) -> Breaker:
    """Break a rule in any one row: it becomes `SHORT_ROW` with one value of one of the columns.

    Args:
        others: Values of further columns.
        columns: Nullable columns that the table needs; None: those of the values.
        values: Values to choose from, by column.

    Example:
        >>> in_a_row(response_ids=[[3, -1], [-100, 4]])
    """
    same = dict.fromkeys(values) | SHORT_ROW | (others or {})
    nullable = tuple(name for name in same if COLUMN_BY_NAME[name].nullable)
    ways = [{name: value} for name, every in values.items() for value in every]

    def apply(draw: Draw, rows: list[Row]) -> None:
        row = draw(st.sampled_from(rows))
        row |= same | draw(st.sampled_from(ways))

    return Breaker(apply, nullable if columns is None else columns)


def _replaced(values: list[Any], others: Iterable[Any]) -> list[list[Any]]:
    """Return the lists in which one value is replaced by one of the `others`."""
    return [[*values[:i], other, *values[i + 1 :]] for i in range(len(values)) for other in others]


def break_types(draw: Draw, table: pa.Table) -> pa.Table:
    """Drop, repeat or retype a required column, or put a null where none is allowed."""
    name = draw(st.sampled_from(REQUIRED_COLUMNS))
    index, values = table.column_names.index(name), table.column(name).to_pylist()
    if way := draw(st.sampled_from(["", "drop", "repeat", "retype"])):
        if way == "drop":
            return table.remove_column(index)
        if way == "repeat":
            return table.append_column(table.schema.field(name), table.column(name))
        return table.set_column(index, name, pa.array([str(v) for v in values], pa.binary()))
    nulls = _replaced(values, [None])
    if isinstance(values[0], list) and draw(st.booleans()):
        row = draw(st.integers(0, len(values) - 1))
        elements = _replaced(values[row], [None])
        nulls = [[*values[:row], other, *values[row + 1 :]] for other in elements] or nulls
    kind = COLUMN_BY_NAME[name].type
    return table.set_column(index, name, pa.array(draw(st.sampled_from(nulls)), kind))


def _duplicate(draw: Draw, rows: list[Row]) -> None:
    """Repeat the first trajectory at the end, or change its id to contradict its columns."""
    first = [dict(r) for r in rows if r["trajectory_id"] == rows[0]["trajectory_id"]]
    if draw(st.booleans()):
        rows.extend(first)
    else:
        for row in rows[: len(first)]:
            row["trajectory_id"] += "x"


def _split(_: Draw, rows: list[Row]) -> None:
    """Append another row of the first trajectory after the last trajectory."""
    length = sum(r["trajectory_id"] == rows[0]["trajectory_id"] for r in rows)
    rows.append(dict(rows[length - 1]) | {"step_index": length})


def _flip_boundary(draw: Draw, rows: list[Row]) -> None:
    row = draw(st.sampled_from(rows[:-1]))
    row["is_last_step"] = not row["is_last_step"]


def _mask_all(_: Draw, rows: list[Row]) -> None:
    for row in rows:
        row["loss_mask"] = [False] * len(row["loss_mask"])


def _other_sum(draw: Draw, rows: list[Row]) -> None:
    row = draw(st.sampled_from(rows))
    row["rewards"] = [1.0] * len(row["response_ids"])
    row["reward"] = len(row["rewards"]) + draw(st.sampled_from([0.5, -0.5]))
    # outcome_on_last_step must still hold: all other trajectories end with a reward
    for end in rows:
        if end["is_last_step"] and end is not row:
            end.update({"rewards": None, "reward": 1.0})


def _early_reward(_: Draw, rows: list[Row]) -> None:
    last = next(r for r in rows if r["is_last_step"])
    if last["step_index"] == 0:
        last["is_last_step"] = False
        rows.insert(1, dict(last) | {"step_index": 1, "is_last_step": True})
    end = next(r for r in rows if r["is_last_step"])
    rows[0]["reward"], end["reward"] = 1.0, 0.0


def _bad_prefix(draw: Draw, rows: list[Row]) -> None:
    for row in rows:
        row["parent_step_index"], row["prefix_length"] = None, 0
        row["prompt_suffix_ids"] = row.pop("prompt_token_ids")
    row = draw(st.sampled_from(rows))
    ways = [(None, 1), (row["step_index"], 0), (None, -1)]
    ways += [(0, 10_000)] if row["step_index"] else []
    row["parent_step_index"], row["prefix_length"] = draw(st.sampled_from(ways))


def _bad_logprobs(*bad: float) -> Breaker:
    every = _replaced([-1.0, -1.0], bad)
    return in_a_row(rollout_logprobs=every, trainer_logprobs=every)


def _segments(*spans: tuple[int, int]) -> list[Row]:
    return [{"start": start, "length": length, "step_index": 0} for start, length in spans]


def _pictures(*entries: tuple[str | None, int | None, int | None]) -> list[Row]:
    names = ("sha256", "start", "length")
    return [dict(zip(names, entry, strict=True)) for entry in entries]


_ANSWER = [3] * MIN_ANSWER_TOKENS
_TEACHER = {"teacher_token_ids": [[1, 2]] * 2, "teacher_logprobs": [[-0.5, -1.0]] * 2}
_METRIC = {"key": "turns", "value": 1.0}
_UNKNOWN, _DIGEST, _MOST = (None, None, None), "0" * 64, 2**31 - 1
_BAD_SPANS = (
    *((-1, 1), (-1, None), (0, 0), (0, -1), (4, 1), (4, None), (0, 5), (None, 1)),
    *((_MOST, 1), (_MOST, _MOST), (1, _MOST)),
)

BREAKERS: dict[str, Breaker] = {
    "unique_trajectory": Breaker(_duplicate),
    "contiguous_trajectory": Breaker(_split),
    "step_index_sequence": in_a_row(step_index=[-9, -1, 7, 99]),
    "boundary_alignment": Breaker(_flip_boundary),
    "final_row_is_last": Breaker(lambda _, rows: rows[-1].update(is_last_step=False)),
    "nonempty_prompt": in_a_row(prompt_token_ids=[[]]),
    "nonempty_response": in_a_row({"loss_mask": []}, response_ids=[[]]),
    "lengths_align": in_a_row(
        loss_mask=[[True], [True] * 3],
        rollout_logprobs=[[-1.0], [-1.0] * 3],
        sampling_support=[[[3]], [[3], [4], []]],
    ),
    "token_range": in_a_row(
        prompt_token_ids=_replaced([1, 2], (-1, -100)),
        response_ids=_replaced([3, 4], (-1, -100)),
        sampling_support=[[[3, -1], [4]], [[3], [4, -100]]],
    ),
    "mask_trains_something": Breaker(_mask_all),
    # The prompt has its response, as in logs that record messages after the call.
    "response_in_prompt": in_a_row(
        {"response_ids": _ANSWER, "loss_mask": [True] * len(_ANSWER)},
        prompt_token_ids=[[*start, *_ANSWER, 1, 2] for start in ([1, 2], [0, 1, 2, 5, 1, 2])],
    ),
    "logprobs_finite": _bad_logprobs(nan, -inf, inf, -9999.0),
    "logprobs_nonpositive": _bad_logprobs(0.25, 7.0),
    "versions_of_tokens": in_a_row(
        {"policy_version": 5}, policy_versions=[*_replaced([5, 5], (-1, 4)), [9, 9]]
    ),
    "support_has_token": in_a_row(
        sampling_support=[[[3], [5]], [[0], [4]], [[3, 3], [4]], [[3], [1, 4, 1]]]
    ),
    "teacher_shape": in_a_row(
        _TEACHER,
        teacher_token_ids=_replaced([[1, 2]] * 2, [[1, 1]]),
        teacher_logprobs=_replaced([[-0.5, -1.0]] * 2, ([-0.5], [0.5, -1.0], [-inf, -1.0])),
    ),
    "redacted_untrained": in_a_row(redacted=_replaced([False, False], [True])),
    "reward_finite": in_a_row(reward=[nan, inf]),
    "reward_matches_rewards": Breaker(_other_sum, ("reward", "rewards")),
    "outcome_on_last_step": Breaker(_early_reward, ("reward",)),
    "segments_in_range": in_a_row(
        segments=[
            *(_segments(span) for span in ((0, 3), (-1, 1), (0, 0), (2, 1))),
            _segments((0, 1), (0, 1)),
        ]
    ),
    "prefix_reference": Breaker(_bad_prefix),
    "routing_shape": in_a_row(
        rollout_expert_indices=[[], [[[0, 0], [0, 1]]] * 5, [[[0, -1], [0, 1]]]]
    ),
    "metrics_keys": in_a_row(
        metrics=[
            [_METRIC, other]
            for other in (_METRIC | {"key": None}, _METRIC | {"value": None}, None, _METRIC)
        ]
    ),
    "picture_reference": in_a_row(
        pictures=[
            _pictures(_UNKNOWN, (name, None, None))
            for name in ("a.png", _DIGEST, f"sha256:{_DIGEST[1:]}", f"SHA256:{_DIGEST}")
        ]
    ),
    # Without pictures in the other rows: their files do not exist, which breaks picture_reference.
    "picture_spans": in_a_row(
        columns=(),
        pictures=[
            *(_pictures(_UNKNOWN, (None, *span)) for span in _BAD_SPANS),
            _pictures((None, 0, 1), _UNKNOWN, (None, 0, 1)),
        ],
    ),
}
