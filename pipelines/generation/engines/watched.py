"""Engine wrapper for user code that remembers fatal errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipelines.generation.engines.base import Engine
from pipelines.generation.engines.wrapper import WrappedEngine
from pipelines.generation.trajectory import ENDS_THE_RUN
from schemas.errors import RolloutError


class Watched(WrappedEngine):
    """An `Engine` that remembers an error that ends the run, even if the caller catches it.

    Attributes:
        failure: The first such error; None if there was none.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.failure: RolloutError | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `WrappedEngine.turn`."""
        try:
            yield
        except RolloutError as error:
            if error.rule in ENDS_THE_RUN:
                self.failure = self.failure or error
            raise
