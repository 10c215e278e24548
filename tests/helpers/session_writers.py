"""Writers of sessions, one a format, with the verbs of which the logs of agent programs consist.

A script of `test_session_events` tells a writer what happens; the writer writes it as the program does.
A verb that a format's log has no record for raises `NotLogged`.
"""

import json
from itertools import count

from tests.helpers.conversation_writers import (
    GOOSE_TABLES,
    OPENCODE_TABLES,
    save_opencode,
)


class NotLogged(Exception):
    """The program does not do this, or its log does not show it."""


def no(*_):
    raise NotLogged


class Writer:
    """A session; `copy` and `refer` begin another one that starts with what this one has so far."""

    rewind = compact = copy = refer = cut = sub_agent = no

    def __init__(self, folder, name="s", lines=()):
        self.folder, self.name, self.lines = folder, name, list(lines)
        self.numbers = count(len(self.lines))
        self.others = []
        self.start()

    def start(self):
        """Write the head of the session."""

    def again(self, name, **fields):
        """Return another session of the program."""
        other = type(self)(self.folder, name, **fields)
        self.others.append(other)
        return other

    def user(self, text):
        self.message("user", text)

    def answer(self, text):
        self.message("assistant", text)

    def resume(self):
        """Go on later, in the same file or in another."""
        return self

    def write(self):
        """Write all files; return their paths."""
        path = self.folder / f"{self.name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return [path, *(p for other in self.others for p in other.write())]


class Codex(Writer):
    def __init__(self, folder, name="s", lines=(), **meta):
        self.meta = meta
        super().__init__(folder, name, lines)

    def line(self, kind, **payload):
        self.lines.append(
            {"timestamp": "t", "ordinal": len(self.lines), "type": kind, "payload": payload}
        )

    def start(self):
        if not self.lines:
            self.line("session_meta", id=self.name, cwd="/", cli_version="0.171.0", **self.meta)

    def message(self, role, kind, text):
        content = [{"type": kind, "text": text}]
        self.line("response_item", type="message", role=role, content=content)

    def user(self, text):
        self.message("user", "input_text", text)

    def answer(self, text):
        self.message("assistant", "output_text", text)
        self.line("token_usage_record", response_id=f"r{len(self.lines)}")

    def cut(self, text):
        self.message("assistant", "output_text", text)
        self.message("user", "input_text", "<turn_aborted>\nInterrupted.\n</turn_aborted>")

    def rewind(self, num_turns):
        self.line("event_msg", type="thread_rolled_back", num_turns=num_turns)

    def compact(self, summary):
        self.line("compacted", message=summary)

    def copy(self):
        head = json.loads(json.dumps(self.lines[0]))
        head["payload"] |= {"id": "fork", "forked_from_id": self.name}
        return self.again("fork", lines=[head, *self.lines[1:]])

    def refer(self):
        base = {"thread_id": self.name, "end_ordinal_exclusive": len(self.lines)}
        return self.again("fork", forked_from_id=self.name, history_base=base)

    def resume(self):
        """A second file of the thread, which refers to the first."""
        base = {"thread_id": self.name, "end_ordinal_exclusive": len(self.lines)}
        other = self.again("again", history_base=base)
        other.lines[0]["payload"]["id"] = self.name
        return other

    def sub_agent(self):
        return self.again("sub", parent_thread_id=self.name)


