"""Each row's share of an update: the table of shares, and how far a row stands out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from torch import Tensor

from schemas.forensics import UPDATE_SHARE_COLUMNS
from schemas.numpy_arrays import to_arrow
from schemas.ragged import BoolArray, offsets_of
from trainer.batch import Batch
from trainer.batches.stored_rows import Origins
from trainer.forensics.blame.gradients import RowGradients

OF_SEQUENCE = ("gradient_norm", "advantage", "mismatch", "surprise", "score")


def shares_table(
    run: str,
    global_step: int,
    dataset: str,
    origins: Origins,
    targets: BoolArray,
    token_shares: npt.NDArray[np.float64],
    batch: Batch,
    rows: pl.DataFrame,
) -> pl.DataFrame:
    """Build the table of shares, with one row for each stored row that the update trained on.

    The columns `share` and `token_shares` describe the stored row. All later columns describe the
    sequence that the update forwarded, which consists of several stored rows if these were merged:
    `sequence` is the rank of the sequence, `num_sequence_rows` is its number of stored rows, and
    the remaining columns are defined in `Blame.rows`. `targets` and `token_shares` are [T] columns
    of the batch, `rows` its rows in order of rank.
    """
    slots = np.flatnonzero(targets)
    stored, position = origins.of(slots)
    used, record = np.unique(stored, return_inverse=True)
    records = origins.rows[used]
    offsets = offsets_of(records["num_tokens"].to_numpy())
    at = offsets[record] + position
    values, missing = np.zeros(offsets[-1]), np.ones(offsets[-1], np.bool_)
    values[at], missing[at] = token_shares[slots], False
    rank = np.full(len(batch.names), -1)
    rank[rows["batch_row"].to_numpy()] = np.arange(len(rows))
    sequence = np.full(len(used), len(rows))
    np.minimum.at(sequence, record, rank[batch.responses.row_of(slots)])
    flat = to_arrow(values.astype(np.float32), pa.float32(), mask=missing)
    lists = pa.ListArray.from_arrays(to_arrow(offsets, pa.int32()), flat)
    columns = {
        "run": pa.array([run] * len(used), pa.string()),
        "global_step": pa.array([global_step] * len(used), pa.int32()),
        "dataset": pa.array([dataset] * len(used), pa.string()),
        **{name: records[name].to_arrow() for name in ("instance_id", "trajectory_id")},
        **{name: records[name].to_arrow() for name in ("step_index", "row_digest")},
        "share": to_arrow(np.bincount(record, token_shares[slots], len(used)), pa.float64()),
        "token_shares": lists,
    }
    table = pa.table({c.name: columns[c.name].cast(c.type) for c in UPDATE_SHARE_COLUMNS})
    size = np.bincount(sequence, minlength=len(rows))
    described = rows.select(OF_SEQUENCE)[sequence]
    return pl.DataFrame(table).with_columns(
        pl.Series("sequence", sequence + 1, pl.Int32),
        pl.Series("num_sequence_rows", size[sequence], pl.Int32),
        *described,
    )


Values = npt.NDArray[np.float64]
QUANTILE = 0.9
SHARE_SCALE = 10.0
FLOOR = 1e-12


def traits(update: RowGradients, batch: Batch, share: Values) -> dict[str, Values]:
    """Compute the traits by which a row may stand out, for each row of `update.rows` ([R] each).

    These are `share`; `gradient_norm`: L2 norm of the row's gradient; `advantage`: mean of
    |advantage|; `mismatch`: mean of |old_logprobs - rollout_logprobs| in nats, NaN without
    `rollout_logprobs`; `surprise`: mean of -logprobs in nats. Means are over the row's targets.
    """
    slots = np.flatnonzero(update.targets)
    row = batch.responses.row_of(slots)
    logprobs = update.coefficients.outputs
    old = update.batch.old_logprobs
    mismatch = (logprobs if old is None else old) - batch.rollout_logprobs

    def mean(values: Tensor) -> Values:
        sums = np.bincount(row, values.numpy()[slots].astype(np.float64), len(batch.names))
        return sums[update.rows] / np.bincount(row, minlength=len(batch.names))[update.rows]

    return {
        "share": share,
        "gradient_norm": update.norms,
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
