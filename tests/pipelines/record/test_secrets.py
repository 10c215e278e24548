import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.record.engine_requests import read_request
from pipelines.record.secrets import REDACTED, is_secret
from rollout_io.cli.main import run
from tests.helpers.fake_engine import FakeEngine, running
from tests.helpers.recorder_helpers import CHAT, recording, rows

CANARY = "canary-7f3a9"

SECRET = [
    *("api_key", "apikey", "apiKey", "API-KEY", "OPENAI_API_KEY", "openaiApiKey", "x-api-key"),
    *("Authorization", "proxy-authorization", "auth", "bearer", "Cookie", "set-cookie", "cookies"),
    *("extra_headers", "default_headers", "headers", "HTTPHeaders", "extra_body", "extra_query"),
    *("password", "db_password", "passwd", "client_secret", "private_key", "aws_access_key_id"),
    *("aws_secret_access_key", "AWSAccessKeyId", "X-Amz-Security-Token", "vertex_credentials"),
    *("access_token", "accessToken", "id_token", "token", "hf_token", "csrftoken", "session_key"),
    *("Ocp-Apim-Subscription-Key", "x-goog-api-key", "cache_salt", "env", "litellm_params"),
]
PLAIN = [
    *("max_tokens", "stop_token_ids", "logprob_token_ids", "allowed_token_ids", "eos_token"),
    *("return_token_ids", "skip_special_tokens", "thinking_token_budget", "truncate_prompt_tokens"),
    *("user", "metadata", "tools", "messages", "prompt", "prompt_cache_key", "author", "keyword"),
    *("chat_template_kwargs", "response_format", "safety_identifier", "seed", "logit_bias", "key"),
]


@pytest.mark.parametrize("name", SECRET)
def test_a_name_of_a_credential_is_known(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN)
def test_a_name_of_no_credential_is_left_alone(name):
    assert not is_secret(name)


SCHEMA = {
    "type": "object",
    "properties": {"api_key": {"type": "string"}, "headers": {"type": "object"}},
}
KEPT = {
    "messages": [
        {"role": "user", "content": "my token: https://a.example/?api_key=1", "name": "auth"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x;y,z?"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {"password": "p"}}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "login", "parameters": SCHEMA}}],
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "stop": ["api_key", "token"],
    "user": "u-1",
    "metadata": {"run": "7", "big": 2**70, "small": 1e-400},
    "stop_token_ids": [1, 2],
}


def recorded(body):
    asked = read_request("chat", body if isinstance(body, bytes) else json.dumps(body).encode())
    return {name: bytes(raw) for name, raw in asked.recorded().items()}


def test_what_is_no_credential_is_written_byte_for_byte():
    body = b'{"messages" : [ {"role":"user","content":"\\u00e9 token"} ],"temperature":1.50}'
    assert recorded(body) == {
        "messages": b'[ {"role":"user","content":"\\u00e9 token"} ]',
        "temperature": b"1.50",
    }
    assert {k: json.loads(v) for k, v in recorded(KEPT).items()} == json.loads(json.dumps(KEPT))


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://u:pw@a.example/x.png", "https://a.example/x.png"),
        ("https://a.example/x?sig=1&se=2#t", f"https://a.example/x?{REDACTED}"),
        ("https://a.example/x.png", "https://a.example/x.png"),
        ("data:image/png;base64,aa", "data:image/png;base64,aa"),
    ],
)
def test_of_a_url_only_what_comes_before_the_query_is_written(url, kept):
    part = {"type": "image_url", "image_url": {"url": url}}
    found = recorded({"messages": [{"role": "user", "content": [part]}]})["messages"]
    assert json.loads(found)[0]["content"][0]["image_url"]["url"] == kept


def escaped(name):
    """A JSON string in which no letter is itself."""
    return "".join(f"\\u{ord(c):04x}" for c in name)


