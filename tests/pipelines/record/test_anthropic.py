"""What is particular to Anthropic's Messages API."""

import asyncio
import json

import msgspec
import pytest

from pipelines.record.dialects.base import Chat
from schemas.errors import RolloutError
from tests.helpers.dialect_helpers import ANSWERS, COLUMNS, SpokenEngine
from tests.helpers.dialects import Messages, speaking
from tests.helpers.recorder_helpers import outcomes, recording, rows

API = Messages()
CALL = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"n": 1.0}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "List."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "I will."},
            CALL,
            CALL | {"id": "t2"},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "text", "text": "a"}],
            },
            {"type": "tool_result", "tool_use_id": "t2", "content": "b", "is_error": True},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


def test_stop_reasons_are_those_of_the_api():
    reasons = {name: API.direct(answer)["stop_reason"] for name, answer in ANSWERS.items()}
    assert reasons == {
        "text": "end_turn",
        "thinking": "end_turn",
        "one call": "tool_use",
        "calls": "tool_use",
        "nothing": "end_turn",
        "too long": "max_tokens",
        "stop string": "stop_sequence",
        "a call cut short": "max_tokens",
    }
    assert API.direct(ANSWERS["stop string"])["stop_sequence"] == "STOP"
    (block,) = API.direct(ANSWERS["a call cut short"])["content"]
    assert block["input"] == {"INVALID_JSON": '{"path": "/a'}


async def test_the_engine_gets_the_conversation_as_chat_messages(tmp_path):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f"}
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    picture = [{"type": "text", "text": "This?"}, {"type": "image", "source": image}]

    engine = SpokenEngine()
    async with speaking(API, tmp_path / "ds", engine) as (spoken, _):
        await spoken.messages.create(
            model="fake",
            max_tokens=9,
            system=[billing, {"type": "text", "text": "Be brief."}],
            messages=[*TURNS, {"role": "user", "content": picture}],
            tools=[API.tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            stop_sequences=["STOP"],
            extra_body={"temperature": 0.5, "top_k": 7},
            thinking={"type": "disabled"},
            metadata={"user_id": "u"},
            extra_headers={"anthropic-beta": "x"},
            extra_query={"beta": "true"},
        )

    (request,) = engine.requests
    function = {"name": "ls", "arguments": '{"n":1.0}'}
    assert request == {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "List."},
            {
                "role": "assistant",
                "content": "I will.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": name, "type": "function", "function": function} for name in ("t1", "t2")
                ],
            },
            {"role": "tool", "content": "a", "tool_call_id": "t1"},
            {"role": "tool", "content": "b", "tool_call_id": "t2", "is_error": True},
            {"role": "user", "content": "Go on."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "This?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ],
            },
        ],
        "max_tokens": 9,
        "stop": ["STOP"],
        "temperature": 0.5,
        "top_k": 7,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "ls",
                    "description": "List.",
                    "parameters": {"type": "object"},
                },
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "return_token_ids": True,
    }
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    held = json.loads(row["messages"])
    assert held[:-1] == request["messages"][:-1]
    assert held[-1]["content"][0] == picture[0]
    assert held[-1]["content"][1]["blob"].startswith("sha256:")  # its bytes are in the store
    assert (row["temperature"], row["top_k"]) == (0.5, 7)


def test_a_last_message_of_the_assistant_is_continued():
    chat = API.call(messages=[*API.ask["messages"], {"role": "assistant", "content": "It is"}]).chat
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


async def test_the_first_event_has_the_length_of_the_prompt(tmp_path):
    engine = SpokenEngine()
    async with recording(tmp_path / "ds", engine) as client:
        answer = await client.post("/s/a/0/v1/messages", json=API.ask | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    first, *_, delta, _ = [json.loads(line.removeprefix("data: ")) for line in lines]
    prompt = json.dumps(engine.requests[0]["messages"])
    assert first["message"]["usage"]["input_tokens"] == len(prompt)
    assert delta["usage"]["output_tokens"] == len("Hello.")


async def test_sessions_are_told_apart_by_what_claude_code_sends_itself(tmp_path):
    one, two = "7c1e-11", "9f-22"
    ids = [
        f"user_ab12_account_55-66_session_{one}",
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": two}),
        f"user_ab12_account__session_{one}",
    ]
    settings = {"unassigned": "refuse", "idle_timeout_s": 0.2}
    async with recording(tmp_path / "ds", SpokenEngine(), **settings) as client:
        for user_id in ids:
            body = API.ask | {"metadata": {"user_id": user_id}}
            answer = await client.post("/v1/messages?beta=true", json=body)
            assert answer.status_code == 200
        ended = await client.post(f"/s/{one}/0/end", json={"reward": 0.5})
        assert ended.json()["calls"] == 2
        while (await client.get(f"/s/{two}/0")).json()["state"] == "open":  # until it is idle
            await asyncio.sleep(0.01)
    assert outcomes(tmp_path / "ds") == {f"{one}_0": (0.5, None), f"{two}_0": (None, None)}


def test_pieces_of_a_call_that_has_ended_are_an_error():
    stream = API.call().stream()

    def chunk(index, **function):
        call = {"index": index, "id": f"c{index}", "function": function}
        return msgspec.convert({"choices": [{"delta": {"tool_calls": [call]}}]}, Chat)

    stream.take(chunk(0, name="ls"))
    stream.take(chunk(1, name="ls"))
    with pytest.raises(RolloutError, match="engine_answer"):
        stream.take(chunk(0, arguments="{}"))
