"""Functions that each break exactly one named invariant of a valid table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from schemas.columns import COLUMN_BY_NAME, REQUIRED_COLUMNS
from schemas.row_checks import MIN_ANSWER_TOKENS

Row = dict[str, Any]
Draw = st.DrawFn
LOGPROBS = ("rollout_logprobs", "trainer_logprobs")
_MOST = 2**31 - 1
_BAD_IDS = st.sampled_from([-1, -100])


@dataclass(frozen=True, slots=True)
class Breaker:
    """One way to break a rule.

    Attributes:
        apply: Function that changes the rows in place; it may return the nullable columns of the
            resulting table.
        columns: Nullable columns that the table needs before the change.
    """

    apply: Callable[[Draw, list[Row]], tuple[str, ...] | None]
    columns: tuple[str, ...] = ()


def break_types(draw: Draw, table: pa.Table) -> pa.Table:
    """Drop, repeat or retype a required column, or put a null where none is allowed."""
    name = draw(st.sampled_from(REQUIRED_COLUMNS))
    index = table.column_names.index(name)
    # A table of failed trajectories may have no tokens at all.
    lists = ["prompt_token_ids", "response_ids", "loss_mask"]
    held = [name for name in lists if any(table.column(name).to_pylist())]
    ways = ["drop", "repeat", "retype", "null", *(["null element"] if held else [])]
    way = draw(st.sampled_from(ways))
    if way == "drop":
        return table.remove_column(index)
    if way == "repeat":
        return table.append_column(table.schema.field(name), table.column(name))
    values = table.column(name).to_pylist()
    if way == "null element":
        name = draw(st.sampled_from(held))
        index, values = table.column_names.index(name), table.column(name).to_pylist()
        row = draw(st.sampled_from([row for row, value in enumerate(values) if value]))
        values[row][draw(st.integers(0, len(values[row]) - 1))] = None
        return table.set_column(index, name, pa.array(values, COLUMN_BY_NAME[name].type))
    if way == "retype":
        return table.set_column(index, name, pa.array([str(v) for v in values], pa.binary()))
    values[draw(st.integers(0, len(values) - 1))] = None
    return table.set_column(index, name, pa.array(values, COLUMN_BY_NAME[name].type))


def _any(draw: Draw, rows: list[Row]) -> Row:
    row: Row = draw(st.sampled_from(rows))
    return row


def _position(draw: Draw, values: list[Any]) -> int:
    return draw(st.integers(0, len(values) - 1))


def _duplicate(draw: Draw, rows: list[Row]) -> None:
    """Repeat the first trajectory at the end, or change its id to contradict its columns."""
    first = [dict(r) for r in rows if r["trajectory_id"] == rows[0]["trajectory_id"]]
    if draw(st.booleans()):
        rows.extend(first)
    else:
        for row in rows[: len(first)]:
            row["trajectory_id"] += "x"


def _split(draw: Draw, rows: list[Row]) -> None:
    """Append another row of the first trajectory after the last trajectory."""
    del draw
    length = sum(r["trajectory_id"] == rows[0]["trajectory_id"] for r in rows)
    rows.append(dict(rows[length - 1]) | {"step_index": length})


def _renumber(draw: Draw, rows: list[Row]) -> None:
    _any(draw, rows)["step_index"] += draw(st.sampled_from([1, 7, -9]))


def _flip_boundary(draw: Draw, rows: list[Row]) -> None:
    row = draw(st.sampled_from(rows[:-1]))
    row["is_last_step"] = not row["is_last_step"]


def _open_end(draw: Draw, rows: list[Row]) -> None:
    del draw
    rows[-1]["is_last_step"] = False


def _empty_prompt(draw: Draw, rows: list[Row]) -> None:
    _any(draw, rows)["prompt_token_ids"] = []


def _empty_response(draw: Draw, rows: list[Row]) -> None:
    _any(draw, rows).update({"response_ids": [], "loss_mask": []})
    # mask_trains_something must still hold: train on the first and last row
    rows[0]["loss_mask"] = [True] * len(rows[0]["response_ids"])
    rows[-1]["loss_mask"] = [True] * len(rows[-1]["response_ids"])


def _shift_logprobs(draw: Draw, rows: list[Row]) -> None:
    row = _any(draw, rows)
    name = draw(st.sampled_from(["loss_mask", "rollout_logprobs", "sampling_support"]))
    fill: Any = [] if name == "sampling_support" else -1.0
    values = row[name] or [fill] * len(row["response_ids"])
    row[name] = values + values[-1:] if draw(st.booleans()) else values[:-1]
    if name == "loss_mask":
        rows[0 if row is not rows[0] else -1]["loss_mask"][0] = True


def _negative_token(draw: Draw, rows: list[Row]) -> None:
    row = _any(draw, rows)
    name, bad = draw(st.sampled_from(["prompt_token_ids", "response_ids"])), draw(_BAD_IDS)
    if draw(st.booleans()):
        row["sampling_support"] = [[token, bad] for token in row["response_ids"]]
    else:
        row["sampling_support"] = None
        row[name][_position(draw, row[name])] = bad


def _mask_all(draw: Draw, rows: list[Row]) -> None:
    del draw
    for row in rows:
        row["loss_mask"] = [False] * len(row["loss_mask"])


def _answer_in_prompt(draw: Draw, rows: list[Row]) -> None:
    """Append a row's response to its own prompt, as in logs that record messages after the call."""
    row = _any(draw, rows)
    header, answer = [1, 2], [3] * draw(st.integers(MIN_ANSWER_TOKENS, MIN_ANSWER_TOKENS + 3))
    row["prompt_token_ids"] = [*header, *answer, *header]
    row.update({"response_ids": answer, "loss_mask": [True] * len(answer)})


