"""Why the trainer's log-probabilities are not the sampler's: what explains most of the difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.data import Batch
from trainer.forest import Forest
from trainer.update import Learner, policy_logprobs

EXPLAINED = 1 / 3
"""What explains a difference leaves at most this share of it."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)


def likely_cause(learner: Learner, batch: Batch, forests: Sequence[Forest]) -> str:
    """Why the log-probabilities of a mini-batch are not the sampler's, in words.

    The policy is asked for the tokens of one micro-batch again: at other temperatures, and for the
    tokens beside them. A cause is named if it leaves a third of the difference or less.

    Args:
        learner: Whose policy it is.
        batch: With `rollout_logprobs` at the targets.
        forests: The mini-batch's micro-batches.
    """
    now = _logprobs(learner, batch, forests[0])
    before = _distance(now, batch.rollout_logprobs)
    found = {**_misplaced(now, batch), **dict(_at_temperatures(learner, batch, forests[0]))}
    cause = min(found, key=lambda text: found[text])
    if found[cause] <= EXPLAINED * before:
        return f"{cause} ({found[cause]:.2g} nats instead of {before:.2g} in one micro-batch)"
    return (
        "other weights than the sampler's (another model, another precision, a later update);"
        " no other temperature and no shift by a token explains it"
    )


def _misplaced(now: Tensor, batch: Batch) -> dict[str, float]:
    """What is left of the difference if a row's numbers are those of the token before, or after."""
    row = torch.from_numpy(batch.responses.row_of(np.arange(len(now))))
    apart = torch.where(row[1:] == row[:-1], 0.0, torch.nan)
    theirs = batch.rollout_logprobs
    return {
        "rollout_logprobs are off by one: each is of the token before": _distance(
            now[:-1] + apart, theirs[1:]
        ),
        "rollout_logprobs are off by one: each is of the token after": _distance(
            now[1:] + apart, theirs[:-1]
        ),
    }


def _at_temperatures(learner: Learner, batch: Batch, forest: Forest) -> Iterator[tuple[str, float]]:
    recorded = sorted(set(batch.temperature[forest.target_slot].tolist()))
    for temperature in TEMPERATURES:
        if recorded != [temperature]:
            other = dataclasses.replace(
                batch, temperature=torch.full_like(batch.temperature, temperature)
            )
            said = " and ".join(f"{value:g}" for value in recorded)
            text = f"rollout_logprobs are at temperature {temperature:g}, the rows say {said}"
            yield text, _distance(_logprobs(learner, other, forest), batch.rollout_logprobs)


def _logprobs(learner: Learner, batch: Batch, forest: Forest) -> Tensor:
    return policy_logprobs(learner, batch, [forest])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Mean absolute difference where both are known; infinite where they never are."""
    distance = (ours - theirs).abs()
    known = distance[~distance.isnan()]
    return float(known.mean()) if len(known) else float("inf")
