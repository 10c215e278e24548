"""Spans of traces, in the forms in which tracing tools write them.

    OpenTelemetry's SDKs, Phoenix   {"name", "context": {"trace_id", "span_id"}, "parent_id",
                                    "attributes": {...}}
    OTLP, as JSON and as protobuf   {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId", ...}]}]}]}
    Langfuse                        {"trace": {...}, "observations": [...]}, or a trace that holds its
                                    observations
    MLflow                          {"info": {...}, "data": {"spans": [...]}}

`spans_in` brings all of them into one form. Attributes become a tree: "llm.input_messages.0.role"
is found below "llm", whether the log has the dotted name or nested objects.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rollout_io.formats.base import note
from rollout_io.formats.dialects.bodies import value_of
from schemas.errors import InputError
from schemas.imports import requires_extra

Tree = dict[str, Any]

FORMS = (
    (("context", "attributes"), "OpenTelemetry"),
    (("resourceSpans",), "OTLP"),
    (("resource_spans",), "OTLP"),
    (("trace", "observations"), "Langfuse"),
    (("id", "observations"), "Langfuse"),
    (("info", "data"), "MLflow"),
)
"""Keys of a record by which a form is known, and the tool that writes it."""

SCORE_IDS = "scores of which the trace has only the ids: left out"
_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue", "bytesValue")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span of a trace.

    Attributes:
        kind: Type of the span in the words of the tool, in upper case; empty if it has none.
        start: Start in seconds; 0.0 if unknown.
        attributes: Attributes as a tree; a value beside values below it has the key "".
        events: Attributes of the events as trees, each with its name under "name".
        error: Why the span failed; None if it did not.
        scores: Scores of the trace or the span, by name.
        opinions: Names of the scores that say nothing about success by themselves: a model judged, or
            they are about one call only.
        labels: Names of the trace, such as its session.
    """

    trace: str
    id: str
    parent: str | None
    name: str
    kind: str
    start: float
    attributes: Tree
    events: Sequence[Tree] = ()
    error: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    opinions: frozenset[str] = frozenset()


def form_of(record: Any) -> str | None:
    """Return the name of the tool whose form a record has; None if it is no record of spans."""
    if isinstance(record, list):
        return form_of(record[0]) if record else None
    if not isinstance(record, Mapping):
        return None
    return next(
        (tool for keys, tool in FORMS if all(record.get(k) is not None for k in keys)), None
    )


def spans_in(record: Any, where: str) -> Iterator[Span]:
    """Yield the spans of a record: a decoded line or document."""
    form = form_of(record)
    if isinstance(record, list) and form is not None:
        for i, element in enumerate(record):
            yield from spans_in(element, f"{where}[{i}]")
    elif form == "OpenTelemetry":
        _object(record["attributes"], f"{where}, attributes")
        yield _span(record, where)
    elif form == "OTLP":
        yield from _of_otlp(record, where)
    elif form == "Langfuse":
        yield from _of_langfuse(record, where)
    elif form == "MLflow":
        yield from _of_mlflow(record, where)
    else:
        tools = ", ".join(dict.fromkeys(tool for _, tool in FORMS))
        raise InputError("record_type", where, "the record has no spans", f"spans of {tools}")


def _span(fields: Any, where: str, trace: Any = None, **of_trace: Any) -> Span:
    """Return a span as OpenTelemetry's SDKs, OTLP and MLflow write it."""
    fields = _object(fields, where)
    context, status = _mapping(fields.get("context")), fields.get("status")
    if not isinstance(status, Mapping):
        status = {"code": status or fields.get("status_code", "")}
    code = str(status.get("status_code", status.get("code", ""))).upper()
    message = status.get("description") or status.get("message") or fields.get("status_message")
    attributes = tree_of(_pairs(fields.get("attributes")))
    trace = trace or _first(fields, "traceId", "trace_id") or context.get("trace_id")
    name = _first(fields, "spanId", "span_id") or context.get("span_id")
    started = _first(fields, "startTimeUnixNano", "start_time_unix_nano", "start_time")
    of_trace["labels"] = _labels(attributes) | of_trace.get("labels", {})
    return Span(
        trace=_id(trace, f"{where}, trace_id"),
        id=_id(name, f"{where}, span_id"),
        parent=_parent(_first(fields, "parentSpanId", "parent_span_id", "parent_id")),
        name=str(fields.get("name", "")),
        kind=str(fields.get("span_kind") or _kind(attributes)).upper(),
        start=_seconds(started),
        attributes=attributes,
        events=[
            tree_of(_pairs(event.get("attributes"))) | {"name": event.get("name")}
            for event in _objects(fields.get("events"), f"{where}, events")
        ],
        error=str(message or "error") if code == "2" or code.endswith("ERROR") else None,
        **of_trace,
    )


