"""Masks: exclude trajectories from the loss, but keep them in the table and in baselines."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from pipelines.filtering.verdicts import REPORT_COLUMNS, Filter, judge, report
from pipelines.rewards import Outcome
from pipelines.tables import Frame, as_lazy


def apply_masks(
    frame: Frame, filters: Sequence[Filter], outcome: Outcome = "last"
) -> tuple[pl.LazyFrame, pl.DataFrame]:
    """Set `loss_mask` to false in all rows of the trajectories that the filters would drop.

    Their rewards are kept and still count in the baselines of their groups; failed trajectories
    have no reward. Each filter sees only trajectories that no earlier filter masked. Masking is
    idempotent. Masking every row is allowed here, but validation rejects a table that is entirely
    masked (`mask_trains_something`).

    Args:
        frame: Rows of complete trajectories, merged or not.
        filters: Usually `overlong()` and `failed("group")`.
        outcome: How returns are computed, for filters that need them.

    Returns:
        All rows, in order; and a report as from `apply_filters`, but with columns named `masked`
        instead of `dropped`.

    Example:
        A trajectory of two steps; the last one stopped with `length`:

        >>> rows, counts = apply_masks(steps, [overlong()])
        >>> rows.select("loss_mask").collect().to_series().to_list()
        [[False], [False]]
    """
    if not filters:
        return as_lazy(frame), _renamed(pl.DataFrame(schema=REPORT_COLUMNS))
    verdicts = judge(frame, filters, outcome)
    return mask(frame, verdicts), _renamed(report(verdicts, filters))


def _renamed(counts: pl.DataFrame) -> pl.DataFrame:
    return counts.rename(lambda name: name.replace("dropped", "masked"))


def mask(frame: Frame, verdicts: pl.DataFrame) -> pl.LazyFrame:
    """Mask the trajectories that have a reason in `verdicts`. Runs in the streaming engine."""
    frame = as_lazy(frame)
    masked = verdicts.filter(pl.col("reason").is_not_null())
    if masked.is_empty():
        return frame
    ids = masked["trajectory_id"].implode()
    nothing = pl.col("loss_mask").list.eval(pl.element() & False)
    kept = pl.when(pl.col("trajectory_id").is_in(ids)).then(nothing).otherwise("loss_mask")
    return frame.with_columns(loss_mask=kept)
