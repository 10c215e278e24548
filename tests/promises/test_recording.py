"""The recorder: what a client got is stored once, and a secret that is redacted is gone.

The pages: docs/record.md, docs/guides/.
"""

import asyncio
import json

import pytest
from transformers import AutoTokenizer

import rollout_io
from rollout_io.cli.main import run
from tests.helpers.fake_engine import FakeEngine, running, tokens_of
from tests.helpers.recorder_helpers import CHAT, recorder_process, recording

SECRET = "sk-ant-api03-" + "q8Zx1Lm4Rt7Vb2Nc5Kd9" * 4 + "AA"


def said(engine, out, *names, **settings):
    """One call a session; the recorder has ended when this returns."""

    async def ask():
        async with recording(out, engine, **settings) as client:
            answers = []
            for name in names:
                answer = await client.post(f"/s/{name}/0/v1/chat/completions", json=CHAT)
                answers.append(answer.json())
                await client.post(f"/s/{name}/0/end", json={"reward": 1.0})
            return answers

    return asyncio.run(ask())


@pytest.fixture
def engine():
    with running(FakeEngine()) as url:
        yield url


def test_a_recorded_row_has_the_ids_that_the_engine_sampled(engine, tmp_path):
    (answer,) = said(engine, tmp_path / "ds", "a")
    (row,) = rollout_io.read(tmp_path / "ds").to_pylist()
    text = answer["choices"][0]["message"]["content"]
    assert row["response_ids"] == tokens_of(text)
    assert len(row["rollout_logprobs"]) == len(row["response_ids"])
    assert row["token_source"] == "engine"


def test_the_client_gets_what_the_engine_would_have_told_it_alone(engine, tmp_path):
    (answer,) = said(engine, tmp_path / "ds", "a")
    assert answer.get("prompt_token_ids") is None
    assert answer["choices"][0].get("token_ids") is None


def test_each_session_is_a_trajectory_with_its_reward_once(engine, tmp_path):
    said(engine, tmp_path / "ds", "a", "b", "c")
    rows = rollout_io.read(tmp_path / "ds").to_pylist()
    assert sorted((row["trajectory_id"], row["reward"]) for row in rows) == [
        ("a_0", 1.0),
        ("b_0", 1.0),
        ("c_0", 1.0),
    ]


@pytest.mark.slow
def test_what_was_answered_before_a_kill_is_stored_once(engine, tmp_path):
    import httpx2

    with recorder_process(tmp_path / "ds", "--upstream", engine) as (process, url):
        for _ in range(3):
            assert httpx2.post(f"{url}/s/a/0/v1/chat/completions", json=CHAT).status_code == 200
        assert httpx2.post(f"{url}/s/a/0/end", json={"reward": 1.0}).status_code == 200
        process.kill()
    said(engine, tmp_path / "ds", "b")  # the next recorder finds what the killed one kept
    rows = rollout_io.read(tmp_path / "ds").to_pylist()
    assert [row["trajectory_id"] for row in rows].count("a_0") == 3


@pytest.mark.parametrize("header", [{"host": "evil.example"}, {"origin": "http://evil.example"}])
def test_a_page_of_another_site_cannot_use_the_recorder(engine, tmp_path, header):
    async def ask():
        async with recording(tmp_path / "ds", engine) as client:
            answer = await client.post("/s/a/0/v1/chat/completions", json=CHAT, headers=header)
            return answer.status_code

    assert asyncio.run(ask()) in {403, 421}


@pytest.mark.slow
def test_a_secret_that_is_redacted_is_in_no_byte_of_the_dataset(tmp_path, smollm2_dir):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    message = {"role": "user", "content": f"my key is {SECRET}"}
    call = {
        "session": "a/0",
        "request": {"messages": [message]},
        "response": {
            "prompt_token_ids": tokenizer.encode(message["content"]),
            "choices": [{"index": 0, "token_ids": [1], "message": {"content": "ok"}}],
        },
        "reward": 1.0,
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(call) + "\n")
    rollout_io.convert(tmp_path / "a.jsonl", tmp_path / "ds")
    arguments = ["--tokenizer", str(smollm2_dir), "--out", str(tmp_path / "clean")]
    assert run(["redact", str(tmp_path / "ds"), *arguments]) == 0
    for file in (tmp_path / "clean").rglob("*"):
        assert SECRET.encode() not in file.read_bytes()
    (row,) = rollout_io.read(tmp_path / "clean").to_pylist()
    assert SECRET not in tokenizer.decode(row["prompt_token_ids"])
