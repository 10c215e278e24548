"""The keys of a run's configuration that say what is minimised. docs/algorithms.md has the equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

PolicyLoss = Literal[
    "regular",
    "dual_clip",
    "gspo",
    "cispo",
    "sapo",
    "rollout_is",
    "dppo",
    "clip_cov",
    "kl_cov",
    "importance_sampling",
    "cross_entropy",
]
Reduction = Literal[
    "token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "trajectory_mean"
]
KLEstimator = Literal["k1", "k2", "k3", "abs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Policy loss, its reduction, correction for the sampler, KL and entropy."""

    policy_loss_type: PolicyLoss = "regular"
    """The loss of a trained token; `regular` is PPO's clipped one. `cross_entropy` is supervised:
    advantages are not used."""
    eps_clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - this; in [0, 1]. Not of cispo, dppo, sapo."""
    eps_clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + this; >= 0. Not of cispo, dppo, sapo."""
    clip_ratio_c: float = 3.0
    """dual_clip: the loss of a token with advantage A < 0 is at most -A times this; > 1."""
    cispo_eps_clip_low: float = 1.0
    """cispo: the weight is clipped below at 1 - this; in [0, 1]."""
    cispo_eps_clip_high: float = 4.0
    """cispo: the weight is clipped above at 1 + this; >= 0."""
    cispo_anchor: Literal["old", "rollout"] = "old"
    """cispo: the weight is the ratio to `old_logprobs`, or to `rollout_logprobs`."""
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: the divergence whose size masks a token."""
    dppo_delta_low: float = 0.2
    """dppo: the largest divergence where the advantage is negative; >= 0. For binary_kl: 0.05."""
    dppo_delta_high: float = 0.2
    """dppo: the largest divergence where the advantage is positive; >= 0. For binary_kl: 0.05."""
    sapo_tau_pos: float = 1.0
    """sapo: temperature of the gate where the advantage is positive; > 0."""
    sapo_tau_neg: float = 1.05
    """sapo: temperature of the gate where it is not; > 0."""
    clip_cov_ratio: float = 2e-4
    """clip_cov: fraction of the mini-batch's trained tokens that lose their gradient; in [0, 1]."""
    clip_cov_lb: float = 1.0
    """clip_cov: covariance above which a token is a candidate."""
    clip_cov_ub: float = 5.0
    """clip_cov: covariance below which it is; above `clip_cov_lb`."""
    kl_cov_frac: float = 0.2
    """kl_cov: fraction of the mini-batch's trained tokens that are penalised; in [0, 1]."""
    ppo_kl_coef: float = 1.0
    """kl_cov: weight of the penalty; >= 0."""

    loss_reduction: Reduction = "token_mean"
    """How the tokens' losses become one number: a mean over tokens, over rows of their means
    (sequence_mean), over groups of theirs (prompt_mean), over trajectories of theirs
    (trajectory_mean), or a sum over rows times `max_seq_len` (seq_mean_token_sum_norm)."""
    max_seq_len: int | None = None
    """seq_mean_token_sum_norm: the constant length that stands for every row's; >= 1."""

    tis_ratio_type: Literal["auto", "token", "sequence"] | None = "auto"
    """Importance weights that correct for the sampler: a token's own, or the product over its row;
    both need `rollout_logprobs`. auto: a token's own where the dataset has `rollout_logprobs`, unless
    the policy loss has the ratio to them itself. none: no weights."""
    token_tis_ratio_clip_high: float = 2.0
    """Cap of a token's importance weight; > 0."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Cap of a row's importance weight; > 0."""
    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Leave out rows by the geometric mean, or the product, of their tokens' importance ratios."""
    geo_mask_low: float = 0.99
    """The least geometric mean that is kept; >= 0."""
    geo_mask_high: float = 1.01
    """The greatest geometric mean that is kept."""
    product_mask_low: float = 0.5
    """The least product that is kept; >= 0."""
    product_mask_high: float = 2.0
    """The greatest product that is kept."""
    outlier_token_is_threshold_low: float | None = None
    """Leave out rows with a token whose importance ratio is below; suggested: 1e-4."""
    outlier_token_is_threshold_high: float | None = None
    """Leave out rows with a token whose importance ratio is above; suggested: 100."""
    token_mask_is_threshold_low: float | None = None
    """Leave out tokens whose importance ratio is below. Goes with `..._high`."""
    token_mask_is_threshold_high: float | None = None
    """Leave out tokens whose importance ratio is above. Goes with `..._low`."""
    allow_mismatched_logprobs: bool = False
    """Correct even if `rollout_logprobs` are not those of the distribution that was sampled."""

    kl_loss_coef: float = 0.0
    """Weight of the KL divergence from `reference_model` in the loss; >= 0. 0: no such term."""
    kl_reward_coef: float = 0.0
    """Weight of that divergence in the reward instead; >= 0. 0: no such term."""
    kl_ctrl_type: Literal["fixed", "adaptive"] = "fixed"
    """Whether `kl_reward_coef` stays, or goes from batch to batch after `kl_target`."""
    kl_target: float = 0.1
    """adaptive: the divergence to keep, nats per trained token; > 0."""
    kl_horizon: int = 10000
    """adaptive: trajectories over which the coefficient may change by a fifth; >= 1."""
    kl_estimator_type: KLEstimator = "k3"
    """Estimator of that divergence at a sampled token, in the loss and in the reward."""
    reference_model: str | None = None
    """Model directory of the frozen reference. None: `model`, as it was at the start."""
    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus in the loss; >= 0. 0: no such term."""

    @property
    def is_anchored_on_sampler(self) -> bool:
        """Whether the policy loss itself has the ratio to `rollout_logprobs`."""
        on_rollout = self.policy_loss_type == "cispo" and self.cispo_anchor == "rollout"
        return self.policy_loss_type in {"rollout_is", "dppo"} or on_rollout

    @property
    def importance_weights(self) -> Literal["token", "sequence"] | None:
        """What `tis_ratio_type` comes to where there are `rollout_logprobs`."""
        if self.tis_ratio_type == "auto":
            return None if self.is_anchored_on_sampler else "token"
        return self.tis_ratio_type

    @property
    def masks_by_ratio(self) -> bool:
        """Whether tokens or rows are left out by their importance ratios."""
        thresholds = (
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
            self.token_mask_is_threshold_low,
        )
        return self.sequence_mask_metric is not None or any(t is not None for t in thresholds)

    @property
    def corrects_for_sampler(self) -> bool:
        """Whether importance weights or masks are asked for, and the policy loss takes them."""
        asked = self.importance_weights is not None or self.masks_by_ratio
        return asked and self.policy_loss_type != "cross_entropy"

    @property
    def needs_reference(self) -> bool:
        """Whether a divergence from the reference is asked for."""
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the loss is one that `old_logprobs` enter."""
        anchored = self.is_anchored_on_sampler or self.policy_loss_type == "cross_entropy"
        return self.corrects_for_sampler or not anchored


