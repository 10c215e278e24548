"""Servers that stop at once."""

import asyncio
from types import SimpleNamespace

import pytest


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
