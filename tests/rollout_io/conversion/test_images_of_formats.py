"""Pictures in the dialects of APIs: each format's part becomes the same blob in `messages`."""

import base64
import hashlib
import json

import pytest

import rollout_io
from rollout_io.conversion.plan import Keywords
from tests.helpers.conversion_helpers import write

pytestmark = pytest.mark.model

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
BLOB = {
    "type": "image",
    "blob": f"sha256:{hashlib.sha256(PICTURE).hexdigest()}",
    "media_type": "image/png",
}
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}
TEXT = {"type": "text", "text": "See."}
IDS = [f"00000000-0000-4000-8000-{i:012d}" for i in range(4)]


def _claude_code():
    def line(i, kind, **message):
        parent = IDS[i - 1] if i else None
        about = {"uuid": IDS[i], "parentUuid": parent, "sessionId": "s", "isSidechain": False}
        return {"type": kind, **about, "timestamp": "2026-01-01T00:00:00Z", "message": message}

    call = {"type": "tool_use", "id": "c", "name": "Read", "input": {"path": "a.png"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [ANTHROPIC]}
    return [
        line(0, "user", role="user", content=[TEXT, ANTHROPIC]),
        line(1, "assistant", id="m1", role="assistant", model="m", content=[call]),
        line(2, "user", role="user", content=[result]),
        line(3, "assistant", id="m2", role="assistant", model="m", content=[TEXT]),
    ]


def _codex_cli():
    shown = {"type": "input_image", "image_url": URL}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "See."}, shown]},
        {"type": "function_call", "name": "view", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": [shown]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
    ]  # fmt: skip
    head = {"id": "s", "timestamp": "2026-01-01T00:00:00Z", "cwd": "/", "cli_version": "0.146.0"}
    lines = [("session_meta", head), *(("response_item", item) for item in items)]
    return [
        {"timestamp": "2026-01-01T00:00:00Z", "type": kind, "payload": payload}
        for kind, payload in lines
    ]


def _gemini_cli():
    inline = {"inlineData": {"mimeType": "image/png", "data": DATA}}
    response = {"id": "c", "name": "shot", "response": {"output": "shot"}, "parts": [inline]}
    result = [{"functionResponse": response}]
    call = {"id": "c", "name": "shot", "args": {}, "result": result}
    messages = [
        {"id": "1", "type": "user", "content": [{"text": "See."}, inline]},
        {"id": "2", "type": "gemini", "content": "", "toolCalls": [call]},
        {"id": "3", "type": "gemini", "content": "ok"},
    ]
    return [{"sessionId": "s", "projectHash": "p", "startTime": "", "messages": messages}]


def _openai_messages():
    shown = {"type": "image_url", "image_url": {"url": URL}}
    call = {"id": "c", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    return [
        {
            "messages": [
                {"role": "user", "content": [TEXT, shown]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": [shown]},
                {"role": "assistant", "content": "ok"},
            ]
        }
    ]


LOGS = {
    "claude_code": (_claude_code, "s.jsonl"),
    "codex_cli": (_codex_cli, "rollout-2026-01-01T00-00-00-s.jsonl"),
    "gemini_cli": (_gemini_cli, "session-s.json"),
    "openai_messages": (_openai_messages, "chat.jsonl"),
}


@pytest.mark.parametrize("format", LOGS)
def test_the_picture_of_a_user_and_of_a_tool_are_one_blob(tmp_path, smollm2_dir, format):
    made, name = LOGS[format]
    log = write(tmp_path / name, *made())
    choices = Keywords(
        format=format, tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking"
    )
    rollout_io.convert([log], tmp_path / "ds", **choices)
    row = rollout_io.read(tmp_path / "ds").to_pylist()[0]
    by_role = {m["role"]: m["content"] for m in json.loads(row["messages"]) if m["content"]}
    assert BLOB in by_role["user"]
    assert BLOB in by_role["tool"]
    assert [entry["sha256"] for entry in row["pictures"]] == [BLOB["blob"]] * 2
    (file,) = (tmp_path / "ds.blobs").iterdir()
    assert file.read_bytes() == PICTURE
    assert DATA[:100] not in row["messages"]
    assert rollout_io.check(tmp_path / "ds").is_empty()


def test_real_logs_with_images_have_their_bytes(tmp_path, smollm2_dir, harness_logs):
    folder = harness_logs.parent / "harness_logs_2026"
    if not folder.is_dir():
        pytest.skip(f"no logs in {folder}")
    choices = Keywords(tokenizer=str(smollm2_dir), chat_template="chatml_tools_thinking")
    for number, log in enumerate(
        ("nemo_gym_images/example_rollouts.jsonl", "inspect_ai/log_images_tc.json")
    ):
        path, out = folder / log, tmp_path / str(number)
        rollout_io.convert([path], out, **choices)
        found = {file.read_bytes() for file in out.with_name(f"{out.name}.blobs").iterdir()}
        text = path.read_text()
        assert found
        assert all(base64.b64encode(content).decode() in text for content in found)