class Gemini(Writer):
    def start(self):
        head = {"sessionId": self.name, "projectHash": "p", "startTime": "t", "kind": "main"}
        self.lines = self.lines or [head]

    def line(self, kind, text, **fields):
        name = f"{self.name}{next(self.numbers)}"
        content = [{"text": text}] if kind == "user" else text
        self.lines.append({"id": name, "type": kind, "content": content} | fields)

    def user(self, text):
        self.line("user", text)

    def answer(self, text):
        self.line("gemini", text, model="g", tokens={"input": 1})

    def rewind(self, num_turns):
        users = [line["id"] for line in self.lines if line.get("type") == "user"]
        self.lines.append({"$rewindTo": users[-num_turns]})

    def compact(self, summary):
        history = [
            {"id": "c1", "type": "user", "content": [{"text": summary}]},
            {"id": "c2", "type": "gemini", "content": "Got it."},
        ]
        self.lines.append({"$set": {"messages": history}})

    def resume(self):
        """The history again, and a second file that is a stub."""
        shown = [line for line in self.lines if "type" in line]
        self.lines.append({"$set": {"messages": shown}})
        stub = self.again(f"{self.name}-later")
        stub.lines = [self.lines[0], {"$set": {"messages": []}}]
        return self

    def sub_agent(self):
        folder = self.folder / self.name
        folder.mkdir()
        other = Gemini(folder, "sub")
        other.lines[0]["kind"] = "subagent"
        self.others.append(other)
        return other


class Tree(Writer):
    """Records that name the one before them; a rewind is a record with an earlier parent."""

    parent = None

    def record(self, **fields):
        name = f"{self.name}{next(self.numbers)}"
        self.lines.append(fields | {self.ID: name, self.PARENT: self.parent})
        self.parent = name

    def said(self):
        return [n for n in self.lines if n.get("message", {}).get("role") == "user"]

    def rewind(self, num_turns):
        self.parent = self.said()[-num_turns][self.PARENT]

    def copy(self):
        other = self.again("fork", lines=self.lines)
        other.parent = self.parent
        return other


class Pi(Tree):
    ID, PARENT = "id", "parentId"

    def start(self):
        head = {"type": "session", "version": 3, "id": self.name, "timestamp": "t", "cwd": "/"}
        self.lines = [head, *self.lines[1:]]

    def message(self, role, text, **fields):
        content = [{"type": "text", "text": text}]
        self.record(type="message", message={"role": role, "content": content} | fields)

    def answer(self, text):
        self.message("assistant", text, model="m", stopReason="stop")

    def cut(self, text):
        self.message("assistant", text, model="m", stopReason="aborted")

    def compact(self, summary):
        self.record(type="compaction", summary=summary, firstKeptEntryId="none")


class Qwen(Tree):
    ID, PARENT = "uuid", "parentUuid"

    def record(self, **fields):
        super().record(sessionId=self.name, timestamp="t", **fields)

    def copy(self):
        other = super().copy()
        other.lines = [line | {"sessionId": "fork"} for line in self.lines]
        return other

    def user(self, text):
        self.record(type="user", message={"role": "user", "parts": [{"text": text}]})

    def answer(self, text):
        self.record(type="assistant", message={"role": "model", "parts": [{"text": text}]})

    def compact(self, summary):
        history = [{"role": "user", "parts": [{"text": summary}]}]
        payload = {"compressedHistory": history}
        self.record(type="system", subtype="chat_compression", systemPayload=payload)

    def sub_agent(self):
        other = self.again("sub")
        other.record = lambda **fields: (
            Qwen.record(other, **fields, isSidechain=True, agentName="helper")
            or other.lines[-1].update(sessionId=self.name)
        )
        return other


class ClaudeCode(Tree):
    ID, PARENT = "uuid", "parentUuid"
    agent = None

    def record(self, **fields):
        side = {"isSidechain": self.agent is not None, "agentId": self.agent}
        super().record(sessionId=self.name, timestamp="t", cwd="/", **side, **fields)

    def user(self, text, **fields):
        self.record(type="user", message={"role": "user", "content": text}, **fields)

    def answer(self, text, stop_reason="end_turn"):
        content = [{"type": "text", "text": text}]
        message = {
            "id": f"msg{self.name}{len(self.lines)}",
            "role": "assistant",
            "content": content,
        }
        self.record(type="assistant", message=message | {"stop_reason": stop_reason})

    def compact(self, summary):
        self.parent = None
        facts = {"trigger": "auto", "preTokens": 9}
        self.record(type="system", subtype="compact_boundary", compactMetadata=facts)
        self.user(summary, isCompactSummary=True)

    def copy(self):
        other = super().copy()
        other.lines = [
            line
            | {"sessionId": "fork", "forkedFrom": {"sessionId": "s", "messageUuid": line["uuid"]}}
            for line in self.lines
        ]
        return other

    def sub_agent(self):
        other = ClaudeCode(self.folder, self.name)
        other.lines, other.agent, other.parent = self.lines, "helper", None
        other.numbers = count(100)
        return other


