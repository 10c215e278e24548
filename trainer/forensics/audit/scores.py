"""Reduce the logits of each sampled token to the few dozen numbers that hypotheses need.

From these scores follow the token's log-probabilities at any temperature, before and after
truncation, so that no hypothesis needs another forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from schemas.ragged import BoolArray, IntArray
from trainer.forensics.audit.rows import OFF, Truncation
from trainer.models.logprob_head import scaled_blocks

FloatArray = npt.NDArray[np.float32]
INVERSE_TEMPERATURES = tuple(2.0 ** (k / 3) for k in range(-4, 8))
"""Grid of 1 / temperature; other temperatures are interpolated. Temperature 1 is in the grid."""
TRUNCATIONS = (
    OFF,
    *(Truncation(top_p=p) for p in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)),
    *(Truncation(top_k=k) for k in (1, 2, 5, 10, 20, 30, 40, 50, 64, 100)),
    *(Truncation(min_p=p) for p in (0.01, 0.02, 0.05, 0.1, 0.2)),
)
"""Truncations that an audit tries."""
MOST_SORTED = 2048
"""Number of most likely tokens that are sorted for truncation."""
SLACK = 1e-3
"""Tolerance, in nats, for comparing a token with the least likely token that a truncation allows."""


class TokenScores(NamedTuple):
    """Scores of M tokens under one candidate, in nats.

    `mass` and `outside` are about the labelled truncation, and then each of `TRUNCATIONS` (S in all).
    """

    logprobs: FloatArray  # [M, K] at each of `INVERSE_TEMPERATURES`, before truncation
    slopes: FloatArray  # [M, K] derivative of `logprobs` by the inverse temperature
    labelled: FloatArray  # [M] log-probability at the labelled temperature, before truncation
    mass: FloatArray  # [M, S] log of the total probability of the tokens that remain
    outside: BoolArray  # [M, S] true where a truncation would have excluded the token

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
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenScores:
    """Compute the scores of a chunk of tokens from their logits.

    Args:
        logits: [C, V] output of the head.
        token: [C] int64.
        settings: [C, 4] labelled 1 / temperature, top_p, top_k and min_p.
        scale: Factor of the logits before capping.
        softcap: Bound of the logits; None: no capping.

    Example:
        >>> logits, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> scores = score_tokens(logits, token, torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        >>> at_half = (logits / 0.5).log_softmax(-1)[0, 0].item()
        >>> round(scores.at(1 / 0.5)[0].item() - at_half, 3)
        0.0
    """
    tried, parts = torch.tensor(TRUNCATIONS, device=logits.device), []
    for rows, z in scaled_blocks(logits, scale, softcap):
        label = settings[rows].to(z.dtype)
        z -= z.amax(-1, keepdim=True)
        picked = z.gather(-1, token[rows, None])
        logprobs, slopes = [], []
        for b in INVERSE_TEMPERATURES:
            weights = (b * z).exp_()
            total = weights.sum(-1, keepdim=True)
            logprobs.append(b * picked - total.log())
            slopes.append(picked - torch.linalg.vecdot(weights, z)[:, None] / total)
        z *= label[:, :1]
        log_total = z.logsumexp(-1, keepdim=True)
        chosen = label[:, :1] * picked - log_total
        largest = (z.topk(min(MOST_SORTED, z.shape[1])).values - log_total).exp()
        cuts = torch.cat([label[:, None, 1:], tried.expand(len(z), -1, -1)], 1)
        at_grid = torch.cat(logprobs, 1), torch.cat(slopes, 1)
        columns = *at_grid, chosen[:, 0], *_truncated(largest, chosen, cuts)
        parts.append(TokenScores(*(column.cpu().numpy() for column in columns)))
    return concatenate(parts)


def _truncated(p: Tensor, chosen: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `mass` and `outside` ([C, S] each) of truncations.

    `p` are the N largest probabilities ([C, N], descending), `chosen` the log-probability of the
    token ([C, 1]), and `cuts` top_p, top_k and min_p of S truncations ([C, S, 3]).
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
    outside = (chosen < lowest - SLACK) & ~is_off & ~is_beyond
    return mass.masked_fill(is_off, 0.0), outside
