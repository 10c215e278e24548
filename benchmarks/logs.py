"""Time to the first window of a large directory of agent sessions, and the memory of the viewer.

`python -m benchmarks.logs [GB]` writes synthetic Claude Code sessions, 1 GB by default, opens them with
`rollouts view`, and prints: the time until the first trajectories are served and until all files are
read; the memory of the server and of the process that reads; the time to open a conversation.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SESSION_BYTES = 250_000
_WORDS = [
    "the",
    "parser",
    "returns",
    "a",
    "list",
    "of",
    "open",
    "files",
    "and",
    "closes",
    "each",
    "one",
    "before",
    "the",
    "next",
    "call",
    "reads",
    "it",
    "again",
]


def session(number: int, num_bytes: int = SESSION_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the lines of a session: one task, then tool calls and their results."""
    rnd = random.Random(number)
    name, parent, size = str(uuid.UUID(int=rnd.getrandbits(128), version=4)), None, 0

    def line(kind: str, message: dict[str, Any]) -> dict[str, Any]:
        nonlocal parent, size
        made = {
            "parentUuid": parent, "isSidechain": False, "cwd": "/home/user/project",
            "sessionId": name, "version": "2.0.1", "gitBranch": "main", "type": kind,
            "message": message, "uuid": str(uuid.UUID(int=rnd.getrandbits(128), version=4)),
            "timestamp": "2026-01-01T00:00:00.000Z",
        }  # fmt: skip
        parent, size = made["uuid"], size + len(json.dumps(made))
        return made

    def text(num_words: int) -> str:
        return " ".join(rnd.choices(_WORDS, k=num_words))

    def answer(step: int, *parts: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "text", "text": text(60)}, *parts]
        message = {"id": f"msg_{number}_{step}", "role": "assistant", "model": "m"}
        return line("assistant", {**message, "content": content})

    yield line("user", {"role": "user", "content": f"Task {number}: {text(40)}"})
    step = 0
    while size < num_bytes:
        call = f"toolu_{number}_{step}"
        used = {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": text(5)}}
        yield answer(step, used)
        result = {"tool_use_id": call, "type": "tool_result", "content": text(rnd.randint(50, 900))}
        yield line("user", {"role": "user", "content": [result]})
        step += 1
    yield answer(step)


def write_sessions(root: Path, num_bytes: int, session_bytes: int = SESSION_BYTES) -> int:
    """Write sessions in the directories of eight projects; return their number."""
    written = number = 0
    while written < num_bytes:
        lines = [json.dumps(line) for line in session(number, session_bytes)]
        name = json.loads(lines[0])["sessionId"]
        folder = root / "projects" / f"-home-user-project-{number % 8}"
        folder.mkdir(parents=True, exist_ok=True)
        content = "\n".join(lines) + "\n"
        (folder / f"{name}.jsonl").write_text(content)
        written, number = written + len(content), number + 1
    return number


def main(num_bytes: int) -> None:
    """Measure."""
    from rollout_io.startup import keep_pandas_out_of_arrow

    keep_pandas_out_of_arrow()
    from pipelines.view.api import Api
    from pipelines.view.sources import Sources

    with tempfile.TemporaryDirectory() as folder:
        num = write_sessions(Path(folder), num_bytes)
        sys.stdout.write(f"{num_bytes / 1e9:g} GB in {num:,} sessions\n")
        start_s = time.monotonic()
        sources = Sources.open([folder], is_live=True)
        api = Api(sources)
        api.answer("/api/datasets/d0/trajectories?limit=100")
        first_mib = _peak_mib(resource.RUSAGE_SELF)
        sys.stdout.write(f"first window: {time.monotonic() - start_s:.1f} s, {first_mib:.0f} MiB\n")
        logs = sources.datasets["d0"]
        logs.wait()
        sys.stdout.write(f"all files: {time.monotonic() - start_s:.1f} s\n")
        start_s = time.monotonic()
        name = sources.dataset("d0").index.trajectories["trajectory_id"][num // 2]
        api.answer(f"/api/datasets/d0/conversation?trajectory_id={name}")
        sys.stdout.write(f"a conversation: {1000 * (time.monotonic() - start_s):.0f} ms\n")
        start_s = time.monotonic()
        found = api.answer("/api/datasets/d0/search?text=Task%2012:").body
        elapsed_s, is_complete = time.monotonic() - start_s, json.loads(bytes(found))["complete"]
        sys.stdout.write(f"a search: {elapsed_s:.1f} s (complete: {is_complete})\n")
        server, reader = _peak_mib(resource.RUSAGE_SELF), _peak_mib(resource.RUSAGE_CHILDREN)
        sys.stdout.write(f"peak memory: server {server:.0f} MiB, reader {reader:.0f} MiB\n")


def _peak_mib(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


if __name__ == "__main__":
    main(int(float(sys.argv[1]) * 1e9) if len(sys.argv) > 1 else 1_000_000_000)
