"""The `traces` format: traces of model calls, of OpenTelemetry, Langfuse, MLflow and Phoenix.

    {"name": "chat m", "context": {"trace_id": "...", "span_id": "..."}, "parent_id": null,
     "attributes": {"gen_ai.input.messages": "[...]", "gen_ai.output.messages": "[...]", ...}}

A trace is a run; each span of a model call is a call, in the order in which they began: calls that
ran in parallel stay separate contexts. A span around the span of the same call (a framework's around
a client's) is not counted twice. Prompt, answer and tools are read by the conventions of
OpenTelemetry's GenAI (attributes or events), OpenInference, OpenLLMetry, Vercel's AI SDK, MLflow and
Langfuse. The agent is the next agent span above.

If a prompt begins with the result of a tool that the call before asked for, the log has only what
was new: the messages of the call before it in the same span precede it. A system message that only
the agent's span has comes first. Both are counted.

The reward is a score named `reward` or the only score, unless `--reward` names another; all scores are
metrics. A trace whose outermost span failed is a failed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollout_io.dataset.opening import read_input
from rollout_io.formats.base import (
    About,
    Adapter,
    Found,
    Input,
    Options,
    Place,
    Progress,
    Rejected,
    Run,
    Trajectory,
)
from rollout_io.formats.contents import Contents, account
from rollout_io.formats.dialects import frameworks
from rollout_io.formats.dialects.bodies import (
    answers_of,
    prompt_of,
    response_with_tokens,
    tools_of,
    value_of,
)
from rollout_io.formats.dialects.spans import (
    Span,
    at,
    form_of,
    listed,
    protobuf_records,
    spans_in,
)
from rollout_io.formats.parsing.content import Message, extend, known
from rollout_io.formats.parsing.documents import is_document
from rollout_io.formats.parsing.jsonl import (
    contained,
    decode_document,
    decode_line,
    decoded,
    first_lines,
    refuse_lfs_pointer,
    refuse_not_utf8,
)
from rollout_io.formats.parsing.lines import Record, lines_of, read_record
from rollout_io.formats.parsing.messages import read_messages
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.notes import note
from schemas.errors import ConfigError, InputError, RolloutError

_GROUPS = "inferred: each trace is a separate instance"
_PROTOBUF = (".pb", ".binpb", ".proto.bin")
_MARKS = (b'"trace_id"', b'"traceId"', b'"resourceSpans"', b'"observations"', b'"span_id"')
_CONTENTS = Contents(
    reads={
        "": "name context kind span_kind parent_id start_time status status_code status_message "
        "attributes events resourceSpans resource_spans trace observations id sessionId userId "
        "scores info data"
    },
    leaves={
        "facts about the program": "resource links instrumentation_scope scope schema_url end_time",
        "shown by the tool": "input output metadata tags projectId environment timestamp latency "
        "createdAt updatedAt corrections release version bookmarked public htmlPath totalCost",
    },
)
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
_AGENTS = frozenset({"AGENT"})
_VERCEL = ("doGenerate", "doStream")

NO_ANSWER = "spans of model calls without a prompt or an answer: left out"
AROUND = "spans around the span of the same model call: left out"
PLAIN = "prompts logged as plain text: one user message each"
CONTINUED = "prompts logged as what was new: the messages of the call before were put before them"
FROM_AGENT = "system messages taken from the agent's span"

_ANY = msgspec.json.Decoder()


def find_traces(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield one run per trace, in the order of their first spans."""
    places: dict[str, list[Place]] = {}
    labels: dict[str, dict[str, str]] = {}
    for record, problem in _records(inputs, progress):
        try:
            if problem is not None:
                raise problem
            with contained(record.place.where):
                spans = list(spans_in(_value(record), record.place.where))
        except RolloutError as error:
            yield Rejected(record.place, error)
            continue
        for trace in dict.fromkeys(span.trace for span in spans):
            place = msgspec.structs.replace(record.place, part=trace)
            places.setdefault(trace, []).append(place)
        for span in spans:
            labels.setdefault(span.trace, {"trace": span.trace}).update(span.labels)
    for trace, each in places.items():
        yield Run(instance_id=trace, repetition_id=0, places=each, labels=labels[trace])
    if places:
        yield About("groups", _GROUPS)


