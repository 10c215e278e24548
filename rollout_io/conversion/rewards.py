"""The rewards file: one JSON line per trajectory, with its outcome or error.

`settle` merges it with the rewards in the log.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.conversion.rejections import raise_first
from rollout_io.conversion.rows import Settled
from rollout_io.dataset.opening import open_input
from rollout_io.formats.base import Place, Rejected, Run, Step, Trajectory
from rollout_io.formats.parsing.jsonl import (
    decode_line,
    read_lines,
    type_error,
    without_lone_surrogates,
)
from rollout_io.formats.parsing.records import SESSION_SHAPE, full_name, split_session
from schemas.columns import COLUMN_BY_NAME, PREFIX_FIELDS
from schemas.errors import ConfigError, InputError, RolloutError, count

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

    It `is_exact` if it names its run by `instance_id` and `repetition_id`, which have no short form.
    The `stop_reason` is the harness's word, if it says why the run ended.
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
                if without_lone_surrogates(line.content) != line.content:
                    finding = "a lone surrogate (half of a character), which no name of a run has"
                    hint = "write the name of the run as it is in the log"
                    raise InputError("json_line", where, finding, "", hint)
                session, outcome = _parse(decode_line(decoder, line.content, where), where)
                if session in outcomes:
                    raise second_line(session, outcomes[session], outcome)
                outcomes[session] = outcome
            except RolloutError as error:
                errors.append(error)
    if errors:
        raise_first(errors)
    return outcomes


def second_line(session: str, first: Outcome, second: Outcome) -> InputError:
    """Return the error for a second line about the same trajectory."""
    finding = f"session {session} already has a line: {first.where}"
    return InputError(_RULE, second.where, finding, "", "keep only one of the two lines")


def parse_outcome(record: dict[str, Any], where: str) -> tuple[Key, Outcome]:
    """Parse the outcome of one trajectory, named "instance/repetition", from one line."""
    session, outcome = _parse(record, where)
    return split_session(session, where), outcome


def _parse(record: dict[str, Any], where: str) -> tuple[str, Outcome]:
    names = _Fields.__struct_fields__
    values = {name: record[name] for name in names if name in record}
    try:
        fields = msgspec.convert(values, _Fields)
    except msgspec.ValidationError as error:
        raise type_error(error, where) from None
    if fields.reward is None and fields.error is None and "reward" not in record:
        hint = "remove the line if the reward is unknown; set `error` if the run failed"
        near = difflib.get_close_matches("reward", record, 1)
        hint = f"did you mean `reward`, not `{near[0]}`?" if near else hint
        finding = "the line has neither `reward` nor `error`"
        raise InputError(_RULE, where, finding, "", hint)
    others = {name: value for name, value in record.items() if name not in names}
    clash = sorted(k for k in others if k in {*RESERVED_NAMES, ""} or "\0" in k)
    if clash:
        why = "contains a NUL character, which no column name may have"
        if "\0" not in clash[0]:
            why = "is the name of a column of the rollout table"
        finding = f"the key {clash[0]!r} {why}" if clash[0] else "a key is empty"
        raise InputError(_RULE, where, finding, "", "rename the key")
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
    session, named = fields.session, (fields.instance_id, fields.repetition_id)
    if session is None and None in named:
        finding = "the line has neither `session` nor `instance_id` and `repetition_id`"
        hint = 'name the trajectory: {"session": "shop-1/0", "reward": 1.0}'
        raise InputError(_RULE, where, finding, "", hint)
    if session is None:
        session = f"{fields.instance_id}/{fields.repetition_id}"
    if named == (None, None):
        return session
    key = split_session(session, where)
    if any(g is not None and g != k for g, k in zip(named, key, strict=True)):
        finding = f"instance_id and repetition_id do not match session {fields.session!r}"
        raise InputError(_RULE, where, finding, "", "give either the session or the ids")
    return session


def _number(name: str, value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        finding = f"{name!r} is a number of {len(str(value))} digits, above the maximum of 1.8e308"
        raise InputError(_RULE, where, finding, "", "write it as a string, in quotes") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


_SHOWN = 4  # maximum number of names in an error
LOGGED_REWARD, LOGGED_ERROR = "logged_reward", "logged_error"


def settle(
    run: Run,
    logged: Trajectory,
    steps: list[Step],
    outcome: Outcome | None,
    reward_key: str | None = None,
) -> Settled:
    """Return a trajectory with its outcome stored in its steps.

    The outcome comes from the rewards file if it has one, otherwise from the log (the reward named
    `reward_key`, if set). The rewards file overrides the log completely. If the log differs, its
    reward is kept as the metric `logged_reward` (unless a metric already has this value), and its
    error as the user value `logged_error`. The last step gets the outcome and the metrics. If the
    outcome is known, earlier steps without a reward get 0.0. The rewards of a failed trajectory
    become null, and their values are kept as `metrics["reward"]`. A trajectory without steps
    becomes one row with empty lists.
    """
    where = run.places[0].where if run.places else outcome.where if outcome else run.instance_id
    steps = steps or [Step(source=where)]
    last = steps[-1]
    error = logged.error if outcome is None else outcome.error
    reward = _chosen(logged, reward_key, where) if outcome is None else outcome.reward
    metrics, texts = {**logged.metrics}, {**logged.user_values}
    if outcome is not None:
        rewards = {outcome.reward, *metrics.values()}
        if logged.reward is not None and logged.reward not in rewards:
            metrics[LOGGED_REWARD] = logged.reward
        if logged.error is not None and logged.error != outcome.error:
            texts[LOGGED_ERROR] = logged.error
        metrics |= outcome.metrics
        texts |= outcome.user_values
    last.metrics = {**(last.metrics or {}), **metrics} or None
    last.reward = last.reward if reward is None else reward
    for step in steps:
        if error is None and last.reward is not None and step.reward is None:
            step.reward = 0.0
        if error is not None and step.reward is not None:
            step.metrics = {**(step.metrics or {}), "reward": step.reward}
            step.reward = None
    assert run.repetition_id is not None
    return Settled(
        instance_id=run.instance_id,
        repetition_id=run.repetition_id,
        steps=steps,
        error=error,
        user_values=texts,
    )


def _chosen(logged: Trajectory, key: str | None, where: str) -> float | None:
    if key is None or logged.error is not None:
        return logged.reward
    if key in logged.metrics:
        return logged.metrics[key]
    near = difflib.get_close_matches(key, logged.metrics, 1)
    names = ", ".join(sorted(logged.metrics))
    finding = f"the run has no reward {key!r}" + (f", only {names}" if names else "")
    hint = f"did you mean --reward {near[0]}?" if near else "omit --reward, or pass --rewards FILE"
    raise ConfigError("reward_key", where, finding, "", hint)


def by_run(
    outcomes: Mapping[str, Outcome], keys: Collection[Key]
) -> tuple[dict[Key, Outcome], list[Rejected]]:
    """Return the outcomes by run, and a rejection for each whose name is no run's or several's.

    A name is `instance/repetition`, or the instance alone if it has one run, or the trajectory id
    (`instance_repetition`). A line with `instance_id` and `repetition_id` refers to exactly that
    run. A failed run that made no call may be missing from the log; its line must use the full name.
    `outcomes` are keyed by the names in the rewards file, `keys` are the runs of the log.
    """
    by_key: dict[Key, Outcome] = {}
    unmatched: list[tuple[str, Outcome]] = []
    for session, outcome in outcomes.items():
        key = full_name(session)
        if key is not None and key in keys:
            by_key[key] = outcome
        else:
            unmatched.append((session, outcome))
    unresolved: list[tuple[str, Outcome, list[Key]]] = []
    by_name: defaultdict[str, list[Key]] = defaultdict(list)
    for key in keys if unmatched else ():
        by_name[key[0]].append(key)
        by_name[f"{key[0]}_{key[1]}"].append(key)
    for session, outcome in unmatched:
        key = full_name(session)
        fits = [] if outcome.is_exact else by_name.get(session, [])
        if len(fits) == 1:
            key = fits[0]
        elif fits or key is None or outcome.error is None:
            unresolved.append((session, outcome, fits))
            continue
        if key in by_key:
            raise second_line(_session_name(key), by_key[key], outcome)
        by_key[key] = outcome
    return by_key, list(_rejected(unresolved, keys))


def _rejected(
    unresolved: Sequence[tuple[str, Outcome, list[Key]]], keys: Iterable[Key]
) -> Iterator[Rejected]:
    """Yield an error for each name that matches no run or several; suggest a similar name."""
    sessions = [_session_name(key) for key in keys] if unresolved else []
    near = difflib.get_close_matches(unresolved[0][0], sessions, 1) if unresolved else []
    example = near[0] if near else min(sessions, default="shop-1/0")
    for session, outcome, fits in unresolved:
        where, finding = outcome.where, f"session {session!r}"
        if fits:
            names = ", ".join([*map(_session_name, fits[:_SHOWN]), *["..."] * bool(fits[_SHOWN:])])
            finding += f" matches {count(len(fits), 'run')}: {names}"
            hint = "give the full name of the run"
            error = InputError("session_name", where, finding, "", hint)
        elif full_name(session) is None:
            hint = f"name a run of the log, for example {example!r}"
            error = InputError("session_name", where, finding, SESSION_SHAPE, hint)
        else:
            finding += " has a reward but no call in the logs"
            hint = (
                "add the missing log file, or set `error` for a run that made no call; if the"
                " rewards file covers more runs than the logs, pass --on-error skip, which reports"
                " the other rewards as rejected"
            )
            hint += f"; the nearest session is {near.pop()!r}" if near else ""
            error = InputError("unknown_session", where, finding, "", hint)
        yield Rejected(Place(Path(where), where), error, "reward")


def _session_name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"
