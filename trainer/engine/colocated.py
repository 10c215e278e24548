"""An engine that runs vLLM in the trainer's processes, on the same devices."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from pipelines.generation.engines.base import (
    ENDS_THE_RUN,
    ENGINE_DOWN,
    Sampled,
    Sampling,
    to_its_end,
)
from pipelines.generation.engines.completions import (
    engine_answers,
    sampling_fields,
    support_fields,
)
from rollout_io.formats.parsing.bodies import complete_support
from rollout_io.formats.parsing.tokens import logprob_array
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import ConfigError, EngineError, RolloutError
from schemas.metadata import LogprobsMode
from trainer.engine.in_process import InProcessEngine
from trainer.engine.vllm_part import WHERE, Request, VllmPart

Together = Callable[[str, Mapping[str, Any], Callable[[], Any]], Any]
"""Has the other processes call a method of their `VllmPart`, and does the work of this process."""


class ColocatedVllm(InProcessEngine):
    """An `Engine` that runs vLLM in this process, and in others that sample with it.

    Calls are batched continuously; each can be cancelled. The log-probabilities describe the
    sampled distribution.

    Args:
        model: A Hugging Face model directory.
        tokenizer: Its tokenizer and chat template.
        dtype: Data type of the weights: "float32" or "bfloat16".
        arguments: Further arguments of vLLM's `EngineArgs`; see `check_arguments`.
        special_tokens: As for `VllmEngine`.
        policy_version: Version of the weights.

    Attributes:
        part: The part of vLLM in this process; set its `weights` before the first `wake`.
        together: Has the other processes follow; set it, and `num_processes`, before entering.
        num_processes: Number of processes.
    """

    logprobs_mode: LogprobsMode = "processed"

    def __init__(
        self,
        model: str,
        tokenizer: ChatTokenizer,
        *,
        dtype: str,
        arguments: Mapping[str, Any],
        special_tokens: Collection[str] = (),
        policy_version: int = 0,
    ) -> None:
        super().__init__(tokenizer, policy_version)
        self._arguments = {"dtype": dtype, **arguments}
        self._special_tokens = special_tokens
        self.part, self.num_processes = VllmPart(model), 1
        self.together: Together = lambda _method, _arguments, work: work()
        self._sizes = {"context_tokens": 0, "vocab_size": 0}
        self._names = map(str, itertools.count())
        self._new: list[Request] = []
        self._aborted: list[str] = []
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._runner: asyncio.Task[None] | None = None
        # One thread, because the current GPU is a property of threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")

    @property
    def context_tokens(self) -> int:
        """See `Engine.context_tokens`."""
        return self._sizes["context_tokens"]

    async def __aenter__(self) -> Self:
        how = {"arguments": self._arguments, "num_processes": self.num_processes}
        self._sizes = await self._all("start", **how)
        return self

    async def __aexit__(self, *error: object) -> None:
        for call in self._calls.values():
            call.cancel()
        if self._runner is not None:
            await asyncio.wait([self._runner])
        # Other processes may have ended, or be in another order: each stops by itself.
        await self._in_thread(lambda: self.part.stop(self.num_processes))
        self._thread.shutdown()

    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """See `Engine.sample`."""
        del session
        prompt, version = [int(token) for token in prompt_token_ids], self.policy_version
        length = self.max_tokens(prompt, sampling, self._sizes["vocab_size"])
        support = support_fields(sampling, "processed", is_chat=False)
        usual = sampling_fields(sampling, self._special_tokens) | {"max_tokens": length}
        usual |= {"logprobs": support.get("logprobs", 0)}
        del usual["return_token_ids"]
        if clash := sampling.extra.keys() & usual.keys():
            finding = f"these fields are already set: {', '.join(sorted(clash))}"
            raise ConfigError("sampling", "extra", finding)
        output = (await self._answer(prompt, {**usual, **sampling.extra})).outputs[0]
        ids, routes = list(output.token_ids), output.routed_experts
        likely = [{i: one.logprob for i, one in token.items()} for token in output.logprobs]
        with engine_answers(WHERE):
            values = [token[i] for token, i in zip(likely, ids, strict=True)]
            logprobs = logprob_array(values, len(ids), WHERE).tolist()
        return Sampled(
            prompt_token_ids=prompt,
            response_ids=ids,
            rollout_logprobs=logprobs,
            stop_reason=output.finish_reason,
            text=output.text,
            policy_version=version,
            rollout_expert_indices=None if routes is None else routes.astype(np.int16),
            sampling_support=complete_support(likely, ids) if support else None,
        )

    async def _answer(self, prompt: list[int], fields: dict[str, Any]) -> Any:
        try:
            json.dumps(fields)
        except (TypeError, ValueError) as error:
            raise EngineError("engine_refused", "extra sampling fields", str(error)) from None
        name = next(self._names)
        call = self._calls[name] = asyncio.get_running_loop().create_future()
        self._new.append((name, prompt, fields))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await call
        except asyncio.CancelledError:
            self._aborted.append(name)
            raise
        finally:
            del self._calls[name]

    async def _run(self) -> None:
        """Step vLLM until no call is waiting, and every cancelled request is aborted."""
        try:
            while self._calls or self._aborted:
                requests, self._new = self._new, []
                aborted, self._aborted = self._aborted, []
                how = {"requests": requests, "aborted": aborted, "digest": self.part.digest}
                finished, refused = await self._all("step", **how)
                for output in finished:
                    self._end(output.request_id, output)
                for name, reason in refused.items():
                    self._end(name, EngineError("engine_refused", WHERE, reason))
                await asyncio.sleep(0)  # callers continue, and may call again before the next step
        except Exception as error:
            if not isinstance(error, RolloutError) or error.rule not in ENDS_THE_RUN:
                error = EngineError(ENGINE_DOWN, WHERE, f"{type(error).__name__}: {error}")
            self._new.clear()
            for name in self._calls:
                self._end(name, error)
        finally:
            self._runner = None

    def _end(self, name: str, result: Any) -> None:
        call = self._calls.get(name)
        if call is None or call.done():
            return
        if isinstance(result, BaseException):
            call.set_exception(result)
        else:
            call.set_result(result)

    async def sleep(self) -> None:
        """Give the devices to the trainer; no call may be running, and none start before `wake`."""
        if self._runner is not None:
            await self._runner
        await self._all("sleep", digest=self.part.digest)

    async def wake(self, policy_version: int) -> None:
        """Take the trainer's weights in memory, and sample with them from now on."""
        await self._all("wake", policy_version=policy_version)
        self.policy_version = policy_version

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """Refuse files: `wake` takes the trainer's weights.

        Raises:
            EngineError: `engine_refused`: always.
        """
        finding = f"{WHERE} takes the trainer's weights in memory (version {policy_version})"
        raise EngineError("engine_refused", path, finding, "no directory")

    async def _all(self, method: str, **arguments: Any) -> Any:
        """Call a method of every process's part, in the thread of this one's."""
        work = getattr(self.part, method)
        return await self._in_thread(
            lambda: self.together(method, arguments, lambda: work(**arguments))
        )

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        # To its end: an order is carried out in all processes, or in none.
        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._thread, work))