class Droid(Tree):
    ID, PARENT = "id", "parentId"

    def start(self):
        self.lines = self.lines or [{"type": "session_start", "id": self.name, "cwd": "/"}]
        self.parent = self.parent or self.name

    copy = no  # the log of a fork is not known

    def message(self, role, text):
        content = [{"type": "text", "text": text}]
        self.record(type="message", message={"role": role, "content": content})


class Kimi(Writer):
    def start(self):
        self.lines = self.lines or [{"type": "metadata", "protocol_version": "1.4"}]

    def line(self, kind, **fields):
        self.lines.append({"type": f"context.{kind}", "time": len(self.lines)} | fields)

    def user(self, text):
        content = [{"type": "text", "text": text}]
        message = {"role": "user", "content": content, "origin": {"kind": "user"}}
        self.line("append_message", message=message)

    def answer(self, text):
        name = f"{self.name}{next(self.numbers)}"
        self.line("append_loop_event", event={"type": "step.begin", "uuid": name})
        part = {"type": "text", "text": text}
        event = {"type": "content.part", "stepUuid": name, "part": part}
        self.line("append_loop_event", event=event)

    def rewind(self, num_turns):
        self.line("undo", count=num_turns)

    def compact(self, summary):
        self.line("apply_compaction", contextSummary=summary, keptUserMessageCount=0)

    def copy(self):
        return self.again("fork", lines=self.lines)

    def sub_agent(self):
        return self.again("sub")

    def write(self):
        for name, writer in {"main": self, **{o.name: o for o in self.others}}.items():
            is_fork = name == "fork"
            folder = self.folder / ("fork" if is_fork else "s") / "agents"
            path = folder / ("main" if is_fork else name) / "wire.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in writer.lines))
        return sorted(self.folder.rglob("wire.jsonl"))


class Copilot(Writer):
    agent = None

    def start(self):
        if not self.lines:
            self.line("session.start", sessionId=self.name, context={"cwd": "/"})

    def line(self, kind, **data):
        marks = {} if self.agent is None else {"agentId": self.agent}
        name = f"e{len(self.lines)}"
        self.lines.append({"type": kind, "data": data, "id": name, "parentId": None} | marks)

    def user(self, text):
        self.line("user.message", content=text)

    def answer(self, text):
        self.line("assistant.message", content=text)

    def rewind(self, num_turns):
        users = [line["id"] for line in self.lines if line["type"] == "user.message"]
        self.line("session.snapshot_rewind", upToEventId=users[-num_turns])

    def compact(self, summary):
        self.line("session.compaction_complete", summaryContent=summary)

    def sub_agent(self):
        other = Copilot(self.folder, "sub")
        other.lines, other.agent = self.lines, "helper"
        return other


class OpenHands(Writer):
    def line(self, kind, **fields):
        place = {"id": f"e{len(self.lines)}", "timestamp": "t", "source": "agent"}
        self.lines.append({"kind": kind} | place | fields)

    def message(self, role, text):
        message = {"role": role, "content": [{"type": "text", "text": text}]}
        self.line("MessageEvent", llm_message=message)

    def compact(self, summary):
        names = [line["id"] for line in self.lines]
        self.line("Condensation", forgotten_event_ids=names, summary=summary, summary_offset=0)


class OpenClaw(Writer):
    key, messages = "agent:main:main", ()

    def user(self, text):
        self.messages = [*self.messages, {"role": "user", "content": text}]

    def answer(self, text):
        content = [{"type": "text", "text": text}]
        self.messages = [*self.messages, {"role": "assistant", "content": content}]
        end = {"type": "agent.end", "sessionKey": self.key, "success": True}
        self.lines.append(end | {"messages": self.messages})

    def compact(self, summary):
        self.messages = [{"role": "compactionSummary", "summary": summary}]

    def rewind(self, num_turns):
        users = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        self.messages = self.messages[: users[-num_turns]]

    def sub_agent(self):
        other = OpenClaw(self.folder)
        other.lines, other.key = self.lines, "agent:main:subagent:1"
        return other


