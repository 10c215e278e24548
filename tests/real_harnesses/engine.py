"""An engine without a model, which real harnesses talk to; it keeps every request with its answer.

It speaks Anthropic's Messages, OpenAI's Responses and chat completions, and Gemini's contents, each
streamed or not. The last instruction that holds a line `CALL Tool {...}` says what is called: one
line at a time, except that calls joined by ` AND ` are made in one answer. Every answer has a text
and, where the API has them, a thought of its own, so that it can be found in logs. The requests are
an independent witness of what the model was sent.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

CALL = re.compile(r"CALL (\w+) (\{.*?\})(?= AND |$)", re.MULTILINE)
USAGE = {"input_tokens": 10, "output_tokens": 5}


@dataclass
class Exchange:
    """A request, and the parts of the answer to it."""

    path: str
    request: dict[str, Any]
    text: str
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


def texts_in(value: Any) -> list[str]:
    """Return the texts of a message's content, whatever the API."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for each in value for text in texts_in(each)]
    return (
        texts_in(value.get("text") or value.get("parts") or "") if isinstance(value, dict) else []
    )


def planned(turns: list[tuple[str, bool, str]]) -> list[dict[str, Any]]:
    """Return the calls of the next answer.

    Args:
        turns: (role, whether it has results of tools, text) of each message.
    """
    lines: list[list[dict[str, Any]]] = []
    num_done = 0
    was_result = False
    for role, has_results, text in turns:
        num_done += has_results and not was_result
        was_result = has_results
        asked = [line for line in text.split("\n") if "CALL " in line]
        if role == "user" and asked and not has_results:
            matches = [CALL.findall(line) for line in asked]
            lines = [[{"name": n, "input": _json(a)} for n, a in each] for each in matches]
            num_done = 0
    return lines[num_done] if num_done < len(lines) else []


