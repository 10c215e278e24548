import asyncio
import json
import re
import shutil
import time
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipelines.record.engine_requests import MODEL_APIS, ModelApi, TextRequest, read_request
from pipelines.record.engine_responses import Answer, Events
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import (
    CHAT,
    TEXT,
    asked_raw,
    outcomes,
    recording,
    request_of,
    rows,
)

PATHS = {"chat/completions": CHAT, "completions": TEXT}
EXTRAS = [
    {},
    {"n": 2},
    {"logprobs": True},
    {"return_token_ids": True},
    {"logprobs": True, "return_token_ids": True, "n": 2},
    {"stream_options": {"include_usage": True}},
    {"logprobs": None, "return_token_ids": False},
    {"logprobs": 0},
    {"unknown": {"a": [1.5, None, "\u00e9\n"]}},
    {"n": "two"},
    {"messages": 3, "prompt": 3},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_sees_byte_for_byte_what_the_engine_would_have_told_it(
    engine, tmp_path, path, stream
):
    async with recording(tmp_path / "ds", engine.url) as client:
        for extra in EXTRAS:
            body = PATHS[path] | {"stream": stream} | extra
            plain = await client.post(f"{engine.url}/v1/{path}", json=body)
            ours = await client.post(f"/s/a/0/v1/{path}", json=body)
            assert ours.content == plain.content, extra
            assert ours.status_code == plain.status_code
            assert ours.headers["content-type"] == plain.headers["content-type"]
        await client.post("/s/a/0/end", json={"reward": 1.0})
    made = rows(tmp_path / "ds", "prompt_token_ids", "response_ids", "rollout_logprobs", "reward")
    assert len(made) == 11
    for row in made:
        assert row["prompt_token_ids"] == [ord(c) % 1000 + 3 for c in "hello"]
        letters = [chr(token - 3) for token in row["response_ids"]]
        expected = [-0.25 - ord(c) / 1000 for c in letters]
        assert row["rollout_logprobs"] == pytest.approx(expected, abs=1e-6)
    assert [row["reward"] for row in made] == [0.0] * 10 + [1.0]


def test_only_what_was_not_asked_for_is_hidden():
    whole = {"choices": [{"index": 0, "token_ids": [1], "logprobs": {"content": []}}], "x": 1.50}
    content = json.dumps(whole | {"prompt_token_ids": [2]}).encode()

    def shown(**asked):
        return json.loads(Answer(content).shown(read_request("chat", json.dumps(asked).encode())))

    choice = whole["choices"][0]
    assert shown() == whole | {
        "choices": [{"index": 0, "token_ids": None, "logprobs": None}],
        "prompt_token_ids": None,
    }
    assert shown(logprobs=True)["choices"] == [choice | {"token_ids": None}]
    assert shown(return_token_ids=True)["choices"] == [choice | {"logprobs": None}]
    assert shown(return_token_ids=True)["prompt_token_ids"] == [2]


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("chat", {}, {"return_token_ids": True, "logprobs": True}),
        ("chat", {"top_logprobs": 3}, {"return_token_ids": True}),
        ("chat", {"logprobs": True, "top_logprobs": 3}, {"return_token_ids": True}),
        ("text", {"logprobs": 5}, {"return_token_ids": True}),
        ("text", {"logprobs": None}, {"return_token_ids": True, "logprobs": 0}),
        ("text", {"echo": True}, {}),
        ("text", {"use_beam_search": True}, {}),
    ],
)
def test_exact_tokens_are_asked_for_where_the_answer_can_have_them(kind, body, expected):
    asked = read_request(kind, json.dumps(body).encode())
    assert json.loads(asked.body) == body | expected


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_events_are_the_same_however_the_stream_is_cut(content, cuts):
    content = content.replace(b"a", b"\n\n").replace(b"b", b"\r\n\r\n").replace(b"c", b"\r")
    bounds = sorted({0, len(content), *(cut for cut in cuts if cut <= len(content))})
    events = Events()
    pieces = [content[a:b] for a, b in pairwise(bounds)]
    found = [event for piece in pieces for event in events.feed(piece)]
    assert b"".join([*found, events.rest()]) == content
    whole = Events()
    assert found == list(whole.feed(content))


