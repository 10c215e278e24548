"""Answers as vLLM does, quickly and always the same.

    python -m tests.helpers.fake_engine GAP_S NUM_TOKENS [inside]

With `inside`, it records by the middleware, whose settings are in the environment.
"""

import asyncio
import json
import sys
import threading
import time
import zlib
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from pipelines.record.middleware import RecordingMiddleware

CREATED = 1790000000


def tokens_of(text):
    """One token a character."""
    return [ord(c) % 1000 + 3 for c in text]


class FakeEngine:
    """An ASGI application.

    Attributes:
        requests: Bodies, in the order of arrival.
        headers: Of each request.
        dies_after: Chunks after which a stream breaks off; None: never.
        gap_s: Between two chunks.
        num_left: Streams whose client went away.
        max_model_len: Length of its context, as it says.
    """

    max_model_len = 4096

    def __init__(self, *, num_tokens=6, gap_s=0.0, dies_after=None, first_s=0.0):
        self.num_tokens, self.gap_s, self.dies_after = num_tokens, gap_s, dies_after
        self.first_s = first_s
        self.requests, self.headers, self.num_left = [], [], 0
        self.status, self._made = 200, {}

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        if scope["path"] == "/v1/models":
            model = {"id": "fake", "max_model_len": self.max_model_len}
            await answer(send, {"object": "list", "data": [model]})
            return
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        try:
            body = json.loads(b"".join(parts))
            if await self.other(body, scope["path"], send):
                return
            made = self.answer_to(body, scope["path"])
        except (ValueError, KeyError, TypeError, AttributeError):
            await answer(send, {"error": {"message": "no such request", "code": 400}}, 400)
            return
        self.requests.append(body)
        if self.status != 200:
            await answer(send, {"error": {"message": "busy", "code": self.status}}, self.status)
            return
        if self.first_s:
            await asyncio.sleep(self.first_s)
        if body.get("stream"):
            await self._stream(made, receive, send)
        else:
            await asyncio.sleep(self.gap_s * self.num_tokens)
            await answer(send, made.whole())

    def answer_to(self, body, path):
        is_chat = "chat" in path
        return FakeAnswer(body, text_of(body, is_chat), is_chat, self.num_tokens)

    async def other(self, *request):
        """Answers a request (body, path, send) that asks for no completion; True if it did."""
        return not request

    def _events(self, made):
        """Of one request always the same, and made once."""
        key = json.dumps([made.body, made.texts])
        if key not in self._made:
            self._made[key] = [event(chunk) for chunk in made.chunks()]
        return self._made[key]

    async def _stream(self, made, receive, send):
        leaving = asyncio.ensure_future(receive())
        head = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        began = time.monotonic()
        for number, content in enumerate(self._events(made)):
            if leaving.done():
                self.num_left += 1
                return
            if number == self.dies_after:
                leaving.cancel()
                raise ConnectionError
            await send({"type": "http.response.body", "body": content, "more_body": True})
            if self.gap_s:  # by the clock: what is late catches up
                await asyncio.sleep(began + self.gap_s * (number + 1) - time.monotonic())
        leaving.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def text_of(body, is_chat):
    if is_chat:
        return "".join(map(_text, body["messages"]))
    if not isinstance(body["prompt"], str):
        raise TypeError
    return body["prompt"]


def _text(message):
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


