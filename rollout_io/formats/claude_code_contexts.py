"""Reconstruction of a Claude Code session's contexts, as conversations, from its lines.

- The main agent's lines are in the order of the log; a sub-agent's lines (`isSidechain`) share an
  `agentId`, or form a chain of `parentUuid`. A forked sub-agent inherits its parent's context:
  its file repeats those lines, or names the last of them (`fork-context-ref`).
- A compaction (`compact_boundary`, or the summary after it) begins a new context. The messages
  that it keeps (`compactMetadata`) follow the summary, or precede it if the boundary is their
  anchor.
- A prompt or an answer whose parent is not the end of the context branches off at that parent: a
  new context begins with the lines up to it. So does a prompt without a parent. The abandoned
  context is kept if the model answered in it.
- An answer is trained on in the first context that has it. In later contexts, it is part of the
  prompt, as are answers that another session has and messages that the harness wrote.
- Lines that the harness retracted (`retractedMessageUuids`, `supersedesUuids`), copies of a line in
  the same thread, and API errors are omitted. Redacted thoughts are not in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_io.formats.claude_code_lines import Kept, Line, Shape, short

MAIN, SIDECHAIN = "main", "sidechain"

_NO_KEPT = "after a compaction that keeps messages which are not in the log"
_UNKNOWN_PARENT = "of a forked sub-agent whose log does not tell which context it inherited"
_NO_PARENT = "of a forked sub-agent whose parent's messages are not in the log"


@dataclass(slots=True)
class Context:
    """One context of an agent.

    Attributes:
        agent: "main" or "sidechain".
        lines: Lines in order, each with a message.
        problem: Why the log does not tell what the model saw; None if it does.
        shape: System prompt and tools of the last answer; None if the log does not have them.
        is_compacted: True if it begins with a compaction.
        began: ISO time of its beginning; empty for the first context, or if unknown.
    """

    agent: str
    lines: list[Line] = field(default_factory=list)
    problem: str | None = None
    shape: Shape | None = None
    is_compacted: bool = False
    began: str = ""


@dataclass(slots=True)
class _Thread:
    """The contexts of one agent, in order.

    Attributes:
        uuids: Uuids of all lines, those to come included.
        others: Threads of the agents before this one, of whose lines this log may have copies.
        awaited: Uuids of the lines to come that a compaction keeps; a segment ends with the last.
        follows: For each uuid, the line with a message that a child of this uuid follows, if any.
        spoken: Lines with a message, by uuid.
        kept: Lines that a compaction keeps, by the uuid of the line that they follow.
        is_cut: True between the boundary of a compaction and its summary.
        is_linked: True once a line names a parent with a message.
    """

    contexts: list[Context]
    uuids: frozenset[str | None] = frozenset()
    others: Mapping[str, _Thread] = field(default_factory=dict)
    awaited: Kept | None = None
    follows: dict[str, Line | None] = field(default_factory=dict)
    spoken: dict[str, Line] = field(default_factory=dict)
    kept: dict[str, list[Line]] = field(default_factory=dict)
    is_cut: bool = False
    is_linked: bool = False
    shape: Shape | None = None

    @property
    def current(self) -> Context:
        """The last context."""
        return self.contexts[-1]

    def add(self, line: Line) -> None:
        """Add a line, unless it is a copy of a line of this thread."""
        if line.uuid is not None and line.uuid in self.follows:
            return
        self.shape = line.shape or self.shape
        self._await(line)
        parent = self.follows.get(line.parent or "")
        follows = self._is_kept_summary(line, parent)
        if line.is_compaction and not follows:
            self._compact(line)
        elif line.message is not None:
            self._branch(line, parent)
            self.is_linked |= parent is not None
        after = None if line.is_compaction and not follows else parent
        if line.message is not None:
            self.current.lines.append(line)
            self.current.shape = self.shape if line.is_answer else self.current.shape
            after = line
            if line.uuid is not None:
                self.spoken[line.uuid] = line
        kept = self.kept.pop(line.uuid or "", None)
        if kept:
            self.current.lines += kept
            after = kept[-1]
        if line.uuid is not None:
            self.follows[line.uuid] = after

    def _is_kept_summary(self, line: Line, parent: Line | None) -> bool:
        """True if a summary is one that a later compaction kept, and that follows the context.

        It follows the later summary, or is a copy in the log of a forked sub-agent.
        """
        if not line.is_compaction or line.message is None or parent is None or self.is_cut:
            return False
        is_copy = any(line.uuid in thread.uuids for thread in self.others.values())
        return self.current.lines[-1:] == [parent] and (parent.is_compaction or is_copy)

    def _await(self, line: Line) -> None:
        """Mark a line that a compaction keeps although it is logged only after the compaction."""
        kept = self.awaited
        if kept is None or line.uuid is None:
            return
        if kept.uuids is not None:
            line.is_kept = line.uuid in kept.uuids
        elif line.uuid == kept.head or kept.head is None:
            line.is_kept = True
            self.awaited = None if line.uuid == kept.tail else Kept(tail=kept.tail)

    def inherit(self, context: Context | str, last: Line | None) -> None:
        """Begin with the context of the parent up to a line, or with the reason why it is unknown."""
        if isinstance(context, str) or last is None:
            self.current.problem = context if isinstance(context, str) else _NO_PARENT
            return
        lines = context.lines[: context.lines.index(last) + 1]
        self.current.lines[:0] = lines
        self.current.problem = context.problem
        self.current.is_compacted = context.is_compacted
        self.shape = self.shape or context.shape
        self.uuids |= {line.uuid for line in lines}
        self.spoken |= {line.uuid: line for line in lines if line.uuid}
        self.follows |= {line.uuid: line for line in lines if line.uuid}

    def _compact(self, line: Line) -> None:
        """Begin a new context at a boundary, or at a summary without a boundary."""
        is_boundary = line.message is None
        kept, problem = self._kept(line), None
        if kept is None:
            kept, problem = [], _NO_KEPT
        if self.current.lines and not self.is_cut:
            self._begin([], None)
        self.is_cut = is_boundary
        self.current.is_compacted = True
        self.current.began = self.current.began or line.at
        self.current.problem = problem or self.current.problem
        if kept and line.kept is not None:
            self.kept[line.kept.anchor or line.uuid or ""] = kept

    def _kept(self, line: Line) -> list[Line] | None:
        """Return the messages that a compaction keeps; None if the log lacks one.

        In a session that was forked after a compaction, they are logged after the summary.
        """
        kept, context = line.kept, self.current.lines
        if kept is None:
            return []
        ends = {kept.head, kept.tail}
        if kept.uuids is not None:
            self.awaited = kept
            known = self.uuids.issuperset(kept.uuids)
            return [self.spoken[u] for u in kept.uuids if u in self.spoken] if known else None
        if ends <= self.uuids and not ends & self.follows.keys():
            self.awaited = kept
            return []
        # What follows a summary comes after the messages that it keeps: the line itself is meant.
        named = (kept.head or "", kept.tail or "")
        head, tail = (self.spoken.get(uuid) or self.follows.get(uuid) for uuid in named)
        if head is None or tail is None or head not in context or tail not in context:
            return None
        return context[context.index(head) : context.index(tail) + 1]

    def _begin(self, lines: list[Line], problem: str | None) -> None:
        self.contexts.append(Context(self.current.agent, lines, problem))

    def _branch(self, line: Line, parent: Line | None) -> None:
        """Return to the parent of a prompt or an answer if other messages follow the parent."""
        lines = self.current.lines
        if not lines or lines[-1] is parent or not _is_turn(line, lines):
            return
        if parent is None:
            if line.parent is None and line.is_prompt and self.is_linked:
                self._begin([], None)
            return
        found = next((c for c in reversed(self.contexts) if parent in c.lines), None)
        if found is None:
            return
        end = found.lines.index(parent) + 1
        if found is not self.current:
            self._begin(found.lines[:end], found.problem)
        elif _goes_on(lines, end):
            if any(each.is_answer for each in lines[end:]):
                self._begin(lines[:end], found.problem)
            else:
                del lines[end:]


def _is_turn(line: Line, lines: Iterable[Line]) -> bool:
    """True if a line begins a prompt, or an answer of which the context has no line."""
    if not line.is_answer or line.message is None or line.message.id is None:
        return line.is_prompt or line.is_answer
    return all(each.message is None or each.message.id != line.message.id for each in lines)


def _goes_on(lines: Sequence[Line], end: int) -> bool:
    """True if lines from `end` on contain more than the rest of the last answer before `end`."""
    answers = [line.message for line in lines[:end] if line.is_answer]
    last = answers[-1] if answers and answers[-1] is not None else None
    name = last.id if last is not None and last.id is not None else None
    for line in lines[end:]:
        is_rest = line.message is not None and name is not None and line.message.id == name
        if line.is_prompt or (line.is_answer and not is_rest):
            return True
    return False


def contexts_of(lines: Iterable[Line]) -> list[Context]:
    """Return the contexts of all agents: the main agent's first, in order.

    Args:
        lines: Lines of a session in the order of the log.
    """
    lines = _not_retracted(lines)
    groups = _groups(lines)
    threads: dict[str, _Thread] = {}
    pending = sorted(groups, key=lambda key: key != MAIN)
    while pending:
        ready = [key for key in pending if _parent_of(groups[key], threads) is not None]
        for key in ready or pending[:1]:
            threads[key] = _thread(key, groups[key], threads)
            pending.remove(key)
    return [context for thread in threads.values() for context in thread.contexts]


def _thread(key: str, lines: Sequence[Line], threads: dict[str, _Thread]) -> _Thread:
    agent = MAIN if key == MAIN else SIDECHAIN
    thread = _Thread([Context(agent)], frozenset(line.uuid for line in lines), threads)
    for line in lines:
        if line.inherited is not None:
            parent = _parent_of(lines, threads)
            last = parent.follows.get(line.inherited) if parent else None
            found = [c for c in parent.contexts if last in c.lines] if parent and last else []
            at = next((each.at for each in lines if each.at), "")
            thread.inherit(_inherited(found, last, at), last)
        else:
            thread.add(line)
    return thread


def _inherited(contexts: Sequence[Context], last: Line | None, at: str) -> Context | str:
    """Return the context that a fork inherits, of those with its last line; else a problem.

    A line that a compaction keeps is in the contexts before and after it; the time of the fork
    tells which one it is.
    """
    if not contexts or last is None:
        return _NO_PARENT
    starts = [c.lines[: c.lines.index(last) + 1] for c in contexts]
    if all(start == starts[0] for start in starts):
        return contexts[0]
    if not at or not all(c.began for c in contexts[1:]):
        return _UNKNOWN_PARENT
    return next((c for c in reversed(contexts) if c.began <= at), _UNKNOWN_PARENT)


def _parent_of(lines: Sequence[Line], threads: dict[str, _Thread]) -> _Thread | None:
    """Return the thread whose context a fork inherits; None if it is not known.

    The lines of an agent that is no fork have no parent; any thread will do.
    """
    last = next((line.inherited for line in lines if line.inherited is not None), None)
    if last is None:
        return next(iter(threads.values()), None) or _Thread([Context(MAIN)])
    return next((thread for thread in threads.values() if last in thread.follows), None)


def _groups(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the lines of each agent."""
    keys: dict[str, str] = {}
    groups: dict[str, list[Line]] = {}
    for number, line in enumerate(lines):
        key = _key(line, keys, number)
        if line.uuid is not None:
            keys.setdefault(line.uuid, key)
        groups.setdefault(key, []).append(line)
    return groups


def _key(line: Line, keys: dict[str, str], number: int) -> str:
    if not line.is_side:
        return MAIN
    if line.agent_id is not None:
        return f"agent {line.agent_id}"
    above = keys.get(line.parent or "", MAIN)
    return above if above != MAIN else f"chain {line.uuid or number}"


def _not_retracted(lines: Iterable[Line]) -> list[Line]:
    """Remove the messages that the harness retracted; their children follow their parents."""
    lines = list(lines)
    retracted = frozenset[str]().union(*(line.retracted for line in lines))
    for line in lines:
        if line.uuid is not None and short(line.uuid) in retracted:
            line.message = None
    return lines
