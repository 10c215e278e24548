import asyncio
import json
from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.http_server import error_response
from pipelines.origin_guard import Guard
from schemas.errors import RolloutError
from tests.helpers.recorder_helpers import CHAT, TEXT, asked_raw, recording, request_of, rows

ROUTES = [
    ("POST", "/policy_version", {"policy_version": 99}),
    ("POST", "/sessions", {"instance_id": "evil"}),
    ("POST", "/s/a/0/end", {"reward": 1.0}),
    ("GET", "/s/a/0", None),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/v1/models", None),
    ("POST", "/v1/completions", TEXT),
    ("POST", "/s/a/0/v1/chat/completions", CHAT),
    ("POST", "/s/a/0/v1/chat/completions", CHAT | {"stream": True}),
    ("GET", "/no/such/path", None),
    ("OPTIONS", "/policy_version", None),
    ("OPTIONS", "/s/a/0/v1/chat/completions", None),
]
SET_VERSION = ("POST", "/policy_version", {"policy_version": 3})


async def status_of(client, route, headers):
    """Status and text of the answer to a request with these headers; OWN is the recorder itself."""
    method, target, body = route
    own = client.root.removeprefix("http://")
    sent = [(name, value.replace("OWN", own)) for name, value in headers]
    content = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        sent.append(("Content-Type", "application/json"))
    answer = await asked_raw(client.root, request_of(method, target, sent, content))
    return int(answer.split()[1]), answer


FOREIGN = [
    (421, "foreign_host", [("Host", "evil.example")]),
    (421, "foreign_host", [("Host", "evil.example:8100")]),
    (421, "foreign_host", [("Host", "localhost.evil.example")]),
    (421, "foreign_host", [("Host", "localhost@evil.example")]),
    (421, "foreign_host", [("Host", "192.0.2.1")]),
    (421, "foreign_host", [("Host", "0.0.0.0")]),
    (421, "foreign_host", [("Host", "[2001:db8::1]:80")]),
    (421, "foreign_host", [("Host", "2130706433")]),
    (421, "foreign_host", [("Host", "localhost, evil.example")]),
    (421, "foreign_host", [("Host", "")]),
    (400, "one_host", []),
    (400, "one_host", [("Host", "OWN"), ("Host", "evil.example")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "http://evil.example")]),
    (403, "foreign_origin", [("hOST", "OWN"), ("oRIGIN", "HTTP://EVIL")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "null")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "http://localhost:1")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "file://")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "chrome-extension://OWN")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "http://OWN.evil")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "http://OWN@evil")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Origin", "http://OWN"), ("Origin", "http://x")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Sec-Fetch-Site", "cross-site")]),
    (403, "foreign_origin", [("Host", "OWN"), ("SEC-FETCH-SITE", "same-site")]),
    (403, "foreign_origin", [("Host", "OWN"), ("Sec-Fetch-Site", "none, cross-site")]),
]


async def test_no_route_answers_a_page_of_another_site(engine, tmp_path):
    num_before = len(engine.headers)
    async with recording(tmp_path / "ds", engine.url) as client:
        for expected, rule, headers in FOREIGN:
            for route in ROUTES:
                status, answer = await status_of(client, route, headers)
                assert (status, f'"type":"{rule}"' in answer) == (expected, True), answer
                assert "access-control" not in answer.lower()
        assert client.recorder.policy_version is None
        assert list(client.recorder.sessions) == []
    assert len(engine.headers) == num_before


OWN = [
    [("Host", "OWN")],
    [("Host", "LocalHost")],
    [("Host", "localhost.:9000")],
    [("Host", "127.0.0.1")],
    [("Host", "127.8.8.8:1")],
    [("Host", "[::1]:8100")],
    [("Host", "[::FFFF:127.0.0.1]")],
    [("Host", "OWN"), ("Origin", "http://OWN")],
    [("Host", "LOCALHOST"), ("Origin", "http://localhost:80")],
    [("Host", "localhost"), ("Origin", "https://localhost")],
    [("Host", "[::1]:8100"), ("Origin", "http://[::1]:8100")],
    [("Host", "OWN"), ("Sec-Fetch-Site", "none")],
    [("Host", "OWN"), ("Sec-Fetch-Site", "same-origin")],
]


async def test_this_machine_is_answered_by_each_of_its_own_names(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        for headers in OWN:
            for route in (SET_VERSION, ("POST", "/v1/completions", TEXT)):
                assert (await status_of(client, route, headers))[0] == 200, headers
        assert client.recorder.policy_version == 3


async def test_a_link_from_another_site_may_be_followed_but_nothing_embedded(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        for mode, dest, expected in (
            ("navigate", "document", 200),
            ("navigate", "iframe", 403),
            ("no-cors", "image", 403),
        ):
            headers = [("Host", "OWN"), ("Sec-Fetch-Site", "cross-site")]
            headers += [("Sec-Fetch-Mode", mode), ("Sec-Fetch-Dest", dest)]
            assert (await status_of(client, ("GET", "/health", None), headers))[0] == expected
            assert (await status_of(client, SET_VERSION, headers))[0] == 403


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://evil.example/health", 421),
        ("http://evil.example:80/health", 421),
        ("http://evil.example?/health", 400),
        ("http://localhost@evil.example/health", 421),
        ("http://localhost/health", 200),
    ],
)
async def test_a_target_with_a_host_of_its_own_counts_as_that_host(
    engine, tmp_path, target, expected
):
    async with recording(tmp_path / "ds", engine.url) as client:
        assert (await status_of(client, ("GET", target, None), [("Host", "localhost")]))[
            0
        ] == expected


