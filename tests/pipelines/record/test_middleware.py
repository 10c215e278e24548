import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import anthropic
import httpx2
import pytest
from starlette.applications import Starlette

from pipelines.record.client import RecorderClient
from pipelines.record.middleware import MOUNT, AppResponse, RecordingMiddleware, settings_of
from schemas.errors import ConfigError
from tests.conftest import ROOT
from tests.helpers.fake_engine import FakeEngine, recorded_inside, running
from tests.helpers.recorder_helpers import CHAT, TEXT, outcomes, rows

PATHS = {"chat/completions": CHAT, "completions": TEXT}


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """Serves an engine that records inside its own server, into `ds`; its URL."""

    @contextmanager
    def serve(engine, **settings):
        for name, value in {"out": tmp_path / "ds", "flush_s": 0.05, **settings}.items():
            monkeypatch.setenv(f"ROLLOUTS_RECORD_{name.upper()}", str(value))
        with running(recorded_inside(engine), lifespan="on") as url:
            yield url

    return serve


def left_by(engine):
    """Waits until a client's absence was noticed."""

    async def wait():
        async with asyncio.timeout(20):
            while not engine.num_left:
                await asyncio.sleep(0.005)

    return wait()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_sees_byte_for_byte_what_the_engine_would_have_told_it(
    inside, tmp_path, path, stream
):
    async def main(url):
        async with httpx2.AsyncClient(base_url=url) as client:
            for extra in (
                {},
                {"n": 2},
                {"logprobs": True},
                {"n": "two"},
                {"messages": 3, "prompt": 3},
            ):
                body = PATHS[path] | {"stream": stream} | extra
                plain = await client.post(f"/v1/{path}", json=body)
                ours = await client.post(f"{MOUNT}/s/a/0/v1/{path}", json=body)
                assert ours.content == plain.content, extra
                assert ours.status_code == plain.status_code
                assert ours.headers["content-type"] == plain.headers["content-type"]
            ended = await client.post(f"{MOUNT}/s/a/0/end", json={"reward": 1.0})
            assert ended.status_code == 200

    engine = FakeEngine()
    with inside(engine) as url:
        asyncio.run(main(url))
    assert any("return_token_ids" in body for body in engine.requests)
    made = rows(tmp_path / "ds", "prompt_token_ids", "response_ids", "rollout_logprobs", "reward")
    assert (
        len(made) == 4
    )  # the calls below the mount that the engine answered, one of them with two
    for row in made:
        assert row["prompt_token_ids"] == [ord(c) % 1000 + 3 for c in "hello"]
        letters = [chr(token - 3) for token in row["response_ids"]]
        expected = [-0.25 - ord(c) / 1000 for c in letters]
        assert row["rollout_logprobs"] == pytest.approx(expected, abs=1e-6)
    assert made[-1]["reward"] == 1.0


def test_other_paths_reach_the_engine_and_are_not_recorded(inside, tmp_path):
    engine = FakeEngine()
    with inside(engine) as url, httpx2.Client(base_url=url) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert (
            client.post("/recorders", json=CHAT).json()["error"]["code"] == 400
        )  # the engine says it
        assert client.get(f"{MOUNT}/health").json()["status"] == "ok"
        assert client.get(f"{MOUNT}/v1/models").json()["data"][0]["id"] == "fake"
        assert client.get(f"{MOUNT}/nothing").json()["error"]["type"] == "no_such_path"
    assert engine.requests == [CHAT]
    assert not list((tmp_path / "ds").glob("*.parquet"))


def test_sessions_are_opened_at_the_address_that_the_client_uses(inside, tmp_path):
    async def main(url):
        client = RecorderClient(f"{url}{MOUNT}")
        async with client.session("math/12") as session, httpx2.AsyncClient() as http:
            assert session.base_url == f"{url}{MOUNT}/s/math%2F12/0/v1"
            await http.post(f"{session.base_url}/chat/completions", json=CHAT)
            session.reward = 0.5

    with inside(FakeEngine()) as url:
        asyncio.run(main(url))
    assert outcomes(tmp_path / "ds") == {"math/12_0": (0.5, None)}


