"""Which task comes next: all of them, pass after pass, each pass in an order of its own."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence

from pipelines.generation.tasks import Task
from schemas.errors import RolloutError

_AGAIN = re.compile(r"(.+)@(\d+)")


def draw(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """Tasks without end; of the second pass with `@2` behind their ids, and so on.

    Args:
        tasks: One attempt at each.
        seed: With the number of the pass it decides the pass's order.

    Example:
        >>> tasks = [Task(instance_id=name, repetition_id=0, prompt=[]) for name in "ab"]
        >>> sorted(task.instance_id for task in itertools.islice(draw(tasks, 0), 4))
        ['a', 'a@2', 'b', 'b@2']
    """
    for number in itertools.count(1):
        order = list(tasks)
        random.Random(f"{seed}/{number}").shuffle(order)
        for task in order:
            again = f"{task.instance_id}@{number}"
            name = task.instance_id if number == 1 else again
            yield dataclasses.replace(task, instance_id=name)


def check_names(names: Collection[str]) -> None:
    """Refuse ids that a later pass would give to another task.

    Raises:
        RolloutError: tasks.
    """
    for name in names:
        found = _AGAIN.fullmatch(name)
        if found and found[1] in names:
            got, expected = f"{found[1]!r} and {name!r}", "ids without @ and a number at the end"
            raise RolloutError("tasks", "instance_id", got, expected)
