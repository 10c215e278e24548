"""Conversion of the contexts of a Claude Code session to conversations.

If the session logs the requests (`claude_code_requests`), the prompts are those that were sent; all
other prompts are put together from the messages.

An answer is trained on in the first context that has it. In later contexts, it is part of the
prompt; so are answers that another session has, and messages that the harness wrote for the model.
If such a message follows an answer, a new conversation begins with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout_io.formats.base import Conversation
from rollout_io.formats.claude_code_contexts import MAIN, Context, contexts_of
from rollout_io.formats.claude_code_entries import Entry, entries_of
from rollout_io.formats.claude_code_lines import QUEUED, Line, Message, Shape, queued_text
from rollout_io.formats.claude_code_requests import Requests, chained
from rollout_io.formats.parsing.content import parts_in
from rollout_io.formats.parsing.forks import COPIED
from schemas.errors import InputError

_QUEUED = "queued messages of which the log does not tell whether they were sent"
_NOT_RENDERED = "attachments without the text that was sent"
_UNKNOWN = "requests with a message that is not in the log: the prompt is read from the messages"
_MICRO = "microcompactions, which remove the results of tools from later prompts"


@dataclass(slots=True)
class Converted:
    """The conversations of a session, and how many of what they leave out.

    Attributes:
        conversations: Conversations with an answer, ordered by their last lines; the main agent's
            last one comes last. Each `source` is the location of its last line.
        left_out: Counts by description.
        problems: Locations and reasons of the contexts that are cut.
        num_requested: Number of answers whose prompt is from a logged request.
        num_rebuilt: Number of answers whose prompt is from the messages.
    """

    conversations: list[Conversation] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str]] = field(default_factory=list)
    num_requested: int = 0
    num_rebuilt: int = 0


def convert(lines: Iterable[Line], requests: Requests | None = None) -> Converted:
    """Return the conversations of a session.

    Args:
        lines: Lines in the order of the log, the main agent's before those of other files.
        requests: The requests that the session logs: the prompts of their answers are taken from
            them.

    Raises:
        InputError: Any error of `messages_of`.
    """
    lines = list(lines)
    made, requests = Converted(), requests or Requests()
    replacements = {
        each.tool_use_id: each.replacement
        for line in lines
        for each in line.replacements
        if each.tool_use_id is not None and each.replacement is not None
    }
    numbers = {line.where: number for number, line in enumerate(lines)}
    owners: dict[str, int] = {}
    copied: set[str] = set()
    found: list[Conversation] = []
    called: dict[tuple[str, str], list[_Call]] = {}
    for number, context in enumerate(contexts_of(_with_queued(lines))):
        entries = list(entries_of(context.lines, replacements))
        own = {
            e.name for e in entries if e.is_answer and owners.setdefault(e.name, number) == number
        }
        copied |= {entry.name for entry in entries if entry.name in own and entry.is_copied}
        for call in _calls(context, entries, own, requests):
            called.setdefault((context.agent, call.entry.agent_id), []).append(call)
            entries[call.at] = call.entry._replace(is_given=True)
        trained = [e for e in entries if e.name in own and not e.is_given]
        made.num_rebuilt += len(trained)
        found += _cut(context, entries, own, made)
    for (agent, _), calls in called.items():
        num_rebuilt = sum(call.since != () for call in calls)
        made.num_requested += len(calls) - num_rebuilt
        made.num_rebuilt += num_rebuilt
        found += _requested(agent, calls, requests)
    if made.num_rebuilt or not called:
        made.left_out += _unsaid(lines)
    made.left_out[_UNKNOWN] += requests.num_unknown
    made.left_out[COPIED] += len(copied)
    found.sort(key=lambda conversation: numbers[conversation.source])
    last = next((c for c in reversed(found) if c.agent == MAIN), None)
    made.conversations = [c for c in found if c is not last] + ([last] if last else [])
    made.left_out = +made.left_out
    return made


class _Call(NamedTuple):
    """An answer that follows from a logged request.

    Attributes:
        at: Index of the entry in its context.
        request: Name of the request.
        since: Messages between that request and the answer, if it is the request of an earlier one.
    """

    at: int
    entry: Entry
    request: str
    since: tuple[dict[str, Any], ...] = ()


def _calls(
    context: Context, entries: Sequence[Entry], own: set[str], requests: Requests
) -> Iterator[_Call]:
    """Yield the answers of a context whose request is logged, or that of an answer before them."""
    known, since = "", list[dict[str, Any]]()
    for i, entry in enumerate(entries):
        if entry.unknown is not None:
            known = ""
            continue
        is_trained = entry.name in own and not entry.is_given
        is_known = entry.is_answer and requests.knows(entry.request)
        if is_trained and is_known:
            yield _Call(i, entry, entry.request or "")
        elif is_trained and known and context.problem is None:
            yield _Call(i, entry, known, tuple(since))
        # After a compaction, the request of an answer that was kept has what was compacted.
        if is_known and (entry.name in own or not context.is_compacted):
            known, since = entry.request or "", []
        since += entry.messages


def _requested(agent: str, calls: Sequence[_Call], requests: Requests) -> Iterator[Conversation]:
    """Yield the conversations of an agent's answers that follow from logged requests."""
    told = (
        (requests.prompt(call.request, call.since), e.messages, e.last, e.stop_reason)
        for call in calls
        for e in (call.entry,)
    )
    for chain in chained(told):
        yield Conversation(
            source=chain.where,
            messages=[*chain.prompt.messages, *chain.reply],
            tools=chain.prompt.tools,
            num_given=chain.num_given,
            stop_reason=chain.stop_reason,
            temperature=chain.prompt.temperature,
            top_p=chain.prompt.top_p,
            agent=agent,
        )