def test_the_apis_of_other_harnesses_are_served_too(inside, tmp_path):
    with inside(FakeEngine(), end_open="true") as url:
        api = anthropic.Anthropic(base_url=f"{url}{MOUNT}/s/a/0", api_key="none")
        asked = {"model": "fake", "max_tokens": 8, "messages": CHAT["messages"]}
        text = api.messages.create(**asked).content[0].text
        with api.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
    assert streamed == text[:1] + text[2:]  # the engine's parser keeps the second token to itself
    for row in rows(tmp_path / "ds", "response_ids"):
        assert "".join(chr(token - 3) for token in row["response_ids"]) == text


def test_what_was_sampled_is_recorded_of_a_call_whose_client_leaves(inside, tmp_path):
    async def main(url):
        async with httpx2.AsyncClient(base_url=url) as client:
            body = CHAT | {"stream": True}
            path = f"{MOUNT}/s/a/0/v1/chat/completions"
            async with client.stream("POST", path, json=body) as answer:
                parts, seen = answer.aiter_raw(), b""
                while seen.count(b"data:") < 4:  # the first has no token
                    seen += await anext(parts)
            await left_by(engine)
            await client.post(f"{MOUNT}/s/a/0/end", json={"reward": 0.0})

    engine = FakeEngine(num_tokens=200, gap_s=0.02)
    with inside(engine) as url:
        asyncio.run(main(url))
    (row,) = rows(tmp_path / "ds", "response_ids", "stop_reason")
    assert row["stop_reason"] == "abort"
    assert 0 < len(row["response_ids"]) < 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_within_a_stream_ends_it_and_what_it_sampled_is_recorded(
    inside, tmp_path, caplog
):
    with inside(FakeEngine(dies_after=4)) as url, httpx2.Client(base_url=url) as client:
        path = f"{MOUNT}/s/a/0/v1/chat/completions"
        with (
            pytest.raises(httpx2.RemoteProtocolError),
            client.stream("POST", path, json=CHAT | {"stream": True}) as answer,
        ):
            answer.read()
        client.post(f"{MOUNT}/s/a/0/end", json={"reward": 0.0})
    (row,) = rows(tmp_path / "ds", "response_ids", "stop_reason")
    assert (len(row["response_ids"]), row["stop_reason"]) == (3, "error")
    assert "the engine's application failed" in caplog.text


def test_calls_of_64_sessions_at_once_are_each_a_row(inside, tmp_path):
    async def main(url):
        limits = httpx2.Limits(max_connections=64)
        async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=60) as client:

            async def session(i):
                for n in range(3):
                    body = CHAT | {"stream": n != 1, "seed": n}
                    path = f"{MOUNT}/s/t{i}/0/v1/chat/completions"
                    assert (await client.post(path, json=body)).status_code == 200
                await client.post(f"{MOUNT}/s/t{i}/0/end", json={"reward": float(i)})

            await asyncio.gather(*(session(i) for i in range(64)))

    with inside(FakeEngine(gap_s=0.001)) as url:
        asyncio.run(main(url))
    assert outcomes(tmp_path / "ds") == {f"t{i}_0": (float(i), None) for i in range(64)}
    assert len(rows(tmp_path / "ds", "response_ids")) == 192


@pytest.mark.slow
def test_every_acknowledged_answer_survives_a_kill_of_the_server(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ROLLOUTS_RECORD_OUT": str(tmp_path / "ds"),
        "ROLLOUTS_RECORD_END_OPEN": "true",
    }
    command = [sys.executable, "-m", "tests.helpers.fake_engine", "0", "6", "inside"]

    @contextmanager
    def server():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
            yield process, process.stdout.readline().strip()
            process.stdin.close()

    num_answers = 0
    for number in range(3):
        with server() as (process, url), httpx2.Client(base_url=url) as client:
            for n in range(3):
                body = CHAT | {"stream": n == 1, "seed": 3 * number + n}
                path = f"{MOUNT}/s/a/0/v1/chat/completions"
                num_answers += client.post(path, json=body).status_code == 200
            if number < 2:
                process.send_signal(signal.SIGKILL)
    assert num_answers == len(rows(tmp_path / "ds", "response_ids")) == 9