def _records(
    inputs: Sequence[Input], progress: Progress
) -> Iterator[tuple[Record, RolloutError | None]]:
    """Yield the lines or the document of each input, with the error if it is not UTF-8."""
    for given in inputs:
        is_text = not given.path.name.endswith(_PROTOBUF)
        if is_text and not _is_document(given.path):
            for place, content in lines_of([given], progress):
                yield Record(place, content), _problem(content, place.where)
            continue
        content = read_input(given.path)
        progress(len(content))
        place = Place(given.path, given.name, 0, len(content))
        yield Record(place, content), _problem(content, given.name) if is_text else None


def _problem(content: bytes, where: str) -> RolloutError | None:
    try:
        refuse_lfs_pointer(content, where)
        refuse_not_utf8(content, where)
    except RolloutError as error:
        return error
    return None


def _is_document(path: Path) -> bool:
    """True if a file is one JSON document over several lines, rather than JSON Lines."""
    first = next(iter(first_lines(path)), b"")
    try:
        decoded(_ANY, first)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return True
    return False


def _value(record: Record) -> Any:
    place = record.place
    if place.path.name.endswith(_PROTOBUF):
        return protobuf_records(record.content, place.where)
    if place.where == str(place.path) or place.offset == 0:
        return decode_document(_ANY, record.content, place.where)
    return decode_line(_ANY, record.content, place.where)


def read_trace(run: Run, options: Options) -> Trajectory:
    """Read the model calls of a trace.

    Raises:
        InputError: `no_calls`: no span has both a prompt and an answer; `message`: a message has an
            unknown shape; `record_type`: a span has another form.
        ConfigError: `reward`: the trace has no score of that name.
    """
    trace, where = run.instance_id, run.places[0].where
    spans: dict[str, Span] = {}
    for place in run.places:
        value = _value(Record(place, read_record(place)))
        spans |= {s.id: s for s in spans_in(value, place.where) if s.trace == place.part}
    ordered = sorted(spans.values(), key=lambda span: span.start)
    calls = list(_calls(ordered, spans, where))
    error = next((s.error for s in ordered if s.error and s.parent not in spans), None)
    if not calls and not error and not run.failed:
        got = "no span of the trace has both the prompt and the answer of a model call"
        hint = "let the tracing library record the content of messages"
        raise InputError("no_calls", f"{where}, trace {trace}", got, hint=hint)
    scores: dict[str, float] = {}
    for span in ordered:
        scores |= span.scores | _evaluations(span)
    models = [m for s in ordered if isinstance(m := _first(s, _MODELS), str)]
    return Trajectory(
        steps=steps_of(calls, f"{where}, trace {trace}", failed=run.failed or error is not None),
        reward=_reward(scores, options, where),
        error=error,
        metrics=scores,
        user_values={"model": models[-1]} if models else {},
    )


_MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "langfuse.model")


def _reward(scores: Mapping[str, float], options: Options, where: str) -> float | None:
    if options.reward is not None:
        if options.reward not in scores:
            expected = "one of " + ", ".join(map(repr, scores)) if scores else "a trace with scores"
            raise ConfigError("reward", where, f"no score {options.reward!r}", expected)
        return scores[options.reward]
    return scores.get("reward", next(iter(scores.values())) if len(scores) == 1 else None)


def _evaluations(span: Span) -> dict[str, float]:
    """Return the scores in the events of a span."""
    found = {}
    for event in span.events:
        name, value = (at(event, f"gen_ai.evaluation.{n}") for n in ("name", "score.value"))
        if isinstance(name, str) and isinstance(value, int | float):
            found[name] = float(value)
    return found


class _Logged(NamedTuple):
    """A model call as its span tells it."""

    span: Span
    prompt: list[Message]
    answers: list[Message]
    tools: list[Message] | None
    raw: msgspec.Raw | None


