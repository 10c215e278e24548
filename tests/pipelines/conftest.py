"""Servers that stop at once, and tests that are coroutines."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session", autouse=True)
def _prompt_stops():
    """Uvicorn looks ten times a second whether to stop, then waits as long again: here, a twentieth of it.

    Hundreds of tests start two servers each, which would spend most of their time so.
    """
    import uvicorn.server

    names = {name: getattr(asyncio, name) for name in dir(asyncio) if not name.startswith("__")}
    prompt = SimpleNamespace(**names | {"sleep": lambda delay_s: asyncio.sleep(delay_s / 20)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", prompt)
        yield
