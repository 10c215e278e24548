"""Engines that label, number or end their answers wrongly: every call is recorded or counted."""

import asyncio
import json

import pytest

from tests.helpers.hostile_engine import ANSWERS, DONE, ENDED, JSON_HEAD, SSE_HEAD, chunk, hostile
from tests.helpers.recorder_helpers import TEXT, asked_raw, recording, request_of, rows

WHOLE = json.dumps(json.loads(chunk("ab", [5, 6], "stop").removeprefix(b"data: "))).encode()
EVENTS = chunk("a", [5]) + ENDED + DONE
AS_JSON = JSON_HEAD + b"\r\n"


async def call(client, i, *, stream):
    body = json.dumps(TEXT | {"stream": stream}).encode()
    headers = [("Host", "localhost"), ("Content-Type", "application/json")]
    request = request_of("POST", f"/s/a/{i}/v1/completions", headers, body)
    return await asked_raw(client.root, request)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "pieces",
    [[SSE_HEAD, WHOLE], [SSE_HEAD, b"\n\r\n ", WHOLE], [AS_JSON, EVENTS], [SSE_HEAD, EVENTS]],
    ids=["JSON as events", "blank lines and JSON as events", "events as JSON", "events"],
)
def test_a_body_is_recorded_whatever_its_content_type(tmp_path, monkeypatch, pieces, stream):
    monkeypatch.setitem(ANSWERS, "it", lambda: pieces)

    async def main(url):
        async with recording(tmp_path / "ds", url) as client:
            assert (await call(client, 0, stream=stream)).startswith("HTTP/1.1 200")
            state = (await client.get("/s/a/0")).json()
            assert (state["calls"], state["unrecorded_calls"], state["tokens"]) == (1, 0, 2)
            await client.post("/s/a/0/end", json={"reward": 1.0})

    with hostile() as engine:
        engine.answer = "it"
        asyncio.run(main(engine.url))
    (row,) = rows(tmp_path / "ds", "response_ids", "stop_reason")
    assert (len(row["response_ids"]), row["stop_reason"]) == (2, "stop")


@pytest.mark.parametrize(
    "pieces",
    [[SSE_HEAD, b"not JSON"], [SSE_HEAD, b'{"object": "error"}'], [SSE_HEAD], [SSE_HEAD, DONE]],
    ids=["text", "another object", "nothing", "an end alone"],
)
def test_a_stream_without_tokens_counts_as_unrecorded(tmp_path, monkeypatch, pieces):
    monkeypatch.setitem(ANSWERS, "it", lambda: pieces)

    async def main(url):
        async with recording(tmp_path / "ds", url) as client:
            assert (await call(client, 0, stream=True)).startswith("HTTP/1.1 200")
            state = (await client.get("/s/a/0")).json()
            assert (state["calls"], state["unrecorded_calls"]) == (0, 1)

    with hostile() as engine:
        engine.answer = "it"
        asyncio.run(main(engine.url))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("status", ["000", "001", "099", "600", "777", "999"])
def test_a_status_that_no_client_can_get_becomes_a_counted_502(
    tmp_path, monkeypatch, status, stream
):
    head = AS_JSON.replace(b"200 OK", f"{status} Odd".encode())
    monkeypatch.setitem(ANSWERS, "it", lambda: [head, WHOLE])

    async def main(url):
        async with recording(tmp_path / "ds", url) as client:
            said = await call(client, 0, stream=stream)
            assert said.startswith("HTTP/1.1 502")
            error = json.loads(said.partition("\r\n\r\n")[2])["error"]
            assert (error["type"], error["code"]) == ("answer_status", 502)
            assert status in error["message"]
            state = (await client.get("/s/a/0")).json()
            assert (state["calls"], state["unrecorded_calls"]) == (0, 1)
            models = await client.get("/v1/models")
            assert models.status_code == 502

    with hostile() as engine:
        engine.answer = "it"
        asyncio.run(main(engine.url))