def _set_logprob(values: list[float]) -> Callable[[Draw, list[Row]], None]:
    def apply(draw: Draw, rows: list[Row]) -> None:
        row = _any(draw, rows)
        logprobs = [-1.0] * len(row["response_ids"])
        logprobs[_position(draw, logprobs)] = draw(st.sampled_from(values))
        row[draw(st.sampled_from(LOGPROBS))] = logprobs

    return apply


def _bad_versions(draw: Draw, rows: list[Row]) -> None:
    """Set a negative version, an older one than `policy_version`, or only newer ones."""
    row = _any(draw, rows)
    versions = [5] * len(row["response_ids"])
    row["policy_version"] = 5
    way = draw(st.sampled_from(["negative", "older", "newer"]))
    if way == "newer":
        versions = [9] * len(versions)
    else:
        versions[_position(draw, versions)] = -1 if way == "negative" else 4
    row["policy_versions"] = versions


def _bad_support(draw: Draw, rows: list[Row]) -> None:
    """Leave out the sampled token of a set, or repeat an id."""
    row = _any(draw, rows)
    sets = [[token, (token + 1) % 8] for token in row["response_ids"]]
    at = _position(draw, sets)
    sets[at] = draw(st.sampled_from([sets[at][1:], [*sets[at], sets[at][1]]]))
    row["sampling_support"] = sets


def _bad_teacher(draw: Draw, rows: list[Row]) -> None:
    """Repeat an id, give a value too many, or one that is no log-probability."""
    row = _any(draw, rows)
    ids = [[1, 2] for _ in row["response_ids"]]
    values = [[-0.5, -1.0] for _ in ids]
    way, at = draw(st.integers(0, 3)), _position(draw, ids)
    if way == 0:
        ids[at] = [1, 1]
    elif way == 1:
        values[at] = [-0.5]
    else:
        values[at][0] = 0.5 if way == 2 else float("-inf")
    row["teacher_token_ids"], row["teacher_logprobs"] = ids, values


def _bad_reward(draw: Draw, rows: list[Row]) -> None:
    _any(draw, rows)["reward"] = draw(st.sampled_from([float("nan"), float("inf")]))


def _other_sum(draw: Draw, rows: list[Row]) -> None:
    row = _any(draw, rows)
    row["rewards"] = [1.0] * len(row["response_ids"])
    row["reward"] = len(row["rewards"]) + draw(st.sampled_from([0.5, -0.5]))
    # outcome_on_last_step must still hold: all other trajectories end with a reward
    rows[-1 if rows[-1] is not row else 0].update({"rewards": None, "reward": 1.0})
    for end in rows:
        if end["is_last_step"] and end is not row:
            end.update({"rewards": None, "reward": 1.0})


def _early_reward(draw: Draw, rows: list[Row]) -> None:
    del draw
    last = next(r for r in rows if r["is_last_step"])
    if last["step_index"] == 0:
        last["is_last_step"] = False
        rows.insert(rows.index(last) + 1, dict(last) | {"step_index": 1, "is_last_step": True})
    inner = rows[0]
    end = next(r for r in rows if r["is_last_step"])
    inner["reward"], end["reward"] = 1.0, 0.0


def _bad_segment(draw: Draw, rows: list[Row]) -> None:
    row = _any(draw, rows)
    num = len(row["response_ids"])
    spans = [[(0, num + 1)], [(-1, 1)], [(0, 0)], [(0, 1), (0, 1)], [(num, 1)]]
    row["segments"] = [
        {"start": start, "length": length, "step_index": row["step_index"]}
        for start, length in draw(st.sampled_from(spans))
    ]


