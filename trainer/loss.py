"""The objective of an update: what every trained token (target) adds to the loss.

    loss = sum over targets of w (c p + kl_loss_coef k - entropy_loss_coef h)

w: weight of `loss.reduction`; p: policy loss; c: correction for sampler mismatch; k: estimated
divergence from the reference, left out if it is in the reward (`kl_reward_coef`); h: entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from schemas.ragged import IntArray
from trainer.algorithms.correction import correct
from trainer.algorithms.kl import kl_estimates
from trainer.algorithms.losses import Targets, select
from trainer.algorithms.own_functions import call_function
from trainer.algorithms.reductions import Units, reduction_weights
from trainer.batch import Batch
from trainer.batches.forest import Forest, Watch, padded_forests
from trainer.batches.overlap import CopyToCpu, columns_to_device, to_device
from trainer.batches.sampling_support import teacher_sets
from trainer.config.functions import LOSS_REDUCTION, POLICY_LOSS, Function, bind
from trainer.config.sections import LossConfig
from trainer.distributed.processes import of_all_processes, over_processes
from trainer.run.messages import SELECTION, UNWATCHED, Passes
from trainer.run.run import Run

COLUMNS = ("rollout_logprobs", "advantages", "weights", "old_logprobs", "ref_logprobs", "selected")
"""[T] columns of a batch that the objective reads at the targets."""


def objective(
    targets: Targets, loss: LossConfig, *, corrects: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the objective of M targets of complete rows; `corrects`: for sampler mismatch.

    Returns:
        The loss (a scalar with gradient), and columns without gradient: [M] for each target, or one
        number for each row. They become metrics and token records.

    Raises:
        InputError: A user's loss fails, or its result is invalid.
    """
    weights, entropy = targets.weights, targets.entropy
    assert weights is not None
    assert entropy is not None
    policy_loss = bind(POLICY_LOSS, loss)
    inputs = {name: getattr(targets, name) for name in policy_loss.inputs}
    losses, clipped, metrics = call_function(policy_loss, **inputs)
    columns = {"clip_ratio": clipped, "policy_entropy": entropy, **metrics}
    if corrects:
        correction = correct(targets.old_logprobs, targets.rollout_logprobs, targets.row, loss)
        losses = losses * correction.weights
        columns |= correction.per_target | correction.per_row
        columns["correction_weights"] = correction.weights
    total = columns["policy_loss"] = weights * losses
    if targets.ref_logprobs is not None and not loss.kl_reward_coef:  # else it is in the reward
        kl = kl_estimates(targets.logprobs, targets.ref_logprobs, loss.kl_estimator_type)
        columns["policy_kl"] = weights * kl
        total = total + loss.kl_loss_coef * columns["policy_kl"]
        losses = losses + loss.kl_loss_coef * kl
    if loss.entropy_loss_coef:
        total = total - loss.entropy_loss_coef * weights * entropy
        losses = losses - loss.entropy_loss_coef * entropy
    columns |= {"loss": total, "unweighted_loss": losses}
    columns["rollout_logprobs_diff"] = targets.old_logprobs - targets.rollout_logprobs
    return total.sum(), {name: values.detach() for name, values in columns.items()}


def with_teacher(forest: Forest, batch: Batch, loss: LossConfig) -> Forest:
    """Add the teacher's ids of the targets, if the loss is `distill`."""
    if loss.policy_loss_type != "distill" or batch.teacher is None:
        return forest
    is_reverse = loss.distill_type == "reverse_kl"
    teacher = teacher_sets(batch.teacher, forest.target_slot, is_reverse=is_reverse)
    return replace(forest, teacher=teacher)


def targets_of(batch: Batch, slot: Tensor, outputs: Sequence[Tensor]) -> Targets:
    """Join the policy's outputs at M targets with the columns of the batch there, on its device."""
    logprobs, entropy, *divergence = outputs
    row = np.unique(batch.responses.row_of(slot.numpy()), return_inverse=True)[1]
    columns = {name: getattr(batch, name) for name in COLUMNS}
    at_targets = {name: values[slot] for name, values in columns.items() if values is not None}
    at_targets["row"] = torch.from_numpy(row.astype(np.int64))
    at_targets = columns_to_device(at_targets, logprobs.device)
    at_targets.setdefault("old_logprobs", logprobs.detach())  # the only update of its batch
    at_targets.setdefault("selected", torch.zeros_like(logprobs, dtype=torch.bool))
    # Without a teacher, distill has a loss of 0.
    distance = divergence[0] if divergence else 0 * logprobs
    return Targets(logprobs=logprobs, entropy=entropy, divergence=distance, **at_targets)