def _calls(ordered: Iterable[Span], spans: Mapping[str, Span], where: str) -> Iterator[Call]:
    found = []
    for span in ordered:
        if not _is_call(span):
            continue
        logged = _logged(span, f"{where}, span {span.id}")
        if logged is None:
            note(NO_ANSWER)
        else:
            account(_ATTRIBUTES, span.attributes, "attributes")
            found.append(logged)
    around = {above for each in found for above in _above(each.span, spans)}
    note(AROUND, sum(each.span.id in around for each in found))
    last: dict[str | None, list[Message]] = {}
    for each in found:
        span = each.span
        if span.id in around:
            continue
        prompt = _whole_prompt(each, last.get(span.parent), spans)
        for answer in each.answers:
            yield Call(
                where=f"{where}, span {span.id}",
                prompt=prompt,
                reply=answer,
                answer=each.raw,
                agent=_agent(span, spans),
                tools=each.tools,
                stop_reason=_stop_reason(span),
                **_sampling(span),
            )
        last[span.parent] = [*prompt, *each.answers[:1]]


def _above(span: Span, spans: Mapping[str, Span]) -> Iterator[str]:
    """Yield the ids of the spans around a span; a circle of parents ends it."""
    seen = {span.id}
    parent = span.parent
    while parent is not None and parent not in seen:
        seen.add(parent)
        yield parent
        above = spans.get(parent)
        parent = above.parent if above else None


def _whole_prompt(
    logged: _Logged, before: list[Message] | None, spans: Mapping[str, Span]
) -> list[Message]:
    prompt = logged.prompt
    if before is not None and prompt[0]["role"] == "tool" and prompt[: len(before)] != before:
        asked = [c.get("id") for m in before[-1:] for c in m.get("tool_calls", ())]
        if prompt[0].get("tool_call_id") in asked:
            note(CONTINUED)
            return [*before, *prompt]
    if any(message["role"] in {"system", "developer"} for message in prompt):
        return prompt
    for above in _above(logged.span, spans):
        span = spans.get(above)
        if span is not None and (span.kind in _AGENTS or _first(span, ("gen_ai.agent.name",))):
            system = _system_of(span)
            if system:
                note(FROM_AGENT)
                return [{"role": "system", "content": system}, *prompt]
            break
    return prompt


def _system_of(span: Span) -> str | None:
    found = _first(span, ("gen_ai.system_instructions",))
    if found is not None:
        return _instructions(found)
    value = value_of(_first(span, ("gen_ai.input.messages", "langfuse.input")))
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        content = frameworks.messages([first], span.id)[0]["content"]
        return content if isinstance(content, str) else None
    return None


def _instructions(logged: Any) -> str:
    value = value_of(logged)
    parts = value if isinstance(value, list) else [value]
    texts = [p.get("content", p.get("text")) if isinstance(p, Mapping) else p for p in parts]
    return "\n".join(str(text) for text in texts if text)


def _is_call(span: Span) -> bool:
    operation = _first(span, ("gen_ai.operation.name", "llm.request.type"))
    vercel = at(span.attributes, "ai.operationId") or span.name
    if str(vercel).startswith("ai."):
        return str(vercel).endswith(_VERCEL)
    if span.kind:
        return span.kind in _CALLS
    if operation is not None:
        return operation in _OPERATIONS
    return any(_first(span, (name,)) for name in ("gen_ai.output.messages", "gen_ai.completion"))


def _logged(span: Span, where: str) -> _Logged | None:
    """Return prompt and answer of a call by the first convention that has both."""
    tools = next((t for path in _TOOLS if (t := tools_of(_first(span, (path,))))), None)
    conventions = (_genai, _indexed, _vercel, _bodies, _events)
    for logged in (convention(span, where) for convention in conventions):
        if logged is not None and logged.prompt and logged.answers:
            return logged._replace(tools=logged.tools or tools or _listed_tools(span))
    return None


_TOOLS = (
    "gen_ai.tool.definitions",
    "langfuse.toolDefinitions",
    "ai.prompt.tools",
    "mlflow.chat.tools",
)


