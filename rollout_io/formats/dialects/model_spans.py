"""The model call of a span, by the conventions of tracing libraries.

OpenTelemetry's GenAI   gen_ai.input.messages, gen_ai.output.messages; in events before 1.37
OpenInference           llm.input_messages.0.message.content, ..., or input.value
OpenLLMetry             gen_ai.prompt.0.content, ...
Vercel's AI SDK         ai.prompt.messages, ai.response.text, ai.response.toolCalls
MLflow, Langfuse        requests and responses as the program had them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollout_io.formats.base import note
from rollout_io.formats.dialects import frameworks
from rollout_io.formats.dialects.bodies import (
    answers_of,
    joined,
    prompt_of,
    response_with_tokens,
    tools_of,
    value_of,
    with_calls,
)
from rollout_io.formats.dialects.spans import Span, at, listed
from rollout_io.formats.grammar import Contents, account
from rollout_io.formats.parsing.content import Message, known
from rollout_io.formats.parsing.messages import read_messages, text_of

PLAIN = "prompts logged as plain text: one user message each"

_ATTRIBUTES = Contents(
    reads={
        "": "gen_ai.input.messages gen_ai.output.messages gen_ai.system_instructions gen_ai.prompt "
        "gen_ai.completion gen_ai.tool.definitions gen_ai.response.finish_reasons gen_ai.agent.name "
        "gen_ai.request.temperature gen_ai.request.top_p gen_ai.request.top_k "
        "gen_ai.response.model gen_ai.request.model llm.input_messages llm.output_messages "
        "llm.tools llm.prompts llm.request.functions llm.invocation_parameters llm.finish_reason "
        "llm.model_name input.value output.value ai.prompt ai.response langfuse mlflow.spanInputs "
        "mlflow.spanOutputs mlflow.chat gcp.vertex.agent.llm_request "
        "gcp.vertex.agent.llm_response traceloop.entity.input traceloop.entity.output events "
        "all_messages_events openinference.span.kind session user agent.name"
    },
    leaves={
        "facts about the call": "gen_ai.operation gen_ai.provider gen_ai.system gen_ai.request "
        "gen_ai.response gen_ai.usage gen_ai.conversation gen_ai.agent gen_ai.server "
        "gen_ai.output.type gen_ai.token gen_ai.openai gen_ai.headers gen_ai.is_streaming "
        "llm.system llm.provider llm.token_count llm.request llm.usage llm.response llm.headers "
        "llm.is_streaming llm.cost input.mime_type output.mime_type ai.model ai.settings "
        "ai.telemetry ai.usage ai.operationId operation mlflow.spanType mlflow.traceRequestId "
        "mlflow.spanFunctionName mlflow.chat_model mlflow.llm mlflow.message metadata tag "
        "gcp.vertex traceloop",
        "facts about the program": "server http net url error logfire openlit service telemetry "
        "scope resource library code thread request_data model_name model_request_parameters "
        "resourceAttributes deployment cloud host process langsmith langgraph",
    },
)
_CALLS = frozenset({"LLM", "GENERATION", "CHAT_MODEL"})
_OPERATIONS = frozenset({"chat", "text_completion", "generate_content", "completion"})
_VERCEL = ("doGenerate", "doStream")


class ModelCall(NamedTuple):
    """A model call as its span tells it."""

    span: Span
    prompt: list[Message]
    answers: list[Message]
    tools: list[Message] | None
    raw: msgspec.Raw | None


def is_call(span: Span) -> bool:
    """True if a span is a call of a model, rather than an agent, a tool or a step of a program."""
    operation = first_value(span, ("gen_ai.operation.name", "llm.request.type"))
    vercel = at(span.attributes, "ai.operationId") or span.name
    if str(vercel).startswith("ai."):
        return str(vercel).endswith(_VERCEL)
    if span.kind:
        return span.kind in _CALLS
    if operation is not None:
        return str(operation) in _OPERATIONS
    return any(
        first_value(span, (name,)) for name in ("gen_ai.output.messages", "gen_ai.completion")
    )


def model_call(span: Span, where: str) -> ModelCall | None:
    """Return prompt and answer of a call by the first convention that has both."""
    tools = next((t for path in _TOOLS if (t := tools_of(first_value(span, (path,))))), None)
    conventions = (_genai, _indexed, _vercel, _bodies, _events)
    for logged in (convention(span, where) for convention in conventions):
        if logged is not None and logged.prompt and logged.answers:
            account(_ATTRIBUTES, span.attributes, "attributes")
            return logged._replace(tools=logged.tools or tools or _listed_tools(span))
    return None


_TOOLS = (
    "gen_ai.tool.definitions",
    "langfuse.toolDefinitions",
    "ai.prompt.tools",
    "mlflow.chat.tools",
)


def _genai(span: Span, where: str) -> ModelCall | None:
    """OpenTelemetry's GenAI: messages as JSON, in attributes or in an event with the details."""
    for tree in (span.attributes, *span.events):
        logged, output = at(tree, "gen_ai.input.messages"), at(tree, "gen_ai.output.messages")
        if logged is None or output is None:
            continue
        prompt = prompt_of(logged, f"{where}, gen_ai.input.messages")
        messages = prompt.messages if prompt else []
        system = at(tree, "gen_ai.system_instructions")
        text = instructions_text(system) if system else ""
        if text and not _has_system(messages, text):
            messages = [{"role": "system", "content": text}, *messages]
        answers = answers_of(output, f"{where}, gen_ai.output.messages")
        return ModelCall(span, messages, answers, None, None)
    return None


