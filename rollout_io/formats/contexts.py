r"""The contexts of an agent: what its model saw, and what it wrote, as a tree of messages.

Every reader of a log tells one `Contexts` what happened, in the order of the log: it says messages,
goes back, replaces the history, shows a whole one, or loses what cannot be read. Each message is a node
behind the one that it follows, and `tip` is the end of the context that continues now:

    say A, say B, go back to A, say C        A - B
                                               \ C  <- tip

A path from a root to the last answer of a branch is one conversation. So a rewind, a fork, a branch of
a tree and a compaction (a new root with copies of what it kept) are the same thing, and these rules
hold for all of them:

- An answer is trained on once: on the first path that has it. On later paths it is part of the prompt,
  and so are answers that are given: copies of another session's, a kept history, texts of the program.
- A given answer behind a trained one ends a conversation, and so does another system prompt or other
  tools: a conversation has one prompt, and then what the model wrote itself.
- Behind a node that cannot be read nothing is used, because the model saw something that is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from types import MappingProxyType
from typing import Any, NamedTuple

from rollout_io.formats.base import Conversation, Logged, note
from rollout_io.formats.engines.runs import COPIED, digest
from rollout_io.formats.parsing.content import Message
from rollout_io.formats.requests import Piece, Sends, sent
from schemas.errors import InputError
from schemas.messages import is_answer

LOST = "answers after items that are encrypted or of an unknown type: left out"
ORPHANS = "records whose parent is not in the file: read as if they followed the line before"
SUMMARIES = "summaries that the model wrote for a compaction, without their prompt: left out"


class Head(NamedTuple):
    """What a request has beside its messages, and what its program makes of these."""

    system: str | None = None
    tools: list[Message] | None = None
    model: str | None = None
    sends: Sends = Sends()


class Item(NamedTuple):
    """A message of a whole history (`Contexts.show`).

    Attributes:
        key: Name of the message in its session; "": any that says the same.
        mark: What tells a changed message from the one of the same key; None: the messages.
        given: See `Contexts.say`.
    """

    key: str
    messages: list[Message]
    where: str
    mark: Any = None
    given: bool | str = False


@dataclass(slots=True, eq=False)
class Said:
    """What one record adds to a context.

    Attributes:
        key: Name of the record in its session.
        messages: Its messages; a reader may extend them while the record's answer is streamed.
        where: Location of the record.
        before: What it follows; None at the root.
        head: What requests had when it was said.
        is_given: True if its answers are part of the prompt.
        is_copied: True if another session has the record too.
        is_alone: True if its messages are never joined with others (`Sends.joins`).
        error: Why it, and all that follows it, cannot be read.
        loss: Note about the answers that this costs.
        mark: See `Item`.
        for_others: What a model other than the one that wrote it is sent; None: the same.
        facts: Fields of the `Conversation` that ends with this answer, such as its `stop_reason`.
    """

    key: str
    messages: list[Message]
    where: str
    before: Said | None = None
    head: Head = field(default_factory=Head)
    is_given: bool = False
    is_copied: bool = False
    is_alone: bool = False
    error: InputError | None = None
    loss: str = LOST
    mark: Any = None
    for_others: Sequence[Message] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str | None:
        """Role of its first message; None if the record was lost."""
        return self.messages[0]["role"] if self.messages else None

    @property
    def is_answer(self) -> bool:
        """True if a message of it is the model's."""
        return any(map(is_answer, self.messages))

    @property
    def trains(self) -> bool:
        """True if the model wrote it here."""
        return not self.is_given and self.is_answer


