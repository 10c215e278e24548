"""Sessions of a log: the order of their calls, and how an outcome settles their rewards."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollout_io.adapters import Step, Trajectory
from rollout_io.adapters.rewards import Key, Outcome
from schemas.errors import RolloutError


class Entry(NamedTuple):
    """Where a call is, and what orders it among the calls of its session."""

    path: Path
    number: int
    offset: int
    num_bytes: int
    time: float | None
    final: bool
    num_prompt_tokens: int
    digest: bytes
    reward: float | None

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.path}:{self.number}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Time; of calls at one time: the final one last, the shorter prompt first."""
        return self.time, self.final, self.num_prompt_tokens, self.digest


def order_sessions(sessions: Mapping[Key, list[Entry]]) -> Iterator[RolloutError]:
    """Sort the calls of each session in place; what is wrong with a session is yielded."""
    for key, entries in sessions.items():
        try:
            _order(f"session {key[0]}/{key[1]}", entries)
        except RolloutError as error:
            yield error


def check_outcomes(
    sessions: Mapping[Key, Sequence[Entry]], outcomes: Mapping[Key, Outcome]
) -> Iterator[RolloutError]:
    """Outcomes that contradict the log, or that belong to no session of it."""
    yield from unknown_outcomes(sessions.keys(), outcomes)
    for key, outcome in outcomes.items():
        last = sessions[key][-1] if key in sessions else None
        if last and outcome.reward is not None and last.reward not in {None, outcome.reward}:
            yield _conflict(outcome, last)


def unknown_outcomes(
    keys: Collection[Key], outcomes: Mapping[Key, Outcome]
) -> Iterator[RolloutError]:
    """Outcomes of trajectories that are not among `keys`, but for failed ones: those made no call."""
    known = [f"{key[0]}/{key[1]}" for key in keys]
    for key, outcome in outcomes.items():
        if outcome.error is None and key not in keys:
            yield _unknown_session(f"{key[0]}/{key[1]}", outcome.where, known)


def _order(session: str, entries: list[Entry]) -> None:
    timed = [entry for entry in entries if entry.time is not None]
    if 0 < len(timed) < len(entries):
        where = next(entry.where for entry in entries if entry.time is None)
        got, expected = f"a call of {session} without `time`", f"a `time`, as in {timed[0].where}"
        hint = "give every call of a session its time, or none"
        raise RolloutError("mixed_time", where, got, expected, hint)
    if timed:
        entries.sort(key=lambda entry: entry.order)
        _refuse_copies(entries, session)
    finals = [entry for entry in entries if entry.final]
    if len(finals) > 1:
        places = " and ".join(sorted(entry.where for entry in finals[:2]))
        got = f"{session} with {len(finals)} last steps (`final`): {places}"
        hint = "two runs under one session name? number them instance/0, instance/1, ..."
        raise RolloutError("boundary_alignment", finals[1].where, got, "one last step", hint)
    if finals and finals[0] is not entries[-1]:
        got = f"{session} going on after its `final` call, in {entries[-1].where}"
        hint = "correct the `time` of the two calls, or take `final` off the earlier one"
        raise RolloutError("boundary_alignment", finals[0].where, got, "`final` to be last", hint)


def _refuse_copies(entries: Sequence[Entry], session: str) -> None:
    for before, entry in itertools.pairwise(entries):
        if before.digest == entry.digest:
            got = f"a copy of {before.where} ({session})"
            hint = "was a file given twice, or appended to itself?"
            raise RolloutError("duplicate_call", entry.where, got, "each call once", hint)


def _conflict(outcome: Outcome, last: Entry) -> RolloutError:
    got = f"reward {outcome.reward}, but the last call ({last.where}) says {last.reward}"
    hint = "the outcome is given twice and differs: keep the right one"
    return RolloutError("reward_conflict", outcome.where, got, "one outcome", hint)


def _unknown_session(session: str, where: str, known: Sequence[str]) -> RolloutError:
    near = difflib.get_close_matches(session, known, 1)
    hint = "is a log file missing? a run that made no call needs an `error`"
    hint += f"; the nearest session is {near[0]!r}" if near else ""
    got = f"a reward for session {session!r}, which made no call"
    return RolloutError("unknown_session", where, got, "a session of the log", hint)


def settle(key: Key, steps: list[Step], outcome: Outcome | None) -> Trajectory:
    """The trajectory of a session: its steps, with their rewards, metrics and error filled in.

    Where the outcome is known, earlier steps without a reward of their own get 0.0. Rewards of a
    failed trajectory become null; the numbers are kept as `metrics["reward"]`. One without steps
    becomes a single row of empty lists.

    Args:
        key: Instance and repetition.
        steps: In order; changed in place.
        outcome: From the rewards file, or None.
    """
    if not steps:
        assert outcome is not None
        steps = [Step(source=outcome.where)]
    last = steps[-1]
    error, user_values = None, {}
    if outcome is not None:
        error, user_values = outcome.error, outcome.user_values
        last.metrics = dict(outcome.metrics) or None
        last.reward = last.reward if outcome.reward is None else outcome.reward
    for step in steps:
        if error is None and last.reward is not None and step.reward is None:
            step.reward = 0.0
        if error is not None and step.reward is not None:
            step.metrics = {**(step.metrics or {}), "reward": step.reward}
            step.reward = None
    return Trajectory(
        instance_id=key[0],
        repetition_id=key[1],
        steps=steps,
        error=error,
        user_values=user_values,
    )
