"""Score sampled tokens under every sampling hypothesis, from the logits of one forward pass.

An audit compares stored log-probabilities with a candidate's log-probabilities at any temperature,
before and after truncation. The logits of a token are reduced to a few dozen numbers, from which
these log-probabilities are computed, so that no hypothesis needs another forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.models.logprob_head import scaled_blocks

FloatArray = npt.NDArray[np.float32]

PER_OCTAVE = 3
INVERSE_TEMPERATURES: tuple[float, ...] = tuple(2.0 ** (k / PER_OCTAVE) for k in range(-4, 8))
"""Grid of 1 / temperature; other temperatures are interpolated. Temperature 1 is in the grid."""
AT_ONE = 4
"""Index of temperature 1 in `INVERSE_TEMPERATURES`."""
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
TOP_K = (1, 2, 5, 10, 20, 30, 40, 50, 64, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
NUM_SORTED, MOST_SORTED = 128, 2048
"""Number of most likely tokens that are sorted for truncation: at first, and at most."""
SLACK = 1e-3
"""Tolerance, in nats, for comparing a token with the least likely token that is kept."""
OUTSIDE = -5.0
"""Change in the log-likelihood, in nats, of a token that a truncation would have excluded.

It is finite, because the engine's noise moves tokens across the boundary.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Truncation settings; the defaults are off.

    Example:
        >>> Truncation(top_p=0.9).text
        'top_p 0.9'
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_off(self) -> bool:
        """True if all tokens can be sampled."""
        return self.top_p >= 1 and self.top_k <= 0 and self.min_p <= 0

    @property
    def text(self) -> str:
        """The settings that are on."""
        on = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return ", ".join(f"{name} {getattr(self, name):g}" for name, is_on in on.items() if is_on)


NO_TRUNCATION = Truncation()
TRUNCATIONS = (
    *(Truncation(top_p=value) for value in TOP_P),
    *(Truncation(top_k=value) for value in TOP_K),
    *(Truncation(min_p=value) for value in MIN_P),
)
"""Truncations that an audit tries."""
_TOP_P = torch.tensor([one.top_p for one in TRUNCATIONS])
_TOP_K = torch.tensor([one.top_k for one in TRUNCATIONS])
_MIN_P = torch.tensor([one.min_p for one in TRUNCATIONS])


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Scores of M tokens under one candidate; all are float32 nats.

    Attributes:
        picked: [M] logit of the token.
        normalizer: [M, K] log of the sum of exp(logit * b), for each b in `INVERSE_TEMPERATURES`.
        mean_logit: [M, K] derivative of `normalizer`: mean logit at that temperature.
        labelled: [M] log-probability at the labelled temperature, before truncation.
        own_kept: [M] log of the total probability of the tokens that the labelled truncation keeps;
            0 without truncation.
        own_outside: [M] true where the labelled truncation would have excluded the token.
        kept: [M, S] like `own_kept`, for each of `TRUNCATIONS`; S is 0 if they were not requested.
        outside: [M, S] like `own_outside`, for each of `TRUNCATIONS`.
    """

    picked: FloatArray
    normalizer: FloatArray
    mean_logit: FloatArray
    labelled: FloatArray
    own_kept: FloatArray
    own_outside: npt.NDArray[np.bool_]
    kept: FloatArray
    outside: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.picked)

    def part(self, index: slice | npt.NDArray[np.int64]) -> TokenScores:
        """Select tokens."""
        return TokenScores(
            **{field.name: getattr(self, field.name)[index] for field in fields(self)}
        )

    def untruncated(self) -> TokenScores:
        """Return the scores with temperature 1 and no truncation as the labelled settings.

        The truncations that were scored at another temperature are left out.
        """
        num = len(self)
        return replace(
            self,
            labelled=self.at_one,
            own_kept=np.zeros(num, np.float32),
            own_outside=np.zeros(num, np.bool_),
            kept=self.kept[:, :0],
            outside=self.outside[:, :0],
        )

    @property
    def at_one(self) -> FloatArray:
        """[M] log-probabilities at temperature 1, before truncation."""
        found: FloatArray = self.picked - self.normalizer[:, AT_ONE]
        return found

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
        normalizer = (
            (1 + 2 * t) * (1 - t) ** 2 * self.normalizer[:, k]
            + t * (1 - t) ** 2 * width * self.mean_logit[:, k]
            + t**2 * (3 - 2 * t) * self.normalizer[:, k + 1]
            - t**2 * (1 - t) * width * self.mean_logit[:, k + 1]
        )
        found: FloatArray = np.minimum(b * self.picked - normalizer, 0).astype(np.float32)
        return found


def concatenate(parts: list[TokenScores]) -> TokenScores:
    """Concatenate several `TokenScores`."""
    names = [field.name for field in fields(TokenScores)]
    return TokenScores(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Sampling settings that M tokens are labelled with.

    Attributes:
        inverse_temperature: [M] float32.
        top_p: [M] float32; 1 is off.
        top_k: [M] int64; 0 or less is off.
        min_p: [M] float32; 0 is off.
    """

    inverse_temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    def part(self, index: Tensor | slice) -> Labels:
        """Select tokens."""
        return Labels(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def to(self, device: torch.device) -> Labels:
        """Copy to another device."""
        return Labels(
            **{field.name: getattr(self, field.name).to(device) for field in fields(self)}
        )

    @property
    def truncates(self) -> Tensor:
        """[M] true where the labelled settings include a truncation."""
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)


