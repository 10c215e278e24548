"""Forward rows under candidate weights, and reduce the logits of each sampled token to its scores.

An audit compares stored log-probabilities with a candidate's log-probabilities at any temperature,
before and after truncation. The scores of a token are the few dozen numbers from which these
follow, so that no hypothesis needs another forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.ragged import BoolArray, IntArray
from trainer.batches.forest import chain_lengths
from trainer.batches.packing import chain_forests
from trainer.batches.tree import Trie, make_trie, tree_forests
from trainer.forensics.audit.candidates import Candidate, architecture, load_candidate
from trainer.forensics.audit.rows import AuditRows, Truncation
from trainer.models.logprob_head import scaled_blocks
from trainer.models.policy import Policy, hidden_before_targets
from trainer.models.router_replay import replayed
from trainer.reports.memory_estimate import available_bytes

FloatArray = npt.NDArray[np.float32]
PER_OCTAVE = 3
INVERSE_TEMPERATURES = tuple(2.0 ** (k / PER_OCTAVE) for k in range(-4, 8))
"""Grid of 1 / temperature; other temperatures are interpolated. Temperature 1 is in the grid."""
AT_ONE = 4
TRUNCATIONS = (
    Truncation(),
    *(Truncation(top_p=p) for p in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)),
    *(Truncation(top_k=k) for k in (1, 2, 5, 10, 20, 30, 40, 50, 64, 100)),
    *(Truncation(min_p=p) for p in (0.01, 0.02, 0.05, 0.1, 0.2)),
)
"""Truncations that an audit tries."""
MOST_SORTED = 2048
"""Number of most likely tokens that are sorted for truncation."""
SLACK = 1e-3
"""Tolerance, in nats, for comparing a token with the least likely token that a truncation allows."""
CACHED_SHARE = 0.4
"""Fraction of the free memory that loaded candidates may take in total."""


class TokenScores(NamedTuple):
    """Scores of M tokens under one candidate, in nats.

    `mass` and `outside` are about the labelled truncation, and then each of `TRUNCATIONS`; S is 0 if
    these were not requested.
    """

    logprobs: FloatArray  # [M, K] at each of `INVERSE_TEMPERATURES`, before truncation
    slopes: FloatArray  # [M, K] derivative of `logprobs` by the inverse temperature
    labelled: FloatArray  # [M] log-probability at the labelled temperature, before truncation
    mass: FloatArray  # [M, 1 + S] log of the total probability of the tokens that remain
    outside: BoolArray  # [M, 1 + S] true where a truncation would have excluded the token

    def part(self, index: IntArray) -> TokenScores:
        """Select tokens."""
        return TokenScores._make(values[index] for values in self)

    def at(self, inverse_temperature: float) -> FloatArray:
        """Compute the log-probabilities ([M]) at any temperature, before truncation.

        Uses cubic Hermite interpolation in the inverse temperature; beyond the grid, the closest
        temperature of the grid is used.
        """
        grid = INVERSE_TEMPERATURES
        b = min(max(inverse_temperature, grid[0]), grid[-1])
        k = min(max(int(np.searchsorted(grid, b, side="right")) - 1, 0), len(grid) - 2)
        width = grid[k + 1] - grid[k]
        t = (b - grid[k]) / width
        logprobs = (
            (1 + 2 * t) * (1 - t) ** 2 * self.logprobs[:, k]
            + t * (1 - t) ** 2 * width * self.slopes[:, k]
            + t**2 * (3 - 2 * t) * self.logprobs[:, k + 1]
            - t**2 * (1 - t) * width * self.slopes[:, k + 1]
        )
        capped: FloatArray = np.minimum(logprobs, 0, dtype=np.float32)
        return capped


def concatenate(parts: Sequence[TokenScores]) -> TokenScores:
    """Concatenate several `TokenScores`."""
    return TokenScores._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


@torch.no_grad()
def score_tokens(
    logits: Tensor,
    token: Tensor,
    settings: Tensor,
    *,
    truncations: bool,
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenScores:
    """Compute the scores of a chunk of tokens from their logits.

    Args:
        logits: [C, V] output of the head.
        token: [C] int64.
        settings: [C, 4] labelled 1 / temperature, top_p, top_k and min_p.
        truncations: Whether to score all `TRUNCATIONS`, not only the labelled one.
        scale: Factor of the logits before capping.
        softcap: Bound of the logits; None: no capping.

    Example:
        >>> logits, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> settings = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
        >>> scores = score_tokens(logits, token, settings, truncations=True)
        >>> at_half = (logits / 0.5).log_softmax(-1)[0, 0].item()
        >>> round(scores.at(1 / 0.5)[0].item() - at_half, 3)
        0.0
    """
    tried = torch.tensor(TRUNCATIONS if truncations else (), device=logits.device).reshape(-1, 3)
    parts = []
    for rows, z in scaled_blocks(logits, scale, softcap):
        label = settings[rows].to(z.dtype)
        z -= z.amax(-1, keepdim=True)
        picked = z.gather(-1, token[rows, None])
        at_grid = _at_grid(z, picked)
        z *= label[:, :1]
        log_total = z.exp().sum(-1).log()
        chosen = label[:, 0] * picked[:, 0] - log_total
        cuts = torch.cat([label[:, None, 1:], tried.expand(len(z), -1, -1)], 1)
        largest = z.topk(min(MOST_SORTED, z.shape[1])).values
        mass, outside = _truncated((largest - log_total[:, None]).exp(), chosen, cuts)
        columns = (*at_grid, chosen, mass, outside)
        parts.append(TokenScores(*(column.cpu().numpy() for column in columns)))
    return concatenate(parts)


def _at_grid(z: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `logprobs` and `slopes` ([C, K] each) from [C, V] logits, of which 0 is the largest."""
    normalizer, mean, powers = [], [], list[Tensor]()
    for k, b in enumerate(INVERSE_TEMPERATURES):
        # exp(2 b z) is the square of exp(b z): only the lowest octave needs exponentials.
        if k < PER_OCTAVE:
            powers.append((b * z).exp_())
        weights = powers[k % PER_OCTAVE]
        if k >= PER_OCTAVE:
            weights.square_()
        total = weights.sum(-1)
        normalizer.append(total.log())
        mean.append(torch.linalg.vecdot(weights, z) / total)
    inverse = torch.tensor(INVERSE_TEMPERATURES, device=z.device)
    return inverse * picked - torch.stack(normalizer, 1), picked - torch.stack(mean, 1)


