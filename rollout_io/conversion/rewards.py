"""The rewards file: one JSON line per trajectory with its outcome, or why it failed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.logs.jsonl import decode_line, open_input, read_lines, type_error
from rollout_io.logs.naming import split_session
from schemas.columns import COLUMN_BY_NAME, PREFIX_FIELDS
from schemas.errors import RolloutError, raise_first

_RULE = "reward_line"
RESERVED_NAMES = frozenset(COLUMN_BY_NAME) | {f.name for f in PREFIX_FIELDS}


class _Fields(msgspec.Struct):
    session: str | None = None
    instance_id: str | None = None
    repetition_id: int | None = None
    reward: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a rewards file says of one trajectory.

    Attributes:
        where: File and line.
        reward: The outcome; None for a failed trajectory without one.
        error: Why the trajectory failed, or None.
        metrics: The line's other numbers.
        user_values: The line's other texts, and JSON of its lists and objects.
    """

    where: str
    reward: float | None
    error: str | None
    metrics: dict[str, float]
    user_values: dict[str, str]


Key = tuple[str, int]


def read_rewards(path: str | Path) -> dict[Key, Outcome]:
    """Outcomes by (instance_id, repetition_id), in file order.

    A line has `session` ("instance/repetition") or `instance_id` and `repetition_id`; `reward` (a
    number, or null where it is unknown) or `error` (a text), or both; further numbers and booleans become metrics, texts become
    columns of the user's.

    Raises:
        RolloutError: A bad line, or a second line for a trajectory.

    Example:
        >>> # {"session": "shop-1/0", "reward": 1.0, "style": "append", "truth": 6}
        >>> read_rewards("shop.rewards.jsonl")[("shop-1", 0)].metrics
        {'truth': 6.0}
    """
    outcomes: dict[Key, Outcome] = {}
    errors: list[RolloutError] = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    with open_input(Path(path)) as file:
        for line in read_lines(file):
            where = f"{path}:{line.number}"
            try:
                key, outcome = parse_outcome(decode_line(decoder, line.content, where), where)
                if key in outcomes:
                    raise _twice(key, outcomes[key].where, where)
                outcomes[key] = outcome
            except RolloutError as error:
                errors.append(error)
    if errors:
        raise_first(errors)
    return outcomes


def parse_outcome(record: dict[str, Any], where: str) -> tuple[Key, Outcome]:
    """The outcome that one line gives to one trajectory.

    Args:
        record: The line; a `reward` that is null is unknown.
        where: Its place.

    Raises:
        RolloutError: reward_line, record_type, session_name.
    """
    names = _Fields.__struct_fields__
    known = {name: record[name] for name in names if name in record}
    try:
        fields = msgspec.convert(known, _Fields)
    except msgspec.ValidationError as error:
        raise type_error(error, where) from None
    if fields.reward is None and fields.error is None and "reward" not in record:
        hint = "leave the line out if the reward is unknown; set `error` if the run failed"
        near = difflib.get_close_matches("reward", record, 1)
        hint = f"did you mean `reward`, not `{near[0]}`?" if near else hint
        raise RolloutError(_RULE, where, "neither reward nor error", "one of them", hint)
    others = {name: value for name, value in record.items() if name not in names}
    clash = sorted(others.keys() & {*RESERVED_NAMES, ""})
    if clash:
        expected = "a name, and not that of a column of the rollout table"
        raise RolloutError(_RULE, where, f"key {clash[0]!r}", expected, "rename the key")
    metrics = {k: _number(k, v, where) for k, v in others.items() if isinstance(v, int | float)}
    texts = {k: _text(v) for k, v in others.items() if k not in metrics and v is not None}
    return _key(fields, where), Outcome(
        where=where, reward=fields.reward, error=fields.error, metrics=metrics, user_values=texts
    )


def _key(fields: _Fields, where: str) -> Key:
    if fields.session is None:
        if fields.instance_id is None or fields.repetition_id is None:
            expected = "`session`, or `instance_id` and `repetition_id`"
            hint = 'for example {"session": "shop-1/0", "reward": 1.0}'
            raise RolloutError(_RULE, where, "no trajectory named", expected, hint)
        return split_session(f"{fields.instance_id}/{fields.repetition_id}", where)
    key = split_session(fields.session, where)
    given = (fields.instance_id, fields.repetition_id)
    if any(g is not None and g != k for g, k in zip(given, key, strict=True)):
        expected = f"session {fields.session!r} to agree"
        hint = "one of the two is another trajectory's"
        raise RolloutError(
            _RULE, where, f"instance {given[0]}, repetition {given[1]}", expected, hint
        )
    return key


def _twice(key: Key, first: str, second: str) -> RolloutError:
    got = f"a second line for session {key[0]}/{key[1]}"
    hint = f"keep one of the two; the first is {first}"
    return RolloutError(_RULE, second, got, "one line per trajectory", hint)


def _number(name: str, value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        got, expected = f"a number of {len(str(value))} digits as {name!r}", "numbers below 1.8e308"
        hint = "give it as a text, in quotes"
        raise RolloutError(_RULE, where, got, expected, hint) from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
