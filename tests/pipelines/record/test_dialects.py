"""What the APIs that are translated to chat completions have in common, spoken by their clients."""

import asyncio
import json

import pytest

from schemas.errors import InputError
from tests.helpers.dialect_helpers import ANSWERS, COLUMNS, SpokenEngine, check_rows
from tests.helpers.dialects import Gemini, Messages, Responses, speaking
from tests.helpers.recorder_helpers import recording, rows

# Google's client subclasses a class of aiohttp, which discourages that.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")

BOTH = [Messages(), Gemini()]
ALL = [Messages(), Responses(), Gemini()]


def each(dialects):
    return pytest.mark.parametrize("dialect", dialects, ids=lambda one: type(one).__name__)


@each(ALL)
async def test_a_client_gets_the_direct_translation_streamed_or_not_and_each_call_is_a_row(
    dialect, tmp_path
):
    engine = SpokenEngine()
    answers = {name: answer for name, answer in ANSWERS.items() if name != "nothing"}
    async with speaking(dialect, tmp_path / "ds", engine) as (spoken, _):
        for name, engine.said in answers.items():
            expected = dialect.direct(engine.said)
            assert await dialect.whole(spoken) == expected, name
            pieces = []
            streamed = await dialect.read(spoken, pieces.append)
            if (type(dialect), name) != (Messages, "a call cut short"):
                assert streamed == expected, name  # there, the client completes the arguments
            assert "".join(pieces) == engine.said.get("content", ""), name
    check_rows(
        engine,
        rows(tmp_path / "ds", *COLUMNS),
        [answer for answer in answers.values() for _ in range(2)],
    )


@each(BOTH)
async def test_an_answer_of_nothing_is_translated_too(dialect, tmp_path):
    engine = SpokenEngine()
    engine.said = ANSWERS["nothing"]
    async with speaking(dialect, tmp_path / "ds", engine) as (spoken, _):
        expected = dialect.direct(engine.said)
        assert await dialect.whole(spoken) == expected
        assert await dialect.read(spoken, print) == expected


PICTURE = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
REFUSED = {
    Messages: [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": []}, "no messages"),
        ({"messages": 3}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0.5}, "top_k"),
        ({"tool_choice": {"type": "some"}}, "some"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice without a name"),
    ],
    Responses: [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": ["function"]}]}, "['function']"),
        ({"tool_choice": {"type": {}}}, "tool_choice {}"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"truncation": "auto"}, "`truncation` 'auto'"),
        ({"include": ["message.output_text.logprobs", "cost"]}, "`include` with 'cost'"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9.5}, "max_output_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
    Gemini: [
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
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "SOME"),
        ({"tools": [{"functionDeclarations": {"name": "ls"}}]}, "functionDeclarations"),
        ({"tools": [{"functionDeclarations": ["ls"]}]}, "functionDeclarations"),
        ({"systemInstruction": {"parts": [PICTURE]}}, "system instruction"),
        ({"contents": []}, "no `contents`"),
        ({"contents": 3}, "array"),
        ({"contents": [{"role": "user", "parts": [{"text": 3}]}]}, "text"),
    ],
}


@pytest.mark.parametrize(
    ("dialect", "fields", "named"),
    [(dialect, *refused) for dialect in ALL for refused in REFUSED[type(dialect)]],
)
def test_what_cannot_be_expressed_is_refused_by_name(dialect, fields, named):
    with pytest.raises(InputError) as refused:
        dialect.call(**fields)
    assert named in str(refused.value)


