"""vLLM's OpenAI-compatible server as an engine: token prompts, chat with tools, live weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from pipelines.generation.answers import read_sampled
from pipelines.generation.engine import ENGINE_DOWN, Sampled, Sampling
from pipelines.generation.servers import Limits, Servers
from rollout_io.logs.jsonl import decode_line
from schemas.errors import RolloutError
from schemas.metadata import LogprobsMode

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_PROBES = ([1], [2, 3], [10, 20, 30], [5, 4, 3, 2])


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Top(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Probe(msgspec.Struct):
    logprobs: _Top


class _Probed(msgspec.Struct):
    choices: list[_Probe]


_MODELS, _PROBED = msgspec.json.Decoder(_Models), msgspec.json.Decoder(_Probed)


class VllmEngine:
    """An `Engine` on servers that are already up; enter it before the first call.

    Start them with `--logprobs-mode processed_logprobs` to train off-policy corrections at
    temperatures other than 1 or with truncated sampling; for tools with
    `--enable-auto-tool-choice --tool-call-parser NAME`; for `load_weights` with
    VLLM_SERVER_DEV_MODE=1 in the environment. The samplers' defaults of the model's
    generation_config.json do not apply: all parameters are sent.

    Args:
        urls: Root of each server, all with the same model.
        model: The name it is served by; None: the first that the servers list.
        limits: Concurrency, rate, timeouts, repetitions.
        api_key: The servers' `--api-key`.
        policy_version: Of the weights they have.
        logprobs_mode: What their log-probabilities are of; None: found out by two calls.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        model: str | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        policy_version: int = 0,
        logprobs_mode: LogprobsMode | None = None,
    ) -> None:
        urls = [urls] if isinstance(urls, str) else urls
        self._servers = Servers(urls, limits or Limits(), api_key=api_key)
        self._model = model
        self._logprobs_mode = logprobs_mode
        self.policy_version = policy_version

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """As `Engine.logprobs_mode`."""
        assert self._logprobs_mode is not None, "enter the engine first"
        return self._logprobs_mode

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        try:
            if self._model is None:
                bodies = await self._servers.call_each("/v1/models")
                self._model = _one_model([decode_line(_MODELS, b, "/v1/models") for b in bodies])
            if self._logprobs_mode is None:
                self._logprobs_mode = await self._probe()
        except BaseException:
            await self._servers.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._servers.__aexit__(*error)

    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """As `Engine.sample`."""
        prompt = [int(token) for token in prompt_token_ids]
        fields = {"prompt": prompt, "logprobs": 0}
        return await self._call(_COMPLETIONS, fields, sampling, session, sent=prompt)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """As `Engine.chat`; the template's own arguments: `Sampling.extra["chat_template_kwargs"]`."""
        fields: dict[str, Any] = {"messages": list(messages), "logprobs": True}
        if tools:
            fields["tools"] = list(tools)
        return await self._call(_CHAT, fields, sampling, session)

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """As `Engine.load_weights`; the servers see the same files under the same path.

        A server that breaks off and comes back later is given them again: it may be another, with
        those it was started with. What is no model directory is refused here: vLLM ends when it is asked to load one.
        """
        if not any(Path(path).glob("*.safetensors")):
            got, expected = "no *.safetensors", "a Hugging Face model directory"
            raise RolloutError("model_directory", path, got, expected)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(Path(path).absolute())}}
        try:
            await self._servers.call_each("/collective_rpc", body)
        except RolloutError as error:
            if not error.got.startswith("status 500"):
                raise
            expected, hint = "weights that vLLM loads", "the path must be one that the server reads"
            raise RolloutError("engine_refused", path, error.got, expected, hint) from None
        await self._servers.call_each("/reset_prefix_cache", {})
        self._servers.when_returned = [("/collective_rpc", body), ("/reset_prefix_cache", {})]
        self.policy_version = policy_version

    async def _call(
        self,
        path: str,
        fields: dict[str, Any],
        sampling: Sampling,
        session: str | None,
        sent: Sequence[int] | None = None,
    ) -> Sampled:
        usual = fields | _sampling_fields(sampling) | {"model": self._model}
        clash = sampling.extra.keys() & (usual.keys() | {"cache_salt"})
        if clash:
            expected = "fields that are not set already"
            raise RolloutError("sampling", "extra", ", ".join(sorted(clash)), expected)
        version = self.policy_version

        def body() -> dict[str, Any]:
            """Asked of an attempt's weights: keys and values of older ones are not found again."""
            nonlocal version
            version = self.policy_version
            return {**usual, **sampling.extra, "cache_salt": f"policy_version={version}"}

        limits = self._servers.limits
        for attempt in range(1, limits.max_attempts + 1):
            answer = await self._servers.call(path, body, session=session)
            sampled = read_sampled(answer, path, policy_version=version, sent=sent)
            if sampled is not None:
                return sampled
            await asyncio.sleep(limits.wait_s(attempt))
        got = f"{limits.max_attempts} responses that the engine aborted"
        raise RolloutError(ENGINE_DOWN, path, got, "a whole one")

    async def _probe(self) -> LogprobsMode:
        """Whether the likeliest token's log-probability changes with the temperature."""
        for prompt in _PROBES:
            usual, sharp = await asyncio.gather(*(self._top(prompt, t) for t in (1.0, 0.25)))
            if usual < -0.1:
                return "processed" if abs(sharp - usual) > 0.05 else "raw"
        hint = 'say so: logprobs_mode="raw", which is vLLM\'s default, or "processed"'
        raise RolloutError("engine_answer", _COMPLETIONS, "unclear log-probabilities", "", hint)

    async def _top(self, prompt: list[int], temperature: float) -> float:
        fields = _sampling_fields(Sampling(temperature=temperature, max_tokens=1))
        body = fields | {"model": self._model, "prompt": prompt, "logprobs": 1}
        answer = await self._servers.call(_COMPLETIONS, body)
        probed = decode_line(_PROBED, answer, _COMPLETIONS)
        found = [v for choice in probed.choices for v in choice.logprobs.top_logprobs[0].values()]
        if not found or max(found) > 0:
            hint = "start the server with --logprobs-mode raw_logprobs or processed_logprobs"
            expected = "log-probabilities"
            raise RolloutError("engine_answer", _COMPLETIONS, f"{found}", expected, hint)
        return max(found)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_tokens,
        "return_token_ids": True,
    }
    if sampling.stop:
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


def _one_model(listed: Sequence[_Models]) -> str:
    names = [models.data[0].id if models.data else None for models in listed]
    if None in names or len(set(names)) != 1:
        got, hint = ", ".join(map(str, names)), "or name the model"
        raise RolloutError("engine_answer", "/v1/models", got, "the same model everywhere", hint)
    return str(names[0])
