"""Traces: every convention gives the same calls, whoever wrote the spans, in whatever file."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_io.formats.base import Options, noted
from rollout_io.formats.dialects.model_spans import PLAIN
from rollout_io.formats.dialects.spans import SCORE_IDS, spans_in, tree_of
from rollout_io.formats.engines.files import Start
from rollout_io.formats.traces import (
    ADAPTER,
    AROUND,
    CONTINUED,
    FROM_AGENT,
    NO_ANSWER,
)
from schemas.errors import RolloutError
from tests.helpers.adapter_helpers import planned, read_all, write_lines
from tests.helpers.examples import examples
from tests.helpers.refusals import refused

SPAN = {"context": {"trace_id": "t", "span_id": "s"}, "attributes": {"a": 1}}
TOOL = {"name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
}
SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Rome?"}
ASKS = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "A tool.",
    "tool_calls": [CALL],
}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
SAYS = {"role": "assistant", "content": "It is sunny."}
CALLS = [([SYSTEM, USER], ASKS), ([SYSTEM, USER, ASKS, RESULT], SAYS)]
"""The two calls of a run: what the model saw, and what it answered."""


def semantic(message):
    """A message in OpenTelemetry's GenAI conventions."""
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": "c1", "response": message["content"]}
        return {"role": "tool", "parts": [part]}
    parts = [{"type": "text", "content": message["content"]}]
    if "reasoning_content" in message:
        parts.insert(0, {"type": "reasoning", "content": message["reasoning_content"]})
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        parts.append({"type": "tool_call", "id": "c1", "name": "weather", "arguments": arguments})
    return {"role": message["role"], "parts": parts}


def genai(prompt, answer):
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([semantic(m) for m in prompt]),
        "gen_ai.output.messages": json.dumps([semantic(answer)]),
        "gen_ai.tool.definitions": json.dumps([{"type": "function"} | TOOL]),
    }


def instructed(prompt, answer):
    found = genai(prompt[1:], answer)
    parts = [{"type": "text", "content": prompt[0]["content"]}]
    return found | {"gen_ai.system_instructions": json.dumps(parts)}


def flat(name, message, key):
    found = {f"{name}.{key}role": message["role"], f"{name}.{key}content": message["content"]}
    if "tool_call_id" in message:
        found[f"{name}.{key}tool_call_id"] = message["tool_call_id"]
    if "reasoning_content" in message:
        found[f"{name}.{key}reasoning"] = message["reasoning_content"]
    return found


def openinference(prompt, answer):
    found = {"openinference.span.kind": "LLM", "llm.tools.0.tool.json_schema": json.dumps(TOOL)}
    for name, messages in (("llm.input_messages", prompt), ("llm.output_messages", [answer])):
        for i, message in enumerate(messages):
            found |= flat(f"{name}.{i}", message, "message.")
            for j, call in enumerate(message.get("tool_calls", ())):
                at = f"{name}.{i}.message.tool_calls.{j}.tool_call"
                found[f"{at}.id"] = call["id"]
                for key, value in call["function"].items():
                    found[f"{at}.function.{key}"] = value
    return found


def openllmetry(prompt, answer):
    found = {"llm.request.type": "chat", "gen_ai.system": "openai"}
    for key, value in TOOL.items():
        text = value if isinstance(value, str) else json.dumps(value)
        found[f"llm.request.functions.0.{key}"] = text
    for name, messages in (("gen_ai.prompt", prompt), ("gen_ai.completion", [answer])):
        for i, message in enumerate(messages):
            found |= flat(f"{name}.{i}", message, "")
            for j, call in enumerate(message.get("tool_calls", ())):
                for key, value in {"id": call["id"], **call["function"]}.items():
                    found[f"{name}.{i}.tool_calls.{j}.{key}"] = value
    return found


