"""The section `[loss]` of the configuration. docs/algorithms.md has the equations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rollout_io.configuration import Count, Fraction, NonNegative, Positive
from trainer.checks import check_settings
from trainer.config.functions import LOSS_REDUCTION, POLICY_LOSS, check_functions, inputs_of

KLEstimator = Literal["k1", "k2", "k3", "abs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The section `[loss]`: policy loss, reduction, correction for sampler mismatch, KL, entropy."""

    policy_loss_type: str = "regular"
    """Loss of a trained token: `regular` (PPO's clipped loss), `dual_clip`, `gspo`, `cispo`,
    `sapo`, `rollout_is`, `dppo`, `clip_cov`, `kl_cov`, `importance_sampling`, `cross_entropy`
    (supervised: ignores advantages), `distill` (towards a teacher's stored log-probabilities), or
    your own `module:function`: see docs/algorithms.md."""
    distill_type: Literal["reverse_kl", "cross_entropy"] = "reverse_kl"
    """distill: divergence from `teacher_logprobs`, over `teacher_token_ids`."""
    eps_clip_low: Fraction = 0.2
    """The lower clip bound of the probability ratio is 1 - `eps_clip_low`; in [0, 1]. Not used by
    cispo, dppo or sapo."""
    eps_clip_high: NonNegative = 0.2
    """The upper clip bound of the probability ratio is 1 + `eps_clip_high`; >= 0. Not used by
    cispo, dppo or sapo."""
    clip_ratio_c: Annotated[float, Meta(gt=1)] = 3.0
    """dual_clip: upper bound of the loss of a token with advantage A < 0, as a multiple of -A; >
    1."""
    cispo_eps_clip_low: Fraction = 1.0
    """cispo: the lower clip bound of the weight is 1 - `cispo_eps_clip_low`; in [0, 1]."""
    cispo_eps_clip_high: NonNegative = 4.0
    """cispo: the upper clip bound of the weight is 1 + `cispo_eps_clip_high`; >= 0."""
    cispo_anchor: Literal["old", "rollout"] = "old"
    """cispo: whether the weight is the ratio to `old_logprobs` or to `rollout_logprobs`."""
    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """dppo: divergence that decides which tokens are masked."""
    dppo_delta_low: NonNegative = 0.2
    """dppo: maximum divergence where the advantage is negative; >= 0. Use 0.05 for binary_kl."""
    dppo_delta_high: NonNegative = 0.2
    """dppo: maximum divergence where the advantage is positive; >= 0. Use 0.05 for binary_kl."""
    sapo_tau_pos: Positive = 1.0
    """sapo: temperature of the gate where the advantage is positive; > 0."""
    sapo_tau_neg: Positive = 1.05
    """sapo: temperature of the gate where the advantage is 0 or negative; > 0."""
    clip_cov_ratio: Fraction = 2e-4
    """clip_cov: fraction of the mini-batch's trained tokens to leave out of the loss; in [0, 1]."""
    clip_cov_lb: float = 1.0
    """clip_cov: only tokens with a covariance above this bound are candidates."""
    clip_cov_ub: float = 5.0
    """clip_cov: only tokens with a covariance below this bound are candidates; > `clip_cov_lb`."""
    kl_cov_frac: Fraction = 0.2
    """kl_cov: fraction of the mini-batch's trained tokens to penalise; in [0, 1]."""
    ppo_kl_coef: NonNegative = 1.0
    """kl_cov: weight of the penalty; >= 0."""

    reduction: str = "token_mean"
    """How the losses of tokens are reduced to one number: the mean over tokens (`token_mean`); the
    mean of the means per row (`sequence_mean`), per group (`prompt_mean`), per trajectory
    (`trajectory_mean`) or per micro-batch (`token_mean_legacy`, which therefore depends on
    `tokens_per_micro_batch`); the sum divided by the number of rows times `max_seq_len`
    (`seq_mean_token_sum_norm`); or your own `module:function`: see docs/algorithms.md."""
    max_seq_len: Count | None = None
    """seq_mean_token_sum_norm: constant that replaces the length of every row; >= 1."""

    tis_ratio_type: Literal["auto", "token", "sequence"] | None = "auto"
    """Importance weights that correct for sampler mismatch: the ratio of each token, or the product
    of ratios over the row; both need `rollout_logprobs`. auto: per token if the dataset has
    `rollout_logprobs`, unless the policy loss itself uses them. none: no weights."""
    token_tis_ratio_clip_high: Positive = 2.0
    """Maximum importance weight of a token; > 0."""
    sequence_tis_ratio_clip_high: Positive = 5.0
    """Maximum importance weight of a row; > 0."""
    sequence_mask_metric: Literal["geometric", "product"] | None = None
    """Leave out rows based on the geometric mean or the product of their importance ratios."""
    geo_mask_low: NonNegative = 0.99
    """Minimum geometric mean at which a row is kept; >= 0."""
    geo_mask_high: Positive = 1.01
    """Maximum geometric mean at which a row is kept."""
    product_mask_low: NonNegative = 0.5
    """Minimum product at which a row is kept; >= 0."""
    product_mask_high: Positive = 2.0
    """Maximum product at which a row is kept."""
    outlier_token_is_threshold_low: NonNegative | None = None
    """Leave out rows with a token whose importance ratio is below this bound; suggested: 1e-4."""
    outlier_token_is_threshold_high: Positive | None = None
    """Leave out rows with a token whose importance ratio is above this bound; suggested: 100."""
    token_mask_is_threshold_low: NonNegative | None = None
    """Leave out tokens whose importance ratio is below this bound. Requires `..._high`."""
    token_mask_is_threshold_high: Positive | None = None
    """Leave out tokens whose importance ratio is above this bound. Requires `..._low`."""
    allow_mismatched_logprobs: bool = False
    """Correct for mismatch even if `rollout_logprobs` are not from the sampled distribution."""

    kl_loss_coef: NonNegative = 0.0
    """Weight of the KL divergence from `reference_model` in the loss; >= 0. 0 disables it."""
    kl_reward_coef: NonNegative = 0.0
    """Weight of the KL divergence from `reference_model` in the reward; >= 0. 0 disables it."""
    kl_ctrl_type: Literal["fixed", "adaptive"] = "fixed"
    """Whether `kl_reward_coef` is constant, or adapts from batch to batch to reach `kl_target`."""
    kl_target: Positive = 0.1
    """adaptive: target divergence, nats per trained token; > 0."""
    kl_horizon: Count = 10000
    """adaptive: number of trajectories over which the coefficient may change by 20%; >= 1."""
    kl_estimator_type: KLEstimator = "k3"
    """Estimator of the KL divergence, in the loss and in the reward."""
    reference_model: str | None = None
    """Model directory of the frozen reference. None: `model.path` in its initial state."""
    entropy_loss_coef: NonNegative = 0.0
    """Weight of the entropy bonus in the loss; >= 0. 0 disables it."""

    value_clip: Positive | None = 0.2
    """gae: in the critic's loss, values are clipped to this distance from the old value; > 0. None:
    no clipping."""

    own: dict[str, Any] = field(default_factory=dict)
    """Table: parameters of your own loss and reduction, by name: `--set loss.own.KEY=VALUE`."""

    def __post_init__(self) -> None:
        check_functions(self, POLICY_LOSS, LOSS_REDUCTION)
        check_settings(self, "loss")

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the tensors that the policy loss uses."""
        inputs = inputs_of(POLICY_LOSS, self.policy_loss_type)
        if self.policy_loss_type == "cispo":
            unused = "old_logprobs" if self.cispo_anchor == "rollout" else "rollout_logprobs"
            return inputs - {unused}
        return inputs

    @property
    def has_own_loss(self) -> bool:
        """True if the policy loss is a user function."""
        return self.policy_loss_type not in POLICY_LOSS.built_in

    @property
    def is_supervised(self) -> bool:
        """True if the policy loss uses no advantages, so that no rewards are needed."""
        return "advantages" not in self.inputs

    @property
    def is_anchored_on_sampler(self) -> bool:
        """True if `rollout_logprobs` are an input of the policy loss."""
        return "rollout_logprobs" in self.inputs

    @property
    def reduction_inputs(self) -> frozenset[str]:
        """Names of the inputs of the reduction."""
        return inputs_of(LOSS_REDUCTION, self.reduction)

    @property
    def importance_weights(self) -> Literal["token", "sequence"] | None:
        """Resolved `tis_ratio_type` for data with `rollout_logprobs`."""
        if self.tis_ratio_type == "auto":
            return None if self.is_anchored_on_sampler else "token"
        return self.tis_ratio_type

    @property
    def masks_by_ratio(self) -> bool:
        """True if tokens or rows are left out based on their importance ratios."""
        thresholds = (
            self.outlier_token_is_threshold_low,
            self.outlier_token_is_threshold_high,
            self.token_mask_is_threshold_low,
        )
        return self.sequence_mask_metric is not None or any(t is not None for t in thresholds)

    @property
    def corrects_for_sampler(self) -> bool:
        """True if importance weights or masks are enabled and apply to the policy loss."""
        is_enabled = self.importance_weights is not None or self.masks_by_ratio
        return is_enabled and not self.is_supervised

    @property
    def needs_reference(self) -> bool:
        """True if a divergence from the reference is enabled."""
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0

    @property
    def selects_targets(self) -> bool:
        """True if the loss treats some targets of each mini-batch differently: see `covariance`."""
        return self.policy_loss_type in ("clip_cov", "kl_cov")

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss depends on `old_logprobs`."""
        return self.corrects_for_sampler or "old_logprobs" in self.inputs
