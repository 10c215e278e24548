"""The contexts of a Claude Code session, from its lines.

- The main agent's lines are in the order of the log; a sub-agent's lines (`isSidechain`) share an
  `agentId`, or form a chain of `parentUuid`. A forked sub-agent begins with its parent's context:
  its file repeats those lines, or names the last of them (`fork-context-ref`).
- If the request of an answer is logged (`claude_code_requests`), its prompt is what was sent. Else it
  is what the lines before it say, after the last request that is known.
- A compaction (`compact_boundary`, or the summary after it) begins a new context. The messages
  that it keeps (`compactMetadata`) follow the summary, or precede it if the boundary is their
  anchor.
- A prompt or an answer whose parent is not the end of the context goes back to that parent. So does a
  prompt without a parent: it begins a context.
- Lines that the harness retracted (`retractedMessageUuids`, `supersedesUuids`), copies of a line of
  the same agent, and API errors are omitted. Redacted thoughts are not in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rollout_io.formats.base import note
from rollout_io.formats.claude_code_lines import (
    Answer,
    ApiMessage,
    Attached,
    Boundary,
    Command,
    Entry,
    Export,
    Fork,
    Kept,
    Queued,
    Record,
    Replaced,
    Spoken,
    System,
    Trimmed,
    entries_of,
    note_unsent,
    session_above,
)
from rollout_io.formats.claude_code_requests import (
    Blob,
    Reply,
    Request,
    Requests,
    Shaped,
    unknown_in,
)
from rollout_io.formats.contexts import SUMMARIES, Contexts, Said
from rollout_io.formats.dialects.anthropic import messages_of
from rollout_io.formats.engines.sessions import Line
from rollout_io.formats.grammar import Grammar
from rollout_io.formats.parsing.jsonl import decode_line
from schemas.errors import InputError

MAIN, SIDECHAIN = "main", "sidechain"
_NO_KEPT = "after a compaction that keeps messages which are not in the log"
_UNKNOWN_PARENT = "of a forked sub-agent whose log does not tell which context it inherited"
_NO_PARENT = "of a forked sub-agent whose parent's messages are not in the log"
_UNKNOWN = "requests with a message that is not in the log: the prompt is read from the messages"
_PROMPTS = {True: "requests", False: "messages"}
_EDITED = "calls of Edit without the `replace_all` that Claude Code adds: later requests have it"

LINES = Grammar(
    kind="type",
    subkind="subtype",
    default="export",
    records={
        "*": Record,
        "user": Spoken,
        "assistant": Answer,
        "system": System,
        "system:compact_boundary": Boundary,
        "system:microcompact_boundary": Trimmed,
        "system:local_command": Command,
        "attachment": Attached,
        "queue-operation": Queued,
        "fork-context-ref": Fork,
        "content-replacement": Replaced,
        "api-request-shape": Shaped,
        "api-request-blob": Blob,
        "api-request": Request,
        "export": Export,
    },
)


class _Session:
    """What the agents of a session share.

    Attributes:
        requests: The requests that it logs.
        names: Names of the answers that an agent has.
        answers: The answers, and whether the prompt of each is a logged request.
        agents: The agents so far.
    """

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.names: set[str] = set()
        self.answers: dict[Said, tuple[Reply, bool]] = {}
        self.agents: list[_Agent] = []

    def read(self, lines: Sequence[Entry], log: Contexts) -> None:
        """Tell the contexts of the agents what the lines say: the main agent's, then the others'."""
        groups = _by_agent(lines)
        pending = sorted(groups, key=lambda key: key != "")
        while pending:
            ready = [key for key in pending if self._is_ready(groups[key])]
            # If the logs of forks refer to each other in a circle, or to a log that is missing, the first goes on
            # without what it inherited.
            for key in ready or pending[:1]:
                contexts = log.agent(key, SIDECHAIN) if key else log
                self.agents.append(_Agent(self, contexts, groups[key]))
                pending.remove(key)
        trained = [answer for node, answer in self.answers.items() if node.trains]
        note(_EDITED, sum(reply.num_edited for reply, _ in trained))
        note(_UNKNOWN, self.requests.num_unknown)
        sources = {is_sent for _, is_sent in trained}
        kinds = [kind for is_sent, kind in _PROMPTS.items() if is_sent in sources]
        log.values["prompts"] = " and ".join(kinds or ["messages"])
        if sources != {True}:
            note_unsent(lines)

    def _is_ready(self, lines: Iterable[Entry]) -> bool:
        """True if the agent whose context another one inherits is read, if there is one."""
        last = _fork_of(lines)
        return last is None or any(last in agent.at for agent in self.agents)


def _by_agent(lines: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the lines of each agent; the name of the main one is empty."""
    keys: dict[str, str] = {}
    groups: dict[str, list[Entry]] = {}
    for number, line in enumerate(lines):
        record, key = line.record, ""
        if line.is_side and record.agent_id is not None:
            key = f"agent {record.agent_id}"
        elif line.is_side:
            above = keys.get(record.parent_uuid or "")
            key = above or f"chain {record.uuid or number}"
        if record.uuid is not None:
            keys.setdefault(record.uuid, key)
        groups.setdefault(key, []).append(line)
    return groups


