"""Forward rows under candidate weights, each distinct token once, and keep the scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from schemas.ragged import BoolArray, IntArray
from trainer.batches.forest import chain_forests, chain_lengths
from trainer.batches.tree import Trie, make_trie, tree_forests
from trainer.forensics.audit.candidates import Candidate, architecture, load_candidate, score_forest
from trainer.forensics.audit.rows import AuditRows
from trainer.forensics.audit.token_scores import TokenScores, concatenate
from trainer.models.policy import Policy
from trainer.reports.memory_estimate import available_bytes

CACHED_SHARE = 0.4
"""Fraction of the free memory that loaded candidates may take in total."""


class Weights:
    """Loads candidates, and keeps as many in memory as fit.

    Args:
        candidates: The candidates.
        chunk_tokens: Number of targets whose logits are in memory at once.
        device: Device to score on.
        loaded: Policies that are already in memory, by index of the candidate.
        trees: Whether the policies will forward branching trees.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        chunk_tokens: int = 256,
        device: torch.device | None = None,
        loaded: dict[int, Policy] | None = None,
        trees: bool = True,
    ) -> None:
        self.candidates = candidates
        self._chunk_tokens = chunk_tokens
        self._device = device or _device()
        self._given, self._trees = loaded or {}, trees
        self._cached: dict[int, Policy] = {}
        self._checked = set[str]()

    def policy(self, number: int) -> Policy:
        """Return the policy of a candidate, loading it if necessary."""
        if number in self._given:
            return self._given[number]
        if number not in self._cached:
            self._make_room()
            one = self.candidates[number]
            kind = architecture(one)
            self._cached[number] = load_candidate(
                one,
                chunk_tokens=self._chunk_tokens,
                device=self._device,
                trees=self._trees,
                checks=kind not in self._checked,
            )
            self._checked.add(kind)
        return self._cached[number]

    def _make_room(self) -> None:
        """Drop all policies if another one would take too much memory."""
        if not self._cached:
            return
        parameters = next(iter(self._cached.values())).parameters()
        size = sum(p.numel() * p.element_size() for p in parameters)
        free = available_bytes(self._device)
        if free is None or size > CACHED_SHARE * free:
            self._cached.clear()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(kw_only=True)
class Cost:
    """Number of tokens forwarded so far, and the time taken.

    Attributes:
        num_tokens: Forwarded tokens.
        seconds: Time spent on forwarding, not counting the loading of weights.
        first: Tokens and seconds of the first micro-batch, which is slower than the others.
        on_micro_batch: Called after each micro-batch with its number of tokens.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    first: tuple[int, float] | None = None
    on_micro_batch: Callable[[int], None] = lambda _: None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a micro-batch."""
        self.num_tokens += num_tokens
        self.seconds += seconds
        if self.first is None:
            self.first = num_tokens, seconds
        self.on_micro_batch(num_tokens)

    @property
    def speed(self) -> float:
        """Tokens per second, excluding the first micro-batch unless it is the only one."""
        tokens, seconds = self.first or (0, 0.0)
        if tokens == self.num_tokens:
            tokens, seconds = 0, 0.0
        return (self.num_tokens - tokens) / max(self.seconds - seconds, 1e-9)


@dataclass(kw_only=True)
class Scored:
    """Scores of response tokens under one candidate; some tokens may have none.

    Attributes:
        place: [T] index of each token's score; -1 if the token has none.
        parts: Scores, in the order in which they were computed.
        num_scored: Number of scores.
    """

    place: IntArray
    parts: list[TokenScores] = field(default_factory=list)
    num_scored: int = 0

    def add(self, slots: IntArray, scores: TokenScores) -> None:
        """Add the scores of the tokens at the flat positions `slots`."""
        self.place[slots] = self.num_scored + np.arange(len(slots))
        self.parts.append(scores)
        self.num_scored += len(slots)

    def at(self, start: int, length: int) -> TokenScores | None:
        """Return the scores of a range of tokens; None if any of them has no score."""
        if len(self.scored_in(start, length)) < length:
            return None
        return self.of(np.arange(start, start + length))

    def scored_in(self, start: int, length: int) -> IntArray:
        """Return the flat positions of the tokens in a range that have a score."""
        found: IntArray = start + np.flatnonzero(self.place[start : start + length] >= 0)
        return found

    def of(self, slots: IntArray) -> TokenScores:
        """Return the scores of the tokens at the flat positions `slots`; all must have a score."""
        if len(self.parts) > 1:
            self.parts = [concatenate(self.parts)]
        return self.parts[0].part(self.place[slots])


def score_rows(
    policy: Policy,
    rows: AuditRows,
    wanted: IntArray,
    found: Scored,
    cost: Cost,
    *,
    budget: int,
    trees: bool = True,
    among: BoolArray | None = None,
) -> None:
    """Forward rows under one candidate, and add the scores of their sampled tokens to `found`.

    Args:
        policy: The candidate.
        rows: All rows.
        wanted: Rows to forward.
        found: Receives the scores.
        cost: Counts the forwarded tokens.
        budget: Maximum number of tokens per forward pass, except for longer rows.
        trees: Forward shared prefixes once.
        among: [T] true at the tokens to score; None: all sampled tokens. Each row is forwarded up to
            its last token to score.
    """
    is_target = rows.targets(wanted, among)
    truncations, tokens = rows.mode != "raw", (rows.prompts, rows.responses)
    if trees:
        trie = trie_of(rows, is_target)
        forests = tree_forests(trie, *tokens, is_target, budget, routes=rows.routes)
    else:
        forests = chain_forests(*tokens, is_target, wanted, budget, routes=rows.routes)
    for forest in forests:
        began = time.perf_counter()
        scores = score_forest(policy, forest, rows, truncations=truncations)
        found.add(forest.target_slot.numpy(), scores)
        cost.add(forest.num_tokens, time.perf_counter() - began)


def trie_of(rows: AuditRows, is_target: BoolArray) -> Trie:
    """Build the trie of the tokens that must be forwarded to score the given targets."""
    lengths = chain_lengths(rows.prompts, rows.responses, is_target)
    every = np.arange(rows.num_rows)
    return make_trie(rows.prompts, rows.responses, lengths, rows.group, every, rows.routes)


def num_distinct_tokens(rows: AuditRows, wanted: IntArray, among: BoolArray | None = None) -> int:
    """Count the tokens to forward to score the given rows under one candidate."""
    is_target = rows.targets(wanted, among)
    return trie_of(rows, is_target).num_tokens if is_target.any() else 0
