"""One optimizer step, micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from trainer.config import TrainConfig
from trainer.data import Batch
from trainer.forest import Forest
from trainer.losses import clipped_policy_loss, is_clipped, tis_weights, token_mean
from trainer.policy import Policy

SUMS = ("loss", "entropy", "clipped", "tis_weight", "tis_capped", "rollout_abs_diff")


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """What changes while a run goes on, and how.

    Attributes:
        accelerator: Device, precision, gradient reduction.
        policy: The policy, prepared by `accelerator`.
        optimizer: Its optimizer, prepared by `accelerator`.
        config: The run's configuration.
        tis_cap: Cap of the importance weights; None where they do not apply.
    """

    accelerator: Accelerator
    policy: Policy
    optimizer: torch.optim.Optimizer
    config: TrainConfig
    tis_cap: float | None


@torch.no_grad()
def policy_logprobs(learner: Learner, batch: Batch, forests: Sequence[Forest]) -> Tensor:
    """Log-probabilities of the targets of `forests` under the policy as it is, without gradient.

    Returns:
        [T] float32 on the CPU; NaN at response tokens that are no target.
    """
    logprobs = torch.full((len(batch.trains),), torch.nan)
    for forest in forests:
        device = learner.accelerator.device
        temperature = batch.temperature[forest.target_slot].to(device)
        found, _ = learner.policy(forest.to(device), temperature)
        logprobs[forest.target_slot] = found.cpu()
    return logprobs


def update(
    learner: Learner, batch: Batch, forests: Sequence[Forest], old_logprobs: Tensor | None
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch and step.

    The loss is the sum over the mini-batch's targets of `clipped_policy_loss * tis_weights`, over
    their number. No step is made where nothing trains or the gradient is not finite.

    Args:
        learner: Policy and optimizer.
        batch: Per-token values the forests' targets refer to.
        forests: Micro-batches of the mini-batch, together its every target once.
        old_logprobs: [T] of the policy at the batch's start; None where this update is the first
            and only one of its batch, so that the policy's own log-probabilities are the same.

    Returns:
        Metrics; `skipped` is 1 where no step was made.
    """
    num_trained = sum(forest.num_targets for forest in forests)
    sums, largest = torch.zeros(len(SUMS)), 0.0
    for number, forest in enumerate(forests, start=1):
        accumulates = number < len(forests)
        with learner.accelerator.no_sync(learner.policy) if accumulates else nullcontext():
            loss, found, diff = _micro_batch(learner, batch, forest, old_logprobs, num_trained)
            # Data-parallel wrappers average gradients over processes; the denominator is global.
            learner.accelerator.backward(loss * learner.accelerator.num_processes)
        sums += found
        largest = max(largest, diff)
    grad_norm = _step(learner) if num_trained else 0.0
    means = dict(zip(SUMS, (sums / max(num_trained, 1)).tolist(), strict=True))
    metrics = {
        "loss": means["loss"],
        "policy_entropy": means["entropy"],
        "grad_norm": grad_norm,
        "clip_fraction": means["clipped"],
        "num_trained_tokens": num_trained,
        "num_forwarded_tokens": sum(forest.num_tokens for forest in forests),
        "num_micro_batches": len(forests),
        "skipped": int(not num_trained or not math.isfinite(grad_norm)),
    }
    if learner.tis_cap is not None:
        metrics |= {"tis_mean": means["tis_weight"], "tis_capped_fraction": means["tis_capped"]}
    if not math.isnan(means["rollout_abs_diff"]):
        metrics["rollout_logprobs_abs_diff_mean"] = means["rollout_abs_diff"]
        metrics["rollout_logprobs_abs_diff_max"] = largest
    return metrics


def _micro_batch(
    learner: Learner,
    batch: Batch,
    forest: Forest,
    old_logprobs: Tensor | None,
    num_trained: int,
) -> tuple[Tensor, Tensor, float]:
    """Loss with gradient, sums of the metrics over the targets (`SUMS`), largest difference."""
    device, slot = learner.accelerator.device, forest.target_slot
    logprobs, entropy = learner.policy(forest.to(device), batch.temperature[slot].to(device))
    old = logprobs.detach() if old_logprobs is None else old_logprobs[slot].to(device)
    advantages, rollout = (v[slot].to(device) for v in (batch.advantages, batch.rollout_logprobs))
    low, high = learner.config.eps_clip_low, learner.config.eps_clip_high
    losses = clipped_policy_loss(logprobs, old, advantages, eps_clip_low=low, eps_clip_high=high)
    weights = torch.ones_like(losses)
    if learner.tis_cap is not None:
        weights = tis_weights(old, rollout, learner.tis_cap)
        losses = losses * weights
    with torch.no_grad():
        clipped = is_clipped(logprobs, old, advantages, eps_clip_low=low, eps_clip_high=high)
        capped = weights >= (learner.tis_cap or math.inf)
        diff = (old - rollout).abs()
        found = torch.stack(
            [v.float().sum() for v in (losses, entropy, clipped, weights, capped, diff)]
        )
    return token_mean(losses, num_trained), found.cpu(), float(diff.max())


def _step(learner: Learner) -> float:
    """Clip the gradient and step, unless the gradient is not finite; its norm before clipping."""
    parameters = learner.policy.parameters()
    norm = learner.accelerator.clip_grad_norm_(parameters, learner.config.max_grad_norm)
    grad_norm = float(cast("Tensor", norm))
    if math.isfinite(grad_norm):
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return grad_norm
