"""Parse the result of a harness: a number, or an object with a reward or error, and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelines.generation.environments import as_number
from pipelines.generation.texts import encodable
from rollout_io.conversion.rewards import Outcome
from schemas.errors import InputError

REWARD = "harness_reward"
_EXPECTED = (
    "a finite number, or an object with `reward` or `error`; optional: `metrics`, `stop_reason`"
)


def outcome_of(result: Any, where: str) -> Outcome:
    """Check the result of a run and convert it to an outcome.

    Args:
        result: The reward, or a mapping with `reward` or `error` (why the run failed), and
            optionally `metrics` (numbers by name) and `stop_reason` (why the run ended).
        where: Location shown in error messages.

    Raises:
        InputError: `harness_reward`: the result is not of this form.

    Example:
        >>> outcome_of({"reward": 1, "metrics": {"turns": 3}}, "trajectory").metrics
        {'turns': 3.0}
    """
    number = as_number(result)
    if number is not None:
        return Outcome(where=where, reward=number, error=None, metrics={}, user_values={})
    if not isinstance(result, Mapping):
        raise _bad(where, f"the result {result!r:.60}")
    unknown = sorted(map(repr, result.keys() - {"reward", "error", "metrics", "stop_reason"}))
    if unknown:
        raise _bad(where, f"the key {unknown[0]}", "put further numbers into `metrics`")
    given, error = result.get("metrics") or {}, result.get("error")
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        got = f"metrics is {given!r:.60}, not an object with non-empty keys"
        raise InputError(REWARD, where, got)
    metrics = {
        name: number for name, value in given.items() if (number := as_number(value)) is not None
    }
    bad = next((name for name in given if name not in metrics or encodable(name) != name), None)
    if bad is not None:
        got = f"metrics[{bad!r}] is {given[bad]!r:.60}, not a finite number with a name in UTF-8"
        raise InputError(REWARD, where, got)
    reason = result.get("stop_reason")
    if reason is not None and (not isinstance(reason, str) or encodable(reason) != reason):
        raise InputError(REWARD, where, f"the stop_reason {reason!r:.60}", "a string in UTF-8")
    if error is not None:
        reward, error = None, encodable(str(error))[:1000] or "failed"
    else:
        reward = as_number(result.get("reward"))
        if reward is None:
            given_reward = result.get("reward")
            got = f"the reward is {given_reward!r:.60}, not a finite number"
            raise InputError(REWARD, where, got)
    return Outcome(
        where=where,
        reward=reward,
        error=error,
        metrics=metrics,
        user_values={},
        stop_reason=reason,
    )


def parse_result(text: str, where: str) -> Outcome:
    """Parse an outcome from text: a number, or a JSON object.

    Raises:
        InputError: As for `outcome_of`.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        got = f"the result {text[-60:]!r}" if text.strip() else "an empty result"
        raise _bad(where, got) from None
    return outcome_of(found, where)


def _bad(where: str, got: str, hint: str | None = None) -> InputError:
    return InputError(REWARD, where, got, _EXPECTED, hint)