class Writing(FakeEngine):
    """Writes its streams another way."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    async def _stream(self, made, _, send):
        body = self.write(b"".join([*self._events(made), b"data: [DONE]\n\n"]))
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})


WRITTEN = {
    "comments": lambda text: text.replace(b"data:", b": ping\ndata:"),
    "fields": lambda text: text.replace(b"data:", b"event: m\nid: 1\ndata:"),
    "fields after": lambda text: text.replace(b"\n\n", b"\nretry: 9\n\n"),
    "cr": lambda text: text.replace(b"\n", b"\r"),
    "three ends": lambda text: text.replace(b"\n\n", b"\n\n\n"),
    "lines": lambda text: text.replace(b',"obj', b',\ndata: "obj'),
    "no end": lambda text: text.partition(b"\n\ndata: [DONE]")[0],
    "no ids": lambda text: re.sub(rb'"token_ids":\[\d+\]', b'"a":0', text),
}


async def test_a_stream_is_recorded_and_hidden_however_its_events_are_written(tmp_path):
    engine = Writing(None)
    async with recording(tmp_path / "ds", engine) as client:
        for name, engine.write in WRITTEN.items():
            body = CHAT | {"stream": True}
            answer = await client.post(f"/s/{name}/0/v1/chat/completions", json=body)
            assert b'"token_ids":[' not in answer.content, name
            assert b'"logprob"' not in answer.content, name
            await client.post(f"/s/{name}/0/end", json={"reward": 1.0})
    ends = outcomes(tmp_path / "ds")
    reward, error = ends.pop("no ids_0")  # as a whole answer without ids
    assert (reward, error.partition(": ")[0]) == (None, "no_token_ids")
    assert ends == {f"{name}_0": (1.0, None) for name in WRITTEN if name != "no ids"}
    made = rows(tmp_path / "ds", "response_ids", "stop_reason")
    ends = [(len(row["response_ids"]), row["stop_reason"]) for row in made]
    assert ends == [(6, "length")] * 7 + [(0, None)]


def test_a_long_event_is_not_read_again_for_every_piece_of_it():
    events, began_s = Events(32 << 20), time.process_time()
    for _ in range(20_000):
        assert events.feed(b"x" * 1000) == []
    (event,) = events.feed(b"\n\n")
    assert len(event) == 20_000_002
    assert time.process_time() - began_s < 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "model",
            "messages",
            "prompt",
            "n",
            "stream",
            "logprobs",
            "echo",
            "return_token_ids",
            "top_logprobs",
        ]
    ),
    JSON,
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "num_lists", [1, pytest.param(20, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_no_request_gets_a_traceback_or_another_answer_than_the_engines(
    engine, tmp_path, path, num_lists
):
    async def ask(out, bodies):
        async with recording(out, engine.url) as client:
            for body in bodies:
                plain = await client.post(f"{engine.url}/v1/{path}", content=body)
                ours = await client.post(f"/s/a/0/v1/{path}", content=body)
                assert (ours.status_code, ours.content) == (plain.status_code, plain.content), body

    @settings(
        max_examples=num_lists,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.reuse, Phase.generate),  # a body that fails is small as it is
    )
    @given(
        st.lists(
            st.binary(max_size=20)
            | FIELDS.map(lambda f: json.dumps(f).encode())
            | FIELDS.map(lambda f: json.dumps(PATHS[path] | f).encode()),
            min_size=12,
            max_size=24,
        )
    )
    def fuzz(bodies):
        asyncio.run(ask(tmp_path / "ds", bodies))

    fuzz()


async def test_a_compressed_body_is_served_and_recorded_as_the_plain_one(engine, tmp_path):
    encodings = ["identity", "gzip", "br", "zstd", "gzip, zstd", "GZIP"]
    plain = json.dumps(CHAT).encode()
    async with recording(tmp_path / "ds", engine.url) as client:
        for session, encoding in enumerate(encodings):
            headers = {"content-encoding": encoding, "content-type": "application/json"}
            path, content = f"/s/a/{session}/v1/chat/completions", compressed(plain, encoding)
            answer = await client.post(path, content=content, headers=headers)
            assert (answer.status_code, engine.requests[-1]["messages"]) == (200, CHAT["messages"])
            await client.post(f"/s/a/{session}/end", json={"reward": 1.0})
    first, *others = rows(tmp_path / "ds", "messages", "prompt_token_ids")
    assert others == [first] * 5


def compressed(body, encodings):
    names = {"br": "brotli", "gzip": "gzip", "zstd": "zstd"}
    for name in encodings.lower().split(", "):
        if name in names:
            stream = pa.BufferOutputStream()
            with pa.CompressedOutputStream(stream, names[name]) as file:
                file.write(body)
            body = stream.getvalue().to_pybytes()
    return body


REFUSED = [
    ("identity", b'"%s"' % (b"x" * 2000), 413, "request_size"),
    ("compress", b"{}", 415, "body_encoding"),
    ("gzip, snappy", b"{}", 415, "body_encoding"),
    ("gzip", b"{}", 400, "compressed_body"),
    ("zstd", compressed(b"{}" * 999, "zstd")[:-3], 400, "compressed_body"),
    ("br", compressed(b" " * (1 << 20), "br"), 413, "request_size"),
]


async def test_a_body_that_is_too_long_or_cannot_be_decompressed_goes_nowhere(tmp_path):
    engine = FakeEngine()
    async with recording(tmp_path / "ds", engine, max_request_bytes=1000) as client:
        for encoding, body, status, rule in REFUSED:
            headers = {"content-encoding": encoding}
            answer = await client.post("/s/a/0/v1/chat/completions", content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, rule), encoding
    assert engine.requests == []


async def test_the_engines_errors_pass_as_they_are_and_an_engine_that_is_away_is_a_502(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("pipelines.record.serving._BACKOFF_S", 0.01)

    app = FakeEngine()
    app.status = 429
    with running(app) as url:
        async with recording(tmp_path / "ds", url) as client:
            answer = await client.post("/s/a/0/v1/completions", json=TEXT)
            assert answer.status_code == 429
            assert answer.json() == {"error": {"message": "busy", "code": 429}}
            assert len(app.requests) == 1
    async with recording(tmp_path / "away", url) as client:
        answer = await client.post("/s/a/0/v1/completions", json=TEXT)
        assert (answer.status_code, answer.json()["error"]["type"]) == (502, "engine_down")


async def test_the_model_may_have_another_name_for_clients(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url, served_model_name="ours") as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "ours"
        for stream in (False, True):
            body = TEXT | {"model": "ours", "stream": stream}
            answer = await client.post("/s/a/0/v1/completions", json=body)
            assert engine.requests[-1]["model"] == "fake"
            assert b'"model":"ours"' in answer.content
            assert b"fake" not in answer.content


async def test_no_path_leads_out_of_the_models(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        for path in ("/v1/models/../../x", "/v1/models/a/%2e%2E/%2e%2e/x"):
            request = request_of("GET", path, [("Host", "localhost")])
            assert "no_such_path" in await asked_raw(client.root, request)


async def test_more_calls_than_may_be_under_way_wait_their_turn(tmp_path):
    app = FakeEngine(gap_s=0.02)
    with running(app) as url:
        async with recording(tmp_path / "ds", url, max_concurrency=2) as client:
            calls = [client.post(f"/s/a/{i}/v1/completions", json=TEXT) for i in range(6)]
            answers = asyncio.gather(*calls)
            while len(app.requests) < 2:
                await asyncio.sleep(0.01)
            assert len(app.requests) == 2
            assert {answer.status_code for answer in await answers} == {200}


async def test_chunks_go_out_as_they_come(tmp_path):
    async with recording(tmp_path / "ds", FakeEngine(gap_s=0.05)) as client:
        body = CHAT | {"stream": True}
        async with client.stream("POST", "/s/a/0/v1/chat/completions", json=body) as answer:
            times_s = [time.monotonic() async for _ in answer.aiter_raw()]
        assert times_s[-1] - times_s[0] > 0.1


async def test_a_recorder_reads_its_own_calls_where_an_earlier_one_of_the_process_had_its(
    engine, tmp_path
):
    for num_calls in (1, 3):
        async with recording(tmp_path / "ds", engine.url) as client:
            for seed in range(num_calls):
                await client.post("/s/a/0/v1/completions", json=TEXT | {"seed": seed})
            await client.post("/s/a/0/end", json={"reward": 1.0})
        assert outcomes(tmp_path / "ds") == {"a_0": (1.0, None)}
        assert len(rows(tmp_path / "ds", "response_ids")) == num_calls
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


async def test_the_description_lists_every_route_and_its_references_lead_somewhere(
    engine, tmp_path
):
    async with recording(tmp_path / "ds", engine.url) as client:
        described = (await client.get("/openapi.json")).json()
    session = "/s/{instance}/{repetition}"
    assert {f"{method} {path}" for path, of in described["paths"].items() for method in of} == {
        *(f"post {prefix}{api.path}" for prefix in ("", session) for api in MODEL_APIS),
        *("get /v1/models", "get /health", "get /metrics", "get /openapi.json"),
        *("post /sessions", "post /policy_version", f"post {session}/end", f"get {session}"),
    }
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)))
    assert names == set(described["components"]["schemas"])


async def test_a_line_in_the_table_of_apis_adds_a_route(engine, tmp_path, monkeypatch):
    path = "/v1beta/models/{model}:completions"
    added = (*MODEL_APIS, ModelApi(path, "text", "Generate.", TextRequest))
    monkeypatch.setattr("pipelines.record.app.MODEL_APIS", added)

    async with recording(tmp_path / "ds", engine.url) as client:
        answer = await client.post("/s/a/0/checker/v1beta/models/x:completions", json=TEXT)
        assert answer.status_code == 200
        assert path in (await client.get("/openapi.json")).json()["paths"]
        await client.post("/s/a/0/end", json={"reward": 1.0})
    (row,) = rows(tmp_path / "ds", "agent", "response_ids")
    assert row["agent"] == "checker"
