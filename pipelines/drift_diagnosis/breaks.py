"""Find steps that do not continue the previous step, and tell why: causes, evidence, how to fix them.

Each is compared with an earlier step; tokens of single rows are decoded on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.drift_diagnosis.texts import Change, Reading
from pipelines.merging.lineage import Ancestry, PrefixTree
from rollout_io.dataset.prefix_layout import Ids, common_prefix, is_encoded
from schemas.pictures import identity_ids
from schemas.ragged import IntArray, Ragged

# 8 tokens in a row rarely recur by chance; the multiplier is 2**64 / golden ratio, made odd.
_GRAM = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)

Agents = Sequence[str | None]


@dataclass(frozen=True, slots=True)
class Break:
    """A step that does not continue the previous step; steps are identified by table rows.

    Attributes:
        row: Row of the step.
        origin: Row of the earlier step that this step is compared with.
        shared: Number of leading tokens that both steps share.
        resumes: True if `row` continues `origin`, which is not the previous step.
        fork: Row of an earlier step that this step repeats in full but does not continue, because
            another step already does; -1 if there is none.
        is_new_agent: True if no earlier step of the trajectory has the same agent; None if the
            agent is unknown.
    """

    row: int
    origin: int
    shared: int
    resumes: bool = False
    fork: int = -1
    is_new_agent: bool | None = None


def find_breaks(tree: PrefixTree, steps: Steps, continued: IntArray, agents: Agents) -> list[Break]:
    """Find the breaks of a table in row order; a trajectory's first step is never a break.

    A break that resumes no earlier step is compared with its parent in the prefix tree. If the
    parent belongs to another agent, the break is compared with the latest step of the same agent,
    unless it branches off a complete step. Without a parent, it is compared with the previous step.

    Args:
        tree: Prefix tree of the table.
        steps: Tokens of the table, read only where agents differ.
        continued: [N] the row that each row continues; -1 if none (see `continued_rows`).
        agents: [N] agent names; None where unknown.

    Example:
        Prompts [1, 2], [1, 2, 3, 9] and [1, 7], responses [3], [4] and [5], agents unknown:

        >>> find_breaks(tree, steps, np.array([-1, 0, -1]), [None] * 3)
        [Break(row=2, origin=1, shared=1, resumes=False, fork=-1, is_new_agent=None)]
    """
    rows = np.arange(len(tree.parent))
    follows = (rows != tree.start) & (tree.prompt > 0)
    broken = np.flatnonzero(follows & (continued != rows - 1))
    agents_seen, forks = _Agents(agents, tree.start), _forks(tree, broken)
    return [
        _break(row, tree, steps, int(continued[row]), agents_seen, fork)
        for row, fork in zip(broken.tolist(), forks.tolist(), strict=True)
    ]


class _Agents:
    """The agent of each row, and the latest earlier step of the same agent."""

    def __init__(self, agents: Agents, start: IntArray) -> None:
        self.names = agents
        self.previous: list[int] = []
        latest: dict[tuple[int, str | None], int] = {}
        for row, (name, first) in enumerate(zip(agents, start.tolist(), strict=True)):
            self.previous.append(latest.get((first, name), -1))
            latest[first, name] = row


def _break(
    row: int, tree: PrefixTree, steps: Steps, resumed: int, agents: _Agents, fork: int
) -> Break:
    origin, shared = int(tree.parent[row]), int(tree.shared[row])
    name, previous = agents.names[row], agents.previous[row]
    is_new = None if name is None else previous < 0
    if resumed >= 0:
        length = int(tree.prompt[resumed] + tree.response[resumed])
        return Break(row, resumed, length, resumes=True, is_new_agent=is_new)
    broken = Break(row, origin, shared, fork=fork, is_new_agent=is_new)
    if broken.fork >= 0:
        return broken
    if is_new is False and (origin < 0 or agents.names[origin] != name):
        common = common_prefix(steps.content(previous), steps.prompt(row))
        return replace(broken, origin=previous, shared=common)
    return broken if origin >= 0 else replace(broken, origin=row - 1)


def _forks(tree: PrefixTree, rows: IntArray) -> IntArray:
    """[K] For each row, find the last ancestor whose tokens the row repeats in full.

    The result is -1 if there is none. A step that shares only a part of its parent's response has
    changed that response and is not a branch.
    """
    origin, shared = tree.parent[rows], tree.shared[rows]
    length = tree.prompt + tree.response
    changes = (tree.prompt[origin] < shared) & (shared < length[origin])
    ancestor = Ancestry(tree).whole_within(np.maximum(origin, 0), shared)
    return np.where((origin < 0) | changes, -1, ancestor)


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


@dataclass(frozen=True, slots=True)
class Steps:
    """The N rows of a table, decoded one at a time.

    Attributes:
        holder: [N] the row that stores the last token before `begin` (see `Ancestry`).
        begin: [N] number of leading tokens that the row takes from its parent; 0 if it stores its
            entire prompt.
        prompt_lengths: [N] number of tokens in each prompt.
        own: The part of each prompt that the row stores.
        responses: The responses.
    """

    holder: IntArray
    begin: IntArray
    prompt_lengths: IntArray
    own: Ragged
    responses: Ragged

    @classmethod
    def of(cls, table: pa.Table, tree: PrefixTree) -> Steps:
        """Wrap the rows of a table in either layout."""
        encoded = is_encoded(table)
        name = "prompt_suffix_ids" if encoded else "prompt_token_ids"
        own = Ragged.from_arrow(table.column(name))
        responses = Ragged.from_arrow(table.column("response_ids"))
        begin = tree.shared if encoded else np.zeros(table.num_rows, np.int64)
        return cls(Ancestry(tree).holder, begin, tree.prompt, own, responses)

    def seen(self, pictures: pa.ChunkedArray | None) -> Steps:
        """Return the rows with `identity_ids`, which tell the tokens of pictures apart."""
        own = identity_ids(self.own, self.begin, pictures)
        return replace(
            self, own=own, responses=identity_ids(self.responses, self.prompt_lengths, pictures)
        )

    def prompt(self, row: int) -> Ids:
        """Decode the prompt of a row."""
        return self._leading(row, int(self.prompt_lengths[row]))

    def content(self, row: int) -> Ids:
        """Decode the prompt and response of a row into one array."""
        return np.concatenate([self.prompt(row), self.responses.row(row)])

    def _leading(self, row: int, stop: int) -> Ids:
        parts: list[Ids] = []
        while stop > 0:
            begin = int(self.begin[row])
            if stop > begin:
                from_prompt = self.own.row(row)[: stop - begin]
                rest = stop - begin - len(from_prompt)
                parts += [self.responses.row(row)[:rest], from_prompt]
                stop = begin
            row = int(self.holder[row])
        return np.concatenate([self.own.values[:0], *reversed(parts)])


def changed(lost: Ids, now: Ids) -> tuple[int, int] | None:
    """Count the leading tokens of each list that differ before both agree again.

    The lists agree where their next 8 tokens are equal, or all remaining tokens of `lost` if there
    are fewer than 8. If this holds at several positions, the result is the one with the fewest
    changed tokens; if it holds nowhere, the result is None.

    Example:
        >>> changed(np.array([26951, 3834, 198, 12]), np.array([94224, 198, 12, 41151]))
        (2, 1)
    """
    size = min(_GRAM, len(lost))
    if len(lost) > size <= len(now):
        grams, first = np.unique(_grams(now, size), return_index=True)
        wanted = _grams(lost, size)
        at = np.minimum(np.searchsorted(grams, wanted), len(grams) - 1)
        places = np.flatnonzero(grams[at] == wanted)
        if len(places):
            best = int(places[(places + first[at[places]]).argmin()])
            return best, int(first[at[best]])
    return _meets_at_the_end(lost, now)


def returns(response: Ids, now: Ids) -> bool:
    """True if any 8 consecutive tokens of a response (or all, if it is shorter) occur in a prompt.

    False for an empty response.
    """
    size = min(_GRAM, len(response))
    if not size or len(now) < size:
        return False
    return bool(np.isin(_grams(response, size), _grams(now, size)).any())


def _meets_at_the_end(lost: Ids, now: Ids) -> tuple[int, int] | None:
    near = now[: 2 * len(lost) + _GRAM].astype(np.int64).tobytes()
    starts = range(max(0, len(lost) - _GRAM), len(lost))
    places = ((start, _find(lost[start:].astype(np.int64).tobytes(), near)) for start in starts)
    return min(((a, b) for a, b in places if b >= 0), key=sum, default=None)


def _find(tokens: bytes, among: bytes) -> int:
    """Find a run of int64 tokens in a longer one; return the index of the first match, or -1."""
    at = among.find(tokens)
    # A match that does not start at a multiple of 8 bytes straddles two tokens.
    while at % 8 and at >= 0:
        at = among.find(tokens, at + 1)
    return at // 8


def _grams(tokens: Ids, size: int) -> npt.NDArray[np.uint64]:
    """[tokens - size + 1] Hash the `size` tokens starting at each position."""
    values = tokens.astype(np.uint64)
    count = len(tokens) - size + 1
    result = np.zeros(count, np.uint64)
    for offset in range(size):
        result = result * _BASE + values[offset : offset + count]
    return result
