"""Attribute an update of a run to its rows, trajectories and groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from rollout_io.terminal import Bar
from schemas.ragged import IntArray
from trainer.algorithms.losses.reductions import reduction_weights
from trainer.batches.data import Batch
from trainer.batches.origins import Origins
from trainer.blame.gradients import (
    RowGradients,
    add,
    gradient_of,
    inner,
    inner_products,
    norm,
    row_gradients,
)
from trainer.blame.held_out import held_out_gradient
from trainer.blame.ranking import outlier_scores, traits
from trainer.blame.shares_table import shares_table
from trainer.blame.trial_steps import TrialSteps
from trainer.replay.reconstruct import reconstruct
from trainer.replay.replay import Forwarding, refuse_several_processes
from trainer.run.mini_batches import PreparedUpdate
from trainer.run.passes import ticking
from trainer.run.setup import TrainingRun
from trainer.run.update import units_of

Values = npt.NDArray[np.float64]
NUM_UNITS = 3
"""Number of trajectories and of groups, by size of share, whose gradients are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The update of a run, attributed to its rows.

    G is the gradient of the update before it is clipped, and G_i that of row i: see
    `trainer.blame.gradients`. s(g) is the step that the optimizer would take with the gradient g:
    see `TrialSteps`. `without` is the gradient without row i, as `rollouts replay --without` makes
    it: the other rows share the denominators of the loss.

        without_i = f_i (G - G_i)

    f_i is the factor by which the reduction raises the weights of the other rows, such as
    M / (M - M_i) for `token_mean` with M targets, M_i of them in row i. If the reduction raises the
    weights of the other rows by different factors, as `prompt_mean` does, f_i is 1.

    Attributes:
        run: Directory of the run, as given.
        update: Number of the update, its `global_step`.
        dataset: Path of the dataset.
        gradient_norm: |G|, before clipping.
        max_grad_norm: Norm above which the update clips the gradient.
        is_fast: Whether the norms of rows come from one backward pass per micro-batch.
        num_targets: Number of trained tokens of the update.
        rows: One row for each row of the batch that has targets, sorted by how far it stands
            out. Columns: `row` (its name), `trajectory_id`, `steps` (list of the `step_index` of the
            rows of the dataset that it holds), `instance_id`, `num_targets`;
            `advantage` (mean over its targets); `share`, <G_i, G> / |G|^2; `gradient_norm`, |G_i|;
            `norm_without`, |without_i|; the traits `mismatch` and `surprise`; `score` and `trait`:
            see `outlier_scores`. For the first rows only, and null for the others: `step_share`,
            <G_i, s(G)> / <G, s(G)>, the row's share of the decrease in loss that the step achieves;
            `step_change`, |s(without_i) - s(G)| / |s(G)|; and `held_out_change`,
            <h, s(without_i) - s(G)>, with the gradient h of the loss on held-out rows before the
            step: to first order, how much higher the loss on held-out rows would have been after
            the update if the row had been left out.
        trajectories: One row per trajectory, by decreasing |share|: `trajectory_id`, `num_rows`,
            `share`; and `gradient_norm` and `norm_without` of the first ones.
        groups: The same for groups, by `instance_id`.
        shares: The table of shares, one row for each row of the dataset: see `shares_table`.
    """

    run: str
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
        places: New paths of things that have moved; see `reconstruct`.

    Raises:
        RolloutError: See `reconstruct`; or the held-out rows cannot be used.
    """
    refuse_several_processes("blame")
    with Bar(update, "updates", f"reconstructing update {update}") as bar:
        passes = Forwarding(bar, num_planned=update)
        with ticking(passes):
            found = reconstruct(run, update, places=places, passes=passes)
    step, training = found.step, found.run
    batch, origins = step.prepared.batch, step.prepared.origins
    assert origins is not None  # `reconstruct` records all tokens
    old_logprobs, ref_logprobs = step.prepared.known.get("old_logprobs"), step.prepared.ref_logprobs
    learner, forests = training.learner, step.forests
    gradients = row_gradients(learner, batch, forests, old_logprobs, ref_logprobs, exact=exact)
    products = inner_products(learner, batch, forests, gradients.coefficients, gradients.gradient)
    square = norm(gradients.gradient) ** 2
    token_shares = products.numpy() / max(square, 1e-300)
    rows = _rows(training, step, gradients, token_shares, square)
    order = rows["score"].arg_sort(descending=True)
    rows = _with_effects(training, batch, gradients, rows[order], top, held_out)
    return Blame(
        run=str(run),
        update=update,
        dataset=training.config.dataset,
        gradient_norm=square**0.5,
        max_grad_norm=learner.max_grad_norm,
        is_fast=gradients.is_fast,
        num_targets=int(gradients.targets.sum()),
        rows=rows.drop("batch_row"),
        trajectories=_units(training, step, gradients, rows, "trajectory_id"),
        groups=_units(training, step, gradients, rows, "instance_id"),
        shares=shares_table(
            str(run),
            update,
            training.config.dataset,
            origins,
            gradients.targets,
            token_shares,
            batch,
            rows,
        ),
    )


