"""Order of tasks: repeated passes over all tasks, each shuffled differently or as listed."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from pipelines.generation.tasks import Task
from schemas.errors import InputError

TaskOrder = Literal["shuffled", "listed"]

_AGAIN = re.compile(r"(.+)@(\d+)")


def endless_tasks(tasks: Sequence[Task], order: TaskOrder, seed: int) -> Iterator[Task]:
    """Yield tasks endlessly; ids have the suffix `@2` in the second pass, and so on.

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
    for number in itertools.count(1):
        order_of_pass = list(tasks)
        if order == "shuffled":
            random.Random(f"{seed}/{number}").shuffle(order_of_pass)
        for task in order_of_pass:
            name = task.instance_id
            yield dataclasses.replace(task, instance_id=name if number == 1 else f"{name}@{number}")


def first_name(name: str, names: Collection[str]) -> str:
    """Return the task's original id, without the suffix of a later pass.

    Example:
        >>> first_name("a@2", {"a"}), first_name("b@2", {"b@2"})
        ('a', 'b@2')
    """
    match = _AGAIN.fullmatch(name)
    return match[1] if match and name not in names else name


def check_names(names: Collection[str]) -> None:
    """Reject ids that would collide with ids of a later pass.

    Raises:
        InputError: `tasks`: the file contains both `NAME` and `NAME@NUMBER`.
    """
    for name in names:
        match = _AGAIN.fullmatch(name)
        if match and match[1] in names:
            finding = f"{match[1]!r} and {name!r}"
            expected = "ids that do not end with @ and a number"
            raise InputError("tasks", "instance_id", finding, expected)
