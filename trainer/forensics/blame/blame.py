"""Attribute an update of a run to its rows, trajectories and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rollout_io.terminal import Bar
from schemas.ragged import IntArray
from trainer.batch import Batch
from trainer.batches.stored_rows import Origins
from trainer.forensics.blame.gradients import (
    RowGradients,
    check_rows_are_separate,
    inner_products,
    norm,
    row_gradients,
)
from trainer.forensics.blame.shares import outlier_scores, shares_table, traits
from trainer.forensics.replay.reconstruct import Reconstruction, reconstruct
from trainer.forensics.replay.replay import Forwarding, refuse_several_processes
from trainer.run.pass_progress import ticking
from trainer.update import Step

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """Attribution of a run's update to the rows of its batch.

    G is the gradient of the update before clipping, and G_i is the gradient of row i: see
    `trainer.forensics.blame.gradients`. `rows` has these columns:

    - `row` (the row's name), `trajectory_id` and `instance_id`;
    - `steps`: list of the `step_index` of the dataset rows whose targets the row contains;
    - `selectors`: list of values of `rollouts replay --without` that select the row;
    - `num_targets`, and `advantage`, which is the mean over the row's targets;
    - `share`: <G_i, G> / |G|^2; `gradient_norm`: |G_i|;
    - `mismatch` and `surprise`: see `traits`; `score` and `trait`: see `outlier_scores`.
    """

    run: str  # its directory, as specified
    places: Mapping[str, str]  # new paths of the dataset and models that have been moved
    update: int  # its `global_step`
    dataset: str
    gradient_norm: float  # |G|, before clipping
    max_grad_norm: float  # norm above which the update clips the gradient
    num_targets: int  # trained tokens of the update
    rows: pl.DataFrame  # sorted by how far they stand out
    trajectories: pl.DataFrame  # by decreasing |share|, with `num_rows` and `share`
    groups: pl.DataFrame  # like `trajectories`
    shares: pl.DataFrame  # one row for each row of the dataset: see `shares_table`


def blame(run: str | Path, update: int, *, places: Mapping[str, str] | None = None) -> Blame:
    """Attribute an update of a run to its rows.

    Args:
        run: Directory of a run of `rollouts train` or `rollouts rl`; it is only read.
        update: Number of the update: its `global_step`, counted from 1.
        places: New paths of the dataset and models that have been moved; see `reconstruct`.

    Raises:
        RolloutError: See `reconstruct`; or `blame_rows`: a user's loss compares rows.
    """
    refuse_several_processes("blame")
    with Bar(update, "updates", f"reconstructing update {update}") as bar:
        passes = Forwarding(bar, num_planned=update)
        with ticking(passes):
            reconstruction = reconstruct(run, update, places=places, passes=passes)
    return attribute(reconstruction, run=run, places=places)


def attribute(
    reconstruction: Reconstruction,
    *,
    run: str | Path | None = None,
    places: Mapping[str, str] | None = None,
) -> Blame:
    """Attribute a reconstructed update to its rows; see `blame`.

    Raises:
        RolloutError: See `blame`.
    """
    step, training = reconstruction.step, reconstruction.run
    batch, origins, forests = step.batch, step.batch.origins, step.forests
    assert origins is not None  # `reconstruct` records all tokens
    gradients = row_gradients(training, batch, forests)
    check_rows_are_separate(training, batch, forests, gradients)
    total = gradients.gradient
    products = inner_products(training, batch, forests, gradients.coefficients, total)
    square = norm(total) ** 2
    token_shares = products.numpy() / max(square, 1e-300)
    rows = _rows(step, gradients, token_shares)
    rows = rows.sort("score", descending=True, maintain_order=True)
    name, update = str(run or reconstruction.recorded.path), reconstruction.update
    dataset = training.config.data.dataset
    return Blame(
        run=name,
        places=dict(places or {}),
        update=update,
        dataset=dataset,
        gradient_norm=square**0.5,
        max_grad_norm=training.config.optimizer.max_grad_norm,
        num_targets=int(gradients.targets.sum()),
        rows=rows.drop("batch_row"),
        trajectories=_units(rows, "trajectory_id"),
        groups=_units(rows, "instance_id"),
        shares=shares_table(
            name, update, dataset, origins, gradients.targets, token_shares, batch, rows
        ),
    )


def _units(rows: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return the shares of trajectories or groups, the largest first."""
    units = rows.group_by(key, maintain_order=True).agg(num_rows=pl.len(), share=pl.sum("share"))
    return units.sort(pl.col("share").abs(), descending=True, maintain_order=True)


def _rows(step: Step, gradients: RowGradients, token_shares: Values) -> pl.DataFrame:
    """Build the table `Blame.rows`, in the order of the batch."""
    batch, origins, rows = step.batch, step.batch.origins, gradients.rows
    assert origins is not None
    slots = np.flatnonzero(gradients.targets)
    row, size = batch.responses.row_of(slots), len(batch.names)
    num_targets = np.bincount(row, minlength=size)[rows]
    share = np.bincount(row, token_shares[slots], size)[rows].astype(np.float64)
    advantage = np.bincount(row, batch.advantages.numpy()[slots], size)[rows]
    of_rows = traits(gradients, batch, share)
    scores = outlier_scores(of_rows)
    names, best = list(scores), np.argmax(list(scores.values()), axis=0)
    labels = pl.DataFrame([_label(batch, origins, slots[row == number], number) for number in rows])
    return labels.with_columns(
        batch_row=rows,
        instance_id=pl.Series([batch.group_names[batch.group[number]] for number in rows]),
        num_targets=num_targets,
        advantage=advantage / num_targets,
        share=share,
        gradient_norm=gradients.norms,
        mismatch=of_rows["mismatch"],
        surprise=of_rows["surprise"],
        score=np.max(list(scores.values()), axis=0),
        trait=pl.Series([names[number] for number in best]),
    )


def _label(batch: Batch, origins: Origins, slots: IntArray, row: int) -> dict[str, Any]:
    """Name a row of the batch after the stored rows that contain its targets (`slots`)."""
    stored = np.unique(origins.of(slots)[0])
    steps = np.sort(origins.rows["step_index"].to_numpy()[stored]).tolist()
    trajectory = str(origins.rows["trajectory_id"][int(stored[0])])
    named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"
    is_alone = np.count_nonzero(batch.trajectory == batch.trajectory[row]) == 1
    selectors = [trajectory] if is_alone else [f"{trajectory}:{step}" for step in steps]
    return {
        "row": f"{trajectory}, {named}",
        "trajectory_id": trajectory,
        "steps": steps,
        "selectors": selectors,
    }
