import asyncio
import json
import threading

import pytest

from pipelines.record import recorder
from pipelines.record.client import RecorderClient
from pipelines.record.sessions import key_of, path_of, target_of
from rollout_io.cli.main import run
from rollout_io.dataset.reader import read_metadata
from schemas.columns import metrics_dict
from schemas.errors import RolloutError
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.recorder_helpers import CHAT, TEXT, outcomes, recording, rows


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/s/a/0/v1/completions", ("a/0", None, None, "/v1/completions")),
        ("/s/a/0/b/v1/models", ("a/0", "b", None, "/v1/models")),
        ("/s/math%2F1/2/v1/models", ("math/1/2", None, None, "/v1/models")),
        ("/s/a/0/end", ("a/0", None, None, "/end")),
        ("/s/a/0", ("a/0", None, None, "")),
        ("/k/KEY/a/0/v1/models", ("a/0", None, "KEY", "/v1/models")),
        ("/v1/models", (None, None, None, "/v1/models")),
    ],
)
def test_a_url_names_session_agent_and_path(path, expected):
    assert target_of(path, {}) == expected


@pytest.mark.parametrize("path", ["/s/a", "/s/a/x/v1/models", "/s//0/v1", "/s/%ff/0/v1", "/s/a/00"])
def test_a_url_that_names_no_session_is_refused(path):
    with pytest.raises(RolloutError, match="session_name"):
        target_of(path, {})


def test_the_path_of_a_session_names_it_again():
    for name in ("a/0", "math/1/2", "\u00e9 %/3"):
        assert target_of(path_of(name), {}).session == name
        assert target_of(path_of(name, "KEY"), {})[::2] == (name, "KEY")


async def test_a_session_is_named_by_url_header_or_api_key_and_all_is_one_trajectory(
    engine, tmp_path
):
    async with recording(tmp_path / "ds", engine.url) as client:
        path, given = "/v1/chat/completions", {"authorization": "Bearer sk-rollouts-a/0/c"}
        assert (await client.post(f"/s/a/0{path}", json=CHAT)).status_code == 200
        await client.post(f"/s/a/0/b{path}", json=CHAT)
        await client.post(path, json=CHAT, headers=given)
        assert "authorization" not in engine.headers[-1]
        await client.post(path, json=CHAT, headers={"x-rollouts-session": "a/0/d"})
        assert "x-rollouts-session" not in engine.headers[-1]
        state = (await client.get("/s/a/0")).json()
        assert (state["state"], state["calls"], state["tokens"]) == ("open", 4, 24)
        said = {"reward": 0.5, "metrics": {"num_tests": 3}}
        ended = await client.post("/s/a/0/end", json=said)
        assert (ended.json()["state"], ended.json()["reward"]) == ("ended", 0.5)
        assert (await client.post("/s/a/0/end", json=said)).status_code in {200, 409}
        await client.recorder.flush()
        assert (await client.get("/s/a/0")).json()["state"] == "written"
        late = await client.post(f"/s/a/0{path}", json=CHAT)
        assert (late.status_code, late.json()["error"]["type"]) == (409, "session_ended")
    made = rows(tmp_path / "ds", "agent", "reward", "metrics", "messages", "trajectory_id")
    assert [row["agent"] for row in made] == [None, "b", "c", "d"]
    assert [row["reward"] for row in made] == [0.0, 0.0, 0.0, 0.5]
    assert metrics_dict(made[-1]["metrics"]) == {"num_tests": 3.0}
    assert json.loads(made[0]["messages"]) == CHAT["messages"]
    assert read_metadata(tmp_path / "ds").models == (CHAT["model"],)
    assert run(["validate", str(tmp_path / "ds")]) == 0


@pytest.mark.slow
async def test_calls_of_no_session_are_a_trajectory_each_or_refused(engine, tmp_path):
    for out, settings, status, num in (
        ("ds", {}, 200, 3),
        ("no", {"unassigned": "refuse"}, 403, 0),
        ("ds", {}, 200, 6),
    ):
        async with recording(tmp_path / out, engine.url, **settings) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", json=TEXT)
                assert answer.status_code == status
        if num:
            names = {f"unassigned_{i}": (None, None) for i in range(3)}
            assert outcomes(tmp_path / out).items() >= names.items()
            assert len(outcomes(tmp_path / out)) == num


@pytest.mark.slow
async def test_an_abandoned_session_ends_with_that_error_and_keeps_its_steps(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url, idle_timeout_s=0.2) as client:
        await client.post("/s/a/0/v1/completions", json=TEXT)
        await asyncio.sleep(0.8)
    error = "session_abandoned: no call for 0.2 s"
    assert outcomes(tmp_path / "ds") == {"a_0": (None, error)}
    assert len(rows(tmp_path / "ds", "response_ids")[0]["response_ids"]) == 6


