"""Gemini's API: `models/NAME:generateContent`, `:streamGenerateContent` and `:countTokens`.

    {"contents": [...], "systemInstruction": {...}, "tools": [{"functionDeclarations": [...]}],
     "generationConfig": {"maxOutputTokens": 99, ...}}
    {"candidates": [{"content": {"role": "model", "parts": [{"text": "..."},
        {"functionCall": {"id": "c", "name": "ls", "args": {}}}]}, "finishReason": "STOP"}],
     "usageMetadata": {...}}

A stream is a list of such answers: events with `alt=sse`, else one JSON array. Each has new parts;
a call comes whole, and the last answer has the finish reason and the usage. Thoughts are returned if
`thinkingConfig.includeThoughts` is true, as the API does.

Names may be in snake case, types of schemas in upper case. A client that sends the pieces of a
stream back as contents of their own gets them joined. Settings of safety have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec

from pipelines.record.dialects.base import (
    Block,
    Blocks,
    Chat,
    Count,
    DialectCall,
    Fields,
    Penalty,
    Step,
    Stream,
    Temperature,
    TopP,
    Usage,
    arguments_of,
    decoded,
    engine_messages,
    inexpressible,
    one_system,
    sse,
)
from pipelines.record.dialects.gemini_names import camel, json_schema
from rollout_io.formats.dialects import gemini
from rollout_io.formats.parsing.content import NO_JSON, known
from rollout_io.formats.parsing.tokens import INT32_MAX
from schemas.errors import InputError

_STREAM, _COUNT = "streamGenerateContent", "countTokens"
_PATH = re.compile(r"models/(.+):(\w+)$")
_STOPS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_MODES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_EFFORTS = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}


class _Calling(msgspec.Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct, rename="camel"):
    function_calling_config: _Calling | None = None


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class _Config(msgspec.Struct, rename="camel"):
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[float, msgspec.Meta(ge=0, le=INT32_MAX, multiple_of=1)] | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    candidate_count: Count | None = None
    response_logprobs: bool | None = None
    response_mime_type: str | None = None
    response_modalities: list[str] | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | bool | None = None
    thinking_config: _Thinking | None = None


class GeminiRequest(msgspec.Struct, rename="camel"):
    """The fields of a request that have an effect."""

    contents: list[msgspec.Raw] = []
    system_instruction: msgspec.Raw = NO_JSON
    tools: list[dict[str, Any]] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _Config | None = None
    cached_content: str | None = None
    generate_content_request: GeminiRequest | None = None


class _ShownPart(msgspec.Struct):
    text: str


class _ShownContent(msgspec.Struct):
    parts: list[_ShownPart]
    role: str = "user"


class GeminiShape(msgspec.Struct):
    """The fields of a request that most clients send."""

    contents: list[_ShownContent]


class _Own(msgspec.Struct):
    role: str | None = None
    parts: list[dict[str, msgspec.Raw]] | None = None


_DECODER = msgspec.json.Decoder(GeminiRequest)
_OWN = msgspec.json.Decoder(_Own)
_TEXT = frozenset({"text", "thought", "thoughtSignature"})
_WANTED_TEXT = (None, "text/plain", "text/x.enum")


def request_to_chat(request: GeminiRequest, model: str, path: str) -> Fields:
    """Translate a request to a chat completion.

    Raises:
        InputError: `dialect`: the request needs a tool of the API, several candidates, or a part
            that engines cannot read; any error of the converters.
    """
    if request.cached_content:
        raise inexpressible(path, "`cachedContent`, which the API stores,")
    messages = gemini.messages(_joined(request.contents), f"{path}, contents")
    instruction = msgspec.json.decode(request.system_instruction)
    parts = instruction.get("parts") if isinstance(instruction, Mapping) else None
    if any("text" not in part for part in parts or () if isinstance(part, Mapping)):
        raise inexpressible(path, "a system instruction with other parts than text")
    system = gemini.system_prompt(instruction, f"{path}, systemInstruction")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    config = request.generation_config or _Config()
    return known(
        {
            "model": model,
            "messages": engine_messages(one_system(messages), path),
            "max_tokens": config.max_output_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": None if config.top_k is None else int(config.top_k),
            "stop": config.stop_sequences or None,
            "seed": config.seed,
            "presence_penalty": config.presence_penalty,
            "frequency_penalty": config.frequency_penalty,
            **_output(config, path),
            **_thinking(config.thinking_config or _Thinking()),
            **_tools(request, path),
        }
    )


def _joined(contents: list[msgspec.Raw]) -> list[Any]:
    """Join consecutive contents of the model, and consecutive texts in them.

    Clients keep the pieces of a stream as contents of their own; the model wrote one text.
    """
    joined: list[Any] = []
    for raw in contents:
        try:
            content = _OWN.decode(raw)
        except msgspec.MsgspecError:
            joined.append(raw)  # the converter reads other shapes, or says what is wrong
            continue
        if content.role != "model" or content.parts is None:
            joined.append(raw)
            continue
        if not (joined and isinstance(joined[-1], dict)):
            joined.append({"role": "model", "parts": []})
        for part in content.parts:
            _add(joined[-1]["parts"], part)
    return joined


def _add(parts: list[Any], part: dict[str, Any]) -> None:
    """Add a part, or its text to the last part if both are text of the same kind."""
    last = parts[-1] if parts else {}
    is_text = "text" in part and part.keys() <= _TEXT
    if is_text and "text" in last and last.keys() <= _TEXT and _kind(last) == _kind(part):
        texts = [msgspec.json.decode(one["text"]) for one in (last, part)]
        if all(isinstance(text, str) for text in texts):
            parts[-1] = last | {"text": msgspec.Raw(msgspec.json.encode("".join(texts)))}
            return
    parts.append(part)


def _kind(part: Mapping[str, Any]) -> bytes:
    return bytes(part.get("thought", b"false"))


def _output(config: _Config, path: str) -> Fields:
    """Return the fields that say what the answer looks like."""
    if (config.candidate_count or 1) > 1:
        raise inexpressible(path, f"`candidateCount` {config.candidate_count}")
    if config.response_logprobs:
        raise inexpressible(path, "`responseLogprobs`")
    other = {mode.upper() for mode in config.response_modalities or ()} - {"TEXT"}
    if other:
        raise inexpressible(path, f"the modality {min(other)!r}")
    schema = config.response_json_schema
    if config.response_schema is not None:
        schema = json_schema(config.response_schema)
    if isinstance(schema, Mapping):
        named = {"name": "answer", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if config.response_mime_type in _WANTED_TEXT:
        return {}
    if config.response_mime_type != "application/json":
        raise inexpressible(path, f"`responseMimeType` {config.response_mime_type!r}")
    return {"response_format": {"type": "json_object"}}


def _thinking(thinking: _Thinking) -> Fields:
    fields: Fields = {"reasoning_effort": _EFFORTS.get((thinking.thinking_level or "").upper())}
    if thinking.thinking_budget == 0:
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    return fields


def _tools(request: GeminiRequest, path: str) -> Fields:
    for tool in request.tools or ():
        other = [name for name, value in tool.items() if value is not None]
        other = [name for name in other if name != "functionDeclarations"]
        if other:
            raise inexpressible(path, f"the tool {other[0]!r}, which is defined by the API,")
    tools = gemini.tools(request.tools)
    if tools is None:
        return {}
    for tool in tools:
        function = tool["function"]
        if "parameters" in function:
            function["parameters"] = json_schema(function["parameters"])
    config = request.tool_config or _ToolConfig()
    calling = config.function_calling_config or _Calling()
    mode, names = calling.mode or "AUTO", set(calling.allowed_function_names or ())
    if mode not in {*_MODES, "MODE_UNSPECIFIED"}:
        raise InputError("record_type", path, f"mode {mode!r}", "AUTO, ANY or NONE")
    choice: Any = _MODES.get(mode)
    if names and names != {tool["function"]["name"] for tool in tools}:
        if len(names) > 1:
            raise inexpressible(path, "`allowedFunctionNames` with some of several functions")
        choice = {"type": "function", "function": {"name": min(names)}}
    return {"tools": tools, "tool_choice": choice}


class _Answer:
    """The answer to one request."""

    def __init__(self, model: str, *, shows_thoughts: bool) -> None:
        self._model, self._shows_thoughts = model, shows_thoughts
        self.blocks = Blocks()

    def part(self, block: Block, text: str) -> Fields | None:
        """Return a part of the answer; None if it is not shown."""
        if block.kind == "text":
            return {"text": text}
        if block.kind == "thought":
            return {"text": text, "thought": True} if self._shows_thoughts else None
        call = {"id": block.id, "name": block.name, "args": arguments_of(block)}
        return {"functionCall": call}

    def response(self, parts: list[Fields], *, is_last: bool) -> Fields:
        content: Fields = {"parts": parts, "role": "model"}
        candidate: Fields = {"content": content, "index": 0}
        answer: Fields = {"candidates": [candidate]}
        if is_last:
            finish = self.blocks.finish_reason or "stop"
            candidate["finishReason"] = _STOPS.get(finish, "OTHER")
            answer["usageMetadata"] = _usage(self.blocks.usage)
        name = self.blocks.id.removeprefix("chatcmpl-")
        return answer | {"modelVersion": self._model, "responseId": name}


def _usage(usage: Usage) -> Fields:
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.num_sampled - usage.num_thought,
        "totalTokenCount": usage.prompt_tokens + usage.num_sampled,
        "cachedContentTokenCount": usage.num_cached or None,
        "thoughtsTokenCount": usage.num_thought or None,
    }
    return known(counts)


class _StreamTranslator(Stream):
    """Translates the chunks of a chat completion to answers."""

    def __init__(self, answer: _Answer, framing: _Framing) -> None:
        self._answer, self._framing = answer, framing

    def take(self, chat: Chat) -> bytes:
        parts = [part for step in self._answer.blocks.take(chat) if (part := self._part(step))]
        if not parts:
            return b""
        return self._framing.add(self._answer.response(parts, is_last=False))

    def _part(self, step: Step) -> Fields | None:
        if step.block.kind == "call":  # comes whole
            return self._answer.part(step.block, "") if step.said == "end" else None
        return self._answer.part(step.block, step.text) if step.said == "more" else None

    def end(self) -> bytes:
        last = self._answer.response([{"text": ""}], is_last=True)
        return self._framing.add(last) + self._framing.end()


class _Framing:
    """Writes the answers of a stream: as events, or as the elements of an array."""

    def __init__(self, *, is_sse: bool) -> None:
        self._is_sse, self._has_begun = is_sse, False

    def add(self, value: Fields) -> bytes:
        if self._is_sse:
            return sse(value)
        before = b",\r\n" if self._has_begun else b"["
        self._has_begun = True
        return before + msgspec.json.encode(value)

    def end(self) -> bytes:
        return b"" if self._is_sse else b"]"


class GeminiCall(DialectCall):
    """A call to a method of a model."""

    def __init__(self, body: bytes, path: str, query: Mapping[str, str]) -> None:
        match = _PATH.search(path)
        name, method = (unquote(match[1]), match[2]) if match else ("", "")
        request = decoded(_DECODER, camel(body), path)
        inner = request.generate_content_request if method == _COUNT else None
        request = inner or request
        if not request.contents:
            raise InputError("record_type", path, "no `contents`", "at least one content")
        self.model, self.is_stream = name, method == _STREAM
        self.chat: Fields = request_to_chat(request, name, path)
        if self.is_stream:
            self.chat |= {"stream": True, "stream_options": {"include_usage": True}}
        is_sse = query.get("alt") == "sse"
        if not is_sse:
            self.media_type = "application/json; charset=utf-8"
        self._framing = _Framing(is_sse=is_sse)
        thinking = (request.generation_config or _Config()).thinking_config
        self._shows_thoughts = bool(thinking and thinking.include_thoughts)

    def _answer(self) -> _Answer:
        return _Answer(self.model, shows_thoughts=self._shows_thoughts)

    def answer(self, chat: Chat) -> Fields:
        """See `DialectCall.answer`."""
        answer = self._answer()
        for _ in answer.blocks.take(chat):
            pass
        parts = [answer.part(block, block.text) for block in answer.blocks.all]
        return answer.response([part for part in parts if part], is_last=True)

    def stream(self) -> Stream:
        """See `DialectCall.stream`."""
        return _StreamTranslator(self._answer(), self._framing)

    @staticmethod
    def count(num_tokens: int) -> Fields:
        """See `DialectCall.count`."""
        return {"totalTokens": num_tokens}

    @staticmethod
    def error(status: int, message: str) -> Fields:
        """See `DialectCall.error`."""
        usual = "INTERNAL" if status >= 500 else "INVALID_ARGUMENT"
        named = _STATUSES.get(status, usual)
        return {"error": {"code": status, "message": message, "status": named}}

    def error_event(self, status: int, message: str) -> bytes:
        """See `DialectCall.error_event`."""
        return self._framing.add(self.error(status, message)) + self._framing.end()
