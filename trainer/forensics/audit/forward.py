"""Load candidates, and forward rows under them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError, count
from schemas.ragged import BoolArray, IntArray
from trainer.batches.forest import chain_lengths
from trainer.batches.packing import chain_forests
from trainer.batches.tree import Trie, make_trie, tree_forests
from trainer.forensics.audit.candidates import Candidate, load_candidate
from trainer.forensics.audit.rows import KEYS, AuditRows
from trainer.forensics.audit.scores import TokenScores, concatenate, score_tokens
from trainer.models.policy import Policy, hidden_before_targets
from trainer.models.router_replay import replayed
from trainer.reports.memory_estimate import available_bytes

CACHED_SHARE = 0.4
"""Fraction of the free memory that loaded candidates may take in total."""


class Weights:
    """Forwards rows under candidates, of which as many as fit are kept in memory.

    Args:
        candidates: The candidates.
        device: None: a GPU if there is one.
        loaded: Policies that are already in memory, by index of the candidate.
        trees: Forward rows as trees, with shared prefixes once, instead of separately.
        budget: Maximum number of tokens per forward pass, except for longer rows.

    Attributes:
        num_tokens: Number of tokens forwarded so far.
        seconds: Time taken, not counting the loading of weights.
        on_tokens: Called after each micro-batch with its number of tokens.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        device: torch.device | None = None,
        loaded: dict[int, Policy] | None = None,
        trees: bool = True,
        budget: int = 2048,
    ) -> None:
        self.candidates = candidates
        self.num_tokens, self.seconds = 0, 0.0
        self.on_tokens: Callable[[int], None] = lambda _: None
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded, self._trees, self._budget = loaded or {}, trees, budget
        self._cache: dict[int, Policy] = {}

    def policy(self, number: int) -> Policy:
        """Return the policy of a candidate, loading it if necessary."""
        if number in self._loaded:
            return self._loaded[number]
        if number not in self._cache:
            for other in list(self._cache.values())[:1]:
                size = sum(p.numel() * p.element_size() for p in other.parameters())
                free = available_bytes(self._device)
                if free is None or size > CACHED_SHARE * free:
                    self._cache.clear()
            one = self.candidates[number]
            self._cache[number] = load_candidate(one, device=self._device, trees=self._trees)
        return self._cache[number]

    @torch.no_grad()
    def score(
        self, number: int, rows: AuditRows, wanted: IntArray, policy: Policy | None = None
    ) -> dict[int, TokenScores]:
        """Forward the rows `wanted` under a candidate; return the scores of their spans by index.

        Args:
            number: Index of the candidate.
            rows: The rows.
            wanted: Indices of rows.
            policy: Forward under this policy instead, such as one with rounded weights.

        Raises:
            InputError: `audit_rows`: the candidate has no embedding for a token.
        """
        is_target = rows.targets(wanted)
        if not is_target.any():
            return {}
        policy = policy or self.policy(number)
        self._check_tokens(number, rows, wanted, policy)
        tokens, routes = (rows.prompts, rows.responses), rows.routes
        if self._trees:
            trie = _trie_of(rows, is_target)
            forests = tree_forests(trie, *tokens, is_target, self._budget, routes=routes)
        else:
            forests = chain_forests(*tokens, is_target, wanted, self._budget, routes=routes)
        device, size = next(policy.parameters()).device, policy.logprob_chunk_tokens
        head, parts, slots = policy.model.get_output_embeddings(), [], list[IntArray]()
        for forest in forests:
            began = time.perf_counter()
            slots.append(forest.target_slot.numpy())
            settings = torch.from_numpy(rows.settings[rows.responses.row_of(slots[-1])]).to(device)
            micro_batch = forest.to(device)
            with replayed(policy.model, micro_batch.routes):
                hidden: Tensor = hidden_before_targets(policy.model, micro_batch)
            parts += [
                score_tokens(
                    head(hidden[at : at + size]),
                    micro_batch.target_token[at : at + size],
                    settings[at : at + size],
                    scale=policy.logit_scale,
                    softcap=policy.softcap,
                )
                for at in range(0, len(hidden), size)
            ]
            self.seconds += time.perf_counter() - began
            self.num_tokens += forest.num_tokens
            self.on_tokens(forest.num_tokens)
        place = np.zeros(len(is_target), np.int64)
        place[np.concatenate(slots)] = np.arange(is_target.sum())
        chosen = set(wanted.tolist())
        scores = concatenate(parts)
        return {
            span: scores.part(place[start : start + length])
            for span, (row, start, length) in enumerate(rows.spans.tolist())
            if row in chosen
        }

    def _check_tokens(self, number: int, rows: AuditRows, wanted: IntArray, policy: Policy) -> None:
        size = policy.model.get_input_embeddings().weight.shape[0]
        for row in wanted.tolist():
            tokens = np.append(rows.prompts.row(row), rows.responses.row(row))
            if tokens.max() >= size:
                one, (_, trajectory, step) = (
                    self.candidates[number],
                    rows.table.select(KEYS).row(row),
                )
                finding = (
                    f"token {tokens.max()}, but {one.name} ({one.path}) has {count(size, 'token')}"
                )
                where = f"trajectory '{trajectory}', row {step}"
                hint = "leave out candidates that have another tokenizer than the dataset"
                raise InputError("audit_rows", where, finding, hint=hint)


def _trie_of(rows: AuditRows, is_target: BoolArray) -> Trie:
    lengths = chain_lengths(rows.prompts, rows.responses, is_target)
    every = np.arange(rows.num_rows)
    return make_trie(rows.prompts, rows.responses, lengths, rows.group, every, rows.routes)


def num_distinct_tokens(rows: AuditRows) -> int:
    """Count the tokens to forward to score all rows that can be audited under one candidate."""
    is_target = rows.targets(rows.auditable)
    return _trie_of(rows, is_target).num_tokens if is_target.any() else 0
