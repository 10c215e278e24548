"""What is particular to Gemini's API."""

import json

import httpx2
import pytest
from google import genai
from google.genai import types

from pipelines.record.dialects.gemini import GeminiCall
from tests.helpers.dialect_helpers import ANSWERS, COLUMNS, SpokenEngine
from tests.helpers.dialects import Gemini, speaking
from tests.helpers.recorder_helpers import outcomes, recording, rows

# Google's client subclasses a class of aiohttp, which discourages that.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")

API = Gemini()


def test_finish_reasons_are_those_of_the_api():
    reasons = {
        name: API.direct(answer)["candidates"][0]["finishReason"]
        for name, answer in ANSWERS.items()
    }
    cut = {"too long", "a call cut short"}
    assert reasons == {name: "MAX_TOKENS" if name in cut else "STOP" for name in ANSWERS}
    (part,) = API.direct(ANSWERS["a call cut short"])["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["args"] == {"INVALID_JSON": '{"path": "/a'}


def test_thoughts_are_returned_only_to_those_who_ask():
    def parts(**fields):
        return API.direct(ANSWERS["thinking"], **fields)["candidates"][0]["content"]["parts"]

    for fields in ({}, {"thinkingConfig": {}}):
        assert parts(generationConfig=fields) == [{"text": "It is sunny."}]
    assert parts() == [{"text": "Warm? Yes.", "thought": True}, {"text": "It is sunny."}]


TURNS = [
    {"role": "user", "parts": [{"text": "List."}]},
    {"role": "model", "parts": [{"text": "Hm", "thought": True}]},
    {"role": "model", "parts": [{"text": ".", "thought": True}, {"text": "I "}]},
    {"role": "model", "parts": [{"text": "will.", "thoughtSignature": "c2ln"}]},
    {
        "role": "model",
        "parts": [
            {
                "functionCall": {"name": "ls", "args": {"n": 1.0}, "id": "t1"},
                "thoughtSignature": "c2ln",
            },
            {"functionCall": {"name": "ls", "args": {"n": 2}, "id": "t2"}},
        ],
    },
    {
        "role": "user",
        "parts": [
            {"functionResponse": {"name": "ls", "id": "t2", "response": {"error": "b"}}},
            {"functionResponse": {"name": "ls", "id": "t1", "response": {"output": "a"}}},
            {"text": "This?"},
            {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        ],
    },
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "List."},
    {
        "role": "assistant",
        "content": "I will.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": '{"n":1.0}'}},
            {"id": "t2", "type": "function", "function": {"name": "ls", "arguments": '{"n":2}'}},
        ],
    },
    {"role": "tool", "content": "b", "tool_call_id": "t2"},
    {"role": "tool", "content": "a", "tool_call_id": "t1"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "This?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ],
    },
]
TOOL = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "List.",
        "parameters": {"type": "object", "properties": {"path": {"type": ["string", "null"]}}},
    },
}


async def test_the_engine_gets_the_conversation_as_chat_messages(tmp_path):
    engine, harassment = SpokenEngine(), "HARM_CATEGORY_HARASSMENT"
    config = {
        "system_instruction": "Be brief.",
        "tools": [API.tool],
        "tool_config": {"function_calling_config": {"mode": "ANY"}},
        "automatic_function_calling": {"disable": True},
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "candidate_count": 1,
        "stop_sequences": ["STOP"],
        "thinking_config": {"thinking_budget": 0},
        "safety_settings": [{"category": harassment, "threshold": "BLOCK_NONE"}],
    }
    async with speaking(API, tmp_path / "ds", engine) as (spoken, _):
        await spoken.models.generate_content(model="fake", contents=TURNS, config=config)
    (request,) = engine.requests
    assert request == {
        "model": "fake",
        "messages": MESSAGES,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop": ["STOP"],
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [TOOL],
        "tool_choice": "required",
        "logprobs": True,
        "return_token_ids": True,
    }
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert json.loads(row["messages"])[:-1] == MESSAGES[:-1]
    assert (row["temperature"], row["top_k"]) == (0.5, 7)