def with_target_weights(
    run: Run, batch: Batch, forests: Sequence[Forest], passes: Passes = UNWATCHED
) -> Batch:
    """Add the columns of a mini-batch that depend on all its targets: `weights` and `selected`.

    A loss that selects targets (clip_cov, kl_cov) first forwards all micro-batches without gradients;
    clip_cov draws the targets that it leaves out with torch's generator.
    """
    slots = torch.cat([torch.zeros(0, dtype=torch.int64), *(f.target_slot for f in forests)])
    slots = slots.sort().values  # in the order of the batch's tokens, independent of packing
    weights, selected = torch.zeros(len(batch.trains)), None
    reduction = bind(LOSS_REDUCTION, run.config.loss)
    units, gathered_places = units_of(run, batch, forests, slots.numpy(), reduction)
    weights[slots] = torch.from_numpy(reduction_weights(units, reduction)[gathered_places]).float()
    if run.config.loss.selects_targets and len(units.row):
        now = policy_logprobs(run, batch, forests, watch=partial(passes, SELECTION))
        old = now if batch.old_logprobs is None else batch.old_logprobs
        at_slots = [values[slots].numpy() for values in (now, old, batch.advantages)]
        row = batch.responses.row_of(slots.numpy())
        whole, gathered_places = of_all_processes(run.accelerator, row, at_slots)
        everywhere = [torch.from_numpy(values) for values in whole]
        chosen = select(everywhere[0], everywhere[1], everywhere[2], run.config.loss)
        assert chosen is not None
        selected = torch.zeros(len(batch.trains), dtype=torch.bool)
        selected[slots] = chosen[gathered_places]
    return replace(batch, weights=weights, selected=selected)


def units_of(
    run: Run, batch: Batch, forests: Sequence[Forest], slots: IntArray, reduction: Function
) -> tuple[Units, IntArray]:
    """Find the row, trajectory, group and micro-batch of each target of all processes.

    Returns:
        The units with their totals, and the indices of this process's targets, `slots`, in them.
    """
    accelerator, here = run.accelerator, batch.responses.row_of(slots)
    num_here = np.bincount(here, minlength=len(batch.mini_batch))
    mini_batches = np.bincount(
        batch.mini_batch[here], minlength=int(batch.mini_batch.max(initial=0)) + 1
    )
    inside = over_processes(accelerator, mini_batches, "max")[batch.mini_batch] > 0
    is_elsewhere = inside & (batch.responses.lengths == 0)
    row = np.repeat(np.arange(len(inside)), np.where(is_elsewhere, batch.num_targets, num_here))
    gathered_places = np.flatnonzero(~is_elsewhere[row])
    (num_micro_batches,) = over_processes(accelerator, [len(forests)], "sum").tolist()
    micro_batch = np.zeros(len(row), np.int64)
    if "micro_batch" in reduction.inputs:
        number = np.zeros(len(batch.trains), np.int64)
        for index, forest in enumerate(forests):
            number[forest.target_slot.numpy()] = index * accelerator.num_processes
        number += accelerator.process_index
        (micro_batch,), gathered_places = of_all_processes(accelerator, here, [number[slots]])
        micro_batch = np.unique(micro_batch, return_inverse=True)[1]
    units = Units(
        row=row,
        num_rows=int(inside.sum()),
        trajectory=batch.trajectory[row],
        num_trajectories=len(np.unique(batch.trajectory[inside])),
        group=batch.group[row],
        num_groups=len(np.unique(batch.group[inside])),
        micro_batch=micro_batch,
        num_micro_batches=int(num_micro_batches),
    )
    return units, gathered_places


def policy_logprobs(
    run: Run,
    batch: Batch,
    forests: Sequence[Forest],
    policy: nn.Module | None = None,
    watch: Watch = iter,
) -> Tensor:
    """Compute log-probabilities of the targets of `forests` under a policy, without gradient.

    `forests` are this process's micro-batches, which `watch` counts. `policy` is that of the run by
    default; pass another model such as the reference.

    Returns:
        [T] float32 on the CPU; NaN at response tokens that are not targets of `forests`.
    """
    model = run.policy if policy is None else policy  # a compiled module has no truth value
    device = run.accelerator.device

    def logprobs(forest: Forest) -> Tensor:
        temperature = to_device(batch.temperature[forest.target_slot], device)
        outputs: tuple[Tensor, Tensor] = model(forest.to(device), temperature)
        return outputs[0]

    return _at_targets(run, batch, forests, logprobs, watch)


def critic_values(run: Run, batch: Batch, forests: Sequence[Forest], watch: Watch = iter) -> Tensor:
    """Compute the critic's values at the targets of `forests`, as `policy_logprobs` does."""
    critic, device = run.critic, run.accelerator.device
    assert critic is not None
    return _at_targets(run, batch, forests, lambda forest: critic(forest.to(device)), watch)


@torch.no_grad()
def _at_targets(
    run: Run,
    batch: Batch,
    forests: Sequence[Forest],
    forward: Callable[[Forest], Tensor],
    watch: Watch,
) -> Tensor:
    values = torch.full((len(batch.trains),), torch.nan)
    # Copied to the CPU while the next micro-batch is forwarded.
    parts = [
        (forest.target_slot, CopyToCpu({"values": forward(forest)}))
        for forest in watch(padded_forests(run.accelerator, forests))
    ]
    for slot, arriving in parts:
        values[slot] = arriving.read()["values"]
    return values
