"""Configuration of a training run: read from TOML, overridden by `key=value`, and checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout_io.configuration import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    load_record,
    out_of_bounds,
    read_toml,
)
from rollout_io.dataset.atomic_files import replace_text
from schemas.errors import ConfigError
from trainer.config.function_keys import check_functions, suggesting_loss_keys
from trainer.config.functions import ADVANTAGE_ESTIMATOR, inputs_of
from trainer.config.loss_config import LossConfig, loss_breaches


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(LossConfig):
    """All settings of a training run; saved in `OUT/config.json` with defaults resolved.

    Raises:
        ConfigError: A value is out of range, or two values contradict each other.

    Example:
        >>> TrainConfig(dataset="runs.parquet", model="smollm2", out="run").sequence_layout
        'merge'
    """

    dataset: str
    """Rollout dataset: a directory, a glob or one Parquet file, local or on any filesystem that
    fsspec supports (`s3://...`)."""
    model: str
    """Hugging Face model directory to start from (`config.json` and safetensors)."""
    out: str
    """Local directory of the run; must not contain a run, unless that run is resumed."""

    allow_other_tokenizer: bool = False
    """Train even if the model's tokenizer does not match the dataset's tokenizer fingerprint."""
    seed: CountOrZero = 0
    """Seed of torch, NumPy and random; from 0 to 2^32 - 1."""
    outcome: Literal["last", "sum"] | None = None
    """Return of a trajectory: the reward of its last step, or the sum over its steps. None: as the
    dataset specifies, else `last`. Token-level estimators use the rewards of every step in either
    case."""
    advantage_estimator: str = "grpo"
    """How advantages are estimated: per trajectory, from its return (`grpo`, `rloo`, `maxrl`); per
    token, from the reward of each step (`reinforce++`, `gae`); or by your own `module:function`:
    see docs/algorithms.md."""
    normalize_by_std: bool = True
    """GRPO: whether to divide by the group's standard deviation, or only subtract the group's mean."""
    advantage_batch_normalize: bool = False
    """Normalise the advantages of each batch's trained tokens to mean 0 and variance 1."""
    gamma: Fraction = 1.0
    """reinforce++ and gae: discount per trained token; in [0, 1]."""
    gae_lambda: Fraction = 1.0
    """gae: the estimator's lambda, from 0 (one-step differences) to 1 (returns minus values)."""
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
    compare the trajectories of a group (grpo, rloo, maxrl)."""
    drop_zero_variance_groups: bool = False
    """Leave out groups of two or more trajectories with equal returns, before batches are
    planned."""

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
    logprob_chunk_tokens: Count = 1024
    """Number of target tokens whose logits are in memory at once; >= 1."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, more time."""
    compile_layers: bool = False
    """Compile the layers with torch.compile, all but their attention: 1.6 times as fast on an H100,
    after 20 seconds of compilation."""
    replay_routing: bool = True
    """Mixture-of-experts models use the experts recorded in the dataset (`rollout_expert_indices`,
    R3); false ignores them."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the forward pass; weights and optimizer state are float32 either way. None:
    bfloat16 on a CUDA device, where float32 takes many times as long, and float32 on a CPU."""
    float32_head: bool = False
    """Compute the logits of the policy and the reference in float32 also with dtype=bfloat16: closer
    to a sampler that does so, for more time and memory (4 bytes per logit instead of 2)."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW from torch, or from bitsandbytes with 8-bit moments; also for the critic."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of the policy; > 0."""
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
    head. None: `model`, with a value head of zeros."""
    critic_learning_rate: Positive = 5e-6
    """gae: peak learning rate of the critic; > 0. Its optimizer otherwise uses the policy's
    settings."""
    value_clip: Positive | None = 0.2
    """gae: in the critic's loss, values are clipped to this distance from the old value; > 0. None:
    no clipping."""

    save_every_updates: Count | None = None
    """Optimizer steps between checkpoints; >= 1. None: only at the end, where a checkpoint is
    always saved."""
    keep_checkpoints: Count | None = None
    """Number of checkpoints to keep, newest first; >= 1. None: all."""
    record_tokens: Literal["none", "sampled", "all"] = "sampled"
    """Which tokens of each update are recorded in `OUT/tokens/` (docs/training.md): none; the tokens
    of 4 groups, chosen by `seed` and `global_step` (`sampled`); or all."""
    trackers: tuple[str, ...] = ()
    """Accelerate trackers that also receive the metrics, such as `tensorboard`."""

    @property
    def estimator_inputs(self) -> frozenset[str]:
        """Names of the arrays that the advantage estimator takes."""
        return inputs_of(ADVANTAGE_ESTIMATOR, self.advantage_estimator)

    @property
    def estimates_by_token(self) -> bool:
        """True if advantages are estimated per token, from the rewards of every step."""
        return "rewards" in self.estimator_inputs

    @property
    def compares_groups(self) -> bool:
        """True if advantages depend on the returns of a trajectory's group."""
        return not self.is_supervised and "group_index" in self.estimator_inputs

    @property
    def needs_critic(self) -> bool:
        """True if the advantage estimator uses values of a critic."""
        return "values" in self.estimator_inputs

    def __post_init__(self) -> None:
        check_functions(self)
        for key, got, expected in _breaches(self):
            raise ConfigError("config_value", key, got, expected)