async def test_a_chat_of_the_client_sends_back_what_the_model_wrote_as_one_message(tmp_path):
    engine = SpokenEngine()
    engine.said = ANSWERS["thinking"]
    async with speaking(API, tmp_path / "ds", engine) as (spoken, _):
        chat = spoken.chats.create(model="fake", config=API.config)
        for text in ("One.", "Two."):
            assert [answer async for answer in await chat.send_message_stream(text)]
    messages = engine.requests[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    answer = messages[1]
    assert (answer["reasoning_content"], answer["content"]) == ("Warm? Yes.", "It is sunny.")


def test_names_in_snake_case_and_schemas_of_the_api_are_understood():
    body = {
        "contents": API.contents,
        "system_instruction": {"parts": [{"text": "Be brief."}]},
        "generation_config": {"max_output_tokens": 5, "response_mime_type": "application/json"},
        "tools": [{"function_declarations": API.tool["functionDeclarations"]}],
        "tool_config": {
            "function_calling_config": {"mode": "ANY", "allowed_function_names": ["ls"]}
        },
    }
    chat = GeminiCall(json.dumps(body).encode(), API.path, {}).chat
    assert chat["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (chat["max_tokens"], chat["tools"]) == (5, [TOOL])
    assert chat["tool_choice"] == "required"
    assert chat["response_format"] == {"type": "json_object"}
    shaped = {"responseMimeType": "application/json", "responseSchema": API.schema}
    form = API.call(generationConfig=shaped).chat["response_format"]
    assert form["json_schema"]["schema"] == TOOL["function"]["parameters"]


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
async def test_a_stream_is_events_or_one_array_also_where_the_engine_breaks_it_off(tmp_path, alt):
    engine = SpokenEngine()
    engine.said = ANSWERS["calls"]
    path = f"/s/a/0/v1beta/models/fake:streamGenerateContent{alt}"
    async with speaking(API, tmp_path / "ds", engine) as (_, client):
        answer = await client.post(path, json=API.body)
        engine.dies_after = 4
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(path, json=API.body)
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    whole = [json.loads(event) for event in events] if alt else answer.json()
    kind = "text/event-stream" if alt else "application/json"
    assert answer.headers["content-type"].startswith(kind)
    assert [one["candidates"][0].get("finishReason") for one in whole[-2:]] == [None, "STOP"]
    assert rows(tmp_path / "ds", "stop_reason")[1]["stop_reason"] == "error"


async def test_every_path_that_clients_use_is_served(tmp_path):
    engine = SpokenEngine()
    paths = {
        "/v1beta/models/fake:generateContent": "fake",
        "/v1beta1/models/fake:generateContent": "fake",
        "/v1/models/fake:generateContent": "fake",
        "/models/fake:generateContent": "fake",
        "/v1beta1/publishers/google/models/fake:generateContent": "fake",
        "/v1beta1/projects/p/locations/l/publishers/google/models/fake:generateContent": "fake",
        "/v1beta/models/org%2Ffake:generateContent": "org/fake",
        "/v1beta/models/org/fake:generateContent": "org/fake",
        "/checker/v1beta/models/fake:generateContent": "fake",
    }
    async with speaking(API, tmp_path / "ds", engine) as (_, client):
        for path, name in paths.items():
            answer = await client.post(f"/s/a/0{path}", json={"contents": API.contents})
            assert answer.status_code == 200, path
            assert answer.json()["modelVersion"] == engine.requests[-1]["model"] == name
    agents = [row["agent"] for row in rows(tmp_path / "ds", "agent")]
    assert agents == [None] * 8 + ["checker"]


async def test_the_client_of_vertex_is_served_too(tmp_path):
    async with recording(tmp_path / "ds", SpokenEngine()) as client:
        options = types.HttpOptions(base_url=f"{client.root}/s/b/0", api_version="v1beta1")
        vertex = genai.Client(vertexai=True, api_key="k", http_options=options)
        answer = await vertex.aio.models.generate_content(model="fake", contents="Hi.")
        assert answer.text == "Hello."
        await client.post("/s/b/0/end", json={"reward": 0.5})
    assert outcomes(tmp_path / "ds")["b_0"] == (0.5, None)
