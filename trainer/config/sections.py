"""Sections of a training run's configuration; docs/algorithms.md has the equations of `[loss]`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rollout_io.configuration import Count, CountOrZero, Fraction, NonNegative, Positive
from schemas.errors import ConfigError
from trainer.checks import check_settings
from trainer.config.functions import (
    ADVANTAGE_ESTIMATOR,
    LOSS_REDUCTION,
    POLICY_LOSS,
    check_functions,
    inputs_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The section `[data]`: the dataset, and which of its trajectories train."""

    dataset: str = ""
    """Required. Rollout dataset: a directory, a glob or one Parquet file, local or on any filesystem that
    fsspec supports (`s3://...`)."""
    reward: str | None = None
    """Reward version to train on, made by `rollouts rescore`. None: the dataset's own rewards."""
    allow_other_tokenizer: bool = False
    """Train even if the model's tokenizer does not match the dataset's tokenizer fingerprint."""
    outcome: Literal["last", "sum"] | None = None
    """Return of a trajectory: the reward of its last step, or the sum over its steps. None: as the
    dataset specifies, else `last`. Token-level estimators use the rewards of every step in either
    case."""
    sampling_defaults: Literal["model", "neutral"] | None = None
    """Settings with which an engine sampled rows that do not record their `temperature`, `top_p` or
    `top_k`: those in the model's `generation_config.json`, which vLLM and SGLang use (`model`), or
    temperature 1 without truncation (`neutral`). None: neutral if that file says the same or does
    not exist, after a note; otherwise the run is rejected."""
    failed: Literal["group", "trajectory"] = "group"
    """Whether a failed trajectory masks its entire group, or only itself."""
    group_size: Count | None = None
    """Expected number of trajectories per group; >= 1. None: the size of the largest group."""
    partial_groups: Literal["refuse", "mask", "train"] = "refuse"
    """What to do with a group whose size (including failed trajectories) differs from `group_size`:
    reject the run, mask the group, or train on it after a warning. Applies only to estimators that
    compare the trajectories of a group (grpo, rloo, maxrl, gdpo)."""
    pictures: Literal["show", "text"] = "show"
    """Whether to show the model the pictures of a row, as in sampling (`show`), or to train on the
    tokens alone (`text`). The run is rejected if a picture cannot be shown."""
    drop_zero_variance_groups: bool = False
    """Leave out groups of two or more trajectories with equal returns, before batches are
    planned."""
    mask_zero_variance_groups: bool = False
    """Mask these groups instead: they keep their place in batches, but none of their tokens trains."""

    def __post_init__(self) -> None:
        check_settings(self, "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The section `[batch]`: how many groups share a pass and a step, and how rows are forwarded."""

    groups_per_batch: Count = 8
    """Groups that share one `old_logprobs` pass; >= 1."""
    groups_per_mini_batch: Count = 8
    """Groups per optimizer step; >= 1, divides `groups_per_batch`."""
    epochs_per_batch: Count = 1
    """Passes over the mini-batches of each batch; >= 1."""
    num_epochs: Count = 1
    """Passes over the dataset; >= 1."""
    max_updates: Count | None = None
    """Maximum number of optimizer steps; >= 1. None: no limit."""
    sequence_layout: Literal["step", "merge", "tree"] = "merge"
    """How steps are forwarded: each separately (`step`); merged into one row if they continue each
    other (`merge`); or as a tree that forwards each distinct token once, with the same results as
    `step` (`tree`)."""
    merge_rule: Literal["lineage", "consecutive", "keep"] | None = None
    """merge: which steps to merge (docs/merging.md). `consecutive` is SkyRL's rule; `keep`
    trains on the dataset's rows unchanged. None: `keep` if the dataset was merged, else
    `lineage`."""
    tree_scope: Literal["trajectory", "group"] = "group"
    """tree: whether steps share tokens within a trajectory or within a group."""
    tokens_per_micro_batch: Count = 2048
    """Maximum number of tokens in one forward pass; >= 1. It determines memory use. On a
    CPU it has little effect on speed; a GPU needs 16,384 or more to be busy. A longer row is
    forwarded in a separate pass."""
    max_row_tokens: Count | None = None
    """Maximum length of a row; >= 1. Tokens beyond it are not trained on, and such rows are
    counted (`num_truncated_rows`). None: rows longer than the model's context are rejected."""
    replay_routing: bool = True
    """Mixture-of-experts models use the experts recorded in the dataset (`rollout_expert_indices`,
    R3); false ignores them."""

    def __post_init__(self) -> None:
        check_settings(self, "batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """The section `[advantage]`: how advantages are estimated."""

    estimator: str = "grpo"
    """How advantages are estimated: per trajectory, from its return (`grpo`, `rloo`, `maxrl`), or
    from several rewards (`gdpo`); per token, from the reward of each step (`reinforce++`, `gae`); or
    by your own `module:function`: see docs/algorithms.md."""
    normalize_by_std: bool = True
    """GRPO: whether to divide by the group's standard deviation, or only subtract the group's mean."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """gdpo: table of the rewards to normalise separately, each with its weight:
    `--set advantage.reward_weights.NAME=1`. A name is a reward version of the dataset (`rollouts
    rescore`), or else an environment metric (`metrics`), of the last step that has it."""
    batch_normalize: bool | None = None
    """Normalise the advantages of each batch's trained tokens to mean 0 and variance 1. None: true for
    gdpo."""
    gamma: Fraction = 1.0
    """reinforce++ and gae: discount per trained token; in [0, 1]."""
    gae_lambda: Fraction = 1.0
    """gae: the estimator's lambda, from 0 (one-step differences) to 1 (returns minus values)."""
    own: dict[str, Any] = field(default_factory=dict)
    """Table: parameters of your own estimator, by name: `--set advantage.own.KEY=VALUE`."""

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the arrays that the estimator takes."""
        return inputs_of(ADVANTAGE_ESTIMATOR, self.estimator)

    @property
    def by_token(self) -> bool:
        """True if advantages are estimated per token, from the rewards of every step."""
        return "rewards" in self.inputs

    @property
    def needs_critic(self) -> bool:
        """True if the estimator uses values of a critic."""
        return "values" in self.inputs

    @property
    def separate_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that the estimator takes separately; empty for other estimators."""
        return tuple(self.reward_weights) if "separate_rewards" in self.inputs else ()

    @property
    def normalizes_batch(self) -> bool:
        """Resolved `batch_normalize`."""
        return self.estimator == "gdpo" if self.batch_normalize is None else self.batch_normalize

    def __post_init__(self) -> None:
        check_functions(self, ADVANTAGE_ESTIMATOR)
        check_settings(self, "advantage")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The section `[model]`: the policy, its adapters, and the critic's start."""

    path: str = ""
    """Required. Hugging Face model directory to start from (`config.json` and safetensors)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the forward pass; weights and optimizer state are float32 either way. None:
    bfloat16 on a CUDA device, where float32 takes many times as long, and float32 on a CPU."""
    float32_head: bool = False
    """Compute the logits of the policy and the reference in float32 also with dtype=bfloat16: closer
    to a sampler that does so, for more time and memory (4 bytes per logit instead of 2)."""
    compile_layers: bool | None = None
    """Compile the layers of the policy with torch.compile: 1.6 times as fast on an H100, after 20
    seconds of compilation. None: true on a CUDA device, unless Transformers cannot recompute the
    model's layers."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, more time. Compiled layers
    keep the output of attention, which costs the most to recompute."""
    logprob_chunk_tokens: Count = 1024
    """Number of target tokens whose logits are in memory at once; >= 1."""
    lora_rank: Count | None = None
    """Rank of LoRA adapters, which are then trained instead of the policy's weights; >= 1. None: no
    adapters. The critic's weights are trained in either case."""
    lora_alpha: Count = 16
    """The adapters' output is multiplied by `lora_alpha` / `lora_rank`; >= 1."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names, or suffixes of names, of the linear layers that get an adapter. None: all except the
    head; in mixture-of-experts models, only the attention layers."""
    critic_model: str | None = None
    """gae: model directory to initialise the critic from; a checkpoint's `critic/` includes a value
    head. None: `path`, with a value head of zeros."""

    def __post_init__(self) -> None:
        check_settings(self, "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The section `[optimizer]`: optimizers and learning rates."""

    algorithm: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW from torch, or from bitsandbytes with 8-bit moments; also for the critic."""
    learning_rate: Positive | None = None
    """Peak learning rate of the policy; > 0. None: the usual rate of the method: 1e-6 for RL, 2e-5
    for imitation (`cross_entropy`, `distill`), and ten times as much with LoRA."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warmup: constant, or decaying to 0 over the planned updates; also for
    the critic."""
    warmup_updates: CountOrZero = 0
    """Updates over which the learning rate rises linearly; >= 0."""
    weight_decay: NonNegative = 1e-2
    """AdamW's decoupled weight decay; >= 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW decay rates of the two moments; in [0, 1)."""
    max_grad_norm: Positive = 1.0
    """Maximum L2 norm of the gradient; larger gradients are scaled down to it; > 0."""
    critic_learning_rate: Positive = 5e-6
    """gae: peak learning rate of the critic; > 0. Its optimizer otherwise uses the policy's
    settings."""

    def __post_init__(self) -> None:
        check_settings(self, "optimizer")


SAMPLE_TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Trackers that take the texts of `run.log_samples`."""
SAMPLE_CHARS = 2_000
"""Maximum length of each text of `run.log_samples`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The section `[run]`: where a run writes, and what."""

    out: str = ""
    """Required. Local directory of the run; must not contain a run, unless that run is resumed."""
    seed: CountOrZero = 0
    """Seed of torch, NumPy and random; from 0 to 2^32 - 1."""
    save_every_updates: Count | None = 100
    """Optimizer steps between checkpoints; >= 1. A checkpoint is also saved at the end, and if
    SIGINT (Ctrl-C) or SIGTERM stops the run. None: no other checkpoints."""
    keep_checkpoints: Count | None = None
    """Number of checkpoints to keep, newest first; >= 1. None: all."""
    record_tokens: Literal["none", "sampled", "all"] = "sampled"
    """Which tokens of each update are recorded in `OUT/tokens/` (docs/training.md): none; the tokens
    of 4 groups, chosen by `seed` and `global_step` (`sampled`); or all."""
    trackers: tuple[str, ...] = ()
    """Accelerate trackers that also receive the metrics, such as `tensorboard`."""
    log_samples: CountOrZero = 0
    """Number of trajectories of each update whose last step the trackers receive as text
    (`tensorboard`, `wandb`, `mlflow`): up to 2,000 characters of its prompt and of its response,
    without credentials."""

    def __post_init__(self) -> None:
        check_settings(self, "run")
        if self.log_samples and not {*SAMPLE_TRACKERS} & {*self.trackers}:
            finding, names = "no tracker that takes text", ", ".join(SAMPLE_TRACKERS)
            hint = "set run.trackers, or leave run.log_samples at 0"
            raise ConfigError("config_value", "run.log_samples", finding, f"one of {names}", hint)


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
