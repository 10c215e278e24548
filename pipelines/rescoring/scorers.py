"""Processes that run a reward function, and can be killed while it runs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from pipelines.generation.environments import (
    EnvConfig,
    Environment,
    as_number,
    default_env_config,
    environment_class,
    resolve,
)
from pipelines.generation.tasks import Task, read_tasks
from pipelines.rescoring.attempts import Attempt
from schemas.errors import InputError, RolloutError

RULE = "reward_function"
_START_S, _END_S = 300.0, 5.0
_MOST_CHARS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """The function that scores an attempt.

    Attributes:
        function: `module:function` of a function from an `Attempt` to a number; or the name or
            `module:Class` of an environment, whose `step` gets the recorded responses.
        tasks: Tasks of the environment (JSON Lines or Parquet); None: `function` is a function.
        outcome: Whether an environment's score is the reward of its last step, or the sum.
        timeout_s: Time limit for one attempt, in seconds.
        gives: What the function returns: a `reward`, alone or as `(reward, findings)`; or `findings`.
    """

    function: str
    tasks: str | None = None
    outcome: str = "last"
    timeout_s: float = 60.0
    gives: Literal["reward", "findings"] = "reward"

    def load(self) -> Callable[[Attempt], Any]:
        """Import the function.

        Raises:
            ConfigError: `reward_function`, `environment`: it cannot be imported.
            InputError: `tasks`: the tasks cannot be read.
        """
        if self.tasks is None:
            return resolve(self.function, RULE)
        config = EnvConfig(default_env_config(self.function))
        make = partial(environment_class(self.function), env_config=config)
        tasks = {task.instance_id: task for task in read_tasks(self.tasks, 1)}

        def score(attempt: Attempt) -> float:
            if attempt.instance_id not in tasks:
                raise InputError("tasks", str(self.tasks), f"no task {attempt.instance_id!r}")
            task = tasks[attempt.instance_id]
            extras = {**task.extras, "max_turns": len(attempt.rows)}
            built = partial(make, extras=extras)
            environment = Environment(built, attempt.trajectory_id, self.timeout_s)
            return asyncio.run(self._replay(environment, task, attempt))

        return score

    async def _replay(self, environment: Environment, task: Task, attempt: Attempt) -> float:
        """Pass the recorded responses to an environment, and return its reward."""
        rewards = []
        try:
            await environment.init(task.prompt)
            for number, row in enumerate(attempt.rows, 1):
                outcome = await environment.step(row.get("response_text") or "")
                rewards.append(outcome.reward)
                if outcome.is_done and number < len(attempt.rows):
                    finding = f"the environment is done after step {number} of {len(attempt.rows)}"
                    raise InputError("env_output", attempt.trajectory_id, finding)
        finally:
            await environment.close()
        return sum(rewards) if self.outcome == "sum" else rewards[-1]


@dataclass(frozen=True, slots=True)
class Score:
    """The result for one attempt: a reward, findings or both; or the reason why there are none."""

    trajectory_id: str
    reward: float | None
    error: str | None = None
    findings: list[dict[str, Any]] | None = None


def scores(scorer: Scorer, attempts: Iterable[Attempt], num_workers: int) -> Iterator[Score]:
    """Score attempts in several processes, in no particular order.

    An exception, a result that is not a finite number, a time-out or the death of a process costs
    its attempt the score; a process that hangs or died is replaced.

    Raises:
        RolloutError: The function cannot be imported.
    """
    waiting = iter(attempts)
    processes = [_Process(scorer) for _ in range(num_workers)]
    try:
        while processes:
            left_s = min(process.ends for process in processes) - time.monotonic()
            ready = wait([process.connection for process in processes], max(left_s, 0.0))
            now = time.monotonic()
            for place, process in enumerate(processes):
                if process.connection in ready:
                    score = process.receive()
                elif process.ends <= now:
                    score = process.lose(f"no result within {scorer.timeout_s:g} s")
                else:
                    continue
                if score is not None:
                    yield score
                attempt = None if process.attempt else next(waiting, None)
                if process.is_dead:
                    process.kill()
                    process = processes[place] = _Process(scorer)
                process.give(attempt)
            for process in [one for one in processes if one.attempt is None]:
                process.kill()
                processes.remove(process)
    finally:
        for process in processes:
            process.kill()


class _Process:
    """One process with its pipe, and the attempt that it scores once it has imported the function.

    Attributes:
        attempt: The attempt; None: nothing to do.
        ends: Time at which the process has to have answered, from `time.monotonic`.
        is_dead: Whether it must be replaced.
    """

    def __init__(self, scorer: Scorer) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(theirs, scorer), daemon=True)
        with theirs:
            self._process.start()
        self._timeout_s, self._is_ready = scorer.timeout_s, False
        self.attempt: Attempt | None = None
        self.ends, self.is_dead = time.monotonic() + _START_S, False

    def give(self, attempt: Attempt | None) -> None:
        """Hand over the next attempt, if there is one."""
        self.attempt = attempt or self.attempt
        if self._is_ready and self.attempt is not None:
            self.ends = time.monotonic() + self._timeout_s
            with suppress(OSError):  # if the process died, `receive` says so
                self.connection.send(self.attempt)

    def receive(self) -> Score | None:
        """Return what the process sent: a score, or None if it is only ready."""
        try:
            answer: Score | RolloutError | None = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            return self.lose(f"its process ended with exit code {self._process.exitcode}")
        if isinstance(answer, RolloutError):
            raise answer
        self._is_ready = True
        if answer is not None:
            self.attempt = None
        return answer

    def lose(self, reason: str) -> Score | None:
        """Give up the process, and return its attempt's lack of a score."""
        if not self._is_ready:
            raise InputError(RULE, "--reward", f"the function cannot be imported: {reason}")
        self.is_dead = True
        attempt, self.attempt = self.attempt, None
        return None if attempt is None else Score(attempt.trajectory_id, None, reason)

    def kill(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(connection: Connection, scorer: Scorer) -> None:
    """Import the function, say so, and score what comes until the pipe is closed.

    What the function prints goes to stderr: stdout is for the summary.
    """
    os.dup2(2, 1)
    try:
        score = scorer.load()
    except RolloutError as error:
        connection.send(error)
        return
    connection.send(None)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            attempt = connection.recv()
            connection.send(_score(score, attempt, scorer.gives))


def _score(function: Callable[[Attempt], Any], attempt: Attempt, gives: str) -> Score:
    try:
        value = function(attempt)
        reward, listed = value if type(value) is tuple and len(value) == 2 else (value, None)
        if gives == "findings":
            reward, listed = None, value
        findings = None if listed is None and gives == "reward" else attempt.findings(listed)
    except RolloutError as error:
        return Score(attempt.trajectory_id, None, str(error))
    except Exception as error:  # the user's function may raise anything
        text = f"{type(error).__name__}: {error}"[:_MOST_CHARS]
        return Score(attempt.trajectory_id, None, text.encode("utf-8", "replace").decode())
    number = as_number(reward)
    if number is None and gives == "reward":
        reason = f"the result {value!r:.60} is not a finite number"
        return Score(attempt.trajectory_id, None, reason)
    return Score(attempt.trajectory_id, number, findings=findings)