class Traces(Writer):
    def start(self):
        head = {"type": "session", "harness": "h", "id": self.name}
        self.lines = self.lines or [head]

    def message(self, role, text):
        self.lines.append({"type": "message", "message": {"role": role, "content": text}})

    def sub_agent(self):
        other = self.again("sub")
        other.lines[0] |= {"parent": self.name, "agent": "helper"}
        return other


class Database(Writer):
    """Sessions in one database; the rows of all are in the first writer's."""

    parent, time = None, 0

    def write(self):
        path = self.folder / "log.db"
        save_opencode(path, self.tables(), self.COLUMNS)
        return [path]

    def sessions(self):
        return [self, *self.others]

    def copy(self):
        other = self.again("fork")
        other.rows = [dict(row) for row in self.rows]
        return other

    def sub_agent(self):
        other = self.again("sub")
        other.parent = self.name
        return other

    def start(self):
        self.rows = []


class Goose(Database):
    COLUMNS = GOOSE_TABLES

    def message(self, role, text, *, is_hidden=False):
        facts = {"userVisible": not is_hidden, "agentVisible": True}
        content = [{"type": "text", "text": text}]
        row = {"role": role, "content_json": content, "metadata_json": facts}
        self.rows.append(row | {"created_timestamp": len(self.rows)})

    def compact(self, summary):
        self.message("user", summary, is_hidden=True)
        self.message("assistant", "Go on.", is_hidden=True)

    def tables(self):
        heads = [{"id": s.name, "parent_session_id": s.parent} for s in self.sessions()]
        numbers = count()
        rows = [
            row | {"id": next(numbers), "session_id": session.name}
            for session in self.sessions()
            for row in session.rows
        ]
        return {"sessions": heads, "messages": rows}


class OpenCode(Database):
    COLUMNS = OPENCODE_TABLES

    def add(self, role, parts, **fields):
        time = {"created": len(self.rows), "completed": len(self.rows)}
        self.rows.append({"data": {"role": role, "time": time} | fields, "parts": parts})

    def user(self, text):
        self.add("user", [{"type": "text", "text": text}])

    def answer(self, text):
        parts = [{"type": "step-start"}, {"type": "text", "text": text}, {"type": "step-finish"}]
        self.add("assistant", parts, modelID="m", finish="stop")

    def cut(self, text):
        self.add("assistant", [{"type": "step-start"}, {"type": "text", "text": text}], modelID="m")
        self.rows[-1]["data"]["time"].pop("completed")

    def compact(self, summary):
        self.add("user", [{"type": "compaction"}])
        self.add("assistant", [{"type": "text", "text": summary}], summary=True)

    def tables(self):
        tables = {"session": [], "message": [], "part": []}
        for session in self.sessions():
            tables["session"].append({"id": session.name, "parent_id": session.parent})
            for i, row in enumerate(session.rows):
                name = f"{session.name}{i:03}"
                of = {"session_id": session.name, "time_created": i}
                tables["message"].append({"id": name, "data": row["data"]} | of)
                tables["part"] += [
                    {"id": f"{name}-{j}", "message_id": name, "data": part} | of
                    for j, part in enumerate(row["parts"])
                ]
        return tables


SESSION_WRITERS = {
    "claude_code": ClaudeCode,
    "codex_cli": Codex,
    "copilot_cli": Copilot,
    "droid": Droid,
    "gemini_cli": Gemini,
    "goose": Goose,
    "kimi_cli": Kimi,
    "openclaw": OpenClaw,
    "opencode": OpenCode,
    "openhands_sdk": OpenHands,
    "pi": Pi,
    "qwen_code": Qwen,
    "session_traces": Traces,
}
