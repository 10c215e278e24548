"""Read the next batch while training on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def one_ahead(read: Callable[[Key], Value], keys: Iterable[Key]) -> Iterator[Value]:
    """Yield `read(key)` for each key in order, reading the next value in the background.

    At most two values are in memory: the last one yielded, and the next. An error in `read` is raised
    when its value would have been yielded. A caller that stops early does not wait: the thread ends
    after its read, or with the process.

    Example:
        >>> list(one_ahead(str.upper, ["a", "b"]))
        ['A', 'B']
    """
    readings = (_Reading(read, key) for key in keys)
    coming = next(readings, None)
    while coming is not None:
        value = coming.result()
        coming = next(readings, None)
        yield value
        # Drop the reference, or three values would be alive during the next read.
        del value


class _Reading(Thread, Generic[Key, Value]):
    """A thread that calls `read(key)` once and keeps its result or error."""

    def __init__(self, read: Callable[[Key], Value], key: Key) -> None:
        super().__init__(daemon=True, name="read-ahead")
        self.read, self.key = read, key
        self.value: list[Value] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value.append(self.read(self.key))
        except BaseException as error:
            self.error = error

    def result(self) -> Value:
        self.join()
        if self.error is not None:
            raise self.error
        return self.value.pop()