def of_vercel(message):
    if message["role"] in {"system", "user"}:
        return message
    if message["role"] == "tool":
        output = {"type": "text", "value": message["content"]}
        part = {"type": "tool-result", "toolCallId": "c1", "toolName": "weather", "output": output}
        return {"role": "tool", "content": [part]}
    parts = [{"type": "text", "text": message["content"]}]
    if "reasoning_content" in message:
        parts.insert(0, {"type": "reasoning", "text": message["reasoning_content"]})
    parts += [vercel_call(call) for call in message.get("tool_calls", ())]
    return {"role": "assistant", "content": parts}


def vercel_call(call):
    arguments = json.loads(call["function"]["arguments"])
    named = {"toolCallId": call["id"], "toolName": call["function"]["name"], "input": arguments}
    return {"type": "tool-call"} | named


def vercel(prompt, answer):
    found = {
        "ai.operationId": "ai.generateText.doGenerate",
        "ai.prompt.messages": json.dumps([of_vercel(m) for m in prompt]),
        "ai.response.text": answer["content"],
        "ai.prompt.tools": [
            json.dumps({"type": "function", "inputSchema": TOOL["parameters"]} | named)
            for named in [{n: TOOL[n] for n in ("name", "description")}]
        ],
    }
    if "tool_calls" in answer:
        calls = [vercel_call(call) for call in answer["tool_calls"]]
        found["ai.response.toolCalls"] = json.dumps(calls)
        found["ai.response.reasoning"] = answer["reasoning_content"]
    return found


def mlflow(prompt, answer):
    tools = [{"type": "function", "function": TOOL}]
    return {
        "mlflow.spanType": json.dumps("CHAT_MODEL"),
        "mlflow.spanInputs": json.dumps({"messages": prompt, "tools": tools}),
        "mlflow.spanOutputs": json.dumps({"choices": [{"index": 0, "message": answer}]}),
    }


def values(prompt, answer):
    body = mlflow(prompt, answer)
    return {
        "openinference.span.kind": "LLM",
        "input.value": body["mlflow.spanInputs"],
        "output.value": body["mlflow.spanOutputs"],
    }


CONVENTIONS = [genai, instructed, openinference, openllmetry, vercel, values]


def sdk(number, attributes, *, parent="0xa0", trace="0xt1", **more):
    return {
        "name": "call",
        "context": {"trace_id": trace, "span_id": f"0xb{number}"},
        "parent_id": parent,
        "start_time": f"2026-11-27T08:00:0{number}.000000Z",
        "attributes": attributes,
        "status": {"status_code": "UNSET"},
    } | more


def otlp_value(value):
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp_value(each) for each in value]}}
    return {"stringValue": value}


def otlp(spans):
    """The same spans as a request of OpenTelemetry's protocol."""
    found = []
    for number, span in enumerate(spans):
        pairs = [{"key": k, "value": otlp_value(v)} for k, v in span["attributes"].items()]
        ids = {"traceId": f"{1:032x}", "spanId": f"{number + 1:016x}"}
        found.append(ids | {"name": "call", "attributes": pairs})
        found[-1]["startTimeUnixNano"] = str(1_000_000_000 * (number + 1))
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": found}]}]}


def steps_in(path):
    runs, rejected = read_all(ADAPTER, path)
    assert rejected == []
    return [step for _, found in runs for step in found.steps], runs