@dataclass(slots=True)
class Contexts:
    """The contexts of an agent, and of the agents that it started.

    Attributes:
        name: Name of a sub-agent; None for the main agent.
        system: System prompt of the messages that follow.
        tools: Tool definitions of the messages that follow.
        model: Model of the session.
        sends: What its program makes of the messages for a request.
        values: Other strings about the run, which become user columns.
        error: Why the run failed, by the harness's own word.
        reward: Outcome of the run; None if unknown.
        order: Place of the agent among all agents; None: in the order of the log, the main one first.
        exact: Calls with the engine's tokens, which take the place of the contexts.
        is_copied: True while records are read that another session has too.
        tip: End of the current context; None if it is empty.
        has_prompts: True if each answer is logged with its whole prompt (`call`): a conversation is named
            after its first answer, all before that is given, and nothing follows the last one.
    """

    name: str | None = None
    system: str | None = None
    tools: list[Message] | None = None
    model: str | None = None
    sends: Sends = field(default_factory=Sends)
    values: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    reward: float | None = None
    order: int | None = None
    exact: list[Logged] = field(default_factory=list)
    is_copied: bool = False
    tip: Said | None = None
    has_prompts: bool = False
    agents: dict[str, Contexts] = field(default_factory=dict)
    _nodes: list[Said] = field(default_factory=list)
    _names: dict[str, Said] = field(default_factory=dict)
    _behind: dict[Said | None, list[Said]] = field(default_factory=dict)
    _calls: dict[str | None, tuple[list[Message], list[Said]]] = field(default_factory=dict)
    _noted: set[int] = field(default_factory=set)

    def agent(self, key: str, name: str | None = None) -> Contexts:
        """Return the contexts of a sub-agent, which begin empty; people know it by the name, or the key."""
        if key not in self.agents:
            self.agents[key] = Contexts(name=name or key, is_copied=self.is_copied)
        return self.agents[key]

    def say(
        self,
        messages: Sequence[Message],
        where: str,
        key: str = "",
        *,
        given: bool | str = False,
        is_alone: bool = False,
        aliases: Iterable[str] = (),
        for_others: Sequence[Message] | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> Said:
        """Add what a record says behind the tip.

        Args:
            messages: Its messages; none for a record that others refer to but the model does not see.
            where: Location of the record.
            key: Name of the record; "": its location. An answer whose key was said before is given.
            given: True if its answers are part of the prompt. A text says why, and is noted with the
                number of these answers.
            is_alone: See `Said`.
            aliases: Other names by which records refer to this one.
            for_others: See `Said`.
            facts: See `Said`.
        """
        key = key or where
        before = self._names.get(key)
        node = self._add(Said(key, list(messages), where, is_alone=is_alone))
        node.for_others, node.facts = for_others, facts
        node.is_copied = self.is_copied
        node.is_given = bool(given) or self.is_copied or (before is not None and before.is_answer)
        if isinstance(given, str):
            note(given, sum(map(is_answer, node.messages)))
        self._names |= dict.fromkeys((*aliases, key), node)
        return node

    def _add(self, node: Said) -> Said:
        node.before = self.tip
        node.head = Head(self.system, self.tools, self.model, self.sends)
        self._nodes.append(node)
        self._behind.setdefault(self.tip, []).append(node)
        self.tip = node
        return node

    def keep(self, nodes: Iterable[Said]) -> list[Said]:
        """Say again what an earlier context had, and return it; its answers are part of the prompt."""
        copies = []
        for node in nodes:
            copy = self._add(replace(node, is_given=True, is_copied=False, mark=None))
            copy.head = copy.head._replace(model=node.head.model)
            copies.append(copy)
        return copies

    def find(self, key: str | None) -> Said | None:
        """Return what the latest record of a name said; None if there is none."""
        return None if key is None else self._names.get(key)

    def path(self, tip: Said | None = None) -> list[Said]:
        """Return the current context, or the one that ends with `tip`, in order."""
        nodes = []
        node = tip or self.tip
        while node is not None:
            nodes.append(node)
            node = node.before
        return nodes[::-1]

    def follow(self, parent: str | None) -> None:
        """Continue behind the record with this name, for logs that are trees; None begins a root.

        If the log does not have it, the next record follows the one before it, which is noted.
        """
        node = self.find(parent)
        if parent is None or node is not None:
            self.tip = node
        else:
            note(ORPHANS)

    def rewind(self, to: Said | None) -> None:
        """Take back everything behind a node; None takes back all. Its answers stay a branch."""
        self.tip = to

    def replace(self, kept: Iterable[Said] = ()) -> None:
        """Begin a new context, with nodes that the old one had."""
        self.tip = None
        self.keep(kept)

    def show(self, history: Iterable[Item]) -> None:
        """Go to the end of a whole history, from its first message on; what is new in it is said."""
        self.tip = None
        for item in history:
            self.see(item)

    def see(self, item: Item) -> None:
        """Go to what is said behind the tip, or say it if it is new there."""
        mark = item.messages if item.mark is None else item.mark
        for node in reversed(self._behind.get(self.tip, ())):
            other = node.messages if node.mark is None else node.mark
            if item.key in {"", node.key} and other == mark:
                self.tip = node
                return
        self.say(item.messages, item.where, item.key, given=item.given).mark = item.mark

    def call(
        self, prompt: Sequence[Message], reply: Message, where: str, facts: Mapping[str, Any]
    ) -> None:
        """Say the answer of a call whose whole prompt is logged; calls of agents are kept apart."""
        agent = facts.get("agent")
        last, nodes = self._calls.setdefault(agent, ([], []))
        num_same = sum(takewhile(bool, map(eq, last, prompt)))
        del last[num_same:], nodes[num_same:]
        for message in prompt[num_same:]:
            self.tip = nodes[-1] if nodes else None
            key = _name_of(self.tip, agent, message)
            nodes.append(self.find(key) or self.say([message], where, key, given=True))
        self.tip = nodes[-1] if nodes else None
        aliases = [_name_of(self.tip, agent, reply)]
        key = f"{where} {len(self._nodes)}"
        nodes.append(self.say([reply], where, key, aliases=aliases, facts=facts))
        last += [*prompt[num_same:], reply]

    def sent(self, sends: Sends) -> list[Message]:
        """Return the messages of the current context as they are sent."""
        pieces = _pieces(self.path(), 0, Head(model=self.model))
        return [piece.message for piece in sent(pieces, sends, self._noted)]

    def lose(
        self, error: InputError, where: str = "", *, in_answer: bool = False, loss: str = LOST
    ) -> None:
        """Use nothing that follows: it depends on something that cannot be read.

        Args:
            error: Why it cannot be read.
            where: Location.
            in_answer: True if it is a part of the answer at the tip, which is lost too.
            loss: Note about the answers that this costs.
        """
        node = self.tip if in_answer else None
        node = node or self.say((), where or error.where)
        if node.error is None:
            node.error, node.loss = error, loss

    @property
    def unread(self) -> InputError | None:
        """Why the first of all lost answers cannot be used; None if nothing is lost."""
        return next((node.error for node in self._all() if node.error is not None), None)

    def _all(self) -> Iterator[Said]:
        yield from self._nodes
        for agent in self.agents.values():
            yield from agent._all()

    def steps(self, trained: set[Said] | None = None) -> list[Logged]:
        """Return all conversations: the main agent's in the order of their ends, then sub-agents'.

        What cannot be used, and answers of another session, are noted. Answers in `trained`, such as those
        that a sub-agent inherits, are trained on already; those of these contexts are added.
        """
        trained = set() if trained is None else trained
        steps: list[Logged] = [*self.exact] or [*self._conversations(trained)]
        for step in steps if self.name is not None else ():
            step.agent = self.name
        parts = [(self.order, steps)]
        parts += [(agent.order, agent.steps(trained)) for agent in self.agents.values()]
        if all(order is not None for order, _ in parts):
            parts.sort(key=lambda part: part[0] or 0)
        return [step for _, part in parts for step in part]

    def _conversations(self, trained: set[Said]) -> Iterator[Conversation]:
        lost = self._lost()
        for node, loss in lost.items():
            note(loss, node.trains)
        note(COPIED, sum(node.is_copied and node.is_answer for node in self._nodes))
        # Branches share their beginning: it trains on the first, and is given on the others.
        for end in self._ends(lost):
            yield from self._along(end, trained)

    def _lost(self) -> dict[Said, str]:
        """Return the nodes that cannot be used, each with the note about it."""
        lost = dict[Said, str]()
        nodes = dict.fromkeys(self._nodes)
        for node in nodes:  # a node comes after those before it
            # A sub-agent's first node may follow one of the agent that started it.
            behind = [node] if node.before is None or node.before in nodes else self.path(node)
            cause = next((other for other in behind if other.error is not None), None)
            if node.before in lost:
                lost[node] = lost[node.before]
            elif cause is not None:
                lost[node] = cause.loss
        return lost

    def _ends(self, lost: Mapping[Said, str]) -> list[Said]:
        """Return the last node of each branch with an answer, with what follows the answer there."""
        inner, ends = set[Said | None](), list[Said]()
        for node in reversed(self._nodes):  # meets the last answer of each branch first
            if node in lost:
                continue
            if node.trains and node not in inner:
                ends.append(node)
            if node.trains or node in inner:
                inner.add(node.before)
        for i, end in enumerate(ends):
            below = [end]
            while below:
                ends[i] = below[-1]
                below = [node for node in self._behind.get(ends[i], ()) if node not in lost]
        return ends[::-1]

    def _along(self, end: Said, trained: set[Said]) -> Iterator[Conversation]:
        """Yield the conversations of a path; answers in `trained` are given, the others are added."""
        nodes, num_given = list[Said](), 0
        last: Said | None = None  # the last answer that the open conversation trains
        for node in self.path(end):
            is_new = node.trains and node not in trained
            if node.is_answer and last is not None and (not is_new or _differ(node, last, nodes)):
                yield self._conversation(nodes, num_given, last)
                num_given, last = len(nodes), None
            nodes.append(node)
            if is_new:
                if self.has_prompts and last is None:
                    num_given = len(nodes) - 1
                last = node
                trained.add(node)
            elif node.is_answer:
                num_given = len(nodes)
        if last is not None:
            yield self._conversation(nodes, num_given, last)

    def _conversation(self, nodes: Sequence[Said], num_given: int, last: Said) -> Conversation:
        head = last.head
        prompt: list[Message] = [{"role": "system", "content": head.system}] if head.system else []
        pieces = sent(_pieces(nodes, num_given, head), head.sends, self._noted)
        prompt += [piece.message for piece in pieces if piece.is_given]
        rest = [piece.message for piece in pieces if not piece.is_given]
        step = Conversation(source=last.where, messages=[*prompt, *rest], tools=head.tools)
        step.num_given = len(prompt) if num_given else 0
        if self.has_prompts:
            step.source = nodes[num_given].where
            step.num_given = sum(len(node.messages) for node in nodes[:num_given])
            until = nodes.index(last) + 1
            step.messages = [message for node in nodes[:until] for message in node.messages]
        for name, value in last.facts.items():
            setattr(step, name, value)
        if head.sends.unsent_thoughts is not None:
            answers = [message for message in rest if is_answer(message)]
            note(head.sends.unsent_thoughts, sum("reasoning_content" in m for m in answers[:-1]))
        return step


def _name_of(tip: Said | None, agent: str | None, message: Message) -> str:
    """Return the name of a message behind a node: a digest of all that precedes it."""
    return digest(
        tip.key if tip else str(agent), json.dumps(message, sort_keys=True, default=repr)
    ).hex()


def _differ(node: Said, last: Said, before: Sequence[Said]) -> bool:
    """True if two answers had other system prompts or tools, or a model sees the other's differently."""
    is_other_model = node.head.model != last.head.model
    is_seen_otherwise = is_other_model and any(other.for_others is not None for other in before)
    return node.head[:2] != last.head[:2] or is_seen_otherwise


def _pieces(nodes: Sequence[Said], num_given: int, head: Head) -> Iterator[Piece]:
    """Yield the messages of a context, whose first nodes are given to a model: no empty answers."""
    for i, node in enumerate(nodes):
        is_given, messages = i < num_given, node.messages
        if is_given and node.is_answer and node.head.model != head.model:
            messages = [*node.for_others] if node.for_others is not None else messages
        for message in messages:
            if message["role"] != "assistant" or is_answer(message):
                yield Piece(message, i, is_given, node.is_alone)
