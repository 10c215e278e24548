"""Run environments with skyrl-gym's interface (init, step, close), and aggregate their metrics.

Their results are checked, and their calls have time limits.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from pipelines.generation.config import GenerateConfig
from pipelines.generation.pictures import seen
from pipelines.generation.tasks import Task, conversation
from pipelines.generation.user_code import OwnThread, encodable
from rollout_io.formats.parsing.messages import openai_tools
from rollout_io.plugins import resolve
from schemas.columns import metrics_dict
from schemas.errors import ConfigError, InputError, RolloutError
from schemas.imports import requires_extra

_RULE = "env"
_CLOSING_S = 30.0
Value = TypeVar("Value")

ENVIRONMENT = "environment/"
USED = ("instance_id", "is_last_step", "metrics", "error")
"""Columns from which environment metrics are computed."""
Metrics = Mapping[str, float]
Aggregate = Callable[[Sequence[Metrics]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Checked result of an environment step.

    Attributes:
        observations: Messages for the model, as from `pipelines.generation.pictures.seen`.
        reward: Reward of this turn.
        is_done: Whether the trajectory ends here.
        replaced: The environment's version of the action if it differs from the sampled text
            (`postprocessed_action`).
    """

    observations: list[dict[str, Any]]
    reward: float
    is_done: bool
    replaced: str | None = None


