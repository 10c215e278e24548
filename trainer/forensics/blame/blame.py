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
from trainer.forensics.blame.effects import TrialSteps, held_out_gradient
from trainer.forensics.blame.gradients import (
    RowGradients,
    add,
    gradient_of,
    inner,
    inner_products,
    norm,
    row_gradients,
)
from trainer.forensics.blame.leave_out import LeavingOut, check_rows_are_separate
from trainer.forensics.blame.shares import outlier_scores, shares_table, traits
from trainer.forensics.replay.reconstruct import Reconstruction, reconstruct
from trainer.forensics.replay.replay import Forwarding, refuse_several_processes
from trainer.run.pass_progress import ticking
from trainer.run.run import Run
from trainer.update import Step

Values = npt.NDArray[np.float64]
NUM_UNITS = 3
"""Gradients are computed for this number of trajectories and of groups with the largest shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """Attribution of a run's update to the rows of its batch.

    G is the gradient of the update before clipping, and G_i is the gradient of row i: see
    `trainer.forensics.blame.gradients`. s(g) is the step that the optimizer would take with the gradient g:
    see `TrialSteps`. without_i is the gradient without row i, as `rollouts replay --without`
    computes it: the denominators of the loss count only the other rows. If the reduction thereby
    scales the weights of all other rows by the same factor f_i,

        without_i = f_i (G - G_i)

    for example f_i = M / (M - M_i) for `token_mean` with M targets, M_i of them in row i. Otherwise
    (`prompt_mean`, `trajectory_mean`, clip_cov, kl_cov), it is unknown: null.

    `rows` has these columns:

    - `row` (the row's name), `trajectory_id` and `instance_id`;
    - `steps`: list of the `step_index` of the dataset rows whose targets the row contains;
    - `selectors`: list of values of `rollouts replay --without` that select the row;
    - `num_targets`, and `advantage`, which is the mean over the row's targets;
    - `share`: <G_i, G> / |G|^2; `gradient_norm`: |G_i|; `norm_without`: |without_i|;
    - `mismatch` and `surprise`: see `traits`; `score` and `trait`: see `outlier_scores`.

    Further columns are null except in the first rows:

    - `step_share`: <G_i, s(G)> / <G, s(G)>, the row's share of the decrease in loss that the step
      achieves;
    - `step_change`: |s(without_i) - s(G)| / |s(G)|;
    - `held_out_change`: <h, s(without_i) - s(G)>, where h is the gradient of the loss on held-out
      rows before the step. To first order, leaving out the row would have increased the loss on
      held-out rows after the update by this amount.
    """

    run: str  # its directory, as specified
    places: Mapping[str, str]  # new paths of the dataset and models that have been moved
    update: int  # its `global_step`
    dataset: str
    gradient_norm: float  # |G|, before clipping
    max_grad_norm: float  # norm above which the update clips the gradient
    num_targets: int  # trained tokens of the update
    rows: pl.DataFrame  # sorted by how far they stand out
    # By decreasing |share|, with `num_rows` and `share`; `gradient_norm` and `norm_without` are null
    # except for the first ones.
    trajectories: pl.DataFrame
    groups: pl.DataFrame
    shares: pl.DataFrame  # one row for each row of the dataset: see `shares_table`


def blame(
    run: str | Path,
    update: int,
    *,
    top: int = 10,
    held_out: str | None = None,
    places: Mapping[str, str] | None = None,
) -> Blame:
    """Attribute an update of a run to its rows.

    Args:
        run: Directory of a run of `rollouts train` or `rollouts rl`; it is only read.
        update: Number of the update: its `global_step`, counted from 1.
        top: Number of rows whose effect on the step is computed.
        held_out: Dataset of rows that the run did not train on; None: the effect on
            held-out rows is not computed.
        places: New paths of the dataset and models that have been moved; see `reconstruct`.

    Raises:
        RolloutError: See `reconstruct`; the held-out rows cannot be used; or `blame_rows`: a user's
            loss compares rows.
    """
    refuse_several_processes("blame")
    with Bar(update, "updates", f"reconstructing update {update}") as bar:
        passes = Forwarding(bar, num_planned=update)
        with ticking(passes):
            reconstruction = reconstruct(run, update, places=places, passes=passes)
    return attribute(reconstruction, top=top, held_out=held_out, run=run, places=places)


def attribute(
    reconstruction: Reconstruction,
    *,
    top: int = 10,
    held_out: str | None = None,
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
    leaving, total = LeavingOut(training, step, gradients), gradients.gradient
    products = inner_products(training, batch, forests, gradients.coefficients, total)
    square = norm(total) ** 2
    token_shares = products.numpy() / max(square, 1e-300)
    rows = _rows(step, gradients, leaving, token_shares, square)
    rows = rows.sort("score", descending=True, maintain_order=True)
    rows = _with_effects(training, batch, gradients, leaving, rows, top, held_out)
    name, update = str(run or reconstruction.recorded.path), reconstruction.update
    dataset = training.config.data.dataset
    members = np.flatnonzero(batch.mini_batch == step.number)
    trajectories, groups = (
        _units(training, gradients, leaving, rows, key, unit, members)
        for key, unit in (("trajectory_id", batch.trajectory), ("instance_id", batch.group))
    )
    return Blame(
        run=name,
        places=dict(places or {}),
        update=update,
        dataset=dataset,
        gradient_norm=square**0.5,
        max_grad_norm=training.config.optimizer.max_grad_norm,
        num_targets=int(gradients.targets.sum()),
        rows=rows.drop("batch_row"),
        trajectories=trajectories,
        groups=groups,
        shares=shares_table(
            name, update, dataset, origins, gradients.targets, token_shares, batch, rows
        ),
    )


def _rows(
    step: Step, gradients: RowGradients, leaving: LeavingOut, token_shares: Values, square: float
) -> pl.DataFrame:
    """Build the table `Blame.rows` without effects on the step, in the order of the batch."""
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
    # |G - G_i|^2 = |G|^2 - 2 <G_i, G> + |G_i|^2
    others = np.sqrt(np.maximum(square - 2 * share * square + gradients.norms**2, 0.0))
    factors = [leaving.factor(number[None]) for number in rows]
    without = [None if f is None else f * rest for f, rest in zip(factors, others, strict=True)]
    labels = pl.DataFrame([_label(batch, origins, slots[row == number], number) for number in rows])
    return labels.with_columns(
        batch_row=rows,
        instance_id=pl.Series([batch.group_names[batch.group[number]] for number in rows]),
        num_targets=num_targets,
        advantage=advantage / num_targets,
        share=share,
        gradient_norm=gradients.norms,
        norm_without=pl.Series(without, dtype=pl.Float64),
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


def _with_effects(
    run: Run,
    batch: Batch,
    gradients: RowGradients,
    leaving: LeavingOut,
    rows: pl.DataFrame,
    top: int,
    held_out: str | None,
) -> pl.DataFrame:
    """Add the columns that describe how the first rows affect the optimizer's step; see `Blame`."""
    trial, total = TrialSteps(run), gradients.gradient
    step = trial(total)
    descent, length = inner(total, step), norm(step)
    direction = None if held_out is None else held_out_gradient(run, held_out)
    names = ("step_share", "step_change", "held_out_change")
    effects: dict[str, list[float | None]] = {name: [None] * len(rows) for name in names}
    effects["norm_without"] = rows["norm_without"].to_list()
    for number, row in enumerate(rows["batch_row"].head(top)):
        index = np.array([row])
        gradient = gradient_of(run, batch, gradients.targets, gradients.coefficients, index)
        if descent:
            effects["step_share"][number] = inner(gradient, step) / descent
        without = leaving.gradient(index, gradient)
        if without is None:
            continue
        effects["norm_without"][number] = norm(without)
        change = trial(without)
        add(change, step, -1.0)
        if length:
            effects["step_change"][number] = norm(change) / length
        if direction is not None:
            effects["held_out_change"][number] = inner(direction, change)
    return rows.with_columns(
        pl.Series(name, values, pl.Float64) for name, values in effects.items()
    )


def _units(
    run: Run,
    gradients: RowGradients,
    leaving: LeavingOut,
    rows: pl.DataFrame,
    key: str,
    unit: IntArray,
    members: IntArray,
) -> pl.DataFrame:
    """Return the shares of trajectories or groups, with norms for the largest shares.

    `unit` is the number of the unit of each row of the batch, and `members` are the rows of the
    mini-batch, also those without targets: they have no gradient, but leaving them out changes the
    denominators of some reductions.
    """
    units = rows.group_by(key, maintain_order=True).agg(
        num_rows=pl.len(), share=pl.col("share").sum(), first=pl.col("batch_row").first()
    )
    units = units.sort(pl.col("share").abs(), descending=True, maintain_order=True)
    norms: list[float | None] = [None] * len(units)
    without: list[float | None] = [None] * len(units)
    for number, first in enumerate(units["first"].head(NUM_UNITS)):
        inside = members[unit[members] == unit[first]]
        trained = np.intersect1d(gradients.rows, inside)
        targets, coefficients = gradients.targets, gradients.coefficients
        gradient = gradient_of(run, gradients.batch, targets, coefficients, trained)
        rest = leaving.gradient(inside, gradient)
        norms[number], without[number] = norm(gradient), None if rest is None else norm(rest)
    return units.drop("first").with_columns(
        pl.Series("gradient_norm", norms, pl.Float64),
        pl.Series("norm_without", without, pl.Float64),
    )