def _json(text: str) -> Any:
    """Return the arguments of a call; none where a harness quotes a prompt, as for a title."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


class Engine(ThreadingHTTPServer):
    """The server; `exchanges` are the requests that it answered, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.exchanges: list[Exchange] = []
        self.numbers, self.called = count(), threading.Event()

    @property
    def url(self) -> str:
        """URL without a path."""
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, request: dict[str, Any], turns: list[Any]) -> Exchange:
        """Decide on an answer, and keep it with its request."""
        number = next(self.numbers)
        asked = planned(turns) if request.get("tools") else []  # none for a summary or a title
        calls = [call | {"id": f"toolu_{number:06}_{i}"} for i, call in enumerate(asked)]
        text = f"This is answer number {number}."
        made = Exchange(path, request, text, f"This is thought number {number}.", calls)
        self.exchanges.append(made)
        return made

    def start(self) -> Engine:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Engine

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send("application/json", json.dumps(value).encode())

    def _events(self, events: list[Any], *, is_named: bool = True, end: str = "") -> None:
        lines = [
            (f"event: {e['type']}\n" if is_named else "") + f"data: {json.dumps(e)}\n\n"
            for e in events
        ]
        self._send("text/event-stream", ("".join(lines) + end).encode())

    def do_HEAD(self) -> None:
        """Answer a check that the server is there."""
        self._send("text/plain", b"")

    def do_GET(self) -> None:
        """Answer a request for the list of models."""
        self._json({"object": "list", "data": []})

    def do_POST(self) -> None:
        """Answer a request for the model."""
        body = self._body()
        try:
            request = json.loads(body)
        except ValueError:
            request = {}
        path = self.path.partition("?")[0]
        if path.endswith(("/count_tokens", ":countTokens")):
            self._json({"input_tokens": 10, "totalTokens": 10})
        elif path.endswith("/messages") and "messages" in request:
            self._messages(request)
        elif path.endswith("/responses"):
            self._responses(request)
        elif path.endswith("/chat/completions"):
            self._chat(request)
        elif "enerateContent" in path:
            self._gemini(request)
        else:
            self._json({})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        encoding = self.headers.get("Content-Encoding")
        if encoding == "zstd":
            import zstandard

            return zstandard.ZstdDecompressor().decompressobj().decompress(body)
        return gzip.decompress(body) if encoding == "gzip" else body

    def _messages(self, request: dict[str, Any]) -> None:
        turns = []
        for message in request["messages"]:
            content = message["content"]
            blocks = [] if isinstance(content, str) else content
            has_results = any(block.get("type") == "tool_result" for block in blocks)
            turns.append((message["role"], has_results, "\n".join(texts_in(content))))
        made = self.server.answer(self.path, request, turns)
        blocks = [{"type": "thinking", "thinking": made.thought, "signature": "c2ln"}]
        if request.get("thinking", {}).get("type", "disabled") == "disabled":
            blocks, made.thought = [], ""
        blocks.append({"type": "text", "text": made.text})
        blocks += [{"type": "tool_use", **call} for call in made.calls]
        reason = "tool_use" if made.calls else "end_turn"
        number = next(self.server.numbers)
        message = {"id": f"msg_{number:016}", "type": "message", "role": "assistant"}
        message |= {"model": request["model"], "usage": USAGE, "content": blocks}
        message |= {"stop_reason": reason, "stop_sequence": None}
        if not request.get("stream"):
            return self._json(message)
        start = message | {"content": [], "stop_reason": None}
        events: list[Any] = [{"type": "message_start", "message": start}]
        for i, block in enumerate(blocks):
            empty, deltas = _streamed(block)
            events.append({"type": "content_block_start", "index": i, "content_block": empty})
            events += [{"type": "content_block_delta", "index": i, "delta": d} for d in deltas]
            events.append({"type": "content_block_stop", "index": i})
        end = {"stop_reason": reason, "stop_sequence": None}
        events.append({"type": "message_delta", "delta": end, "usage": USAGE})
        events.append({"type": "message_stop"})
        self._events(events)
        if made.calls:
            self.server.called.set()
        return None

    def _responses(self, request: dict[str, Any]) -> None:
        items = request.get("input") or []
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        turns = [
            (
                item.get("role", "assistant"),
                str(item.get("type", "")).endswith("_output"),
                "\n".join(texts_in(item.get("content") or "")),
            )
            for item in items
        ]
        made = self.server.answer(self.path, request, turns)
        custom = {
            tool.get("name") for tool in request.get("tools", ()) if tool.get("type") == "custom"
        }
        spaces = {
            inner["name"]: tool["name"]
            for tool in request.get("tools", ())
            if tool.get("type") == "namespace"
            for inner in tool["tools"]
        }
        number = next(self.server.numbers)
        summary = [{"type": "summary_text", "text": made.thought}]
        output: list[Any] = [{"type": "reasoning", "id": f"rs_{number}", "summary": summary}]
        content = [{"type": "output_text", "text": made.text, "annotations": []}]
        output.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
        )
        for i, call in enumerate(made.calls):
            item = {"id": f"fc_{number}_{i}", "call_id": call["id"], "name": call["name"]}
            if call["name"] in custom:
                item |= {"type": "custom_tool_call", "input": call["input"].get("input", "")}
            elif call["name"] == "tool_search":
                item = {"type": "tool_search_call", "call_id": call["id"], "execution": "client"}
                item |= {
                    "id": f"ts_{number}_{i}",
                    "arguments": call["input"],
                    "status": "completed",
                }
            else:
                item |= {"type": "function_call", "arguments": json.dumps(call["input"])}
                item |= {"namespace": spaces[call["name"]]} if call["name"] in spaces else {}
            output.append(item)
        # The number of items stands for their size, so that a harness with a limit compacts them.
        usage = {"input_tokens": 100 * len(items), "output_tokens": 0}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "total_tokens": 100 * len(items)}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        base = {"id": f"resp_{number}", "object": "response", "created_at": 1, "output": []}
        base |= {"model": request.get("model"), "status": "in_progress"}
        done = base | {"status": "completed", "output": output, "usage": usage}
        if not request.get("stream"):
            return self._json(done)
        events: list[Any] = [{"type": "response.created", "response": base}]
        for i, item in enumerate(output):
            events += [
                {"type": f"response.output_item.{name}", "output_index": i, "item": item}
                for name in ("added", "done")
            ]
        events.append({"type": "response.completed", "response": done})
        return self._events(events)

    def _chat(self, request: dict[str, Any]) -> None:
        turns = [
            (m["role"], m["role"] == "tool", "\n".join(texts_in(m.get("content") or "")))
            for m in request["messages"]
        ]
        made = self.server.answer(self.path, request, turns)
        calls = [
            {
                "index": i,
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["input"])},
            }
            for i, call in enumerate(made.calls)
        ]
        reason = "tool_calls" if calls else "stop"
        message = {"role": "assistant", "content": made.text, "reasoning_content": made.thought}
        message |= {"tool_calls": calls} if calls else {}
        num_tokens = 10 * len(request["messages"])
        usage = {
            "prompt_tokens": num_tokens,
            "completion_tokens": 5,
            "total_tokens": num_tokens + 5,
        }
        base = {"id": f"c{next(self.server.numbers)}", "created": 1, "model": request.get("model")}
        if not request.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return self._json(
                base | {"object": "chat.completion", "choices": [choice], "usage": usage}
            )
        base |= {"object": "chat.completion.chunk"}
        chunks = [
            base | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
            base
            | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage},
        ]
        return self._events(chunks, is_named=False, end="data: [DONE]\n\n")

    def _gemini(self, request: dict[str, Any]) -> None:
        turns = []
        for content in request.get("contents", ()):
            has_results = any("functionResponse" in part for part in content.get("parts", ()))
            text = "\n".join(texts_in(content.get("parts", ())))
            turns.append((content.get("role", "user"), has_results, text))
        made = self.server.answer(self.path, request, turns)
        parts: list[Any] = [{"text": made.thought, "thought": True}, {"text": made.text}]
        parts += [{"functionCall": {"name": c["name"], "args": c["input"]}} for c in made.calls]
        found = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
        usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
        answer = {"candidates": [found], "usageMetadata": usage, "modelVersion": "m"}
        if "stream" in self.path:
            return self._events([answer], is_named=False)
        return self._json(answer)


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return block | {"input": {}}, [delta]
    thought = {"type": "thinking_delta", "thinking": block["thinking"]}
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return block | {"thinking": "", "signature": ""}, [thought, signature]
