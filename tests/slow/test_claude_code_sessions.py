"""Sessions that the real Claude Code writes: each answer follows what the model was sent for it."""

import json
import os
import re
import subprocess
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from rollout_io.formats.claude_code import ADAPTER
from schemas.messages import is_answer
from tests.conftest import ROOT
from tests.helpers.adapter_helpers import read_all

PROGRAM = ROOT / ".cache" / "claude_code" / "node_modules" / ".bin" / "claude"
CALL = re.compile(r"CALL (\w+) (\{.*\})")
REMINDER = re.compile(r"</?system-reminder>")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PROGRAM.exists(), reason=f"no {PROGRAM}: run `make test-nightly`"),
]


def texts_in(content):
    """Texts of a message's content, in order, with the results of tools and the calls' arguments."""
    if isinstance(content, str):
        return [content]
    found = []
    for block in content:
        if block["type"] == "tool_result":
            found += texts_in(block.get("content") or "")
        elif block["type"] == "tool_use":
            found.append(json.dumps(block["input"]))
        else:
            found.append(block.get("text") or block.get("thinking") or "")
    return found


def plan_of(messages):
    """The calls that the last instruction asks for, and how many of them have results."""
    calls, num_done = [], 0
    for message in messages:
        blocks = [] if isinstance(message["content"], str) else message["content"]
        num_done += sum(block["type"] == "tool_result" for block in blocks)
        said = [t for t in texts_in(message["content"]) if message["role"] == "user"]
        asked = [match for text in said for match in CALL.findall(text)]
        if asked and not any(block["type"] == "tool_result" for block in blocks):
            calls, num_done = asked, 0
    return calls[num_done:]


