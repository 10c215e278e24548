"""Outcomes of trajectories: the log's rewards, merged with those of the rewards file."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rollout_io.conversion.rewards import Key, Outcome
from rollout_io.conversion.rows import Settled
from rollout_io.formats.base import Place, Rejected, Run, Step, Trajectory
from schemas.errors import ConfigError, InputError

LOGGED_REWARD, LOGGED_ERROR = "logged_reward", "logged_error"


def settle(
    run: Run,
    logged: Trajectory,
    steps: list[Step],
    given: Outcome | None,
    reward_key: str | None = None,
) -> Settled:
    """Return a trajectory with its outcome stored in its steps.

    The outcome comes from the rewards file, else from the log (its reward `reward_key`, if given).
    The rewards file overrides the log completely: differing values of the log are kept as the
    metric `logged_reward` (unless a metric already holds it) and the text `logged_error`. The last
    step gets the outcome and the metrics. If the outcome is known, earlier steps without a reward
    get 0.0. The rewards of a failed trajectory become null, and their values are kept as
    `metrics["reward"]`. A trajectory without steps becomes a single row of empty lists.

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


def unknown(keys: Collection[Key], outcomes: Mapping[Key, Outcome]) -> Iterator[Rejected]:
    """Yield outcomes of trajectories that are not in `keys`, as `unknown_session` errors.

    A failed trajectory may be missing from the log, as it may have made no call.
    """
    found = {k: o for k, o in outcomes.items() if o.error is None and k not in keys}
    known = [_session(k) for k in keys] if found else []
    near = difflib.get_close_matches(_session(next(iter(found))), known, 1) if found else []
    hint = "add the missing log file, or set `error` for a run that made no call"
    for key, outcome in found.items():
        got = f"session {_session(key)!r} has a reward but no call in the logs"
        advice = f"{hint}; the nearest session is {near.pop()!r}" if near else hint
        error = InputError("unknown_session", outcome.where, got, "", advice)
        yield Rejected(Place(Path(outcome.where), outcome.where), error)


def _session(key: Key) -> str:
    return f"{key[0]}/{key[1]}"
