"""Causes of prefix breaks, how each is recognised, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pipelines.drift_diagnosis.breaks import Break
from pipelines.drift_diagnosis.tokens import changed, returns
from pipelines.drift_diagnosis.turns import Change, Reading
from rollout_io.dataset.prefix_layout import Ids

Cause = Literal[
    "retokenized", "template", "edited", "reset", "new_agent", "overlap", "picture", "unknown"
]

Told: TypeAlias = tuple[Cause, str]
"""A cause, and the evidence for it."""

HINTS: dict[Cause, str] = {
    "retokenized": (
        "the harness sends text, which tokenizes differently from what was sampled: send the "
        "engine's token ids back (prompt token ids in, token ids out)"
    ),
    "template": (
        "the chat template renders earlier messages differently: use one that keeps them exactly "
        "as generated, including thinking (such as --chat-template qwen3_acc_thinking)"
    ),
    "edited": (
        "the harness changes messages that it sent before: only append messages, and shorten a "
        "message before it is first sent"
    ),
    "reset": (
        "the harness starts a new context (a summary, dropped messages), which becomes a separate "
        "sequence: use longer contexts to start new ones less often"
    ),
    "new_agent": "a different agent's conversation: merge with --rule lineage to lose no tokens",
    "overlap": (
        "several calls branch from one history (parallel calls, retries, samples) and only one "
        "can continue it: train with sequence_layout = tree to forward shared tokens once"
    ),
    "picture": (
        "the harness sends another picture where it sent one before (taken again, resized or "
        "re-encoded): send earlier pictures unchanged, and append new ones"
    ),
    "unknown": "the ids do not show the cause: pass --tokenizer DIR, or convert with messages",
}
"""Advice on how to fix the harness, by cause."""

KEEPS_TOKENS: frozenset[Cause] = frozenset({"new_agent", "overlap"})
"""Causes that lose no tokens, because the step was never meant to continue the earlier step."""

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
    """The tokens on both sides of a break.

    Attributes:
        before: Prompt and response of the earlier step.
        num_prompt: Length of the earlier step's prompt.
        prompt: The prompt that does not continue the earlier step.
        shared: Number of leading tokens that `before` and `prompt` share, pictures included.
    """

    before: Ids
    num_prompt: int
    prompt: Ids
    shared: int

    @property
    def lost(self) -> Ids:
        """Tokens that the prompt should have contained after the shared ones."""
        return self.before[self.shared :]

    @property
    def now(self) -> Ids:
        """Tokens that the prompt contains instead of the lost ones."""
        return self.prompt[self.shared :]

    @property
    def answer_returns(self) -> bool:
        """True if tokens of the earlier response occur in the rest of the prompt."""
        lost_answer = self.before[max(self.num_prompt, self.shared) :]
        return returns(lost_answer, self.now)


def tell(broken: Break, parting: Parting, read: Callable[[], Reading | None]) -> Told:
    """Determine the cause of a break that resumes no earlier step, and the evidence for it.

    Evidence is tried in this order: the prefix tree and the agents; pictures; text or messages; token
    ids.

    Args:
        broken: The break.
        parting: The tokens on both sides.
        read: Function that compares the text or messages of both sides; returns None if neither is
            available.
    """
    if not len(parting.now):
        evidence = "the prompt ends within that step: a retry, or a return to an earlier turn"
        return "overlap", evidence
    if not len(parting.lost):
        return "overlap", "the prompt repeats that entire step, which another step continues"
    if parting.lost[0] == parting.now[0]:
        return _other_picture(broken)
    reading = read()
    if broken.is_new_agent and (reading is None or reading[0] not in _REPEATS):
        if broken.fork >= 0:
            return "overlap", "another agent branches off a history that another step continues"
        return "new_agent", "the first step of this agent"
    if reading is None:
        return _from_ids(broken, parting)
    change, evidence = reading
    if change == "messages" and broken.fork >= 0 and not parting.answer_returns:
        return "overlap", "the prompt repeats an entire earlier step, but not its continuation"
    if change == "system" and broken.is_new_agent is False:
        return "reset", evidence
    return _BY_CHANGE[change], evidence


def _other_picture(broken: Break) -> Told:
    """Explain a break at equal token ids: only a picture differs there."""
    if broken.fork >= 0:
        return (
            "overlap",
            "the prompt repeats an entire earlier step, and then shows another picture",
        )
    if broken.is_new_agent:
        return "new_agent", "the first step of this agent"
    return "picture", "the token ids are the same, but the picture at them is another"


def _from_ids(broken: Break, parting: Parting) -> Told:
    """Find the cause from ids only, which reveal dropped messages, but not why tokens changed."""
    if parting.shared < parting.num_prompt and not parting.answer_returns:
        if broken.fork >= 0:
            return "overlap", "the prompt repeats an entire earlier step, but not its continuation"
        if broken.is_new_agent is False:
            return "reset", "the same agent, but no ids of that step's response recur"
        return "unknown", "no ids of that step's response recur: a new context or another agent"
    meets = changed(parting.lost, parting.now)
    if meets is None:
        return "unknown", "the ids differ from there on and never agree again"
    return "unknown", f"{meets[0]} ids became {meets[1]}, then the ids agree again"
