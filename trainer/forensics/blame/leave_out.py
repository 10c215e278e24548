"""The gradient of an update without some of its rows, as in `rollouts replay --without`."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError, RolloutError
from schemas.ragged import IntArray
from trainer.algorithms.configured import reduction_weights
from trainer.batch import Batch
from trainer.batches.forest import Forest
from trainer.batches.packing import cut_batch
from trainer.config.functions import LOSS_REDUCTION, POLICY_LOSS, bind
from trainer.forensics.blame.gradients import RowGradients, derivatives
from trainer.loss import units_of
from trainer.run.run import Run
from trainer.update import Step

SAME = 1e-5
"""Relative difference up to which factors count as equal, because they are computed in float32."""
SEPARATE = 1e-3
"""Rows count as separate if leaving out other rows changes the derivatives of their loss by at most
this much, relative to the largest derivative of the micro-batch."""


class LeavingOut:
    """Computes the gradient that an update would have without some of its rows.

    The denominators of the loss count only the other rows, and micro-batches are cut again. If the
    weights of all other rows are thereby scaled by the same factor f, the gradient is f (G - G_i).

    Args:
        run: The run, just before the update.
        step: The update.
        update: Row gradients of the update.
    """

    def __init__(self, run: Run, step: Step, update: RowGradients) -> None:
        self._run, self._step, self._update = run, step, update
        self._slots = np.flatnonzero(update.targets)
        self._row = step.batch.responses.row_of(self._slots)
        loss = run.config.loss
        self._cuts = not loss.reduction_inputs.isdisjoint({"micro_batch", "num_micro_batches"})

    def factor(self, rows: IntArray) -> float | None:
        """Compute the factor f for leaving out some rows.

        None if the weights change by different factors, if the loss selects targets again, or if no
        row remains.
        """
        remain = ~np.isin(self._row, rows)
        if self._run.config.loss.selects_targets or not remain.any():
            return None
        assert self._update.batch.weights is not None
        before = self._update.batch.weights.numpy()[self._slots[remain]]
        if not before.all():
            return None
        batch, forests = self._without(rows, self._slots[~remain])
        reduction = bind(LOSS_REDUCTION, self._run.config.loss)
        after = reduction_weights(units_of(batch, forests, self._slots[remain]), reduction)
        factors = after / before
        same = np.allclose(factors, factors[0], rtol=SAME, atol=0)
        return float(factors[0]) if same else None

    def gradient(self, rows: IntArray, gradient: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Compute f (G - g) for the gradient g of some rows; None if there is no factor."""
        factor, total = self.factor(rows), self._update.gradient
        if factor is None:
            return None
        return {name: factor * (total[name] - gradient[name]) for name in total}

    def _without(self, rows: IntArray, slots: IntArray) -> tuple[Batch, list[Forest]]:
        batch, forests = self._step.batch, self._step.forests
        mini_batch, trains = batch.mini_batch.copy(), batch.trains.copy()
        mini_batch[rows] = len(self._step.batch.mini_batches)  # a mini-batch that is not trained
        trains[slots] = False
        batch = dataclasses.replace(batch, mini_batch=mini_batch, trains=trains)
        if self._cuts:
            num_processes = self._run.accelerator.num_processes
            cut = cut_batch(batch, self._run.config.batch, num_processes)
            forests = cut[self._step.number].forests
        return batch, list(forests)


def check_rows_are_separate(
    learner: Run, batch: Batch, forests: list[Forest], rows: RowGradients
) -> None:
    """Check that in a user's loss, each row is independent of the other rows of its micro-batch.

    Otherwise the gradient cannot be split into parts of single rows. In the losses of this package,
    rows are independent, apart from the selection of targets by clip_cov and kl_cov.

    Raises:
        InputError: `blame_rows`: the derivatives of a row depend on other rows.
    """
    if not learner.config.loss.has_own_loss:
        return
    c, outputs = rows.coefficients.logprobs, rows.coefficients.outputs
    for forest in forests:
        slot = forest.target_slot
        row = batch.responses.row_of(slot.numpy())
        limit = SEPARATE * float(c[slot].abs().max()) if len(slot) else 0.0
        for number in np.unique(row):
            at = slot[torch.from_numpy(row == number)]
            alone = _alone(learner, rows.batch, at, outputs[at])
            if alone is not None and float((alone - c[at]).abs().max()) <= limit:
                continue
            got = (
                f"the loss of row {batch.names[int(number)]} depends on other rows of its"
                " micro-batch, so the update cannot be split into the contributions of its rows"
            )
            hint = "rollouts replay --without shows the effect of leaving a row out"
            raise InputError(
                "blame_rows",
                f"{POLICY_LOSS.place} {learner.config.loss.policy_loss_type}",
                got,
                hint=hint,
            )


def _alone(learner: Run, batch: Batch, at: Tensor, logprobs: Tensor) -> Tensor | None:
    """Compute the derivatives of the loss for a row alone; None if the loss fails."""
    try:
        return derivatives(learner, batch, at, logprobs, torch.zeros_like(logprobs))[0].cpu()
    except RolloutError:
        return None
