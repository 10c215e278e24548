"""Measure the overhead of `rollouts record` for streaming sessions, with a fast stand-in engine.

    python -m benchmarks.record [--sessions 64] [--tokens 64] [--gap-ms 20] [--rounds 5]
    python -m benchmarks.record --trajectories 10000

The engine sends a token every `--gap-ms` to each of the concurrent sessions. Client, engine and
recorder are separate processes. The limits are two relays that record nothing: `http` uses the
recorder's libraries, and `tcp` copies bytes between sockets. `middleware` is the recorder inside the
engine's server, so its CPU time is the engine's. Rounds with each of them and without alternate. The output is the median of each, with the CPU time per token
of each process.
`--trajectories` instead records and ends that many sessions of one call, and checks the dataset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop

import rollout_io
from pipelines.record.middleware import MOUNT

_FIRST = re.compile(rb'"content":"[^"]')
_TEXT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": True}
_DIRECT, _TCP, _HTTP, _RECORDER = "engine alone", "tcp relay", "http relay", "recorder"
_INSIDE = "middleware"
_PATHS = {_RECORDER: "/s/{}-{}/0", _INSIDE: f"{MOUNT}/s/{{}}-{{}}/0"}


class Server(NamedTuple):
    """A process that answers calls."""

    url: str
    process: psutil.Process


class Round(NamedTuple):
    """Seconds to the first token (median), tokens per second, and CPU seconds per token."""

    first_s: float
    tokens_per_s: float
    client_s: float
    engine_s: float
    between_s: float


def main() -> None:
    arguments = _arguments()
    is_many = bool(arguments.trajectories)
    gap_s, num_tokens = (0.0, 4) if is_many else (arguments.gap_ms / 1000, arguments.tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        _process("tests.helpers.fake_engine", str(gap_s), str(num_tokens)) as engine,
        _process("benchmarks.relay", "tcp", engine.url) as tcp,
        _process("benchmarks.relay", "http", engine.url) as http,
    ):
        options = ("--port", "0", "--out", f"{folder}/ds", "--unassigned", "refuse")
        os.environ["ROLLOUTS_RECORD_OUT"] = f"{folder}/inside"
        own = ("tests.helpers.fake_engine", str(gap_s), str(num_tokens), "inside")
        with (
            _process("rollout_io", "record", "--upstream", engine.url, *options) as recorder,
            _process(*own) as inside,
        ):
            if is_many:
                uvloop.run(many(recorder.url, arguments.trajectories, arguments.sessions))
            else:
                servers = {_DIRECT: engine, _TCP: tcp, _HTTP: http, _RECORDER: recorder}
                compare({**servers, _INSIDE: inside}, arguments)
        if is_many:
            count(f"{folder}/ds", arguments.trajectories)


def count(out: str, num_trajectories: int) -> None:
    """Check that every session is in the dataset exactly once, with the correct reward."""
    rows = rollout_io.scan(out).select("instance_id", "reward").collect().rows()
    shards = len(list(Path(out).glob("*.parquet")))
    assert sorted(rows) == sorted((f"task-{i}", float(i)) for i in range(num_trajectories))
    print(f"{len(rows)} distinct trajectories in {shards} shards")


def compare(servers: dict[str, Server], arguments: argparse.Namespace) -> None:
    rounds: dict[str, list[Round]] = {name: [] for name in servers}
    for number in range(arguments.rounds + 1):
        for name, server in servers.items():
            path = _PATHS.get(name, "").format(number, "{}")
            engine = server if name == _INSIDE else servers[_DIRECT]
            found = measured(engine, server, path, arguments)
            if number:  # round 0 warms up
                rounds[name].append(found)
    medians = {name: _median(found) for name, found in rounds.items()}
    direct = medians[_DIRECT]
    print(
        "              first token    added   throughput   CPU per token: client, engine, between"
    )
    for name, found in medians.items():
        print(
            f"{name:12} {1000 * found.first_s:9.2f} ms {_added_ms(found, direct):5.2f} ms"
            f" {found.tokens_per_s / direct.tokens_per_s:11.1%}  {1e6 * found.client_s:19.0f},"
            f" {1e6 * found.engine_s:6.0f}, {1e6 * found.between_s:6.0f} us"
        )
    added, inside, least = (_added_ms(medians[k], direct) for k in (_RECORDER, _INSIDE, _HTTP))
    relay_s = medians[_HTTP].between_s
    cost = medians[_RECORDER].between_s / relay_s
    own_cost = (medians[_INSIDE].engine_s - direct.engine_s) / relay_s
    print(
        f"added to the first token: {added:.2f} ms, by the middleware {inside:.2f} ms, by an http "
        f"relay {least:.2f} ms; CPU: {cost:.2f} and {own_cost:.2f} x the relay's"
    )


def _median(rounds: list[Round]) -> Round:
    return Round(*map(statistics.median, zip(*rounds, strict=True)))


def _added_ms(found: Round, direct: Round) -> float:
    return 1000 * (found.first_s - direct.first_s)


def measured(engine: Server, server: Server, path: str, arguments: argparse.Namespace) -> Round:
    """Make calls in concurrent sessions, and measure them."""
    before = time.process_time(), _cpu_s(engine), _cpu_s(server)
    began = time.monotonic()
    firsts = uvloop.run(calls(server.url, path, arguments))
    elapsed_s = time.monotonic() - began
    num_tokens = arguments.tokens * len(firsts)
    after = time.process_time(), _cpu_s(engine), _cpu_s(server)
    client_s, engine_s, between_s = (
        (b - a) / num_tokens for a, b in zip(before, after, strict=True)
    )
    if server == engine:
        between_s = 0.0
    first_s = statistics.median(firsts)
    return Round(first_s, num_tokens / elapsed_s, client_s, engine_s, between_s)


def _cpu_s(server: Server) -> float:
    times = server.process.cpu_times()
    return times.user + times.system


async def calls(url: str, path: str, arguments: argparse.Namespace) -> list[float]:
    """Make calls in concurrent sessions; return the seconds to the first token of each."""
    pause_s = arguments.gap_ms / 1000 * arguments.tokens / arguments.sessions

    async def session(i: int) -> list[float]:
        await asyncio.sleep(i * pause_s)
        target = f"{path.format(i)}/v1/chat/completions"
        return [await ask(url, target) for _ in range(arguments.calls)]

    found = await asyncio.gather(*(session(i) for i in range(arguments.sessions)))
    return [first_s for firsts in found for first_s in firsts]


class Call(asyncio.Protocol):
    """A streamed call on its own connection.

    Args:
        request: Bytes of the request.

    Attributes:
        ended: Done when the response has ended; the result is the seconds to the first token.
    """

    def __init__(self, request: bytes) -> None:
        self._request, self._tail, self._first_s = request, b"", 0.0
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self._began_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Look for the first token and the end."""
        self._tail = self._tail[-64:] + data
        if not self._first_s and _FIRST.search(self._tail):
            self._first_s = time.perf_counter() - self._began_s
        if b"[DONE]" in self._tail:
            self.ended.set_result(self._first_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail unless the response has ended."""
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError(self._tail.decode()))


async def ask(url: str, path: str) -> float:
    """Make one streamed call on a new connection; return the seconds to its first token."""
    host, port = url.removeprefix("http://").split(":")
    request = post(path, json.dumps(_TEXT).encode())
    loop = asyncio.get_running_loop()
    transport, call = await loop.create_connection(lambda: Call(request), host, int(port))
    try:
        return await call.ended
    finally:
        transport.close()


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def many(recorder: str, num_trajectories: int, num_sessions: int) -> None:
    """Record sessions with one call each, `num_sessions` of them at a time.

    `count` checks the dataset later.
    """
    waiting = iter(range(num_trajectories))
    host, port = recorder.removeprefix("http://").split(":")

    async def worker() -> None:
        for i in waiting:
            await ask(recorder, f"/s/task-{i}/0/v1/chat/completions")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(post(f"/s/task-{i}/0/end", json.dumps({"reward": float(i)}).encode()))
            assert b"200" in await reader.readline()
            writer.close()

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(num_sessions)))
    print(f"{num_trajectories} sessions in {time.monotonic() - began:.1f} s")


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[Server]:
    """Run a module that prints its URL, and terminate the process on exit."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield Server(process.stdout.readline().strip(), psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (
        ("sessions", 64),
        ("tokens", 64),
        ("calls", 2),
        ("rounds", 5),
        ("trajectories", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
