"""An OpenAI-compatible endpoint of the engine for a custom generator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import Engine
from pipelines.generation.engines.wrapper import WrappedEngine
from pipelines.harness.addresses import answering_at
from pipelines.harness.engine_api import EngineApp
from pipelines.harness.launchers import Endpoint
from rollout_io.retokenize.tokenizer import ChatTokenizer

Turn = Callable[[], AbstractAsyncContextManager[None]]


class _InTurn(WrappedEngine):
    def __init__(self, engine: Engine, turn: Turn) -> None:
        super().__init__(engine)
        self._turn = turn

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self._turn()


@asynccontextmanager
async def open_endpoint(
    config: GenerateConfig, engine: Engine, tokenizer: ChatTokenizer, turn: Turn
) -> AsyncIterator[Endpoint]:
    """Serve the engine to a custom generator; the arguments are those of `recorded_calls.open_calls`.

    Raises:
        ConfigError: `address`: the address cannot be bound.
    """
    name = config.served_model_name
    usual = name or Path(config.model).name
    app = EngineApp(_InTurn(engine, turn), tokenizer, usual, only=name)
    async with answering_at(app, config.host, config.port) as url:
        yield Endpoint(base_url=f"{url}/v1", model=usual)