def _has_system(messages: Sequence[Message], text: str) -> bool:
    """True if the system messages say the same, as one text or in parts, whatever the white space."""
    texts = [text_of(m) or "" for m in messages if m["role"] in {"system", "developer"}]
    wanted = "".join(text.split())
    return wanted in {"".join("".join(texts).split()), *("".join(t.split()) for t in texts)}


def _indexed(span: Span, where: str) -> ModelCall | None:
    """OpenInference and OpenLLMetry: one attribute for each field of each message."""
    for path, output in (
        ("llm.input_messages", "llm.output_messages"),
        ("gen_ai.prompt", "gen_ai.completion"),
    ):
        prompt = [_of_tree(message) for message in listed(at(span.attributes, path))]
        answers = [_of_tree(message) for message in listed(at(span.attributes, output))]
        if prompt and answers:
            raws = [msgspec.Raw(msgspec.json.encode(with_calls(message))) for message in prompt]
            answered = [with_calls(message | {"role": "assistant"}) for message in answers]
            replies = [msgspec.Raw(msgspec.json.encode(message)) for message in answered]
            prompt_messages = read_messages(raws, f"{where}, {path}")
            return ModelCall(
                span, prompt_messages, joined(read_messages(replies, where)), None, None
            )
    return None


def _of_tree(node: Any) -> dict[str, Any]:
    """Return a message whose fields were attributes, in OpenAI's format."""
    node = node.get("message", node) if isinstance(node, Mapping) else {}
    content, role = node.get("content"), str(node.get("role", "user"))
    parts = [_part(inner) for inner in listed(node.get("contents"))]
    value = value_of(content) if isinstance(content, str) and content.startswith("[{") else content
    is_parts = isinstance(value, list) and all(
        isinstance(v, Mapping) and "type" in v for v in value
    )
    calls = []
    for inner in listed(node.get("tool_calls")):
        call = inner.get("tool_call", inner)
        function = call.get("function", call)
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else function
        named = {"name": name, "arguments": arguments or "{}"}
        calls.append(known({"id": call.get("id"), "type": "function", "function": named}))
    fields = {
        "role": {"model": "assistant"}.get(role, role),
        "content": value if is_parts else (parts or content or ""),
        "reasoning_content": node.get("reasoning") or node.get("reasoning_content"),
        "tool_calls": calls or None,
        "tool_call_id": node.get("tool_call_id"),
        "name": node.get("name"),
    }
    return known(fields)


def _part(tree: Any) -> dict[str, Any]:
    node = tree.get("message_content", tree) if isinstance(tree, Mapping) else {}
    url = at(node, "image.image.url") or at(node, "image.url")
    if url:
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": node.get("text") or ""}


def _listed_tools(span: Span) -> list[Message] | None:
    schemas = [at(tool, "tool.json_schema") for tool in listed(at(span.attributes, "llm.tools"))]
    functions = listed(at(span.attributes, "llm.request.functions"))
    functions = [f | {"parameters": value_of(f.get("parameters"))} for f in functions]
    return tools_of([*filter(None, schemas), *functions])


