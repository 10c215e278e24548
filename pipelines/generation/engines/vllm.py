"""vLLM's OpenAI-compatible server as an engine: token prompts, chat with tools, weight updates."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from pipelines.generation.engines.base import (
    ENGINE_DOWN,
    Sampled,
    Sampling,
    is_adapter,
    to_its_end,
)
from pipelines.generation.engines.completions import (
    read_sampled,
    read_support,
    sampling_fields,
    support_fields,
)
from pipelines.generation.engines.http_pool import Body, Limits, ServerError, Servers
from pipelines.generation.engines.weight_transfer import (
    OpenSender,
    OutputLayers,
    Transfers,
    lacks_output_layer,
)
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import ConfigError, EngineError, InputError, MissingExtra, count
from schemas.metadata import LogprobsMode

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_LOAD_ADAPTER, _UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_ON_CPU = re.compile(rb"device_config=cpu\b")
_PROBES = ([1], [2, 3], [10, 20, 30], [5, 4, 3, 2])

_LOG = logging.getLogger(__name__)


class Model(msgspec.Struct):
    """A served model."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """Response of `/v1/models`."""

    data: list[Model]


class _Top(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Probe(msgspec.Struct):
    logprobs: _Top


class _Probed(msgspec.Struct):
    choices: list[_Probe]


_MODELS, _PROBED = msgspec.json.Decoder(Models), msgspec.json.Decoder(_Probed)


class VllmEngine:
    """An `Engine` that uses running servers; enter its context before the first call.

    To train with off-policy corrections at temperatures other than 1 or with truncated sampling,
    start the servers with `--logprobs-mode processed_logprobs`; for tools, with
    `--enable-auto-tool-choice --tool-call-parser NAME`; for `load_weights`, with
    VLLM_SERVER_DEV_MODE=1 in the environment; to load LoRA adapters, with `--enable-lora
    --max-loras 2 --max-lora-rank RANK` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. Sampling defaults in the model's
    generation_config.json have no effect, because all parameters are sent.

    Args:
        urls: Root of each server; all serve the same model.
        model: Served name of the model; None: the first model that the servers list.
        limits: Concurrency, rate, timeouts and retries.
        api_key: The servers' `--api-key`.
        policy_version: Version of the servers' weights.
        logprobs_mode: Distribution of their log-probabilities; None to detect it with a few calls.
        senders: Functions that open a connection for weight transfer, keyed by the `backend` in a
            server's `--weight-transfer-config`. Servers with other backends load files.
        special_tokens: Special tokens of the model that do not end a response; a stop string with
            one of them can only match if the servers leave them in the text.

    Attributes:
        servers: HTTP client of the servers.
        special_tokens: As given.
        pictures_by: Servers take pictures in messages only.
    """

    pictures_by = "chat"

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        model: str | None = None,
        limits: Limits | None = None,
        api_key: str | None = None,
        policy_version: int = 0,
        logprobs_mode: LogprobsMode | None = None,
        senders: Mapping[str, OpenSender] | None = None,
        special_tokens: Collection[str] = (),
    ) -> None:
        self.special_tokens = special_tokens
        urls = [urls] if isinstance(urls, str) else urls
        self.servers = Servers(urls, limits or Limits(), api_key=api_key)
        self._model = model
        self._adapters: list[dict[str, Any]] = []  # requests that load the two newest, in order
        self._base_requests: Sequence[tuple[str, Body]] = ()  # load the model, before any adapter
        self._logprobs_mode = logprobs_mode
        self.policy_version = policy_version
        self.context_tokens: int | None = None
        self._transfers = Transfers(self.servers, senders or {})
        self._output_layers = OutputLayers()
        self._uses_cpu: bool | None = None

    @property
    def adapter(self) -> str | None:
        """Name by which requests select the current adapter; None: the model without an adapter."""
        return str(self._adapters[-1]["lora_name"]) if self._adapters else None

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """See `Engine.logprobs_mode`."""
        assert self._logprobs_mode is not None, "enter the engine's context first"
        return self._logprobs_mode

    async def __aenter__(self) -> Self:
        await self.servers.__aenter__()
        try:
            await self._transfers.check()
            if self._model is None:
                await self.servers.wait_while_down(self._find_model)
            if self._logprobs_mode is None:
                self._logprobs_mode = await self._probe()
        except BaseException:
            await self.servers.__aexit__()
            raise
        return self

    async def _find_model(self) -> None:
        """Ask the servers for the model that they serve, and for its longest context."""
        bodies = await self.servers.call_each("/v1/models")
        listed = [decode_line(_MODELS, b, "/v1/models") for b in bodies]
        self._model = _one_model(listed)
        told = [models.data[0].max_model_len for models in listed]
        self.context_tokens = min((n for n in told if n is not None), default=None)

    async def __aexit__(self, *error: object) -> None:
        await self._transfers.close()
        await self.servers.__aexit__(*error)
        self._output_layers.close()

    async def sample(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session: str | None = None
    ) -> Sampled:
        """See `Engine.sample`."""
        prompt = [int(token) for token in prompt_token_ids]
        fields = {"prompt": prompt, "logprobs": 0}
        return await self._call(_COMPLETIONS, fields, sampling, session, sent=prompt)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session: str | None = None,
    ) -> Sampled:
        """See `Engine.chat`."""
        fields: dict[str, Any] = {"messages": list(messages), "logprobs": True}
        if tools:
            fields["tools"] = list(tools)
        if chat_template_kwargs:
            fields["chat_template_kwargs"] = dict(chat_template_kwargs)
        return await self._call(_CHAT, fields, sampling, session)

    async def takes_adapters(self) -> bool:
        """See `Engine.takes_adapters`; all servers must list the API that loads adapters."""
        try:
            listed = await self.servers.call_each("/openapi.json")
        except EngineError as error:
            if error.rule == ENGINE_DOWN:
                raise
            return False  # started with --disable-fastapi-docs
        return all(f'"{_LOAD_ADAPTER}"'.encode() in answer for answer in listed)

    async def load_weights(self, path: str, *, policy_version: int) -> None:
        """See `Engine.load_weights`; the servers must see the same files under the same path.

        A server whose backend is in `senders` receives the tensors instead, and loads the files only
        if the transfer fails.

        A server that disconnects and comes back loads the weights again, because a restarted server
        has its initial weights. If no server can be reached, this waits as long as a call does. A
        path that is not a model directory is rejected here, because it would make vLLM exit. On a
        CPU, the servers load a model with tied embeddings from a copy with an explicit output
        layer: see `pipelines.generation.engines.weight_transfer`. The two newest adapters stay
        loaded, so their files must not be moved; calls that use an older adapter must have ended.
        """
        load = self._load_adapter if is_adapter(path) else self._load_model
        await self.servers.wait_while_down(lambda: load(path, policy_version))
        self.policy_version = policy_version

    async def _load_model(self, path: str, policy_version: int) -> None:
        weights, is_copy = Path(path).absolute(), False
        if not any(weights.glob("*.safetensors")):
            finding = "not a Hugging Face model directory: it has no *.safetensors"
            raise InputError("model_directory", path, finding)
        if await asyncio.to_thread(lacks_output_layer, weights) and await self._on_cpu():
            weights, is_copy = await asyncio.to_thread(self._output_layers.add, weights), True
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        # Cached keys and values come from the old weights.
        requests: list[tuple[str, Body]] = [("/collective_rpc", body), ("/reset_prefix_cache", {})]
        await self._transfers.begin()
        after = self._transfers.requests_after_files(policy_version)
        self._base_requests = self.servers.when_returned = [*requests, *after]

        async def change(url: str) -> None:
            if self._transfers.takes(url):
                await to_its_end(self._transfer(url, weights, policy_version))
            else:
                await self._send(url, requests)

        try:
            await self.servers.change_each(change)
        except ServerError as error:
            if error.status != 500:
                raise
            source, hint = "", "give the server this path on a shared disk"
            hint += ", or start it with --weight-transfer-config, to be sent the weights"
            if is_copy:
                source = f" from {weights}, a copy of the model with an explicit output layer"
                hint = "set TMPDIR to a directory that the server can read"
            finding = f"the server at {error.where} cannot load the weights{source}: {error.got}"
            raise EngineError("engine_refused", path, finding, hint=hint) from None
        self._adapters = []
        if is_copy:
            self._output_layers.keep_latest()
        else:
            self._output_layers.close()

    async def _transfer(self, url: str, weights: Path, policy_version: int) -> None:
        """Transfer weights to a server; if that fails, have it load the files before its next call."""
        try:
            await self._transfers.send(url, weights, policy_version)
        except (ConfigError, MissingExtra):
            raise
        except Exception as error:  # including errors of the sender's library
            finding = f"{type(error).__name__}: {error}"
            _LOG.warning("%s: weight transfer failed, loading the files instead: %s", url, finding)
            await self._transfers.recover(url)
            self.servers.lose(url)
            # Any call makes the client send `when_returned` first, which loads the files.
            await self.servers.call_one(url, "/weight_info")

    async def _send(self, url: str, requests: Sequence[tuple[str, Body]]) -> None:
        for path, body in requests:
            await self.servers.call_one(url, path, body)

    async def _load_adapter(self, path: str, policy_version: int) -> None:
        """Load an adapter, keep the current one loaded, and unload the one before it."""
        # The name depends on the contents: vLLM may still cache another run's adapter of the same
        # version, and prefixes computed with it.
        name = f"policy_version_{policy_version}_{_digest(path)}"
        others = [request for request in self._adapters if request["lora_name"] != name]
        # Load in place: the server may already have it if the connection broke after a load.
        loaded = {"lora_name": name, "lora_path": str(Path(path).absolute()), "load_inplace": True}
        kept = [*others[-1:], loaded]
        loads = [(_LOAD_ADAPTER, request) for request in kept]
        self.servers.when_returned = [*self._base_requests, *loads]
        try:
            await self.servers.change_each(lambda url: self._send(url, loads[-1:]))
        except EngineError as error:
            if isinstance(error, ServerError) and error.status is None:
                raise
            hint = (
                "start the servers with --enable-lora --max-loras 2 --max-lora-rank RANK, and use"
            )
            hint = f"{hint} a path that they can read"
            finding = f"vLLM cannot load the adapter: {error.got}"
            raise EngineError("engine_refused", path, finding, hint=hint) from None
        for request in others[:-1]:
            with suppress(EngineError):  # a server that was restarted does not have it
                await self.servers.call_each(_UNLOAD_ADAPTER, {"lora_name": request["lora_name"]})
        self._adapters = kept

    async def _on_cpu(self) -> bool:
        """True if at least one server runs on a CPU; the first call may take seconds."""
        if self._uses_cpu is None:
            try:
                answers = await self.servers.call_each("/server_info")
                self._uses_cpu = any(_ON_CPU.search(answer) for answer in answers)
            except EngineError as error:
                if error.rule != "engine_refused":
                    raise
                _LOG.warning(
                    "cannot tell whether vLLM computes on a CPU (%s); if it does, it does not load"
                    " this model's output layer, because the embeddings are tied",
                    error.got,
                )
                self._uses_cpu = False
        return self._uses_cpu

    async def _call(
        self,
        path: str,
        fields: dict[str, Any],
        sampling: Sampling,
        session: str | None,
        sent: Sequence[int] | None = None,
    ) -> Sampled:
        extra = support_fields(sampling, self._logprobs_mode, is_chat=path == _CHAT)
        usual = fields | extra | sampling_fields(sampling, self.special_tokens)
        clash = sampling.extra.keys() & (usual.keys() | {"model", "cache_salt"})
        if clash:
            finding = f"these fields are already set: {', '.join(sorted(clash))}"
            raise ConfigError("sampling", "extra", finding)
        version = self.policy_version

        def body() -> dict[str, Any]:
            """Build the request for one attempt; a salt prevents cache hits from old weights."""
            nonlocal version
            version = self.policy_version
            current = {"model": self.adapter or self._model}
            return {**current, **usual, **sampling.extra, "cache_salt": f"policy_version={version}"}

        limits = self.servers.limits
        for attempt in range(1, limits.max_attempts + 1):
            answer = await self.servers.call(path, body, session=session)
            sampled = read_sampled(answer, path, policy_version=version, sent=sent)
            if sampled is not None and extra:
                support = read_support(answer, sampled.response_ids)
                return dataclasses.replace(sampled, sampling_support=support)
            if sampled is not None:
                return sampled
            await asyncio.sleep(limits.wait_s(attempt))
        finding = f"the engine aborted {count(limits.max_attempts, 'response')}"
        hint = "find the reason in the server's log"
        raise EngineError(ENGINE_DOWN, path, finding, hint=hint)

    async def _probe(self) -> LogprobsMode:
        """Detect the mode: only processed log-probabilities depend on the temperature."""
        for prompt in _PROBES:
            usual, sharp = await asyncio.gather(*(self._top(prompt, t) for t in (1.0, 0.25)))
            # A value near 0 means that the token is almost certain at any temperature.
            if usual < -0.1:
                return "processed" if abs(sharp - usual) > 0.05 else "raw"
        hint = 'pass logprobs_mode="raw" (vLLM\'s default) or "processed"'
        finding = "cannot tell raw from processed log-probabilities"
        raise EngineError("engine_answer", _COMPLETIONS, finding, hint=hint)

    async def _top(self, prompt: list[int], temperature: float) -> float:
        fields = sampling_fields(Sampling(temperature=temperature, max_tokens=1))
        body = fields | {"model": self._model, "prompt": prompt, "logprobs": 1}
        answer = await self.servers.call(_COMPLETIONS, body)
        probed = decode_line(_PROBED, answer, _COMPLETIONS)
        found = [v for choice in probed.choices for v in choice.logprobs.top_logprobs[0].values()]
        if not found or max(found) > 0:
            hint = "start the server with --logprobs-mode raw_logprobs or processed_logprobs"
            expected = "log-probabilities"
            raise EngineError("engine_answer", _COMPLETIONS, f"{found}", expected, hint)
        return max(found)


def _digest(path: str) -> str:
    """Return a short fingerprint of an adapter's files."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).glob("adapter_*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _one_model(listed: Sequence[Models]) -> str:
    names = [models.data[0].id if models.data else None for models in listed]
    if None in names or len(set(names)) != 1:
        finding, hint = ", ".join(map(str, names)), "pass model=NAME"
        message = f"/v1/models: the servers do not serve the same model: {finding}"
        raise EngineError("engine_answer", "/v1/models", finding, hint=hint, message=message)
    return str(names[0])