class Beginning(NamedTuple):
    """What the model sees first.

    Attributes:
        messages: The conversation, as from `pipelines.generation.pictures.seen`.
        tools: Definitions of tools, for the chat template; None if there are none.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def _is_tool(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


class Environment:
    """The environment of one trajectory, called in its own thread.

    Results are checked in that thread too, because user-defined values can run arbitrary code.

    Args:
        make: Constructs the user's environment.
        where: The trajectory, for error messages.
        timeout_s: Time limit for each call, in seconds.
    """

    def __init__(self, make: Callable[[], Any], where: str, timeout_s: float) -> None:
        self._make, self._where, self._timeout_s = make, where, timeout_s
        self._own: Any = None
        self._thread = OwnThread(_RULE)
        self._turn = 0

    async def init(self, prompt: Sequence[Mapping[str, Any]]) -> Beginning:
        """Construct and initialise the environment.

        Returns:
            What the model sees first.

        Raises:
            InputError: `env_raised`: the environment raises; `env_timeout`: a call exceeds the time
                limit; `env_output`: the result is not a pair (conversation, metadata), or
                `metadata["tools"]` is not a list of tool definitions.
        """
        self._own = await self._call("__init__", self._make)
        messages = [dict(message) for message in prompt]
        return await self._call("init", lambda: self._conversation(self._own.init(messages)))

    def _conversation(self, made: Any) -> Beginning:
        if not isinstance(made, tuple) or len(made) != 2:
            finding = f"the result {made!r:.60}"
            raise self._nonsense("init", finding, "a pair (conversation, metadata)")
        where = f"{self._where}, init"
        try:
            messages = conversation(made[0], where, seen)
        except RolloutError as error:
            given = ("env_output", where, error.got, error.expected)
            raise InputError(*given, message=error.sentence) from None
        tools = made[1].get("tools") if isinstance(made[1], Mapping) else None
        return Beginning(messages, self._tools(tools) if tools else None)

    def _tools(self, given: Any) -> list[dict[str, Any]]:
        """Return tool definitions in OpenAI's format, as JSON has them."""
        try:
            decoded = json.loads(json.dumps(given, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            decoded = None
        listed = decoded if isinstance(decoded, list) else []
        tools = openai_tools(listed) or []
        if len(tools) != max(len(listed), 1) or not all(map(_is_tool, tools)):
            expected = 'a list of {"type": "function", "function": {"name": ..., ...}}'
            raise self._nonsense("init", f"tools {given!r:.60}", expected)
        return tools

    async def step(self, action: str) -> Outcome:
        """Pass an action to the environment, and check the result.

        Raises:
            InputError: `env_raised`, `env_timeout`: see `init`; `env_output`: the result is not a
                mapping with `observations` (messages), `reward` (a finite number) and `done` (a
                Boolean).
        """
        name = f"step {self._turn}"
        self._turn += 1
        return await self._call(name, lambda: self._outcome(name, action, self._own.step(action)))

    def _outcome(self, name: str, action: str, made: Any) -> Outcome:
        if not isinstance(made, Mapping):
            raise self._nonsense(name, f"the result {made!r:.60}", "a dict")
        missing = [key for key in ("observations", "reward", "done") if key not in made]
        if missing:
            finding = f"the result has no `{missing[0]}`"
            raise InputError("env_output", f"{self._where}, {name}", finding)
        replaced = made.get("postprocessed_action")
        if not isinstance(replaced, str | None):
            raise self._nonsense(name, f"postprocessed_action {replaced!r:.60}", "text or None")
        return Outcome(
            observations=self._messages(name, made["observations"]),
            reward=self._number(name, "reward", made["reward"]),
            is_done=self._truth(name, made["done"]),
            replaced=None if replaced == action else replaced,
        )

    async def metrics(self) -> dict[str, float]:
        """Return the environment's metrics that are numbers or Booleans.

        Raises:
            InputError: `env_raised`, `env_timeout`: see `init`; `env_output`: the metrics are not a
                mapping.
        """
        if not hasattr(self._own, "get_metrics"):
            return {}
        return await self._call("get_metrics", lambda: self._numbers(self._own.get_metrics()))

    def _numbers(self, found: Any) -> dict[str, float]:
        if not isinstance(found, Mapping):
            raise self._nonsense("get_metrics", f"the result {found!r:.60}", "a dict")
        numbers = {encodable(str(k)): as_number(v) for k, v in found.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    async def close(self) -> None:
        """Close the environment if it exists, within 30 s, because interrupted runs wait for this.

        Raises:
            InputError: `env_raised`, `env_timeout`: see `init`.
        """
        try:
            if self._own is not None and hasattr(self._own, "close"):
                timeout_s = min(self._timeout_s, _CLOSING_S)
                await self._thread.call(self._own.close, timeout_s, f"{self._where}, close")
        finally:
            self._thread.end()

    async def _call(self, name: str, function: Callable[[], Value]) -> Value:
        return await self._thread.call(function, self._timeout_s, f"{self._where}, {name}")

    def _messages(self, name: str, observations: Any) -> list[dict[str, Any]]:
        if observations is None or observations == []:
            return []
        if not isinstance(observations, Sequence) or isinstance(observations, str):
            raise self._nonsense(name, f"observations {observations!r:.60}", "a list of messages")
        try:
            return [seen(m, f"observation {i}") for i, m in enumerate(observations)]
        except RolloutError as error:
            message = f"{self._where}, {name}, {error.sentence}"
            given = ("env_output", f"{self._where}, {name}", error.got, error.expected)
            raise InputError(*given, message=message) from None

    def _number(self, name: str, key: str, value: Any) -> float:
        number = as_number(value)
        if number is None:
            raise self._nonsense(name, f"{key} {value!r:.60}", "a finite number")
        return number

    def _truth(self, name: str, value: Any) -> bool:
        if as_number(value) not in {0.0, 1.0}:
            raise self._nonsense(name, f"done {value!r:.60}", "True or False")
        return bool(value)

    def _nonsense(self, name: str, got: str, expected: str) -> InputError:
        return InputError("env_output", f"{self._where}, {name}", got, expected)


class EnvConfig(dict[str, Any]):
    """A dict whose keys are also attributes, as skyrl-gym's environments expect."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"env_config has no {name!r}")
        value = self[name]
        return EnvConfig(value) if isinstance(value, dict) else value


def environment_of(task: Task, config: GenerateConfig) -> str:
    """Return the name of a task's environment.

    Raises:
        ConfigError: `environment`: neither the task nor the configuration names an environment.
    """
    name = task.env_class or config.environment
    if name is None:
        hint = "set environment (or agent) in the configuration, or env_class in the task"
        raise ConfigError("environment", "task", "no environment is set", hint=hint)
    return name


def maker_of(config: GenerateConfig) -> Callable[[Task], Callable[[], Any]]:
    """Return a factory of environments: `Class(env_config=..., extras=...)` for each task."""

    def maker(task: Task) -> Callable[[], Any]:
        name = environment_of(task, config)
        make = environment_class(name)
        extras = {**task.extras, "max_turns": config.max_turns}
        own = config.env_configs.get(name, {})
        given = EnvConfig({**default_env_config(name), **config.env_config, **own})
        return partial(make, env_config=given, extras=extras)

    return maker


def environment_class(name: str) -> Callable[..., Any]:
    """Find the class or factory of an environment.

    Raises:
        ConfigError: `environment`: `module:Class` does not exist, or skyrl-gym has no environment
            of this name.
        MissingExtra: `extra_installed`: skyrl-gym is missing.
    """
    if ":" in name:
        return resolve(name, "environment")
    with requires_extra("gym", f"environment {name!r}"):
        import skyrl_gym  # type: ignore[import-untyped, import-not-found, unused-ignore]
    if name not in skyrl_gym.registry:
        known = ", ".join(skyrl_gym.registry)
        hint = "set environment = module:Class for a custom environment"
        raise ConfigError("environment", "environment", repr(name), f"one of {known}", hint)
    return partial(skyrl_gym.make, name)


def default_env_config(name: str) -> dict[str, Any]:
    """Return the defaults of the dataclass that a skyrl-gym environment declares for `env_config`.

    Example:
        >>> default_env_config("search")["topk"], default_env_config("examples.addition:Addition")
        (3, {})
    """
    if ":" in name:
        return {}
    import skyrl_gym

    made_by = skyrl_gym.registry[name].entry_point
    made_by = resolve(made_by, "environment") if isinstance(made_by, str) else made_by
    parameter = inspect.signature(made_by).parameters.get("env_config")
    declared = parameter and parameter.annotation
    records = filter(dataclasses.is_dataclass, (declared, *typing.get_args(declared)))
    return {
        field.name: field.default
        for record in records
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING
    }


def as_number(value: Any) -> float | None:
    """Convert a finite number or Boolean from Python, NumPy or torch; None for anything else."""
    if isinstance(value, str | bytes) or value is None:
        return None
    try:
        number = float(value)
    except Exception:  # a user-defined class may raise anything
        return None
    return number if math.isfinite(number) else None


async def environment_metrics(
    rows: pa.Table, names: Mapping[str, str], timeout_s: float
) -> tuple[dict[str, float], list[str]]:
    """Compute `environment/{key}` with the environments' static `aggregate_metrics(metrics)`.

    If an environment has no such method, or the method fails, each key is averaged over the
    trajectories that report it. A key that several environments report is averaged over
    them, weighted by their numbers of trajectories.

    Args:
        rows: Steps of complete trajectories with the columns `USED`; failed ones are ignored.
        names: Environment name by instance_id.
        timeout_s: Time limit for each call, in seconds.

    Returns:
        The metrics (empty if no environment has `aggregate_metrics`), and warnings.
    """
    found = {name: _aggregate_of(name) for name in dict.fromkeys(names.values())}
    if not any(found.values()) or "metrics" not in rows.column_names:
        return {}, []
    warnings: list[str] = []
    weighted: dict[str, list[tuple[float, int]]] = {}
    for name, metrics in _by_environment(rows, names).items():
        aggregate, values = found[name], _means(metrics)
        if aggregate is not None:
            try:
                values = await _aggregated(name, partial(aggregate, metrics), timeout_s)
            except RolloutError as error:
                warnings.append(f"{error} Using means instead.")
        for key, value in values.items():
            weighted.setdefault(key, []).append((value, len(metrics)))
    means = {
        f"{ENVIRONMENT}{key}": sum(v * n for v, n in parts) / sum(n for _, n in parts)
        for key, parts in weighted.items()
    }
    return means, warnings


def _aggregate_of(name: str) -> Aggregate | None:
    """Return the static `aggregate_metrics` of an environment; None if it has none."""
    if ":" in name:
        return getattr(resolve(name, "environment"), "aggregate_metrics", None)
    environment_class(name)
    from skyrl_gym.metrics import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        aggregate_for_environment,
    )

    return partial(aggregate_for_environment, name)


def _by_environment(rows: pa.Table, names: Mapping[str, str]) -> dict[str, list[dict[str, float]]]:
    """Group metrics by environment, excluding failed trajectories."""
    columns = [name for name in USED if name in rows.column_names]
    found: dict[str, list[dict[str, float]]] = {}
    for row in rows.select(columns).to_pylist():
        if row["is_last_step"] and row.get("error") is None:
            metrics = metrics_dict(row["metrics"]) or {}
            found.setdefault(names[row["instance_id"]], []).append(metrics)
    return found


def _means(metrics: Sequence[Metrics]) -> dict[str, float]:
    keys = dict.fromkeys(key for one in metrics for key in one)
    values = {key: [one[key] for one in metrics if key in one] for key in keys}
    return {key: sum(of_key) / len(of_key) for key, of_key in values.items()}


async def _aggregated(name: str, call: Callable[[], Any], timeout_s: float) -> dict[str, float]:
    where, thread = f"environment {name}, aggregate_metrics", OwnThread("env")

    def numbers() -> dict[str, float]:
        made = call()
        if not isinstance(made, Mapping):
            raise InputError("env_output", where, f"the result {made!r:.60}", "a dict")
        found = {encodable(str(key)): as_number(value) for key, value in made.items()}
        return {key: number for key, number in found.items() if number is not None}

    try:
        return await thread.call(numbers, timeout_s, where)
    finally:
        thread.end()