def _truncated(p: Tensor, chosen: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `mass` and `outside` ([C, S] each) of truncations.

    `p` are the N largest probabilities ([C, N], descending), `chosen` the log-probability of the
    token ([C]), and `cuts` top_p, top_k and min_p of S truncations ([C, S, 3]).
    """
    top_p, top_k, min_p = (column.contiguous() for column in cuts.unbind(-1))
    size, total = p.shape[1], p.cumsum(-1)
    # Any truncation allows the most likely tokens, so it is a number of leading entries of p.
    number = torch.where(top_k > 0, top_k, size).clamp(max=size).long()
    number = torch.minimum(number, torch.searchsorted(-p, -min_p * p[:, :1], right=True))
    number = number.clamp(min=1)
    # vLLM applies top_p to the distribution that min_p and top_k leave.
    is_whole = (top_k <= 0) & (min_p <= 0)
    nucleus = top_p * torch.where(is_whole, 1.0, total.gather(1, number - 1))
    # A nucleus larger than the sorted tokens has the probability top_p, except for rounding.
    is_beyond = (top_p < 1) & (total[:, -1:] < nucleus)
    in_nucleus = torch.searchsorted(total, nucleus) + 1
    number = torch.where(top_p < 1, torch.minimum(number, in_nucleus), number)
    mass = torch.where(is_beyond, nucleus, total.gather(1, number - 1)).log().clamp(max=0)
    is_off = is_whole & (top_p >= 1)
    lowest = p.gather(1, number - 1).log()
    outside = (chosen[:, None] < lowest - SLACK) & ~is_off & ~is_beyond
    return mass.masked_fill(is_off, 0.0), outside


@dataclass(kw_only=True)
class Cost:
    """Number of tokens forwarded so far, and the time taken, not counting the loading of weights."""

    num_tokens: int = 0
    seconds: float = 0.0
    first: tuple[int, float] = (0, 0.0)  # of the first micro-batch, which is slower than the others
    on_micro_batch: Callable[[int], None] = lambda _: None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count a micro-batch."""
        if not self.num_tokens:
            self.first = num_tokens, seconds
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.on_micro_batch(num_tokens)

    @property
    def speed(self) -> float:
        """Tokens per second, excluding the first micro-batch unless it is the only one."""
        tokens, seconds = self.first if self.num_tokens > self.first[0] else (0, 0.0)
        return (self.num_tokens - tokens) / max(self.seconds - seconds, 1e-9)


class Weights:
    """Loads candidates, and keeps as many in memory as fit.

    `loaded` are policies that are already in memory, by index of the candidate; `trees` is whether
    rows are forwarded as trees, with shared prefixes once, or separately.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        device: torch.device | None = None,
        loaded: dict[int, Policy] | None = None,
        trees: bool = True,
    ) -> None:
        self.candidates = candidates
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded, self.trees = loaded or {}, trees
        self._cache: dict[int, Policy] = {}
        self._checked = set[str]()

    def policy(self, number: int) -> Policy:
        """Return the policy of a candidate, loading it if necessary."""
        if number in self._loaded:
            return self._loaded[number]
        if number not in self._cache:
            if self._cache:
                parameters = next(iter(self._cache.values())).parameters()
                size = sum(p.numel() * p.element_size() for p in parameters)
                free = available_bytes(self._device)
                if free is None or size > CACHED_SHARE * free:
                    self._cache.clear()
            candidate = self.candidates[number]
            kind = architecture(candidate)
            checks = kind not in self._checked  # trees are checked once for an architecture
            self._cache[number] = load_candidate(
                candidate, device=self._device, trees=self.trees, checks=checks
            )
            self._checked.add(kind)
        return self._cache[number]


@dataclass(kw_only=True)
class Scored:
    """Scores of response tokens under one candidate; tokens of some rows have none."""

    place: IntArray  # [T] index of each token's score; -1 if the token has none
    parts: list[TokenScores] = field(default_factory=list)  # in the order of their computation
    num_scored: int = 0

    def add(self, slots: IntArray, scores: TokenScores) -> None:
        """Add the scores of the tokens at the flat positions `slots`."""
        self.place[slots] = self.num_scored + np.arange(len(slots))
        self.parts.append(scores)
        self.num_scored += len(slots)

    def of(self, slots: IntArray) -> TokenScores:
        """Return the scores of tokens, which must all have one."""
        if len(self.parts) > 1:
            self.parts = [concatenate(self.parts)]
        return self.parts[0].part(self.place[slots])


@torch.no_grad()
def score_rows(
    policy: Policy,
    rows: AuditRows,
    wanted: IntArray,
    scored: Scored,
    cost: Cost,
    *,
    budget: int,
    trees: bool = True,
) -> None:
    """Forward the rows `wanted` under one candidate, and add scores of sampled tokens to `scored`.

    `budget` is the maximum number of tokens per forward pass, except for longer rows; `trees` forward
    shared prefixes once.
    """
    is_target = rows.targets(wanted)
    tokens, routes = (rows.prompts, rows.responses), rows.routes
    if trees:
        forests = tree_forests(trie_of(rows, is_target), *tokens, is_target, budget, routes=routes)
    else:
        forests = chain_forests(*tokens, is_target, wanted, budget, routes=routes)
    device, size = next(policy.parameters()).device, policy.logprob_chunk_tokens
    head = policy.model.get_output_embeddings()
    for forest in forests:
        began = time.perf_counter()
        slots = forest.target_slot.numpy()
        settings = torch.from_numpy(rows.settings[rows.responses.row_of(slots)]).to(device)
        micro_batch = forest.to(device)
        with replayed(policy.model, micro_batch.routes):
            hidden: Tensor = hidden_before_targets(policy.model, micro_batch)
        parts = [
            score_tokens(
                head(hidden[at : at + size]),
                micro_batch.target_token[at : at + size],
                settings[at : at + size],
                truncations=rows.mode != "raw",
                scale=policy.logit_scale,
                softcap=policy.softcap,
            )
            for at in range(0, len(hidden), size)
        ]
        scored.add(slots, concatenate(parts))
        cost.add(forest.num_tokens, time.perf_counter() - began)


def trie_of(rows: AuditRows, is_target: BoolArray) -> Trie:
    """Build the trie of the tokens that must be forwarded to score the targets."""
    lengths = chain_lengths(rows.prompts, rows.responses, is_target)
    every = np.arange(rows.num_rows)
    return make_trie(rows.prompts, rows.responses, lengths, rows.group, every, rows.routes)


def num_distinct_tokens(rows: AuditRows, wanted: IntArray) -> int:
    """Count the tokens to forward to score some rows under one candidate."""
    is_target = rows.targets(wanted)
    return trie_of(rows, is_target).num_tokens if is_target.any() else 0