AT_LEAST_0 = (
    "eps_clip_low", "eps_clip_high", "cispo_eps_clip_low", "cispo_eps_clip_high", "dppo_delta_low",
    "dppo_delta_high", "clip_cov_ratio", "kl_cov_frac", "ppo_kl_coef", "geo_mask_low",
    "product_mask_low", "outlier_token_is_threshold_low", "token_mask_is_threshold_low",
    "kl_loss_coef", "kl_reward_coef", "entropy_loss_coef",
)  # fmt: skip
ABOVE_0 = (
    "sapo_tau_pos", "sapo_tau_neg", "token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high",
    "geo_mask_high", "product_mask_high", "outlier_token_is_threshold_high",
    "token_mask_is_threshold_high", "max_seq_len", "kl_target", "kl_horizon",
)  # fmt: skip
AT_MOST_1 = ("eps_clip_low", "cispo_eps_clip_low", "clip_cov_ratio", "kl_cov_frac")
IN_ORDER = (
    ("geo_mask_low", "geo_mask_high"),
    ("product_mask_low", "product_mask_high"),
    ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
    ("clip_cov_lb", "clip_cov_ub"),
)
RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (AT_LEAST_0, lambda value: 0 <= value < float("inf"), "a finite number >= 0"),
    (ABOVE_0, lambda value: 0 < value < float("inf"), "a finite number > 0"),
    (AT_MOST_1, lambda value: value <= 1, "at most 1"),
    (("clip_ratio_c",), lambda value: 1 < value < float("inf"), "a finite number > 1"),
)


def loss_breaches(c: LossConfig) -> Iterator[tuple[str, str, str]]:
    """(key, value, what is expected) of each value that is out of range or contradicts another."""
    for keys, allowed, expected in RANGES:
        for key in keys:
            value = getattr(c, key)
            if value is not None and not allowed(value):
                yield key, str(value), expected
    for low, high in IN_ORDER:
        values = getattr(c, low), getattr(c, high)
        if None not in values and not values[0] < values[1]:
            yield f"{low} and {high}", f"{values[0]} and {values[1]}", "the first to be smaller"
    yield from _contradictions(c)


def _contradictions(c: LossConfig) -> Iterator[tuple[str, str, str]]:
    low, high = c.token_mask_is_threshold_low, c.token_mask_is_threshold_high
    if (low is None) != (high is None):
        keys = "token_mask_is_threshold_low and token_mask_is_threshold_high"
        yield keys, f"{low} and {high}", "both or none"
    if c.loss_reduction == "seq_mean_token_sum_norm" and c.max_seq_len is None:
        yield "max_seq_len", "none", "a length, for loss_reduction is seq_mean_token_sum_norm"
    if c.is_anchored_on_sampler and c.importance_weights is not None:
        expected = (
            f"tis_ratio_type to be auto or none: the ratio of {c.policy_loss_type} is to rollout_logprobs"
            " already, and importance weights would correct twice"
        )
        yield "policy_loss_type and tis_ratio_type", f"{c.tis_ratio_type}", expected
    if c.policy_loss_type == "cross_entropy" and c.masks_by_ratio:
        expected = "no masks by importance ratios: cross_entropy has none"
        yield "policy_loss_type", c.policy_loss_type, expected
    if c.reference_model is not None and not c.needs_reference:
        expected = "kl_loss_coef or kl_reward_coef above 0"
        yield "reference_model", c.reference_model, expected
    if c.kl_loss_coef and c.kl_reward_coef:
        coefs = f"{c.kl_loss_coef} and {c.kl_reward_coef}"
        yield "kl_loss_coef and kl_reward_coef", coefs, "one of them to be 0"
    if c.policy_loss_type == "cross_entropy" and c.kl_reward_coef:
        yield "kl_reward_coef", f"{c.kl_reward_coef}", "0: cross_entropy uses no rewards"
