"""A real S3-compatible server (Moto's) behind a proxy that fails as object stores and networks do.

It needs only the standard library, pytest and fsspec, so that the server can come from another environment.
"""

import asyncio
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import closing, contextmanager
from socket import socket
from typing import NamedTuple

import fsspec
import pytest

BUSY, CUT, SHORT, SLOW, RESET, HANG = "busy", "cut", "short", "slow", "reset", "hang"
"""503 SlowDown; close within the body; a body that is shorter than asked for, with the length of
what is there; send the body in pieces with pauses; close without an answer; answer never."""

SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message><RequestId>1</RequestId></Error>"
)


class Asked(NamedTuple):
    """A request: its number from 0 since `Proxy.become`, its method and its target."""

    number: int
    method: str
    target: str


def no_fault(_):
    """Answer every request as the server does."""


class Proxy:
    """Passes requests on to a server, and does to its answers what `fault` says.

    Args:
        upstream: Port of the server on this machine.

    Attributes:
        requests: What was asked, and the fault of the answer, in the order of arrival.
    """

    def __init__(self, upstream):
        self.upstream, self.fault = upstream, no_fault
        self.requests = []
        self.pause_s = 0.02

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def become(self, fault):
        """Forget the requests so far; from now on, `fault(asked)` is a fault or None."""
        self.requests, self.fault = [], fault

    def faults(self):
        """How often each fault happened, None being an answer as it should be."""
        return Counter(fault for _, fault in self.requests)

    async def serve(self, reader, writer):
        try:
            while (request := await _message(reader, writer)) is not None:
                head, body = request
                method, target, _ = head.partition(b"\r\n")[0].decode().split(" ")
                asked = Asked(len(self.requests), method, target)
                fault = self.fault(asked)
                self.requests.append((asked, fault))
                if fault == HANG:
                    await asyncio.sleep(3600)
                if fault == RESET or not await self._answer(head, body, method, fault, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort() if fault in {CUT, RESET} else writer.close()

    async def _answer(self, head, body, method, fault, writer):
        if fault == BUSY:
            writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\n")
            length = 0 if method == "HEAD" else len(SLOW_DOWN)
            writer.write(b"Content-Length: %d\r\n\r\n" % length + SLOW_DOWN[:length])
            await writer.drain()
            return True
        head, content = await self._asked(head, body, is_head=method == "HEAD")
        if fault == SHORT and method != "HEAD":
            content = content[: len(content) // 2]
            head = _headed(head, len(content))
        writer.write(head)
        if fault == CUT:
            writer.write(content[: len(content) // 2])
            await writer.drain()
            await asyncio.sleep(self.pause_s)  # or the client may not see the half that was sent
            return False
        size = max(1, len(content) // 4) if fault == SLOW else max(1, len(content))
        for start in range(0, len(content), size):
            if fault == SLOW:
                await asyncio.sleep(self.pause_s)
            writer.write(content[start : start + size])
            await writer.drain()
        return True

    async def _asked(self, head, body, *, is_head):
        """Return the head of the server's answer, with a length, and its body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        first, *lines = head[:-4].split(b"\r\n")
        lines = [
            line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))
        ]
        # To HTTP/1.0 the server answers without chunks, and closes.
        lines = [first.replace(b"HTTP/1.1", b"HTTP/1.0"), *lines, b"Connection: close"]
        writer.write(b"\r\n".join([*lines, b"", b""]) + body)
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).replace(b"HTTP/1.0", b"HTTP/1.1", 1)
        content = b"" if is_head else await reader.read()
        writer.close()
        return _headed(answer, None if is_head else len(content)), content


async def _message(reader, writer):
    """Return the head and the body of a request; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    if b"100-continue" in head.lower():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0].partition(b":")[2]) if lengths else 0
    return head, await reader.readexactly(length)


def _headed(head, length):
    """Give an answer's head this length (None: its own), and let the connection stay open."""
    changed = (b"connection:",) if length is None else (b"connection:", b"content-length:")
    lines = [s for s in head[:-4].split(b"\r\n") if not s.lower().startswith(changed)]
    added = [] if length is None else [b"Content-Length: %d" % length]
    return b"\r\n".join([*lines, *added, b"", b""])


@contextmanager
def proxied(upstream):
    """Serve a `Proxy` from a thread with a loop of its own."""
    proxy, loop, ready = Proxy(upstream), asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def main():
        listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
        proxy.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def moto_server(python, log):
    """Start Moto's server with an interpreter that has it; yield its port once it answers."""
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-c", "from moto.server import main; main()", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_for(process, f"http://127.0.0.1:{port}/moto-api/", log)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait_for(process, url, log):
    ends = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        else:
            return


def put(port, name, content=b""):
    """Create a bucket, or an object `BUCKET/KEY`, with the server itself."""
    url = f"http://127.0.0.1:{port}/{name}"
    kind = {"Content-Type": "application/octet-stream"}
    asked = urllib.request.Request(url, content, kind, method="PUT")
    urllib.request.urlopen(asked, timeout=60).close()


@contextmanager
def empty_bucket(log):
    """A proxy in front of a server with an empty bucket, and where AWS's client finds it."""
    with (
        moto_server(sys.executable, log) as port,
        proxied(port) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        put(port, "bucket")
        for name, value in {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            environment.setenv(name, value)
        yield proxy
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # or the next one asks this one
