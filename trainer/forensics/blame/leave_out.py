"""The gradient of an update without some of its rows, as in `rollouts replay --without`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError, RolloutError
from schemas.ragged import IntArray
from trainer.algorithms.configured import reduction_weights, select
from trainer.batches.data import Batch
from trainer.batches.forest import Forest
from trainer.batches.packing import cut_batch
from trainer.config.functions import LOSS_REDUCTION, POLICY_LOSS, bind
from trainer.forensics.blame.gradients import (
    Coefficients,
    RowGradients,
    add,
    derivatives,
    gradient_of,
)
from trainer.run.loss import units_of
from trainer.run.run import Run
from trainer.run.update import Step

SAME = 1e-5
"""Relative difference up to which factors count as equal, because they are computed in float32."""
SEPARATE = 1e-3
"""Rows count as separate if leaving out other rows changes the derivatives of their loss by at most
this much, relative to the largest derivative of the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remainder:
    """How the derivatives c_t of the loss change to c'_t when rows are left out.

        c'_t = factor c_t + rest_t          for the targets t of the other rows

    Attributes:
        factor: Chosen so that rest_t is 0 for as many targets as possible.
        rest: rest_t, for log-probabilities and entropies; None if all are 0.
        rows: Rows in which any rest_t is not 0; None if there are no such rows.
    """

    factor: float
    rest: Coefficients | None = None
    rows: IntArray | None = None


class LeavingOut:
    """Computes the gradient that an update would have without some of its rows.

    The denominators of the loss count only the other rows, micro-batches are cut again, and
    `kl_cov` and `clip_cov` select targets again. Advantages and old log-probabilities do not
    change.

    Args:
        run: The run, just before the update.
        step: The update.
        found: Row gradients of the update.
        generator: State of torch's generator before the update, which clip_cov uses to draw.
    """

    def __init__(self, run: Run, step: Step, found: RowGradients, generator: Tensor) -> None:
        self._run, self._step, self._found, self._generator = run, step, found, generator
        self._batch = step.ready.batch
        self._slots = np.flatnonzero(found.targets)
        self._row = self._batch.responses.row_of(self._slots)
        loss = run.config.loss
        self._selects = loss.selects_targets
        self._cuts = not loss.reduction_inputs.isdisjoint({"micro_batch", "num_micro_batches"})

    def factor(self, left: IntArray) -> float | None:
        """Compute the common factor by which the derivatives of all other rows change.

        None if the factors differ, or if no row remains.
        """
        if self._selects or not (kept := self._kept(left)).any():
            return None
        assert self._found.batch.weights is not None
        before = self._found.batch.weights.numpy()[self._slots[kept]]
        if not before.all():
            return None
        factors = self._weights(left, self._slots[kept]) / before
        same = np.allclose(factors, factors[0], rtol=SAME, atol=0)
        return float(factors[0]) if same else None

    def gradient(self, left: IntArray, own: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Compute the gradient of the update without some rows; None if no row remains.

        Args:
            left: Rows to leave out.
            own: Gradient of these rows in the complete update.

        Raises:
            InputError: A user's loss or reduction fails without these rows.
        """
        if not self._kept(left).any():
            return None
        factor = self.factor(left)
        remainder = self._remainder(left) if factor is None else Remainder(factor=factor)
        total = self._found.gradient
        found = {name: remainder.factor * (total[name] - own[name]) for name in total}
        if remainder.rest is not None:
            assert remainder.rows is not None
            learner, targets = self._run, self._found.targets
            add(found, gradient_of(learner, self._batch, targets, remainder.rest, remainder.rows))
        return found

    def _kept(self, left: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return ~np.isin(self._row, left)

    def _weights(
        self, left: IntArray, slots: IntArray
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Compute the reduction's weights of the targets `slots` without the rows `left`."""
        batch, forests = self._fewer(left)
        reduction = bind(LOSS_REDUCTION, self._run.config.loss)
        return reduction_weights(units_of(batch, forests, slots), reduction)

    def _fewer(self, left: IntArray) -> tuple[Batch, list[Forest]]:
        batch, forests = self._batch, self._step.forests
        mini_batch = batch.mini_batch.copy()
        mini_batch[left] = len(self._step.ready.mini_batches)  # a mini-batch that is not trained
        trains = batch.trains.copy()
        trains[self._slots[~self._kept(left)]] = False
        batch = dataclasses.replace(batch, mini_batch=mini_batch, trains=trains)
        if self._cuts:
            num_processes = self._run.accelerator.num_processes
            cut = cut_batch(batch, self._run.config.batch, num_processes)
            forests = cut[self._step.number].forests
        return batch, list(forests)

    def _remainder(self, left: IntArray) -> Remainder:
        """Compute how the derivatives of the loss change, from the known outputs of the policy."""
        batch, learner, found = self._batch, self._run, self._found
        slots = self._slots[self._kept(left)]
        at = torch.from_numpy(slots)
        weights = torch.zeros(len(batch.trains))
        weights[at] = torch.from_numpy(self._weights(left, slots)).float()
        logprobs, selected = found.coefficients.outputs, found.batch.selected
        if self._selects:
            old = logprobs if batch.old_logprobs is None else batch.old_logprobs
            selected = torch.zeros(len(batch.trains), dtype=torch.bool)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator)
                chosen = select(logprobs[at], old[at], batch.advantages[at], learner.config.loss)
                assert chosen is not None
                selected[at] = chosen
        batch = dataclasses.replace(found.batch, weights=weights, selected=selected)
        outputs = logprobs[at], torch.zeros(len(at))
        now = derivatives(learner, batch, at, *outputs)
        before = found.coefficients.logprobs[at], found.coefficients.entropies[at]
        factor = _usual_factor(now, before)
        rest = [torch.zeros_like(logprobs) for _ in range(2)]
        for one, new, old in zip(rest, now, before, strict=True):
            difference = new - factor * old
            one[at] = torch.where(difference.abs() > SAME * new.abs().max(), difference, 0.0)
        changed = (rest[0] != 0) | (rest[1] != 0)
        if not changed.any():
            return Remainder(factor=factor)
        rows = np.unique(batch.responses.row_of(np.flatnonzero(changed.numpy())))
        coefficients = Coefficients(logprobs=rest[0], entropies=rest[1], outputs=logprobs)
        return Remainder(factor=factor, rest=coefficients, rows=rows)


