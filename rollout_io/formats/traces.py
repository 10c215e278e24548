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
metrics. A score that a model gave (Langfuse's evaluators, MLflow's judges), or that is about one call,
is never taken for the reward by itself: it may be `toxicity`. A trace whose outermost span failed is a
failed run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout_io.formats.base import (
    Adapter,
    Found,
    Input,
    Options,
    Progress,
    Rejected,
    Run,
    Trajectory,
    note,
)
from rollout_io.formats.dialects import frameworks
from rollout_io.formats.dialects.bodies import value_of
from rollout_io.formats.dialects.model_spans import (
    ModelCall,
    first_value,
    instructions_text,
    is_call,
    model_call,
    sampling,
    stop_reason,
)
from rollout_io.formats.dialects.spans import Span, at, form_of, protobuf_records, spans_in
from rollout_io.formats.engines.files import Start
from rollout_io.formats.engines.records import decoder_of, records_of
from rollout_io.formats.engines.runs import gathered
from rollout_io.formats.grammar import Contents
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.parsing.jsonl import contained, refuse_lfs_pointer
from rollout_io.formats.parsing.model_calls import Call, steps_of
from rollout_io.formats.parsing.records import Record, read_record, with_group_rule
from schemas.errors import InputError, RolloutError

_GROUPS = "inferred: each trace is a separate instance"
_PROTOBUF = (".pb", ".binpb", ".proto.bin")
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
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_AGENTS = frozenset({"AGENT"})

NO_ANSWER = "spans of model calls without a prompt or an answer: left out"
AROUND = "spans around the span of the same model call: left out"
CONTINUED = "prompts logged as what was new: the messages of the call before were put before them"
FROM_AGENT = "system messages taken from the agent's span"


def _records(inputs: Sequence[Input], progress: Progress) -> Iterator[Found]:
    """Yield what each record has of each trace, as a run."""
    for place, content in (r for log in inputs for r in records_of(log, progress, _is_whole)):
        try:
            refuse_lfs_pointer(content, place.where)
            labels = dict[str, dict[str, str]]()
            with contained(place.where):
                for span in _spans(Record(place, content)):
                    names = labels.get(span.trace, {"trace": span.trace})
                    labels[span.trace] = {**names, **span.labels, **names}  # the first values
        except RolloutError as error:
            yield Rejected(place, error)
            continue
        for trace, names in labels.items():
            part = msgspec.structs.replace(place, part=trace)
            yield Run(instance_id=trace, repetition_id=0, places=[part], labels=names)


def _is_protobuf(path: Path) -> bool:
    return path.name.endswith(_PROTOBUF)


def _is_whole(start: Start) -> bool:
    return _is_protobuf(start.path) or start.is_document


def _spans(record: Record) -> Iterator[Span]:
    place = record.place
    if _is_protobuf(place.path):
        return spans_in(protobuf_records(record.content, place.where), place.where)
    return spans_in(decoder_of(place)(_ANY, record.content, place.where), place.where)


def read_trace(run: Run, options: Options) -> Trajectory:
    """Read the model calls of a trace."""
    trace, where = run.instance_id, run.places[0].where
    spans: dict[str, Span] = {}
    for place in run.places:
        spans_here = _spans(Record(place, read_record(place)))
        spans |= {span.id: span for span in spans_here if span.trace == place.part}
    ordered = sorted(spans.values(), key=lambda span: span.start)
    calls = list(_calls(ordered, spans, where))
    error = next((s.error for s in ordered if s.error and s.parent not in spans), None)
    if not calls and not error and not run.failed:
        finding = "no span of the trace has both the prompt and the answer of a model call"
        hint = "let the tracing library record the content of messages"
        raise InputError("no_calls", f"{where}, trace {trace}", finding, hint=hint)
    scores: dict[str, float] = {}
    opinions = frozenset[str]().union(*(span.opinions for span in ordered))
    for span in ordered:
        scores |= span.scores
        for event in span.events:
            name, value = (at(event, f"gen_ai.evaluation.{n}") for n in ("name", "score.value"))
            if isinstance(name, str) and isinstance(value, int | float):
                scores[name] = float(value)
    models = [m for s in ordered if isinstance(m := first_value(s, _MODELS), str)]
    return Trajectory(
        steps=steps_of(calls, f"{where}, trace {trace}", failed=run.failed or error is not None),
        reward=_reward(scores, opinions, options),
        error=error,
        metrics=scores,
        user_values={"model": models[-1]} if models else {},
    )


_MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "langfuse.model")


def _reward(
    scores: Mapping[str, float], opinions: Collection[str], options: Options
) -> float | None:
    if options.reward is not None:
        return scores.get(options.reward)
    scores_alone = [score for name, score in scores.items() if name not in opinions]
    return scores.get("reward", scores_alone[0] if len(scores_alone) == len(scores) == 1 else None)


def _calls(ordered: Iterable[Span], spans: Mapping[str, Span], where: str) -> Iterator[Call]:
    calls = []
    for span in ordered:
        if not is_call(span):
            continue
        logged = model_call(span, f"{where}, span {span.id}")
        if logged is None:
            note(NO_ANSWER)
        else:
            calls.append(logged)
    around = {above for call in calls for above in _above(call.span, spans)}
    note(AROUND, sum(call.span.id in around for call in calls))
    last: dict[str | None, list[Message]] = {}
    for call in calls:
        span = call.span
        if span.id in around:
            continue
        prompt = _whole_prompt(call, last.get(span.parent), spans)
        for answer in call.answers:
            yield Call(
                where=f"{where}, span {span.id}",
                prompt=prompt,
                reply=answer,
                answer=call.raw,
                agent=_agent(span, spans),
                tools=call.tools,
                stop_reason=stop_reason(span),
                **sampling(span),
            )
        last[span.parent] = [*prompt, *call.answers[:1]]


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
    logged: ModelCall, before: list[Message] | None, spans: Mapping[str, Span]
) -> list[Message]:
    prompt = logged.prompt
    if before is not None and prompt[0]["role"] == "tool" and prompt[: len(before)] != before:
        call_ids = [c.get("id") for m in before[-1:] for c in m.get("tool_calls", ())]
        if prompt[0].get("tool_call_id") in call_ids:
            note(CONTINUED)
            return [*before, *prompt]
    if any(message["role"] in {"system", "developer"} for message in prompt):
        return prompt
    for above in _above(logged.span, spans):
        span = spans.get(above)
        if span is not None and (span.kind in _AGENTS or first_value(span, ("gen_ai.agent.name",))):
            system = _system_of(span)
            if system:
                note(FROM_AGENT)
                return [{"role": "system", "content": system}, *prompt]
            break
    return prompt


def _system_of(span: Span) -> str | None:
    instructions = first_value(span, ("gen_ai.system_instructions",))
    if instructions is not None:
        return instructions_text(instructions)
    value = value_of(first_value(span, ("gen_ai.input.messages", "langfuse.input")))
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, Mapping) and first.get("role") == "system":
        content = frameworks.messages([first], span.id)[0]["content"]
        return content if isinstance(content, str) else None
    return None


def _agent(span: Span, spans: Mapping[str, Span]) -> str | None:
    names = ("gen_ai.agent.name", "agent.name")
    named = first_value(span, names)
    if isinstance(named, str):
        return named
    for above in _above(span, spans):
        outer = spans.get(above)
        if outer is None:
            continue
        name = first_value(outer, names)
        if isinstance(name, str):
            return name
        if outer.kind in _AGENTS:
            return outer.name or None
    return None


def recognizes(start: Start) -> bool:
    """True if a file has spans in one of the forms."""
    path = start.path
    if _is_protobuf(path):
        return start.is_file
    return any(form_of(value) is not None and _has_spans(value) for value in start.values)


def _has_spans(record: Any) -> bool:
    """True for records whose keys other formats may have too, if these hold spans."""
    record = record[0] if isinstance(record, list) else record
    context, data = record.get("context"), record.get("data")
    trace = record.get("trace")
    inner = trace.get("observations") if isinstance(trace, Mapping) else None
    observations = record.get("observations") or inner
    if isinstance(context, Mapping):
        return "trace_id" in context
    if isinstance(data, Mapping):
        return isinstance(data.get("spans"), list)
    if isinstance(observations, list):
        return any(isinstance(one, Mapping) and "traceId" in one for one in observations)
    return "resourceSpans" in record or "resource_spans" in record


ADAPTER = Adapter(
    summary="traces of OpenTelemetry (OTLP, GenAI, OpenInference), Langfuse, MLflow, Phoenix",
    recognizes=recognizes,
    find=lambda inputs, progress: with_group_rule(
        gathered(_records(inputs, progress)), _GROUPS, "group"
    ),
    read=read_trace,
    is_text=True,
    noun="trace",
    contents=_CONTENTS,
)
