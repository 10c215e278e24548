"""An engine that runs vLLM in the trainer's processes, on the same devices.

Each process holds a part of the model (`VllmPart`), and all take the same steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pipelines.generation.engines.base import (
    ENDS_THE_RUN,
    ENGINE_DOWN,
    Sampled,
    Sampling,
    to_its_end,
)
from pipelines.generation.engines.completions import engine_answers, sampling_fields, support_fields
from rollout_io.formats.parsing.bodies import complete_support
from rollout_io.formats.parsing.tokens import logprob_array
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import ConfigError, EngineError, RolloutError
from schemas.metadata import LogprobsMode
from trainer.engine.embedded import InProcessEngine
from trainer.run.resume import generators, restore_generators

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


WHERE = "vLLM in this process"
_ARGUMENTS = "[generate] engine_args"
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
_USUAL = {"gpu_memory_utilization": 0.5, "disable_log_stats": True, "use_tqdm_on_load": False}
"""vLLM's default of 0.92 leaves no memory for the trainer."""
_OURS = {
    "model": "set `model`",
    "dtype": "set `dtype`",
    "tensor_parallel_size": "it is the number of processes: pass --num-processes",
    "pipeline_parallel_size": "all processes share each layer",
    "data_parallel_size": "all processes share each layer",
    "distributed_executor_backend": "the number of processes determines it",
    "logprobs_mode": "log-probabilities are those of the sampled distribution",
    "enable_sleep_mode": "vLLM sleeps during updates wherever it can",
}
_RELOADING = "vllm.model_executor.model_loader.reload.layerwise"

NamedTensors = Iterable[tuple[str, Tensor]]
Request = tuple[str, list[int], dict[str, Any]]
"""Name, prompt, and fields of `SamplingParams`."""


def _vllm() -> Any:
    """Import vLLM, whose environment must be set before."""
    os.environ |= _ENVIRONMENT | os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    return vllm


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the names of arguments for vLLM.

    Raises:
        ConfigError: `config_key`: vLLM has no such argument, or it is set here.
        ImportError: vLLM is not installed.
    """
    names = [field.name for field in dataclasses.fields(_vllm().EngineArgs)]
    for name in arguments:
        if name in _OURS:
            raise ConfigError("config_key", _ARGUMENTS, f"`{name}`", hint=_OURS[name])
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean `{near[0]}`?" if near else "use an argument of vLLM's EngineArgs"
            raise ConfigError("config_key", _ARGUMENTS, f"unknown argument `{name}`", hint=hint)


class VllmPart:
    """The part of vLLM in one process.

    Each process holds 1 / `num_processes` of every weight and of the cache, schedules the same
    requests, and samples the same tokens. All processes therefore call the same methods with the
    same arguments, in the same order.

    Args:
        model: Path of the model on this machine.
        weights: Yields the trainer's current weights, named as in model directories.

    Attributes:
        digest: Checksum of all responses so far, by which processes notice that they differ.
    """

    def __init__(self, model: str, weights: Callable[[], NamedTensors] = tuple) -> None:
        self._model, self.weights = model, weights
        self.digest = 0
        self._engine: Any = None
        self._forked = ExitStack()

    def start(self, arguments: dict[str, Any], num_processes: int) -> dict[str, int]:
        """Start vLLM, and return the size of its context and of its vocabulary.

        Raises:
            EngineError: `engine_start`: vLLM cannot be started with these arguments.
        """
        vllm = _vllm()
        from vllm.platforms import current_platform

        several = {"distributed_executor_backend": "external_launcher"} if num_processes > 1 else {}
        before = generators()
        try:
            engine_args = vllm.EngineArgs(
                model=self._model,
                tensor_parallel_size=num_processes,
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=current_platform.is_sleep_mode_available(),
                **_USUAL | several | arguments,
            )
            self._engine = vllm.LLMEngine.from_engine_args(engine_args)
        except Exception as error:
            reason = " ".join(str(error).split())
            hint = "change engine_args in [generate]: see vLLM's EngineArgs"
            finding = f"vLLM cannot start: {type(error).__name__}: {reason[:500]}"
            raise EngineError("engine_start", self._model, finding, hint=hint) from error
        # For each rotary embedding, which has no weights, it warns that it failed to load weights.
        logging.getLogger(_RELOADING).setLevel(logging.ERROR)
        restore_generators(before)
        self._seed(0)
        model = self._engine.model_config
        return {"context_tokens": model.max_model_len, "vocab_size": model.get_vocab_size()}

    def step(
        self, requests: Sequence[Request], aborted: Sequence[str], digest: int
    ) -> tuple[list[Any], dict[str, str]]:
        """Add and abort requests, sample one token of each, and return the finished ones.

        Returns:
            The finished requests, as vLLM's `RequestOutput`; why requests were refused, by name.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._check(digest)
        self._engine.abort_request(list(aborted))
        refused = {}
        for name, ids, fields in requests:
            try:
                parameters = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
                (prompt,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": ids}])
                self._engine.add_request(name, prompt, parameters)
            except (ValueError, TypeError, VLLMClientError) as error:
                refused[name] = str(error)
        outputs = self._engine.step() if self._engine.has_unfinished_requests() else []
        finished = [output for output in outputs if output.finished]
        for output in finished:
            self.digest = zlib.crc32(repr(output.outputs[0].token_ids).encode(), self.digest)
        return finished, refused

    def sleep(self, digest: int) -> None:
        """Free the devices' memory, and restore torch's random number generators."""
        self._check(digest)
        if self._engine.model_config.enable_sleep_mode:
            self._engine.sleep(level=1)
        self._forked.close()

    def wake(self, policy_version: int) -> None:
        """Take the trainer's weights, to sample with them."""
        sleeps = self._engine.model_config.enable_sleep_mode
        if sleeps:
            torch.accelerator.empty_cache()
            self._engine.wake_up(tags=["weights"])
        weights = {"weights_iterator": iter(self.weights())}
        self._engine.collective_rpc("reload_weights", kwargs=weights)
        self._engine.reset_prefix_cache()  # its keys and values come from the old weights
        if sleeps:
            self._engine.wake_up(tags=["kv_cache"])
        self._seed(policy_version)

    def stop(self, num_processes: int) -> None:
        """Free everything that vLLM holds."""
        from vllm.distributed import parallel_state

        self._engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        if num_processes == 1:  # otherwise, the trainer made the group of all processes
            parallel_state.destroy_distributed_environment()

    def _seed(self, policy_version: int) -> None:
        """Seed torch's generators, with which vLLM samples: equally in all processes."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        self._forked.enter_context(torch.random.fork_rng(devices))
        torch.manual_seed((self._engine.model_config.seed << 32) + policy_version)

    def _check(self, digest: int) -> None:
        if digest != self.digest:
            finding = "this process sampled other tokens than the main process"
            raise EngineError("engine_answer", WHERE, finding, "the same tokens in all processes")
