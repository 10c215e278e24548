"""The `gemini_cli` and `qwen_code` formats: sessions of Gemini CLI, and of Qwen Code, which is built on it.

Gemini CLI writes JSON Lines since 0.39, and wrote one document before. A line with the id of an earlier
message replaces it; `$set` shows the whole history (a compaction, a resumed session), and `$rewindTo`
takes back a message and all after it. An answer in a history that no line has before, without a model, is
the program's own. Calls of tools contain their results, which newer versions repeat in the next message.
Thoughts are Gemini's summaries of its reasoning (a subject and a description). Messages of other types
(info, warning, error) are only for display.

A session is a run, in one file or more; sub-agents (`chats/SESSION/ID.jsonl`) belong to the run of their session. The log
has no reward, no token ids, no system prompt and no tool definitions.

Qwen Code writes a tree of records, whose messages are contents of Gemini's API. Records with one uuid are
parts of one message. A compression begins a context with the history that replaces the messages, and so
does the history that a forked sub-agent (`isSidechain`) starts with. A branch in a file of its own begins
with records of another session, whose answers are trained on in one of them. The log also lacks the
reminder about skills and the environment that is sent before the first message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_io.formats.base import note, note_run
from rollout_io.formats.contexts import SUMMARIES, Contexts, Item, Said
from rollout_io.formats.dialects import gemini
from rollout_io.formats.dialects.gemini import Part, Parts, joined_content, parts_in, result_content
from rollout_io.formats.engines.sessions import Line, Names, Sessions
from rollout_io.formats.grammar import ITSELF, inner, like
from rollout_io.formats.parsing.content import NO_JSON, extend, joined, json_text, tool_call
from rollout_io.formats.parsing.content import Message as Chat
from rollout_io.formats.parsing.media import part_of_data
from rollout_io.formats.requests import Sends

WRITTEN = "answers that the program wrote, in the history after a compaction: part of the prompt"
THOUGHTS = "thoughts that are not sent again, before later answers of their context"
UNCALLED = "answers with a call that is not in the log, only its result: part of the prompt"
PLACEHOLDER = "turns that ended with a result, behind which the program puts an answer of its own"
BROKEN_OFF = "[The previous response was interrupted before it completed.]"
JOINED = "answers that are sent as one with the answer before them: thoughts and texts are joined"
_CONTEXT = "<session_context>"
_LEAVES = {
    "shown to the user, not sent": "info warning error */displayContent user/tokens model/tokens */timestamp "
    "gemini/toolCalls session/summary session/$set.summary",
    "facts about the session": "session/startTime session/lastUpdated session/directories "
    "session/meta session/$set.lastUpdated session/$set.directories session/$set.sessionId "
    "session/$set.memoryScratchpad session/$set.hasUserOrAssistantMessage",
    "facts about a thought": "gemini/thoughts.timestamp",
}
_Content = Annotated[Parts, inner(gemini.PARTS)]


class _Thought(msgspec.Struct, gc=False):
    subject: str | None = None
    description: str | None = None


class _ToolCall(msgspec.Struct, gc=False):
    name: str
    id: str | None = None
    args: msgspec.Raw = NO_JSON
    result: Parts = None


class Message(msgspec.Struct, gc=False):
    """A message; one of another type than those of the grammar is for display."""

    type: str
    id: str | None = None
    content: _Content = None


class Answer(Message, gc=False):
    """A message of the model."""

    parts: _Content = None
    thoughts: list[_Thought] | None = None
    tool_calls: list[_ToolCall] | None = msgspec.field(name="toolCalls", default=None)
    model: str | None = None
    tokens: Any = None


class _Set(msgspec.Struct, gc=False):
    messages: Annotated[list[Answer] | None, ITSELF] = None


class State(msgspec.Struct, gc=False):
    """The head of a session, a history, or a rewind."""

    session: str | None = msgspec.field(name="sessionId", default=None)
    project: str | None = msgspec.field(name="projectHash", default=None)
    kind: str | None = None
    messages: Annotated[list[Answer] | None, ITSELF] = None
    set: _Set | None = msgspec.field(name="$set", default=None)
    rewind: str | None = msgspec.field(name="$rewindTo", default=None)


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the messages of a file."""
    logged, results, calls = set[str](), set[str](), dict[str | None, _ToolCall]()
    shown: Said | None = None  # the end of a history, which is what was sent, as it is
    log.sends = Sends(unsent_thoughts=THOUGHTS)
    for where, _, record in lines:
        if isinstance(record, Answer) and _has_calls_alone(record, log):
            calls |= {call.id: call for call in record.tool_calls or ()}
            logged.add(record.id or where)
            _attach(calls, where, log, shown)
        elif isinstance(record, Message):
            answered, tip = _results(record), log.tip
            is_prompt = record.type == "user" and not answered
            if (
                is_prompt
                and tip is not None
                and tip.messages
                and tip.messages[-1]["role"] == "tool"
            ):
                end: Chat = {"role": "assistant", "content": BROKEN_OFF}
                log.say([end], where, f"{where} end", given=PLACEHOLDER)
            _add(record, answered, where, log, logged)
            _attach(calls, where, log, shown)
            results |= {name for name in answered if name}
        elif isinstance(record, State) and record.rewind is not None:
            back = log.find(record.rewind)
            log.rewind(back and back.before)
        elif isinstance(record, State):
            history = record.messages if record.set is None else record.set.messages
            if history is not None:
                name = "messages" if record.set is None else "$set.messages"
                _show(history, f"{where}, {name}", log, None if record.set is None else logged)
                shown = log.tip
    _give_uncalled(results, log)


