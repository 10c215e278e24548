"""Load models and optimizers, and check the dataset against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from schemas.errors import count
from trainer.config.sections import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.distributed.sharding import wrap, wrap_frozen
from trainer.models.critic import Critic, load_critic
from trainer.models.layers import compile_layers, num_layers
from trainer.models.lora import WithoutAdapter, add_adapter
from trainer.models.optimizer import make_optimizer
from trainer.models.policy import (
    Policy,
    align,
    has_shapes_only,
    load_policy,
    refuse_quantised,
    use_float32_head,
)
from trainer.run.checkpoint import other_files
from trainer.run.messages import say, warn
from trainer.run.run import Run

Models = tuple[Policy, Policy | None, Critic | None]
"""The policy to train, the reference of the KL divergence and the critic, as far as a run needs them."""


def load_models(config: TrainConfig, checkpoint: Path | None) -> Models:
    """Load the models; the policy and the critic come from `checkpoint`, if given.

    Raises:
        RolloutError: A model cannot be trained as configured.
    """
    for path in (
        config.model.path,
        *([config.model.critic_model] if config.model.critic_model else []),
    ):
        refuse_quantised(path)
    if left_out := other_files(Path(config.model.path))[1]:
        names = ", ".join(map(str, left_out[:8])) + (", ..." if len(left_out) > 8 else "")
        say(
            f"note: checkpoints leave out {count(len(left_out), 'entry')} of {config.model.path} (links out"
            f" of it, directories of other models, or unreadable): {names}"
        )
    policy = _policy(config, checkpoint)
    reference, critic = load_reference(config), _critic(config, checkpoint)
    if config.model.float32_head:
        for head in filter(None, (policy, reference)):
            use_float32_head(head.model)
    if auxiliary_losses(policy.model.config):
        warn(
            "config.json sets output_router_logits, but this trainer ignores auxiliary losses of routers"
            " (load balancing): watch the routing of experts over many updates"
        )
    recomputes = config.model.gradient_checkpointing
    has_values = not has_shapes_only()
    for trained in filter(None, (policy, critic)) if has_values else ():
        align(trained)
    if has_values and compiles(config.model, policy):
        compile_layers(policy.model, recomputes=recomputes)
    elif recomputes:
        policy.checkpoint_layers()
    return policy, reference, critic


def compiles(config: ModelConfig, policy: Policy) -> bool:
    """True if the layers of a policy are compiled: by default on a CUDA device, if possible."""
    if config.compile_layers is None:
        return torch.cuda.is_available() and num_layers(policy.model) > 0
    return config.compile_layers


def prepare(accelerator: Accelerator, config: TrainConfig, models: Models) -> Run:
    """Create the optimizers, and place models and optimizers on the run's processes and devices.

    Raises:
        RolloutError: The launch settings are not supported, or an optimizer's package is missing.
    """
    (policy, reference, critic), settings = models, config.optimizer
    device, critic_optimizer, frozen = accelerator.device, None, None
    if critic:
        trained, rate = critic.trained_parameters(), settings.critic_learning_rate
        critic_optimizer = make_optimizer(trained, settings, learning_rate=rate, device=device)
        critic, critic_optimizer = wrap(accelerator, critic, critic_optimizer)
    trained, rate = policy.parameters(), config.learning_rate
    optimizer = make_optimizer(trained, settings, learning_rate=rate, device=device)
    policy, optimizer = wrap(accelerator, policy, optimizer)
    if reference:
        frozen = wrap_frozen(accelerator, reference)
    elif config.loss.needs_reference:
        frozen = WithoutAdapter(policy)
    return Run(
        config=config,
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=frozen,
        critic=critic,
        critic_optimizer=critic_optimizer,
        corrects=config.loss.corrects_for_sampler,
        source=Path(config.model.path).absolute(),
    )


def auxiliary_losses(config: Any) -> bool:
    """True if a model's configuration asks for auxiliary losses of its routers."""
    return any(
        getattr(c, "output_router_logits", False) for c in (config, config.get_text_config())
    )


def _policy(config: TrainConfig, checkpoint: Path | None) -> Policy:
    """Load the policy from the checkpoint, or from `config.model.path` if there is none."""
    policy = load_policy(
        str(config.model.path if config.model.lora_rank else checkpoint or config.model.path),
        logprob_chunk_tokens=config.model.logprob_chunk_tokens,
        entropy_gradient=config.loss.entropy_loss_coef > 0,
        trees=config.batch.sequence_layout == "tree",
    )
    if config.model.lora_rank:
        add_adapter(policy, config.model, checkpoint and checkpoint / "adapter")
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        say(f"note: LoRA trains {trained:,} parameters")
    return policy


def load_reference(config: TrainConfig) -> Policy | None:
    """Load the frozen reference; None if not needed, or if the policy's base weights are used."""
    if not config.loss.needs_reference or (
        config.model.lora_rank and not config.loss.reference_model
    ):
        return None
    path = config.loss.reference_model or config.model.path
    trees = config.batch.sequence_layout == "tree"
    return load_policy(path, logprob_chunk_tokens=config.model.logprob_chunk_tokens, trees=trees)


def _critic(config: TrainConfig, checkpoint: Path | None) -> Critic | None:
    if not config.advantage.needs_critic:
        return None
    path = (
        str(checkpoint / "critic") if checkpoint else config.model.critic_model or config.model.path
    )
    trees = config.batch.sequence_layout == "tree"
    return load_critic(
        path, gradient_checkpointing=config.model.gradient_checkpointing, trees=trees
    )
