"""Why a step does not continue an earlier one: the causes, what to do about each, how one is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pipelines.diagnosis.breaks import Break
from pipelines.diagnosis.tokens import changed, returns
from pipelines.diagnosis.turns import Change, Reading
from rollout_io.prefix import Tokens

Cause = Literal["retokenized", "template", "edited", "reset", "new_agent", "overlap", "unknown"]

Told: TypeAlias = tuple[Cause, str]
"""A cause, and the evidence for it."""

HINTS: dict[Cause, str] = {
    "retokenized": (
        "the harness sends text, which is cut into other tokens than were sampled: send the "
        "engine's own ids back (prompt token ids in, token ids out)"
    ),
    "template": (
        "the chat template lays earlier messages out anew: use one that keeps them as they were "
        "generated, thinking included (such as --chat-template qwen3_acc_thinking)"
    ),
    "edited": (
        "the harness changes messages that were sent before: append only, and shorten a message "
        "before it is first sent"
    ),
    "reset": (
        "the harness begins a new context (a summary, dropped messages): each context is a "
        "sequence of its own; longer contexts break less often"
    ),
    "new_agent": "another agent's conversation; nothing is lost where lineages are merged apart",
    "overlap": (
        "branches of one history (parallel calls, retries, several samples): one of them "
        "continues it, and training as a tree forwards the shared tokens once"
    ),
    "unknown": "the ids alone do not tell: give --tokenizer DIR, or convert with messages",
}
"""What to change in the harness."""

KEEPS_TOKENS: frozenset[Cause] = frozenset({"new_agent", "overlap"})
"""Causes of steps that were never to continue what they are compared with: no token is lost."""

_BY_CHANGE: dict[Change, Cause] = {
    "unchanged": "unknown",
    "same_text": "retokenized",
    "layout": "template",
    "text": "edited",
    "system": "new_agent",
    "messages": "reset",
}

_REPEATS: frozenset[Change] = frozenset({"unchanged", "same_text", "layout"})


@dataclass(frozen=True, slots=True)
class Parting:
    """The tokens of a break.

    Attributes:
        before: Prompt and response of the step it is told from.
        num_prompt: How many of them are its prompt.
        prompt: The prompt that does not continue it.
        shared: Leading tokens of both.
    """

    before: Tokens
    num_prompt: int
    prompt: Tokens
    shared: int

    @property
    def lost(self) -> Tokens:
        """What the prompt should have gone on with."""
        return self.before[self.shared :]

    @property
    def now(self) -> Tokens:
        """What it goes on with."""
        return self.prompt[self.shared :]

    @property
    def answer_returns(self) -> bool:
        """Whether tokens of the earlier response stand in the prompt."""
        lost_answer = self.before[max(self.num_prompt, self.shared) :]
        return returns(lost_answer, self.now)


def tell(found: Break, parting: Parting, read: Callable[[], Reading | None]) -> Told:
    """The cause of a break that resumes no earlier step.

    Told in this order: the prefix tree and the agents; what was read (text or messages); the ids.

    Args:
        found: The break.
        parting: Its tokens.
        read: Reads the text or the messages of both sides; None where neither is there.
    """
    if not len(parting.now):
        return "overlap", "the prompt ends within that step: asked again, or gone back"
    if not len(parting.lost):
        return "overlap", "all of that step is repeated, and another step continues it"
    reading = read()
    if found.is_new_agent and (reading is None or reading[0] not in _REPEATS):
        if found.fork >= 0:
            return "overlap", "another agent's branch of a history that goes on elsewhere"
        return "new_agent", "the first step of this agent"
    if reading is None:
        return _from_ids(found, parting)
    change, evidence = reading
    if change == "messages" and found.fork >= 0 and not parting.answer_returns:
        return "overlap", "a whole earlier step is repeated, and none of its continuation"
    if change == "system" and found.is_new_agent is False:
        return "reset", evidence
    return _BY_CHANGE[change], evidence


def _from_ids(found: Break, parting: Parting) -> Told:
    """Ids tell that messages went, never why the tokens of one changed."""
    if parting.shared < parting.num_prompt and not parting.answer_returns:
        if found.fork >= 0:
            return "overlap", "a whole earlier step is repeated, and no id of its continuation"
        if found.is_new_agent is False:
            return "reset", "the same agent, and no ids of that step's answer return"
        return "unknown", "no ids of that step's answer return: a new context or another agent"
    meets = changed(parting.lost, parting.now)
    if meets is None:
        return "unknown", "the ids change from there on, and do not return"
    return "unknown", f"{meets[0]} ids became {meets[1]}, then the same ids follow again"
