"""A run: its models, their optimizers, where it stands, and the dataset that it learns from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from schemas.ragged import IntArray
from trainer.batches.forest import RowLimit
from trainer.batches.pictures import PictureReader
from trainer.batches.plan import Plan
from trainer.config.train_config import TrainConfig
from trainer.models.critic import Critic
from trainer.models.lora import WithoutAdapter
from trainer.models.policy import Policy, row_limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Position of a run between two mini-batches.

    Attributes:
        batches_done: Completed batches, over all epochs.
        mini_batches_done: Completed mini-batches of the current batch, over its `epochs_per_batch`
            epochs.
        kl_coef: Coefficient of the divergence in the current batch's reward.
        outputs: Model outputs at the start of the current batch, [T] float32 on the CPU, by name:
            see `Batch.outputs`. Empty between batches.
        local_slots: With several processes, the [T] indices of the outputs of this process among those
            of all, and the number of all; None: the outputs are complete, as in a checkpoint.
    """

    batches_done: int = 0
    mini_batches_done: int = 0
    kl_coef: float
    outputs: dict[str, Tensor] = field(default_factory=dict)
    local_slots: tuple[IntArray, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        position: Position of the run.
        global_step: Optimizer steps taken.
        num_skipped: Mini-batches without an optimizer step.
        trained_groups: Groups that contributed a gradient to a step.
    """

    position: Position
    global_step: int = 0
    num_skipped: int = 0
    trained_groups: frozenset[str] = frozenset()

    def after(self, position: Position, groups: frozenset[str], *, stepped: bool) -> Progress:
        """Return the progress after a mini-batch in which these groups have a gradient."""
        return Progress(
            position=position,
            global_step=self.global_step + stepped,
            num_skipped=self.num_skipped + (not stepped),
            trained_groups=self.trained_groups | groups if stepped else self.trained_groups,
        )

    @property
    def num_mini_batches(self) -> int:
        """Number of mini-batches so far, with or without a step; each has a line of metrics."""
        return self.global_step + self.num_skipped


START = Progress(position=Position(kl_coef=0.0))


_NO_PLAN = Plan(trajectories=pl.DataFrame(), batches=(), num_groups_without_variance=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run consists of. Its models and optimizers change with every update, its fields do not.

    `rollouts rl` opens its models before it has sampled a dataset: then the fields from `rollouts`
    on have their defaults, and each iteration is a copy with its dataset.

    Attributes:
        config: Configuration of the run.
        accelerator: Provides the device, the precision and the reduction of gradients.
        policy: The policy, prepared by `accelerator`.
        optimizer: Optimizer of the policy, prepared by `accelerator`.
        reference: The frozen reference of the KL divergence; None if not needed.
        critic: Critic of the advantage estimator, prepared by `accelerator`; None if not needed.
        critic_optimizer: Optimizer of the critic, prepared by `accelerator`.
        corrects_for_sampler: Whether importance weights and masks apply.
        source: Absolute path of the model directory from which the run started.
        checkpoint: Checkpoint from which the run resumes; None: it starts from the configured models.
        progress: Progress from which the run starts or resumes.
        digest: Identifies the data of the run in its checkpoints.
        pictures: Reads the pictures of the dataset; None: none are shown.
        rollouts: The dataset.
        plan: Plan of one pass over the dataset.
        num_planned: Maximum number of updates of the run.
        num_greedy_rows: Rows masked because they were sampled at temperature 0.
        kept_metrics: Lines of `metrics.jsonl` up to `progress`.
        first_batch: Number of batches completed before the plan's first batch; 0 except in
            `rollouts rl`, where each iteration has a separate plan.
    """

    config: TrainConfig
    accelerator: Accelerator
    policy: Policy
    optimizer: torch.optim.Optimizer
    reference: nn.Module | None = None
    critic: Critic | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    corrects_for_sampler: bool = False
    source: Path = Path()
    checkpoint: Path | None = None
    progress: Progress = START
    digest: str = ""
    pictures: PictureReader | None = None
    rollouts: pl.LazyFrame = field(default_factory=pl.LazyFrame)
    plan: Plan = _NO_PLAN
    num_planned: int = 0
    num_greedy_rows: int = 0
    kept_metrics: bytes = b""
    first_batch: int = 0

    @property
    def out(self) -> Path:
        """Directory of the run."""
        return Path(self.config.run.out)

    @property
    def whole_policy(self) -> Policy:
        """The policy without the wrappers of `accelerator`, which exchange values in each forward."""
        policy: Policy = self.accelerator.unwrap_model(self.policy)
        return policy

    @property
    def optimizers(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Models with their optimizers, by the name of the optimizer's state in a checkpoint."""
        trained: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
            "optimizer": (self.policy, self.optimizer)
        }
        if self.critic is not None and self.critic_optimizer is not None:
            trained["critic_optimizer"] = self.critic, self.critic_optimizer
        return trained

    @property
    def row_limit(self) -> RowLimit:
        """Maximum length of a row: that of the model which takes the least."""
        limits = (row_limit(model.config) for model in self.models.values())
        return min(limits, key=lambda limit: limit.num_tokens)

    @property
    def vocab_size(self) -> int:
        """Token ids from 0 to vocab_size - 1 are valid in all models."""
        embeddings = (model.get_input_embeddings() for model in self.models.values())
        return min(int(embedding.weight.shape[0]) for embedding in embeddings)

    @property
    def models(self) -> dict[str, Any]:
        """The Transformers models, by role."""
        wrapped = {"policy": self.policy, "reference": self.reference, "critic": self.critic}
        return {
            role: self.accelerator.unwrap_model(model).model
            for role, model in wrapped.items()
            # The policy without its adapters is no model of its own.
            if model is not None and not isinstance(model, WithoutAdapter)
        }
