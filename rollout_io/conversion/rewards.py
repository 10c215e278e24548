"""The rewards file: one JSON line per trajectory, with its outcome or error."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.dataset.opening import open_input
from rollout_io.formats.parsing.jsonl import (
    decode_line,
    read_lines,
    type_error,
    without_lone_surrogates,
)
from rollout_io.formats.parsing.naming import split_session
from schemas.columns import COLUMN_BY_NAME, PREFIX_FIELDS
from schemas.errors import InputError, RolloutError, raise_first

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
    """A line of the rewards file: the outcome of one trajectory.

    Attributes:
        where: File and line.
        reward: The outcome; None if unknown, or if a failed trajectory has none.
        error: Why the trajectory failed, or None.
        metrics: The other numbers of the line.
        user_values: The other strings of the line, and its lists and objects as JSON.
        is_exact: True if the line names its run by `instance_id` and `repetition_id`, which have no
            short form.
        stop_reason: Why the run ended, if its harness says; else the engine's word for the last call.
    """

    where: str
    reward: float | None
    error: str | None
    metrics: dict[str, float]
    user_values: dict[str, str]
    is_exact: bool = False
    stop_reason: str | None = None


Key = tuple[str, int]


def read_rewards(name: str | Path, path: Path | None = None) -> dict[str, Outcome]:
    """Read a rewards file; return its outcomes by session name, in file order.

    A line has `session` or `instance_id` and `repetition_id`, and `reward` (a number, or null if
    unknown) or `error` (a string) or both. Other numbers and booleans become metrics; other strings
    become user columns. `outcomes.by_run` matches the names to the runs of the log.

    Args:
        name: Name of the file in messages.
        path: Path to read; None reads `name`.

    Raises:
        InputError: `json_line`, `record_type`, `reward_line`, `session_name`: a line is invalid, or
            two lines are about the same trajectory.

    Example:
        >>> # {"session": "shop-1/0", "reward": 1.0, "style": "append", "truth": 6}
        >>> read_rewards("shop.rewards.jsonl")["shop-1/0"].metrics
        {'truth': 6.0}
    """
    outcomes: dict[str, Outcome] = {}
    errors: list[RolloutError] = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    with open_input(path or name) as file:
        for line in read_lines(file):
            where = f"{name}:{line.number}"
            try:
                session, outcome = _parse(_decode(decoder, line.content, where), where)
                if session in outcomes:
                    raise second_line(session, outcomes[session], outcome)
                outcomes[session] = outcome
            except RolloutError as error:
                errors.append(error)
    if errors:
        raise_first(errors)
    return outcomes


def _decode(
    decoder: msgspec.json.Decoder[dict[str, Any]], content: bytes, where: str
) -> dict[str, Any]:
    if without_lone_surrogates(content) != content:
        got = "a lone surrogate (half of a character), which no name of a run has"
        hint = "write the name of the run as it is in the log"
        raise InputError("json_line", where, got, "", hint)
    return decode_line(decoder, content, where)


def second_line(session: str, first: Outcome, second: Outcome) -> InputError:
    """Return the error for a second line about the same trajectory."""
    got = f"session {session} already has a line: {first.where}"
    return InputError(_RULE, second.where, got, "", "keep only one of the two lines")


def parse_outcome(record: dict[str, Any], where: str) -> tuple[Key, Outcome]:
    """Parse the outcome of one trajectory, named "instance/repetition", from one line.

    Args:
        record: The parsed line; a null `reward` means that it is unknown.
        where: File and line, for error messages.

    Raises:
        InputError: `reward_line`, `record_type`, `session_name`: the line is not a valid outcome.
    """
    session, outcome = _parse(record, where)
    return split_session(session, where), outcome


def _parse(record: dict[str, Any], where: str) -> tuple[str, Outcome]:
    names = _Fields.__struct_fields__
    known = {name: record[name] for name in names if name in record}
    try:
        fields = msgspec.convert(known, _Fields)
    except msgspec.ValidationError as error:
        raise type_error(error, where) from None
    if fields.reward is None and fields.error is None and "reward" not in record:
        hint = "remove the line if the reward is unknown; set `error` if the run failed"
        near = difflib.get_close_matches("reward", record, 1)
        hint = f"did you mean `reward`, not `{near[0]}`?" if near else hint
        got = "the line has neither `reward` nor `error`"
        raise InputError(_RULE, where, got, "", hint)
    others = {name: value for name, value in record.items() if name not in names}
    clash = sorted(k for k in others if k in {*RESERVED_NAMES, ""} or "\0" in k)
    if clash:
        got = "a key is empty"
        if "\0" in clash[0]:
            got = f"the key {clash[0]!r} contains a NUL character, which no column name may have"
        elif clash[0]:
            got = f"the key {clash[0]!r} is the name of a column of the rollout table"
        raise InputError(_RULE, where, got, "", "rename the key")
    metrics = {k: _number(k, v, where) for k, v in others.items() if isinstance(v, int | float)}
    texts = {k: _text(v) for k, v in others.items() if k not in metrics and v is not None}
    return _session(fields, where), Outcome(
        where=where,
        reward=fields.reward,
        error=fields.error,
        metrics=metrics,
        user_values=texts,
        is_exact=None not in {fields.instance_id, fields.repetition_id},
    )


def _session(fields: _Fields, where: str) -> str:
    if fields.session is None and (fields.instance_id is None or fields.repetition_id is None):
        got = "the line has neither `session` nor `instance_id` and `repetition_id`"
        hint = 'name the trajectory: {"session": "shop-1/0", "reward": 1.0}'
        raise InputError(_RULE, where, got, "", hint)
    session = fields.session
    if session is None:
        session = f"{fields.instance_id}/{fields.repetition_id}"
    given = (fields.instance_id, fields.repetition_id)
    if given == (None, None):
        return session
    key = split_session(session, where)
    if any(g is not None and g != k for g, k in zip(given, key, strict=True)):
        got = f"instance_id and repetition_id do not match session {fields.session!r}"
        raise InputError(_RULE, where, got, "", "give either the session or the ids")
    return session


def _number(name: str, value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        got = f"{name!r} is a number of {len(str(value))} digits, above the maximum of 1.8e308"
        raise InputError(_RULE, where, got, "", "write it as a string, in quotes") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
