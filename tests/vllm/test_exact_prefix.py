import asyncio
import json
from collections import Counter

import openai
import pytest

from pipelines.drift_diagnosis import diagnose_dataset
from rollout_io.cli.main import run
from schemas.columns import metrics_dict
from tests.helpers.recorder_helpers import recording, rows

pytestmark = pytest.mark.vllm

NUM_CHATS, NUM_TURNS = 5, 4
SAMPLED = {"model": "smollm2", "temperature": 1.5, "max_tokens": 24}


async def chat(client, number, stream, **changes):
    """A conversation that only grows; the answers."""
    api = openai.AsyncOpenAI(base_url=f"{client.root}/s/chat/{number}/v1", api_key="none")
    messages, answers = (
        [{"role": "user", "content": f"Tell me a story of {number} zyxq birds."}],
        [],
    )
    for turn in range(NUM_TURNS):
        asked = {**SAMPLED, "seed": 100 * number + turn, "messages": messages} | changes
        if stream:
            parts = [part async for part in await api.chat.completions.create(**asked, stream=True)]
            assert parts[0].choices[0].delta.role == "assistant"
            assert parts[-1].choices[0].finish_reason in {"stop", "length"}
            text = "".join(part.choices[0].delta.content or "" for part in parts)
        else:
            answer = await api.chat.completions.create(**asked)
            assert answer.object == "chat.completion"
            assert answer.usage.completion_tokens <= SAMPLED["max_tokens"]
            text = answer.choices[0].message.content
        answers.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on!"}]
    await api.close()
    return answers


def recorded(out, url, model, *, exact, stream, **changes):
    """How many steps drift; the calls of the journal."""

    async def main():
        given = {"exact_prefix": str(model)} if exact else {}
        async with recording(out, url, flush_s=60, **given) as client:
            await asyncio.gather(*(chat(client, i, stream, **changes) for i in range(NUM_CHATS)))
            path = out / ".recording" / "00000" / "calls.jsonl"
            calls = [json.loads(line) for line in path.read_text().splitlines()]
            for i in range(NUM_CHATS):
                await client.post(f"/s/chat/{i}/end", json={"reward": 1.0})
            return calls

    calls = asyncio.run(main())
    assert run(["validate", str(out)]) == 0
    return sum(len(part.breaks) for part in diagnose_dataset(out)), calls


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_chats_that_drift_as_text_do_not_token_by_token(
    small_server, small_smollm2, tmp_path, stream
):
    url = small_server.url
    as_text, _ = recorded(tmp_path / "text", url, small_smollm2, exact=False, stream=stream)
    as_tokens, calls = recorded(tmp_path / "ids", url, small_smollm2, exact=True, stream=stream)
    assert as_text > 3
    assert as_tokens == 0
    sent = Counter(call["sent"] for call in calls)
    assert sent == {"first": NUM_CHATS, "tokens": NUM_CHATS * (NUM_TURNS - 1)}
    made = rows(tmp_path / "ids", "prompt_token_ids", "response_ids", "trajectory_id", "messages")
    assert len(made) == NUM_CHATS * NUM_TURNS
    for call in calls:  # what the engine says that it saw is what was recorded
        first = call["response"][0] if stream else call["response"]
        seen = first.get("prompt_token_ids") or first["choices"][0]["prompt_token_ids"]
        assert seen in [row["prompt_token_ids"] for row in made]
    assert len(json.loads(made[NUM_TURNS - 1]["messages"])) == 2 * NUM_TURNS - 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
            "field tools",
        ),
        pytest.param({"logprobs": True}, "field logprobs", marks=pytest.mark.nightly),
    ],
)
def test_what_is_not_certain_is_sent_as_it_is_and_says_why(
    small_server, small_smollm2, tmp_path, changes, reason
):
    out = tmp_path / "ds"
    _, calls = recorded(out, small_server.url, small_smollm2, exact=True, stream=False, **changes)
    sent = Counter(call["sent"] for call in calls)
    assert set(sent) <= {"first", reason}
    assert sent[reason] > 0
    metrics = [metrics_dict(row["metrics"]) for row in rows(out, "metrics") if row["metrics"]]
    assert sum(m.get("exact_prefix_fallbacks", 0) for m in metrics) == sent[reason]
