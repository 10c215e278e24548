"""Gemini's API, spoken by its own client."""

import asyncio
import json

import aiohttp
import httpx2
import msgspec
import pytest
from google import genai
from google.genai import errors, types

from pipelines.record.dialects.base import Chat
from pipelines.record.dialects.gemini import GeminiCall
from tests.helpers.dialect_helpers import (
    ANSWERS,
    COLUMNS,
    SpokenAnswer,
    SpokenEngine,
    check_rows,
)
from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import outcomes, recording, rows

# Google's client subclasses a class of aiohttp, which discourages that.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")

OBJECT = {"type": "OBJECT", "properties": {"path": {"type": "STRING", "nullable": True}}}
LS = {"functionDeclarations": [{"name": "ls", "description": "List.", "parameters": OBJECT}]}
CONTENTS = [{"role": "user", "parts": [{"text": "How is it?"}]}]
PATH = "/v1beta/models/fake:generateContent"
THOUGHTS = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
CONFIG = {
    "tools": [LS],
    "thinking_config": {"include_thoughts": True},
    "automatic_function_calling": {"disable": True},
}
ASK = {"model": "fake", "contents": CONTENTS, "config": CONFIG}


@pytest.fixture
def engine():
    app = SpokenEngine()
    with running(app) as url:
        app.url = url
        yield app


def run(out, engine, main, **settings):
    """Run `main(models of Google's client, client of the recorder)`, and end session a/0."""

    async def go():
        async with recording(out, engine.url, **settings) as client:
            options = types.HttpOptions(base_url=f"{client.root}/s/a/0")
            async with genai.Client(api_key="k", http_options=options).aio as spoken:
                found = await main(spoken, client)
            await client.post("/s/a/0/end", json={"reward": 1.0})
            return found

    return asyncio.run(go())


def call_of(path=PATH, **fields):
    return GeminiCall(json.dumps({"contents": CONTENTS} | fields).encode(), path, {})


def direct(said, call=None):
    """What a direct translation of the engine's answer gives."""
    call = call or call_of(**THOUGHTS)
    whole = SpokenAnswer(call.chat | {"return_token_ids": True}, said).whole()
    return call.answer(msgspec.convert(whole, Chat))


def plain(answer):
    fields = answer.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {name: value for name, value in fields.items() if name != "sdkHttpResponse"}


async def streamed(spoken):
    return [answer async for answer in await spoken.models.generate_content_stream(**ASK)]


def joined(parts):
    """Parts of a stream, with the pieces of each text joined."""
    found = []
    for part in parts:
        last = found[-1] if found else {}
        if last.keys() == part.keys() and "text" in part:
            last["text"] += part["text"]
        elif part != {"text": ""}:
            found.append(dict(part))
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_a_client_gets_the_direct_translation_streamed_or_not_and_the_call_is_a_row(
    engine, tmp_path, name
):
    said = engine.said = ANSWERS[name]

    async def main(spoken, _):
        return await spoken.models.generate_content(**ASK), await streamed(spoken)

    whole, answers = run(tmp_path / "ds", engine, main)
    expected = direct(said)
    assert plain(whole) == expected
    *pieces, last = [plain(answer) for answer in answers]
    parts = [part for answer in pieces for part in answer["candidates"][0]["content"]["parts"]]
    assert all("finishReason" not in answer["candidates"][0] for answer in pieces)
    last["candidates"][0]["content"]["parts"] = joined(parts)
    assert last == expected
    if said:  # a call without tokens fails its session, in every API
        check_rows(engine, rows(tmp_path / "ds", *COLUMNS), [said] * 2)


