"""Sessions in all dialects at once, on a recorder that is killed: every answer is recorded once."""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter

import httpx2
import pytest

from rollout_io.cli.main import run
from tests.helpers.dialect_helpers import SpokenAnswer, SpokenEngine
from tests.helpers.fake_engine import running, tokens_of
from tests.helpers.recorder_helpers import recorder_process, recording, rows

NUM_SESSIONS = 64


class Numbered(SpokenEngine):
    """Its answers repeat the prompt, which has a number of its own, and call a tool."""

    def answer_to(self, body, path):  # noqa: ARG002
        asked = body["messages"][-1]["content"]
        said = {"reasoning": "Hm.", "content": f"<{asked}>", "tool_calls": [("ls", '{"n":1}')]}
        return SpokenAnswer(body, said, asked)


def chat(text, stream):
    messages = [{"role": "user", "content": text}]
    body = {"model": "fake", "messages": messages, "max_tokens": 9, "stream": stream}
    return "v1/chat/completions", body, b"[DONE]"


def messages(text, stream):
    _, body, _ = chat(text, stream)
    return "v1/messages", body, b"event: message_stop"


def responses(text, stream):
    return (
        "v1/responses",
        {"model": "fake", "input": text, "stream": stream},
        b"event: response.completed",
    )


def gemini(text, stream):
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    contents = [{"role": "user", "parts": [{"text": text}]}]
    return f"v1beta/models/fake:{method}", {"contents": contents}, b'"finishReason":"STOP"'


DIALECTS = (chat, messages, responses, gemini)


async def session(client, number, acknowledged, stop):
    """Calls of one session, each after the other, until told to stop."""
    for turn in range(10_000):
        if stop.is_set():
            return
        text, stream = f"{number}-{turn}", bool(turn % 2)
        path, body, end = DIALECTS[number % 4](text, stream)
        answer = await client.post(f"/s/k{number % NUM_SESSIONS}/{number}/{path}", json=body)
        is_whole = f"<{text}>".encode() in answer.content if not stream else end in answer.content
        if answer.status_code == 200 and is_whole:
            acknowledged.add(text)


def load(url, first, acknowledged, stop):
    """All sessions at once."""

    async def main():
        async with httpx2.AsyncClient(base_url=url, timeout=20) as client:
            work = [session(client, first + i, acknowledged, stop) for i in range(NUM_SESSIONS)]
            await asyncio.gather(*work, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(20, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_every_answer_that_a_session_got_is_recorded_once_whatever_its_dialect(tmp_path, num_kills):
    out, acknowledged = tmp_path / "ds", set()
    with running(Numbered()) as engine:
        for i in range(num_kills):
            with recorder_process(out, "--upstream", engine) as (process, url):
                stop, before = threading.Event(), len(acknowledged)
                given = (url, i * NUM_SESSIONS, acknowledged, stop)
                thread = threading.Thread(target=load, args=given)
                thread.start()
                while len(acknowledged) < before + 2 * NUM_SESSIONS:
                    time.sleep(0.02)
                time.sleep(0.03 * (i % 7))
                os.kill(process.pid, signal.SIGKILL)
                stop.set()
                thread.join()

        async def recover():
            async with recording(out, engine, end_open=True):
                pass

        asyncio.run(recover())
    assert run(["validate", str(out)]) == 0
    found = rows(out, "messages", "response_ids", "response_text", "token_source")
    times = Counter()
    for row in found:
        asked = json.loads(row["messages"])[-1]["content"]
        times[asked] += 1
        assert f"<{asked}>" in row["response_text"]
        assert row["response_ids"] == tokens_of(f'Hm.<{asked}>ls{{"n":1}}')
        assert row["token_source"] == "engine"
    assert acknowledged <= times.keys()
    assert set(times.values()) == {1}
    numbers = {int(text.split("-")[0]) % 4 for text in acknowledged}
    assert numbers == {0, 1, 2, 3}
    assert len(acknowledged) >= 2 * NUM_SESSIONS * num_kills
