"""Order of tasks: repeated passes over all tasks, each shuffled differently."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence

from pipelines.generation.tasks import Task
from schemas.errors import InputError

_AGAIN = re.compile(r"(.+)@(\d+)")


def shuffled_tasks(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """Yield tasks endlessly; ids have the suffix `@2` in the second pass, and so on.

    The seed and the number of a pass determine its order.

    Example:
        >>> tasks = [Task(instance_id=name, repetition_id=0, prompt=[]) for name in "ab"]
        >>> sorted(task.instance_id for task in itertools.islice(shuffled_tasks(tasks, 0), 4))
        ['a', 'a@2', 'b', 'b@2']
    """
    for number in itertools.count(1):
        order = list(tasks)
        random.Random(f"{seed}/{number}").shuffle(order)
        for task in order:
            name = task.instance_id
            yield dataclasses.replace(task, instance_id=name if number == 1 else f"{name}@{number}")


def first_name(name: str, names: Collection[str]) -> str:
    """Return the task's original id, without the suffix of a later pass.

    Example:
        >>> first_name("a@2", {"a"}), first_name("b@2", {"b@2"})
        ('a', 'b@2')
    """
    found = _AGAIN.fullmatch(name)
    return found[1] if found and name not in names else name


def check_names(names: Collection[str]) -> None:
    """Reject ids that would collide with ids of a later pass.

    Raises:
        InputError: `tasks`: the file contains both `NAME` and `NAME@NUMBER`.
    """
    for name in names:
        found = _AGAIN.fullmatch(name)
        if found and found[1] in names:
            got, expected = f"{found[1]!r} and {name!r}", "ids that do not end with @ and a number"
            raise InputError("tasks", "instance_id", got, expected)
