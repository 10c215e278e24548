"""The function that scores attempts: its source files, and processes that run it and can be killed."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import inspect
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, Literal

from pipelines.generation.environments import (
    EnvConfig,
    Environment,
    as_number,
    default_env_config,
    environment_class,
)
from pipelines.generation.tasks import Task, read_tasks
from pipelines.rescoring.attempts import Attempt
from rollout_io.dataset.worker_processes import Pool
from rollout_io.plugins import resolve
from schemas.errors import InputError, RolloutError

RULE = "reward_function"
_MOST_CHARS = 500

_OURS = frozenset({"pipelines", "rollout_io", "schemas", "trainer"})
_INSTALLED = {
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}


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
    score, names = partial(_score, scorer), dict[int, str]()

    def named() -> Iterator[Attempt]:
        for number, attempt in enumerate(attempts):
            names[number] = attempt.trajectory_id
            yield attempt

    def lose(reason: str) -> Score:
        return Score("", None, reason)

    with closing(Pool(score, num_workers, prepare=partial(_load, scorer))) as pool:
        try:
            results = pool.map(score, named(), timeout_s=scorer.timeout_s, lose=lose)
            for number, result in results:
                yield replace(result, trajectory_id=names.pop(number))
        except InputError as error:
            if error.rule != "worker":
                raise
            finding = f"the function cannot be imported: {error.got}"
            raise InputError(RULE, "--reward", finding) from None


@cache
def _load(scorer: Scorer) -> Callable[[Attempt], Any]:
    """Import the function, once a process.

    What the function prints goes to stderr: stdout is for the summary.
    """
    os.dup2(2, 1)
    return scorer.load()


def _score(scorer: Scorer, attempt: Attempt) -> Score:
    gives = scorer.gives
    try:
        value = _load(scorer)(attempt)
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


def source_digests(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """Return the SHA-256 of each file that a function is made of, by module.

    These are the files of its module and of the modules that are imported there, anywhere in the
    code, and so on; without installed packages. Nothing is imported or run.

    Args:
        name: The function as `module:name`.
        function: The function.

    Example:
        >>> list(source_digests("checked:brief", brief))
        ['checked', 'limits']
    """
    inner = inspect.unwrap(function)
    roots = {name.partition(":")[0], getattr(inner, "__module__", None) or type(inner).__module__}
    packages = {root.partition(".")[0] for root in roots}
    waiting, digests = [*roots], dict[str, str]()
    seen = set(waiting)
    while waiting:
        module = waiting.pop()
        path = _file_of(module)
        top = module.partition(".")[0]
        if path is None or (top not in packages and (top in _OURS or _is_installed(path))):
            continue
        content = path.read_bytes()
        digests[module] = hashlib.sha256(content).hexdigest()
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        new = {one for one in _imports(content, package) if one not in seen}
        waiting, seen = [*waiting, *new], seen | new
    return dict(sorted(digests.items()))


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or any(path.is_relative_to(one) for one in _INSTALLED)


def _file_of(module: str) -> Path | None:
    """Find the source of a module without importing it; None for packages without code."""
    places, spec = None, None
    for end in (i for i, char in enumerate(f"{module}.") if char == "."):
        spec = PathFinder.find_spec(module[:end], places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yield the modules that a source file may import, with the packages that contain them."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except SyntaxError:  # a module that the function can import only to fail
        return
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = resolve_name(relative, package) if package or not node.level else relative
            names = [f"{base}.{alias.name}" for alias in node.names]  # modules or their attributes
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
