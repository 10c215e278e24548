"""The loss of a mini-batch: the forward passes it needs first, and its value per micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from schemas.errors import RolloutError
from schemas.ragged import IntArray
from trainer.algorithms.configured import Targets, Units, policy_loss, reduction_weights, select
from trainer.algorithms.losses.correction import correct
from trainer.algorithms.losses.kl import kl_estimates
from trainer.algorithms.losses.policy import TokenLoss
from trainer.algorithms.losses.ratios import probability_ratio
from trainer.batches.data import Batch
from trainer.batches.forest import Forest
from trainer.batches.support import teacher_sets
from trainer.batches.transfer import Arriving, columns_to_device, to_device
from trainer.config.functions import LOSS_REDUCTION, POLICY_LOSS, bind
from trainer.config.loss_config import LossConfig
from trainer.config.sections import OptimizerConfig
from trainer.distributed.balance import Watch, own_forests
from trainer.distributed.processes import combine
from trainer.models.policy import Policy
from trainer.run.pass_progress import SELECTION, UNWATCHED, Passes
from trainer.run.token_records import TokenRecorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """The policy, its optimizer, and the sections that its updates use.

    Attributes:
        accelerator: Provides the device, the precision and gradient reduction.
        policy: The policy, prepared by `accelerator`.
        optimizer: Optimizer of the policy, prepared by `accelerator`.
        loss: The loss.
        corrects: Whether importance weights and masks apply.
        optimization: Peak learning rate and maximum norm of the gradient.
        reference: The frozen reference of the KL divergence; None if not needed.
    """

    accelerator: Accelerator
    policy: Policy
    optimizer: torch.optim.Optimizer
    loss: LossConfig
    corrects: bool
    optimization: OptimizerConfig
    reference: nn.Module | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Inputs of a mini-batch's loss except the policy's outputs, per response token; on the CPU.

    Attributes:
        old_logprobs: [T] nats under the policy at the start of the batch; None: use the
            log-probabilities of the current policy.
        ref_logprobs: [T] nats under the reference policy; None without one.
        weights: [T] float32 weights that reduce the losses of the mini-batch's targets.
        selected: [T] bool, targets that clip_cov leaves out or kl_cov penalises; None for other
            losses.
    """

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    weights: Tensor
    selected: Tensor | None


@torch.no_grad()
def policy_logprobs(
    learner: Learner,
    batch: Batch,
    forests: Sequence[Forest],
    policy: nn.Module | None = None,
    watch: Watch = iter,
) -> Tensor:
    """Compute log-probabilities of the targets of `forests`, without gradient.

    Each process forwards its share of the micro-batches. `policy` is the learner's policy by
    default; pass another model such as the reference. `watch` wraps the iteration over
    micro-batches, to show progress.

    Returns:
        [T] float32 on the CPU; NaN at response tokens that are not targets.
    """
    accelerator, device = learner.accelerator, learner.accelerator.device
    logprobs, parts = torch.zeros(len(batch.trains)), []
    model = learner.policy if policy is None else policy  # a compiled module has no truth value
    for _, forest in watch(own_forests(accelerator, forests)):
        temperature = to_device(batch.temperature[forest.target_slot], device)
        found, _ = model(forest.to(device), temperature)
        parts.append((forest.target_slot, Arriving({"logprobs": found})))
    for slot, arriving in parts:
        logprobs[slot] = arriving.read()["logprobs"]
    return combine(accelerator, logprobs, forests)


def loss_inputs(
    learner: Learner,
    batch: Batch,
    forests: Sequence[Forest],
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    passes: Passes = UNWATCHED,
) -> LossInputs:
    """Compute the inputs of a mini-batch's loss; see `update` for the arguments.

    clip_cov draws the targets that it leaves out with torch's generator.
    """
    slots = torch.cat([torch.zeros(0, dtype=torch.int64), *(f.target_slot for f in forests)])
    slots = slots.sort().values  # in the order of the batch's tokens, independent of packing
    weights = torch.zeros(len(batch.trains))
    units = units_of(batch, forests, slots.numpy())
    reduction = bind(LOSS_REDUCTION, learner.loss)
    weights[slots] = torch.from_numpy(reduction_weights(units, reduction)).float()
    selected = None
    if learner.loss.selects_targets and len(slots):
        watch = partial(passes, SELECTION)
        now = policy_logprobs(learner, batch, forests, watch=watch)
        old = now if old_logprobs is None else old_logprobs
        selected = torch.zeros(len(batch.trains), dtype=torch.bool)
        advantages = batch.advantages[slots]
        chosen = select(now[slots], old[slots], advantages, learner.loss)
        assert chosen is not None
        selected[slots] = chosen
    return LossInputs(
        old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, weights=weights, selected=selected
    )


def units_of(batch: Batch, forests: Sequence[Forest], slots: IntArray) -> Units:
    """Find the row, trajectory, group and micro-batch of each target, and their totals."""
    row = batch.responses.row_of(slots)
    micro_batch = np.zeros(len(batch.trains), np.int64)
    for number, forest in enumerate(forests):
        micro_batch[forest.target_slot.numpy()] = number
    inside = np.isin(batch.mini_batch, np.unique(batch.mini_batch[row]))
    return Units(
        row=row,
        num_rows=int(inside.sum()),
        trajectory=batch.trajectory[row],
        num_trajectories=len(np.unique(batch.trajectory[inside])),
        group=batch.group[row],
        num_groups=len(np.unique(batch.group[inside])),
        micro_batch=micro_batch[slots],
        num_micro_batches=len(forests),
    )


