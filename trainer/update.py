"""One optimizer step, micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from schemas.ragged import IntArray
from trainer.agreement import agreement
from trainer.config import TrainConfig
from trainer.data import Batch
from trainer.deal import own_forests
from trainer.forest import Forest
from trainer.losses.correction import correct
from trainer.losses.covariance import clip_cov_selection, covariances, kl_cov_selection
from trainer.losses.kl import kl_estimates
from trainer.losses.policy import regular
from trainer.losses.reductions import FloatArray, reduction_weights
from trainer.objective import Targets, policy_loss, ratio_metrics
from trainer.policy import Policy
from trainer.processes import combine, gather_parts
from trainer.sharding import clip_gradient, without_reduction

SPREADS = {
    "is_ratio": "std max min",
    "cispo/ratio": "max min",
}
"""What is reported beside the mean."""
COVARIANCE_LOSSES = ("clip_cov", "kl_cov")


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """What changes while a run goes on, and how.

    Attributes:
        accelerator: Device, precision, gradient reduction.
        policy: The policy, prepared by `accelerator`.
        optimizer: Its optimizer, prepared by `accelerator`.
        config: The run's configuration.
        corrects: Whether importance weights and masks apply: `trainer.checks` decides.
        reference: The frozen policy that `kl_loss_coef` is about; None where that is 0.
    """

    accelerator: Accelerator
    policy: Policy
    optimizer: torch.optim.Optimizer
    config: TrainConfig
    corrects: bool
    reference: nn.Module | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a mini-batch's loss takes as given, per response token of the batch; on the CPU.

    Attributes:
        old_logprobs: [T] of the policy at the batch's start. None: the policy's own, now.
        ref_logprobs: [T] of the reference policy; None without one.
        weights: [T] float32 that reduce the losses of the mini-batch's targets.
        selected: [T] bool, what clip_cov leaves out or kl_cov penalises; None for other losses.
    """

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    weights: Tensor
    selected: Tensor | None


@torch.no_grad()
def policy_logprobs(
    learner: Learner, batch: Batch, forests: Sequence[Forest], policy: nn.Module | None = None
) -> Tensor:
    """Log-probabilities of the targets of `forests` under a policy as it is, without gradient.

    Args:
        learner: Whose policy it is, unless `policy` is given.
        batch: Has each target's temperature.
        forests: Micro-batches; each process forwards its share of them.
        policy: Another policy, such as the learner's reference.

    Returns:
        [T] float32 on the CPU; NaN at response tokens that are no target.
    """
    accelerator, device = learner.accelerator, learner.accelerator.device
    logprobs = torch.zeros(len(batch.trains))
    for _, forest in own_forests(accelerator, forests):
        temperature = batch.temperature[forest.target_slot].to(device)
        found, _ = (policy or learner.policy)(forest.to(device), temperature)
        logprobs[forest.target_slot] = found.cpu()
    return combine(accelerator, logprobs, forests)