async def test_hosts_that_are_named_are_served_and_pages_of_theirs_too(engine, tmp_path):
    allowed = ("Recorder.Lan", "box")
    async with recording(tmp_path / "ds", engine.url, allowed_hosts=allowed) as client:
        for expected, headers in (
            (200, [("Host", "recorder.lan:8100")]),
            (200, [("Host", "BOX.")]),
            (200, [("Host", "box"), ("Origin", "https://box")]),
            (403, [("Host", "box"), ("Origin", "https://recorder.lan")]),
            (421, [("Host", "x.box")]),
        ):
            assert (await status_of(client, SET_VERSION, headers))[0] == expected, headers


def guard_says(host, *headers, kind="http", **settings):
    """What a guard in front of an application that answers all sends."""
    sent = []

    async def app(_, __, send):
        await send({"type": "passed"})

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": "GET", "raw_path": b"/", "headers": list(headers)}
    asyncio.run(Guard(app, host, error_response, **settings)(scope, receive, send))
    return sent[0].get("status") or sent[0]["type"]


def test_beyond_loopback_any_address_is_served_but_only_names_that_were_given():
    for name in (b"10.1.2.3:8100", b"[fe80::1]", b"0.0.0.0", b"127.0.0.1", b"localhost"):
        assert guard_says("0.0.0.0", (b"host", name)) == "passed", name
    assert guard_says("0.0.0.0", (b"host", b"recorder")) == 421
    assert guard_says("0.0.0.0", (b"host", b"recorder"), allowed_hosts=["recorder"]) == "passed"
    assert guard_says("box.lan", (b"host", b"box.lan:8100")) == "passed"


@given(st.text("lochst.127:[]@#/\\?% \tfe8", max_size=14) | st.text(max_size=6))
@example("localhost#@evil")
@example("127.0.0.1:80@evil")
def test_a_host_that_is_served_on_loopback_is_loopback_to_another_parser_too(text):
    headers = [(b"host", text.encode("latin-1", "ignore"))]
    try:
        Guard(None, "127.0.0.1", error_response).check(
            {"type": "http", "raw_path": b"/", "headers": headers}
        )
    except RolloutError:
        return
    name = urlsplit(f"http://{text}/").hostname.removesuffix(".")
    if name != "localhost":
        address = ip_address(name)
        assert (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_websockets_are_guarded_as_requests_are():
    assert guard_says("::1", (b"host", b"evil"), kind="websocket") == "websocket.close"
    assert guard_says("::1", (b"host", b"localhost"), kind="websocket") == "passed"
    foreign = [(b"host", b"localhost"), (b"origin", b"http://evil")]
    assert guard_says("::1", *foreign, kind="websocket") == "websocket.close"


OTHER_TYPES = [
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/jsonp", "text/plain; application/json", "application/json, text/plain", ""),
]


@pytest.mark.slow
async def test_the_control_api_takes_json_alone(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        for kind in (*OTHER_TYPES, None):
            headers = {} if kind is None else {"content-type": kind}
            for method, path, body in ROUTES:
                if method == "POST" and "/v1" not in path:
                    content = json.dumps(body).encode()
                    answer = await client.post(path, content=content, headers=headers)
                    found = answer.status_code, answer.json()["error"]["type"]
                    assert found == (415, "media_type"), (path, kind)
        assert client.recorder.policy_version is None
        assert list(client.recorder.sessions) == []
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            said = {"content": b'{"policy_version": 5}', "headers": {"content-type": kind}}
            assert (await client.post("/policy_version", **said)).status_code == 200


async def test_what_was_refused_left_no_trace_in_the_dataset(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        await client.post("/s/a/0/v1/completions", json=TEXT)
        foreign = {"origin": "http://evil.example"}
        for path, body in (("/s/a/0/end", {"reward": 9.0}), ("/s/b/0/v1/completions", TEXT)):
            answer = await client.post(path, json=body, headers=foreign)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "foreign_origin")
            assert "evil.example" in answer.json()["error"]["message"]
        assert any("evil.example" in line for line in client.said)
        assert "refused_total 2.0" in (await client.get("/metrics")).text
        await client.post("/s/a/0/end", json={"reward": 1.0})
    assert rows(tmp_path / "ds", "trajectory_id", "reward") == [
        {"trajectory_id": "a_0", "reward": 1.0}
    ]
