"""OpenAI's Responses API, spoken by its own client."""

import asyncio
import json

import msgspec
import openai
import pytest

from pipelines.record.dialects.base import Chat
from pipelines.record.dialects.responses import ResponsesCall
from tests.helpers.dialect_helpers import (
    ANSWERS,
    COLUMNS,
    SpokenAnswer,
    SpokenEngine,
    check_rows,
)
from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import outcomes, recording, rows

LS = {"type": "function", "name": "ls", "description": "List.", "parameters": {"type": "object"}}
ASK = {
    "model": "fake",
    "instructions": "Be brief.",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]}],
    "tools": [LS, {"type": "custom", "name": "pwd"}],
}


@pytest.fixture
def engine():
    app = SpokenEngine()
    with running(app) as url:
        app.url = url
        yield app


def run(out, engine, main, **settings):
    async def go():
        async with recording(out, engine.url, **settings) as client:
            url = f"{client.root}/s/a/0/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as spoken:
                found = await main(spoken, client)
            await client.post("/s/a/0/end", json={"reward": 1.0})
            return found

    return asyncio.run(go())


def direct(said, body=ASK):
    """What a direct translation of the engine's answer gives."""
    call = ResponsesCall(json.dumps(body).encode(), "/v1/responses", {})
    whole = SpokenAnswer(call.chat | {"return_token_ids": True}, said).whole()
    return call.answer(msgspec.convert(whole, Chat))


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "nothing"])
def test_a_client_gets_the_direct_translation_streamed_or_not_and_the_call_is_a_row(
    engine, tmp_path, name, summary
):
    said, body = ANSWERS[name], ASK | ({"reasoning": {"summary": summary}} if summary else {})
    engine.said = said

    async def main(spoken, _):
        whole = await spoken.responses.create(**body)
        events = [event async for event in await spoken.responses.create(**body, stream=True)]
        return whole, events

    whole, events = run(tmp_path / "ds", engine, main)
    expected = direct(said, body)
    assert whole.model_dump(mode="json", exclude_unset=True) == expected
    assert events[-1].response.model_dump(mode="json", exclude_unset=True) == expected
    assert events[-1].type == f"response.{expected['status']}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [item.model_dump(mode="json", exclude_unset=True) for item in done] == expected["output"]
    check_deltas(events, expected["output"])
    check_rows(engine, rows(tmp_path / "ds", *COLUMNS), [said] * 2)


@pytest.mark.parametrize("said", [{"content": "Ok"}, {"reasoning": "Hm.", "content": "It is."}])
def test_log_probabilities_are_those_of_the_text_streamed_or_not(engine, tmp_path, said):
    engine.said = said
    asked = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

    async def main(spoken, _):
        whole = await spoken.responses.create(**asked)
        events = [event async for event in await spoken.responses.create(**asked, stream=True)]
        plain = await spoken.responses.create(**ASK)
        return whole, events, plain

    whole, events, plain = run(tmp_path / "ds", engine, main)
    text = said["content"]
    part = whole.output[-1].content[0]
    assert "".join(one.token for one in part.logprobs) == text == part.text
    assert all(one.logprob < 0 for one in part.logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    for delta in deltas:
        assert "".join(one.token for one in delta.logprobs) == delta.delta
    assert events[-1].response.output[-1].content[0].logprobs == part.logprobs
    assert plain.output[-1].content[0].logprobs == []
    assert engine.requests[0]["top_logprobs"] == 2
    assert len(rows(tmp_path / "ds", "response_ids")) == 3


def check_deltas(events, output):
    """The deltas of each item are its text."""
    for at, item in enumerate(output):
        parts = item.get("content") or item.get("summary") or [{}]
        text = parts[0].get("text", item.get("arguments", item.get("input")))
        own = [e for e in events if getattr(e, "output_index", None) == at]
        assert "".join(e.delta for e in own if e.type.endswith(".delta")) == text


def test_calls_of_custom_tools_and_namespaces_come_back_as_the_client_knows_them():
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "ls"}]},
    ]
    calls = [("patch", '{"input": "*** a\\n"}'), ("fs.ls", "{}")]
    patch, ls = direct({"tool_calls": calls}, ASK | {"tools": tools})["output"]
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
    chat = ResponsesCall(
        json.dumps(ASK | {"input": items, "max_output_tokens": 9}).encode(), "/v1/responses", {}
    ).chat
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief.\nIn /tmp."},
        {"role": "user", "content": "List."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "a", "tool_call_id": "c"},
    ]
    assert chat["max_tokens"] == 9
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["ls", "pwd"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"truncation": "auto"}, "`truncation` 'auto'"),
        (
            {"include": ["message.output_text.logprobs", "usage.cost"]},
            "`include` with 'usage.cost'",
        ),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9.5}, "max_output_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name_and_goes_nowhere(
    engine, tmp_path, extra, named
):
    async def main(_, client):
        answer = await client.post("/s/a/0/v1/responses", json=ASK | extra)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert named in answer.json()["error"]["message"]

    run(tmp_path / "ds", engine, main)
    assert engine.requests == []


