"""The one record that configures a training run: TOML, then `key=value`, then checks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout_io.configuration import load_record
from rollout_io.files import replace_text
from schemas.errors import RolloutError
from trainer.loss_config import LossConfig, loss_breaches


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(LossConfig):
    """Everything that decides what a run does. The resolved record is saved as `OUT/config.json`.

    Raises:
        RolloutError: A value is out of its range, or two values contradict each other.

    Example:
        >>> TrainConfig(dataset="runs.parquet", model="smollm2", out="run").sequence_layout
        'merge'
    """

    dataset: str
    """Rollout dataset: a directory, a glob or one Parquet file, local or anywhere that fsspec knows
    (`s3://...`)."""
    model: str
    """Hugging Face model directory to start from (`config.json` and safetensors)."""
    out: str
    """Local directory of the run; must not hold a run yet, unless that one is resumed."""

    allow_other_tokenizer: bool = False
    """Train though the model's tokenizer is not the one whose fingerprint the dataset has."""
    seed: int = 0
    """Seed of torch, NumPy and random; from 0 to 2^32 - 1."""
    outcome: Literal["last", "sum"] = "last"
    """Return of a trajectory: its last step's reward, or the sum over its steps. What is estimated
    token by token takes the rewards of every step, whichever this is."""
    advantage_estimator: Literal["grpo", "rloo", "maxrl", "reinforce++", "gae"] = "grpo"
    """From a trajectory's return (grpo, rloo, maxrl), or token by token along its steps, from the
    rewards of each of them (reinforce++, gae): see docs/algorithms.md."""
    normalize_by_std: bool = True
    """GRPO: divide by the group's standard deviation; false leaves reward minus group mean."""
    advantage_batch_normalize: bool = False
    """Bring the advantages of each batch's trained tokens to mean 0 and variance 1."""
    gamma: float = 1.0
    """reinforce++ and gae: discount per trained token; in [0, 1]."""
    gae_lambda: float = 1.0
    """gae: from 0, differences of neighbouring values, to 1, returns less values."""
    failed: Literal["group", "trajectory"] = "group"
    """What one failed trajectory masks: its whole group, or only itself."""
    group_size: int | None = None
    """Trajectories that every group should have; >= 1. None: as many as the largest group has."""
    partial_groups: Literal["refuse", "mask", "train"] = "refuse"
    """What becomes of a group with another number of trajectories than `group_size`, failed ones
    counted, where groups have baselines (grpo, rloo, maxrl): the run is refused; the group is
    masked; or it trains with those it has, after a warning."""
    drop_zero_variance_groups: bool = False
    """Leave out groups of two or more whose returns are all equal, before batches are planned."""

    groups_per_batch: int = 8
    """Groups that share one `old_logprobs` pass; >= 1."""
    groups_per_mini_batch: int = 8
    """Groups per optimizer step; >= 1, divides `groups_per_batch`."""
    epochs_per_batch: int = 1
    """Times a batch's mini-batches are gone through; >= 1."""
    num_epochs: int = 1
    """Times the dataset is gone through; >= 1."""
    max_updates: int | None = None
    """Optimizer steps after which the run ends; >= 1. None: no limit."""

    sequence_layout: Literal["step", "merge", "tree"] = "merge"
    """What is forwarded: every step; steps that continue each other, merged; or, as a tree, each
    distinct token of the steps once, with the numbers of `step`."""
    tree_scope: Literal["trajectory", "group"] = "group"
    """tree: which steps share tokens, those of a trajectory or those of a whole group."""
    tokens_per_micro_batch: int = 2048
    """Most tokens in one forward; >= 1. Memory grows with it, time hardly does."""
    logprob_chunk_tokens: int = 1024
    """Target tokens whose logits exist at once; >= 1."""
    gradient_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass: less memory, more time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass; weights and optimizer state are float32 either way."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW of torch, or that of bitsandbytes, which keeps its moments in 8 bits; of the critic too."""
    learning_rate: float = 1e-6
    """The policy's, at its highest; > 0."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warmup: as it is, or down towards 0 over the planned updates; of the critic too."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises evenly; >= 0."""
    weight_decay: float = 1e-2
    """AdamW, decoupled; >= 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW decay rates of the two moments; in [0, 1)."""
    max_grad_norm: float = 1.0
    """The gradient's L2 norm is clipped to this; > 0."""

    lora_rank: int | None = None
    """Rank of the adapters that train in place of the policy's weights; >= 1. None: no adapters. The
    critic's own weights train either way."""
    lora_alpha: int = 16
    """The adapters' output is multiplied by this over `lora_rank`; >= 1."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names, or ends of names, of the linear layers with an adapter. None: all but the head."""

    critic_model: str | None = None
    """gae: model directory the critic starts from; one that a checkpoint's `critic/` holds keeps its
    value head. None: `model`, with a value head of zeros."""
    critic_learning_rate: float = 5e-6
    """gae: the critic's learning rate, at its highest; > 0. Its other settings are the policy's."""
    value_clip: float | None = 0.2
    """gae: a value is clipped to its distance from the old one in the critic's loss; > 0. None: not
    clipped."""

    save_every_updates: int | None = None
    """Optimizer steps between checkpoints; >= 1. None: only at the end, where one is always
    saved."""
    keep_checkpoints: int | None = None
    """Newest checkpoints that stay when another is saved; >= 1. None: all."""
    trackers: tuple[str, ...] = ()
    """Accelerate trackers that get the metrics too, such as `tensorboard`."""

    def __post_init__(self) -> None:
        for key, got, expected in _breaches(self):
            raise RolloutError("config_value", key, got, expected)


