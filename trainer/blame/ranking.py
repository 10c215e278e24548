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
FLOOR = 1e-12


def traits(found: RowGradients, batch: Batch) -> dict[str, Values]:
    """Compute what can make a row stand out, per row of `found.rows` ([R] each).

    Returns:
        `gradient_norm`: L2 norm of the row's gradient; `advantage`: mean of |advantage|;
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
        "gradient_norm": found.norms,
        "advantage": mean(batch.advantages.abs()),
        "mismatch": mean(mismatch.abs()),
        "surprise": mean(-logprobs),
    }


def outlier_scores(traits: Mapping[str, Values]) -> dict[str, Values]:
    """Measure by trait how far each row is above the median, in units of the rows' usual spread.

        z = (x - median) / (q90 - median)

    x is the trait of a row, and q90 the 90 % quantile over all rows, so that a tenth of the rows
    has z > 1. Gradient norms are compared by their logarithm, because they are products: of the
    reduction's weight, the advantage and the length of a gradient. A trait whose q90 equals its
    median, or that is unknown, has z = 0 for all rows, unless a row exceeds the median.
    """
    found = {}
    for name, values in traits.items():
        x = np.log(np.maximum(values, FLOOR)) if name == "gradient_norm" else values
        found[name] = _score(x)
    return found


def _score(x: Values) -> Values:
    if not len(x) or np.isnan(x).any():
        return np.zeros(len(x))
    middle, high = np.quantile(x, [0.5, QUANTILE])
    spread = max(high - middle, 0.05 * abs(middle), FLOOR)
    return np.asarray((x - middle) / spread)
