"""One command converts the homes of a person's harnesses; what is no log is skipped by its name."""

import json
import shutil
import sqlite3
from contextlib import closing

import pytest

import rollout_io
from rollout_io.cli.main import run
from tests.helpers.conversation_writers import (
    log_of,
    opencode_tables,
    save_opencode,
)
from tests.helpers.structural_logs import CONVERSATION
from tests.helpers.view_helpers import Asked
from tests.rollout_io.formats.test_opencode import save_storage

pytestmark = pytest.mark.model

LOGS = {
    "claude_code": ".claude/projects/-w/0a1b.jsonl",
    "codex_cli": ".codex/sessions/2026/11/27/rollout-2026-11-27T10-00-00-0a1b.jsonl",
    "gemini_cli, lines": ".gemini/tmp/w/chats/session-2026-11-27T10-00-0a1b.jsonl",
    "pi": ".pi/agent/sessions/--w--/2026-11-27_0a1b.jsonl",
    "qwen_code": ".qwen/projects/-w/chats/0a1b.jsonl",
    "kimi_cli": ".kimi-code/sessions/wd_w/session_0a1b/agents/main/wire.jsonl",
    "copilot_cli": ".copilot/session-state/0a1b/events.jsonl",
    "cursor": ".cursor/projects/w/agent-transcripts/cu1b/cu1b.jsonl",
    "droid": ".factory/sessions/-w/0a1b.jsonl",
    "grok_cli": ".grok/sessions/w/gr1b/chat_history.jsonl",
}
OTHERS = {
    ".claude/settings.json": {"permissions": {"allow": ["Bash(ls)"]}},
    ".claude/history.jsonl": {"display": "List.", "pastedContents": {}, "project": "/w"},
    ".claude/todos/0a1b-agent-0a1b.json": [{"content": "Look.", "status": "pending", "id": "1"}],
    ".claude/stats-cache.json": {"version": 1, "dailyActivity": []},
    ".claude/plugins/installed.json": {"version": 1, "plugins": {}},
    ".claude/shell-snapshots/snapshot.sh": "alias ls='ls -l'\n",
    ".codex/config.toml": 'model = "m"\n',
    ".codex/auth.json": {"OPENAI_API_KEY": None},
    ".codex/history.jsonl": {"session_id": "0a1b", "ts": 1, "text": "List."},
    ".codex/version.json": {"latest_version": "1"},
    ".codex/log/codex-tui.log": "INFO start\n",
    ".gemini/settings.json": {"security": {"auth": {"selectedType": "x"}}},
    ".gemini/projects.json": {"projects": {"/w": "w"}},
    ".gemini/tmp/w/logs.json": [
        {"sessionId": "s", "messageId": 0, "type": "user", "message": "List.", "timestamp": "t"}
    ],
    ".pi/agent/models.json": {"providers": {}},
    ".pi/agent/auth.json": {},
    ".kimi-code/sessions/wd_w/session_0a1b/state.json": {"title": "List", "agents": {"main": {}}},
    ".copilot/config.json": {"trusted_folders": ["/w"]},
    ".factory/sessions/-w/0a1b.settings.json": {"model": "m", "tokenUsage": {"inputTokens": 1}},
    ".grok/sessions/w/gr1b/summary.json": {"info": {"id": "0a1b", "cwd": "/w"}},
    ".local/share/opencode/auth.json": {},
    ".local/share/opencode/log/opencode.log": "INFO start\n",
    ".local/share/opencode/repos/.keep": "",
}
HOMES = (".claude", ".codex", ".gemini", ".pi", ".qwen", ".kimi-code", ".copilot", ".cursor")
HOMES += (".factory", ".grok", ".local/share/opencode")


@pytest.fixture
def home(tmp_path):
    """A home directory with a session of each harness, named after it, and files that are no logs."""
    for name, file in LOGS.items():
        text = log_of(name, CONVERSATION)[0].decode()
        for key in ("sessionId", "id"):
            text = text.replace(f'"{key}": "s"', f'"{key}": "s-{name.split(",")[0]}"')
        write(tmp_path / file, text)
    for file, content in OTHERS.items():
        write(tmp_path / file, content if isinstance(content, str) else json.dumps(content))
    tables = opencode_tables(CONVERSATION)
    folder = tmp_path / ".local" / "share" / "opencode"
    save_opencode(folder / "opencode.db", tables)
    save_storage(folder / "storage", tables)
    with closing(sqlite3.connect(tmp_path / ".codex" / "state.sqlite")) as database:
        database.execute("CREATE TABLE threads (id)")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_one_command_converts_all_homes_and_skips_what_is_no_log(home, smollm2_dir, capsys):
    out = home / "ds"
    template = ["--tokenizer", str(smollm2_dir), "--chat-template", "chatml_tools_thinking"]
    inputs = [str(home / name) for name in HOMES]
    assert run(["convert", *inputs, *template, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = rollout_io.read(out).to_pylist()
    assert len({row["trajectory_id"] for row in rows}) == len(LOGS) + 1
    assert told["unread"] == {}
    sources = [row["source"] for row in rows]
    for file in (*LOGS.values(), ".local/share/opencode/opencode.db"):
        assert any(source.startswith(str(home / file)) for source in sources), file
    shown = {f for f in OTHERS if not f.rpartition("/")[2].startswith(".")}
    skipped = {str(home / file) for file in (*shown, ".codex/state.sqlite")}
    assert set(told["left"]) == skipped


def test_a_home_with_a_session_without_an_answer_converts_without_it(home, smollm2_dir):
    file = home / LOGS["pi"]
    started = json.loads(file.read_text().split("\n")[0]) | {"id": "started"}
    write(file.with_name("started.jsonl"), json.dumps(started) + "\n")
    shutil.rmtree(home / ".codex")
    out, choices = home / "ds", {"tokenizer": str(smollm2_dir), "on_error": "skip"}
    inputs = [str(home / name) for name in HOMES if name != ".codex"]
    choices["chat_template"] = "chatml_tools_thinking"
    summary = rollout_io.convert(inputs, out, **choices).summary
    assert (summary.num_trajectories, summary.num_rejected) == (len(LOGS), 1)


@pytest.mark.parametrize("name", HOMES)
def test_the_viewer_opens_each_home_unconverted(home, name):
    ask = Asked(home / name)
    lines = ask("/api/datasets/d0/trajectories", where="error IS NULL")
    assert len(lines) == 1
    told = ask("/api/datasets/d0/conversation", trajectory_id=lines["trajectory_id"][0])
    texts = [p["text"] for lane in told["lanes"] for t in lane["turns"] for p in t["parts"]]
    assert any(message["content"] in texts for message in CONVERSATION if message["content"])
