"""Give the policy's weights to the engine; transports: `trainer.engine`, `pipelines.generation.engines`.

as files, or an adapter   `trainer.engine.embedded`, `pipelines.generation.engines.vllm`
from GPU to GPU (NCCL)    `pipelines.generation.engines.weight_transfer`, `trainer.engine.nccl_sender`
in memory                 `trainer.engine.colocated`
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from pipelines.generation.engines.base import Engine, WrappedEngine, is_adapter
from trainer.engine.colocated import ColocatedVllm
from trainer.rl.config import RlConfig
from trainer.rl.followers import ENGINE, WEIGHTS
from trainer.rl.learning import Learning
from trainer.run.messages import say

_WHOLE_MODELS = (
    "the servers get whole models, because they do not load adapters; to send only the adapters, "
    "start vLLM with --enable-lora --max-loras 2 --max-lora-rank RANK and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
)

InAll = Callable[[Mapping[str, Any], Callable[[], Any]], Any]
"""Gives an order to the other processes, and carries it out in this one; blocks."""
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class WeightSync:
    """Hands each version of the policy to the engine.

    Args:
        config: Configuration of the run.
        learning: Has the policy.
        engine: The engine.
        in_all: See `InAll`.
        in_thread: Runs blocking work in the trainer's thread.

    Attributes:
        duration_s: Duration of the last handover, in seconds.
    """

    def __init__(
        self,
        config: RlConfig,
        learning: Learning,
        engine: WeightSwapEngine,
        in_all: InAll,
        in_thread: InThread,
    ) -> None:
        self._config, self._learning, self._engine = config, learning, engine
        self._in_all, self._in_thread = in_all, in_thread
        self._as_adapter, self.duration_s = False, 0.0
        inner = engine.engine
        self._colocated = inner if isinstance(inner, ColocatedVllm) else None
        if self._colocated is not None:
            self._colocated.part.weights = learning.weights
            self._colocated.num_processes = learning.accelerator.num_processes
            self._colocated.together = lambda method, arguments, work: in_all(
                {"do": ENGINE, "method": method, "arguments": arguments}, work
            )

    async def begin(self) -> None:
        """Give the run's weights to an engine that may have others.

        A server may still have another run's weights. One that cannot read the run's directory thus
        ends the run before anything is sampled.
        """
        config, learning, engine = self._config, self._learning, self._engine
        self._as_adapter = learning.has_adapter and await engine.takes_adapters()
        is_served = bool(config.generation.urls)
        if is_served and learning.has_adapter and not self._as_adapter:
            say(_WHOLE_MODELS)
        if is_served and self._as_adapter:
            await engine.load_weights(config.model.path, policy_version=0)
        if is_served or learning.iteration:
            async with self.devices():
                await self.give()

    @asynccontextmanager
    async def devices(self) -> AsyncIterator[None]:
        """Give the devices to the trainer, if the engine shares them; `give` gives them back."""
        if self._colocated is None:
            yield
            return
        async with self._engine.idle():
            await self._colocated.sleep()
            yield

    async def give(self) -> None:
        """Give the current weights to the engine, inside of `devices`."""
        begun, learning = time.perf_counter(), self._learning
        if self._colocated is not None:
            await self._colocated.wake(learning.iteration)
        else:
            # An engine may read the files of both loaded adapters again until `load_weights`
            # has replaced the older one.
            keep = max(self._config.loop.keep_weights, 3 if self._as_adapter else 1)
            how: Any = {"keep": keep, "as_adapter": self._as_adapter}
            write = functools.partial(learning.write_weights, **how)
            order = {"do": WEIGHTS} | how
            path = await self._in_thread(lambda: self._in_all(order, write))
            await self._engine.load_weights(str(path), policy_version=learning.iteration)
        self.duration_s = time.perf_counter() - begun


class WeightSwapEngine(WrappedEngine):
    """An `Engine` that waits for running calls before it loads weights; new calls wait meanwhile.

    For an adapter, no call waits: running calls keep the adapter they started with. Only calls that
    started before the current adapter was loaded must end first, since engines keep two adapters.

    Args:
        engine: The engine to wrap.
        waits: Whether to wait for running calls. Otherwise, they continue with the new weights, if
            the engine supports it.
    """

    def __init__(self, engine: Engine, *, waits: bool) -> None:
        super().__init__(engine)
        self._waits = waits
        self._num_calls = Counter[int]()  # by the policy version at their start
        self._changed = asyncio.Condition()
        self._is_open = True

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """See `Engine.load_weights`."""
        if is_adapter(path):
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._num_calls.total() == self._num_calls[self.policy_version]
                )
            await super().load_weights(path, policy_version=policy_version)
            return
        async with self.idle() if self._waits else nullcontext():
            await super().load_weights(path, policy_version=policy_version)

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Wait for running calls; new calls wait until the end of the block."""
        async with self._changed:
            self._is_open = False
            try:
                await self._changed.wait_for(lambda: self._num_calls.total() == 0)
                yield
            finally:
                self._is_open = True
                self._changed.notify_all()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `WrappedEngine.turn`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_open)
            version = self.policy_version
            self._num_calls[version] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_calls[version] -= 1
                self._changed.notify_all()
