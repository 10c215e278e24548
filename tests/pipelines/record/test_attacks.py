import asyncio
import json
import re
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from pipelines import http_server
from pipelines.record import sessions
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import (
    TEXT,
    asked_raw,
    outcomes,
    recorder_process,
    recording,
    request_of,
)

BODY = json.dumps(TEXT).encode()
POST = b"POST /s/a/0/v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
IN_CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(POST + LENGTH + IN_CHUNKS + b"\r\n", id="a length and chunks"),
        pytest.param(POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, id="two lengths"),
        pytest.param(POST + b"Content-Length: 5, 5\r\n\r\n" + BODY, id="a list of lengths"),
        pytest.param(POST + b"Content-Length: +5\r\n\r\n" + BODY, id="a length with a sign"),
        pytest.param(POST + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY, id="another encoding"),
        pytest.param(POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="a space"),
        pytest.param(POST + b"X: a\r\n b\r\n\r\n", id="a folded header"),
        pytest.param(POST + b"X: a\0b\r\n\r\n", id="a zero byte"),
        pytest.param(POST.replace(b"\r\n", b"\n") + LENGTH + b"\n" + BODY, id="bare line feeds"),
    ],
)
async def test_a_request_whose_end_two_servers_could_tell_differently_is_refused(
    engine, tmp_path, request_
):
    num_before = len(engine.requests)
    async with recording(tmp_path / "ds", engine.url) as client:
        assert (await asked_raw(client.root, request_)).startswith("HTTP/1.1 400 ")
        assert list(client.recorder.sessions) == []
    assert len(engine.requests) == num_before


ENDLESS = {
    "header": (POST + b"X: ", b"x" * 65536),
    "headers": (POST, b"X: y\r\n" * 10_000),
    "target": (b"GET /", b"x" * 65536),
    "chunk extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 65536),
    "trailer": (POST + IN_CHUNKS + b"X: ", b"x" * 65536),
}


@pytest.mark.slow
def test_no_request_without_an_end_makes_the_recorder_grow(tmp_path):
    def peak_mib(process):
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) >> 10

    async def send(url, head, piece):
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        for _ in range(800):
            if writer.is_closing():  # some versions of uvloop say nothing else
                raise ConnectionResetError
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 10)

    with (
        running(FakeEngine()) as engine,
        recorder_process(tmp_path / "ds", "--upstream", engine) as (process, url),
    ):
        at_first = peak_mib(process)
        for name, (head, piece) in ENDLESS.items():
            with pytest.raises(ConnectionError):
                asyncio.run(send(url, head, piece))
            assert peak_mib(process) - at_first < 20, name
        assert httpx2.get(f"{url}/health").json()["status"] == "ok"


async def test_headers_that_are_too_long_are_a_431(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        said = await asked_raw(client.root, POST + b"X: " + b"x" * (65 << 10))
        assert said.startswith("HTTP/1.1 431 ")
        assert '"type":"head_size"' in said
        good = request_of("GET", "/health", [("Host", "localhost"), ("X", "x" * (60 << 10))])
        assert (await asked_raw(client.root, good)).startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "rule"),
    [
        (b"", "head_timeout"),
        (POST, "head_timeout"),
        (POST + LENGTH + b"\r\n" + BODY[:3], "body_timeout"),
    ],
)
async def test_a_request_that_does_not_come_is_not_waited_for(
    engine, tmp_path, monkeypatch, sent, rule
):
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.2)

    async with recording(tmp_path / "ds", engine.url) as client:
        said = await asked_raw(client.root, sent)
        assert said.startswith("HTTP/1.1 408 ")
        assert f'"type":"{rule}"' in said


NAMES = [
    "..",
    "../../x",
    "a/../b",
    "a\0b",
    "a\nb",
    "\x1b[31m",
    "~",
    "%",
    "a\\b",
    "\u202e",
    "a" * 5000,
]


async def test_no_name_of_a_session_leads_to_a_file_of_its_own(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        for name in NAMES:
            path = f"/s/{quote(name, safe='')}/0"
            target = f"{path}/v1/completions"
            kind = ("Content-Type", "application/json")
            request = request_of("POST", target, [("Host", "localhost"), kind], BODY)
            assert (await asked_raw(client.root, request)).startswith("HTTP/1.1 200 ")
            end = b'{"reward": 1.0}'
            request = request_of("POST", f"{path}/end", [("Host", "localhost"), kind], end)
            assert (await asked_raw(client.root, request)).startswith("HTTP/1.1 200 ")
        assert "\x1b" not in "".join(client.said)
    assert set(outcomes(tmp_path / "ds")) == {f"{name}_0" for name in NAMES}
    files = {path.name for path in tmp_path.rglob("*")}
    assert {re.sub(r"part-.*", "part", name) for name in files} == {"ds", "part", ".recording"}


async def test_sessions_that_nobody_ends_are_bounded(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)

    async with recording(tmp_path / "ds", engine.url) as client:
        for status in (201, 201, 201, 429):
            answer = await client.post("/sessions", json={"instance_id": "a"})
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "too_many_sessions"
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 429
        assert (await client.post("/s/a/0/v1/completions", json=TEXT)).status_code == 200
        assert (await client.post("/s/a/1/end", json={"error": "gone"})).status_code == 200
        await client.recorder.flush()
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