def _rows(
    run: TrainingRun,
    step: PreparedUpdate,
    found: RowGradients,
    token_shares: Values,
    square: float,
) -> pl.DataFrame:
    """Describe each row with targets, in the order of the batch."""
    batch = step.prepared.batch
    slots = np.flatnonzero(found.targets)
    row = batch.responses.row_of(slots)
    num_targets = np.bincount(row, minlength=len(batch.names))[found.rows]
    share = np.bincount(row, token_shares[slots], len(batch.names))[found.rows].astype(np.float64)
    advantage = np.bincount(row, batch.advantages.numpy()[slots], len(batch.names))[found.rows]
    of_rows = traits(found, batch, share)
    scores = outlier_scores(of_rows)
    names, best = list(scores), np.argmax(list(scores.values()), axis=0)
    left = np.maximum(square - 2 * share * square + found.norms**2, 0.0)
    factor = np.array([_factor(run, step, found, row[None]) for row in found.rows])
    assert step.prepared.origins is not None
    labels = _labels(step.prepared.origins, slots, row)
    return pl.DataFrame(
        {
            "batch_row": found.rows,
            "row": [labels[number].name for number in found.rows],
            "trajectory_id": [labels[number].trajectory_id for number in found.rows],
            "steps": [labels[number].steps for number in found.rows],
            "instance_id": [batch.group_names[batch.group[number]] for number in found.rows],
            "num_targets": num_targets,
            "advantage": advantage / num_targets,
            "share": share,
            "gradient_norm": found.norms,
            "norm_without": factor * np.sqrt(left),
            "factor": factor,
            "mismatch": of_rows["mismatch"],
            "surprise": of_rows["surprise"],
            "score": np.max(list(scores.values()), axis=0),
            "trait": [names[number] for number in best],
        }
    )


class Label(NamedTuple):
    """Name of a row of the batch, from the stored rows that hold its targets."""

    trajectory_id: str
    steps: list[int]

    @property
    def name(self) -> str:
        """The name, such as "shop-7_2, steps 0-1"."""
        first, last = self.steps[0], self.steps[-1]
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        return f"{self.trajectory_id}, {steps}"


def _labels(origins: Origins, slots: IntArray, row: IntArray) -> dict[int, Label]:
    """Name each row of the batch."""
    stored, _ = origins.of(slots)
    steps = origins.stored.rows["step_index"].to_numpy()
    ids = origins.stored.rows["trajectory_id"]
    found = {}
    for number in np.unique(row):
        own = np.unique(stored[row == number])
        found[int(number)] = Label(str(ids[int(own[0])]), np.sort(steps[own]).tolist())
    return found


def _factor(run: TrainingRun, step: PreparedUpdate, found: RowGradients, left: IntArray) -> float:
    """Compute the factor of the other rows' weights when rows are left out; see `Blame`."""
    batch, slots = step.prepared.batch, np.flatnonzero(found.targets)
    kept = ~np.isin(batch.responses.row_of(slots), left)
    if not kept.any():
        return 1.0
    mini_batch = batch.mini_batch.copy()
    mini_batch[left] = -1
    fewer = dataclasses.replace(batch, mini_batch=mini_batch)
    units = units_of(fewer, step.forests, slots[kept])
    weights = reduction_weights(units, run.learner.objective.reduction)
    factors = weights / found.inputs.weights.numpy()[slots[kept]]
    return float(factors[0]) if np.allclose(factors, factors[0], rtol=1e-5) else 1.0


def _with_effects(
    run: TrainingRun,
    batch: Batch,
    found: RowGradients,
    rows: pl.DataFrame,
    top: int,
    held_out: str | None,
) -> pl.DataFrame:
    """Add the effect of the first rows on the optimizer's step; see `Blame`."""
    trial, total = TrialSteps(run.learner), found.gradient
    step = trial(total)
    descent, length = inner(total, step), norm(step)
    direction = None if held_out is None else held_out_gradient(run, held_out)
    names = ("step_share", "step_change", "held_out_change")
    effects: dict[str, list[float | None]] = {name: [None] * len(rows) for name in names}
    for number, (row, factor) in enumerate(
        rows.select("batch_row", "factor").head(top).iter_rows()
    ):
        own = gradient_of(run.learner, batch, found.targets, found.coefficients, np.array([row]))
        if descent:
            effects["step_share"][number] = inner(own, step) / descent
        without = {name: factor * (total[name] - own[name]) for name in total}
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
    run: TrainingRun, step: PreparedUpdate, found: RowGradients, rows: pl.DataFrame, key: str
) -> pl.DataFrame:
    """Sum the shares of trajectories or groups, and compute the gradients of the largest."""
    units = rows.group_by(key, maintain_order=True).agg(
        num_rows=pl.len(), share=pl.col("share").sum(), batch_rows=pl.col("batch_row")
    )
    units = units.sort(pl.col("share").abs(), descending=True, maintain_order=True)
    norms: list[float | None] = [None] * len(units)
    without: list[float | None] = [None] * len(units)
    for number, members in enumerate(units["batch_rows"].head(NUM_UNITS)):
        index = np.sort(members.to_numpy())
        batch = step.prepared.batch
        own = gradient_of(run.learner, batch, found.targets, found.coefficients, index)
        norms[number] = norm(own)
        add(own, found.gradient, -1.0)
        without[number] = _factor(run, step, found, index) * norm(own)
    return units.drop("batch_rows").with_columns(
        pl.Series("gradient_norm", norms, pl.Float64),
        pl.Series("norm_without", without, pl.Float64),
    )
