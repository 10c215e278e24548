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


def in_a_row(ways: Callable[[Row], list[Row]], *columns: str) -> Breaker:
    """Break a rule in any one row: `ways` returns the values that its columns may get instead.

    Example:
        >>> in_a_row(lambda row: [{"step_index": row["step_index"] + 7}])
    """

    def apply(draw: Draw, rows: list[Row]) -> None:
        row = draw(st.sampled_from(rows))
        row |= draw(st.sampled_from(ways(row)))

    return Breaker(apply, columns)


def _replaced(values: list[Any], others: Callable[[Any], Iterable[Any]]) -> list[list[Any]]:
    """Return the lists in which one value is replaced by one of its `others`."""
    numbered = list(enumerate(values))
    return [[*values[:i], other, *values[i + 1 :]] for i, old in numbered for other in others(old)]


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
    nulls = _replaced(values, lambda _: [None])
    if isinstance(values[0], list) and draw(st.booleans()):
        nulls = _replaced(values, lambda row: _replaced(row, lambda _: [None])) or nulls
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


def _open_end(_: Draw, rows: list[Row]) -> None:
    rows[-1]["is_last_step"] = False


def _mask_all(_: Draw, rows: list[Row]) -> None:
    for row in rows:
        row["loss_mask"] = [False] * len(row["loss_mask"])


def _other_lengths(row: Row) -> list[Row]:
    fills = {"loss_mask": True, "rollout_logprobs": -1.0, "sampling_support": []}
    columns = {n: row[n] or [fill] * len(row["response_ids"]) for n, fill in fills.items()}
    longer = [{name: [*values, values[-1]]} for name, values in columns.items()]
    return longer + [{name: values[:-1]} for name, values in columns.items()]


def _bad_ids(row: Row) -> list[Row]:
    bad = (-1, -100)
    sets = [{"sampling_support": [[token, i] for token in row["response_ids"]]} for i in bad]
    return sets + [
        {"sampling_support": None, name: ids}
        for name in ("prompt_token_ids", "response_ids")
        for ids in _replaced(row[name], lambda _: bad)
    ]


def _answer_in_prompt(_: Row) -> list[Row]:
    """Append the response to its own prompt, as in logs that record messages after the call."""
    return [
        {
            "prompt_token_ids": [1, 2, *answer, 1, 2],
            "response_ids": answer,
            "loss_mask": [True] * len(answer),
        }
        for answer in ([3] * (MIN_ANSWER_TOKENS + more) for more in range(4))
    ]


def _bad_logprobs(*bad: float) -> Breaker:
    def ways(row: Row) -> list[Row]:
        every = _replaced([-1.0] * len(row["response_ids"]), lambda _: bad)
        return [{name: logprobs} for name in LOGPROBS for logprobs in every]

    return in_a_row(ways, *LOGPROBS)


def _bad_versions(row: Row) -> list[Row]:
    """A negative version, an older one than `policy_version`, or only newer ones."""
    num = len(row["response_ids"])
    every = [*_replaced([5] * num, lambda _: (-1, 4)), [9] * num]
    return [{"policy_version": 5, "policy_versions": versions} for versions in every]


def _bad_support(row: Row) -> list[Row]:
    """Leave out the sampled token of a set, or repeat an id."""
    sets = [[token, (token + 1) % 8] for token in row["response_ids"]]
    every = _replaced(sets, lambda ids: (ids[1:], [*ids, ids[1]]))
    return [{"sampling_support": support} for support in every]


def _bad_teacher(row: Row) -> list[Row]:
    """Repeat an id, leave out a value, or give one that is no log-probability."""
    ids, values = ([pair] * len(row["response_ids"]) for pair in ([1, 2], [-0.5, -1.0]))
    ways = [(other, values) for other in _replaced(ids, lambda _: [[1, 1]])]
    bad = ([-0.5], [0.5, -1.0], [-inf, -1.0])
    ways += [(ids, other) for other in _replaced(values, lambda _: bad)]
    return [{"teacher_token_ids": i, "teacher_logprobs": v} for i, v in ways]


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


def _bad_segments(row: Row) -> list[Row]:
    num, step = len(row["response_ids"]), row["step_index"]
    ways = [[(0, num + 1)], [(-1, 1)], [(0, 0)], [(0, 1), (0, 1)], [(num, 1)]]
    return [
        {"segments": [{"start": s, "length": n, "step_index": step} for s, n in spans]}
        for spans in ways
    ]