def test_thoughts_that_only_the_api_can_read_are_left_out_and_counted(engine, tmp_path):
    hidden = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    items = [
        {"role": "user", "content": "List."},
        hidden,
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Again."},
        hidden,
    ]
    asked = ASK | {"include": ["reasoning.encrypted_content"], "max_tool_calls": 3}

    async def main(spoken, _):
        first = await spoken.responses.create(**asked | {"input": items})
        await spoken.responses.create(**asked | {"input": items[:3]})
        return first

    engine.said = ANSWERS["text"]
    first = run(tmp_path / "ds", engine, main)
    assert (first.max_tool_calls, first.truncation) == (3, "disabled")
    assert [m["content"] for m in engine.requests[0]["messages"]] == [
        *("Be brief.", "List.", "a", "Again.")
    ]
    last = rows(tmp_path / "ds", "metrics")[-1]
    assert last["metrics"] == [{"key": "encrypted_thoughts", "value": 2.0}]


def test_errors_of_the_engine_are_errors_of_the_api(engine, tmp_path):
    engine.status = 429

    async def main(spoken, _):
        with pytest.raises(openai.RateLimitError, match="busy"):
            await spoken.responses.create(**ASK)

    run(tmp_path / "ds", engine, main)


def test_a_stream_that_the_engine_breaks_off_is_no_complete_response(tmp_path):
    app = SpokenEngine(dies_after=3)
    app.said = ANSWERS["text"]
    seen = set()

    async def read(spoken):
        async for event in await spoken.responses.create(**ASK, stream=True):
            seen.add(event.type)

    async def main(spoken, _):
        with pytest.raises(openai.APIConnectionError):
            await read(spoken)

    with running(app) as app.url:
        run(tmp_path / "ds", app, main)
    assert "response.output_text.delta" in seen
    assert "response.completed" not in seen
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("error", "It is sunny.")


def test_a_stream_that_the_client_leaves_is_a_step_with_what_was_sampled(tmp_path):
    app = SpokenEngine(gap_s=0.1)
    app.said = {"content": "It is sunny."}

    async def main(spoken, client):
        async with await spoken.responses.create(**ASK, stream=True) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        while not app.num_left:
            await asyncio.sleep(0.02)
        while not (await client.get("/s/a/0")).json()["calls"]:
            await asyncio.sleep(0.02)

    with running(app) as app.url:
        run(tmp_path / "ds", app, main)
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("abort", "It is ")


def test_sessions_are_told_apart_by_what_codex_and_opencode_send_themselves(engine, tmp_path):
    key = "0199aa00-0000-7000-8000-00000000abcd"

    async def main(_, client):
        for extra, headers in [
            ({"prompt_cache_key": key}, {}),
            ({"prompt_cache_key": "shared"}, {"session_id": "c-1"}),
            ({}, {"x-session-affinity": "ses_1"}),
            ({"prompt_cache_key": key}, {"session-id": "c-1", "thread-id": "c-1"}),
            ({"prompt_cache_key": key}, {"session-id": "c-1", "thread-id": "c-2"}),
        ]:
            answer = await client.post("/v1/responses", json=ASK | extra, headers=headers)
            assert answer.status_code == 200
        for name in (key, "c-1", "ses_1"):
            await client.post(f"/s/{name}/0/end", json={"reward": 0.5})

    run(tmp_path / "ds", engine, main, unassigned="refuse")
    names = (key, "c-1", "ses_1")
    assert outcomes(tmp_path / "ds") == {f"{name}_0": (0.5, None) for name in names}
    agents = {row["agent"] for row in rows(tmp_path / "ds", "agent", "trajectory_id")}
    assert agents == {None, "c-2"}


async def test_a_lone_surrogate_is_read_as_the_replacement_character(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        body = r'{"model": "fake", "instructions": "a \ud800 b", "input": "c \udfff"}'
        kind = {"content-type": "application/json"}
        answer = await client.post("/s/a/0/v1/responses", content=body, headers=kind)
        status, said = answer.status_code, answer.json()
    assert (status, said["instructions"]) == (200, "a \ufffd b")
    assert [message["content"] for message in engine.requests[0]["messages"]] == [
        "a \ufffd b",
        "c \ufffd",
    ]
