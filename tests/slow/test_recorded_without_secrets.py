"""A recorder that is killed at any moment leaves no secret in any byte of its directory.

Files are read with pyarrow and decoded with Transformers, not with the project's readers.
"""

import json
import os
import signal
import threading
import time

import httpx2
import pytest

import rollout_io
from rollout_io.cli.main import run
from tests.helpers.fake_engine import running
from tests.helpers.planted_secrets import secrets
from tests.helpers.recorder_helpers import recorder_process
from tests.helpers.redaction_helpers import Streamer, on_disk
from tests.helpers.token_engine import TokenEngine
from tests.slow.test_redacted_secrets import core

pytestmark = [pytest.mark.slow, pytest.mark.model]
PLANTED = [secret for kind, secret in secrets(64) if kind not in {"private_key", "pypi"}]


class Repeater(Streamer):
    """Samples the secrets that it was asked for, streamed token by token or not."""

    async def other(self, body, path, send):
        text = json.dumps(body.get("messages"), ensure_ascii=False)
        said = next((s for s in PLANTED if f"say {s}" in text), "nothing")
        self.script = [f"<think>So.</think>It is {said} ."]
        return await TokenEngine.other(self, body, path, send)


def ask(url, name, secret, number):
    """One call with a secret in a system prompt, in arguments, in a result and in the answer."""
    stream = number % 2 == 0
    call = {"id": "c", "type": "function"}
    call["function"] = {"name": "sh", "arguments": json.dumps({"cmd": f'echo "{secret}"'})}
    chat = [
        {"role": "system", "content": f"The key is {secret} ."},
        {"role": "user", "content": f"Please say {secret} now."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f"{secret}\\n"},
    ]
    paths = {
        "v1/chat/completions": {"messages": chat},
        "v1/messages": {"messages": chat[1:2], "system": chat[0]["content"], "max_tokens": 99},
        "v1/responses": {"input": chat[1]["content"], "instructions": chat[0]["content"]},
    }
    path = list(paths)[number % 3]
    body = {"model": "fake", "stream": stream} | paths[path]
    return httpx2.post(f"{url}/s/{name}/{path}", json=body, timeout=60).text


def load(url, number, stop, got):
    while not stop.is_set():
        try:
            secret = PLANTED[number % len(PLANTED)]
            text = ask(url, f"k{number}/0", secret, number)
            got.append((secret, text))
            httpx2.post(f"{url}/s/k{number}/0/end", json={"reward": 1.0}, timeout=60)
        except httpx2.HTTPError:
            return
        number += 1


def test_a_killed_recorder_leaves_no_secret_and_its_successor_neither(
    tmp_path, tokenizer, smollm2_dir
):
    out, got = tmp_path / "ds", []
    with running(Repeater(tokenizer, [])) as engine:
        options = ("--upstream", engine, "--redact", "--tokenizer", str(smollm2_dir))
        for i in range(4):
            with recorder_process(out, *options) as (process, url):
                stop, enough = threading.Event(), len(got) + 14
                thread = threading.Thread(target=load, args=(url, 1000 * i, stop, got))
                thread.start()
                while len(got) < enough:
                    assert thread.is_alive()
                    time.sleep(0.01)
                time.sleep(0.05 * i)
                os.kill(process.pid, signal.SIGKILL)
                stop.set()
                thread.join()
            check(out, tokenizer)
        with recorder_process(out, *options, "--end-open") as (_, url):
            assert url
    check(out, tokenizer)
    assert all(
        core(secret) in text.replace("\\", "") for secret, text in got if '"delta"' not in text
    )
    assert run(["validate", str(out)]) == 0
    found = rollout_io.read(out)
    assert found.num_rows >= len(got)
    marks = [any(row) for row in found["redacted"].to_pylist()]
    assert sum(marks) >= 0.98 * len(marks)


def check(out, tokenizer):
    found = on_disk(out, tokenizer)
    left = [secret for secret in PLANTED if core(secret) in found]
    assert not left, left
