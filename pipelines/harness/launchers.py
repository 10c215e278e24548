"""Launch harnesses, functions or command lines that receive a base URL, and read their results."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipelines.generation.environments import as_number
from pipelines.generation.processes import Watch
from pipelines.generation.tasks import Task
from pipelines.generation.user_code import OwnThread, encodable, in_time, without_exit
from pipelines.harness.commands import (
    OWN_FIELDS,
    check_scripts,
    fields_in,
    filled,
    is_function,
    run_command,
    secrets_in,
    without,
    words_of,
)
from rollout_io.conversion.rewards import Outcome
from rollout_io.plugins import resolve
from schemas.errors import ConfigError, InputError, RolloutError

REWARD = "harness_reward"
_EXPECTED = (
    "a finite number, or an object with `reward` or `error`; optional: `metrics`, `stop_reason`"
)

NO_KEY = "none"
"""Placeholder for the key of base URLs that need none."""


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
    logged, error = result.get("metrics") or {}, result.get("error")
    if not isinstance(logged, Mapping) or not all(
        isinstance(name, str) and name for name in logged
    ):
        finding = f"metrics is {logged!r:.60}, not an object with non-empty keys"
        raise InputError(REWARD, where, finding)
    metrics = {
        name: number for name, value in logged.items() if (number := as_number(value)) is not None
    }
    bad = next((name for name in logged if name not in metrics or encodable(name) != name), None)
    if bad is not None:
        finding = (
            f"metrics[{bad!r}] is {logged[bad]!r:.60}, not a finite number with a name in UTF-8"
        )
        raise InputError(REWARD, where, finding)
    reason = result.get("stop_reason")
    if reason is not None and (not isinstance(reason, str) or encodable(reason) != reason):
        raise InputError(REWARD, where, f"the stop_reason {reason!r:.60}", "a string in UTF-8")
    if error is not None:
        reward, error = None, encodable(str(error))[:1000] or "failed"
    else:
        reward = as_number(result.get("reward"))
        if reward is None:
            given_reward = result.get("reward")
            finding = f"the reward is {given_reward!r:.60}, not a finite number"
            raise InputError(REWARD, where, finding)
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
        result = json.loads(text)
    except (ValueError, RecursionError):
        finding = f"the result {text[-60:]!r}" if text.strip() else "an empty result"
        raise _bad(where, finding) from None
    return outcome_of(result, where)


def _bad(where: str, got: str, hint: str | None = None) -> InputError:
    return InputError(REWARD, where, got, _EXPECTED, hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """API endpoint of one trajectory.

    Attributes:
        base_url: Base URL for an OpenAI client: "http://127.0.0.1:8123/s/5f0c.../0/v1".
        model: Name of the model. Requests with any other name get status 404 if `served_model_name`
            is configured, else they are served by the same model.
        api_key: The trajectory's token if base URLs are not on loopback, else a placeholder for
            clients that require a key.
    """

    base_url: str
    model: str
    api_key: str = NO_KEY


class Harness(Protocol):
    """A program that produces one trajectory of a task by calling the model."""

    def check(self, tasks: Sequence[Task]) -> None:
        """Check that the harness can run these tasks.

        Raises:
            ConfigError: `harness`: the harness cannot run one of the tasks.
        """
        ...

    async def run(self, endpoint: Endpoint, task: Task, timeout_s: float, watch: Watch) -> Outcome:
        """Run a task to completion.

        Raises:
            InputError: `harness_reward`: the result is not an outcome; `harness_timeout`: the time
                limit expires; `harness_raised`: a function raises; `harness_start`: a command
                cannot be started; `harness_exit`: its exit status is not 0.
        """
        ...


def find_harness(harness: str) -> Harness:
    """Build the harness of a configuration.

    Raises:
        ConfigError: `harness`: the function does not exist or the command line is invalid.
    """
    if is_function(harness):
        return FunctionHarness(resolve(harness, "harness"))
    return CommandHarness(harness)


class FunctionHarness:
    """A function of an `Endpoint` and a `Task`; a synchronous function runs in its own thread."""

    def __init__(self, function: Callable[[Endpoint, Task], Any]) -> None:
        self._function = function

    def check(self, tasks: Sequence[Task]) -> None:
        """See `Harness.check`; accepts any task."""

    async def run(self, endpoint: Endpoint, task: Task, timeout_s: float, watch: Watch) -> Outcome:
        """See `Harness.run`."""
        del watch
        where = f"trajectory {task.trajectory_id!r}"
        if inspect.iscoroutinefunction(self._function):
            result = await in_time(self._awaited(endpoint, task), timeout_s, "harness", where)
            return outcome_of(result, where)
        thread = OwnThread("harness")
        try:
            call = functools.partial(self._function, endpoint, task)
            return outcome_of(await thread.call(call, timeout_s, where), where)
        finally:
            thread.end()

    async def _awaited(self, endpoint: Endpoint, task: Task) -> Any:
        return await without_exit(self._function(endpoint, task))


class CommandHarness:
    """A command line with fields.

    The command writes the reward to `{reward_file}` if it has this field, else to the last line of
    its output.
    """

    def __init__(self, command: str) -> None:
        self._words, self._fields = words_of(command), fields_in(command)
        check_scripts(self._words)
        self._secrets = secrets_in(command)

    def check(self, tasks: Sequence[Task]) -> None:
        """See `Harness.check`; for every field that is not built in, each task needs an extra."""
        for task in tasks:
            missing = sorted(self._fields - {*OWN_FIELDS, *task.extras})
            if missing:
                finding = (
                    f"unknown field {{{missing[0]}}}: the task {task.source} has no such field"
                )
                hint = f"use a field of the task, or one of {', '.join(OWN_FIELDS)}"
                raise ConfigError("harness", "harness", finding, hint=hint)

    async def run(self, endpoint: Endpoint, task: Task, timeout_s: float, watch: Watch) -> Outcome:
        """See `Harness.run`."""
        where = f"trajectory {task.trajectory_id!r}"
        with tempfile.TemporaryDirectory(
            prefix="rollouts-", dir=watch.folder, ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            reward_file, task_file = folder / "reward.json", folder / "task.json"
            text = json.dumps(dataclasses.asdict(task), ensure_ascii=True, default=str)
            await asyncio.to_thread(task_file.write_text, text)
            values = {
                **task.extras,
                **dataclasses.asdict(endpoint),
                "task_file": task_file,
                "reward_file": reward_file,
                "instance_id": task.instance_id,
                "task_instance_id": task.task_instance_id or task.instance_id,
                "repetition_id": task.repetition_id,
                "prompt": _prompt(task),
            }
            try:
                output = await run_command(
                    filled(self._words, values),
                    self._variables(endpoint),
                    folder=folder,
                    timeout_s=timeout_s,
                    watch=watch,
                    where=where,
                )
                if "reward_file" in self._fields:
                    return _read_reward(reward_file, where, output.tail)
                return parse_result(output.last_line, where)
            except RolloutError as error:
                secrets = [*self._secrets, *_token(endpoint)]
                finding = without(error.got, secrets)
                message = without(error.sentence, secrets)
                facts = (error.rule, where, finding, error.expected, error.hint)
                raise type(error)(*facts, message=message) from None

    def _variables(self, endpoint: Endpoint) -> dict[str, str]:
        """Return the environment variables that configure OpenAI clients.

        A command that contains {base_url} may also call another model, such as a judge, so the
        base URL variables are not set for it. An existing OPENAI_API_KEY is kept, unless the base
        URL needs a token that the command does not get from {api_key}.
        """
        needs = bool(_token(endpoint)) and "api_key" not in self._fields
        usual = endpoint.api_key if needs else os.environ.get("OPENAI_API_KEY", endpoint.api_key)
        url = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_BASE": endpoint.base_url}
        key = {"OPENAI_API_KEY": usual}
        return key if "base_url" in self._fields else url | key


def _token(endpoint: Endpoint) -> list[str]:
    return [] if endpoint.api_key == NO_KEY else [endpoint.api_key]


def _prompt(task: Task) -> str:
    """Return the text of a task's last message."""
    content = task.prompt[-1].get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _read_reward(path: Path, where: str, tail: str) -> Outcome:
    try:
        with path.open("rb") as file:
            text = file.read(1 << 20).decode(errors="replace")
    except OSError as error:
        reason = f"{error.strerror or error}".lower() + (f": {tail}" if tail else "")
        finding = f"cannot read the reward from {{reward_file}}: {reason}"
        raise InputError(REWARD, where, finding) from None
    return parse_result(text, where)