def _bad_prefix(draw: Draw, rows: list[Row]) -> None:
    for row in rows:
        row["parent_step_index"], row["prefix_length"] = None, 0
        row["prompt_suffix_ids"] = row.pop("prompt_token_ids")
    row = _any(draw, rows)
    way = draw(st.sampled_from(["root", "self", "long", "negative"]))
    if way in ("self", "root"):
        row["parent_step_index"] = row["step_index"] if way == "self" else None
        row["prefix_length"] = 1 if way == "root" else 0
    elif way == "long" and row["step_index"] > 0:
        row["parent_step_index"], row["prefix_length"] = 0, 10_000
    else:
        row["prefix_length"] = -1


def _long_routes(draw: Draw, rows: list[Row]) -> None:
    row = _any(draw, rows)
    num = len(row["prompt_token_ids"]) + len(row["response_ids"])
    way = draw(st.sampled_from(["long", "none", "negative"]))
    count = {"long": num + 1, "none": 0, "negative": num}[way]
    expert = -1 if way == "negative" else 0
    row["rollout_expert_indices"] = [[[0, expert], [0, 1]] for _ in range(count)]


def _bad_metrics(draw: Draw, rows: list[Row]) -> None:
    entry = {"key": "turns", "value": 1.0}
    bad: list[Any] = [entry | {"key": None}, entry | {"value": None}, None, entry]
    _any(draw, rows)["metrics"] = [entry, draw(st.sampled_from(bad))]


def _picture(start: int | None, length: int | None, sha256: str | None = None) -> Row:
    return {"sha256": sha256, "start": start, "length": length}


def _bad_picture(draw: Draw, rows: list[Row]) -> None:
    digest = "0" * 64
    bad = ["a.png", digest, f"sha256:{digest[1:]}", f"SHA256:{digest}"]
    unplaced = _picture(None, None)
    _any(draw, rows)["pictures"] = [unplaced, _picture(None, None, draw(st.sampled_from(bad)))]


def _bad_span(draw: Draw, rows: list[Row]) -> tuple[str, ...]:
    row = _any(draw, rows)
    num = len(row["prompt_token_ids"]) + len(row["response_ids"])
    bad = [(-1, 1), (-1, None), (0, 0), (0, -1), (num, 1), (num, None), (0, num + 1), (None, 1)]
    bad += [(_MOST, 1), (_MOST, _MOST), (1, _MOST)]
    ways = [[_picture(None, None), _picture(*span)] for span in bad]
    ways.append([_picture(0, 1), _picture(None, None), _picture(0, 1)])
    row["pictures"] = draw(st.sampled_from(ways))
    return ("pictures",)


def _trained_redaction(draw: Draw, rows: list[Row]) -> None:
    row = _any(draw, rows)
    at = _position(draw, row["response_ids"])
    row["loss_mask"][at] = True
    row["redacted"] = [i == at for i in range(len(row["response_ids"]))]


BREAKERS: dict[str, Breaker] = {
    "unique_trajectory": Breaker(_duplicate),
    "contiguous_trajectory": Breaker(_split),
    "step_index_sequence": Breaker(_renumber),
    "boundary_alignment": Breaker(_flip_boundary),
    "final_row_is_last": Breaker(_open_end),
    "nonempty_prompt": Breaker(_empty_prompt),
    "nonempty_response": Breaker(_empty_response),
    "lengths_align": Breaker(_shift_logprobs, ("rollout_logprobs", "sampling_support")),
    "token_range": Breaker(_negative_token, ("sampling_support",)),
    "mask_trains_something": Breaker(_mask_all),
    "response_in_prompt": Breaker(_answer_in_prompt),
    "logprobs_finite": Breaker(
        _set_logprob([float("nan"), float("-inf"), float("inf"), -9999.0]), LOGPROBS
    ),
    "logprobs_nonpositive": Breaker(_set_logprob([0.25, 7.0]), LOGPROBS),
    "versions_of_tokens": Breaker(_bad_versions, ("policy_version", "policy_versions")),
    "support_has_token": Breaker(_bad_support, ("sampling_support",)),
    "teacher_shape": Breaker(_bad_teacher, ("teacher_token_ids", "teacher_logprobs")),
    "redacted_untrained": Breaker(_trained_redaction, ("redacted",)),
    "reward_finite": Breaker(_bad_reward, ("reward",)),
    "reward_matches_rewards": Breaker(_other_sum, ("reward", "rewards")),
    "outcome_on_last_step": Breaker(_early_reward, ("reward",)),
    "segments_in_range": Breaker(_bad_segment, ("segments",)),
    "prefix_reference": Breaker(_bad_prefix),
    "routing_shape": Breaker(_long_routes, ("rollout_expert_indices",)),
    "metrics_keys": Breaker(_bad_metrics, ("metrics",)),
    "picture_reference": Breaker(_bad_picture, ("pictures",)),
    "picture_spans": Breaker(_bad_span),
}
