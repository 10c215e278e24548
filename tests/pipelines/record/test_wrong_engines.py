"""Engines that label, number or end their answers wrongly: every call is recorded or counted."""

import json

import pytest

from tests.helpers.hostile_engine import ANSWERS, DONE, ENDED, JSON_HEAD, SSE_HEAD, chunk, hostile
from tests.helpers.recorder_helpers import TEXT, asked_raw, recording, request_of, rows

WHOLE = json.dumps(json.loads(chunk("ab", [5, 6], "stop").removeprefix(b"data: "))).encode()
EVENTS = chunk("a", [5]) + ENDED + DONE
AS_JSON = JSON_HEAD + b"\r\n"


@pytest.fixture
def engine(monkeypatch):
    """Answers with its `pieces`."""
    with hostile() as server:
        monkeypatch.setitem(ANSWERS, "it", lambda: server.pieces)
        server.answer = "it"
        yield server


async def call(client, session, *, stream):
    body = json.dumps(TEXT | {"stream": stream}).encode()
    headers = [("Host", "localhost"), ("Content-Type", "application/json")]
    request = request_of("POST", f"/s/a/{session}/v1/completions", headers, body)
    answer = await asked_raw(client.root, request)
    state = (await client.get(f"/s/a/{session}")).json()
    return answer, [state[name] for name in ("calls", "unrecorded_calls", "tokens")]


async def test_a_body_is_recorded_whatever_its_content_type(tmp_path, engine):
    bodies = [SSE_HEAD, WHOLE], [SSE_HEAD, b"\n\r\n ", WHOLE], [AS_JSON, EVENTS], [SSE_HEAD, EVENTS]
    tries = [(pieces, stream) for pieces in bodies for stream in (False, True)]
    async with recording(tmp_path / "ds", engine.url) as client:
        for session, (engine.pieces, stream) in enumerate(tries):
            answer, counts = await call(client, session, stream=stream)
            assert (answer[:12], counts) == ("HTTP/1.1 200", [1, 0, 2]), (engine.pieces, stream)
            await client.post(f"/s/a/{session}/end", json={"reward": 1.0})
    made = rows(tmp_path / "ds", "response_ids", "stop_reason")
    assert [(len(row["response_ids"]), row["stop_reason"]) for row in made] == [(2, "stop")] * 8


async def test_a_stream_without_tokens_counts_as_unrecorded(tmp_path, engine):
    streams = [b"not JSON"], [b'{"object": "error"}'], [], [DONE]
    async with recording(tmp_path / "ds", engine.url) as client:
        for session, pieces in enumerate(streams):
            engine.pieces = [SSE_HEAD, *pieces]
            answer, counts = await call(client, session, stream=True)
            assert (answer[:12], counts) == ("HTTP/1.1 200", [0, 1, 0]), pieces


async def test_a_status_that_no_client_can_get_becomes_a_counted_502(tmp_path, engine):
    statuses = ("000", "001", "099", "600", "777", "999")
    tries = [(status, stream) for status in statuses for stream in (False, True)]
    async with recording(tmp_path / "ds", engine.url) as client:
        for session, (status, stream) in enumerate(tries):
            engine.pieces = [AS_JSON.replace(b"200 OK", f"{status} Odd".encode()), WHOLE]
            answer, counts = await call(client, session, stream=stream)
            assert (answer[:12], counts[:2]) == ("HTTP/1.1 502", [0, 1])
            error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
            assert (error["type"], error["code"]) == ("answer_status", 502)
            assert status in error["message"]
            assert (await client.get("/v1/models")).status_code == 502
