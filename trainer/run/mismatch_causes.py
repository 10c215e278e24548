"""Explain a mismatch between the trainer's and the sampler's log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.batches.data import Batch
from trainer.batches.forest import Forest
from trainer.run.loss import Learner, policy_logprobs

EXPLAINED = 1 / 3
"""A cause is reported only if undoing it reduces the difference to at most this fraction."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)


def likely_cause(learner: Learner, batch: Batch, forests: Sequence[Forest]) -> str:
    """Name the likely cause of a mismatch between the policy's and the sampler's log-probabilities.

    Recomputes the log-probabilities of one micro-batch of `forests` at other temperatures, and
    tries a shift of `rollout_logprobs` by one token. A cause is named if undoing it leaves at most
    a third of the difference. The batch must have `rollout_logprobs` at the targets.
    """
    now = policy_logprobs(learner, batch, forests[:1])
    before = _distance(now, batch.rollout_logprobs)
    found = {**_misplaced(now, batch), **dict(_at_temperatures(learner, batch, forests[0]))}
    cause = min(found, key=lambda text: found[text])
    if found[cause] <= EXPLAINED * before:
        reduced = f"from {before:.2g} to {found[cause]:.2g} nats in one micro-batch"
        return f"{cause} (undoing this reduces the difference {reduced})"
    return (
        "the weights differ from the sampler's (a different model, precision or update); neither a"
        " different temperature nor a shift by one token explains the difference"
    )


def _misplaced(now: Tensor, batch: Batch) -> dict[str, float]:
    """Compute the difference that remains if log-probabilities are shifted by one token.

    Returns the mean absolute difference for each direction, by description of the cause.
    """
    row = torch.from_numpy(batch.responses.row_of(np.arange(len(now))))
    apart = torch.where(row[1:] == row[:-1], 0.0, torch.nan)
    theirs = batch.rollout_logprobs
    shifted = "rollout_logprobs are shifted by one: each belongs to the"
    return {
        f"{shifted} previous token": _distance(now[:-1] + apart, theirs[1:]),
        f"{shifted} next token": _distance(now[1:] + apart, theirs[:-1]),
    }


def _at_temperatures(learner: Learner, batch: Batch, forest: Forest) -> Iterator[tuple[str, float]]:
    recorded = sorted(set(batch.temperature[forest.target_slot].tolist()))
    noted = " and ".join(f"{value:g}" for value in recorded)
    for value in TEMPERATURES:
        if recorded != [value]:
            temperature = torch.full_like(batch.temperature, value)
            other = dataclasses.replace(batch, temperature=temperature)
            found = policy_logprobs(learner, other, [forest])
            text = f"rollout_logprobs are at temperature {value:g}, but the rows record {noted}"
            yield text, _distance(found, batch.rollout_logprobs)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Compute the mean absolute difference over tokens where both are known; infinity if none."""
    distance = (ours - theirs).abs()
    known = distance[~distance.isnan()]
    return float(known.mean()) if len(known) else float("inf")
