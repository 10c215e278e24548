"""Make fixtures of sessions that real harnesses wrote: `python -m tests.real_harnesses.fixtures HOMES OUT`.

HOMES/HARNESS/SCENARIO is a home in which a harness ran against `engine.Engine`, with every exchange
in `requests.jsonl`; an interrupted, failed or slow answer has `#gone`, `#cut`, `#failed` or `#slow`
after its path. OUT/FORMAT/EVENT has the home's logs
and `sent.jsonl`: one line for each answer that the engine gave, with what it was sent. Structure, ids
and the texts of the scenarios are kept; the makers' texts are shortened line by line, in logs and
requests alike, and what depends on a text's size or digest is computed again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from rollout_io.formats.claude_code_requests import digest_of
from tests.real_harnesses.plain import sent

LOGS = {
    "claude_code": ".claude/projects",
    "codex": ".codex/sessions",
    "gemini_cli": ".gemini/tmp",
    "opencode": ".local/share/opencode/opencode.db",
    "pi": ".pi/agent/sessions",
    "pi1": ".pi/agent/sessions",
    "qwen_code": ".qwen/projects",
}
EVENTS = {
    "claude_code": {
        "rewind": "rewind_small",
        "compaction": "compact_small",
        "fork_by_copy": "fork_small",
        "interrupted": "stream_interrupt",
        "sub_agent": "agent_small",
        "system_messages": "hooks",
        "joined_lines": "skills",
        "picture": "image_prompt",
    },
    "codex": {
        "rewind": "app_revert",
        "compaction": "compact_small",
        "fork_by_reference": "fork",
        "resumed": "resumed_small",
        "interrupted": "app_interrupt",
        "cut_stream": "cut_small",
        "sub_agent": "one_agent",
        "written_by_program": "review",
    },
    "gemini_cli": {
        "rollback": "acp_cancel",
        "compaction": "auto_compact",
        "resumed": "resumed_later",
        "interrupted": "max_turns",
        "sub_agent": "agents",
        "editor": "acp",
    },
    "opencode": {
        "rewind": "revert_pending",
        "compaction": "compact_twice",
        "fork_by_copy": "fork_at",
        "resumed": "resumed_twice",
        "interrupted": "abort",
        "sub_agent": "agents",
        "plan_mode": "plan_build",
        "model_switch": "models",
        "unknown_tool": "parallel3",
        "picture": "image2",
    },
    "pi": {
        "rewind": "tree",
        "compaction": "compact_twice",
        "fork_by_copy": "cli_fork",
        "resumed": "resumed_twice",
        "interrupted": "interrupted",
        "model_switch": "models",
        "picture": "image2",
    },
    "pi1": {
        "rewind": "tree_summary",
        "compaction": "compact_twice",
        "fork_by_copy": "rpc_fork",
        "resumed": "tools_change",
        "interrupted": "rpc_abort",
        "model_switch": "models",
        "edited": "context_edit",
    },
    "qwen_code": {"resumed": "plain", "compaction": "compress"},
}
WITHOUT_SYSTEM = {"gemini_cli", "opencode", "pi", "qwen_code"}
"""Harnesses that do not log the system prompt; it is not in `sent.jsonl` either."""

OWN = re.compile(
    r"CALL |x-anthropic-billing|(?:answer|thought) number \d|\bHOOK\b|\bEXT\b|Reply|summary|tool result:",
    re.ASCII,
)
LONG_TEXT, LONGEST_LINE = 20, 30
SHOWN = 8
WHOLE = {
    "arguments",
    "data",
    "signature",
    "encrypted_content",
    "thinkingSignature",
    "image_url",
    "url",
}
TABLES = ("session", "message", "part")


class Scrub:
    """Shorten the makers' texts of one home, the same text always to the same."""

    def __init__(self, home: Path, *, drops_lines: bool) -> None:
        self._drops_lines = drops_lines
        self._paths = [
            (str(home), "/home/u"),
            (re.sub(r"[^A-Za-z0-9]", "-", str(home)), "-home-u"),
            (str(home).strip("/").replace("/", "-"), "home-u"),
        ]

    def name(self, text: str) -> str:
        """A text with the home's path as /home/u."""
        for path, short in self._paths:
            text = text.replace(path, short)
        return re.sub(r"/[^\s\"']*/node_modules/", "/usr/lib/node_modules/", text)

    def text(self, text: str) -> str:
        """A text whose long lines are cut; of a long text, most of these are left out."""
        lines = [(line, shortened(line)) for line in self.name(text).split("\n")]
        if self._drops_lines and len(lines) >= LONG_TEXT:
            lines = [(line, cut) for line, cut in lines if line == cut or cut[-1] in "048c"]
        return "\n".join(cut for _, cut in lines)

    def __call__(self, value: Any, key: str = "") -> Any:
        """A JSON value with shortened texts."""
        if isinstance(value, str):
            return self.name(value) if key in WHOLE else self.text(value)
        if isinstance(value, list):
            return [self(each, key) for each in value]
        if not isinstance(value, dict):
            return value
        made = {k: self(each, k) for k, each in value.items()}
        for schema in ("input_schema", "parameters", "inputSchema", "parametersJsonSchema"):
            if "name" in made and isinstance(made.get(schema), dict):
                made[schema] = {"type": "object", "properties": {}}
                made["description"] = str(made.get("description") or "")[:SHOWN]
        return made