def check_calls(steps, *, thoughts=True):
    """Both calls are one context: the second prompt continues the first answer."""
    (step,) = steps
    expected = [SYSTEM, USER, ASKS, RESULT, SAYS]
    if not thoughts:
        expected[2] = {k: v for k, v in ASKS.items() if k != "reasoning_content"}
    assert step.messages == expected
    assert step.num_given == 2
    (tool,) = step.tools
    assert tool["function"] == TOOL


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("shape", ["lines", "document", "otlp lines", "otlp", "protobuf"])
def test_every_convention_in_every_file_gives_the_same_calls(convention, shape, tmp_path):
    spans = [sdk(i, convention(*call)) for i, call in enumerate(CALLS)]
    path = tmp_path / "spans.jsonl"
    if shape == "lines":
        write_lines(path, *reversed(spans))
    elif shape == "document":
        path = tmp_path / "spans.json"
        path.write_text(json.dumps(spans, indent=1))
    elif shape == "otlp lines":
        write_lines(path, *[otlp([span]) for span in spans[:1]], otlp(spans))
    elif shape == "otlp":
        path.write_text(json.dumps(otlp(spans), indent=1))
    else:
        path = tmp_path / "spans.binpb"
        path.write_bytes(protobuf(otlp(spans)))
    assert ADAPTER.recognizes(Start(path))
    steps, ((run, _),) = steps_in(path)
    assert run.repetition_id == 0
    check_calls(steps)


def protobuf(request):
    json_format = pytest.importorskip("google.protobuf.json_format")
    pb = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    request = json.loads(json.dumps(request))
    for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId"):
            span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    content = json_format.ParseDict(request, pb.TracesData()).SerializeToString()
    return len(content).to_bytes(4, "big") + content


def langfuse(**more):
    observations = []
    for number, (prompt, answer) in enumerate(CALLS):
        definition = {"role": "tool", "content": {"type": "function", "function": TOOL}}
        observations.append(
            {
                "id": f"o{number}",
                "traceId": "t",
                "type": "GENERATION",
                "name": "chat",
                "startTime": f"2026-11-27T08:00:0{number}.000Z",
                "parentObservationId": "agent",
                "input": json.dumps(json.dumps([*prompt, definition])),
                "output": json.dumps(answer),
                "modelParameters": json.dumps({"temperature": "0.5"}),
            }
        )
    agent = {"id": "agent", "traceId": "t", "type": "AGENT", "name": "forecaster"}
    scores = [{"name": "correctness", "value": 1}]
    trace = {"id": "t", "name": "weather", "sessionId": "s", "scores": scores}
    return {"trace": trace, "observations": [*observations, agent]} | more


def test_langfuse_generations_scores_and_agents_are_read(tmp_path):
    path = tmp_path / "t.trace.json"
    path.write_text(json.dumps(langfuse(), indent=2))
    assert ADAPTER.recognizes(Start(path))
    steps, ((run, found),) = steps_in(path)
    check_calls(steps)
    assert (steps[0].agent, steps[0].temperature) == ("forecaster", 0.5)
    assert (found.reward, found.metrics) == (1.0, {"correctness": 1.0})
    assert run.labels == {"trace": "t", "name": "weather", "session": "s"}


