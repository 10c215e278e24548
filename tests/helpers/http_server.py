"""A small HTTP server that answers as vLLM does, and misbehaves on purpose."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

RESET, HANG, CUT = "reset", "hang", "cut"
"""Close without an answer; answer never; close in the middle of an answer."""


def completion(body, **changes):
    """A whole answer: ids 10, 11, 12, each with log-probability -0.5."""
    choice = {
        "index": 0,
        "prompt_token_ids": body.get("prompt"),
        "token_ids": [10, 11, 12],
        "logprobs": {"token_logprobs": [-0.5] * 3},
        "text": "abc",
        "finish_reason": "length",
    }
    return 200, {"choices": [choice | changes]}


class Server:
    """Answers request number i as `script[i]` says, and all after the script with `completion`.

    Attributes:
        requests: (path, body, headers) of each request, in the order of arrival.
        times_s: Of each arrival.
        most_at_once: Requests that were under way at one time.
        num_left: Requests whose client went away before the answer.
    """

    def __init__(self, script=(), *, delay_s=0.0, answer=completion):
        self.script, self.delay_s, self.answer = list(script), delay_s, answer
        self.requests, self.times_s = [], []
        self.at_once = self.most_at_once = self.num_left = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader, writer):
        try:
            while (request := await _read(reader)) is not None:
                self.times_s.append(time.monotonic())
                self.requests.append(request)
                step = self.script.pop(0) if self.script else self.answer
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    goes_on = await self._answer(step, request, reader, writer)
                finally:
                    self.at_once -= 1
                if not goes_on:
                    return
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(self, step, request, reader, writer):
        if step == RESET:
            writer.transport.abort()
            return False
        delay_s = 60 if step == HANG else self.delay_s
        if delay_s and await _went_away(reader, delay_s):
            self.num_left += 1
            return False
        status, body = step(request[1]) if callable(step) else completion(request[1])
        headers = {}
        if isinstance(body, tuple):
            body, headers = body
        content = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        writer.write(content[: len(content) // 2] if step == CUT else content)
        await writer.drain()
        return step != CUT


async def _read(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode() if not reader.at_eof() else ""
    if not head:
        return None
    lines = head.split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return lines[0].split(" ")[1], json.loads(content) if content else None, headers


async def _went_away(reader, delay_s):
    try:
        return await asyncio.wait_for(reader.read(1), delay_s) == b""
    except TimeoutError:
        return False


@contextmanager
def serving(server):
    """Serve from a thread with a loop of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def main():
        async def serve(reader, writer):
            try:
                await server._serve(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        server.stop = asyncio.Event()
        ready.set()
        await server.stop.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop.set)
        thread.join()
        loop.close()