def shortened(line: str) -> str:
    if len(line) <= LONGEST_LINE or " " not in line or OWN.search(line):
        return line
    return f"{line[:SHOWN].rstrip()}~{hashlib.sha256(line.encode()).hexdigest()[:4]}"


def lines_of(path: Path, scrub: Callable[[Any], Any]) -> bytes:
    """The scrubbed lines of a JSONL file, or a scrubbed JSON file."""
    if path.suffix == ".json":
        return _dump(scrub(json.loads(path.read_bytes())))
    lines = path.read_bytes().split(b"\n")
    return b"".join(_dump(scrub(json.loads(line))) for line in lines if line)


def _dump(value: Any) -> bytes:
    return (
        json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf8", "surrogatepass")
        + b"\n"
    )


def database(path: Path, out: Path, scrub: Scrub) -> None:
    """Copy the tables of an OpenCode database that hold conversations, with scrubbed values."""
    source_path = path.parent / f"copy-{path.name}"
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(source_path)) as source:
        live.backup(source)
        with closing(sqlite3.connect(out)) as made:
            made.execute("PRAGMA page_size = 1024")
            for name in TABLES:
                (sql,) = source.execute(
                    "SELECT sql FROM sqlite_master WHERE name = ?", (name,)
                ).fetchone()
                made.execute(sql)
                for row in source.execute(f"SELECT * FROM {name}"):
                    values = [_cell(each, scrub) for each in row]
                    made.execute(f"INSERT INTO {name} VALUES ({','.join('?' * len(row))})", values)
            made.commit()
            made.execute("VACUUM")
    source_path.unlink()


def _cell(value: Any, scrub: Scrub) -> Any:
    if not isinstance(value, str) or value[:1] not in "{[":
        return scrub.name(value) if isinstance(value, str) else value
    return json.dumps(scrub(json.loads(value)), ensure_ascii=False, separators=(",", ":"))


def copy_logs(home: Path, harness: str, out: Path, scrub: Scrub, digests: dict[str, str]) -> None:
    """Copy a home's logs, scrubbed."""
    root = home / LOGS[harness]
    if root.suffix == ".db":
        out.mkdir(parents=True)
        database(root, out / root.name, scrub)
        return
    kept = [
        p for p in sorted(root.rglob("*")) if p.suffix == ".jsonl" or p.name.endswith(".meta.json")
    ]
    made = {}
    for path in kept:
        text = lines_of(path, scrub)
        for old, new in digests.items():
            text = text.replace(old.encode(), new.encode())
        made[out / scrub.name(str(path.relative_to(root)))] = text
    for path, text in rebased(made).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def rebased(logs: dict[Path, bytes]) -> dict[Path, bytes]:
    """Logs of Codex whose `end_byte_offset` is that of the scrubbed file it refers to."""
    made = {}
    for path, text in logs.items():
        first, _, rest = text.partition(b"\n")
        head = json.loads(first)
        base = (head.get("payload") or {}).get("history_base")
        if base:
            (origin,) = [each for p, each in logs.items() if p.stem.endswith(base["thread_id"])]
            lines = origin.splitlines(keepends=True)
            base["end_byte_offset"] = sum(map(len, lines[: base["end_ordinal_exclusive"]]))
        made[path] = _dump(head) + rest if base else text
    return made


def answers(
    home: Path, scrub: Scrub, *, has_system: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What was sent for each answer, and how much of it an earlier line has; new digests of sent messages."""
    made: list[dict[str, Any]] = []
    digests: dict[str, str] = {}
    known: list[list[Any]] = []
    for line in (home / "requests.jsonl").read_text().splitlines():
        exchange = json.loads(line)
        request, tags = exchange["request"], exchange["path"].split("#")[1:]
        if "failed" in tags:
            continue
        for message in request.get("messages") or ():
            digests[digest_of(message)] = digest_of(scrub(message))
        messages = sent(scrub(request))
        if not has_system and messages and messages[0][0] == "system":
            del messages[0]
        is_of_agent = bool(request.get("tools")) and "<analysis>" not in json.dumps(messages[-1])
        shared = [_shared(each, messages) for each in known] or [0]
        base = max(range(len(shared)), key=shared.__getitem__)
        calls = [
            [call["name"], scrub(json.dumps(call["input"], sort_keys=True), "arguments")]
            for call in exchange["calls"]
        ]
        made.append(
            {
                "answer": exchange["text"],
                "thought": exchange["thought"],
                "calls": calls,
                "is_whole": not {"cut", "gone", "slow"} & set(tags),
                "is_of_agent": is_of_agent,
                "base": base,
                "keep": shared[base],
                "messages": messages[shared[base] :] if is_of_agent else [],
            }
        )
        known.append(messages if is_of_agent else [])
    return made, digests


def _shared(first: list[Any], second: list[Any]) -> int:
    """Number of messages at the start that two contexts share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def main(homes: str, out: str) -> None:
    """Make all fixtures anew."""
    for harness, events in EVENTS.items():
        shutil.rmtree(Path(out) / harness, ignore_errors=True)
        for event, scenario in events.items():
            home, to = Path(homes).resolve() / harness / scenario, Path(out) / harness / event
            scrub = Scrub(home, drops_lines=harness in {"claude_code", "codex"})
            lines, digests = answers(home, scrub, has_system=harness not in WITHOUT_SYSTEM)
            copy_logs(home, harness, to / "logs", scrub, digests)
            (to / "sent.jsonl").write_bytes(b"".join(map(_dump, lines)))
            size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
            sys.stdout.write(f"{to}: {len(lines)} answers, {size:,} bytes\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
