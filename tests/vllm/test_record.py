import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import pytest

from pipelines.record.middleware import MOUNT
from rollout_io.cli.main import run
from schemas.columns import metrics_dict
from tests.helpers.recorder_helpers import chunks_of, recording, rows

pytestmark = pytest.mark.vllm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]
ASK = [{"role": "user", "content": "What is 2 + 3? Use the tool."}]
SAMPLED = {"model": "smollm2", "max_tokens": 24, "temperature": 1.0}
CHATS = {
    "plain": {},
    "n = 2": {"n": 2},
    "tools": {"tools": TOOLS},
    "a tool that must be called": {"tools": TOOLS, "tool_choice": "required"},
    "a named tool": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "token ids": {"return_token_ids": True},
    "a stop string": {"stop": ["."], "max_tokens": 40},
    "refused": {"top_logprobs": 2},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
OWN = ("id", "created", "system_fingerprint")


def comparable(content, is_stream):
    """What two answers to one request have in common, field for field."""
    if not is_stream:
        return without_names(json.loads(content))
    chunks = [without_names(chunk) for chunk in chunks_of(content.decode())]
    by_choice = {}  # whose turn it is when is the engine's affair
    for chunk in chunks:
        indices = [choice["index"] for choice in chunk["choices"]] if chunk != "[DONE]" else []
        add(by_choice.setdefault(tuple(indices), []), chunk)
    return chunks[-1], by_choice


def add(chunks, chunk):
    """Append a chunk; what is but text goes on the one before, as an engine cuts it where it may."""
    if chunks and is_text(chunks[-1]) and is_text(chunk):
        first, second = chunks[-1]["choices"][0], chunk["choices"][0]
        joined = {name: join(first[name], second[name]) for name in first}
        chunks[-1] = chunk | {"choices": [joined]}
    else:
        chunks.append(chunk)


def is_text(chunk):
    if chunk == "[DONE]" or len(chunk["choices"]) != 1 or "prompt_text" in chunk:
        return False
    choice = chunk["choices"][0]
    text = choice["delta"] if "delta" in choice else {"content": choice["text"]}
    return text.keys() == {"content"} and choice["finish_reason"] is None


def join(first, second):
    if isinstance(first, dict):
        return {name: join(first[name], second[name]) for name in first}
    return second if first is None or isinstance(first, int) else first + (second or type(first)())


def without_names(value):
    """Without what differs from call to call: ids, times."""
    if isinstance(value, list):
        return [without_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: None if k in OWN else without_names(v) for k, v in value.items()}


@asynccontextmanager
async def recording_inside(server, session):
    """A client of the recorder inside the engine's own server."""
    url = f"{server.url}{MOUNT}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
        yield client
        async with asyncio.timeout(30):
            while (await client.get(f"/s/{session}")).json()["state"] != "written":
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("place", ["proxy", "inside"])
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_what_a_real_engine_tells_a_client_is_the_same_through_the_recorder(
    small_server, tmp_path, stream, place
):
    num_repeated, session = 0, f"{place}-{stream}/0"
    out = tmp_path / "ds" if place == "proxy" else small_server.recorded_inside

    async def main():
        through = (
            recording(out, small_server.url)
            if place == "proxy"
            else recording_inside(small_server, session)
        )
        async with through as client:

            async def check_same(path, body, name):
                nonlocal num_repeated
                prompts = body.get("prompt")
                num_choices = len(prompts) if isinstance(prompts, list) else body.get("n", 1)
                # What is batched or cached otherwise is computed, and may be sampled, otherwise.
                for _ in range(5):
                    ours = await client.post(f"/s/{session}/{path}", json=body, timeout=120)
                    plain = await client.post(f"{small_server.url}/{path}", json=body, timeout=120)
                    assert ours.status_code == plain.status_code, name
                    is_stream = stream and plain.status_code == 200
                    found, expected = (comparable(a.content, is_stream) for a in (ours, plain))
                    if found == expected:
                        break
                    num_repeated += num_choices
                assert found == expected, name

            for number, (name, extra) in enumerate(CHATS.items()):
                if not stream and "stream_options" in extra:
                    continue
                body = {**SAMPLED, "messages": ASK, "seed": number, "stream": stream} | extra
                path = "v1/chat/completions"
                await check_same(path, body, name)
            for extra in ({}, {"n": 2}, {"logprobs": 2}, {"echo": True}, {"prompt": ["a b", "c"]}):
                body = {**SAMPLED, "prompt": "One two", "seed": 7, "stream": stream} | extra
                await check_same("v1/completions", body, extra)
            await client.post(f"/s/{session}/end", json={"reward": 1.0})

    asyncio.run(main())
    columns = ("instance_id", "response_ids", "rollout_logprobs", "reward", "error", "metrics")
    made = [row for row in rows(out, *columns) if f"{row['instance_id']}/0" == session]
    assert len(made) == (len(CHATS) - 2 + (1 if stream else 0)) + 1 + 6 + num_repeated
    assert all(len(row["response_ids"]) == len(row["rollout_logprobs"]) > 0 for row in made)
    assert metrics_dict(made[-1]["metrics"]) == {"unrecorded_calls": 1.0}
    assert run(["validate", str(out)]) == 0