async def test_open_sessions_wait_for_the_next_start_or_are_ended_at_the_end(engine, tmp_path):
    for num_calls, end_open in ((2, False), (1, True)):
        assert not list((tmp_path / "ds").glob("part-*"))
        async with recording(tmp_path / "ds", engine.url, end_open=end_open) as client:
            for _ in range(num_calls):
                await client.post("/s/a/0/v1/completions", json=TEXT)
    assert outcomes(tmp_path / "ds") == {"a_0": (None, None)}
    assert len(rows(tmp_path / "ds", "response_ids")) == 3
    assert [p.name for p in (tmp_path / "ds" / ".recording").iterdir()] == []


async def test_the_policy_version_is_stamped_on_calls_and_outlives_the_recorder(engine, tmp_path):
    for versions in ((None, 3, 4), (None,)):
        async with recording(tmp_path / "ds", engine.url) as client:
            for version in versions:
                if version is not None:
                    body = {"policy_version": version}
                    assert (await client.post("/policy_version", json=body)).json() == body
                await client.post("/s/a/0/v1/completions", json=TEXT)
            if len(versions) == 1:
                await client.post("/s/a/0/end", json={"reward": 1})
    stamped = [row["policy_version"] for row in rows(tmp_path / "ds", "policy_version")]
    assert stamped == [None, 3, 4, 4]


async def test_sessions_are_opened_by_the_api_numbered_where_they_are_not(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        opened = await client.post("/sessions", json={"instance_id": "a"})
        assert (opened.status_code, opened.json()["session"]) == (201, "a/0")
        assert opened.json()["base_url"] == f"{client.root}/s/a/0/v1"
        again = await client.post("/sessions", json={"instance_id": "a", "repetition_id": 0})
        assert (again.status_code, again.json()["error"]["type"]) == (409, "session_open")
        second = await client.post("/sessions", json={"instance_id": "a"})
        assert second.json()["session"] == "a/1"
        no_call = await client.post("/s/a/0/end", json={"reward": 1.0})
        assert no_call.status_code == 200
        failed = await client.post("/s/a/1/end", json={"error": "no sandbox"})
        assert failed.status_code == 200
        unknown = await client.post("/s/typo/0/end", json={"reward": 1.0})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "unknown_session")
    ended = "no_calls: the session ended without a recorded call"
    assert outcomes(tmp_path / "ds") == {"a_0": (None, ended), "a_1": (None, "no sandbox")}


@pytest.mark.parametrize("path", ["completions", "messages"])
async def test_a_session_whose_calls_the_engine_rejected_says_why(tmp_path, path):
    engine, body = FakeEngine(), TEXT if path == "completions" else CHAT | {"max_tokens": 4}
    engine.status = 400
    async with recording(tmp_path / "ds", engine) as client:
        assert (await client.post(f"/s/a/0/v1/{path}", json=body)).status_code == 400
        for _ in range(2):
            assert (await client.post("/s/a/0/end", json={"reward": 1.0})).status_code == 200
    ((reward, error),) = outcomes(tmp_path / "ds").values()
    assert (reward, error.partition(":")[0]) == (None, "no_calls")
    assert error.endswith("the last answer was an error: status 400: busy")


REFUSED = [
    ("/sessions", {}),
    ("/sessions", {"instance_id": "", "repetition_id": 0}),
    ("/sessions", {"instance_id": "a", "repetition_id": -1}),
    ("/sessions", []),
    ("/s/a/0/end", {"rewards": 1}),
    ("/s/a/0/end", {"reward": "1"}),
    ("/s/a/0/end", {"error": ""}),
    ("/s/a/0/end", {"metrics": {"reward": 1.0}}),
    ("/s/a/0/end", {"metrics": {"step_index": 1.0}}),
    ("/policy_version", {"policy_version": -1}),
]


