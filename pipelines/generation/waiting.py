"""Calls of other people's code: in threads that may hang, with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import RolloutError

Value = TypeVar("Value")


async def in_thread(
    function: Callable[[], Value], timeout_s: float, rule: str, where: str
) -> Value:
    """The result of a blocking call, made in a thread of its own.

    A thread cannot be ended from outside: one that hangs is left behind, and does not keep the
    process from its end.

    Raises:
        RolloutError: {rule}_timeout: no result in time; {rule}_raised: whatever the call raised.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Value] = loop.create_future()

    def settle(value: Value | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        value: Value | None = None
        failure: BaseException | None = None
        try:
            value = function()
        except StopIteration as error:  # a future takes any other
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True, name=f"{rule} {where}").start()
    return await in_time(future, timeout_s, rule, where)


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
    except RolloutError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise _raised(rule, where, error) from error


def _raised(rule: str, where: str, error: BaseException) -> RolloutError:
    text = " ".join(str(error).split())[:300]
    return RolloutError(f"{rule}_raised", where, f"{type(error).__name__}: {text}".strip(": "))