_LIST_EXAMPLES = {
    "betas": "[0.9, 0.999]",
    "trackers": '["tensorboard"]',
    "lora_target_modules": '["q_proj", "v_proj"]',
}


_AT_LEAST = {
    "seed": 0,
    "groups_per_batch": 1,
    "groups_per_mini_batch": 1,
    "epochs_per_batch": 1,
    "num_epochs": 1,
    "max_updates": 1,
    "group_size": 1,
    "tokens_per_micro_batch": 1,
    "logprob_chunk_tokens": 1,
    "save_every_updates": 1,
    "keep_checkpoints": 1,
    "weight_decay": 0,
    "warmup_updates": 0,
    "lora_rank": 1,
    "lora_alpha": 1,
}
_ABOVE_0 = ("learning_rate", "max_grad_norm", "critic_learning_rate", "value_clip")


def _breaches(c: TrainConfig) -> Iterator[tuple[str, str, str]]:
    for key, least in _AT_LEAST.items():
        value = getattr(c, key)
        if value is not None and not least <= value < float("inf"):
            yield key, str(value), f"a finite number >= {least}"
    for key in _ABOVE_0:
        value = getattr(c, key)
        if value is not None and not 0 < value < float("inf"):
            yield key, str(value), "a finite number > 0"
    if c.seed >= 2**32:
        yield "seed", str(c.seed), "below 2^32, as NumPy's generator has it"
    if "://" in c.out:
        yield "out", c.out, "a local directory: checkpoints are synced and renamed there"
    yield from loss_breaches(c)
    for key in ("gamma", "gae_lambda"):
        if not 0 <= getattr(c, key) <= 1:
            yield key, str(getattr(c, key)), "a number in [0, 1]"
    if not all(0 <= beta < 1 for beta in c.betas):
        yield "betas", str(c.betas), "two numbers in [0, 1)"
    yield from _contradictions(c)


def _contradictions(c: TrainConfig) -> Iterator[tuple[str, str, str]]:
    if c.critic_model is not None and c.advantage_estimator != "gae":
        expected = "advantage_estimator to be gae, which alone has a critic"
        yield "critic_model and advantage_estimator", c.advantage_estimator, expected
    if c.policy_loss_type == "cross_entropy" and c.advantage_estimator == "gae":
        expected = "another estimator: cross_entropy uses no advantages, and needs no critic"
        yield "policy_loss_type and advantage_estimator", "cross_entropy and gae", expected
    if c.lora_target_modules is not None and not (c.lora_rank and c.lora_target_modules):
        got, expected = f"{c.lora_target_modules} and {c.lora_rank}", "names, and a rank"
        yield "lora_target_modules and lora_rank", got, expected
    if c.groups_per_batch % c.groups_per_mini_batch:
        keys = "groups_per_batch and groups_per_mini_batch"
        got = f"{c.groups_per_batch} and {c.groups_per_mini_batch}"
        yield keys, got, "groups_per_batch to be a multiple of groups_per_mini_batch"


def load_config(toml_path: str | Path | None, overrides: Sequence[str]) -> TrainConfig:
    """Read a configuration.

    Args:
        toml_path: TOML file of top-level keys, or None.
        overrides: `key=value` strings, which win over the file; the last one of a key wins.
            Values are written as in TOML, but text needs no quotes. `none` is None, and so is
            `"none"` in a file.

    Raises:
        RolloutError: Unreadable file, unknown key (the nearest name is the hint), a value of the
            wrong type or out of range, or a missing `dataset`, `model` or `out`.

    Example:
        >>> paths = ["dataset=ds", "model=m", "out=o"]
        >>> load_config(None, [*paths, "tis_ratio_type=none"]).tis_ratio_type
    """
    required = dict.fromkeys(("dataset", "model", "out"), "a path")
    return load_record(
        TrainConfig, toml_path, overrides, required=required, list_examples=_LIST_EXAMPLES
    )


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved record as JSON."""
    replace_text(path, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