@st.composite
def bodies(draw):
    """A body with a canary under the name of a credential, somewhere; and that it is not escaped away."""
    secret = draw(st.sampled_from(SECRET))
    inner = draw(
        st.sampled_from(
            [CANARY, [CANARY], {"a": CANARY}, {"x": [{"Authorization": CANARY}]}, [1, CANARY]]
        )
    )
    value = {secret: inner, "model": "fake"}
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(["metadata", "tools", "x", "function", "server", "properties"]))
        value = {name: draw(st.sampled_from([value, [value], [[1, value]]]))}
        if name == "properties":
            value = {"deep": {"properties": {"p": value}}}
    text = json.dumps(value)
    return text.replace(f'"{secret}"', f'"{escaped(secret)}"') if draw(st.booleans()) else text


@given(bodies())
def test_no_credential_is_written_wherever_it_is_and_however_its_name_is_spelt(text):
    assert CANARY.encode() not in b"".join(recorded(text.encode()).values())


async def test_what_a_recorder_writes_holds_no_credential_of_any_part_of_a_request(
    tmp_path, monkeypatch
):
    app, canaries = FakeEngine(), iter(range(10_000))
    monkeypatch.setenv("ROLLOUTS_UPSTREAM_API_KEY", "")

    def canary():
        return f"{CANARY}-{next(canaries)}"

    given_headers = [
        *("authorization", "x-api-key", "api-key", "cookie", "proxy-authorization", "x-auth-token"),
        *("x-goog-api-key", "x-amz-security-token", "openai-organization", "x-custom"),
    ]

    with running(app) as url:
        async with recording(tmp_path / "ds", url, admin_key=f"{CANARY}-admin") as client:
            admin = {"authorization": f"Bearer {CANARY}-admin"}
            opened = await client.post("/sessions", json={"instance_id": "a"}, headers=admin)
            base = opened.json()["base_url"]
            for stream in (False, True):
                body = CHAT | {"stream": stream, "user": "kept-user", "tools": []}
                body |= {name: canary() for name in SECRET}
                body["metadata"] = {name: {"deep": canary()} for name in SECRET}
                body["tools"].append({"type": "mcp", "headers": {"X": canary()}, "token": canary()})
                body["tools"].append({"server_url": f"https://u:{canary()}@h/?k={canary()}"})
                headers = {name: f"Bearer {canary()}" for name in given_headers}
                query = f"?api_key={canary()}&x={canary()}"
                path = f"{base}/chat/completions{query}"
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 200
                assert app.requests[-1]["extra_headers"].startswith(CANARY)
            bad = await client.post(f"{base}/no/such{query}", json=body, headers=headers)
            assert bad.status_code == 404
            app.status = 500
            await client.post(path, json=body, headers=headers)
            await client.post(path, content=json.dumps(body)[:-1], headers=headers)
            await client.post(opened.json()["url"] + "/end", json={"reward": 1.0})
            yield_now = [p.read_bytes() for p in (tmp_path / "ds").rglob("*") if p.is_file()]
            assert b"kept-user" in b"".join(yield_now)
            assert CANARY.encode() not in b"".join(yield_now)
            assert CANARY not in "".join(client.said)
            assert CANARY not in (await client.get("/metrics")).text
            assert CANARY not in bad.text
    files = [path for path in (tmp_path / "ds").rglob("*") if path.is_file()]
    assert any(path.suffix == ".parquet" for path in files)
    assert CANARY.encode() not in b"".join(path.read_bytes() for path in files)
    for row in rows(tmp_path / "ds", *["messages", "response_text", "source", "error", "metrics"]):
        assert CANARY not in str(row)


def test_a_credential_in_an_upstream_is_refused_and_not_repeated(tmp_path, capsys):
    for url in (f"http://u:{CANARY}@127.0.0.1:9/v1", f"http://127.0.0.1:9/v1?key={CANARY}"):
        assert run(["record", "--upstream", url, "--out", str(tmp_path / "ds")]) == 1
        said = capsys.readouterr().err
        assert "ROLLOUTS_UPSTREAM_API_KEY" in said
        assert CANARY not in said