def with_teacher(forest: Forest, batch: Batch, loss: LossConfig) -> Forest:
    """Add the teacher's ids of the targets, if the loss is `distill`."""
    if loss.policy_loss_type != "distill" or batch.teacher is None:
        return forest
    is_reverse = loss.distill_type == "reverse_kl"
    teacher = teacher_sets(batch.teacher, forest.target_slot, is_reverse=is_reverse)
    return replace(forest, teacher=teacher)


def loss_of(
    learner: Learner,
    batch: Batch,
    slot: Tensor,
    outputs: tuple[Tensor, ...],
    inputs: LossInputs,
    failures: list[RolloutError],
    recorder: TokenRecorder | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of a micro-batch from the policy's outputs.

    If a user's loss fails in one of several processes, the error is added to `failures` and the
    loss is 0, because the other processes wait for this process's part of the gradient.

    Args:
        learner: Provides the section `[loss]`.
        batch: The batch.
        slot: [M] int64 targets of complete rows, as indices into the batch's response tokens.
        outputs: [M] log-probabilities and [M] entropies of these targets, and with a teacher [M]
            divergences.
        inputs: Inputs of the loss; from `loss_inputs`.
        failures: Receives the error of a user's loss.
        recorder: Receives the values that enter the loss.

    Returns:
        The loss (a scalar with gradient), and metrics ([M] per target, or one value per row;
        float64, on the policy's device).
    """
    config = learner.loss
    policy = bind(POLICY_LOSS, config)
    logprobs, entropy, *from_teacher = outputs
    known = _columns(batch, slot, inputs, logprobs.device)
    targets, weights = _targets(logprobs, known), known["weights"]
    # Without a teacher, distill has a loss of 0.
    targets = replace(targets, divergence=from_teacher[0] if from_teacher else 0 * logprobs)
    try:
        losses, clipped, own_metrics = policy_loss(targets, policy)
    except RolloutError as error:
        if learner.accelerator.num_processes == 1:
            raise
        failures.append(error)
        losses, clipped, own_metrics = TokenLoss(0 * logprobs, torch.zeros_like(logprobs))
    found = {"clip_ratio": clipped, "policy_entropy": entropy}
    found |= {name: values.detach() for name, values in own_metrics.items()}
    recorded = {"clipped": clipped, "entropy": entropy}
    if learner.corrects:
        both = targets.old_logprobs, targets.rollout_logprobs
        correction = correct(*both, targets.row, config)
        losses = losses * correction.weights
        found |= correction.per_target | correction.per_row
        recorded |= {
            "correction_weights": correction.weights,
            "rejected": correction.weights == 0,
        }
    terms = {"policy_loss": weights * losses}
    total = terms["policy_loss"]
    if inputs.ref_logprobs is not None:
        divergence = kl_estimates(logprobs, known["ref_logprobs"], config.kl_estimator_type)
        terms["policy_kl"] = weights * divergence
        total = total + config.kl_loss_coef * terms["policy_kl"]
        losses = losses + config.kl_loss_coef * divergence.detach()
    if config.entropy_loss_coef:
        total = total - config.entropy_loss_coef * weights * entropy
        losses = losses - config.entropy_loss_coef * entropy.detach()
    if recorder:
        recorded |= {"losses": losses, "weights": weights}
        recorder.add(slot, recorded | _known(targets, inputs, config))
    difference = targets.old_logprobs - targets.rollout_logprobs
    found |= terms | {"loss": total, "rollout_logprobs_diff": difference}
    return total.sum(), {name: value.detach().double() for name, value in found.items()}


def _known(targets: Targets, inputs: LossInputs, loss: LossConfig) -> dict[str, Tensor]:
    """Return the values that the trainer computes for the loss, for the token records."""
    known = {"logprobs": targets.logprobs.detach()}
    if "advantages" in loss.inputs:
        known["advantages"] = targets.advantages
    if loss.needs_old_logprobs or inputs.old_logprobs is not None:
        known["old_logprobs"] = targets.old_logprobs
        known["importance_weights"] = probability_ratio(known["logprobs"], targets.old_logprobs)
    return known


def _columns(
    batch: Batch, slot: Tensor, inputs: LossInputs, device: torch.device
) -> dict[str, Tensor]:
    """Gather what the loss needs of a micro-batch's M targets ([M] each), on the device."""
    _, row = np.unique(batch.responses.row_of(slot.numpy()), return_inverse=True)
    columns = {
        "rollout_logprobs": batch.rollout_logprobs,
        "advantages": batch.advantages,
        "weights": inputs.weights,
        "old_logprobs": inputs.old_logprobs,
        "ref_logprobs": inputs.ref_logprobs,
        "selected": inputs.selected,
    }
    known = {name: values[slot] for name, values in columns.items() if values is not None}
    return columns_to_device(known | {"row": torch.from_numpy(row.astype(np.int64))}, device)


def _targets(logprobs: Tensor, known: Mapping[str, Tensor]) -> Targets:
    old, selected = known.get("old_logprobs"), known.get("selected")
    return Targets(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old is None else old,
        rollout_logprobs=known["rollout_logprobs"],
        advantages=known["advantages"],
        row=known["row"],
        selected=torch.zeros_like(logprobs, dtype=torch.bool) if selected is None else selected,
    )
