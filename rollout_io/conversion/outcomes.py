"""Outcomes of trajectories: rewards in the log, merged with the rewards file."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rollout_io.conversion.rewards import Key, Outcome, second_line
from rollout_io.conversion.rows import Settled
from rollout_io.formats.base import Place, Rejected, Run, Step, Trajectory
from rollout_io.formats.parsing.naming import SESSION_SHAPE, full_name
from schemas.errors import ConfigError, InputError, count

_SHOWN = 4  # maximum number of names in an error
LOGGED_REWARD, LOGGED_ERROR = "logged_reward", "logged_error"


def settle(
    run: Run,
    logged: Trajectory,
    steps: list[Step],
    given: Outcome | None,
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

    Args:
        run: Identifies the trajectory.
        logged: The trajectory as the adapter read it.
        steps: Its steps with their tokens; modified in place.
        given: Outcome from the rewards file, or None.
        reward_key: Name of one of the log's rewards, or None.

    Raises:
        ConfigError: `reward_key`: the run has no reward of this name.
    """
    where = run.places[0].where if run.places else given.where if given else run.instance_id
    steps = steps or [Step(source=where)]
    last = steps[-1]
    error = logged.error if given is None else given.error
    reward = _chosen(logged, reward_key, where) if given is None else given.reward
    last.metrics = {**(last.metrics or {}), **_metrics(logged, given)} or None
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
        user_values=_texts(logged, given),
    )


def _chosen(logged: Trajectory, key: str | None, where: str) -> float | None:
    if key is None or logged.error is not None:
        return logged.reward
    if key in logged.metrics:
        return logged.metrics[key]
    near = difflib.get_close_matches(key, logged.metrics, 1)
    names = ", ".join(sorted(logged.metrics))
    got = f"the run has no reward {key!r}" + (f", only {names}" if names else "")
    hint = f"did you mean --reward {near[0]}?" if near else "omit --reward, or pass --rewards FILE"
    raise ConfigError("reward_key", where, got, "", hint)


def _metrics(logged: Trajectory, given: Outcome | None) -> dict[str, float]:
    if given is None:
        return dict(logged.metrics)
    is_lost = logged.reward not in {None, given.reward, *logged.metrics.values()}
    said = {LOGGED_REWARD: logged.reward} if is_lost and logged.reward is not None else {}
    return {**logged.metrics, **said, **given.metrics}


def _texts(logged: Trajectory, given: Outcome | None) -> dict[str, str]:
    if given is None:
        return dict(logged.user_values)
    differs = logged.error is not None and logged.error != given.error
    said = {LOGGED_ERROR: logged.error} if differs and logged.error is not None else {}
    return {**logged.user_values, **said, **given.user_values}


def by_run(
    outcomes: Mapping[str, Outcome], keys: Collection[Key]
) -> tuple[dict[Key, Outcome], list[Rejected]]:
    """Find the run of each outcome by the name of its session.

    A name is `instance/repetition`, or the instance alone if it has one run, or the trajectory id
    (`instance_repetition`). A line with `instance_id` and `repetition_id` refers to exactly that
    run. A failed run that made no call may be missing from the log; its line must use the full name.

    Args:
        outcomes: Outcomes, keyed by the names in the rewards file.
        keys: The runs in the log.

    Returns:
        The outcomes by run, and a rejection for each outcome without a run: `unknown_session` if
        its name is a full name, `session_name` if it is not, or matches several runs.

    Raises:
        InputError: `reward_line`: two names refer to the same run.
    """
    found: dict[Key, Outcome] = {}
    left: list[tuple[str, Outcome]] = []
    for session, outcome in outcomes.items():
        key = full_name(session)
        if key is not None and key in keys:
            found[key] = outcome
        else:
            left.append((session, outcome))
    unresolved: list[tuple[str, Outcome, list[Key]]] = []
    by_name = _short_names(keys) if left else {}
    for session, outcome in left:
        key = full_name(session)
        fits = [] if outcome.is_exact else by_name.get(session, [])
        if len(fits) == 1:
            key = fits[0]
        elif fits or key is None or outcome.error is None:
            unresolved.append((session, outcome, fits))
            continue
        if key in found:
            raise second_line(_session(key), found[key], outcome)
        found[key] = outcome
    return found, list(_rejected(unresolved, keys))


def _short_names(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Map each instance id to its runs, and each trajectory id to its run."""
    found: defaultdict[str, list[Key]] = defaultdict(list)
    for key in keys:
        found[key[0]].append(key)
        found[f"{key[0]}_{key[1]}"].append(key)
    return found


def _rejected(
    unresolved: Sequence[tuple[str, Outcome, list[Key]]], keys: Iterable[Key]
) -> Iterator[Rejected]:
    """Yield an error for each name that matches no run or several; suggest a similar name."""
    known = [_session(key) for key in keys] if unresolved else []
    near = difflib.get_close_matches(unresolved[0][0], known, 1) if unresolved else []
    example = near[0] if near else min(known, default="shop-1/0")
    for session, outcome, fits in unresolved:
        where, got = outcome.where, f"session {session!r}"
        if fits:
            names = ", ".join(map(_session, fits[:_SHOWN])) + (", ..." if fits[_SHOWN:] else "")
            got += f" matches {count(len(fits), 'run')}: {names}"
            hint = "give the full name of the run"
            error = InputError("session_name", where, got, "", hint)
        elif full_name(session) is None:
            hint = f"name a run of the log, for example {example!r}"
            error = InputError("session_name", where, got, SESSION_SHAPE, hint)
        else:
            got += " has a reward but no call in the logs"
            hint = (
                "add the missing log file, or set `error` for a run that made no call; if the"
                " rewards file covers more runs than the logs, pass --on-error skip, which reports"
                " the other rewards as rejected"
            )
            hint += f"; the nearest session is {near.pop()!r}" if near else ""
            error = InputError("unknown_session", where, got, "", hint)
        yield Rejected(Place(Path(where), where), error)


def _session(key: Key) -> str:
    return f"{key[0]}/{key[1]}"