def _has_calls_alone(record: Answer, log: Contexts) -> bool:
    """True for a record behind an answer of an editor's session (ACP), with the calls of all of them."""
    is_behind = log.tip is not None and log.tip.is_answer and log.find(record.id) is None
    is_empty = not record.content and not record.thoughts and record.tokens is None
    return bool(record.tool_calls) and is_empty and is_behind


def _give_uncalled(results: Collection[str], log: Contexts) -> None:
    """Make answers part of the prompt that called what is in no record, such as a cancelled call."""
    answer = None
    for node in log.path():
        answer = node if node.is_answer else answer
        if answer is not None and not answer.is_given:
            called = {c.get("id") for m in answer.messages for c in m.get("tool_calls", ())}
            num = sum(m.get("tool_call_id") in {*results} - called for m in node.messages)
            answer.is_given = num > 0
            note(UNCALLED, num)


def _attach(
    calls: Mapping[str | None, _ToolCall], where: str, log: Contexts, shown: Said | None
) -> None:
    """Add calls to the answers behind a node whose results the context has."""
    answer, path = None, log.path()
    for node in path[path.index(shown) + 1 :] if shown in path else path:
        answer = node if node.is_answer else answer
        names = {message.get("tool_call_id") for message in node.messages} & calls.keys()
        if answer is None or not names:
            continue
        last = [m for m in answer.messages if m["role"] == "assistant"][-1]
        names -= {call.get("id") for call in last.get("tool_calls", ())}
        _add_calls(last, [(name, call) for name, call in calls.items() if name in names], where)


def _add_calls(message: Chat, calls: Sequence[tuple[str | None, _ToolCall]], where: str) -> None:
    more = [tool_call(name, call.name, json_text(call.args, where)) for name, call in calls]
    if more:
        message["tool_calls"] = [*message.get("tool_calls", ()), *more]


def _add(
    message: Message, answered: set[str | None], where: str, log: Contexts, logged: set[str]
) -> None:
    key = message.id or where
    logged.add(key)
    messages = [*_messages(message, where)]
    earlier = log.find(key)
    if isinstance(message, Answer):
        log.model = message.model or log.model
    if earlier is not None and earlier in log.path():
        earlier.messages = messages
        return
    log.say(messages, where, key)
    for node in log.path() if answered else ():  # the message repeats them
        if node is not log.tip:
            node.messages = [m for m in node.messages if m.get("tool_call_id") not in answered]


def _show(history: Sequence[Answer], where: str, log: Contexts, logged: set[str] | None) -> None:
    """Go to the end of a history; `logged` are the messages with a line of their own."""
    answered = {name for message in history for name in _results(message)}
    items, keys = list[Item](), set[str]()
    for i, message in enumerate(history):
        log.model = message.model or log.model
        key = message.id if message.id and message.id not in keys else f"{where}[{i}]"
        keys.add(key)
        pieces = [*_messages(message, f"{where}[{i}]")]
        if message.type != "user":
            pieces = [m for m in pieces if m.get("tool_call_id") not in answered]
        is_unsaid = logged is not None and log.find(key) is None
        given: bool | str = is_unsaid and key in (logged or ())  # the calls of an editor's session
        if is_unsaid and not given and message.type != "user" and message.model is None:
            given = WRITTEN
        is_copy = bool(given) or log.find(key) is not None
        ends = (items[-1].messages[-1:] if items else (), pieces)
        is_answer = all(pieces and pieces[0]["role"] == "assistant" for pieces in ends)
        if logged is not None and is_copy and is_answer:
            last = dict(items[-1].messages[-1])  # they are sent as one
            extend(last, pieces[0])
            note(JOINED)
            items[-1] = items[-1]._replace(messages=[*items[-1].messages[:-1], last, *pieces[1:]])
        else:
            items.append(Item(key, pieces, f"{where}[{i}]", given=given))
    note(SUMMARIES, any(item.given == WRITTEN for item in items))
    log.show(items)


