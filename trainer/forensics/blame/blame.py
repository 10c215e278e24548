"""Attribute an update of a run to its rows, trajectories and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from rollout_io.terminal import Bar
from schemas.ragged import IntArray
from trainer.batches.data import Batch
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
from trainer.forensics.blame.leave_out import (
    LeavingOut,
    check_rows_are_separate,
)
from trainer.forensics.blame.shares import outlier_scores, shares_table, traits
from trainer.forensics.replay.reconstruct import Reconstruction, reconstruct
from trainer.forensics.replay.replay import Forwarding, refuse_several_processes
from trainer.run.pass_progress import ticking
from trainer.run.run import Run
from trainer.run.update import Step

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
    (`prompt_mean`, `trajectory_mean`, clip_cov, kl_cov), computing without_i needs another pass
    over the rows whose weights change by different factors: see `LeavingOut`.

    `rows` has these columns:

    - `row` (the row's name), `trajectory_id` and `instance_id`;
    - `steps`: list of the `step_index` of the dataset rows whose targets the row contains;
    - `selectors`: list of values of `rollouts replay --without` that select the row;
    - `num_targets`, and `advantage`, which is the mean over the row's targets;
    - `share`: <G_i, G> / |G|^2;
    - `gradient_norm`: |G_i|;
    - `norm_without`: |without_i|; null where computing it needs another pass, unless the row is one
      of the first rows;
    - `mismatch` and `surprise`: see `traits`; `score` and `trait`: see `outlier_scores`.

    Further columns are null except in the first rows:

    - `step_share`: <G_i, s(G)> / <G, s(G)>, the row's share of the decrease in loss that the step
      achieves;
    - `step_change`: |s(without_i) - s(G)| / |s(G)|;
    - `held_out_change`: <h, s(without_i) - s(G)>, where h is the gradient of the loss on held-out
      rows before the step. To first order, leaving out the row would have increased the loss on
      held-out rows after the update by this amount.

    Attributes:
        run: Directory of the run, as given.
        places: New paths of the dataset and models that have been moved, as given.
        update: Number of the update, its `global_step`.
        dataset: Path of the dataset.
        gradient_norm: |G|, before clipping.
        max_grad_norm: Norm above which the update clips the gradient.
        is_fast: Whether the norms of rows come from one backward pass per micro-batch.
        num_targets: Number of trained tokens of the update.
        rows: One row for each row of the batch that has targets, sorted by how far the row stands
            out. The columns are described above.
        trajectories: One row per trajectory, by decreasing |share|. Columns: `trajectory_id`,
            `num_rows`, `share`; and, for the first trajectories only, `gradient_norm` and
            `norm_without`.
        groups: One row per group, with the same columns, but with `instance_id` instead of
            `trajectory_id`.
        shares: The table of shares, one row for each row of the dataset: see `shares_table`.
    """

    run: str
    places: Mapping[str, str]
    update: int
    dataset: str
    gradient_norm: float
    max_grad_norm: float
    is_fast: bool
    num_targets: int
    rows: pl.DataFrame
    trajectories: pl.DataFrame
    groups: pl.DataFrame
    shares: pl.DataFrame


def blame(
    run: str | Path,
    update: int,
    *,
    top: int = 10,
    held_out: str | None = None,
    exact: bool = False,
    places: Mapping[str, str] | None = None,
) -> Blame:
    """Attribute an update of a run to its rows.

    Args:
        run: Directory of a run of `rollouts train` or `rollouts rl`; it is only read.
        update: Number of the update: its `global_step`, counted from 1.
        top: Number of rows whose effect on the step is computed, by a backward pass each.
        held_out: Dataset of rows that the run did not train on; None: the effect on
            held-out rows is not computed.
        exact: Compute all norms by a backward pass per row.
        places: New paths of the dataset and models that have been moved; see `reconstruct`.

    Raises:
        RolloutError: See `reconstruct`; the held-out rows cannot be used; or `blame_rows`: a user's
            loss compares rows.
    """
    refuse_several_processes("blame")
    with Bar(update, "updates", f"reconstructing update {update}") as bar:
        passes = Forwarding(bar, num_planned=update)
        with ticking(passes):
            found = reconstruct(run, update, places=places, passes=passes)
    return attribute(found, top=top, held_out=held_out, exact=exact, run=run, places=places)


