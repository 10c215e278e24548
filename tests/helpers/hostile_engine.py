"""An engine that answers with whatever harms: raw HTTP from a thread, byte for byte."""

import gzip
import json
import socketserver
import threading
from contextlib import contextmanager

MOST_BYTES = 1 << 30
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PIECE = 1 << 16


def forever(piece):
    """The same over and over, in writes of some size."""
    block = piece * max(PIECE // len(piece), 1)
    for _ in range(MOST_BYTES // len(block)):
        yield block


def chunk(text="a", ids=(5,), finish=None):
    choice = {"index": 0, "text": text, "token_ids": list(ids), "finish_reason": finish}
    choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids)}
    choice["prompt_token_ids"] = [1, 2]
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def chunked(pieces):
    for piece in pieces:
        yield b"%x\r\n%s\r\n" % (len(piece), piece)


def whole(body):
    return [JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body]


CHUNKED = JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDED = chunk(finish="stop")
DONE = b"data: [DONE]\n\n"


ANSWERS = {
    "line": lambda: [SSE_HEAD, b"data: ", *forever(b"x")],
    "event": lambda: [SSE_HEAD, *forever(b"data: x\n")],
    "events": lambda: [SSE_HEAD, *forever(chunk())],
    "empty events": lambda: [SSE_HEAD, *forever(b'data:{"choices":[]}\n\n')],
    "blank lines": lambda: [SSE_HEAD, *forever(b"\n")],
    "comments": lambda: [SSE_HEAD, *forever(b":\n\n")],
    "after the end": lambda: [SSE_HEAD, ENDED, DONE, *forever(b":\n\n")],
    "body": lambda: [CHUNKED, *chunked(forever(b"[1,"))],
    "body without a length": lambda: [JSON_HEAD + b"\r\n", *forever(b" ")],
    "long body": lambda: [JSON_HEAD + b"Content-Length: 99999999999\r\n\r\n", *forever(b" ")],
    "chunk extension": lambda: [CHUNKED, b"1;", *forever(b"x")],
    "choices": lambda: whole(b'{"choices":[' + b",".join([b"{}"] * 5_000_000) + b"]}"),
    "fields": lambda: whole(b"{" + b",".join(b'"%x":1' % i for i in range(1 << 20)) + b"}"),
    "header": lambda: [JSON_HEAD, b"X: ", *forever(b"x")],
    "headers": lambda: [JSON_HEAD, *forever(b"X: y\r\n")],
    "switch": lambda: [
        b"HTTP/1.1 101 Go\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        *forever(b"x"),
    ],
    "gzip": lambda: [
        JSON_HEAD + b"Content-Encoding: gzip\r\n\r\n",
        gzip.compress(b" " * (64 << 20)),
    ],
    "redirect": lambda: [
        b"HTTP/1.1 307 Go\r\nLocation: http://evil.example/v1\r\nContent-Length: 0\r\n\r\n"
    ],
    "error": lambda: [JSON_HEAD.replace(b"200 OK", b"400 No") + b"\r\n", *forever(b"x")],
}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        fields = dict(
            line.split(": ", 1) for line in head.decode().lower().splitlines()[1:] if line
        )
        self.rfile.read(int(fields.get("content-length", 0)))
        try:
            for piece in ANSWERS[self.server.answer]():
                self.wfile.write(piece)
        except OSError:
            self.server.num_left += 1


@contextmanager
def hostile():
    """Its server, with a `url`; what it answers next is its `answer`."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.num_left = 0
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