def test_finish_reasons_are_those_of_the_api():
    found = {name: direct(said)["candidates"][0]["finishReason"] for name, said in ANSWERS.items()}
    cut = {"too long", "a call cut short"}
    assert found == {name: "MAX_TOKENS" if name in cut else "STOP" for name in ANSWERS}
    (part,) = direct(ANSWERS["a call cut short"])["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["args"] == {"INVALID_JSON": '{"path": "/a'}


def test_thoughts_are_returned_only_to_those_who_ask():
    def parts(call):
        return direct(ANSWERS["thinking"], call)["candidates"][0]["content"]["parts"]

    assert parts(call_of()) == [{"text": "It is sunny."}]
    assert parts(None) == [{"text": "Warm? Yes.", "thought": True}, {"text": "It is sunny."}]


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


def test_the_engine_gets_the_conversation_as_chat_messages(engine, tmp_path):
    config = {
        "system_instruction": "Be brief.",
        "tools": [LS],
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
        "safety_settings": [
            {"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"},
        ],
    }

    async def main(spoken, _):
        await spoken.models.generate_content(model="fake", contents=TURNS, config=config)

    run(tmp_path / "ds", engine, main)
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
    headers = engine.headers[-1]
    assert headers["authorization"] == "Bearer k"
    assert not [name for name in headers if name.startswith("x-goog")]
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert json.loads(row["messages"])[:-1] == MESSAGES[:-1]
    assert (row["temperature"], row["top_k"]) == (0.5, 7)


def test_a_chat_of_the_client_sends_back_what_the_model_wrote_piece_by_piece_as_one_message(
    engine, tmp_path
):
    engine.said = ANSWERS["thinking"]

    async def main(spoken, _):
        chat = spoken.chats.create(model="fake", config=CONFIG)
        for text in ("One.", "Two."):
            assert [answer async for answer in await chat.send_message_stream(text)]

    run(tmp_path / "ds", engine, main)
    assert [message["role"] for message in engine.requests[1]["messages"]] == [
        *("user", "assistant", "user")
    ]
    said = engine.requests[1]["messages"][1]
    assert (said["reasoning_content"], said["content"]) == ("Warm? Yes.", "It is sunny.")


def test_names_in_snake_case_and_schemas_of_the_api_are_understood():
    body = {
        "contents": CONTENTS,
        "system_instruction": {"parts": [{"text": "Be brief."}]},
        "generation_config": {"max_output_tokens": 5, "response_mime_type": "application/json"},
        "tools": [{"function_declarations": LS["functionDeclarations"]}],
        "tool_config": {
            "function_calling_config": {"mode": "ANY", "allowed_function_names": ["ls"]}
        },
    }
    chat = GeminiCall(json.dumps(body).encode(), PATH, {}).chat
    assert chat["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (chat["max_tokens"], chat["tools"]) == (5, [TOOL])
    assert chat["tool_choice"] == "required"
    assert chat["response_format"] == {"type": "json_object"}
    shaped = {"responseMimeType": "application/json", "responseSchema": OBJECT}
    form = call_of(generationConfig=shaped).chat["response_format"]
    assert form["json_schema"]["schema"] == TOOL["function"]["parameters"]


PICTURE = {"mimeType": "image/png", "data": "AA=="}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"generationConfig": {"topK": 0.5}}, "topK"),
        ({"generationConfig": {"top_k": -1}}, "topK"),
        ({"generationConfig": {"topP": 0}}, "topP"),
        ({"generationConfig": {"temperature": -1}}, "temperature"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens"),
        ({"generationConfig": {"seed": 1.5}}, "seed"),
        ({"generationConfig": {"presencePenalty": 2.5}}, "presencePenalty"),
        ({"generationConfig": {"responseLogprobs": True}}, "responseLogprobs"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "IMAGE"),
        ({"generationConfig": {"responseMimeType": "text/csv"}}, "text/csv"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}, "tools": [LS]}, "SOME"),
        ({"tools": [{"functionDeclarations": {"name": "ls"}}]}, "functionDeclarations"),
        ({"tools": [{"functionDeclarations": ["ls"]}]}, "functionDeclarations"),
        ({"systemInstruction": {"parts": [{"inlineData": PICTURE}]}}, "system instruction"),
        ({"contents": []}, "no `contents`"),
        ({"contents": 3}, "array"),
        ({"contents": [{"role": "user", "parts": [{"text": 3}]}]}, "text"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name_and_goes_nowhere(
    engine, tmp_path, extra, named
):
    async def main(_, client):
        answer = await client.post(f"/s/a/0{PATH}", json={"contents": CONTENTS} | extra)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
        assert named in error["message"]

    run(tmp_path / "ds", engine, main)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("status", "named"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (404, "NOT_FOUND"),
        (429, "RESOURCE_EXHAUSTED"),
        (500, "INTERNAL"),
        (503, "UNAVAILABLE"),
    ],
)
def test_errors_of_the_engine_are_errors_of_the_api(engine, tmp_path, status, named):
    engine.status = status
    kind = errors.ClientError if status < 500 else errors.ServerError

    async def main(spoken, _):
        with pytest.raises(kind) as caught:
            await spoken.models.generate_content(**ASK)
        assert (caught.value.code, caught.value.status) == (status, named)
        assert caught.value.message == "busy"
        with pytest.raises(kind) as caught:
            await streamed(spoken)
        assert caught.value.status == named

    run(tmp_path / "ds", engine, main)


