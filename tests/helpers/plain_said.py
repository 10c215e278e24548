"""What a row says is said in its log: one plain check for all formats of text.

It knows nothing of a format but the lines that its program adds to prompts (`PROGRAMS`): every line
of every text in `messages` is a line of some string of the log, wherever it is. So a made-up, joined
or half-read value cannot pass, whatever field of the log is wrong.
"""

import json
import re
import sqlite3
from contextlib import closing

SURROGATES = re.compile("[\ud800-\udfff]")
PROGRAMS = {
    "cline": ["result missing"],
    "goose": ["(empty result)"],
    "kimi_cli": [
        "<system>Tool output is empty.</system>",
        "<system>ERROR: Tool execution failed.</system>",
        "Tool execution was interrupted before its result was recorded. "
        "Do not assume the tool completed successfully.",
    ],
    "opencode": [
        "What did we do so far?",
        "The following tool was executed by the user",
        "[Tool execution was interrupted]",
    ],
    "pi": ["No result provided"],
}
SAID = (
    "chats",
    "claude_code",
    "cline",
    "codex_cli",
    "copilot_cli",
    "cursor",
    "droid",
    "gemini_cli",
    "goose",
    "grok_cli",
    "kimi_cli",
    "openai_agents",
    "openclaw",
    "opencode",
    "openhands_sdk",
    "pi",
    "qwen_code",
    "session_traces",
    "smolagents",
    "tau2",
    "traces",
)
"""Formats whose rows are checked."""


def lines_of(text):
    """The lines of a text that are not blank, as they are after decoding."""
    found = SURROGATES.sub("\ufffd", text).replace("\r", "\n").split("\n")
    return {line.strip() for line in found if line.strip()}


def strings_in(value):
    """All strings of a value, those in JSON texts too."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            stack += [*each, *each.values()]
        elif isinstance(each, list):
            stack += each
        elif isinstance(each, str):
            yield each
            if each.lstrip()[:1] in {"{", "["}:
                try:
                    stack.append(json.loads(each))
                except (ValueError, RecursionError):
                    continue


def values_in(path):
    """The JSON values of a file, or of the files of a directory."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.suffix == ".db":
            with closing(sqlite3.connect(file)) as database:
                database.text_factory = lambda raw: raw.decode(errors="replace")
                tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                for (name,) in tables.fetchall():
                    yield from map(list, database.execute(f"SELECT * FROM {name}"))
        elif file.is_file():
            text = file.read_bytes().decode(errors="replace")
            for part in [text, *text.split("\n")]:
                try:
                    yield json.loads(part)
                except (ValueError, RecursionError):
                    continue


def unsaid(name, path, rows):
    """Lines of the rows' messages that no string of the log has."""
    known = {line for value in values_in(path) for s in strings_in(value) for line in lines_of(s)}
    known |= set(PROGRAMS.get(name, ()))
    found = []
    for row in rows:
        for message in json.loads(row["messages"] or "[]"):
            said = [message.get(key) for key in ("content", "reasoning_content", "name")]
            called = [call["function"] for call in message.get("tool_calls") or ()]
            said += [call[key] for call in called for key in ("name", "arguments")]
            found += [text for text in texts_of(said) if not is_said(text, known)]
    return found


def texts_of(value):
    """The texts of a content, a call or its arguments; keys and numbers are none."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        own = {k: v for k, v in value.items() if k not in {"type", "blob", "media_type", "source"}}
        return [text for each in own.values() for text in texts_of(each)]
    return [text for each in value for text in texts_of(each)] if isinstance(value, list) else []


def is_said(text, known):
    """True if each line is known, or it or the text is the JSON of values that are, as arguments are."""
    return is_json_said(text, known) or all(
        line in known or is_json_said(line, known) for line in lines_of(text)
    )


def is_json_said(text, known):
    """True for the JSON of a value that is no text, and whose texts are known."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, str) and all(is_said(each, known) for each in texts_of(value))
