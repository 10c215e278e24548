"""Calls of other people's code: in threads that may hang, with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

from schemas.errors import RolloutError

Value = TypeVar("Value")


class OwnThread:
    """A thread that makes blocking calls, one after the other: what it opens stays in one thread.

    A thread cannot be ended from outside: one that hangs is left behind, the next call gets a fresh
    one, and none keeps the process from its end.

    Args:
        rule: First word of the errors' rules.
    """

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._work: SimpleQueue[Callable[[], None] | None] | None = None

    async def call(self, function: Callable[[], Value], timeout_s: float, where: str) -> Value:
        """The result of a call.

        Raises:
            RolloutError: {rule}_timeout: no result in time; {rule}_raised: whatever the call raised.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Value] = loop.create_future()

        def run() -> None:
            answer = _answer_of(function)
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(_settle, future, *answer)

        if self._work is None:
            self._work = SimpleQueue()
            threading.Thread(target=_work_off, args=(self._work,), daemon=True, name=where).start()
        self._work.put(run)
        try:
            return await in_time(future, timeout_s, self._rule, where)
        finally:
            if future.cancelled():
                self.end()

    def end(self) -> None:
        """Have the thread end after what it is doing."""
        if self._work is not None:
            self._work.put(None)
            self._work = None


def _work_off(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()


def _answer_of(function: Callable[[], Value]) -> tuple[Value | None, BaseException | None]:
    try:
        return function(), None
    except StopIteration as error:  # a future takes any other
        return None, RuntimeError(f"StopIteration: {error}")
    except BaseException as error:
        return None, error


def _settle(
    future: asyncio.Future[Value], value: Value | None, error: BaseException | None
) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)  # type: ignore[arg-type]
    else:
        future.set_exception(error)


async def in_time(awaitable: Awaitable[Value], timeout_s: float, rule: str, where: str) -> Value:
    """What an awaitable of other people's gives.

    Raises:
        RolloutError: {rule}_timeout; {rule}_raised. An error that is a RolloutError already stays
            what it is.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise RolloutError(f"{rule}_timeout", where, f"nothing after {timeout_s:g} s")
    try:
        return task.result()
    except (RolloutError, KeyboardInterrupt):
        raise
    except BaseException as error:  # pytest's outcomes and panics of Rust are no Exceptions
        raise _raised(rule, where, error) from error


def _raised(rule: str, where: str, error: BaseException) -> RolloutError:
    text = " ".join(str(error).split())[:300]
    return RolloutError(f"{rule}_raised", where, f"{type(error).__name__}: {text}".strip(": "))