_LIST_EXAMPLES = {
    "betas": "[0.9, 0.999]",
    "trackers": '["tensorboard"]',
    "lora_target_modules": '["q_proj", "v_proj"]',
}


def _breaches(c: TrainConfig) -> Iterator[tuple[str, str, str]]:
    yield from out_of_bounds(c)
    if c.seed >= 2**32:
        yield "seed", str(c.seed), "a number below 2^32, the limit of NumPy's generator"
    if "://" in c.out:
        yield "out", c.out, "a local directory, because checkpoints are synced and renamed there"
    yield from loss_breaches(c)
    if not all(0 <= beta < 1 for beta in c.betas):
        yield "betas", str(c.betas), "two numbers in [0, 1)"
    yield from _contradictions(c)


def _contradictions(c: TrainConfig) -> Iterator[tuple[str, str, str]]:
    if c.critic_model is not None and not c.needs_critic:
        expected = "gae, or a custom estimator that takes `values`"
        yield "critic_model and advantage_estimator", c.advantage_estimator, expected
    if c.is_supervised and c.needs_critic:
        loss, estimator = c.policy_loss_type, c.advantage_estimator
        expected = f"an estimator without a critic, because {loss} uses no advantages"
        yield "policy_loss_type and advantage_estimator", f"{loss} and {estimator}", expected
    if c.lora_target_modules is not None and not (c.lora_rank and c.lora_target_modules):
        got, expected = f"{c.lora_target_modules} and {c.lora_rank}", "module names and a rank"
        yield "lora_target_modules and lora_rank", got, expected
    if c.groups_per_batch % c.groups_per_mini_batch:
        keys = "groups_per_batch and groups_per_mini_batch"
        got = f"{c.groups_per_batch} and {c.groups_per_mini_batch}"
        yield keys, got, "groups_per_batch divisible by groups_per_mini_batch"


def load_config(
    toml_path: str | Path | None, overrides: Sequence[str], **options: str | float | None
) -> TrainConfig:
    """Read a configuration with `rollout_io.configuration.load_record`.

    Args:
        toml_path: TOML file with top-level keys, or None.
        overrides: `key=value` strings, which override file and options.
        options: Values by key, which override the file: `dataset`, `model`, `out` and others. A
            value of None is ignored.

    Raises:
        InputError: The file is unreadable.
        ConfigError: A key is unknown (the hint suggests the nearest name), a value has the wrong type or
            is out of range, or `dataset`, `model` or `out` is missing.

    Example:
        >>> paths = {"dataset": "ds", "model": "m", "out": "o"}
        >>> load_config(None, ["tis_ratio_type=none"], **paths).tis_ratio_type
    """
    required = dict.fromkeys(("dataset", "model", "out"), "a path")
    fields = TrainConfig.__dataclass_fields__
    with suggesting_loss_keys(read_toml(toml_path), overrides, fields):
        return load_record(
            TrainConfig,
            toml_path,
            overrides,
            options,
            required=required,
            list_examples=_LIST_EXAMPLES,
        )


def default_dtype() -> Literal["float32", "bfloat16"]:
    """Return the precision of a run that asks for none: bfloat16 on a CUDA device, else float32."""
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as JSON."""
    replace_text(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