def _of_otlp(record: Mapping[str, Any], where: str) -> Iterator[Span]:
    for resource in _objects(_first(record, "resourceSpans", "resource_spans"), where):
        for scope in _objects(_first(resource, "scopeSpans", "scope_spans"), where):
            for span in _objects(scope.get("spans"), where):
                yield _span(span, where)


def _of_langfuse(record: Mapping[str, Any], where: str) -> Iterator[Span]:
    trace = record.get("trace", record)
    trace = trace if isinstance(trace, Mapping) else {}
    trace_id = _id(trace.get("id"), f"{where}, trace.id")
    observations = record.get("observations") or trace.get("observations")
    scores = [
        score
        for holder in (trace, record)
        for score in _objects(_without_ids(holder.get("scores")), f"{where}, scores")
        if isinstance(score.get("value"), int | float | bool)
    ]
    named = {str(score.get("name")): float(score["value"]) for score in scores}
    opinions = frozenset(
        str(score.get("name"))
        for score in scores
        if score.get("source") == "EVAL" or score.get("observationId") is not None
    )
    labels = {"name": trace.get("name"), "session": trace.get("sessionId")}
    labels |= {"user": trace.get("userId"), "release": trace.get("release")}
    for observation in _objects(observations, f"{where}, observations"):
        logged = _mapping(observation.get("metadata"))
        attributes = tree_of(_mapping(logged.get("attributes")))
        fields = ("input", "output", "modelParameters", "toolDefinitions", "model")
        attributes["langfuse"] = {name: observation.get(name) for name in fields}
        failed = observation.get("level") == "ERROR"
        yield Span(
            trace=trace_id,
            id=_id(observation.get("id"), f"{where}, observations"),
            parent=_parent(observation.get("parentObservationId")),
            name=str(observation.get("name") or ""),
            kind=str(observation.get("type") or "").upper(),
            start=_seconds(observation.get("startTime")),
            attributes=attributes,
            error=str(observation.get("statusMessage") or "error") if failed else None,
            scores=named,
            labels={name: str(text) for name, text in labels.items() if text},
            opinions=opinions,
        )


def _without_ids(scores: Any) -> Any:
    """Return scores without those that Langfuse's list of traces has as ids."""
    if not isinstance(scores, list):
        return scores
    stated = [score for score in scores if not isinstance(score, str)]
    note(SCORE_IDS, len(scores) - len(stated))
    return stated


def _of_mlflow(record: Mapping[str, Any], where: str) -> Iterator[Span]:
    info = _object(record["info"], f"{where}, info")
    spans = _object(record["data"], f"{where}, data").get("spans")
    trace_id = info.get("trace_id") or info.get("request_id")
    scores, opinions = {}, set()
    for assessment in _objects(info.get("assessments"), f"{where}, assessments"):
        value = _mapping(assessment.get("feedback")).get("value", assessment.get("value"))
        if isinstance(value, int | float | bool):
            name = str(assessment.get("assessment_name") or assessment.get("name"))
            scores[name] = float(value)
            source = assessment.get("source")
            judge = source.get("source_type") if isinstance(source, Mapping) else None
            if assessment.get("span_id") or str(judge) in {"LLM_JUDGE", "AI_JUDGE"}:
                opinions.add(name)
    labels = {"session": str(info["session"])} if info.get("session") else {}
    for span in _objects(spans, f"{where}, spans"):
        of_trace = {"scores": scores, "labels": labels, "opinions": frozenset(opinions)}
        yield _span(span, where, trace_id, **of_trace)


def tree_of(attributes: Mapping[str, Any]) -> Tree:
    """Return attributes as a tree.

    Example:
        >>> tree_of({"llm.messages.0.role": "user", "llm.system": "openai"})
        {'llm': {'messages': {'0': {'role': 'user'}}, 'system': 'openai'}}
    """
    tree: Tree = {}
    for name, value in attributes.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            below = node.get(key)
            if not isinstance(below, dict):
                below = node[key] = {} if below is None else {"": below}
            node = below
        value = tree_of(value) if isinstance(value, Mapping) else value
        before = node.get(last)
        if isinstance(before, dict):
            before.update(value if isinstance(value, dict) else {"": value})
        else:
            node[last] = value
    return tree


