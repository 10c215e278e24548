"""Secrets in recorded calls never reach the disk, and harness and engine get them unchanged."""

import asyncio
import json

import pytest

import rollout_io
from pipelines.merging.merge import merge_table, unmerge_table
from rollout_io.cli.main import run
from tests.helpers.fake_engine import running
from tests.helpers.recorder_helpers import outcomes, recording
from tests.helpers.redaction_helpers import (
    ASKED,
    CALLED,
    PATTERN,
    RESULT,
    SAID,
    SECRETS,
    Streamer,
    on_disk,
)
from tests.pipelines.record.test_exact_dialects import Chat, Messages, Responses, num_breaks

SCRIPT = (
    f'<think>Look.</think>I will.<tool_call>{{"name":"ls", "arguments":{{"p":"\\"{CALLED}\\""}}}}'
    "</tool_call>",
    f"<think>Hm.</think>It is {SAID}, I think.",
    "Bye.",
)


def with_secrets(harness):
    harness.turns[0] = {"role": "user", "content": f"Look for {ASKED}."}
    return harness


def conversation(out, tokenizer, model, harness, *, stream, look):
    """Three turns of a harness that is given secrets and sends them back; what it got."""
    app, got = Streamer(tokenizer, SCRIPT), []

    async def main(url):
        settings = {"redact": True, "patterns": PATTERN, "exact_prefix": str(model)}
        async with recording(out, url, **settings) as client:
            for _ in SCRIPT:
                path = f"/s/a/0/{harness.path_of(stream)}"
                answer = await client.post(path, json=harness.body(stream))
                assert answer.status_code == 200, answer.text
                got.append(answer.text)
                harness.take(answer.text, stream)
                last = harness.turns[-1]
                harness.turns[-1] = json.loads(json.dumps(last).replace("seen", RESULT))
                look()
            ended = {"reward": 1.0, "error": f"lost {SAID}"}
            await client.post("/s/a/0/end", json=ended)
            again = await client.post("/s/a/0/end", json=ended)
            assert again.status_code == 200, again.text
            look()

    with running(app) as url:
        asyncio.run(main(url))
    return app, got


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize(
    ("harness", "stream"),
    [
        (Chat, False),
        (Messages, True),
        *(
            pytest.param(harness, stream, marks=pytest.mark.slow)
            for harness, stream in ((Chat, True), (Messages, False), (Responses, False))
        ),
        (Responses, True),
    ],
)
def test_secrets_of_a_conversation_are_never_on_disk_and_nobody_else_misses_them(
    tmp_path, tokenizer, smollm2_dir, harness, stream
):
    out = tmp_path / "ds"

    def look():
        found = on_disk(out, tokenizer)
        assert not [secret for secret in SECRETS if secret[4:] in found]

    app, got = conversation(
        out, tokenizer, smollm2_dir, with_secrets(harness()), stream=stream, look=look
    )
    look()
    sent = json.dumps([request.get("messages") for request in app.requests])
    sent += "".join(tokenizer.decode(r["prompt"]) for r in app.requests if "prompt" in r)
    assert all(secret in sent for secret in (ASKED, CALLED, RESULT, SAID))
    assert CALLED in got[0].replace("\\", "")
    found = rollout_io.read(out)
    assert run(["validate", str(out)]) == 0
    marked = 0
    for row, text in zip(found.to_pylist(), SCRIPT, strict=True):
        whole = tokenizer.encode([text], ["a"])[0]
        assert len(row["response_ids"]) == len(whole) + 1
        for i, gone in enumerate(row["redacted"]):
            assert row["loss_mask"][i] is not gone
            assert row["rollout_logprobs"][i] == (0.0 if gone else -0.5)
        marked += any(row["redacted"])
    assert marked == 2
    assert num_breaks(found.to_pylist()) == 0
    merged = merge_table(found)
    assert merged.num_rows == 1
    names = ["prompt_token_ids", "response_ids", "loss_mask", "redacted"]
    assert unmerge_table(merged).select(names).to_pylist() == found.select(names).to_pylist()
    assert outcomes(out) == {"a_0": (None, "lost [REDACTED_3]")}
