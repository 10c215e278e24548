"""Tasks for environments, agents and harnesses, their order, and the attempts that finished."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.generation.user_code import encodable
from rollout_io.conversion.rows import Settled, table_of
from rollout_io.dataset.opening import read_input, refuse_irregular
from rollout_io.formats.base import Step
from rollout_io.retokenize.chat_template import normalize
from schemas.errors import InputError, RolloutError

_OWN = ("prompt", "instance_id", "env_class")
INSTRUCTION = "instruction.md"
"""File of a task directory, as in Harbor, that has the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One attempt at a task.

    Attributes:
        instance_id: Id of the task.
        repetition_id: Number of the attempt.
        prompt: OpenAI-style messages.
        env_class: Environment of the task; None for the configured one.
        extras: Further fields, for the environment.
        source: File that contains the task, and the position in it.
        task_instance_id: Id of the task in its file, if `instance_id` is that of one of several
            visits; None: `instance_id`.
    """

    instance_id: str
    repetition_id: int
    prompt: Sequence[Mapping[str, Any]]
    env_class: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    source: str = "task"
    task_instance_id: str | None = None

    @property
    def trajectory_id(self) -> str:
        """Id of the trajectory: `{instance_id}_{repetition_id}`."""
        return f"{self.instance_id}_{self.repetition_id}"


def read_tasks(path: str, group_size: int) -> list[Task]:
    """Read tasks from a file and list the attempts at them, grouped by task.

    Args:
        path: JSON Lines, or Parquet if its extension is .parquet. `prompt` is a list of messages,
            or text, which becomes a user message; `instance_id` defaults to the index of the
            record (from 0). Or a directory with one task directory per task, as in Harbor: those
            with an `instruction.md`, which is the prompt; `instance_id` is the directory's name,
            and the extra `path` its absolute path.
        group_size: Attempts per task.

    Raises:
        InputError: `tasks`: the file is unreadable, or a record is not an object, has no prompt or
            repeats an id; `message`: a prompt has an invalid message.

    Example:
        >>> Path("t.jsonl").write_text('{"prompt": "2+2?", "answer": 4}')
        >>> task = read_tasks("t.jsonl", 2)[1]
        >>> task.trajectory_id, task.prompt, task.extras
        ('0_1', [{'role': 'user', 'content': '2+2?'}], {'answer': 4})
    """
    found: dict[str, Task] = {}
    for index, (where, record) in enumerate(_records(Path(path))):
        task = _task(record, index, where)
        if task.instance_id in found:
            finding = f"instance_id {task.instance_id!r} occurs twice"
            hint = "list each task once, and set group_size for several attempts"
            raise InputError("tasks", where, finding, hint=hint)
        found[task.instance_id] = task
    if not found:
        is_directory = Path(path).is_dir()
        finding = (
            f"no directory in it has an {INSTRUCTION}" if is_directory else "the file has no tasks"
        )
        raise InputError("tasks", path, finding)
    return [attempt for task in found.values() for attempt in attempts(task, group_size)]


def attempts(task: Task, group_size: int) -> Iterator[Task]:
    """Yield the attempts 0..group_size-1 at a task."""
    for repetition_id in range(group_size):
        yield replace(task, repetition_id=repetition_id)


def endless_tasks(
    tasks: Sequence[Task], order: Literal["shuffled", "listed"], seed: int
) -> Iterator[Task]:
    """Yield tasks endlessly; each visit has an `instance_id` of its own: `a`, `a@2`, `a@3`.

    `task_instance_id` is the task's own id. Numbers that would repeat the id of a task are skipped.

    Args:
        tasks: The tasks.
        order: `shuffled`: the seed and the number of a pass determine its order; `listed`: each
            pass has the order of `tasks`, such as a curriculum.
        seed: Seed of the order.

    Example:
        >>> tasks = [Task(instance_id=name, repetition_id=0, prompt=[]) for name in "ba"]
        >>> found = itertools.islice(endless_tasks(tasks, "listed", 0), 4)
        >>> [task.instance_id for task in found]
        ['b', 'a', 'b@2', 'a@2']
    """
    ids = {task.instance_id for task in tasks}
    visits = {name: _visits(name, ids) for name in ids}
    for number in itertools.count(1):
        order_of_pass = list(tasks)
        if order == "shuffled":
            random.Random(f"{seed}/{number}").shuffle(order_of_pass)
        for task in order_of_pass:
            name = task.instance_id
            yield replace(task, instance_id=next(visits[name]), task_instance_id=name)


def _visits(name: str, ids: Collection[str]) -> Iterator[str]:
    yield name
    yield from (visit for n in itertools.count(2) if (visit := f"{name}@{n}") not in ids)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        yield from _directories(path)
        return
    if path.suffix == ".parquet":
        yield from _rows(path)
        return
    try:
        lines = read_input(path).decode().split("\n")  # splitlines() would split inside strings
    except UnicodeDecodeError as error:
        raise _unreadable(path, error, "JSON Lines") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError("tasks", where, f"invalid JSON: {error}") from None


def _directories(path: Path) -> Iterator[tuple[str, Any]]:
    root = path.resolve()
    folders = [root, *sorted(root.iterdir())]
    for folder in folders:
        file = folder / INSTRUCTION
        if file.is_file():
            try:
                prompt = read_input(file).decode()
            except UnicodeDecodeError as error:
                raise _unreadable(file, error, "UTF-8") from None
            yield str(file), {"instance_id": folder.name, "prompt": prompt, "path": str(folder)}


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    refuse_irregular(path)
    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error, "Parquet") from None
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def _unreadable(path: Path, error: Exception, kind: str) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError("tasks", str(path), f"cannot read it as {kind}: {reason.lower()}")


def _task(record: Any, index: int, where: str) -> Task:
    if not isinstance(record, Mapping):
        raise InputError("tasks", where, type(record).__name__, "an object")
    given = record.get("instance_id")
    name, env_class = str(index if given is None else given), record.get("env_class")
    if not name or not isinstance(env_class, str | None):
        finding = f"instance_id {given!r}, env_class {env_class!r}"
        expected = "a non-empty instance_id, and a string or null as env_class"
        raise InputError("tasks", where, finding, expected)
    return Task(
        instance_id=name,
        repetition_id=0,
        prompt=conversation(record.get("prompt"), where),
        env_class=env_class,
        extras={k: v for k, v in record.items() if k not in _OWN},
        source=where,
    )


def conversation(
    prompt: Any, where: str, read: Callable[[object, str], dict[str, Any]] = normalize
) -> list[dict[str, Any]]:
    """Convert a prompt (a list of messages, or text) to messages, each by `read`.

    Raises:
        InputError: `tasks`: the prompt is neither text nor a list; `message`: an item is not a
            message.
    """
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        if prompt is None:
            raise InputError("tasks", where, "the key `prompt` is missing")
        finding, expected = f"prompt {prompt!r:.60}", "a non-empty list of messages or text"
        raise InputError("tasks", where, finding, expected)
    return [read(message, f"{where}, message {i}") for i, message in enumerate(prompt)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A trajectory that ended, successfully or not.

    Attributes:
        task: The task attempted.
        rows: Rows of the rollout table; at least one.
        rule: Rule id of the error; None if the trajectory succeeded, or if a generator reported its
            failure.
        warnings: Problems that do not affect the rows.
    """

    task: Task
    rows: pa.Table
    rule: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """Reason why the trajectory failed; None if it succeeded."""
        has = "error" in self.rows.column_names
        error: str | None = self.rows.column("error")[0].as_py() if has else None
        return error


def finished_of(
    task: Task,
    steps: Sequence[Step],
    error: RolloutError | None = None,
    warnings: Sequence[str] = (),
) -> Finished:
    """Build a trajectory from its steps; a failed one may have no steps and has unknown rewards."""
    if error is not None:
        for step in steps:
            step.reward = None
    settled = Settled(
        instance_id=task.instance_id,
        repetition_id=task.repetition_id,
        steps=list(steps) or [Step(source=task.source)],
        error=None if error is None else encodable(error.failure),
    )
    rule = None if error is None else error.rule
    return Finished(task=task, rows=table_of([settled]), rule=rule, warnings=list(warnings))


def rows_of(finished: Sequence[Finished]) -> pa.Table:
    """Concatenate the rows of trajectories, in order."""
    return pa.concat_tables([one.rows for one in finished], promote_options="default")
