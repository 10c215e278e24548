"""Before the first update: models, optimizers, and every check of the dataset against them."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

import rollout_io
from schemas.errors import RolloutError
from trainer.advice import warnings_before
from trainer.checks import check_rows, corrects_for_sampler
from trainer.config import TrainConfig
from trainer.critic import CriticLearner, make_critic_learner
from trainer.data import index_rows
from trainer.forest import RowLimit
from trainer.log import say
from trainer.lora import WithoutAdapter, add_adapter
from trainer.optimizer import make_optimizer
from trainer.plan import Plan
from trainer.policy import Policy, load_policy, row_limit
from trainer.update import Learner


def prepare(
    config: TrainConfig, rollouts: pl.LazyFrame, plan: Plan, checkpoint: Path | None
) -> tuple[Learner, CriticLearner | None, RowLimit]:
    """Load the models, check every row against them, make the optimizers.

    Policy and critic are those of `checkpoint`, if there is one; the reference never is.

    Raises:
        RolloutError: A model or a row cannot be trained as asked.
    """
    accelerator = _accelerator(config)
    policy = _policy(config, checkpoint)
    reference = _reference(config, accelerator)
    models, critic = [p.model for p in (policy, reference) if p], None
    if config.advantage_estimator == "gae":
        start = config.critic_model or config.model
        start = str(checkpoint / "critic") if checkpoint else start
        critic = make_critic_learner(accelerator, config, start)
        models.append(accelerator.unwrap_model(critic.critic).model)
    limits = [row_limit(model.config, config.tokens_per_micro_batch) for model in models]
    limit = min(limits, key=lambda limit: limit.num_tokens)
    vocab_size = min(model.get_input_embeddings().weight.shape[0] for model in models)
    rows = check_rows(index_rows(rollouts), plan, config, vocab_size=vocab_size, limit=limit)
    logprobs_mode = rollout_io.read_metadata(config.dataset).logprobs_mode
    corrects = corrects_for_sampler(rows, config, logprobs_mode)
    if config.corrects_for_sampler and not corrects:
        say("note: no rollout_logprobs: importance correction (tis_ratio_type) is off")
    for text in warnings_before(rows, plan, config).values():
        say(f"warning: {text}")
    if config.gradient_checkpointing:
        policy.checkpoint_layers()
    rate, device = config.learning_rate, accelerator.device
    optimizer = make_optimizer(policy.parameters(), config, learning_rate=rate, device=device)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    without_own_weights = config.needs_reference and reference is None
    learner = Learner(
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        config=config,
        corrects=corrects,
        reference=WithoutAdapter(policy) if without_own_weights else reference,
    )
    return learner, critic, limit


def _policy(config: TrainConfig, checkpoint: Path | None) -> Policy:
    """That of `checkpoint`, if there is one: its model, or its adapter in the model it began as."""
    policy = load_policy(
        str(config.model if config.lora_rank else checkpoint or config.model),
        logprob_chunk_tokens=config.logprob_chunk_tokens,
        entropy_gradient=config.entropy_loss_coef > 0,
    )
    if config.lora_rank:
        add_adapter(policy, config, checkpoint and checkpoint / "adapter")
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        say(f"note: LoRA: {trained} parameters train")
    return policy


def _reference(config: TrainConfig, accelerator: Accelerator) -> Policy | None:
    """The frozen policy that the KL divergence is from, if one with weights of its own is needed."""
    if not config.needs_reference or (config.lora_rank and not config.reference_model):
        return None
    path = config.reference_model or config.model
    reference = load_policy(path, logprob_chunk_tokens=config.logprob_chunk_tokens)
    reference.requires_grad_(requires_grad=False)
    prepared: Policy = accelerator.prepare_model(reference, evaluation_mode=True)
    return prepared


def _accelerator(config: TrainConfig) -> Accelerator:
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in config.trackers:
        if tracker not in available:
            expected = f"one of those installed: {', '.join(available) or 'none'}"
            raise RolloutError("config_value", "trackers", f"`{tracker}`", expected)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.dtype == "bfloat16" else "no",
        log_with=list(config.trackers) or None,
        project_dir=config.out,
    )
    if accelerator.num_processes > 1:
        got = f"{accelerator.num_processes} processes"
        raise RolloutError("processes", "launch", got, "one", "start without `accelerate launch`")
    return accelerator
