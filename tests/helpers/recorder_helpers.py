"""Recorders for tests: in this process, or in one of their own that can be killed."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import httpx2

import rollout_io
from pipelines.record.serving import serving
from pipelines.record.settings import RecordSettings
from tests.conftest import ROOT
from tests.helpers.fake_engine import running

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "fake", "prompt": "hello"}
COMMAND = "import sys; from pipelines.cli.record import record; record(sys.argv[1:])"


@asynccontextmanager
async def recording(out, *engines, **settings):
    """A recorder and a client; what it says goes to `said`.

    Args:
        out: Dataset.
        engines: URL of each, or an application that is served meanwhile.
        settings: Of the recorder.
    """
    said = []
    with contextlib.ExitStack() as stack:
        urls = tuple(e if isinstance(e, str) else stack.enter_context(running(e)) for e in engines)
        chosen = RecordSettings(out=str(out), upstreams=urls, **({"flush_s": 0.05} | settings))
        async with (
            serving(chosen, tell=said.append) as served,
            httpx2.AsyncClient(base_url=served.url, timeout=30, verify=False) as client,
        ):
            client.recorder, client.said, client.root = served.recorder, said, served.url
            yield client


@contextmanager
def recorder_process(out, *arguments, limit_bytes=None):
    """A `rollouts record` of its own: process and URL."""
    program = COMMAND
    if limit_bytes is not None:
        limit = f"({limit_bytes}, {limit_bytes})"
        program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, {limit}); {COMMAND}"
    command = [sys.executable, "-c", program, "--out", str(out), "--port", "0", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()
            process.said = process.communicate(timeout=30)[1]


def rows(out, *columns):
    """Rows of a dataset, with the columns that it has."""
    table = rollout_io.read(out)
    return table.select([c for c in columns if c in table.column_names]).to_pylist()


def outcomes(out):
    """(reward, error) of each trajectory."""
    found = rows(out, "trajectory_id", "reward", "error", "is_last_step")
    last = [row for row in found if row["is_last_step"]]
    assert len({row["trajectory_id"] for row in last}) == len(last)
    return {row["trajectory_id"]: (row.get("reward"), row.get("error")) for row in last}


def chunks_of(text):
    """The data of a stream's events."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def asked_raw(root, request, wait_s=20):
    """The whole answer to bytes that no client would send; "" where the connection was closed."""
    host, port = root.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(request)
        return (await asyncio.wait_for(reader.read(), wait_s)).decode("latin-1")
    except ConnectionError:
        return ""
    finally:
        writer.close()


def request_of(method, target, headers, body=b""):
    """An HTTP/1.1 request, byte for byte."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body