@pytest.mark.slow
def test_a_dataset_that_another_recorder_writes_stops_the_start(inside):
    said = []

    async def start():
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            said.append(message)

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
        await recorded_inside(Starlette())(scope, receive, send)

    with inside(FakeEngine()):
        asyncio.run(start())
    (failed,) = said
    assert failed["type"] == "lifespan.startup.failed"
    assert "[out_is_free]" in failed["message"]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("MAX_CONCURENCY", "3", "config_key"),
        ("MAX_CONCURRENCY", "0", "config_value"),
        ("ON_FULL", "ignore", "config_value"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(name, value, rule):
    given = {"ROLLOUTS_RECORD_OUT": "ds", f"ROLLOUTS_RECORD_{name}": value}
    with pytest.raises(ConfigError) as refused:
        settings_of(given)
    assert (refused.value.rule, refused.value.where) == (rule, f"ROLLOUTS_RECORD_{name}")


async def test_an_application_waits_for_a_slow_reader_and_ends_when_it_leaves():
    num_sent = 0

    async def endless(_, __, send):
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            num_sent += 1

    response = AppResponse(b"")
    await response.of(endless, {})
    before = -1
    while before != num_sent:
        before = num_sent
        await asyncio.sleep(0)
    assert num_sent < 100
    assert await response.readany() == b"x"
    response.close()
    await asyncio.wait_for(response._running, 20)


def test_requests_of_other_sites_are_refused_below_the_mount(inside):
    with inside(FakeEngine()) as url, httpx2.Client(base_url=url) as client:
        answer = client.post(
            f"{MOUNT}/s/a/0/end", json={"reward": 1}, headers={"origin": "https://evil.example"}
        )
        assert answer.json()["error"]["type"] == "foreign_origin"
        answer = client.get(f"{MOUNT}/health", headers={"host": "evil.example"})
        assert answer.json()["error"]["type"] == "foreign_host"


@pytest.mark.parametrize("when", ["before", "never"])
def test_an_engine_that_sends_no_response_is_asked_once_and_told(inside, when):
    num_runs = 0

    async def failing(*_):
        nonlocal num_runs
        num_runs += 1
        if when == "before":
            raise ValueError

    with inside(failing) as url, httpx2.Client(base_url=url, timeout=20) as client:
        answer = client.post(f"{MOUNT}/s/a/0/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "engine_down")
    assert num_runs == 1


def answered(app, path, **scope):
    """The path and root that an application below the mount sees; None: the engine gets the request."""
    seen = []

    async def recorder(inner, _, __):
        seen.append((inner["raw_path"], inner["root_path"]))

    async def engine(*_):
        seen.append(None)

    app._engine, app._recorder = engine, recorder
    given = {"type": "http", "path": path, "raw_path": path.encode()} | scope
    asyncio.run(app(given, None, None))
    return seen[0]


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/recorder", "", (b"/", "/recorder")),
        ("/recorder/s/a%2Fb/0", "", (b"/s/a%2Fb/0", "/recorder")),
        ("/api/recorder/health", "/api", (b"/health", "/api/recorder")),
        ("/recorder/health", "/api", (b"/health", "/api/recorder")),
        ("/%72ecorder/health", "", None),
        ("/recorders", "", None),
        ("/apirecorder/health", "/api", None),
        ("/v1/models", "", None),
    ],
)
def test_the_recorder_is_below_its_mount_with_and_without_a_prefix(
    monkeypatch, tmp_path, path, root, expected
):
    monkeypatch.setenv("ROLLOUTS_RECORD_OUT", str(tmp_path / "ds"))
    assert answered(RecordingMiddleware(None), path, root_path=root) == expected