@pytest.mark.parametrize("kind", [["chat"], {"is": "chat"}, 7])
def test_an_operation_that_is_no_text_is_no_call(kind, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", sdk(0, {"gen_ai.operation.name": kind}))
    (run,) = planned(ADAPTER, path).runs
    with refused("no_calls"):
        ADAPTER.read(run, Options())


def test_scores_that_are_only_ids_are_left_out_and_counted(tmp_path):
    _, notes = notes_of(tmp_path, langfuse(scores=["s1", "s2"]))
    assert notes[SCORE_IDS] == 2


SILENT = {"role": "assistant", "content": "", "tool_calls": [CALL]}
NAMED = {"toolCallId": "c1", "toolName": "weather", "input": {"city": "Rome"}}


def of_koog(message):
    """A call is the content of a message, as OpenAI's part of the type `function`."""
    if "tool_calls" in message:
        return {"role": "assistant", "content": message["tool_calls"]}
    return message


def of_koog_as_text(message):
    made = of_koog(message)
    return made | {"content": json.dumps(made["content"])} if made is not message else made


def of_langgraph(message):
    """The role of a result is the name of its tool."""
    return {"role": "weather", "content": "sunny"} if message["role"] == "tool" else message


def of_sdk(message):
    """Calls in the Vercel AI SDK's own keys, without a type."""
    return {"role": "assistant", "content": [NAMED]} if "tool_calls" in message else message


@pytest.mark.parametrize("write", [of_koog, of_koog_as_text, of_langgraph, of_sdk])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_call_or_a_result_of_any_sdk_is_one_in_langfuse(write, is_listed, tmp_path):
    record = langfuse()
    calls = [([SYSTEM, USER], SILENT), ([SYSTEM, USER, SILENT, RESULT], SAYS)]
    for observation, (prompt, answer) in zip(record["observations"], calls, strict=False):
        written = [write(message) for message in prompt]
        observation["input"] = json.dumps(written if is_listed else {"messages": written})
        observation["output"] = json.dumps(write(answer))
    path = tmp_path / "t.trace.json"
    path.write_text(json.dumps(record))
    (step,), _ = steps_in(path)
    assert step.messages == [SYSTEM, USER, SILENT, RESULT, SAYS]
    assert step.num_given == 2


@pytest.mark.parametrize(
    ("attributes", "names", "expected"),
    [
        *(([text], ["Be kind."], ["Be kind."]) for text in ("Be kind.", " Be kind. ", "Be\nkind.")),
        (["Be kind.", "Be brief."], ["Be kind.", "Be brief."], ["Be kind.", "Be brief."]),
        (["Be brief."], ["Be kind."], ["Be brief.", "Be kind."]),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_precede_the_messages_unless_these_have_them(
    attributes, names, expected, role, tmp_path
):
    parts = [{"type": "text", "content": text} for text in attributes]
    before = [{"role": role, "content": text} for text in names]
    spans = [
        sdk(
            i,
            genai([*before, *prompt[1:]], answer)
            | {"gen_ai.system_instructions": json.dumps(parts)},
        )
        for i, (prompt, answer) in enumerate(CALLS)
    ]
    (step,), _ = steps_in(write_lines(tmp_path / "a.jsonl", *spans))
    texts = [m["content"] for m in step.messages if m["role"] in {"system", "developer"}]
    assert texts == expected


@pytest.mark.parametrize("mark", [{"source": "EVAL"}, {"observationId": "g0"}])
def test_the_only_score_is_no_reward_if_a_model_gave_it_or_it_is_about_a_call(mark, tmp_path):
    path, record = tmp_path / "t.trace.json", langfuse()
    record["trace"]["scores"] = [{"name": "toxicity", "value": 0.8} | mark]
    path.write_text(json.dumps(record))
    (run,) = planned(ADAPTER, path).runs
    found = ADAPTER.read(run, Options())
    assert (found.reward, found.metrics) == (None, {"toxicity": 0.8})
    assert ADAPTER.read(run, Options(reward="toxicity")).reward == 0.8
    record["trace"]["scores"][0]["name"] = "reward"
    path.write_text(json.dumps(record))
    (run,) = planned(ADAPTER, path).runs
    assert ADAPTER.read(run, Options()).reward == 0.8


def test_of_several_scores_the_named_one_is_the_reward_and_none_is_guessed(tmp_path):
    path, record = tmp_path / "t.trace.json", langfuse()
    record["trace"]["scores"].append({"name": "style", "value": 0.25})
    path.write_text(json.dumps(record))
    (run,) = planned(ADAPTER, path).runs
    assert ADAPTER.read(run, Options()).reward is None
    assert ADAPTER.read(run, Options(reward="style")).reward == 0.25
    assert ADAPTER.read(run, Options(reward="speed")).reward is None


def test_mlflow_traces_and_their_assessments_are_read(tmp_path):
    spans = [
        {
            "trace_id": "x",
            "span_id": f"s{i}",
            "parent_span_id": None,
            "name": "chat",
            "start_time_unix_nano": i,
            "attributes": mlflow(*call),
        }
        for i, call in enumerate(CALLS)
    ]
    assessment = {"assessment_name": "passed", "feedback": {"value": True}}
    record = {"info": {"trace_id": "tr-1", "assessments": [assessment]}, "data": {"spans": spans}}
    path = tmp_path / "mlflow.json"
    path.write_text(json.dumps(record))
    assert ADAPTER.recognizes(Start(path))
    steps, ((run, found),) = steps_in(path)
    check_calls(steps)
    assert (run.instance_id, found.reward) == ("tr-1", 1.0)


def test_events_with_one_message_each_are_read(tmp_path):
    prompt, answer = CALLS[0]
    events = [
        {"name": f"gen_ai.{m['role']}.message", "attributes": {"content": m["content"]}}
        for m in prompt
    ]
    message = {"role": "assistant", "content": answer["content"], "tool_calls": [CALL]}
    choice = {"index": 0, "message": json.dumps(message)}
    events.append({"name": "gen_ai.choice", "attributes": choice})
    span = sdk(0, {"gen_ai.operation.name": "chat"}, events=events)
    steps, _ = steps_in(write_lines(tmp_path / "a.jsonl", span))
    assert steps[0].messages == [SYSTEM, USER, message]


def test_parallel_calls_stay_contexts_of_their_own(tmp_path):
    prompts = [[{"role": "user", "content": name}] for name in "ab"]
    spans = [
        sdk(i, genai(prompt, SAYS), start_time="2026-11-27T08:00:00Z")
        for i, prompt in enumerate(prompts)
    ]
    steps, _ = steps_in(write_lines(tmp_path / "a.jsonl", *spans))
    assert [step.messages for step in steps] == [[*prompt, SAYS] for prompt in prompts]


def notes_of(tmp_path, *spans):
    ((_, found),), rejected = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", *spans))
    assert rejected == []
    return found.steps, found.notes


def test_a_span_around_the_span_of_the_same_call_is_not_counted_twice(tmp_path):
    inner = sdk(2, genai(*CALLS[0]), parent="0xb1")
    steps, notes = notes_of(tmp_path, sdk(1, genai(*CALLS[0])), inner)
    assert len(steps) == 1
    assert notes == {AROUND: 1}


def test_a_prompt_that_holds_only_what_is_new_continues_the_call_before(tmp_path):
    agent = genai(CALLS[0][0], SAYS) | {"gen_ai.operation.name": "invoke_agent"}
    first = sdk(1, genai([USER], ASKS), parent="0xb0")
    second = sdk(2, genai([RESULT], SAYS), parent="0xb0")
    of_agent = sdk(0, agent | {"gen_ai.agent.name": "forecaster"}, parent=None)
    steps, notes = notes_of(tmp_path, first, second, of_agent)
    check_calls(steps)
    assert notes == {CONTINUED: 1, FROM_AGENT: 1}
    assert steps[0].agent == "forecaster"


def test_calls_without_an_answer_are_counted_and_a_trace_without_calls_is_refused(tmp_path):
    empty = sdk(1, {"gen_ai.operation.name": "chat"})
    steps, notes = notes_of(tmp_path, empty, sdk(2, genai(*CALLS[0])))
    assert (len(steps), notes) == (1, {NO_ANSWER: 1})
    (run,) = planned(ADAPTER, write_lines(tmp_path / "b.jsonl", empty)).runs
    with pytest.raises(RolloutError) as error, noted():
        ADAPTER.read(run, Options())
    assert error.value.rule == "no_calls"


def test_a_prompt_that_was_logged_as_text_is_one_message_and_counted(tmp_path):
    text = {"openinference.span.kind": "LLM", "input.value": "Rome?", "output.value": "Sunny."}
    steps, notes = notes_of(tmp_path, sdk(0, text))
    assert [m["content"] for m in steps[0].messages] == ["Rome?", "Sunny."]
    assert notes == {PLAIN: 1}


def test_the_error_of_the_outermost_span_is_the_error_of_the_run(tmp_path):
    status = {"status_code": "ERROR", "description": "out of time"}
    root = sdk(0, {}, parent=None, status=status)
    inner = sdk(1, genai(*CALLS[0]), parent="0xb0", status=status | {"description": "retried"})
    ((_, found),), _ = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", root, inner))
    assert found.error == "out of time"
    assert len(found.steps) == 1


@pytest.mark.parametrize(
    ("record", "where"),
    [
        ({"id": "t", "observations": [1]}, "observations[0]"),
        ({"id": "t", "observations": True}, "observations"),
        ({"id": "t", "observations": [{}], "scores": [1]}, "scores[0]"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": 1}]}]}, "a.json"),
        ({"info": {"assessments": 1}, "data": {"spans": []}}, "assessments"),
        ({"info": {}, "data": {"spans": [None]}}, "spans[0]"),
        (SPAN | {"events": [1]}, "events[0]"),
    ],
)
def test_what_is_no_list_of_objects_is_refused_with_its_place(record, where):
    with refused("record_type", where=where):
        list(spans_in(record, "a.json"))


def test_a_circle_of_parents_ends(tmp_path):
    spans = [sdk(0, genai(*CALLS[0]), parent="0xb1"), sdk(1, {}, parent="0xb0")]
    steps, _ = notes_of(tmp_path, *spans)
    assert len(steps) == 1


def strings_in(value, name=""):
    """The texts of an answer, whatever its shape; JSON in strings is opened."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            inner = None
        if isinstance(inner, dict | list | str) and not name:
            yield from strings_in(inner, name)
        elif name in {"", "content", "text"}:
            yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from strings_in(each, key if isinstance(each, str) or not name else name)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each, name)


REFUSED = {"beeai"}  # neither prompt nor answer of a call are whole
PARTLY = {"claude-agent"}  # three of four prompts read {"content": "role"}


def test_answers_of_real_langfuse_traces_are_in_the_calls(harness_logs):
    folder = harness_logs.parent / "harness_logs_2026"
    files = sorted(folder.glob("langfuse_*/*.json"))
    if not files:
        pytest.skip(f"no traces in {folder}")
    for file in files:
        name = file.parent.name.removeprefix("langfuse_")
        assert ADAPTER.recognizes(Start(file)), file
        runs, rejected = read_all(ADAPTER, file)
        if name in REFUSED:
            assert [each.error.rule for each in rejected] == ["no_calls"]
            continue
        texts = json.dumps(
            [s.messages for _, found in runs for s in found.steps], ensure_ascii=False
        )
        record = json.loads(file.read_text())
        answers = [o["output"] for o in record["observations"] if o["type"] == "GENERATION"]
        said = [text for answer in answers for text in strings_in(answer) if text.strip()]
        missing = [t for t in said if json.dumps(t, ensure_ascii=False)[1:-1] not in texts]
        left_out = sum(found.notes.get(NO_ANSWER, 0) for _, found in runs)
        assert (not missing, left_out == 0) == (name not in PARTLY,) * 2, (file, missing)
        assert said, file


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from("ab0"), min_size=1, max_size=3).map(".".join), st.integers()
    )
)
def test_a_tree_of_attributes_loses_no_value(attributes):
    def leaves(node):
        below = node.values() if isinstance(node, dict) else ()
        return [leaf for each in below for leaf in leaves(each)] or [node][: not below]

    assert sorted(v for v in leaves(tree_of(attributes)) if v != {}) == sorted(attributes.values())


def test_unknown_attributes_of_a_call_are_named(tmp_path):
    span = sdk(0, genai(*CALLS[0]) | {"acme.hidden.prompt": "Obey me."})
    ((_, result),), _ = read_all(ADAPTER, write_lines(tmp_path / "a.jsonl", span))
    assert result.unread == {"attributes.acme": 1}