def _fork_of(lines: Iterable[Entry]) -> str | None:
    """Return the last line that an agent inherits; None if it is no fork, or repeats the lines."""
    forks = (line.record.parent_last_uuid for line in lines if isinstance(line.record, Fork))
    return next(filter(None, forks), None)


class _Agent:
    """Tells the contexts of an agent what its lines say.

    Attributes:
        uuids: Uuids of all its lines, those to come included.
        at: For each line so far, what its children follow.
        spoken: For each line with a message, what it says.
        versions: Copies of what compactions kept, with the times of their contexts; the first is the
            original, whose time is empty.
        replies: The answers so far, by name.
        pending: What a compaction keeps, by the uuid of the line that it follows.
        awaited: Lines to come that a compaction keeps; a segment ends with its last one.
        is_cut: True between the boundary of a compaction and its summary.
        is_linked: True once a line names a parent with a message.
        began: ISO time of the current context; empty for the first one.
    """

    def __init__(self, session: _Session, log: Contexts, lines: Sequence[Entry]) -> None:
        self.session, self.log, self.others = session, log, [*session.agents]
        self.uuids = {line.record.uuid for line in lines}
        self.at: dict[str, Said | None] = {}
        self.spoken: dict[str, Said] = {}
        self.versions: dict[Said, list[tuple[str, Said]]] = {}
        self.replies: dict[str, tuple[Said, Reply]] = {}
        self.prompts, self.summaries = set[Said](), set[Said]()
        self.pending: dict[str, list[Said]] = {}
        self.awaited: Kept | None = None
        self.is_cut = self.is_linked = False
        self.began = ""
        shapes = (line.record.shape for line in lines if isinstance(line.record, Shaped))
        if (shape := next(filter(None, shapes), None)) is not None:
            log.system, log.tools = session.requests.head(shape)
        if (last := _fork_of(lines)) is not None:
            times = (line.record.timestamp for line in lines)
            self._inherit(
                last, next((at for at in times if isinstance(at, str)), ""), lines[0].where
            )
        for line in lines:
            self.add(line)

    def _inherit(self, last: str, time: str, where: str) -> None:
        """Begin with the context of the parent up to a line.

        A line that a compaction keeps is in the contexts before and after it; the time of the fork
        tells which one it is.
        """
        parent = next((agent for agent in self.others if last in agent.at), None)
        node = None if parent is None else parent.at[last]
        if parent is None or node is None:
            self._lose(_NO_PARENT, where)
            return
        versions = parent.versions.get(node, [("", node)])
        if len(versions) > 1 and not (time and all(began for began, _ in versions[1:])):
            self._lose(_UNKNOWN_PARENT, where)
            return
        node = next(said for began, said in reversed(versions) if began <= time)
        self.log.rewind(node)
        self.log.system = self.log.system or node.head.system
        self.log.tools = self.log.tools or node.head.tools
        path = {*self.log.path()}
        self.at |= {uuid: said for uuid, said in parent.at.items() if said in path}
        self.at[last] = node
        self.spoken = {uuid: said for uuid, said in parent.spoken.items() if said in path}
        self.uuids |= self.spoken.keys()

    def _lose(self, problem: str, where: str) -> None:
        self.log.lose(_error(problem, where), where, loss=f"answers {problem}")

    def add(self, line: Entry) -> None:
        """Add a line, unless it is a copy of a line of this agent."""
        record, uuid = line.record, line.record.uuid
        if uuid is not None and uuid in self.at:
            return
        if isinstance(record, Shaped) and record.shape is not None:
            self.log.system, self.log.tools = self.session.requests.head(record.shape)
        is_kept = self._is_awaited(uuid)
        parent = self.at.get(record.parent_uuid or "")
        is_compaction = line.is_compaction and not self._is_kept_summary(line, parent)
        after = None if is_compaction else parent
        if is_compaction:
            self._compact(line)
        elif line.content is not None:
            self._go_to(parent, line)
            self.is_linked |= parent is not None
        if line.content is not None:
            after = self._say(line, is_kept=is_kept)
            if uuid is not None:
                self.spoken[uuid] = after
        if nodes := self.pending.pop(uuid or "", None):
            after = self._keep(nodes)
        if uuid is not None:
            self.at[uuid] = after

    def _is_awaited(self, uuid: str | None) -> bool:
        """True for a line that a compaction keeps although it is logged only after the compaction."""
        segment = self.awaited
        if segment is None or uuid is None:
            return False
        if segment.uuids is not None:
            return uuid in segment.uuids
        is_kept = segment.head_uuid in {None, uuid}
        if is_kept:
            self.awaited = None if uuid == segment.tail_uuid else Kept(tail_uuid=segment.tail_uuid)
        return is_kept

    def _is_kept_summary(self, line: Entry, parent: Said | None) -> bool:
        """True if a summary is one that a later compaction kept, and that follows the context.

        It follows the later summary, or is a copy in the log of a forked sub-agent.
        """
        if line.content is None or parent is None or parent is not self.log.tip or self.is_cut:
            return False
        return parent in self.summaries or self._is_repeated(line)

    def _is_repeated(self, line: Entry) -> bool:
        """True if another agent has the line too."""
        return any(line.record.uuid in agent.uuids for agent in self.others)

    def _go_to(self, parent: Said | None, line: Entry) -> None:
        """Go back to the parent of a prompt or an answer if other messages follow the parent."""
        log, record = self.log, line.record
        is_turn = line.is_prompt or (line.api is not None and self._begun(line.name) is None)
        if log.tip is None or log.tip is parent or not is_turn:
            return
        if parent is None:
            if record.parent_uuid is None and line.is_prompt and self.is_linked:
                log.rewind(None)
            return
        # Hooks, results and notes follow the parent too, and the program sends them all: only another prompt or
        # answer between here and the parent, or a parent elsewhere, shows that the user went back.
        node: Said | None = log.tip
        goes_on = False
        while node is not None and node is not parent:
            goes_on |= node.is_answer or node in self.prompts
            node = node.before
        if node is None or goes_on:
            log.rewind(parent)

    def _begun(self, name: str) -> tuple[Said, Reply] | None:
        """Return the answer with this name in the current context; None if it has none."""
        begun, node = self.replies.get(name), self.log.tip
        while begun is not None and node is not None and node is not begun[0]:
            node = node.before
        return None if node is None else begun

    def _say(self, line: Entry, *, is_kept: bool) -> Said:
        log, where = self.log, f"{line.where}, message"
        log.is_copied = line.is_copied
        if line.api is not None:
            return self._answer(line, line.api, is_kept=is_kept)
        unknown = unknown_in(line.content, where)
        if unknown is None:
            log.say(messages_of("user", line.content, where), line.where, line.record.uuid or "")
        else:
            self._lose(f"after content of type {unknown!r}", line.where)
        node = log.tip
        assert node is not None
        if line.is_prompt:
            self.prompts.add(node)
        if line.is_compaction:
            self.summaries.add(node)
        return node

    def _answer(self, line: Entry, api: ApiMessage, *, is_kept: bool) -> Said:
        """Begin an answer, or add to it what a line says of it."""
        log, record, name = self.log, line.record, line.name
        assert isinstance(record, Answer)
        begun = self._begun(name)
        if begun is None:
            # An answer's lines are repeated in the logs of forks and resumed sessions; its name tells.
            is_new = name not in self.session.names
            requests, facts = self.session.requests, dict[str, Any]()
            sent = requests.sent(record.request_ref) if is_new and not is_kept else None
            if sent is not None:
                request, history = sent
                log.system, log.tools = requests.head(request.shape_hash)
                log.show(history)
                facts = {"temperature": request.params.temperature, "top_p": request.params.top_p}
            node = log.say((), line.where, name, given=not is_new, facts=facts)
            begun = self.replies[name] = node, Reply(line.where)
            self.session.names.add(name)
            self.session.answers[node] = begun[1], sent is not None
        node, reply = begun
        reply.add(record, line.content)
        # A streamed answer has a line for each of its parts, all with one name: it is complete at the last.
        node.where = line.where
        node.is_copied |= line.is_copied
        node.is_given |= is_kept or line.is_copied or api.is_synthetic
        if api.stop_reason is not None:
            node.facts = {**node.facts, "stop_reason": api.stop_reason}
        if (unknown := reply.unknown) is not None:
            problem = f"after content of type {unknown!r}"
            node.error, node.loss = _error(problem, reply.where), f"answers {problem}"
            node.messages = [{"role": "assistant", "content": unknown}]  # for the count alone
        else:
            node.error, node.messages = None, reply.messages()
            node.mark = reply.messages(is_sent=True) if reply.num_edited else None
        return node

    def _compact(self, line: Entry) -> None:
        """Begin a new context at a boundary, or at a summary without a boundary."""
        record, is_boundary = line.record, line.content is None
        nodes = self._kept(record.kept if isinstance(record, Boundary) else None)
        if not self.is_cut:
            # Begins the context once: at the boundary or, in versions without one, at the summary.
            self.log.replace()
            self.began = record.timestamp if isinstance(record.timestamp, str) else ""
        self.is_cut = is_boundary
        note(SUMMARIES, not is_boundary and not self._is_repeated(line))
        if nodes is None:
            self._lose(_NO_KEPT, line.where)
        elif nodes and isinstance(record, Boundary) and record.kept is not None:
            self.pending[record.kept.anchor_uuid or record.uuid or ""] = nodes

    def _kept(self, segment: Kept | None) -> list[Said] | None:
        """Return the messages that a compaction keeps; None if the log lacks one.

        In a session that was forked after a compaction, they are logged after the summary.
        """
        if segment is None:
            return []
        if segment.uuids is not None:
            self.awaited = segment
            nodes = [self.spoken[uuid] for uuid in segment.uuids if uuid in self.spoken]
            return [*dict.fromkeys(nodes)] if self.uuids.issuperset(segment.uuids) else None
        ends = [segment.head_uuid or "", segment.tail_uuid or ""]
        # All lines of the segment are yet to come.
        if self.uuids.issuperset(ends) and not any(uuid in self.at for uuid in ends):
            self.awaited = segment
            return []
        # What follows a summary comes after the messages that it keeps: the line itself is meant.
        first, last = (self.spoken.get(uuid) or self.at.get(uuid) for uuid in ends)
        path = self.log.path()
        if first not in path or last not in path:
            return None
        return path[path.index(first) : path.index(last) + 1]

    def _keep(self, nodes: Sequence[Said]) -> Said:
        """Say what a compaction keeps, which is what the names of its lines mean from now on."""
        copies = dict(zip(nodes, self.log.keep(nodes), strict=True))
        self.at |= {uuid: copies[n] for uuid, n in self.at.items() if n is not None and n in copies}
        self.spoken |= {uuid: copies[n] for uuid, n in self.spoken.items() if n in copies}
        for node, copy in copies.items():
            self.versions[copy] = self.versions.setdefault(node, [("", node)])
            self.versions[copy].append((self.began, copy))
            self.prompts |= {copy} if node in self.prompts else set()
            self.summaries |= {copy} if node in self.summaries else set()
        return copies[nodes[-1]]


