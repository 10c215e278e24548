"""Sections of a training run's configuration. The section `[loss]` is in `loss_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_io.configuration import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
)
from schemas.errors import ConfigError
from trainer.checks import check_settings
from trainer.config.functions import ADVANTAGE_ESTIMATOR, check_functions, inputs_of


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