class FakeAnswer:
    """An answer, by its request alone."""

    def __init__(self, body, text, is_chat, num_tokens):
        self.body, self.is_chat, self.prompt = body, is_chat, tokens_of(text)
        seed = zlib.crc32(text.encode())
        n = body.get("n") or 1
        if not 1 <= n <= 8:
            raise ValueError
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.texts = [
            "".join(letters[(seed + 7 * i + 3 * j) % 26] for j in range(num_tokens))
            for i in range(n)
        ]
        self.ids = bool(body.get("return_token_ids"))
        asked = body.get("logprobs")
        if is_chat and asked not in (None, False, True):  # 0 and 1, too, are numbers for vLLM
            raise ValueError(asked)
        self.logprobs = bool(asked) if is_chat else asked is not None
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{seed}"

    def tokens(self, text):
        return tokens_of(text) if self.ids else None

    def logprobs_of(self, text):
        if not self.logprobs:
            return None
        values = [-0.25 - ord(c) / 1000 for c in text]
        if self.is_chat:
            return {
                "content": [
                    {"token": c, "logprob": v, "bytes": [ord(c)], "top_logprobs": []}
                    for c, v in zip(text, values, strict=True)
                ]
            }
        return {
            "tokens": list(text),
            "token_logprobs": values,
            "top_logprobs": [{c: v} for c, v in zip(text, values, strict=True)],
            "text_offset": list(range(len(text))),
        }

    def usage(self):
        sampled = sum(map(len, self.texts))
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": sampled,
            "total_tokens": len(self.prompt) + sampled,
        }

    def head(self, kind):
        return {"id": self.id, "object": kind, "created": CREATED, "model": self.body.get("model")}

    def whole(self):
        choices = []
        for i, text in enumerate(self.texts):
            said = (
                {"message": {"role": "assistant", "content": text, "tool_calls": []}}
                if self.is_chat
                else {"text": text, "prompt_token_ids": self.prompt if self.ids else None}
            )
            choices.append(
                {
                    "index": i,
                    **said,
                    "logprobs": self.logprobs_of(text),
                    "finish_reason": "length",
                    "stop_reason": None,
                    "token_ids": self.tokens(text),
                }
            )
        top = {"prompt_token_ids": self.prompt if self.ids else None} if self.is_chat else {}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return (
            self.head(kind)
            | {"choices": choices, "usage": self.usage(), "prompt_logprobs": None}
            | top
        )

    def chunks(self):
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        if self.is_chat:
            for i in range(len(self.texts)):
                first = {
                    "index": i,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                yield self.head(kind) | {
                    "choices": [first],
                    "prompt_token_ids": self.prompt if self.ids else None,
                }
        for j in range(len(self.texts[0])):
            for i, text in enumerate(self.texts):
                yield from self._piece(kind, i, j, text)
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self.head(kind) | {"choices": [], "usage": self.usage()}

    def _piece(self, kind, i, j, text):
        is_last, c = j == len(text) - 1, text[j]
        hidden = self.is_chat and j == 1  # a token that a parser keeps for itself
        if hidden and not self.ids and not self.logprobs:
            return
        choice = {
            "index": i,
            "logprobs": self.logprobs_of(c),
            "finish_reason": "length" if is_last else None,
            "token_ids": self.tokens(c),
        }
        if is_last:
            choice["stop_reason"] = None
        if self.is_chat:
            choice["delta"] = {} if hidden else {"content": c}
        else:
            choice["text"] = c
            choice["prompt_token_ids"] = self.prompt if self.ids and j == 0 else None
        yield self.head(kind) | {"choices": [choice]}


def event(chunk):
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def answer(send, value, status=200):
    content = json.dumps(value, separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def recorded_inside(engine):
    """The engine as a server has it that records inside, with its settings from the environment."""
    app = Starlette()
    app.router.redirect_slashes, app.router.default = False, engine
    app.add_middleware(RecordingMiddleware)
    return app


@contextmanager
def running(app, port=0, lifespan="off"):
    """Serve from a thread; its URL."""
    config = uvicorn.Config(
        app, port=port, ws="none", lifespan=lifespan, log_level="critical", access_log=False
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = lifespan == "off"
        thread.join()


if __name__ == "__main__":
    gap_s, num_tokens = float(sys.argv[1]), int(sys.argv[2])
    engine, lifespan = FakeEngine(gap_s=gap_s, num_tokens=num_tokens), "off"
    if len(sys.argv) > 3:
        engine, lifespan = recorded_inside(engine), "on"
    with running(engine, lifespan=lifespan) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        sys.stdin.read()
