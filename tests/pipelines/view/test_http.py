"""Who gets an answer from the viewer's server, and with which headers."""

import json

import httpx2
import pytest

from tests.helpers.view_helpers import Asked, bundle_in, server_of

POLICY = {"default-src 'none'", "script-src 'self'", "connect-src 'self'", "form-action 'none'"}


@pytest.fixture(scope="module")
def served(shop, tmp_path_factory):
    asked = Asked(shop)
    with server_of(asked.api, bundle_in(tmp_path_factory.mktemp("page") / "bundle")) as found:
        yield found


@pytest.fixture
def client(served):
    with httpx2.Client(base_url=served.url, timeout=30) as client:
        client.headers["X-Rollouts-Token"] = served.token
        yield client


def test_the_address_leads_to_the_page_and_the_header_to_answers(served, client):
    page = httpx2.get(served.address)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    script = httpx2.get(f"{served.url}/assets/index.js")
    assert (script.status_code, script.headers["content-type"][:15]) == (200, "text/javascript")
    answer = client.get("/api/sources")
    assert answer.status_code == 200
    assert answer.json()["datasets"][0]["num_trajectories"] == 48


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Rollouts-Token": ""},
        {"X-Rollouts-Token": "wrong"},
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
@pytest.mark.parametrize("path", ["/api/sources", "/api/datasets/d0/trajectories"])
def test_anyone_else_gets_403(client, headers, path):
    answer = client.get(path, headers=headers)
    assert answer.status_code == 403
    assert set(answer.json()) == {"error", "hint"}
    assert "shop" not in answer.text


def test_the_page_needs_the_token_too(served):
    for address in (served.url, f"{served.url}/?token=", f"{served.url}/?token=wrong"):
        assert httpx2.get(address).status_code == 403
    assert httpx2.get(served.address, headers={"Host": "evil.example"}).status_code == 403


def test_another_port_of_this_machine_is_another_origin(served, client):
    port = int(served.url.rpartition(":")[2])
    other = {"Origin": f"http://127.0.0.1:{port + 1}"}
    assert client.get("/api/sources", headers=other).status_code == 403
    same = {"Origin": served.url}
    assert client.get("/api/sources", headers=same).status_code == 200


@pytest.mark.parametrize("path", ["/api/sources", "/assets/index.css", "/api/none"])
def test_every_answer_has_the_headers_of_protection(client, path):
    headers = client.get(path).headers
    assert set(headers["content-security-policy"].split("; ")) >= POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/assets/../../app.py",
        "/assets/%2e%2e/%2e%2e/app.py",
        "//etc/passwd",
        "/api/datasets/d0/../../../etc/passwd",
        "/api/datasets/d9/trajectories",
        "/api/datasets/d0/none",
    ],
)
def test_no_path_of_a_request_is_opened(client, path):
    answer = client.get(path)
    assert answer.status_code == 400
    assert "unknown path" in answer.json()["error"] or "no dataset" in answer.json()["error"]


def test_errors_are_sentences_with_a_hint(client):
    answer = client.get("/api/datasets/d0/trajectories", params={"where": "rewrad > 0"})
    assert answer.status_code == 400
    assert answer.json()["error"].endswith("[known_column]")
    assert answer.json()["hint"].startswith("did you mean reward?")


@pytest.mark.parametrize(
    "where",
    [
        "reward IN (SELECT column_1 FROM read_csv('/etc/passwd'))",
        "1; DROP TABLE x",
        "count(*) > 0",
        "agent = 'main' --",
        "(" * 3000 + "1" + ")" * 3000 + " = 1",
    ],
)
def test_a_condition_is_an_expression_on_rows_and_nothing_else(client, where):
    answer = client.get("/api/datasets/d0/trajectories", params={"where": where})
    assert answer.status_code == 400
    assert "[condition]" in answer.json()["error"]


def test_only_labels_are_posted(client):
    assert client.post("/api/sources").status_code == 405
    assert client.get("/api/datasets/d0/labels").status_code == 405
    wrong = client.post("/api/datasets/d0/labels", content=b"column=x")
    assert wrong.status_code == 400
    deep = {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}
    assert client.post("/api/datasets/d0/labels", **deep).status_code == 400
    wrong = client.post("/api/datasets/d0/labels", json=["x"])
    assert wrong.status_code == 400


def test_labels_are_written_by_a_post(client, tmp_path):
    given = {"column": "verdict", "values": {"shop-0_1": "good"}, "out": str(tmp_path / "copy")}
    answer = client.post("/api/datasets/d0/labels", json=given)
    assert answer.json() == {"path": str(tmp_path / "copy"), "num_rows": 205}
    again = client.post("/api/datasets/d0/labels", json=given)
    assert again.status_code == 400
    assert "[out_is_free]" in again.json()["error"]
    assert json.loads(again.content)["hint"]