def at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path of a tree; None if there is none."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree.get("", tree) if isinstance(tree, Mapping) and tree.keys() == {""} else tree


def listed(node: Any) -> list[Any]:
    """Return the elements of a list, or of a tree whose keys are indices."""
    if isinstance(node, list):
        return [tree_of(element) if isinstance(element, Mapping) else element for element in node]
    if not isinstance(node, Mapping):
        return []
    numbered = [(int(key), element) for key, element in node.items() if key.isdecimal()]
    return [element for _, element in sorted(numbered, key=lambda pair: pair[0])]


def _pairs(logged: Any) -> dict[str, Any]:
    """Return attributes as an object; OTLP has a list of keys and values."""
    value = value_of(logged)
    if isinstance(value, Mapping):
        return dict(value)
    listed = value if isinstance(value, list) else ()
    pairs = [pair for pair in listed if isinstance(pair, Mapping) and "key" in pair]
    return {str(pair["key"]): _otlp_value(pair.get("value")) for pair in pairs}


def _otlp_value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    for name in _VALUES:
        if name in value:
            number = value[name]
            is_whole = name == "intValue" and str(number).lstrip("-").isdecimal()
            return int(number) if is_whole else number
    if "arrayValue" in value:
        return [_otlp_value(element) for element in value["arrayValue"].get("values") or ()]
    if "kvlistValue" in value:
        return _pairs(value["kvlistValue"].get("values"))
    return None


def _kind(attributes: Tree) -> str:
    paths = ("openinference.span.kind", "langfuse.observation.type", "mlflow.spanType")
    kinds = (value_of(at(attributes, path)) for path in paths)
    return next((kind for kind in kinds if isinstance(kind, str) and kind), "")


def _labels(attributes: Tree) -> dict[str, str]:
    paths = {
        "session": ("session.id", "gen_ai.conversation.id", "langfuse.session.id"),
        "user": ("user.id", "langfuse.user.id"),
    }
    values = {
        n: next((v for p in alternatives if (v := at(attributes, p))), None)
        for n, alternatives in paths.items()
    }
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _seconds(value: Any) -> float:
    """Return a time in seconds: ISO 8601, or nanoseconds since 1970."""
    if isinstance(value, str) and not value.isdecimal():
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            return 0.0
    try:
        return float(value) / 1e9
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _id(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError("record_type", where, repr(value)[:80], "a string")
    return value.removeprefix("0x")


def _parent(value: Any) -> str | None:
    digits = value.removeprefix("0x") if isinstance(value, str) else ""
    return digits if digits.strip("0") else None


def _first(fields: Any, *names: str) -> Any:
    """Return the value of the first of several keys that an object has."""
    return next((fields[name] for name in names if name in fields), None)


def _mapping(text: Any) -> dict[str, Any]:
    value = value_of(text)
    return dict(value) if isinstance(value, Mapping) else {}


def _object(value: Any, where: str) -> Mapping[str, Any]:
    decoded = value_of(value)
    if not isinstance(decoded, Mapping):
        raise InputError("record_type", where, type(value).__name__, "an object")
    return decoded


def _objects(value: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list; none if there is no list."""
    elements = [] if value is None else value_of(value)
    if not isinstance(elements, list):
        raise InputError("record_type", where, type(value).__name__, "a list")
    for i, element in enumerate(elements):
        yield _object(element, f"{where}[{i}]")


def protobuf_records(content: bytes, where: str) -> list[Any]:
    """Decode OTLP protobuf: one message, or the messages of a file with the size before each."""
    with requires_extra("otel", where):
        from google.protobuf.json_format import MessageToDict
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    def decoded(part: bytes) -> Any:
        traces = MessageToDict(TracesData.FromString(part))
        for resource in traces.get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in span:
                            span[name] = base64.b64decode(span[name]).hex()
        return traces

    try:
        return [decoded(content)]
    except DecodeError:
        pass
    try:
        return [decoded(part) for part in _sized_parts(content)]
    except DecodeError:
        finding = "the file is no OTLP protobuf"
        raise InputError(
            "unreadable_record", where, finding, hint="export the traces as JSON"
        ) from None


def _sized_parts(content: bytes) -> Iterator[bytes]:
    """Yield the messages of a file that has the size of each, 4 bytes, before it."""
    begin = 0
    while begin < len(content):
        end = begin + 4 + int.from_bytes(content[begin : begin + 4], "big")
        yield content[begin + 4 : end]
        begin = end