@torch.no_grad()
def score_tokens(
    logits: Tensor,
    token: Tensor,
    labels: Labels,
    *,
    truncations: bool,
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenScores:
    """Compute the scores of a chunk of tokens from their logits.

    Args:
        logits: [C, V] output of the head.
        token: [C] int64.
        labels: Settings that the tokens are labelled with.
        truncations: Whether to compute `kept` for all `TRUNCATIONS`.
        scale: Factor of the logits before capping.
        softcap: Bound of the logits; None: no capping.

    Example:
        >>> one = torch.ones(1)
        >>> labels = Labels(inverse_temperature=one, top_p=one, top_k=0 * one, min_p=0 * one)
        >>> logits, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> scores = score_tokens(logits, token, labels, truncations=True)
        >>> at_half = (logits / 0.5).log_softmax(-1)[0, 0].item()
        >>> round(scores.at(1 / 0.5)[0].item() - at_half, 3)
        0.0
    """
    parts = []
    for rows, z in scaled_blocks(logits, scale, softcap):
        own = labels.part(rows)
        top = z.amax(-1)
        z -= top[:, None]
        picked = z.gather(-1, token[rows, None])[:, 0]
        normalizer, mean = _moments(z, top)
        z *= own.inverse_temperature[:, None]
        log_total = z.exp().sum(-1).log()
        chosen = own.inverse_temperature * picked - log_total
        ends = _Kept(z, log_total, chosen)
        kept, outside = (
            ends.under(*(t.to(z.device) for t in (_TOP_P, _TOP_K, _MIN_P)))
            if truncations
            else _no_columns(z)
        )
        own_kept, own_outside = torch.zeros_like(chosen), torch.zeros_like(chosen).bool()
        if (cut := own.truncates).any():
            settings = own.top_p[cut, None], own.top_k[cut, None], own.min_p[cut, None]
            truncated = _Kept(z[cut], log_total[cut], chosen[cut]).under(*settings)
            own_kept[cut], own_outside[cut] = (column[:, 0] for column in truncated)
        found = {
            "picked": picked + top,
            "normalizer": normalizer,
            "mean_logit": mean,
            "labelled": chosen,
            "own_kept": own_kept,
            "own_outside": own_outside,
            "kept": kept,
            "outside": outside,
        }
        parts.append(TokenScores(**{name: t.cpu().numpy() for name, t in found.items()}))
    return concatenate(parts)


def _moments(z: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `normalizer` and `mean_logit` ([C, K] each) of [C, V] logits, shifted by `top`.

    The grid has three values per octave. exp(2 b z) is the square of exp(b z), so only the lowest
    three need an exponential.
    """
    normalizer, mean = [], []
    powers: list[Tensor] = []
    for k, b in enumerate(INVERSE_TEMPERATURES):
        if k < PER_OCTAVE:
            powers.append((b * z).exp_())
        weights = powers[k % PER_OCTAVE]
        if k >= PER_OCTAVE:
            weights.square_()
        total = weights.sum(-1)
        normalizer.append(total.log() + b * top)
        mean.append(torch.linalg.vecdot(weights, z) / total + top)
    return torch.stack(normalizer, 1), torch.stack(mean, 1)


def _no_columns(like: Tensor) -> tuple[Tensor, Tensor]:
    empty = like.new_zeros((len(like), 0))
    return empty, empty.bool()


class _Kept:
    """Computes the total probability that truncations keep, from sorted probabilities.

    Args:
        z: [C, V] scaled logits, shifted by any constant per row.
        log_total: [C] log of the sum of exp(z).
        chosen: [C] log-probability of the token.
    """

    def __init__(self, z: Tensor, log_total: Tensor, chosen: Tensor) -> None:
        self._z, self._log_total, self._chosen = z, log_total, chosen

    def under(self, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log of the kept probability, and whether the token is excluded; [C, S] each.

        The settings are S values, or one per token ([C, 1]).
        """
        size, lowest = self._z.shape[1], min(MIN_P)
        few, several = min(NUM_SORTED, size), min(MOST_SORTED, size)
        p = self._probabilities(self._z.topk(few).values, slice(None))
        short = (p.sum(-1) < max(TOP_P)) | (p[:, -1] >= lowest * p[:, 0])
        kept, outside = self._cut(p, slice(None), top_p, top_k, min_p)
        if few < several and short.any():
            more = self._probabilities(self._z[short].topk(several).values, short)
            settings = (t[short] if t.ndim == 2 else t for t in (top_p, top_k, min_p))
            kept[short], outside[short] = self._cut(more, short, *settings)
        return kept, outside

    def _cut(
        self, p: Tensor, rows: Tensor | slice, top_p: Tensor, top_k: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the result of `under` from the N largest probabilities ([C, N], descending)."""
        top_p, top_k, min_p = (t.expand(len(p), -1)[:, :, None] for t in (top_p, top_k, min_p))
        p = p[:, None, :]
        kept = p >= min_p * p[..., :1]
        kept &= (torch.arange(p.shape[-1], device=p.device) < top_k) | (top_k <= 0)
        mass = (p * kept).cumsum(-1)
        # vLLM applies top_p to the distribution that min_p and top_k leave.
        is_whole = (top_k <= 0) & (min_p <= 0)
        total = torch.where(is_whole, 1.0, mass[..., -1:])
        kept &= ((mass - p) / total < top_p) | (top_p >= 1)
        is_off = ((top_p >= 1) & is_whole)[..., 0]
        log_kept = (p * kept).sum(-1).log().masked_fill(is_off, 0.0)
        # A nucleus larger than the sorted tokens has the probability top_p, except for rounding.
        reaches = (mass[..., -1] / total[..., 0] >= top_p[..., 0]) | (top_p[..., 0] >= 1)
        log_kept = torch.where(reaches, log_kept, (top_p * total)[..., 0].log())
        lowest = torch.where(kept, p, torch.inf).amin(-1).log()
        outside = (self._chosen[rows, None] < lowest - SLACK) & ~is_off & reaches
        return log_kept.clamp(max=0), outside

    def _probabilities(self, z: Tensor, rows: Tensor | slice) -> Tensor:
        return (z - self._log_total[rows, None]).exp()
