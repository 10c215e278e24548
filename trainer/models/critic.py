"""The critic for gae: it predicts the value of the context before each trained token."""

from __future__ import annotations

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

from schemas.errors import InputError
from trainer.batches.data import Batch
from trainer.batches.forest import Forest
from trainer.batches.transfer import Arriving, columns_to_device
from trainer.config.loss_config import LossConfig
from trainer.config.sections import OptimizerConfig
from trainer.distributed.balance import Watch, own_forests
from trainer.distributed.processes import combine
from trainer.distributed.sharding import under, without_reduction
from trainer.models.optimizer import clip_and_step
from trainer.models.policy import hidden_before_targets, load_policy

VALUE_HEAD = "value_head.safetensors"


class Critic(nn.Module):
    """A linear value head on the last hidden states of a causal LM.

    The critic stays in evaluation mode, like the policy. The language-model head is kept for
    checkpoints, but not trained. The model must not be shared with the policy.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(
            model.config.get_text_config().hidden_size, 1, dtype=torch.float32
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        trained = {id(parameter) for parameter in self.trained_parameters()}
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
        self.eval()

    @property
    def _no_split_modules(self) -> Any:
        """Classes of layers that FSDP shards one by one; Accelerate reads this attribute."""
        return self.model._no_split_modules

    def forward(self, forest: Forest) -> Tensor:
        """Compute the value of the prompt and response before each target ([M] float32)."""
        hidden = hidden_before_targets(self.model, forest)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]
        return values.float()

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers and of the value head."""
        yield from self.model.base_model.parameters()
        yield from self.value_head.parameters()

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the model and its value head, from `weights` if given, else from memory."""
        state = self.state_dict() if weights is None else weights
        self.model.save_pretrained(path, state_dict=under("model", state))
        save_file(under("value_head", state), path / VALUE_HEAD)


def load_critic(path: str, *, gradient_checkpointing: bool = False, trees: bool = False) -> Critic:
    """Load a critic from a model directory; a missing value head is initialised with zeros.

    In that case, all values are 0 at first, so the first advantages depend only on the rewards.

    Raises:
        InputError: The model cannot be loaded, or the value head belongs to a different model.
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
            hint = "remove this file to start with a value head of zeros"
            got = f"cannot be loaded as the value head of this model: {got}"
            raise InputError("model_load", str(head), got, hint=hint) from error
    return critic


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticLearner:
    """The critic and its optimizer, both prepared by `accelerator`.

    Attributes:
        accelerator: Provides the device, the precision and gradient reduction.
        critic: The critic.
        optimizer: Optimizer of the critic.
        loss: Provides `value_clip`.
        optimization: Peak learning rate and maximum norm of the gradient.
    """

    accelerator: Accelerator
    critic: Critic
    optimizer: torch.optim.Optimizer
    loss: LossConfig
    optimization: OptimizerConfig


@torch.no_grad()
def critic_values(
    learner: CriticLearner, batch: Batch, forests: Sequence[Forest], watch: Watch = iter
) -> Tensor:
    """Compute the critic's values at the targets of `forests`, without gradient.

    Returns:
        [T] float32 on the CPU; NaN at response tokens that are not targets.
    """
    accelerator, values, parts = learner.accelerator, torch.zeros(len(batch.trains)), []
    for _, forest in watch(own_forests(accelerator, forests)):
        found = learner.critic(forest.to(accelerator.device))
        parts.append((forest.target_slot, Arriving({"values": found})))
    for slot, arriving in parts:
        values[slot] = arriving.read()["values"]
    return combine(accelerator, values, forests)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None
) -> Tensor:
    """Compute the clipped squared error of values (PPO, as in OpenAI Baselines' ppo2).

        V' = V_old + clip(V - V_old, -clip, clip)
        loss = 0.5 * max((V - target)^2, (V' - target)^2)

    Args:
        values: [M] current values, with gradient.
        old_values: [M] values at the start of the batch.
        targets: [M] gae's A + V_old, before whitening.
        clip: Maximum change of a value before the loss is clipped; None: no clipping.

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
    watch: Watch = iter,
) -> dict[str, float]:
    """Accumulate the gradient of one mini-batch's value loss and take an optimizer step.

    The loss is the mean over the mini-batch's targets, independent of micro-batches. No step is
    taken if there are no targets or the gradient is not finite.

    Args:
        learner: Critic and optimizer.
        forests: Micro-batches, which together contain every target of the mini-batch once; each
            process forwards its share of them.
        old_values: [T] values at the start of the batch.
        targets: [T] target values.
        watch: Wraps the iteration over micro-batches, to show progress.

    Returns:
        Loss, mean value, clipped fraction and gradient norm, by metric name.
    """
    num_trained, clip = sum(forest.num_targets for forest in forests), learner.loss.value_clip
    accelerator, device = learner.accelerator, learner.accelerator.device
    sums, own = torch.zeros(3, device=device), own_forests(accelerator, forests)
    for done, (_, forest) in enumerate(watch(own), start=1):
        slot = forest.target_slot
        with without_reduction(learner.critic) if done < len(own) else nullcontext():
            values = learner.critic(forest.to(device))
            known = {"old": old_values[slot], "target": targets[slot]}
            known = columns_to_device(known, device)
            losses = clipped_value_loss(values, known["old"], known["target"], clip=clip)
            accelerator.backward(losses.sum() / num_trained * accelerator.num_processes)
        with torch.no_grad():
            clipped = losses > clipped_value_loss(values, known["old"], known["target"], clip=None)
            sums += torch.stack([losses.sum(), values.sum(), clipped.float().sum()])
    sums = accelerator.reduce(sums, reduction="sum")
    loss, value, clipped_fraction = (sums / max(num_trained, 1)).tolist()
    grad_norm = 0.0
    if num_trained:
        parameters, max_norm = learner.critic.parameters(), learner.optimization.max_grad_norm
        grad_norm = clip_and_step(parameters, learner.optimizer, max_norm)
    return {
        "critic/critic_loss": loss,
        "critic/values_mean": value,
        "critic/values_clipfrac": clipped_fraction,
        "critic/grad_norm": grad_norm,
    }
