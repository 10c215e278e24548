"""Order of tasks: repeated passes over all tasks, each shuffled differently or as listed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from pipelines.generation.tasks import Task

TaskOrder = Literal["shuffled", "listed"]


def endless_tasks(tasks: Sequence[Task], order: TaskOrder, seed: int) -> Iterator[Task]:
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
            yield dataclasses.replace(task, instance_id=next(visits[name]), task_instance_id=name)


def _visits(name: str, ids: Collection[str]) -> Iterator[str]:
    yield name
    yield from (visit for n in itertools.count(2) if (visit := f"{name}@{n}") not in ids)