def attribute(
    found: Reconstruction,
    *,
    top: int = 10,
    held_out: str | None = None,
    exact: bool = False,
    run: str | Path | None = None,
    places: Mapping[str, str] | None = None,
) -> Blame:
    """Attribute a reconstructed update to its rows; see `blame`.

    Raises:
        RolloutError: See `blame`.
    """
    step, training, update = found.step, found.run, found.update
    batch, origins = step.ready.batch, step.ready.origins
    assert origins is not None  # `reconstruct` records all tokens
    learner, forests = training, step.forests
    generator = torch.get_rng_state()
    gradients = row_gradients(learner, batch, forests, exact=exact)
    check_rows_are_separate(learner, batch, forests, gradients)
    leaving = LeavingOut(training, step, gradients, generator)
    products = inner_products(learner, batch, forests, gradients.coefficients, gradients.gradient)
    square = norm(gradients.gradient) ** 2
    token_shares = products.numpy() / max(square, 1e-300)
    rows = _rows(step, gradients, leaving, token_shares, square)
    order = rows["score"].arg_sort(descending=True)
    rows = _with_effects(training, batch, gradients, leaving, rows[order], top, held_out)
    units = Units(learner, step, gradients, leaving, rows)
    return Blame(
        run=str(run or found.recorded.path),
        places=dict(places or {}),
        update=update,
        dataset=training.config.data.dataset,
        gradient_norm=square**0.5,
        max_grad_norm=learner.config.optimizer.max_grad_norm,
        is_fast=gradients.is_fast,
        num_targets=int(gradients.targets.sum()),
        rows=rows.drop("batch_row"),
        trajectories=units.trajectories(),
        groups=units.groups(),
        shares=shares_table(
            str(run or found.recorded.path),
            update,
            training.config.data.dataset,
            origins,
            gradients.targets,
            token_shares,
            batch,
            rows,
        ),
    )


def _rows(
    step: Step,
    found: RowGradients,
    leaving: LeavingOut,
    token_shares: Values,
    square: float,
) -> pl.DataFrame:
    """Build the table `Blame.rows` without effects on the step, in the order of the batch."""
    batch = step.ready.batch
    slots = np.flatnonzero(found.targets)
    row = batch.responses.row_of(slots)
    num_targets = np.bincount(row, minlength=len(batch.names))[found.rows]
    share = np.bincount(row, token_shares[slots], len(batch.names))[found.rows].astype(np.float64)
    advantage = np.bincount(row, batch.advantages.numpy()[slots], len(batch.names))[found.rows]
    of_rows = traits(found, batch, share)
    scores = outlier_scores(of_rows)
    names, best = list(scores), np.argmax(list(scores.values()), axis=0)
    left = np.maximum(square - 2 * share * square + found.norms**2, 0.0)
    factors = [leaving.factor(row[None]) for row in found.rows]
    assert step.ready.origins is not None
    labels = _labels(batch, step.ready.origins, slots, row)
    return pl.DataFrame(
        {
            "batch_row": found.rows,
            "row": [labels[number].name for number in found.rows],
            "trajectory_id": [labels[number].trajectory_id for number in found.rows],
            "steps": [labels[number].steps for number in found.rows],
            "selectors": [labels[number].selectors for number in found.rows],
            "instance_id": [batch.group_names[batch.group[number]] for number in found.rows],
            "num_targets": num_targets,
            "advantage": advantage / num_targets,
            "share": share,
            "gradient_norm": found.norms,
            "norm_without": pl.Series(
                [
                    None if f is None else f * root
                    for f, root in zip(factors, np.sqrt(left), strict=True)
                ],
                dtype=pl.Float64,
            ),
            "mismatch": of_rows["mismatch"],
            "surprise": of_rows["surprise"],
            "score": np.max(list(scores.values()), axis=0),
            "trait": [names[number] for number in best],
        }
    )


class Label(NamedTuple):
    """Name of a row of the batch, derived from the stored rows that contain its targets.

    Attributes:
        trajectory_id: Trajectory of the row.
        steps: `step_index` of the stored rows, ascending.
        is_alone: Whether the batch has no other row of the trajectory.
    """

    trajectory_id: str
    steps: list[int]
    is_alone: bool

    @property
    def name(self) -> str:
        """The name, such as "shop-7_2, steps 0-1"."""
        first, last = self.steps[0], self.steps[-1]
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        return f"{self.trajectory_id}, {steps}"

    @property
    def selectors(self) -> list[str]:
        """Values of `rollouts replay --without` for this row: ["shop-7_2:0", "shop-7_2:1"]."""
        if self.is_alone:
            return [self.trajectory_id]
        return [f"{self.trajectory_id}:{step}" for step in self.steps]