KINDS = {
    Messages: {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        500: "api_error",
    },
    Responses: {400: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"},
    Gemini: {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        503: "UNAVAILABLE",
    },
}


@each(ALL)
async def test_refusals_of_the_recorder_are_errors_of_the_api_and_go_nowhere(dialect, tmp_path):
    engine, kinds = SpokenEngine(), KINDS[type(dialect)]
    key = "status" if isinstance(dialect, Gemini) else "type"
    inexpressible = dialect.body | REFUSED[type(dialect)][0][0]
    async with recording(tmp_path / "ds", engine, unassigned="refuse") as client:
        for path, body, status in (
            (dialect.path, dialect.body, 403),
            (f"/s/a/x{dialect.path}", dialect.body, 400),
            (f"/s/a/0{dialect.path}?beta=true", [1], 400),
            (f"/s/a/0{dialect.path}", inexpressible, 400),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"][key]) == (status, kinds[status])
        for status, kind in kinds.items():
            assert dialect.translated.error(status, "x")["error"][key] == kind
        wrong = await client.get(f"/s/a/0{dialect.path}")
        shape = dialect.translated.error(405, wrong.json()["error"]["message"])
        assert (wrong.status_code, wrong.json()) == (405, shape)
    assert engine.requests == []


@each(ALL)
async def test_errors_of_the_engine_are_errors_of_the_api(dialect, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.record.serving._BACKOFF_S", 0.01)
    engine = SpokenEngine()
    async with speaking(dialect, tmp_path / "ds", engine) as (spoken, client):
        for engine.status in (400, 401, 404, 429, 500, 503):
            answer = await client.post(f"/s/a/0{dialect.path}", json=dialect.body)
            assert answer.status_code == engine.status
            assert answer.json() == dialect.translated.error(engine.status, "busy")
        engine.status = 429
        with pytest.raises(dialect.refused, match="busy"):
            await dialect.whole(spoken)
        with pytest.raises(dialect.refused, match="busy"):
            await dialect.read(spoken, print)


@each(ALL)
async def test_a_stream_that_the_engine_breaks_off_is_no_complete_answer(dialect, tmp_path):
    engine, pieces = SpokenEngine(dies_after=3), []
    engine.said = ANSWERS["text"]
    async with speaking(dialect, tmp_path / "ds", engine) as (spoken, _):
        with pytest.raises(dialect.broken):
            await dialect.read(spoken, pieces.append)
    assert pieces
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("error", "It is sunny.")


@each(ALL)
async def test_a_stream_that_the_client_leaves_is_a_step_with_what_was_sampled(dialect, tmp_path):
    engine, has_begun = SpokenEngine(gap_s=0.1), asyncio.Event()
    engine.said = ANSWERS["text"]
    async with speaking(dialect, tmp_path / "ds", engine) as (spoken, client):
        reading = asyncio.create_task(dialect.read(spoken, lambda _: has_begun.set()))
        await has_begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while not (await client.get("/s/a/0")).json()["calls"] or not engine.num_left:
            await asyncio.sleep(0.005)
    (row,) = rows(tmp_path / "ds", *COLUMNS)
    assert (row["stop_reason"], row["response_text"]) == ("abort", "It is ")


@each(BOTH)
async def test_a_key_in_the_header_of_the_api_names_a_session(dialect, tmp_path):
    engine = SpokenEngine()
    async with recording(tmp_path / "ds", engine) as client:
        headers = {dialect.key: "sk-rollouts-b/1"}
        answer = await client.post(dialect.path, json=dialect.body, headers=headers)
        assert answer.status_code == 200
        assert "authorization" not in engine.headers[-1]
        assert (await client.get("/s/b/1")).json()["calls"] == 1


@each(ALL)
async def test_the_engine_gets_the_key_of_the_client_as_its_own_and_no_header_of_the_api(
    dialect, tmp_path
):
    engine = SpokenEngine()
    async with speaking(dialect, tmp_path / "ds", engine) as (spoken, _):
        await dialect.whole(spoken)
    headers = engine.headers[-1]
    assert headers["authorization"] == "Bearer k"
    assert not [name for name in headers if name.startswith(("x-api", "anthropic", "x-goog"))]


@pytest.mark.parametrize(
    ("dialect", "path", "asked", "number"),
    [
        (BOTH[0], "/v1/messages/count_tokens", BOTH[0].ask, "input_tokens"),
        (BOTH[1], "/v1beta/models/fake:countTokens", BOTH[1].body, "totalTokens"),
        (
            BOTH[1],
            "/v1beta/models/fake:countTokens",
            {"generateContentRequest": BOTH[1].body},
            "totalTokens",
        ),
    ],
)
async def test_tokens_are_counted_by_the_engine_or_estimated_with_a_header_that_says_so(
    tmp_path, dialect, path, asked, number
):
    engine = SpokenEngine()
    async with recording(tmp_path / "ds", engine) as client:
        exact = await client.post(f"/s/a/0{path}", json=asked)
        engine.counts = False
        guess = await client.post(f"/s/a/0{path}", json=asked)
    chat = dialect.call().chat
    expected = sum(len(json.dumps(chat[name])) for name in ("messages", "tools"))
    assert exact.json()[number] == expected
    assert guess.headers["x-rollouts-estimated"] == "4 bytes a token"
    assert 0 < guess.json()[number] < expected
    assert not list((tmp_path / "ds").glob("part-*"))