class Engine(ThreadingHTTPServer):
    """Answers Anthropic's API with the calls that the prompt asks for, and notes each request.

    Attributes:
        sent: (answer, messages of the request, system prompt) of each request.
        called: Set when a call has been answered.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sent, self.numbers, self.called = [], count(), threading.Event()

    def answer(self, request):
        number = next(self.numbers)
        said = f"This is answer number {number}."
        blocks = [{"type": "thinking", "thinking": f"Thought {number}.", "signature": "c2ln"}]
        blocks = blocks if request.get("thinking", {}).get("type", "disabled") != "disabled" else []
        blocks.append({"type": "text", "text": said})
        for name, arguments in plan_of(request["messages"])[:1]:
            call = {"id": f"toolu_{number:08}", "name": name, "input": json.loads(arguments)}
            blocks.append({"type": "tool_use"} | call)
        self.sent.append((said, request["messages"], request.get("system", "")))
        return blocks


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _send(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        self._send("text/plain", b"")

    def do_GET(self):
        self._send("application/json", b'{"data": []}')

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" not in request or self.path.split("?")[0].endswith("count_tokens"):
            self._send("application/json", b'{"input_tokens": 10}')
            return
        blocks = self.server.answer(request)
        usage = {"input_tokens": 10, "output_tokens": 5}
        reason = "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn"
        message = {"id": f"msg_{next(self.server.numbers):016}", "type": "message"}
        message |= {"role": "assistant", "model": request["model"], "usage": usage}
        message |= {"stop_reason": reason, "stop_sequence": None, "content": blocks}
        if not request.get("stream"):
            self._send("application/json", json.dumps(message).encode())
            return
        start = message | {"content": [], "stop_reason": None}
        events = [{"type": "message_start", "message": start}]
        for i, block in enumerate(blocks):
            empty, deltas = _streamed(block)
            events.append({"type": "content_block_start", "index": i, "content_block": empty})
            events += [{"type": "content_block_delta", "index": i, "delta": d} for d in deltas]
            events.append({"type": "content_block_stop", "index": i})
        end = {"stop_reason": reason, "stop_sequence": None}
        events.append({"type": "message_delta", "delta": end, "usage": usage})
        events.append({"type": "message_stop"})
        body = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
        self._send("text/event-stream", body.encode())
        if reason == "tool_use":
            self.server.called.set()


def _streamed(block):
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return block | {"input": {}}, [delta]
    thought = {"type": "thinking_delta", "thinking": block["thinking"]}
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return block | {"thinking": "", "signature": ""}, [thought, signature]


@pytest.fixture
def claude(tmp_path):
    """Run Claude Code in a project, with an engine; returns the engine, the logs and the runner."""
    engine = Engine()
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    (tmp_path / "project").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{engine.server_port}",
        "ANTHROPIC_AUTH_TOKEN": "x",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }

    def start(*arguments, **more):
        chosen = ["--dangerously-skip-permissions", "--model", "claude-x"]
        return subprocess.Popen(
            [PROGRAM, "-p", *arguments, *chosen],
            cwd=tmp_path / "project",
            env=environment | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(*arguments, **more):
        process = start(*arguments, **more)
        process.communicate(timeout=120)
        assert process.returncode == 0

    try:
        yield engine, tmp_path / ".claude" / "projects", ask, start
    finally:
        engine.shutdown()
        engine.server_close()


def plain(text):
    return " ".join(REMINDER.sub(" ", text).split())


def check(engine, logs):
    """Check that what precedes each answer in the rows is what the engine was sent for it."""
    found, rejected = read_all(ADAPTER, *sorted(logs.rglob("*.jsonl")))
    assert rejected == []
    trained = Counter()
    sent = {said: (messages, system) for said, messages, system in engine.sent}
    for _, trajectory in found:
        for step in trajectory.steps:
            for i, message in enumerate(step.messages):
                if i < step.num_given or not is_answer(message):
                    continue
                trained[message["content"]] += 1
                messages, system = sent[message["content"]]
                asked = [["\n".join(texts_in(system))], *(texts_in(m["content"]) for m in messages)]
                _compare([plain(t) for texts in asked for t in texts], step.messages[:i])
    assert set(trained.values()) == {1}
    return trained, found


def _compare(asked, messages):
    """Check that each logged text is in one text that was sent, in order, and that none is missing.

    Reminders may be sent before the prompt that they are logged after, and around other texts.
    """
    asked = [text for text in asked if text]
    left, at = list(asked), 0
    for message in messages:
        calls = [c["function"]["arguments"] for c in message.get("tool_calls", ())]
        parts = [message.get("reasoning_content", ""), message["content"], *calls]
        for text in filter(None, parts):
            is_reminder = "<system-reminder>" in text
            pieces = [plain(piece) for piece in text.split("\n")]
            places = [i for i, each in enumerate(asked) if _is_in(pieces, each)]
            later = [i for i in places if is_reminder or i >= at]
            assert later, f"not sent, or in another order: {text[:200]!r}"
            at = at if is_reminder else later[0]
            if asked[later[0]] in left:
                left.remove(asked[later[0]])
    rest = [text for text in left if all(text not in plain(m["content"]) for m in messages)]
    assert not rest, f"sent, but not in the row: {[text[:200] for text in rest]}"


def _is_in(pieces, text):
    compact = text.replace(" ", "")
    return all(piece.replace(" ", "") in compact for piece in pieces)


def test_a_session_that_is_resumed_compacted_and_forked(claude):
    engine, logs, ask, _ = claude
    ask('CALL Bash {"command": "echo one", "description": "x"}')
    ask("-c", "Second prompt.")
    ask("-c", "/compact")
    ask("-c", 'After it: CALL Bash {"command": "echo two", "description": "x"}')
    ask("-c", "--fork-session", "In the fork.")
    trained, found = check(engine, logs)
    assert len(found) == 2
    assert len(trained) == 6
    assert sum(sum(made.notes.values()) for _, made in found) > 0


def test_sub_agents_and_forks_of_the_context(claude):
    engine, logs, ask, _ = claude
    task = {"description": "d", "prompt": "Look around."}
    calls = [f"CALL Agent {json.dumps(task | {'subagent_type': 'general-purpose'})}"]
    calls.append(f"CALL Agent {json.dumps(task | {'subagent_type': 'fork'})}")
    ask("\n".join(calls), CLAUDE_CODE_FORK_SUBAGENT="1")
    _, found = check(engine, logs)
    ((_, trajectory),) = found
    assert [step.agent for step in trajectory.steps].count("sidechain") == 2


def test_a_message_that_is_sent_while_a_tool_runs(claude):
    engine, logs, _, start = claude
    shape = ("--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
    process = start(*shape)

    def say(text):
        message = {"role": "user", "content": text}
        process.stdin.write(json.dumps({"type": "user", "message": message}) + "\n")
        process.stdin.flush()

    wait = "until test -e queued; do sleep 0.1; done"
    say(f"CALL Bash {json.dumps({'command': wait, 'description': 'x'})}")
    assert engine.called.wait(60)
    say("Rename it too.")
    path = logs.parent.parent / "project" / "queued"
    while not any('"enqueue"' in line and "Rename" in line for line in _lines(logs)):
        assert process.poll() is None
    path.touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
    _, found = check(engine, logs)
    ((_, trajectory),) = found
    assert "Rename it too." in str(trajectory.steps[-1].messages)


def _lines(logs):
    return [line for path in logs.rglob("*.jsonl") for line in path.read_text().splitlines()]
