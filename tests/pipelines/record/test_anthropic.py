"""Anthropic's Messages API, spoken by its own client."""

import asyncio
import json

import anthropic
import httpx2
import msgspec
import pytest

from pipelines.record.dialects.anthropic import MessagesCall
from pipelines.record.dialects.base import Chat
from schemas.errors import RolloutError
from tests.helpers.dialect_helpers import (
    ANSWERS,
    COLUMNS,
    SpokenAnswer,
    SpokenEngine,
    check_rows,
)
from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import outcomes, recording, rows

LS = {"name": "ls", "description": "List.", "input_schema": {"type": "object", "properties": {}}}
ASK = {
    "model": "fake",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "How is it?"}],
    "tools": [LS],
}
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


@pytest.fixture
def engine():
    app = SpokenEngine()
    with running(app) as url:
        app.url = url
        yield app


def run(out, engine, main, **settings):
    """Run `main(client of Anthropic, client of the recorder)`, and end session a/0."""

    async def go():
        async with recording(out, engine.url, **settings) as client:
            url = f"{client.root}/s/a/0"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as spoken:
                found = await main(spoken, client)
            await client.post("/s/a/0/end", json={"reward": 1.0})
            return found

    return asyncio.run(go())


def direct(said, body=ASK):
    """What a direct translation of the engine's answer gives."""
    call = MessagesCall(json.dumps(body).encode(), "/v1/messages", {})
    whole = SpokenAnswer(call.chat | {"return_token_ids": True}, said).whole()
    return call.answer(msgspec.convert(whole, Chat))


def plain(message):
    fields = json.loads(message.model_dump_json(exclude_unset=True))
    return {name: value for name, value in fields.items() if name != "stop_details"}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_client_gets_the_direct_translation_streamed_or_not_and_the_call_is_a_row(
    engine, tmp_path, name
):
    said = engine.said = ANSWERS[name]

    async def main(spoken, _):
        whole = await spoken.messages.create(**ASK)
        async with spoken.messages.stream(**ASK) as stream:
            if name == "a call cut short":  # the client parses partial arguments in its own way
                events = [event.type async for event in stream]
                assert events[-1] == "message_stop"
                return whole, None
            return whole, await stream.get_final_message()

    whole, streamed = run(tmp_path / "ds", engine, main)
    expected = direct(said)
    assert plain(whole) == expected
    if streamed is not None:
        assert plain(streamed) == expected
    if said:  # a call without tokens fails its session, in every API
        check_rows(engine, rows(tmp_path / "ds", *COLUMNS), [said] * 2)


def test_stop_reasons_are_those_of_the_api():
    found = {name: direct(said)["stop_reason"] for name, said in ANSWERS.items()}
    assert found == {
        "text": "end_turn",
        "thinking": "end_turn",
        "one call": "tool_use",
        "calls": "tool_use",
        "nothing": "end_turn",
        "too long": "max_tokens",
        "stop string": "stop_sequence",
        "a call cut short": "max_tokens",
    }
    assert direct(ANSWERS["stop string"])["stop_sequence"] == "STOP"
    (block,) = direct(ANSWERS["a call cut short"])["content"]
    assert block["input"] == {"INVALID_JSON": '{"path": "/a'}


def test_the_engine_gets_the_conversation_as_chat_messages(engine, tmp_path):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f"}
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    picture = [{"type": "text", "text": "This?"}, {"type": "image", "source": image}]

    async def main(spoken, _):
        await spoken.messages.create(
            model="fake",
            max_tokens=9,
            system=[billing, {"type": "text", "text": "Be brief."}],
            messages=[*TURNS, {"role": "user", "content": picture}],
            tools=[LS],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            stop_sequences=["STOP"],
            extra_body={"temperature": 0.5, "top_k": 7},
            thinking={"type": "disabled"},
            metadata={"user_id": "u"},
            extra_headers={"anthropic-beta": "x"},
            extra_query={"beta": "true"},
        )

    run(tmp_path / "ds", engine, main)
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
                    "parameters": LS["input_schema"],
                },
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "return_token_ids": True,
    }
    headers = engine.headers[-1]
    assert headers["authorization"] == "Bearer k"
    assert not [name for name in headers if name.startswith(("x-api", "anthropic"))]
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    held = json.loads(row["messages"])
    assert held[:-1] == request["messages"][:-1]
    assert held[-1]["content"][0] == picture[0]
    assert held[-1]["content"][1]["blob"].startswith("sha256:")  # its bytes are in the store
    assert (row["temperature"], row["top_k"]) == (0.5, 7)


def test_a_last_message_of_the_assistant_is_continued():
    body = ASK | {"messages": [*ASK["messages"], {"role": "assistant", "content": "It is"}]}
    chat = MessagesCall(json.dumps(body).encode(), "/v1/messages", {}).chat
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "document", "source": {"type": "file", "file_id": "f"}}
                        ],
                    }
                ]
            },
            "document",
        ),
        ({"messages": []}, "no messages"),
        ({"messages": 3}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"tool_choice": {"type": "some"}}, "some"),
        ({"tool_choice": {"type": "tool"}, "tools": [LS]}, "tool_choice without a name"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name_and_goes_nowhere(
    engine, tmp_path, extra, named
):
    async def main(_, client):
        answer = await client.post("/s/a/0/v1/messages", json=ASK | extra)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert named in answer.json()["error"]["message"]

    run(tmp_path / "ds", engine, main)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, anthropic.BadRequestError),
        (401, anthropic.AuthenticationError),
        (404, anthropic.NotFoundError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
    ],
)
def test_errors_of_the_engine_are_errors_of_the_api(engine, tmp_path, status, error):
    engine.status = status

    async def main(spoken, _):
        for stream in (False, True):
            with pytest.raises(error) as caught:
                await spoken.messages.create(**ASK, stream=stream)
            assert caught.value.body["error"]["message"] == "busy"

    run(tmp_path / "ds", engine, main)


