"""What is particular to OpenAI's Responses API."""

import pytest

from tests.helpers.dialect_helpers import ANSWERS, SpokenEngine
from tests.helpers.dialects import Responses, speaking
from tests.helpers.recorder_helpers import outcomes, recording, rows

API = Responses()


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_the_events_of_a_stream_are_numbered_and_have_every_item(tmp_path, summary):
    fields = {"reasoning": {"summary": summary}} if summary else {}
    engine, answers = SpokenEngine(), [answer for answer in ANSWERS.values() if answer]
    async with speaking(API, tmp_path / "ds", engine) as (spoken, _):
        for engine.said in answers:
            streamed = await API.read(spoken, print, **fields)
            assert streamed == API.direct(engine.said, **fields)
            events = API.events
            assert events[-1].type == f"response.{streamed['status']}"
            assert [event.sequence_number for event in events] == list(range(len(events)))
            done = [e.item for e in events if e.type == "response.output_item.done"]
            assert [API.plain(item) for item in done] == streamed["output"]
            check_deltas(events, streamed["output"])


def check_deltas(events, output):
    """The deltas of each item are its text."""
    for at, item in enumerate(output):
        parts = item.get("content") or item.get("summary") or [{}]
        text = parts[0].get("text", item.get("arguments", item.get("input")))
        own = [e for e in events if getattr(e, "output_index", None) == at]
        assert "".join(e.delta for e in own if e.type.endswith(".delta")) == text


@pytest.mark.parametrize("answer", [{"content": "Ok"}, {"reasoning": "Hm.", "content": "It is."}])
async def test_log_probabilities_are_those_of_the_text_streamed_or_not(tmp_path, answer):
    engine = SpokenEngine()
    engine.said = answer
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with speaking(API, tmp_path / "ds", engine) as (spoken, _):
        whole = await spoken.responses.create(**API.ask | fields)
        await API.read(spoken, print, **fields)
        plain = await spoken.responses.create(**API.ask)
    text = answer["content"]
    part = whole.output[-1].content[0]
    assert "".join(one.token for one in part.logprobs) == text == part.text
    assert all(one.logprob < 0 for one in part.logprobs)
    for delta in API.events:
        if delta.type == "response.output_text.delta":
            assert "".join(one.token for one in delta.logprobs) == delta.delta
    assert API.events[-1].response.output[-1].content[0].logprobs == part.logprobs
    assert plain.output[-1].content[0].logprobs == []
    assert engine.requests[0]["top_logprobs"] == 2
    assert len(rows(tmp_path / "ds", "response_ids")) == 3


def test_calls_of_custom_tools_and_namespaces_come_back_as_the_client_knows_them():
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "ls"}]},
    ]
    calls = [("patch", '{"input": "*** a\\n"}'), ("fs.ls", "{}")]
    patch, ls = API.direct({"tool_calls": calls}, tools=tools)["output"]
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "patch",
        "*** a\n",
    )
    assert (ls["type"], ls["namespace"], ls["name"]) == ("function_call", "fs", "ls")


def test_the_engine_gets_the_conversation_as_chat_messages():
    items = [
        {"role": "developer", "content": "In /tmp."},
        {"role": "user", "content": "List."},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
    ]
    tools = [API.tool, {"type": "custom", "name": "pwd"}]
    chat = API.call(input=items, max_output_tokens=9, tools=tools).chat
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief.\nIn /tmp."},
        {"role": "user", "content": "List."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ]
    assert chat["max_tokens"] == 9
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["ls", "pwd"]


async def test_thoughts_that_only_the_api_can_read_are_left_out_and_counted(tmp_path):
    hidden = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    items = [
        {"role": "user", "content": "List."},
        hidden,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Again."},
        hidden,
    ]
    fields = {"include": ["reasoning.encrypted_content"], "max_tool_calls": 3}
    engine = SpokenEngine()
    async with speaking(API, tmp_path / "ds", engine) as (spoken, _):
        first = await API.whole(spoken, input=items, **fields)
        await API.whole(spoken, input=items[:3], **fields)
    assert (first["max_tool_calls"], first["truncation"]) == (3, "disabled")
    contents = [message["content"] for message in engine.requests[0]["messages"]]
    assert contents == ["Be brief.", "List.", "a", "Again."]
    last = rows(tmp_path / "ds", "metrics")[-1]
    assert last["metrics"] == [{"key": "encrypted_thoughts", "value": 2.0}]


async def test_sessions_are_told_apart_by_what_codex_and_opencode_send_themselves(tmp_path):
    key = "0199aa00-0000-7000-8000-00000000abcd"
    names = (key, "c-1", "ses_1")
    async with recording(tmp_path / "ds", SpokenEngine(), unassigned="refuse") as client:
        for fields, headers in [
            ({"prompt_cache_key": key}, {}),
            ({"prompt_cache_key": "shared"}, {"session_id": "c-1"}),
            ({}, {"x-session-affinity": "ses_1"}),
            ({"prompt_cache_key": key}, {"session-id": "c-1", "thread-id": "c-1"}),
            ({"prompt_cache_key": key}, {"session-id": "c-1", "thread-id": "c-2"}),
        ]:
            answer = await client.post("/v1/responses", json=API.ask | fields, headers=headers)
            assert answer.status_code == 200
        for name in names:
            await client.post(f"/s/{name}/0/end", json={"reward": 0.5})
    assert outcomes(tmp_path / "ds") == {f"{name}_0": (0.5, None) for name in names}
    agents = {row["agent"] for row in rows(tmp_path / "ds", "agent", "trajectory_id")}
    assert agents == {None, "c-2"}


async def test_a_lone_surrogate_is_read_as_the_replacement_character(tmp_path):
    engine = SpokenEngine()
    async with recording(tmp_path / "ds", engine) as client:
        body = r'{"model": "fake", "instructions": "a \ud800 b", "input": "c \udfff"}'
        kind = {"content-type": "application/json"}
        answer = await client.post("/s/a/0/v1/responses", content=body, headers=kind)
        status, said = answer.status_code, answer.json()
    assert (status, said["instructions"]) == (200, "a \ufffd b")
    assert [message["content"] for message in engine.requests[0]["messages"]] == [
        "a \ufffd b",
        "c \ufffd",
    ]