def test_errors_of_the_recorder_are_errors_of_the_api(engine, tmp_path):
    async def main(_, client):
        body = {"contents": CONTENTS}
        found = []
        for path, sent in [(PATH, body), (f"/s/a/x{PATH}", body), (f"/s/a/0{PATH}", [1])]:
            answer = await client.post(path, json=sent)
            found.append((answer.status_code, answer.json()["error"]["status"]))
        wrong = await client.get(f"/s/a/0{PATH}")
        assert wrong.json()["error"]["code"] == 405
        return found

    assert run(tmp_path / "ds", engine, main, unassigned="refuse") == [
        (403, "PERMISSION_DENIED"),
        (400, "INVALID_ARGUMENT"),
        (400, "INVALID_ARGUMENT"),
    ]


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
def test_a_stream_is_events_or_one_array_also_where_the_engine_breaks_it_off(tmp_path, alt):
    app = SpokenEngine()
    app.said = ANSWERS["calls"]
    path = f"/s/a/0/v1beta/models/fake:streamGenerateContent{alt}"

    def read(answer):
        kind = answer.headers["content-type"]
        if not alt:
            assert kind.startswith("application/json")
            return answer.json()
        assert kind.startswith("text/event-stream")
        events = [event for event in answer.text.split("\n\n") if event]
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def main(_, client):
        body = {"contents": CONTENTS} | THOUGHTS
        whole = read(await client.post(path, json=body))
        app.dies_after = 4
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(path, json=body)
        return whole

    with running(app) as app.url:
        whole = run(tmp_path / "ds", app, main)
    assert [answer["candidates"][0].get("finishReason") for answer in whole[-2:]] == [None, "STOP"]
    assert rows(tmp_path / "ds", "stop_reason")[1]["stop_reason"] == "error"


def test_a_stream_that_the_engine_breaks_off_is_no_complete_answer(tmp_path):
    app = SpokenEngine(dies_after=3)
    app.said = ANSWERS["text"]

    async def main(spoken, _):
        with pytest.raises(aiohttp.ClientPayloadError):
            await streamed(spoken)

    with running(app) as app.url:
        run(tmp_path / "ds", app, main)
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("error", "It is sunny.")


def test_a_stream_that_the_client_leaves_is_a_step_with_what_was_sampled(tmp_path):
    app = SpokenEngine(gap_s=0.1)
    app.said = {"content": "It is sunny."}

    async def main(spoken, client):
        has_begun = asyncio.Event()

        async def read():
            async for answer in await spoken.models.generate_content_stream(**ASK):
                assert answer.text == "It is "
                has_begun.set()

        reading = asyncio.create_task(read())
        await has_begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while not app.num_left:
            await asyncio.sleep(0.02)
        while not (await client.get("/s/a/0")).json()["calls"]:
            await asyncio.sleep(0.02)

    with running(app) as app.url:
        run(tmp_path / "ds", app, main)
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("abort", "It is ")


def test_tokens_are_counted_by_the_engine_whatever_the_form_of_the_request(engine, tmp_path):
    async def main(spoken, client):
        exact = await spoken.models.count_tokens(model="fake", contents=CONTENTS)
        wrapped = {"generateContentRequest": {"contents": CONTENTS, "tools": [LS]}}
        path = "/s/a/0/v1beta/models/fake:countTokens"
        more = await client.post(path, json=wrapped)
        return exact.total_tokens, more.json()["totalTokens"]

    number, more = run(tmp_path / "ds", engine, main)
    assert number == len(json.dumps(call_of().chat["messages"])) + len("[]")
    assert more > number
    assert not list((tmp_path / "ds").glob("part-*"))


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models/fake:generateContent",
        "/v1beta1/models/fake:generateContent",
        "/v1/models/fake:generateContent",
        "/models/fake:generateContent",
        "/v1beta1/publishers/google/models/fake:generateContent",
        "/v1beta1/projects/p/locations/l/publishers/google/models/fake:generateContent",
        "/v1beta/models/org%2Ffake:generateContent",
        "/v1beta/models/org/fake:generateContent",
        "/checker/v1beta/models/fake:generateContent",
    ],
)
def test_every_path_that_clients_use_is_served(engine, tmp_path, path):
    async def main(_, client):
        answer = await client.post(f"/s/a/0{path}", json={"contents": CONTENTS})
        assert answer.status_code == 200
        return answer.json()["modelVersion"]

    name = "org/fake" if "org" in path else "fake"
    assert run(tmp_path / "ds", engine, main) == engine.requests[0]["model"] == name
    (row,) = rows(tmp_path / "ds", "agent", "response_ids")
    assert row.get("agent") == ("checker" if "checker" in path else None)


def test_the_client_of_vertex_is_served_too(engine, tmp_path):
    async def main(_, client):
        options = types.HttpOptions(base_url=f"{client.root}/s/b/0", api_version="v1beta1")
        vertex = genai.Client(vertexai=True, api_key="k", http_options=options)
        answer = await vertex.aio.models.generate_content(model="fake", contents="Hi.")
        assert answer.text == "Hello."
        await client.post("/s/b/0/end", json={"reward": 0.5})

    run(tmp_path / "ds", engine, main)
    assert outcomes(tmp_path / "ds")["b_0"] == (0.5, None)


def test_a_key_in_the_header_of_the_api_names_a_session(engine, tmp_path):
    async def main(_, client):
        headers = {"x-goog-api-key": "sk-rollouts-b/1"}
        answer = await client.post(PATH, json={"contents": CONTENTS}, headers=headers)
        assert answer.status_code == 200
        assert "authorization" not in engine.headers[-1]
        assert (await client.get("/s/b/1")).json()["calls"] == 1

    run(tmp_path / "ds", engine, main)