def test_errors_of_the_recorder_are_errors_of_the_api(engine, tmp_path):
    async def main(_, client):
        found = []
        for path, body in [
            ("/v1/messages", ASK),
            ("/s/a/x/v1/messages", ASK),
            ("/s/a/0/v1/messages?beta=true", [1]),
        ]:
            answer = await client.post(path, json=body)
            found.append((answer.status_code, answer.json()["error"]["type"]))
        wrong = await client.get("/s/a/0/v1/messages")
        assert wrong.json()["type"] == "error"
        return found

    assert run(tmp_path / "ds", engine, main, unassigned="refuse") == [
        (403, "permission_error"),
        (400, "invalid_request_error"),
        (400, "invalid_request_error"),
    ]


def test_a_stream_that_the_engine_breaks_off_is_no_complete_message(tmp_path):
    app = SpokenEngine(dies_after=3)
    app.said = ANSWERS["text"]

    async def main(spoken, _):
        with pytest.raises(httpx2.HTTPError):
            async with spoken.messages.stream(**ASK) as stream:
                await stream.get_final_message()

    with running(app) as app.url:
        run(tmp_path / "ds", app, main)
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("error", "It is sunny.")


def test_a_stream_that_the_client_leaves_is_a_step_with_what_was_sampled(tmp_path):
    app = SpokenEngine(gap_s=0.1)
    app.said = {"content": "It is sunny."}

    async def main(spoken, client):
        async with spoken.messages.stream(**ASK) as stream:
            async for event in stream:
                if event.type == "content_block_delta":
                    break
        while not app.num_left:
            await asyncio.sleep(0.02)
        while not (await client.get("/s/a/0")).json()["calls"]:
            await asyncio.sleep(0.02)

    with running(app) as app.url:
        run(tmp_path / "ds", app, main)
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("abort", "It is ")


def test_tokens_are_counted_by_the_engine_or_estimated_with_a_header_that_says_so(engine, tmp_path):
    asked = {name: ASK[name] for name in ("model", "messages", "tools")}

    async def main(spoken, client):
        exact = await spoken.messages.count_tokens(**asked)
        engine.counts = False
        guess = await client.post("/s/a/0/v1/messages/count_tokens", json=asked)
        return exact.input_tokens, guess

    number, guess = run(tmp_path / "ds", engine, main)
    call = MessagesCall(json.dumps(asked).encode(), "/v1/messages/count_tokens", {})
    assert number == sum(len(json.dumps(call.chat[name])) for name in ("messages", "tools"))
    assert guess.headers["x-rollouts-estimated"] == "4 bytes a token"
    assert 0 < guess.json()["input_tokens"] < number
    assert not list((tmp_path / "ds").glob("part-*"))


def test_the_first_event_has_the_length_of_the_prompt(engine, tmp_path):
    async def main(_, client):
        answer = await client.post("/s/a/0/v1/messages", json=ASK | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.text

    text = run(tmp_path / "ds", engine, main)
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    first, *_, delta, _ = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert first["message"]["usage"]["input_tokens"] == len(
        json.dumps(engine.requests[0]["messages"])
    )
    assert delta["usage"]["output_tokens"] == len("Hello.")


def test_sessions_are_told_apart_by_what_claude_code_sends_itself(engine, tmp_path):
    one, two = "7c1e-11", "9f-22"
    ids = [
        f"user_ab12_account_55-66_session_{one}",
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": two}),
        f"user_ab12_account__session_{one}",
    ]

    async def main(_, client):
        for user_id in ids:
            body = ASK | {"metadata": {"user_id": user_id}}
            answer = await client.post("/v1/messages?beta=true", json=body)
            assert answer.status_code == 200
        ended = await client.post(f"/s/{one}/0/end", json={"reward": 0.5})
        assert ended.json()["calls"] == 2
        while (await client.get(f"/s/{two}/0")).json()["state"] == "open":  # until it is idle
            await asyncio.sleep(0.01)

    run(tmp_path / "ds", engine, main, unassigned="refuse", idle_timeout_s=0.2)
    found = outcomes(tmp_path / "ds")
    assert found == {f"{one}_0": (0.5, None), f"{two}_0": (None, None)}


def test_a_key_in_the_header_of_the_api_names_a_session(engine, tmp_path):
    async def main(_, client):
        headers = {"x-api-key": "sk-rollouts-b/1"}
        answer = await client.post("/v1/messages", json=ASK, headers=headers)
        assert answer.status_code == 200
        assert "authorization" not in engine.headers[-1]
        assert (await client.get("/s/b/1")).json()["calls"] == 1

    run(tmp_path / "ds", engine, main)


def test_pieces_of_a_call_that_has_ended_are_an_error():
    stream = MessagesCall(json.dumps(ASK).encode(), "/v1/messages", {}).stream()

    def chunk(index, **function):
        call = {"index": index, "id": f"c{index}", "function": function}
        return msgspec.convert({"choices": [{"delta": {"tool_calls": [call]}}]}, Chat)

    stream.take(chunk(0, name="ls"))
    stream.take(chunk(1, name="ls"))
    with pytest.raises(RolloutError, match="engine_answer"):
        stream.take(chunk(0, arguments="{}"))
