"""Call user code with a time limit; threads that hang are abandoned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from schemas.errors import InputError, RolloutError

Value = TypeVar("Value")

_GRACE_S = 5.0


class OwnThread:
    """A thread that runs blocking calls one after another, for resources tied to a thread.

    A thread cannot be killed: if a call hangs, its thread is abandoned and the next call gets a new
    one. Threads are daemons, so they do not keep the process alive.

    Args:
        rule: Prefix of the error rules.
    """

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._work: SimpleQueue[Callable[[], None] | None] | None = None

    async def call(self, function: Callable[[], Value], timeout_s: float, where: str) -> Value:
        """Call a function in the thread and return its result.

        Raises:
            InputError: `{rule}_timeout`: there is no result in time; `{rule}_raised`: the function
                raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Value] = loop.create_future()

        def run() -> None:
            answer = _answer_of(function)
            with suppress(RuntimeError):  # the loop was closed: nobody waits for the result
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
        """Let the thread end after its current call."""
        if self._work is not None:
            self._work.put(None)
            self._work = None


def _work_off(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := work.get()) is not None:
        call()


def _answer_of(function: Callable[[], Value]) -> tuple[Value | None, BaseException | None]:
    try:
        return function(), None
    except StopIteration as error:  # the only exception that a future rejects
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


async def without_exit(awaitable: Awaitable[Value]) -> Value:
    """Await a result, turning SystemExit, which would end the process, into an error.

    Raises:
        RuntimeError: The awaitable raised SystemExit.
    """
    try:
        return await awaitable
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


class _Leavable(Awaitable[Value]):
    """An awaitable that can be abandoned even if the awaited code catches its cancellation.

    Otherwise a task with a bare `except` in a loop would never end, and the event loop would wait
    for it before closing.
    """

    def __init__(self, awaitable: Awaitable[Value]) -> None:
        self._awaitable, self._is_left = awaitable, False

    def __await__(self) -> Generator[Any, None, Value]:
        steps = self._awaitable.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                waited_for = resume()
            except StopIteration as ended:
                value: Value = ended.value
                return value
            try:
                yield waited_for
                resume = partial(next, steps)
            except BaseException as error:
                if self._is_left:
                    raise
                resume = partial(steps.throw, error)

    def cancel(self, task: asyncio.Future[Value]) -> None:
        """Cancel the task; abandon it if it is still running after a grace period."""
        task.cancel()
        asyncio.get_running_loop().call_later(_GRACE_S, self._leave, task)

    def _leave(self, task: asyncio.Future[Value]) -> None:
        self._is_left = True
        task.cancel()


async def in_time(awaitable: Awaitable[Value], timeout_s: float, rule: str, where: str) -> Value:
    """Await user code with a time limit.

    Raises:
        InputError: `{rule}_timeout`: there is no result in time; `{rule}_raised`: the code raises.
            A RolloutError raised by the code is passed on unchanged.
    """
    work = _Leavable(awaitable)
    task = awaitable if asyncio.isfuture(awaitable) else asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        work.cancel(task)
        raise
    if not task.done():
        work.cancel(task)
        raise InputError(f"{rule}_timeout", where, f"no result within {timeout_s:g} s")
    try:
        return task.result()
    except (RolloutError, KeyboardInterrupt):
        raise
    except BaseException as error:  # pytest outcomes and Rust panics do not derive from Exception
        raise _raised(rule, where, error) from error


def _raised(rule: str, where: str, error: BaseException) -> InputError:
    text = " ".join(str(error).split())[:300]
    return InputError(f"{rule}_raised", where, f"{type(error).__name__}: {text}".strip(": "))


def encodable(text: str) -> str:
    r"""Escape lone surrogates, which UTF-8 cannot encode.

    Example:
        >>> encodable("caf\u00e9 \ud83d")
        'caf\xe9 \\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode()