def _vercel(span: Span, where: str) -> ModelCall | None:
    """Vercel's AI SDK: `ai.prompt.messages`, and the parts of the response by themselves."""
    tree = span.attributes
    prompt = prompt_of(at(tree, "ai.prompt.messages"), f"{where}, ai.prompt.messages")
    if prompt is None:
        return None
    calls = value_of(at(tree, "ai.response.toolCalls")) or []
    blocks = [{"type": "tool-call"} | dict(call) for call in calls if isinstance(call, Mapping)]
    text, thought = (at(tree, f"ai.response.{name}") for name in ("text", "reasoning"))
    parts = [{"type": "reasoning", "text": thought}] if thought else []
    parts += [{"type": "text", "text": text}] if text else []
    answer = {"role": "assistant", "content": [*parts, *blocks]}
    answers = frameworks.messages([answer], where) if parts or blocks else []
    return ModelCall(span, prompt.messages, answers, prompt.tools, None)


def _bodies(span: Span, where: str) -> ModelCall | None:
    """Langfuse, MLflow, OpenInference: request and response as the program had them."""
    tree = span.attributes
    for path, output in (
        ("langfuse.input", "langfuse.output"),
        ("langfuse.observation.input", "langfuse.observation.output"),
        ("mlflow.spanInputs", "mlflow.spanOutputs"),
        ("input.value", "output.value"),
        ("gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response"),
        ("traceloop.entity.input", "traceloop.entity.output"),
    ):
        logged, returned = at(tree, path), at(tree, output)
        if logged is None or returned is None:
            continue
        prompt = prompt_of(logged, f"{where}, {path}")
        answers = answers_of(returned, f"{where}, {output}")
        if prompt and answers:
            note(PLAIN, int(prompt.is_plain))
            return ModelCall(
                span, prompt.messages, answers, prompt.tools, response_with_tokens(returned)
            )
    return None


def _events(span: Span, where: str) -> ModelCall | None:
    """OpenTelemetry's GenAI before 1.37: an event for each message."""
    logged = value_of(at(span.attributes, "events") or at(span.attributes, "all_messages_events"))
    events = logged if isinstance(logged, list) else []
    for event in span.events if not isinstance(logged, list) else ():
        fields = {name: value_of(value) for name, value in event.items() if name != "name"}
        events.append(fields | {"event.name": event.get("name")})
    prompt, answers = [], []
    for event in events:
        name = str(event.get("event.name", "")) if isinstance(event, Mapping) else ""
        if name == "gen_ai.choice":
            answers += answers_of(event.get("message", event), where)
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            prompt += frameworks.messages([event], where)
    return ModelCall(span, prompt, answers, None, None)


def instructions_text(logged: Any) -> str:
    """Return the text of GenAI's system instructions: parts, or a string."""
    value = value_of(logged)
    parts = value if isinstance(value, list) else [value]
    texts = [p.get("content", p.get("text")) if isinstance(p, Mapping) else p for p in parts]
    return "\n".join(str(text) for text in texts if text)


def stop_reason(span: Span) -> str | None:
    """Return why the model stopped; None if the span does not say it."""
    for path in ("gen_ai.response.finish_reasons", "llm.finish_reason", "ai.response.finishReason"):
        reason = value_of(at(span.attributes, path))
        reason = reason[0] if isinstance(reason, list) and reason else reason
        if isinstance(reason, str):
            return reason
    return None


def sampling(span: Span) -> dict[str, Any]:
    """Return `temperature`, `top_p` and `top_k`, as far as the span says them."""
    settings: dict[str, Any] = {}
    stated = value_of(first_value(span, ("llm.invocation_parameters", "langfuse.modelParameters")))
    stated = stated if isinstance(stated, Mapping) else {}
    for name in ("temperature", "top_p", "top_k"):
        value = value_of(first_value(span, (f"gen_ai.request.{name}",)))
        value = value_of(stated.get(name)) if value is None else value
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        settings[name] = int(number) if name == "top_k" else number
    return settings


def first_value(span: Span, paths: Iterable[str]) -> Any:
    """Return the value of the first of several attributes that a span has; None if it has none."""
    return next((v for path in paths if (v := at(span.attributes, path)) is not None), None)
