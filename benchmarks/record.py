"""Measure the overhead of `rollouts record` for streaming sessions, with a fast stand-in engine.

    python -m benchmarks.record [--sessions 64] [--tokens 64] [--gap-ms 20] [--rounds 5]
    python -m benchmarks.record --trajectories 10000

The engine sends a token every `--gap-ms` to each of the concurrent sessions. Engine and recorder are
separate processes. Rounds with and without the recorder alternate; the output is their medians.
`--trajectories` instead records and ends that many sessions of one call, and checks the dataset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rollout_io

_FIRST = re.compile(rb'"content":"[^"]')
_TEXT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def main() -> None:
    arguments = _arguments()
    is_many = bool(arguments.trajectories)
    gap_s, num_tokens = (0.0, 4) if is_many else (arguments.gap_ms / 1000, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        options = ("--port", "0", "--out", f"{folder}/ds", "--unassigned", "refuse")
        with (
            _process("tests.helpers.fake_engine", str(gap_s), str(num_tokens)) as engine,
            _process("rollout_io", "record", "--upstream", engine, *options) as recorder,
        ):
            if is_many:
                asyncio.run(many(recorder, arguments.trajectories, arguments.sessions))
            else:
                compare(engine, recorder, arguments)
        if is_many:
            count(f"{folder}/ds", arguments.trajectories)


def count(out: str, num_trajectories: int) -> None:
    """Check that every session is in the dataset exactly once, with the correct reward."""
    rows = rollout_io.scan(out).select("instance_id", "reward").collect().rows()
    shards = len(list(Path(out).glob("*.parquet")))
    assert sorted(rows) == sorted((f"task-{i}", float(i)) for i in range(num_trajectories))
    print(f"{len(rows)} distinct trajectories in {shards} shards")


def compare(engine: str, recorder: str, arguments: argparse.Namespace) -> None:
    firsts: dict[str, list[float]] = {"without": [], "with": []}
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(arguments.rounds + 1):
        for name, root in (("without", engine), ("with", recorder)):
            first, speed = asyncio.run(round_of(root, f"{name}-{number}", arguments))
            if number:  # round 0 warms up
                firsts[name].append(first)
                speeds[name].append(speed)
    for name in firsts:
        first_ms = 1000 * statistics.median(firsts[name])
        print(
            f"{name:8} {first_ms:7.2f} ms to the first token, {statistics.median(speeds[name]):8.0f} tokens/s"
        )
    added = 1000 * (statistics.median(firsts["with"]) - statistics.median(firsts["without"]))
    kept = statistics.median(speeds["with"]) / statistics.median(speeds["without"])
    print(f"added to the first token: {added:.2f} ms; throughput: {kept:.1%}")


async def round_of(root: str, name: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Make calls in concurrent sessions.

    Returns the median seconds to the first token of a call, and the total tokens per second.
    """
    began = time.monotonic()
    pause_s = arguments.gap_ms / 1000 * arguments.tokens / arguments.sessions

    async def session(i: int) -> list[float]:
        await asyncio.sleep(i * pause_s)
        path = "" if name.startswith("without") else f"/s/{name}-{i}/0"
        return [await ask(root, f"{path}/v1/chat/completions") for _ in range(arguments.calls)]

    found = await asyncio.gather(*(session(i) for i in range(arguments.sessions)))
    elapsed_s = time.monotonic() - began
    firsts = [first for calls in found for first in calls]
    return statistics.median(firsts), arguments.tokens * len(firsts) / elapsed_s


async def ask(root: str, path: str) -> float:
    """Make one streamed call on a new connection; return the seconds to its first token."""
    host, port = root.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        began = time.perf_counter()
        await send(writer, path, json.dumps(_TEXT).encode())
        first_s, tail = 0.0, b""
        while b"[DONE]" not in tail:
            content = await reader.read(1 << 16)
            assert content, tail
            tail = tail[-64:] + content
            if not first_s and _FIRST.search(tail):
                first_s = time.perf_counter() - began
        return first_s
    finally:
        writer.close()


async def send(writer: asyncio.StreamWriter, path: str, body: bytes) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def many(recorder: str, num_trajectories: int, num_sessions: int) -> None:
    """Record sessions with one call each, `num_sessions` of them at a time.

    `count` checks the dataset later.
    """
    waiting = iter(range(num_trajectories))

    async def worker() -> None:
        for i in waiting:
            await ask(recorder, f"/s/task-{i}/0/v1/chat/completions")
            host, port = recorder.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await send(writer, f"/s/task-{i}/0/end", json.dumps({"reward": float(i)}).encode())
            assert b"200" in await reader.readline()
            writer.close()

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(num_sessions)))
    print(f"{num_trajectories} sessions in {time.monotonic() - began:.1f} s")


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[str]:
    """Run a module that prints its URL, yield the URL, and terminate the process on exit."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
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
