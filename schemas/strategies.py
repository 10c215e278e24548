"""Hypothesis strategies for valid rollout tables, and for tables that break one invariant.

For property tests of your own code (`pip install "rollout-io[testing]"`):

    @given(rollout_tables())
    def test_my_filter_keeps_trajectories_whole(table):
        validate(my_filter(table))
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from schemas.breakers import BREAKERS, LOGPROBS, Draw, Row, break_types
from schemas.columns import (
    COLUMN_BY_NAME,
    COLUMNS,
    PICTURES,
    arrow_schema,
    routing_type,
)
from schemas.types import PREFIX_TYPES

NUM_LAYERS, TOPK, VOCAB_SIZE = 2, 2, 8

OPTIONAL_COLUMNS = tuple(c.name for c in COLUMNS if c.nullable)
USER_FIELD = pa.field("difficulty", pa.float64())

_HALVES = st.integers(-4, 4).map(lambda n: n / 2)
_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5)
_LOGPROBS = st.floats(-50.0, 0.0, width=32)
_PER_TRAJECTORY = ("temperature", "top_p", "top_k", "sampling_extra", "agent")  # mostly
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "\u00e9?"}, {"type": "text", "text": ""}],
    },
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}, "id": "c"}]},
    {"role": "tool", "content": "1", "tool_call_id": "c"},
]
_ENTRIES = st.builds(
    lambda k, v: {"key": k, "value": v}, st.sampled_from(["calls", "score"]), _HALVES
)
_FLOATS = st.sampled_from([0.5, 1.0])
_DRAWN: dict[str | pa.DataType, st.SearchStrategy[Any]] = {
    "messages": st.integers(1, len(_CHAT)).map(lambda num: json.dumps(_CHAT[:num])),
    "metrics": st.lists(_ENTRIES, max_size=2, unique_by=lambda entry: entry["key"]),
    pa.string(): st.sampled_from(["", "a", "stop", "[]", '{"k": 1}']),
    pa.int32(): st.integers(0, 3),
    pa.float32(): _FLOATS,
    pa.float64(): _FLOATS,
}
"""Values by column, or by type: from small sets, so that neighbours are often equal."""


@st.composite
def rollout_tables(
    draw: Draw,
    *,
    min_trajectories: int = 0,
    max_trajectories: int = 4,
    max_steps: int = 6,
    optional: tuple[str, ...] | None = None,
    errors: bool = True,
    pictures: bool = True,
    user_column: bool = True,
) -> pa.Table:
    """Draw valid rollout tables, one row per step, that cause neither errors nor warnings.

    Prompts often extend, cut or repeat the tokens of earlier steps of their trajectory, to exercise
    prefix encoding and merging. Sampling settings and agents mostly stay the same within a trajectory.
    Left out: rows that `pipelines.merge` made (merge the table for these), and text at random
    (`messages` and other texts are from small sets).

    Args:
        draw: Supplied by Hypothesis.
        min_trajectories: Minimum number of trajectories.
        max_trajectories: Maximum number of trajectories.
        max_steps: Maximum number of steps of a trajectory.
        optional: Nullable columns of every table; if None, each table has a random subset.
        errors: If true, some trajectories may have failed.
        pictures: If true, some tables have pictures, whose files do not exist: as a dataset, such a
            table breaks the rule `picture_reference`.
        user_column: If true, some tables have an additional user column.
    """
    if optional is None:
        optional = tuple(n for n in OPTIONAL_COLUMNS if draw(st.booleans()))
    wanted = {"error": errors, PICTURES: pictures}
    optional = tuple(n for n in optional if wanted.get(n, True))
    user = user_column and draw(st.booleans())
    count = draw(st.integers(min_trajectories, max_trajectories))
    names = st.tuples(st.sampled_from(["p", "q_1"]), st.integers(0, 9))
    rows: list[Row] = []
    for instance, repetition in draw(st.lists(names, min_size=count, max_size=count, unique=True)):
        steps = _trajectory(draw, draw(st.integers(1, max_steps)), optional)
        for row in steps:
            row |= {"instance_id": instance, "repetition_id": repetition}
            row["trajectory_id"] = f"{instance}_{repetition}"
            row[USER_FIELD.name] = draw(st.none() | _HALVES)
        rows += steps
    return table_of(rows, optional, user_column=user)


@st.composite
def broken_tables(draw: Draw, rule: str) -> pa.Table:
    """Draw tables that break the named invariant and no other.

    Args:
        draw: Supplied by Hypothesis.
        rule: A key of `schemas.RULES`.
    """
    if rule == "columns_and_types":
        return break_types(draw, draw(rollout_tables(min_trajectories=1, pictures=False)))
    assert rule in BREAKERS, f"{rule} has no entry in BREAKERS of schemas/breakers.py"
    breaker = BREAKERS[rule]
    sound = rollout_tables(
        min_trajectories=2, optional=breaker.columns, errors=False, user_column=False
    )
    rows = draw(sound).to_pylist()
    breaker.apply(draw, rows)
    return table_of(rows, tuple(n for n in OPTIONAL_COLUMNS if any(n in row for row in rows)))


def table_of(rows: list[Row], optional: tuple[str, ...], *, user_column: bool = False) -> pa.Table:
    """Convert rows to a table with the declared types and the nullable columns in `optional`."""
    fields = list(arrow_schema(optional))
    if "rollout_expert_indices" in optional:
        fields.append(pa.field("rollout_expert_indices", routing_type(NUM_LAYERS, TOPK)))
    if user_column:
        fields.append(USER_FIELD)
    prefix = [pa.field(n, t) for n, t in PREFIX_TYPES.items() if rows and n in rows[0]]
    if prefix:
        fields = [f for f in fields if f.name != "prompt_token_ids"] + prefix
    return pa.table(
        [pa.array([row.get(f.name) for row in rows], f.type) for f in fields],
        schema=pa.schema(fields),
    )


def _trajectory(draw: Draw, num_steps: int, optional: tuple[str, ...]) -> list[Row]:
    shared = {name: _nullable_value(draw, name) for name in _PER_TRAJECTORY if name in optional}
    failed = "error" in optional and draw(st.integers(0, 4)) == 0
    if failed:
        shared["error"] = "timeout"
    rows: list[Row] = []
    for index in range(1 if failed and draw(st.booleans()) else num_steps):
        step = _step(draw, index, rows, optional, failed=failed)
        differs = draw(st.sampled_from([True] + [False] * 7))
        error = {"error": shared["error"]} if failed else {}
        rows.append(step | (error if differs else shared))
    rows[-1]["is_last_step"] = True
    _carry_outcome(rows)
    return rows


def _step(
    draw: Draw, index: int, earlier: list[Row], optional: tuple[str, ...], *, failed: bool
) -> Row:
    empty = failed and index == 0 and draw(st.booleans())
    prompt, pictures = ([], []) if empty else _prompt(draw, earlier)
    response = [] if empty else draw(_TOKENS)
    num = len(response)
    row: Row = {
        "step_index": index,
        "is_last_step": False,
        "prompt_token_ids": prompt,
        "response_ids": response,
        "loss_mask": [i == 0 or draw(st.booleans()) for i in range(num)],
        "token_source": draw(st.sampled_from(["engine", "engine", "engine", "retokenized"])),
    }
    for column in COLUMNS:
        if column.name in optional and column.name not in row and column.type is not None:
            row[column.name] = _nullable_value(draw, column.name)
    row |= _per_token(draw, row, optional, failed=failed)
    if "pictures" in optional and draw(st.integers(0, 9)) > 0:
        row["pictures"] = pictures + _pictures(draw, pictures, num + len(prompt))
    row["error"] = None
    return row


def _per_token(draw: Draw, row: Row, optional: tuple[str, ...], *, failed: bool) -> Row:
    num, columns = len(row["response_ids"]), Row()
    present = [name for name in optional if draw(st.integers(0, 9)) > 0]

    def per_token(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=num, max_size=num))

    columns |= {name: per_token(_LOGPROBS) for name in LOGPROBS if name in present}
    if "sampling_support" in present:
        columns["sampling_support"] = _sets(draw, row["response_ids"])
    if "policy_versions" in present:
        columns["policy_versions"] = versions = per_token(st.integers(0, 3))
        if "policy_version" in optional:
            columns["policy_version"] = min(versions, default=0)
    both = {"teacher_token_ids", "teacher_logprobs"}
    if both <= set(optional) and draw(st.booleans()):
        columns["teacher_token_ids"] = ids = _sets(draw, row["response_ids"])
        columns["teacher_logprobs"] = [[draw(_LOGPROBS) for _ in set_ids] for set_ids in ids]
    if "redacted" in present:
        columns["redacted"] = marks = [i > 0 and draw(st.booleans()) for i in range(num)]
        pairs = zip(row["loss_mask"], marks, strict=True)
        columns["loss_mask"] = [trains and not mark for trains, mark in pairs]
    columns["reward"] = draw(_HALVES) if "reward" in present and not failed else None
    columns["rewards"] = None
    is_known = "reward" not in optional or columns["reward"] is not None
    if "rewards" in present and num and not failed and is_known:
        columns["rewards"] = per_token(_HALVES)
        columns["reward"] = sum(columns["rewards"])
    if "segments" in present and num and draw(st.integers(0, 3)) == 0:
        columns["segments"] = _segments(draw, num, row["step_index"])
    total = num + len(row["prompt_token_ids"])
    if "rollout_expert_indices" in present and total:
        num_routed, expert = draw(st.integers(1, total)), draw(st.integers(0, 3))
        routes = [[[expert, (t + i) % 4] for i in range(NUM_LAYERS)] for t in range(num_routed)]
        columns["rollout_expert_indices"] = routes
    return columns


def _prompt(draw: Draw, earlier: list[Row]) -> tuple[list[int], list[Row]]:
    """Draw a prompt, and the pictures of the tokens that it repeats from an earlier step."""
    fresh: list[int] = draw(_TOKENS)
    if not earlier or draw(st.integers(0, 4)) == 0:
        return fresh, []
    parent = earlier[-1] if draw(st.booleans()) else draw(st.sampled_from(earlier))
    tokens: list[int] = parent["prompt_token_ids"] + parent["response_ids"]
    num_repeated = len(tokens) if draw(st.booleans()) else draw(st.integers(0, len(tokens)))
    pictures = [
        entry
        for entry in parent.get("pictures") or ()
        if (entry["start"] is None or entry["start"] + entry["length"] <= num_repeated)
        and draw(st.integers(0, 4))
    ]
    added = fresh if draw(st.booleans()) or not num_repeated else []
    return tokens[:num_repeated] + added, pictures


def _segments(draw: Draw, num_tokens: int, step_index: int) -> list[Row]:
    start = draw(st.integers(0, num_tokens - 1))
    length = draw(st.integers(1, num_tokens - start))
    spans = [{"start": start, "length": length, "step_index": step_index}]
    if start + length < num_tokens and draw(st.booleans()):
        spans.append({"start": start + length, "length": 1, "step_index": step_index + 1})
    return spans


def _sets(draw: Draw, response: list[int]) -> list[list[int]]:
    """Draw the sets that tokens were sampled from; empty at some tokens that were not sampled."""
    others = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3, unique=True)
    sets = [[token, *(i for i in draw(others) if i != token)] for token in response]
    return [ids if draw(st.integers(0, 4)) else [] for ids in sets]


def _pictures(draw: Draw, before: list[Row], num_tokens: int) -> list[Row]:
    """Draw entries with ascending spans; some without a span, some without a digest."""
    first = max((p["start"] + p["length"] for p in before if p["start"] is not None), default=0)
    bounds = sorted(draw(st.lists(st.integers(first, num_tokens), max_size=4, unique=True)))
    spans: list[Any] = [(a, b - a) for a, b in zip(bounds[::2], bounds[1::2], strict=False)]
    if draw(st.integers(0, 3)) == 0:
        spans.insert(draw(st.integers(0, len(spans))), (None, None))
    digests = st.none() | st.sampled_from(["0", "f"]).map(lambda digit: f"sha256:{digit * 64}")
    return [{"sha256": draw(digests), "start": start, "length": num} for start, num in spans]


def _nullable_value(draw: Draw, name: str) -> Any:
    if name in _DRAWN:
        return draw(st.none() | _DRAWN[name])
    values = _DRAWN.get(COLUMN_BY_NAME[name].type)
    return None if values is None or not draw(st.booleans()) else draw(st.none() | values)


def _carry_outcome(rows: list[Row]) -> None:
    """If the last row has no reward, set earlier rewards to 0, as outcome_on_last_step requires."""
    last = rows[-1]
    if any(row.get("reward") for row in rows[:-1]) and not last["reward"] and not last["error"]:
        for row in rows[:-1]:
            row["rewards"] = None if row["rewards"] is None else [0.0] * len(row["rewards"])
            row["reward"] = None if row["reward"] is None else 0.0