def _genai(span: Span, where: str) -> _Logged | None:
    """OpenTelemetry's GenAI: messages as JSON, in attributes or in an event with the details."""
    for tree in (span.attributes, *span.events):
        given, output = at(tree, "gen_ai.input.messages"), at(tree, "gen_ai.output.messages")
        if given is None or output is None:
            continue
        prompt = prompt_of(given, f"{where}, gen_ai.input.messages")
        messages = prompt.messages if prompt else []
        system = at(tree, "gen_ai.system_instructions")
        if system:
            messages = [{"role": "system", "content": _instructions(system)}, *messages]
        answers = answers_of(output, f"{where}, gen_ai.output.messages")
        return _Logged(span, messages, answers, None, None)
    return None


def _indexed(span: Span, where: str) -> _Logged | None:
    """OpenInference and OpenLLMetry: one attribute for each field of each message."""
    for given, output in (
        ("llm.input_messages", "llm.output_messages"),
        ("gen_ai.prompt", "gen_ai.completion"),
    ):
        prompt = [_of_tree(each) for each in listed(at(span.attributes, given))]
        answers = [_of_tree(each) for each in listed(at(span.attributes, output))]
        if prompt and answers:
            raws = [msgspec.Raw(msgspec.json.encode(each)) for each in prompt]
            replies = [msgspec.Raw(msgspec.json.encode(e | {"role": "assistant"})) for e in answers]
            found = read_messages(raws, f"{where}, {given}")
            return _Logged(span, found, _one_answer(read_messages(replies, where)), None, None)
    return None


def _one_answer(found: list[Message]) -> list[Message]:
    """Return the answer of a span with several messages, which the conventions cannot tell apart."""
    for message in found[1:]:
        extend(found[0], message)
    return found[:1]


def _of_tree(node: Any) -> dict[str, Any]:
    """Return a message whose fields were attributes, in OpenAI's format."""
    node = node.get("message", node) if isinstance(node, Mapping) else {}
    content, role = node.get("content"), str(node.get("role", "user"))
    parts = [_part(each) for each in listed(node.get("contents"))]
    value = value_of(content) if isinstance(content, str) and content.startswith("[{") else content
    is_parts = isinstance(value, list) and all(
        isinstance(v, Mapping) and "type" in v for v in value
    )
    calls = []
    for each in listed(node.get("tool_calls")):
        call = each.get("tool_call", each)
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


def _part(each: Any) -> dict[str, Any]:
    node = each.get("message_content", each) if isinstance(each, Mapping) else {}
    url = at(node, "image.image.url") or at(node, "image.url")
    if url:
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": node.get("text") or ""}


def _listed_tools(span: Span) -> list[Message] | None:
    schemas = [at(each, "tool.json_schema") for each in listed(at(span.attributes, "llm.tools"))]
    functions = listed(at(span.attributes, "llm.request.functions"))
    functions = [f | {"parameters": value_of(f.get("parameters"))} for f in functions]
    return tools_of([*filter(None, schemas), *functions])


def _vercel(span: Span, where: str) -> _Logged | None:
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
    given = {"role": "assistant", "content": [*parts, *blocks]}
    answers = frameworks.messages([given], where) if parts or blocks else []
    return _Logged(span, prompt.messages, answers, prompt.tools, None)


def _bodies(span: Span, where: str) -> _Logged | None:
    """Langfuse, MLflow, OpenInference: request and response as the program had them."""
    tree = span.attributes
    for given, output in (
        ("langfuse.input", "langfuse.output"),
        ("langfuse.observation.input", "langfuse.observation.output"),
        ("mlflow.spanInputs", "mlflow.spanOutputs"),
        ("input.value", "output.value"),
        ("gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response"),
        ("traceloop.entity.input", "traceloop.entity.output"),
    ):
        logged, returned = at(tree, given), at(tree, output)
        if logged is None or returned is None:
            continue
        prompt = prompt_of(logged, f"{where}, {given}")
        answers = answers_of(returned, f"{where}, {output}")
        if prompt and answers:
            note(PLAIN, int(prompt.is_plain))
            return _Logged(
                span, prompt.messages, answers, prompt.tools, response_with_tokens(returned)
            )
    return None