def update(
    learner: Learner,
    batch: Batch,
    forests: Sequence[Forest],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None = None,
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch and step.

    With the weights w of `loss_reduction`, the policy loss p, the factor c that corrects for the
    sampler, the estimate k of the divergence and the entropy h of each target:

        loss = sum of w (c p + kl_loss_coef k - entropy_loss_coef h)

    No step is made where nothing trains or the gradient is not finite.

    Args:
        learner: Policy and optimizer.
        batch: Per-token values the forests' targets refer to.
        forests: Micro-batches of the mini-batch, together its every target once. All targets of
            a row are in one of them. Each process forwards its share of them.
        old_logprobs: [T] of the policy at the batch's start; None where this update is the first
            and only one of its batch, so that the policy's own log-probabilities are the same, or
            where the loss does not need them.
        ref_logprobs: [T] of the learner's reference; None without one.

    Returns:
        Metrics; `skipped` is 1 where no step was made.
    """
    num_trained = sum(forest.num_targets for forest in forests)
    given = _given(learner, batch, forests, old_logprobs, ref_logprobs)
    accelerator, parts = learner.accelerator, {}
    own = own_forests(accelerator, forests)
    for done, (number, forest) in enumerate(own, start=1):
        with without_reduction(learner.policy) if done < len(own) else nullcontext():
            loss, parts[number] = _micro_batch(learner, batch, forest, given)
            # Data-parallel wrappers average gradients over processes; the weights are global.
            accelerator.backward(loss * accelerator.num_processes)
    grad_norm = _step(learner) if num_trained else 0.0
    return _metrics(gather_parts(accelerator, parts)) | {
        "grad_norm": grad_norm,
        "num_trained_tokens": num_trained,
        "num_forwarded_tokens": sum(forest.num_tokens for forest in forests),
        "num_micro_batches": len(forests),
        "skipped": int(not num_trained or not math.isfinite(grad_norm)),
    }


def _given(
    learner: Learner,
    batch: Batch,
    forests: Sequence[Forest],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
) -> Given:
    slots = torch.cat([torch.zeros(0, dtype=torch.int64), *(f.target_slot for f in forests)])
    slots = slots.sort().values  # in the order of the batch's tokens, however they are packed
    weights = torch.zeros(len(batch.trains))
    weights[slots] = torch.from_numpy(_weights(learner.config, batch, slots.numpy())).float()
    selected = None
    if learner.config.policy_loss_type in COVARIANCE_LOSSES and len(slots):
        now = policy_logprobs(learner, batch, forests)
        old = now if old_logprobs is None else old_logprobs
        selected = torch.zeros(len(batch.trains), dtype=torch.bool)
        advantages = batch.advantages[slots]
        selected[slots] = _select(learner.config, now[slots], old[slots], advantages)
    return Given(
        old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, weights=weights, selected=selected
    )


def _weights(config: TrainConfig, batch: Batch, slots: IntArray) -> FloatArray:
    """[M] weights of the targets at `slots`; denominators count the rows of their mini-batch."""
    row = batch.responses.row_of(slots)
    inside = np.isin(batch.mini_batch, np.unique(batch.mini_batch[row]))
    return reduction_weights(
        config.loss_reduction,
        row=row,
        num_rows=int(inside.sum()),
        trajectory=batch.trajectory[row],
        num_trajectories=len(np.unique(batch.trajectory[inside])),
        group=batch.group[row],
        num_groups=len(np.unique(batch.group[inside])),
        max_seq_len=config.max_seq_len,
    )


def _select(c: TrainConfig, now: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    covariance = covariances(advantages, now)
    if c.policy_loss_type == "kl_cov":
        return kl_cov_selection(covariance, fraction=c.kl_cov_frac)
    bounds = {"eps_clip_low": c.eps_clip_low, "eps_clip_high": c.eps_clip_high}
    clipped = regular(now, old, advantages, **bounds).clipped
    shares = {"ratio": c.clip_cov_ratio, "low": c.clip_cov_lb, "high": c.clip_cov_ub}
    return clip_cov_selection(covariance, clipped, **shares)


def _micro_batch(
    learner: Learner, batch: Batch, forest: Forest, given: Given
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss with gradient; metrics as tensors: per target [M], or one per row of the forest."""
    c, device, slot = learner.config, learner.accelerator.device, forest.target_slot
    logprobs, entropy = learner.policy(forest.to(device), batch.temperature[slot].to(device))
    targets, weights = _targets(batch, slot, logprobs, given), given.weights[slot].to(device)
    losses, clipped = policy_loss(targets, c)
    found = {"clip_ratio": clipped, "policy_entropy": entropy} | ratio_metrics(targets, c)
    if learner.corrects:
        correction = correct(targets.old_logprobs, targets.rollout_logprobs, targets.row, c)
        losses = losses * correction.weights
        found |= correction.per_target | correction.per_row
    terms = {"policy_loss": weights * losses}
    total = terms["policy_loss"]
    if given.ref_logprobs is not None:
        reference = given.ref_logprobs[slot].to(device)
        terms["policy_kl"] = weights * kl_estimates(logprobs, reference, c.kl_estimator_type)
        total = total + c.kl_loss_coef * terms["policy_kl"]
    if c.entropy_loss_coef:
        total = total - c.entropy_loss_coef * weights * entropy
    difference = targets.old_logprobs - targets.rollout_logprobs
    found |= terms | {"loss": total, "rollout_logprobs_diff": difference}
    return total.sum(), {name: value.detach().double().cpu() for name, value in found.items()}


def _targets(batch: Batch, slot: Tensor, logprobs: Tensor, given: Given) -> Targets:
    def at(values: Tensor | None, missing: Tensor) -> Tensor:
        return missing if values is None else values[slot].to(logprobs.device)

    _, row = np.unique(batch.responses.row_of(slot.numpy()), return_inverse=True)
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    return Targets(
        logprobs=logprobs,
        old_logprobs=at(given.old_logprobs, logprobs.detach()),
        rollout_logprobs=batch.rollout_logprobs[slot].to(logprobs.device),
        advantages=batch.advantages[slot].to(logprobs.device),
        row=torch.from_numpy(row.astype(np.int64)).to(logprobs.device),
        selected=at(given.selected, nothing),
    )


def _metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Sums of the terms of the loss, means of everything else, over the mini-batch."""
    names = parts[0] if parts else ("loss", "policy_loss", "policy_entropy", "clip_ratio")
    found = {name: torch.cat([torch.zeros(0), *(part[name] for part in parts)]) for name in names}
    metrics: dict[str, float] = {}
    for name in ("loss", "policy_loss", "policy_kl"):
        if name in found:
            metrics[name] = float(found.pop(name).sum())
    metrics |= agreement(found.pop("rollout_logprobs_diff", torch.zeros(0)))
    for name, subject in SPREADS.items():
        values = found.get(name, torch.zeros(0))
        if len(values) and not values.isnan().any():
            metrics[f"{name}_mean"] = float(values.mean())
            spread = {"max": values.max(), "min": values.min(), "std": _deviation(values)}
            metrics |= {f"{name}_{kind}": float(spread[kind]) for kind in subject.split()}
        found.pop(name, None)
    return metrics | {name: float(v.mean()) if len(v) else 0.0 for name, v in found.items()}


def _deviation(values: Tensor) -> Tensor:
    """Sample standard deviation; 0 of one value."""
    return values.std() if len(values) > 1 else values.new_zeros(())


def _step(learner: Learner) -> float:
    """Clip the gradient and step, unless the gradient is not finite; its norm before clipping."""
    grad_norm = clip_gradient(learner.policy.parameters(), learner.config.max_grad_norm)
    if math.isfinite(grad_norm):
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return grad_norm