def _usual_factor(now: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> float:
    """Return the most common ratio of new to old derivatives; 1 if all old ones are 0.

    Ratios that are equal when rounded to a multiple of `SAME` count as the same.
    """
    ratios = torch.cat(
        [n[b != 0].double() / b[b != 0].double() for n, b in zip(now, before, strict=True)]
    )
    if not len(ratios):
        return 1.0
    rounded = (ratios / SAME).round()
    usual = torch.mode(rounded).values
    return float(ratios[rounded == usual].median())


def check_rows_are_separate(
    learner: Run, batch: Batch, forests: list[Forest], found: RowGradients
) -> None:
    """Check that in a user's loss, each row is independent of the other rows of its micro-batch.

    Otherwise the gradient cannot be split into parts of single rows. In the losses of this package,
    rows are independent, apart from the selection of targets by clip_cov and kl_cov.

    Raises:
        InputError: `blame_rows`: the derivatives of a row depend on other rows.
    """
    if not learner.config.loss.has_own_loss:
        return
    c, outputs = found.coefficients.logprobs, found.coefficients.outputs
    for forest in forests:
        slot = forest.target_slot
        row = batch.responses.row_of(slot.numpy())
        limit = SEPARATE * float(c[slot].abs().max()) if len(slot) else 0.0
        for number in np.unique(row):
            at = slot[torch.from_numpy(row == number)]
            alone = _alone(learner, found.batch, at, outputs[at])
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