def _results(message: Message) -> set[str | None]:
    """Return the names of the calls whose results a message of the user has."""
    parts = parts_in(message.content) if message.type == "user" else ()
    return {p.function_response.id for p in parts if p.function_response is not None}


def _messages(logged: Message, where: str) -> Iterator[Chat]:
    if logged.type == "user":
        yield from gemini.messages_of("user", logged.content, where)
    if not isinstance(logged, Answer) or logged.type not in {"gemini", "model"}:
        return
    content = logged.content if logged.parts is None else logged.parts
    pieces = gemini.messages_of("assistant", content, where)
    thoughts = [joined(t.subject or "", t.description or "") for t in logged.thoughts or ()]
    if any(thoughts) and all("reasoning_content" not in message for message in pieces):
        pieces[0]["reasoning_content"] = "\n".join(thoughts)
    called = {c.get("id") for message in pieces for c in message.get("tool_calls", ())}
    calls = [(call.id or f"call_{i}", call) for i, call in enumerate(logged.tool_calls or ())]
    _add_calls(pieces[-1], [(name, call) for name, call in calls if name not in called], where)
    yield from pieces
    for name, call in calls:
        if call.result is not None:
            text = joined_content(_part_content(part, where) for part in parts_in(call.result))
            yield {"role": "tool", "tool_call_id": name, "content": text}


def _part_content(part: Part, where: str) -> str | list[Chat]:
    if part.function_response is not None:
        return result_content(part.function_response, where)
    data = part.inline_data or part.file_data
    if data is not None or part.text is None:
        return [part_of_data(data or {}) or {"type": "data"}]
    return part.text


def names(path: Path, first: Sequence[Any]) -> Names:
    """Return the names in the head of a file; a sub-agent's is in the folder of its session."""
    head = next((line for line in first if isinstance(line, State) and line.session), State())
    parent = path.parent.name if head.kind == "subagent" else None
    session = head.session or str(path)
    is_empty = len(first) > 1 and all(map(_is_beginning, first))
    return Names(session, parent, path.stem, labels={"project": head.project}, is_empty=is_empty)


def _is_beginning(record: Any) -> bool:
    """True for a head, and for the history that each file begins with: what the session is about."""
    if not isinstance(record, State):
        return False
    shown = record.messages or (record.set and record.set.messages) or ()
    texts = [part.text or "" for message in shown for part in parts_in(message.content)]
    return len(shown) <= 1 and all(text.startswith(_CONTEXT) for text in texts)


ADAPTER = Sessions(
    kind="type",
    default="session",
    records={"session": State, "user": Message, "gemini": Answer, "model": Answer},
    leaves=_LEAVES,
    names=names,
    read=read,
    is_record=like(
        {"sessionId": str, "messages": [{"type": str}]},
        {"sessionId": str, "messages": None, "projectHash": str, "startTime": str},
    ),
).adapter("sessions of Gemini CLI (JSON Lines, or one JSON document each); text only")


REMINDER = (
    "runs without the reminder (skills, environment, folder) that Qwen Code sends before the first "
)
REMINDER += "message: it is not in the log"
_QWEN_LEAVES = {
    "facts about a record, the process and its settings": "*/timestamp */version "
    "*/gitBranch */agentColor */agentRunId */provenance */goalContext */backgroundTurn */promptId "
    "*/daemonPromptId */forkedFrom */externalInputKind assistant/usageMetadata "
    "assistant/contextWindowSize",
    "repeats what is in the message, for display": "user/systemPayload "
    "tool_result/toolCallResult tool_result/systemPayload assistant/systemPayload",
    "facts about a compression": "system:chat_compression/systemPayload.info "
    "system:chat_compression/systemPayload.notes system:chat_compression/systemPayload.promptIds "
    "system:chat_compression/systemPayload.completedToolCallIds "
    "system:agent_bootstrap/systemPayload.kind",
    "state of the harness, shown to the user or read when a session is resumed": "system",
}
_History = Annotated[list[msgspec.Raw] | None, inner(gemini.CONTENT)]