def _labels(batch: Batch, origins: Origins, slots: IntArray, row: IntArray) -> dict[int, Label]:
    """Return the label of each row of the batch that has targets, by index of the row."""
    stored, _ = origins.of(slots)
    steps = origins.stored.rows["step_index"].to_numpy()
    ids = origins.stored.rows["trajectory_id"]
    found = {}
    for number in np.unique(row):
        own = np.unique(stored[row == number])
        is_alone = np.count_nonzero(batch.trajectory == batch.trajectory[number]) == 1
        found[int(number)] = Label(str(ids[int(own[0])]), np.sort(steps[own]).tolist(), is_alone)
    return found


def _with_effects(
    run: Run,
    batch: Batch,
    found: RowGradients,
    leaving: LeavingOut,
    rows: pl.DataFrame,
    top: int,
    held_out: str | None,
) -> pl.DataFrame:
    """Add the columns that describe how the first rows affect the optimizer's step; see `Blame`."""
    trial, total = TrialSteps(run), found.gradient
    step = trial(total)
    descent, length = inner(total, step), norm(step)
    direction = None if held_out is None else held_out_gradient(run, held_out)
    names = ("step_share", "step_change", "held_out_change")
    effects: dict[str, list[float | None]] = {name: [None] * len(rows) for name in names}
    effects["norm_without"] = rows["norm_without"].to_list()
    for number, row in enumerate(rows["batch_row"].head(top)):
        left = np.array([row])
        own = gradient_of(run, batch, found.targets, found.coefficients, left)
        if descent:
            effects["step_share"][number] = inner(own, step) / descent
        without = leaving.gradient(left, own)
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


class Units:
    """Shares of trajectories and groups in the gradient, with norms for the largest shares.

    A unit is a trajectory or a group. A unit with a single row has the norms of that row. The
    gradient of any other unit is computed from its rows, or from all other rows if these have fewer
    tokens. Rows without targets have no gradient, but leaving them out changes the denominators of
    some reductions.
    """

    def __init__(
        self,
        learner: Run,
        step: Step,
        found: RowGradients,
        leaving: LeavingOut,
        rows: pl.DataFrame,
    ) -> None:
        self._learner, self._found = learner, found
        self._leaving, self._rows = leaving, rows
        self._batch = batch = step.ready.batch
        self._members = np.flatnonzero(batch.mini_batch == step.number)
        lengths = np.diff(batch.prompts.offsets) + np.diff(batch.responses.offsets)
        self._num_tokens: IntArray = lengths.astype(np.int64)
        self._known: dict[tuple[int, ...], tuple[float, float | None]] = {}

    def trajectories(self) -> pl.DataFrame:
        """Return the table of trajectories, sorted by decreasing |share|."""
        return self._table("trajectory_id", self._batch.trajectory)

    def groups(self) -> pl.DataFrame:
        """Return the table of groups, sorted by decreasing |share|."""
        return self._table("instance_id", self._batch.group)

    def _table(self, key: str, unit: IntArray) -> pl.DataFrame:
        units = self._rows.group_by(key, maintain_order=True).agg(
            num_rows=pl.len(), share=pl.col("share").sum(), first=pl.col("batch_row").first()
        )
        units = units.sort(pl.col("share").abs(), descending=True, maintain_order=True)
        norms: list[float | None] = [None] * len(units)
        without: list[float | None] = [None] * len(units)
        for number, first in enumerate(units["first"].head(NUM_UNITS)):
            left = self._members[unit[self._members] == unit[first]]
            norms[number], without[number] = self._norms(left)
        return units.drop("first").with_columns(
            pl.Series("gradient_norm", norms, pl.Float64),
            pl.Series("norm_without", without, pl.Float64),
        )

    def _norms(self, left: IntArray) -> tuple[float, float | None]:
        """Compute the norm of the gradient of the given rows, and of the gradient without them."""
        key = tuple(left.tolist())
        if key not in self._known:
            self._known[key] = self._of_row(left) or self._computed(left)
        return self._known[key]

    def _of_row(self, left: IntArray) -> tuple[float, float | None] | None:
        if len(left) > 1:
            return None
        row = self._rows.filter(pl.col("batch_row") == left[0])
        if row["norm_without"].item() is None:
            return None
        return row["gradient_norm"].item(), row["norm_without"].item()

    def _computed(self, left: IntArray) -> tuple[float, float | None]:
        found, total = self._found, self._found.gradient
        own, others = np.intersect1d(found.rows, left), np.setdiff1d(found.rows, left)
        is_larger = self._num_tokens[others].sum() < self._num_tokens[own].sum()
        passed = others if is_larger else own
        gradient = gradient_of(
            self._learner, self._batch, found.targets, found.coefficients, passed
        )
        if is_larger:
            gradient = {name: total[name] - gradient[name] for name in total}
        without = self._leaving.gradient(left, gradient)
        return norm(gradient), None if without is None else norm(without)