def _events(span: Span, where: str) -> _Logged | None:
    """OpenTelemetry's GenAI before 1.37: an event for each message."""
    logged = value_of(at(span.attributes, "events") or at(span.attributes, "all_messages_events"))
    events = logged if isinstance(logged, list) else [_flat(event) for event in span.events]
    prompt, answers = [], []
    for event in events:
        name = str(event.get("event.name", "")) if isinstance(event, Mapping) else ""
        if name == "gen_ai.choice":
            answers += answers_of(event.get("message", event), where)
        elif name.startswith("gen_ai.") and name.endswith(".message"):
            prompt += frameworks.messages([event], where)
    return _Logged(span, prompt, answers, None, None)


def _flat(event: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value_of(value) for name, value in event.items() if name != "name"}
    return fields | {"event.name": event.get("name")}


def _agent(span: Span, spans: Mapping[str, Span]) -> str | None:
    names = ("gen_ai.agent.name", "agent.name")
    own = _first(span, names)
    if isinstance(own, str):
        return own
    for above in _above(span, spans):
        found = spans.get(above)
        if found is None:
            continue
        name = _first(found, names)
        if isinstance(name, str):
            return name
        if found.kind in _AGENTS:
            return found.name or None
    return None


def _stop_reason(span: Span) -> str | None:
    for path in ("gen_ai.response.finish_reasons", "llm.finish_reason", "ai.response.finishReason"):
        found = value_of(at(span.attributes, path))
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, str):
            return found
    return None


def _sampling(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stated = value_of(_first(span, ("llm.invocation_parameters", "langfuse.modelParameters")))
    stated = stated if isinstance(stated, Mapping) else {}
    for name in ("temperature", "top_p", "top_k"):
        value = value_of(_first(span, (f"gen_ai.request.{name}",)))
        value = value_of(stated.get(name)) if value is None else value
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        found[name] = int(number) if name == "top_k" else number
    return found


def _first(span: Span, paths: Iterable[str]) -> Any:
    return next((v for path in paths if (v := at(span.attributes, path)) is not None), None)


class _Shape(msgspec.Struct, gc=False):
    """The keys of a document with spans."""

    context: dict[str, Any] | None = None
    attributes: dict[str, Any] | None = None
    resource_spans: list[Any] | None = msgspec.field(name="resourceSpans", default=None)
    trace: dict[str, Any] | None = None
    id: str | None = None
    observations: list[Any] | None = None
    info: dict[str, Any] | None = None
    data: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        found = msgspec.structs.asdict(self) | {"resourceSpans": self.resource_spans}
        if form_of(found) is None or not _has_spans(found):
            raise ValueError("the document has no spans")


def _has_spans(record: Mapping[str, Any]) -> bool:
    context = record.get("context")
    if isinstance(context, Mapping) and record.get("attributes") is not None:
        return "trace_id" in context
    data = record.get("data")
    if isinstance(data, Mapping):
        return isinstance(data.get("spans"), list)
    observations = record.get("observations")
    if isinstance(observations, list):
        return any(isinstance(o, Mapping) and "traceId" in o for o in observations)
    return True


_SHAPE_DECODER = msgspec.json.Decoder(_Shape | list[_Shape])


def recognizes(path: Path) -> bool:
    """True if a file has spans in one of the forms."""
    if path.name.endswith(_PROTOBUF):
        return path.is_file()
    for line in first_lines(path):
        if line.lstrip().startswith((b"{", b"[")) and any(mark in line for mark in _MARKS):
            try:
                decoded(_SHAPE_DECODER, line)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            return True
    return is_document(path, _SHAPE_DECODER, _MARKS)


ADAPTER = Adapter(
    summary="traces of OpenTelemetry (OTLP, GenAI, OpenInference), Langfuse, MLflow, Phoenix",
    recognizes=recognizes,
    find=find_traces,
    read=read_trace,
    is_text=True,
    noun="trace",
    contents=_CONTENTS,
)
