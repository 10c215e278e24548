"""The critic of gae: a value for what stands before each trained token, and its updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from schemas.errors import RolloutError
from trainer.config import TrainConfig
from trainer.data import Batch
from trainer.deal import own_forests
from trainer.forest import Forest
from trainer.policy import hidden_before_targets, load_policy
from trainer.processes import combine
from trainer.sharding import clip_gradient, under, without_reduction

VALUE_HEAD = "value_head.safetensors"


class Critic(nn.Module):
    """A linear value head on the last hidden states of a causal LM.

    It stays in evaluation mode, as the policy does. The language-model head is kept, for
    checkpoints, and not trained.

    Args:
        model: A causal LM, its own copy.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        trained = {id(parameter) for parameter in self.trained_parameters()}
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        self.eval()

    @property
    def _no_split_modules(self) -> Any:
        """What Accelerate asks for: the classes of layers to be sharded one by one."""
        return self.model._no_split_modules

    def forward(self, forest: Forest) -> Tensor:
        """[M] float32 value of what stands before each target: prompt and response up to it."""
        hidden = hidden_before_targets(self.model, forest)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
        return values.float()

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Those of the layers and of the value head."""
        yield from self.model.base_model.parameters()
        yield from self.value_head.parameters()

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the model directory and, beside it, `value_head.safetensors`.

        Args:
            path: The directory.
            weights: What is written, by name; None: the critic's own.
        """
        state = self.state_dict() if weights is None else weights
        self.model.save_pretrained(path, state_dict=under("model", state))
        save_file(under("value_head", state), path / VALUE_HEAD)


def load_critic(path: str, *, gradient_checkpointing: bool = False, trees: bool = False) -> Critic:
    """A critic from a model directory; its value head is zeros unless the directory holds one.

    With zeros every value is 0 at first, and gae starts from the discounted returns.

    Raises:
        RolloutError: The model cannot be loaded, or the value head is another model's.
    """
    loaded = load_policy(path, logprob_chunk_tokens=1, trees=trees)
    if gradient_checkpointing:
        loaded.checkpoint_layers()
    critic = Critic(loaded.model)
    head = Path(path) / VALUE_HEAD
    if head.is_file():
        try:
            critic.value_head.load_state_dict(load_file(head))
        except (OSError, RuntimeError, SafetensorError) as error:
            got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            expected = "the value head of this model"
            raise RolloutError("model_load", str(head), got, expected) from error
    return critic


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticLearner:
    """The critic, prepared by `accelerator` like its optimizer."""

    accelerator: Accelerator
    critic: Critic
    optimizer: torch.optim.Optimizer
    config: TrainConfig


@torch.no_grad()
def critic_values(learner: CriticLearner, batch: Batch, forests: Sequence[Forest]) -> Tensor:
    """Values at the targets of `forests` as the critic is, without gradient.

    Returns:
        [T] float32 on the CPU; NaN at response tokens that are no target.
    """
    accelerator, values = learner.accelerator, torch.zeros(len(batch.trains))
    for _, forest in own_forests(accelerator, forests):
        values[forest.target_slot] = learner.critic(forest.to(accelerator.device)).cpu()
    return combine(accelerator, values, forests)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None
) -> Tensor:
    """Squared error of the values, kept from paying for long steps (PPO, as in Baselines' ppo2).

        V' = V_old + clip(V - V_old, -clip, clip)
        loss = 0.5 * max((V - target)^2, (V' - target)^2)

    Args:
        values: [M] of the critic now, with gradient.
        old_values: [M] of the critic at the start of the batch.
        targets: [M] gae's A + V_old, before whitening.
        clip: Furthest a value may move for gain; None: 0.5 * (V - target)^2.

    Returns:
        [M] loss per target, not reduced.
    """
    losses = (values - targets) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (near - targets) ** 2)
    return 0.5 * losses


def update_critic(
    learner: CriticLearner,
    forests: Sequence[Forest],
    old_values: Tensor,
    targets: Tensor,
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch's value loss and step.

    The loss is the mean over the mini-batch's targets, however it is cut into micro-batches. No
    step is made where nothing trains or the gradient is not finite.

    Args:
        learner: Critic and optimizer.
        forests: Micro-batches of the mini-batch, together its every target once; each process
            forwards its share of them.
        old_values: [T] of the critic at the batch's start.
        targets: [T] what the values should be.

    Returns:
        Metrics.
    """
    num_trained, clip = sum(forest.num_targets for forest in forests), learner.config.value_clip
    accelerator, device = learner.accelerator, learner.accelerator.device
    sums, own = torch.zeros(3, device=device), own_forests(accelerator, forests)
    for done, (_, forest) in enumerate(own, start=1):
        slot = forest.target_slot
        with without_reduction(learner.critic) if done < len(own) else nullcontext():
            values = learner.critic(forest.to(device))
            old, target = old_values[slot].to(device), targets[slot].to(device)
            losses = clipped_value_loss(values, old, target, clip=clip)
            accelerator.backward(losses.sum() / num_trained * accelerator.num_processes)
        with torch.no_grad():
            clipped = losses > clipped_value_loss(values, old, target, clip=None)
            sums += torch.stack([losses.sum(), values.sum(), clipped.float().sum()])
    sums = accelerator.reduce(sums, reduction="sum")
    loss, value, clipped_fraction = (sums / max(num_trained, 1)).tolist()
    return {
        "critic/critic_loss": loss,
        "critic/values_mean": value,
        "critic/values_clipfrac": clipped_fraction,
        "critic/grad_norm": _step(learner) if num_trained else 0.0,
    }


def _step(learner: CriticLearner) -> float:
    """Clip the gradient and step, unless the gradient is not finite; its norm before clipping."""
    grad_norm = clip_gradient(learner.critic.parameters(), learner.config.max_grad_norm)
    if math.isfinite(grad_norm):
        learner.optimizer.step()
    learner.optimizer.zero_grad()
    return grad_norm
