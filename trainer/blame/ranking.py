"""Rank the rows of an update by how far they stand out from the other rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer.batches.data import Batch
from trainer.blame.gradients import RowGradients

Values = npt.NDArray[np.float64]
QUANTILE = 0.9
SHARE_SCALE = 10.0
FLOOR = 1e-12


def traits(found: RowGradients, batch: Batch, share: Values) -> dict[str, Values]:
    """Compute the traits by which a row may stand out, for each row of `found.rows` ([R] each).

    Args:
        found: The rows and their gradient norms.
        batch: The batch.
        share: [R] each row's share of the gradient.

    Returns:
        `share`; `gradient_norm`: L2 norm of the row's gradient; `advantage`: mean of |advantage|;
        `mismatch`: mean of |old_logprobs - rollout_logprobs| in nats, NaN without
        `rollout_logprobs`; `surprise`: mean of -logprobs in nats. Means are over the row's targets.
    """
    slots = np.flatnonzero(found.targets)
    row = batch.responses.row_of(slots)
    logprobs = found.coefficients.outputs
    old = found.inputs.old_logprobs
    mismatch = (logprobs if old is None else old) - batch.rollout_logprobs

    def mean(values: Tensor) -> Values:
        sums = np.bincount(row, values.numpy()[slots].astype(np.float64), len(batch.names))
        return sums[found.rows] / np.bincount(row, minlength=len(batch.names))[found.rows]

    return {
        "share": share,
        "gradient_norm": found.norms,
        "advantage": mean(batch.advantages.abs()),
        "mismatch": mean(mismatch.abs()),
        "surprise": mean(-logprobs),
    }


def outlier_scores(traits: Mapping[str, Values]) -> dict[str, Values]:
    """Compute a score for each trait, which measures how far each of R rows stands out in it.

    The score of a share p of the gradient is 10 (|p| - 1 / R): a row whose share exceeds 1 / R by
    40 percentage points scores 4, whatever the shares of the other rows. The score of any other
    trait x is

        (x - median) / (q90 - median)

    where q90 is the 90 % quantile over all rows, so that a tenth of the rows has a score above 1.
    Gradient norms are compared by their logarithm, because they are products of the reduction's
    weight, the advantage and the gradient of the tokens' log-probabilities. Unknown traits score 0.
    """
    return {name: _score(name, values) for name, values in traits.items()}


def _score(name: str, values: Values) -> Values:
    if not len(values) or np.isnan(values).any():
        return np.zeros(len(values))
    if name == "share":
        return np.asarray(SHARE_SCALE * (np.abs(values) - 1 / len(values)))
    x = np.log(np.maximum(values, FLOOR)) if name == "gradient_norm" else values
    middle, high = np.quantile(x, [0.5, QUANTILE])
    return np.asarray((x - middle) / max(high - middle, 0.05 * abs(middle), FLOOR))