def _cut(
    context: Context, entries: Sequence[Entry], own: set[str], made: Converted
) -> Iterator[Conversation]:
    """Yield the conversations of a context: each ends before an answer that is not to be trained on."""
    end, problem = len(entries), context.problem
    if problem is not None:
        end = 0
    for i, entry in enumerate(entries[:end]):
        if entry.unknown is not None:
            end, problem = i, f"after content of type {entry.unknown!r}"
            break
    lost = [e for e in entries[end:] if e.name in own and not e.is_given]
    if problem is not None and lost:
        made.left_out[f"answers {problem}"] += len(lost)
        made.problems.append((entries[end].where, problem))
    shape, agent = context.shape or Shape(), context.agent
    system, tools = shape.system_prompt(), shape.definitions()
    messages = [{"role": "system", "content": system}] if system else []
    begun = Conversation(source="", messages=messages, tools=tools, agent=agent)
    is_answered = False
    for entry in entries[:end]:
        is_trained = entry.name in own and not entry.is_given
        if entry.is_answer and not is_trained and is_answered:
            yield begun
            messages = [*begun.messages]
            begun = Conversation(source="", messages=messages, tools=tools, agent=agent)
            is_answered = False
        begun.messages += entry.messages
        begun.source = entry.last
        if entry.is_answer:
            begun.stop_reason = entry.stop_reason or begun.stop_reason
            is_answered |= is_trained
            if not is_trained:
                begun.num_given = len(begun.messages)
    if is_answered:
        yield begun


def refused(made: Converted, where: str) -> InputError:
    """Return the error for a session without a conversation."""
    if not made.problems:
        return InputError("no_calls", where, "the session has no model response")
    at, problem = made.problems[0]
    hint = "remove the content from the log if the answers can do without it"
    return InputError("message", at, f"all answers are {problem}", "text, or a tool call", hint)


def _unsaid(lines: Sequence[Line]) -> Counter[str]:
    """Count what the model may have seen but the log does not show."""
    counts: Counter[str] = Counter()
    if not any(line.was_rendered for line in lines):
        kinds = (line.attached for line in lines if line.attached and line.message is None)
        counts.update(f"{_NOT_RENDERED} ({kind})" for kind in kinds)
    counts[_MICRO] = sum(line.is_microcompaction for line in lines)
    known = _texts(lines)
    waiting: list[str] = []
    for line in lines:
        operation, reason = line.queue or (None, None)
        text = queued_text(line.queued)
        if operation == "enqueue":
            waiting.append(text)
        elif operation in {"dequeue", "remove"} and waiting:
            taken = waiting.pop(waiting.index(text) if text in waiting else 0)
            counts[_QUEUED] += operation == "remove" and reason is None and taken not in known
    return counts


def _with_queued(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines; a queued message that only the queue shows as sent is one of them."""
    known = _texts(lines)
    for line in lines:
        if line.queue == ("remove", "absorbed_mid_turn") and queued_text(line.queued):
            text = queued_text(line.queued)
            if known[text]:
                known[text] -= 1
            else:
                line.message = Message("user", parts_in(line.queued))
        yield line


def _texts(lines: Iterable[Line]) -> Counter[str]:
    """Return the texts of the queued messages that are attachments or messages of the user."""
    queued = [line.queued for line in lines if line.attached == QUEUED]
    said = [line.message.content for line in lines if line.is_prompt and line.message]
    return Counter(queued_text(content) for content in [*queued, *said])
