"""Serve any `Engine` as an OpenAI-compatible API with exact tokens, tools and streaming.

A response is sampled completely before it is sent; a stream returns it in a few chunks.
Log-probabilities name their tokens by id (`token_id:N`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pipelines.generation.config import GenerateConfig
from pipelines.generation.engines.base import ENDS_THE_RUN, ENGINE_DOWN, Engine, Sampled, Sampling
from pipelines.generation.engines.completions import sampling_fields
from pipelines.generation.engines.http_pool import BROKEN, Limits
from pipelines.generation.engines.vllm import Model, VllmEngine
from pipelines.http_server import (
    JSON,
    application,
    error_response,
    read_body,
    unless_left,
)
from pipelines.record.engine_requests import Fields
from pipelines.record.upstreams import MODELS, VERSION_HEADER, Answered, Upstreams, models_response
from rollout_io.retokenize.tokenizer import ChatTokenizer
from schemas.errors import EngineError, InputError, RolloutError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MOST_BYTES, MOST_CHOICES = 64 << 20, 128
_STREAM = "text/event-stream"
_NEUTRAL: tuple[Any, ...] = (None, 0, False, [], {}, "")
_IGNORED = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "logprobs"),
        *("return_token_ids", "cache_salt", "priority", "request_id", "prompt_cache_key"),
        *("safety_identifier", "skip_special_tokens", "spaces_between_special_tokens"),
    }
)
"""Fields that have no effect on sampling here."""
_DEFAULTS = {
    "repetition_penalty": 1,
    "best_of": 1,
    "add_generation_prompt": True,
    "response_format": {"type": "text"},
}
"""Fields that are accepted only with the given value."""

_TOOL_CHOICES: tuple[Any, ...] = (None, "auto", "none")

Count = Annotated[int, msgspec.Meta(ge=1)]

_LENGTHS = ("max_completion_tokens", "max_tokens")
_OURS = ("model", "cache_salt")
_NOT_ASKED = ("max_tokens", "return_token_ids", "include_stop_str_in_output", "seed")


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(msgspec.Struct):
    model: Any = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None


_FIELDS, _REQUEST = msgspec.json.Decoder(dict[str, Any]), msgspec.json.Decoder(_Request)


class EngineApp:
    """ASGI application that serves completion requests with an engine.

    Args:
        engine: An engine whose context has been entered.
        tokenizer: Tokenizer of the engine.
        name: Name of the model for clients.
        only: The only name that requests may use; None: any.

    Attributes:
        failure: An engine error that all further calls would hit too; None if there was none.
    """

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, name: str, only: str | None = None
    ) -> None:
        self._engine, self._tokenizer, self._name, self._only = engine, tokenizer, name, only
        self.failure: RolloutError | None = None
        routes = [
            Route(MODELS, self._models),
            *(Route(path, self._answer, methods=["POST"]) for path in (CHAT, TEXT)),
        ]
        self._app = application(routes, self._refuse, available=(CHAT, TEXT, MODELS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await self._app(scope, receive, send)

    def _refuse(self, error: RolloutError, path: str) -> Response:
        if error.rule in ENDS_THE_RUN:
            self.failure = error
        return error_response(error, path)

    async def _models(self, _: Request) -> Response:
        return models_response(self._name)

    async def _answer(self, request: Request) -> Response:
        body = await read_body(request, MOST_BYTES)
        try:
            return await unless_left(request.receive, self._sampled(request.scope["path"], body))
        except (RolloutError, ClientDisconnect):
            raise
        except Exception as error:  # raised by the model: out of memory, for example
            finding = f"{type(error).__name__}: {error}"
            raise EngineError(ENGINE_DOWN, "engine", finding) from None

    async def _sampled(self, path: str, body: bytes) -> Response:
        request, sampling = read_request(body, path)
        check_model(request.model, self._only, path)
        calls = []
        for index in range(request.n or 1):
            seed = None if sampling.seed is None else sampling.seed + index
            calls.append(self._sample(path, request, replace(sampling, seed=seed)))
        given = await asyncio.gather(*calls)
        write = _chat_choice if path == CHAT else _text_choice
        stop = () if request.include_stop_str_in_output else sampling.stop
        choices = [write(index, sampled, stop) for index, sampled in enumerate(given)]
        about, usage = self._about(path), _usage(given)
        headers = {VERSION_HEADER: str(min(sampled.policy_version for sampled in given))}
        if request.stream:
            chunks = _chunks(about, given[0], choices, request, usage)
            events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
            content = b"".join([*events, b"data: [DONE]\n\n"])
            return Response(content, headers=headers | {"content-type": _STREAM})
        whole = about | {"choices": choices, "usage": usage} | _prompt(given[0])
        return Response(msgspec.json.encode(whole), headers=headers, media_type=JSON)

    async def _sample(self, path: str, request: _Request, sampling: Sampling) -> Sampled:
        if path == CHAT:
            if not request.messages:
                raise _bad(path, "`messages` is missing or empty")
            tools = None if request.tool_choice == "none" else request.tools
            given = dict(request.chat_template_kwargs or {})
            if request.reasoning_effort is not None:  # a variable of the template, as in vLLM
                given["reasoning_effort"] = request.reasoning_effort
            return await self._engine.chat(
                request.messages,
                sampling,
                tools=tools,
                chat_template_kwargs=given or None,
            )
        prompt = request.prompt
        if not prompt:
            raise _bad(path, "`prompt` is missing or empty")
        ids = self._tokenizer.encode([prompt], [path])[0] if isinstance(prompt, str) else prompt
        return await self._engine.sample(ids, sampling)

    def _about(self, path: str) -> dict[str, Any]:
        kind, made = (
            ("chat.completion", "chatcmpl") if path == CHAT else ("text_completion", "cmpl")
        )
        name = f"{made}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._name}


def check_model(asked: Any, served: str | None, path: str) -> None:
    """Refuse a model that is not served, if a name was configured; requests may leave it out.

    Raises:
        InputError: `served_model`: the name is another one.
    """
    if served is not None and asked is not None and asked != served:
        hint = f"use the model {served!r}, as [generate] served_model_name says"
        raise InputError("served_model", path, f"the model {asked!r} is not served", hint=hint)


def read_request(body: bytes, where: str) -> tuple[_Request, Sampling]:
    """Parse a request body; reject unsupported fields that would change sampling.

    Raises:
        InputError: `engine_request`: the body is not a valid request.
        ConfigError: `sampling`: a sampling parameter is out of range.
    """
    try:
        fields, request = _FIELDS.decode(body), _REQUEST.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(where, f"invalid request: {error}") from None
    if request.tool_choice not in _TOOL_CHOICES:
        raise _bad(where, f"tool_choice must be auto or none, not {request.tool_choice!r:.40}")
    unsupported = {
        name: value
        for name, value in fields.items()
        if name not in _IGNORED
        and name not in _Request.__struct_fields__
        and value not in ((None, _DEFAULTS[name]) if name in _DEFAULTS else _NEUTRAL)
    }
    if unsupported:
        raise _bad(where, f"unsupported fields: {', '.join(map(repr, unsupported))}")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    usual = Sampling()
    return request, Sampling(
        temperature=usual.temperature if request.temperature is None else request.temperature,
        top_p=usual.top_p if request.top_p is None else request.top_p,
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,
        min_p=request.min_p or 0.0,
        max_tokens=request.max_completion_tokens or request.max_tokens or usual.max_tokens,
        stop=stop,
        seed=request.seed,
    )


def _bad(where: str, got: str) -> InputError:
    return InputError("engine_request", where, got)


def _chat_choice(index: int, sampled: Sampled, stop: Sequence[str]) -> dict[str, Any]:
    message = sampled.message or {"role": "assistant", "content": sampled.text}
    content = message.get("content")
    message = message | {"content": content and _cut(content, stop)}
    tokens: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sampled.response_ids, sampled.rollout_logprobs, strict=True)
    ]
    return _choice(index, sampled) | {"message": message, "logprobs": {"content": tokens}}


def _text_choice(index: int, sampled: Sampled, stop: Sequence[str]) -> dict[str, Any]:
    logprobs = {
        "tokens": [f"token_id:{token}" for token in sampled.response_ids],
        "token_logprobs": sampled.rollout_logprobs,
    }
    text = _cut(sampled.text, stop)
    own = {"text": text, "logprobs": logprobs, "prompt_token_ids": sampled.prompt_token_ids}
    return _choice(index, sampled) | own


def _choice(index: int, sampled: Sampled) -> dict[str, Any]:
    routes = sampled.rollout_expert_indices
    found = {} if routes is None else {"routed_experts": routes.tolist()}
    if sampled.sampling_support is not None:
        found["sampling_support"] = sampled.sampling_support
    ids = {"token_ids": sampled.response_ids}
    return {"index": index, "finish_reason": sampled.stop_reason} | ids | found


def _cut(text: str, stop: Sequence[str]) -> str:
    """Remove the stop string at the end of a text."""
    return next((text.removesuffix(end) for end in stop if text.endswith(end)), text)


def _prompt(sampled: Sampled) -> dict[str, Any]:
    return {"prompt_token_ids": sampled.prompt_token_ids}


def _usage(given: Sequence[Sampled]) -> dict[str, int]:
    prompt = len(given[0].prompt_token_ids)
    response = sum(len(sampled.response_ids) for sampled in given)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response,
        "total_tokens": prompt + response,
    }


def _chunks(
    about: dict[str, Any],
    first: Sampled,
    choices: Sequence[dict[str, Any]],
    request: _Request,
    usage: dict[str, int],
) -> Iterator[dict[str, Any]]:
    """Yield a stream's chunks: for each choice, its content and its end; then usage, if requested.

    The first chunk also has the ids of the prompt.
    """
    if about["object"] == "chat.completion":
        about = about | {"object": "chat.completion.chunk"}
    prompt = _prompt(first)
    for choice in choices:
        end = {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        part = {k: v for k, v in choice.items() if k != "message"} | {"finish_reason": None}
        if "message" in choice:
            part["delta"], end["delta"] = _delta(choice["message"]), {}
        else:
            end["text"] = ""
        yield about | prompt | {"choices": [part]}
        yield about | {"choices": [end]}
        prompt = {}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield about | {"choices": [], "usage": usage}


def _delta(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls") or ())]
    return dict(message) | ({"tool_calls": calls} if calls else {})


class EngineGone(EngineError):
    """Error for a call that got no response on any attempt; further calls would fail too."""


class PolicyUpstreams(Upstreams):
    """Engines that serve the calls of harnesses.

    Args:
        urls: Root of each engine.
        engine: Engine that loads their weights.
    """

    gone = EngineGone

    def __init__(self, urls: Sequence[str], engine: Engine) -> None:
        super().__init__(urls, Limits())
        self._vllm = engine if isinstance(engine, VllmEngine) else None
        self._servers = self._vllm.servers if self._vllm else None

    async def model(self) -> Model:
        """See `Upstreams.model`; the id is the name of the current adapter, if there is one."""
        usual = await super().model()
        adapter = self._vllm.adapter if self._vllm else None
        return usual if adapter is None else msgspec.structs.replace(usual, id=adapter)

    async def _once(
        self, root: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> Answered:
        if self._servers is None:
            return await super()._once(root, method, path, body, headers)
        try:
            await self._servers.welcome_back(root)
            return await super()._once(root, method, path, body, headers)
        except BROKEN:
            self._servers.lose(root)
            raise

    async def parts(self, response: Answered) -> AsyncIterator[bytes]:
        """See `Upstreams.parts`."""
        try:
            async for content in super().parts(response):
                yield content
        except BROKEN:
            if self._servers is not None:
                self._servers.lose(*(u for u in self.urls if str(response.url).startswith(u)))
            raise


def usual_fields(
    config: GenerateConfig,
    seed: int | None,
    policy_version: int,
    special_tokens: Collection[str] = (),
) -> dict[str, Any]:
    """Return the default fields of a harness's requests.

    Args:
        config: Sampling settings.
        seed: Seed of this call; None to send no seed.
        policy_version: Version of the engine's weights; prevents cache hits from older weights.
        special_tokens: See `VllmEngine`.
    """
    usual = sampling_fields(config.sampling, special_tokens)
    fields = {name: value for name, value in usual.items() if name not in _NOT_ASKED}
    fields |= config.sampling_extra
    if config.chat_template_kwargs:
        fields["chat_template_kwargs"] = config.chat_template_kwargs
    if seed is not None:
        fields["seed"] = seed
    if config.urls:
        fields["cache_salt"] = f"policy_version={policy_version}"
    return fields


def completed(fields: Fields, usual: Mapping[str, Any], max_response_tokens: int) -> Fields:
    r"""Add missing fields to a request, and limit the length of its response.

    Args:
        fields: Fields that the client sent; null is treated as missing.
        usual: Defaults. `model` and `cache_salt` always override the client's.
        max_response_tokens: Upper bound on the requested length.

    Example:
        >>> made = completed({"max_tokens": msgspec.Raw(b"9")}, {"temperature": 0.5}, 4)
        >>> msgspec.json.encode(made)
        b'{"temperature":0.5,"max_tokens":4}'
    """
    made = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in usual.items()}
    named = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    ours = {name: made[name] for name in _OURS if name in made}
    made |= named | ours
    lengths = [name for name in _LENGTHS if name in named] or ["max_tokens"]
    most = msgspec.Raw(msgspec.json.encode(max_response_tokens))
    for name in lengths:
        if name not in named or _number(named[name]) > max_response_tokens:
            made[name] = most
    return made


def _number(raw: msgspec.Raw) -> float:
    """Parse a number, or a numeric string, which vLLM accepts too; return 0 for anything else."""
    try:
        return msgspec.convert(msgspec.json.decode(raw), float, strict=False)
    except msgspec.ValidationError:
        return 0