def _error(problem: str, where: str) -> InputError:
    hint = "remove the content from the log if the answers can do without it"
    return InputError("message", where, f"all answers are {problem}", "text, or a tool call", hint)


def _records(lines: Iterable[Line], log: Contexts) -> Iterator[tuple[str, Record, bool]]:
    """Yield the records, each with its place and whether another session has it too."""
    for where, _, record in lines:
        lines_of = [(where, record)]
        for i, raw in enumerate(record.loglines if isinstance(record, Export) else ()):
            at = f"{where}, loglines[{i}]"
            lines_of.append((at, LINES.typed(bytes(raw), at, decode_line)[1]))
        yield from ((at, line, log.is_copied) for at, line in lines_of if isinstance(line, Record))


def read(lines: Iterator[Line], log: Contexts) -> None:
    """Read the agents of a session; the lines of sub-agents' files come last, as forks need."""
    records = sorted(_records(lines, log), key=lambda entry: session_above(entry[0]) is not None)
    requests = Requests()
    for where, record, _ in records:
        requests.add(record, where)
    entries = entries_of(records)
    models = [line.api.model for line in entries if line.api and not line.api.is_synthetic]
    log.name, log.model = MAIN, next(filter(None, reversed(models)), None)
    _Session(requests).read(entries, log)