class _Record(msgspec.Struct, gc=False, rename="camel"):
    """A record of the tree; the model does not see those without a struct of their own."""

    uuid: str | None = None
    parent_uuid: str | None = None
    session_id: str | None = None
    cwd: str | None = None
    is_sidechain: bool | None = None
    agent_id: str | None = None
    agent_name: str | None = None


class _Turn(msgspec.Struct, gc=False):
    contents = gemini.CONTENT

    parts: gemini.Parts = None


class _Spoken(_Record, gc=False, rename="camel"):
    message: _Turn | None = None


class _Reply(_Spoken, gc=False, rename="camel"):
    model: str | None = None


class _Compression(msgspec.Struct, gc=False, rename="camel"):
    history: _History = msgspec.field(name="compressedHistory", default=None)


class _Bootstrap(msgspec.Struct, gc=False, rename="camel"):
    history: _History = None
    system_instruction: Any = None
    tools: Any = None


class _Compressed(_Record, gc=False, rename="camel"):
    system_payload: _Compression | None = None


class _Begun(_Record, gc=False, rename="camel"):
    system_payload: _Bootstrap | None = None


class _Copy(msgspec.Struct, gc=False):
    uuid: str
    message: msgspec.Raw


_COPY = msgspec.json.Decoder(_Copy)
_ROLES = {"user": "user", "tool_result": "user", "assistant": "assistant"}


def _identity(kind: str, fields: bytes) -> str | None:
    """Return the id and the message of an answer, which a branch in another file copies."""
    line = _COPY.decode(fields) if kind == "assistant" else None
    return None if line is None else f"{line.uuid} {bytes(line.message)!r}"


def _read_tree(lines: Iterator[Line], log: Contexts) -> None:
    parts: dict[str, list[Part | str]] = {}
    note_run(REMINDER)
    for where, kind, record in lines:
        if not isinstance(record, _Record):
            continue
        key = record.uuid or where
        begun = log.find(key) if key in parts else None
        if begun is None and record.uuid:
            log.follow(record.parent_uuid)
        if isinstance(record, _Compressed | _Begun):
            payload = record.system_payload
            if isinstance(payload, _Bootstrap):
                if payload.system_instruction is not None:
                    log.system = gemini.system_prompt(payload.system_instruction, where)
                log.tools = gemini.tools(payload.tools) or log.tools
            history = (payload.history if payload else None) or ()
            log.replace()
            messages = gemini.messages(history, f"{where}, systemPayload")
            log.say(messages, where, f"{where}, history", given=True)
        if not isinstance(record, _Spoken):
            log.say([], where, key)
            continue
        content = parts_in(record.message.parts if record.message else None)
        parts[key] = [*parts.get(key, []), *content]
        messages = gemini.messages_of(_ROLES[kind], parts[key], where) if parts[key] else []
        if isinstance(record, _Reply):
            log.model = record.model or log.model
        node = begun or log.say(messages, where, key)
        node.messages, node.where = messages, where


def _tree_names(path: Path, first: Sequence[Any]) -> Names:
    head = next((r for r in first if isinstance(r, _Record) and r.session_id), _Record())
    session = head.session_id or str(path)
    labels = {"cwd": head.cwd}
    if head.is_sidechain:
        agent = head.agent_name or head.agent_id or path.stem
        return Names(f"{session}/{path.stem}", session, agent, labels=labels)
    return Names(session, labels=labels)


_IDS = {"uuid": object, "parentUuid": object, "sessionId": object}
QWEN = Sessions(
    kind="type",
    subkind="subtype",
    records={
        "user": _Spoken,
        "tool_result": _Spoken,
        "assistant": _Reply,
        "system:chat_compression": _Compressed,
        "system:agent_bootstrap": _Begun,
        "system": _Record,
    },
    leaves=_QWEN_LEAVES,
    names=_tree_names,
    read=_read_tree,
    is_record=like(
        {**_IDS, "type": "system", "systemPayload": object},
        {**_IDS, "type": {*_ROLES}, "message": {"parts": list}},
    ),
    identity=_identity,
).adapter("sessions of Qwen Code: JSONL, a tree of records; text only")
