"""The policy loss that a configuration names, on the targets of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from torch import Tensor

from trainer.loss_config import LossConfig
from trainer.losses import policy
from trainer.losses.covariance import clip_cov, kl_cov
from trainer.losses.policy import TokenLoss
from trainer.losses.ratios import probability_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """M targets of whole rows, all on one device.

    Attributes:
        logprobs: [M] of the policy now, with gradient.
        old_logprobs: [M] of the policy at the batch's start.
        rollout_logprobs: [M] of the sampler; NaN where unknown.
        advantages: [M].
        row: [M] int64 row of each target, 0..R-1.
        selected: [M] bool, what clip_cov leaves out or kl_cov penalises.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    row: Tensor
    selected: Tensor


def policy_loss(t: Targets, c: LossConfig) -> TokenLoss:
    """Loss per target, not reduced, not corrected for the sampler; see `trainer.losses.policy`."""
    now, old, rollout, advantages = t.logprobs, t.old_logprobs, t.rollout_logprobs, t.advantages
    clip = {"eps_clip_low": c.eps_clip_low, "eps_clip_high": c.eps_clip_high}
    wide = {"eps_clip_low": c.cispo_eps_clip_low, "eps_clip_high": c.cispo_eps_clip_high}
    delta = {"delta_low": c.dppo_delta_low, "delta_high": c.dppo_delta_high}
    match c.policy_loss_type:
        case "regular":
            return policy.regular(now, old, advantages, **clip)
        case "dual_clip":
            return policy.dual_clip(now, old, advantages, clip_ratio_c=c.clip_ratio_c, **clip)
        case "gspo":
            return policy.gspo(now, old, advantages, t.row, **clip)
        case "cispo":
            anchor = rollout if c.cispo_anchor == "rollout" else old
            return policy.cispo(now, anchor, advantages, **wide)
        case "sapo":
            tau = {"tau_pos": c.sapo_tau_pos, "tau_neg": c.sapo_tau_neg}
            return policy.sapo(now, old, advantages, **tau)
        case "rollout_is":
            return policy.rollout_is(now, rollout, advantages, **clip)
        case "dppo":
            return policy.dppo(now, rollout, advantages, divergence=c.dppo_type, **delta)
        case "clip_cov":
            return clip_cov(now, old, advantages, t.selected, **clip)
        case "kl_cov":
            return kl_cov(now, old, advantages, t.selected, coef=c.ppo_kl_coef)
        case "importance_sampling":
            return policy.importance_sampling(now, old, advantages)
        case "cross_entropy":
            return policy.cross_entropy(now)
        case unknown:
            assert_never(unknown)


def ratio_metrics(t: Targets, c: LossConfig) -> dict[str, Tensor]:
    """[M] by metric, without gradient: the ratio that is the weight of a target, where it is one."""
    if c.policy_loss_type == "importance_sampling":
        return {"importance_ratio": probability_ratio(t.logprobs, t.old_logprobs).detach()}
    if c.policy_loss_type != "cispo":
        return {}
    anchor = t.rollout_logprobs if c.cispo_anchor == "rollout" else t.old_logprobs
    ratio = probability_ratio(t.logprobs, anchor).detach()
    clamped = ratio.clamp(1 - c.cispo_eps_clip_low, 1 + c.cispo_eps_clip_high)
    return {"cispo/ratio": ratio, "cispo/ratio_clamped_mean": clamped}