def _bad_prefix(draw: Draw, rows: list[Row]) -> None:
    for row in rows:
        row["parent_step_index"], row["prefix_length"] = None, 0
        row["prompt_suffix_ids"] = row.pop("prompt_token_ids")
    row = draw(st.sampled_from(rows))
    ways = [(None, 1), (row["step_index"], 0), (None, -1)]
    ways += [(0, 10_000)] if row["step_index"] else []
    row["parent_step_index"], row["prefix_length"] = draw(st.sampled_from(ways))


def _bad_routes(row: Row) -> list[Row]:
    num = len(row["prompt_token_ids"]) + len(row["response_ids"])
    ways = [(num + 1, 0), (0, 0), (num, -1)]
    return [{"rollout_expert_indices": [[[0, e], [0, 1]]] * count} for count, e in ways]


def _bad_metrics(_: Row) -> list[Row]:
    entry = {"key": "turns", "value": 1.0}
    bad: list[Any] = [entry | {"key": None}, entry | {"value": None}, None, entry]
    return [{"metrics": [entry, other]} for other in bad]


def _picture(start: int | None, length: int | None, sha256: str | None = None) -> Row:
    return {"sha256": sha256, "start": start, "length": length}


def _bad_references(_: Row) -> list[Row]:
    digest = "0" * 64
    bad = ["a.png", digest, f"sha256:{digest[1:]}", f"SHA256:{digest}"]
    return [{"pictures": [_picture(None, None), _picture(None, None, name)]} for name in bad]


def _bad_spans(row: Row) -> list[Row]:
    num, most = len(row["prompt_token_ids"]) + len(row["response_ids"]), 2**31 - 1
    bad = [(-1, 1), (-1, None), (0, 0), (0, -1), (num, 1), (num, None), (0, num + 1), (None, 1)]
    bad += [(most, 1), (most, most), (1, most)]
    ways = [[_picture(None, None), _picture(*span)] for span in bad]
    ways.append([_picture(0, 1), _picture(None, None), _picture(0, 1)])
    return [{"pictures": entries} for entries in ways]


def _trained_redaction(row: Row) -> list[Row]:
    num = len(row["response_ids"])
    every = _replaced([False] * num, lambda _: [True])
    return [{"loss_mask": [True] * num, "redacted": marks} for marks in every]


BREAKERS: dict[str, Breaker] = {
    "unique_trajectory": Breaker(_duplicate),
    "contiguous_trajectory": Breaker(_split),
    "step_index_sequence": in_a_row(
        lambda row: [{"step_index": row["step_index"] + more} for more in (1, 7, -9)]
    ),
    "boundary_alignment": Breaker(_flip_boundary),
    "final_row_is_last": Breaker(_open_end),
    "nonempty_prompt": in_a_row(lambda _: [{"prompt_token_ids": []}]),
    "nonempty_response": in_a_row(lambda _: [{"response_ids": [], "loss_mask": []}]),
    "lengths_align": in_a_row(_other_lengths, "rollout_logprobs", "sampling_support"),
    "token_range": in_a_row(_bad_ids, "sampling_support"),
    "mask_trains_something": Breaker(_mask_all),
    "response_in_prompt": in_a_row(_answer_in_prompt),
    "logprobs_finite": _bad_logprobs(nan, -inf, inf, -9999.0),
    "logprobs_nonpositive": _bad_logprobs(0.25, 7.0),
    "versions_of_tokens": in_a_row(_bad_versions, "policy_version", "policy_versions"),
    "support_has_token": in_a_row(_bad_support, "sampling_support"),
    "teacher_shape": in_a_row(_bad_teacher, "teacher_token_ids", "teacher_logprobs"),
    "redacted_untrained": in_a_row(_trained_redaction, "redacted"),
    "reward_finite": in_a_row(lambda _: [{"reward": nan}, {"reward": inf}], "reward"),
    "reward_matches_rewards": Breaker(_other_sum, ("reward", "rewards")),
    "outcome_on_last_step": Breaker(_early_reward, ("reward",)),
    "segments_in_range": in_a_row(_bad_segments, "segments"),
    "prefix_reference": Breaker(_bad_prefix),
    "routing_shape": in_a_row(_bad_routes, "rollout_expert_indices"),
    "metrics_keys": in_a_row(_bad_metrics, "metrics"),
    "picture_reference": in_a_row(_bad_references, "pictures"),
    # Without pictures in the other rows: their files do not exist, which breaks picture_reference.
    "picture_spans": in_a_row(_bad_spans),
}