async def test_what_the_api_does_not_take_is_a_400_that_says_so(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        await client.post("/s/a/0/v1/completions", json=TEXT)
        for path, body in REFUSED:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, body
            assert "formats.md" not in answer.json()["error"]["message"]


async def test_with_an_admin_key_a_session_can_write_to_itself_alone(engine, tmp_path):
    admin = {"authorization": "Bearer top-secret"}
    async with recording(tmp_path / "ds", engine.url, admin_key="top-secret") as client:
        body = {"instance_id": "a"}
        assert (await client.post("/sessions", json=body)).status_code == 403
        urls = [
            (await client.post("/sessions", json=body, headers=admin)).json()["url"]
            for _ in range(2)
        ]
        assert urls[0] == f"{client.root}/k/{key_of('top-secret', 'a/0')}/a/0"
        for url in urls:
            assert (await client.post(f"{url}/v1/completions", json=TEXT)).status_code == 200
        other = urls[0].replace("/a/0", "/a/1")
        for url in (other, "/s/a/1", ""):
            assert (await client.post(f"{url}/v1/completions", json=TEXT)).status_code == 403
        for url in (other, "/s/a/1"):
            assert (await client.post(f"{url}/end", json={"reward": 1})).status_code == 403
        version = {"policy_version": 1}
        assert (await client.post("/policy_version", json=version)).status_code == 403
        done = await client.post("/s/a/1/end", json={"reward": 1}, headers=admin)
        assert done.status_code == 200
    assert b"top-secret" not in b"".join(
        path.read_bytes() for path in (tmp_path / "ds").rglob("*") if path.is_file()
    )


async def test_credentials_of_clients_and_engines_are_not_written(engine, tmp_path):
    given = {"authorization": "Bearer client-secret"}
    async with recording(tmp_path / "ds", engine.url) as client:
        await client.post(
            "/s/a/0/v1/completions", json=TEXT | {"api_key": "body-secret"}, headers=given
        )
        assert engine.headers[-1]["authorization"] == "Bearer client-secret"
    async with recording(tmp_path / "ds", engine.url, upstream_api_key="key-secret") as client:
        await client.post("/s/a/0/v1/completions", json=TEXT, headers=given)
        assert engine.headers[-1]["authorization"] == "Bearer key-secret"
    written = [path.read_bytes() for path in (tmp_path / "ds").rglob("*") if path.is_file()]
    assert written
    assert b"secret" not in b"".join(written)


async def test_metrics_and_health_say_what_happened(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url) as client:
        for _ in range(2):
            await client.post("/s/a/0/v1/completions", json=TEXT)
        text = (await client.get("/metrics")).text
        for line in (
            "calls_total 2.0",
            "tokens_total 12.0",
            "drifts_total 1.0",
            "open_sessions 1.0",
        ):
            assert f"rollouts_record_{line}\n" in text
        health = (await client.get("/health")).json()
        assert (health["status"], health["open_sessions"]) == ("ok", 1)


async def test_the_helper_opens_a_session_and_ends_it_with_its_block(engine, tmp_path):
    async with recording(tmp_path / "ds", engine.url, admin_key="k") as client:
        recorder = RecorderClient(client.root, admin_key="k")
        await recorder.set_policy_version(5)
        async with recorder.session("a", 3) as session:
            await client.post(f"{session.base_url}/completions", json=TEXT)
            session.reward, session.metrics = 1.0, {"num_tests": 2.0}
        with pytest.raises(KeyError):
            async with recorder.session("a") as session:
                raise KeyError("gone")
        for reward in (float("nan"), object()):
            with pytest.raises(RolloutError, match=r"session b/.*as JSON.*reward_line"):
                async with recorder.session("b") as session:
                    session.reward = reward
        with pytest.raises(RolloutError, match="session_ended"):
            async with recorder.session("a", 3):
                pass
        with pytest.raises(RolloutError, match="admin_key"):
            await RecorderClient(client.root).set_policy_version(6)
    with pytest.raises(RolloutError, match="ClientConnectorError"):
        await recorder.set_policy_version(6)
    assert outcomes(tmp_path / "ds") == {"a_3": (1.0, None), "a_0": (None, "KeyError: 'gone'")}
    assert rows(tmp_path / "ds", "policy_version")[0] == {"policy_version": 5}


async def test_other_calls_continue_while_a_long_response_is_decoded(tmp_path, monkeypatch):
    read, reading, others_done = recorder.seen_in, threading.Event(), threading.Event()

    def slow_read(response, where):
        if where == "session long/0":
            reading.set()
            assert others_done.wait(10)
        return read(response, where)

    monkeypatch.setattr(recorder, "seen_in", slow_read)
    monkeypatch.setattr(recorder, "LONG_BYTES", 1000)
    stream = CHAT | {"stream": True}

    async with recording(tmp_path / "ds", FakeEngine()) as client:
        long = asyncio.ensure_future(client.post("/s/long/0/v1/chat/completions", json=stream))
        await asyncio.to_thread(reading.wait, 10)
        answer = await client.get("/health")
        assert (answer.status_code, long.done()) == (200, False)
        others_done.set()
        assert b"[DONE]" in (await long).content
        assert (await client.get("/s/long/0")).json()["tokens"] == 6
