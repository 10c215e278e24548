"""Apply the configured policy loss to the targets of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.losses.correction import CorrectionSettings
from trainer.algorithms.losses.covariance import (
    ClipCovSettings,
    covariances,
    kl_cov_selection,
    selected_by_clip_cov,
)
from trainer.algorithms.losses.policy import TokenLoss
from trainer.algorithms.own_functions import call_own, refused
from trainer.config.function_keys import BoundFunction
from trainer.config.functions import Function
from trainer.config.loss_config import KLEstimator


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """M targets of complete rows, all on one device.

    Attributes:
        logprobs: [M] nats under the current policy, with gradient.
        old_logprobs: [M] nats under the policy at the start of the batch.
        rollout_logprobs: [M] nats under the sampler's policy; NaN where unknown.
        advantages: [M].
        row: [M] int64 row of each target, 0..R-1.
        selected: [M] bool, targets that clip_cov leaves out or kl_cov penalises.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    selected: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss of a mini-batch, as `trainer.run.update` computes it.

    Attributes:
        policy_loss: Function named by `policy_loss_type`.
        reduction: Function named by `loss_reduction`.
        needs_old_logprobs: Whether the loss depends on `old_logprobs`.
        selection: Settings of clip_cov's selection of targets, or the fraction of targets that
            kl_cov selects; None for other losses.
        correction: Corrections for sampler mismatch; None: no correction.
        kl_estimator: Estimator of the KL divergence from the reference.
        kl_coef: Weight of the KL divergence.
        entropy_coef: Weight of the entropy bonus.
    """

    policy_loss: BoundFunction
    reduction: BoundFunction
    needs_old_logprobs: bool
    selection: ClipCovSettings | float | None
    correction: CorrectionSettings | None
    kl_estimator: KLEstimator
    kl_coef: float
    entropy_coef: float


def select(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selection: ClipCovSettings | float,
) -> Tensor:
    """Select the targets that clip_cov leaves out or kl_cov penalises ([M] bool)."""
    if isinstance(selection, ClipCovSettings):
        return selected_by_clip_cov(logprobs, old_logprobs, advantages, selection)
    return kl_cov_selection(covariances(advantages, logprobs), fraction=selection)


def policy_loss(t: Targets, loss: BoundFunction) -> TokenLoss:
    """Compute the loss per target with `policy_loss_type`, neither reduced nor corrected.

    Raises:
        InputError: A user's loss fails, or its result is invalid.
    """
    function = loss.function
    given = {name: getattr(t, name) for name in function.inputs} | loss.keys
    if not function.is_own:
        found: TokenLoss = function.call(**given)
        return found
    if not len(t.logprobs):
        return TokenLoss(t.logprobs, torch.zeros_like(t.logprobs, dtype=torch.bool))
    return _checked(function, call_own(function, given), t.logprobs)


def _checked(function: Function, found: Any, logprobs: Tensor) -> TokenLoss:
    """Check that a user's loss returned one finite number per target, with gradient."""
    losses, clipped, metrics = found if isinstance(found, TokenLoss) else (found, None, {})
    num = len(logprobs)
    expected = f"a tensor of shape [{num}] and dtype {logprobs.dtype} with the loss of each target,"
    expected += " or a TokenLoss"
    is_scalar = isinstance(losses, Tensor) and losses.dim() == 0
    hint = "return one loss per target; loss_reduction reduces the losses" if is_scalar else None
    _check_tensor(function, "", losses, logprobs, expected, hint, dtype=logprobs.dtype)
    if logprobs.requires_grad and not losses.requires_grad:
        raise refused(function, "losses without a gradient", "losses computed from `logprobs`")
    if clipped is None:
        clipped = torch.zeros_like(logprobs, dtype=torch.bool)
    expected = f"a tensor of shape [{num}] and dtype torch.bool"
    _check_tensor(function, "clipped", clipped, logprobs, expected, dtype=torch.bool)
    if not isinstance(metrics, Mapping):
        raise refused(
            function,
            f"a value of type {type(metrics).__name__}",
            "a mapping from names to tensors",
            part="metrics",
        )
    for name, values in metrics.items():
        expected = f"a finite tensor of shape [{num}], whose mean over the mini-batch is reported"
        _check_tensor(function, f"metrics[{name!r}]", values, logprobs, expected)
    named = {f"policy_loss/{name}": values for name, values in metrics.items()}
    return TokenLoss(losses, clipped, named)


def _check_tensor(
    function: Function,
    part: str,
    found: Any,
    logprobs: Tensor,
    expected: str,
    hint: str | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    if not isinstance(found, Tensor):
        got = f"a value of type {type(found).__name__}"
        raise refused(function, got, expected, hint, part=part)
    shape, device = list(found.shape), logprobs.device
    if found.shape != logprobs.shape or (dtype and found.dtype != dtype):
        got = f"a tensor of shape {shape} and dtype {found.dtype}"
        raise refused(function, got, expected, hint, part=part)
    if found.device != device:
        got, expected = f"a tensor on {found.device}", f"a tensor on {device}"
        raise refused(function, got, expected, part=part)
    found, logprobs = found.detach(), logprobs.detach()
    finite = found.isfinite()
    if not finite.all():
        first = int(finite.logical_not().nonzero()[0])
        got = f"{float(found[first])} at target {first}, whose log-probability is"
        got += f" {float(logprobs[first]):.4g}"
        raise refused(function, got, "finite numbers", part=part)
