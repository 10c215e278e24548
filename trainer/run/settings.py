"""Settings of each part of a run, extracted from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.metadata import Outcome
from trainer.algorithms.losses.correction import UNBOUNDED, CorrectionSettings
from trainer.algorithms.losses.covariance import ClipCovSettings
from trainer.algorithms.objective import Objective
from trainer.batches.packing import Packing
from trainer.batches.plan import Passes, PlanSettings
from trainer.config.function_keys import BoundFunction, bind
from trainer.config.functions import ADVANTAGE_ESTIMATOR, LOSS_REDUCTION, POLICY_LOSS
from trainer.config.loss_config import LossConfig
from trainer.config.train_config import TrainConfig
from trainer.models.lora import AdapterSettings
from trainer.models.optimizer import OptimizerSettings, RateSchedule
from trainer.run.batch_advantages import Estimation
from trainer.run.kl_reward import KlReward


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Settings for reading and packing a run's batches, and for estimating their advantages.

    Attributes:
        outcome: Return of a trajectory: its last reward, or the sum of its rewards.
        passes: Passes over the dataset and over each batch.
        packing: Reading and packing of rows.
        estimation: Estimation of advantages.
        kl_reward: KL divergence in the reward; None: disabled.
    """

    outcome: Outcome
    passes: Passes
    packing: Packing
    estimation: Estimation
    kl_reward: KlReward | None


def batch_settings(config: TrainConfig) -> BatchSettings:
    """Extract the settings of batches; `outcome` and `merge_rule` must not be None."""
    return BatchSettings(
        outcome=config.outcome or "last",
        passes=Passes(
            num_epochs=config.num_epochs,
            epochs_per_batch=config.epochs_per_batch,
            groups_per_mini_batch=config.groups_per_mini_batch,
            max_updates=config.max_updates,
        ),
        packing=packing_of(config),
        estimation=estimation_of(config),
        kl_reward=kl_reward_of(config) if config.kl_reward_coef else None,
    )


def plan_settings(config: TrainConfig) -> PlanSettings:
    """Extract the settings that `make_plan` needs."""
    return PlanSettings(
        needs_outcomes=not config.is_supervised,
        compares_groups=config.compares_groups,
        estimator=None if config.is_supervised else _trajectory_estimator(config),
        failed=config.failed,
        group_size=config.group_size,
        partial_groups=config.partial_groups,
        drop_zero_variance_groups=config.drop_zero_variance_groups,
        groups_per_batch=config.groups_per_batch,
        groups_per_mini_batch=config.groups_per_mini_batch,
    )


def packing_of(config: TrainConfig) -> Packing:
    """Extract the settings for reading and packing rows."""
    return Packing(
        sequence_layout=config.sequence_layout,
        merge_rule=config.merge_rule,
        tree_scope=config.tree_scope,
        tokens_per_micro_batch=config.tokens_per_micro_batch,
        max_row_tokens=config.max_row_tokens,
        replay_routing=config.replay_routing,
    )


def estimation_of(config: TrainConfig) -> Estimation:
    """Extract the settings for estimating a batch's advantages."""
    return Estimation(
        estimator=bind(ADVANTAGE_ESTIMATOR, config) if config.estimates_by_token else None,
        batch_normalize=config.advantage_batch_normalize,
        is_supervised=config.is_supervised,
    )


def kl_reward_of(config: TrainConfig) -> KlReward:
    """Extract the settings for subtracting the KL divergence from rewards."""
    return KlReward(
        kl_estimator=config.kl_estimator_type,
        estimator=_trajectory_estimator(config),
        target=config.kl_target if config.kl_ctrl_type == "adaptive" else None,
        horizon=config.kl_horizon,
    )


def optimizer_settings(config: TrainConfig) -> OptimizerSettings:
    """Extract the settings that all optimizers share."""
    return OptimizerSettings(
        optimizer=config.optimizer, betas=config.betas, weight_decay=config.weight_decay
    )


def rate_schedule(config: TrainConfig, num_planned: int) -> RateSchedule:
    """Build the learning-rate schedule for a number of planned updates."""
    return RateSchedule(
        kind=config.learning_rate_schedule,
        warmup_updates=config.warmup_updates,
        num_planned=num_planned,
    )


def adapter_settings(config: TrainConfig) -> AdapterSettings:
    """Extract the settings of adapters; `lora_rank` must be set."""
    assert config.lora_rank is not None
    return AdapterSettings(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=config.lora_target_modules,
        model=config.model,
    )


def objective_of(config: LossConfig, *, corrects: bool) -> Objective:
    """Build the objective; `corrects` enables importance weights and masks."""
    selection: ClipCovSettings | float | None = None
    if config.policy_loss_type == "kl_cov":
        selection = config.kl_cov_frac
    elif config.policy_loss_type == "clip_cov":
        selection = ClipCovSettings(
            ratio=config.clip_cov_ratio,
            low=config.clip_cov_lb,
            high=config.clip_cov_ub,
            eps_clip_low=config.eps_clip_low,
            eps_clip_high=config.eps_clip_high,
        )
    return Objective(
        policy_loss=bind(POLICY_LOSS, config),
        reduction=bind(LOSS_REDUCTION, config),
        needs_old_logprobs=config.needs_old_logprobs,
        selection=selection,
        correction=correction_of(config) if corrects else None,
        kl_estimator=config.kl_estimator_type,
        kl_coef=config.kl_loss_coef,
        entropy_coef=config.entropy_loss_coef,
    )


def correction_of(config: LossConfig) -> CorrectionSettings:
    """Extract the settings of the corrections for sampler mismatch."""
    by_token = config.importance_weights == "token"
    caps = config.token_tis_ratio_clip_high, config.sequence_tis_ratio_clip_high
    rows = {
        None: UNBOUNDED,
        "geometric": (config.geo_mask_low, config.geo_mask_high),
        "product": (config.product_mask_low, config.product_mask_high),
    }
    return CorrectionSettings(
        weights=config.importance_weights,
        max_weight=caps[0] if by_token else caps[1],
        outliers=(config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high),
        tokens=(config.token_mask_is_threshold_low, config.token_mask_is_threshold_high),
        row_metric=config.sequence_mask_metric,
        rows=rows[config.sequence_mask_metric],
    )


def _trajectory_estimator(config: TrainConfig) -> BoundFunction | None:
    """Bind the estimator if it takes returns; return None if it takes token rewards."""
    return None if config.estimates_by_token else bind(ADVANTAGE_ESTIMATOR, config)
